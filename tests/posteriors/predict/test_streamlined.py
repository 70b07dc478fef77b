"""One pass of means and variances: traces that hold for all batches, and whole networks against Monte Carlo."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import Categorical, Gaussian, Laplace, Model
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.streamlined import Moments, rule
from dubito.posteriors.predict.streamlined.moments import KEYWORDS, RULES
from dubito.posteriors.predict.streamlined.trace import Size, canonical, refs

DRAWS = 40_000
ACTIVATIONS = {
    "relu": nn.ReLU, "leaky": lambda: nn.LeakyReLU(0.1), "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid,
    "elu": nn.ELU, "softplus": nn.Softplus, "logsigmoid": nn.LogSigmoid,
}  # fmt: skip


def mlp(*widths: int, activation=nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def around(network: nn.Module, variance: float = 0.004, only: str = "", likelihood=None) -> Posterior:
    """A Gaussian with the same variance for every weight."""
    model = Model(network, likelihood or Gaussian(scale=0.1), only=only)
    mean = {name: leaf for name, leaf in model.parameters().items() if ":" not in name}
    return Posterior.diagonal(model, mean, {name: torch.full_like(leaf, variance) for name, leaf in mean.items()})


def kl(p, q) -> float:
    """Mean divergence of output marginals, from p (the truth) to q."""
    ratio = p.f_var / q.f_var
    return float((0.5 * (ratio - 1 - ratio.log() + (p.f_mean - q.f_mean) ** 2 / q.f_var)).mean())


def deviation(p, q) -> float:
    """Largest relative error of a standard deviation, averaged over outputs."""
    return float(((q.f_var / p.f_var).sqrt().mean(-1) - 1).abs().max())


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [1, 2, 4])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_networks_against_monte_carlo(name, hidden):
    """The adjoint and the full covariance to Monte Carlo's own error; variances alone with one hidden layer."""
    posterior = around(mlp(4, *[24] * hidden, 2, activation=ACTIVATIONS[name]))
    x = torch.randn(4, 4)
    truth = posterior.predict(x, "sampled", draws=DRAWS)
    floor = 3 / DRAWS
    for how, options in (("adjoint", {}), ("streamlined", {"rank": -1})):
        found = posterior.predict(x, how, **options)
        assert kl(truth, found) < 0.001 + floor
        assert deviation(truth, found) < 0.03
    variances = posterior.predict(x, "streamlined", rank=0)
    assert kl(truth, variances) < (0.003 if hidden == 1 else 0.05)


def test_large_variances():
    """As large as a real posterior's: the linearised network is far off, and the adjoint is not."""
    posterior = around(mlp(4, 32, 32, 2), variance=0.05)
    x = torch.randn(6, 4)
    truth = posterior.predict(x, "sampled", draws=DRAWS)
    assert kl(truth, posterior.predict(x, "adjoint")) < 0.01
    assert kl(truth, posterior.predict(x, "linearized")) > 0.1


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "lowrank", "dense"])
@pytest.mark.parametrize("only", ["", r"^4\."])
def test_every_structure(structure, only):
    x, y = torch.randn(40, 3), torch.randint(3, (40,))
    model = Model(mlp(3, 12, 12, 3, activation=nn.Tanh), Categorical(), only=only)
    method = Laplace(structure=structure, check=False, optimize_evidence=False)
    posterior = dubito.fit(model, method, (x, y), progress=False).with_prior(8.0)
    truth = posterior.predict(x[:5], "sampled", draws=DRAWS)
    assert kl(truth, posterior.predict(x[:5], "adjoint")) < 0.003
    for options in ({"rank": 0}, {"rank": -1}):
        assert kl(truth, posterior.predict(x[:5], "streamlined", **options)) < 0.02
    if only:  # the last layer alone is exact, with the covariance of its outputs
        exact = posterior.predict(x[:5], "linearized").covariances
        torch.testing.assert_close(posterior.predict(x[:5], "adjoint").covariances, exact)
        if structure in ("diagonal", "kronecker"):
            found = posterior.predict(x[:5], "streamlined", rank=0).f_var
            torch.testing.assert_close(found, exact[0].diagonal(dim1=-2, dim2=-1))


def test_small_variances_give_the_linearised_network():
    posterior = around(mlp(3, 10, 10, 2, activation=nn.GELU).double(), variance=1e-8)
    x = torch.randn(5, 3).double()
    a, b = posterior.predict(x, "adjoint"), posterior.predict(x, "linearized")
    torch.testing.assert_close(a.covariances, b.covariances, rtol=1e-4, atol=0)
    torch.testing.assert_close(a.f_mean, b.f_mean, rtol=1e-5, atol=1e-6)
    c = posterior.predict(x, "streamlined", rank=-1)
    torch.testing.assert_close(c.covariances, b.covariances, rtol=1e-4, atol=0)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "lowrank", "dense"])
def test_weights_that_are_single_numbers(structure):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.o = nn.Linear(3, 4), nn.Linear(4, 2)
            self.scale, self.shift = (nn.Parameter(torch.tensor(value)) for value in (1.3, 0.2))

        def forward(self, x: Tensor) -> Tensor:
            return self.o((self.scale * self.a(x)).tanh()) + self.shift

    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    model = Model(Scaled().double(), Gaussian(scale=0.5), dubito.priors.Normal(scale=1.0))
    cold = dubito.fit(model, Laplace(structure, optimize_evidence=False, check=False), (x, y), temperature=1e-8)
    exact = cold.predict(x, "linearized").covariances
    torch.testing.assert_close(cold.predict(x, "adjoint").covariances, exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("structure", ["kronecker", "dense", "lowrank"])
def test_outputs_that_move_together_by_their_weights(structure):
    """Linear in the random weights, so that the linearised network is exact: all directions are too, variances alone are not."""
    model = Model(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double(), Gaussian(scale=0.1), only="^0")
    x, y = torch.randn(50, 4).double(), torch.randn(50, 1).double()
    posterior = dubito.fit(model, Laplace(structure, check=False), (x, y), progress=False)
    exact = posterior.predict(x[:5], "linearized")
    for how, options in (("adjoint", {}), ("streamlined", {"rank": -1})):
        torch.testing.assert_close(posterior.predict(x[:5], how, **options).f_var, exact.f_var, rtol=1e-5, atol=1e-9)
    mixed = posterior.predict(x[:5], "streamlined", rank=512)
    assert float(((mixed.f_var / exact.f_var).sqrt() - 1).abs().max()) < 5.0
    assert float((posterior.predict(x[:5], "streamlined", rank=0).f_var / exact.f_var).min()) > 1.5


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_one_example_is_like_many(activation):
    posterior = around(mlp(3, 6, 6, 6, 2, activation=activation), variance=0.01)
    x = torch.randn(4, 3)
    whole = posterior.predict(x, "adjoint")
    torch.testing.assert_close(posterior.predict(x[:1], "adjoint").covariances, whole.covariances[:, :1])


def test_two_linear_layers_are_exact():
    """Means, variances and covariances of a product of two random matrices, in closed form."""
    posterior = around(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double(), variance=0.2)
    x = torch.randn(4, 3).double()
    p = posterior.params
    hidden = F.linear(x, p["0.weight"], p["0.bias"])
    v = 0.2 * (x.square().sum(-1, keepdim=True) + 1).expand_as(hidden)
    w = p["1.weight"]
    noise = 0.2 * ((hidden.square() + v).sum(-1) + 1)
    exact = torch.einsum("cd,bd,ed->bce", w, v, w) + torch.diag_embed(noise.unsqueeze(-1).expand(-1, 2))
    for how, options in (("adjoint", {}), ("streamlined", {"rank": -1}), ("streamlined", {"rank": 0})):
        torch.testing.assert_close(posterior.predict(x, how, **options).covariances[0], exact)


@pytest.mark.parametrize("how", ["adjoint", "streamlined"])
def test_uncertain_inputs(how):
    posterior = around(mlp(3, 16, 2, activation=nn.Tanh), variance=0.002)
    x, x_var = torch.randn(4, 3), 0.02 * torch.rand(4, 3)
    p = posterior.predict(x, how, x_var=x_var)
    weights = posterior.sample(DRAWS)
    noisy = x + x_var.sqrt() * torch.randn(DRAWS, 4, 3)
    hidden = torch.tanh(noisy @ weights["0.weight"].mT + weights["0.bias"].unsqueeze(1))
    f = hidden @ weights["2.weight"].mT + weights["2.bias"].unsqueeze(1)
    torch.testing.assert_close(p.f_mean, f.mean(0), rtol=0, atol=0.01)
    # with variances alone, units that see the same noisy input count as independent
    torch.testing.assert_close(p.f_var.sqrt(), f.std(0), rtol=0.03 if how == "adjoint" else 0.35, atol=0)


def test_directions_come_closer_than_variances_alone():
    posterior = around(mlp(4, 64, 64, 64, 2, activation=nn.Tanh), variance=0.04)
    x = torch.randn(16, 4)
    truth = posterior.predict(x, "sampled", draws=DRAWS)
    found = {rank: kl(truth, posterior.predict(x, "streamlined", rank=rank)) for rank in (0, 256, -1)}
    assert found[-1] < found[0]
    assert found[256] < found[0]


# --- any network ------------------------------------------------------------------------------------------------------


class Ways(nn.Module):
    """Shapes from the batch, functions and methods, something in place, two inputs, a loop."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), nn.Identity())
        self.last = nn.Linear(6, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = F.relu(self.first(a)).view(a.shape[0], 2, 3).reshape(len(a) * 2, 3).reshape(a.size(0), -1)
        for _ in range(2):
            h = h + torch.tanh(self.second(h))
        h += b
        if h.ndim != 2:
            raise AssertionError
        h = self.inner(h)
        return self.last(torch.cat([h[:, :3], h[:, 3:]], dim=-1))


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_a_network_written_in_many_ways(how):
    posterior = around(Ways())
    a, b = torch.randn(7, 4), torch.randn(7, 6)
    whole = posterior.predict((a, b), how)
    truth = posterior.predict((a, b), "sampled", draws=DRAWS)
    assert kl(truth, whole) < (0.002 if how == "adjoint" else 0.1)
    for part in (slice(0, 1), slice(1, 3), slice(3, 7)):  # one trace for batches of any size
        found = posterior.predict((a[part], b[part]), how)
        torch.testing.assert_close(found.f_var, whole.f_var[part])
        torch.testing.assert_close(found.f_mean, whole.f_mean[part])
    assert len(posterior.streamlined.traces) == 1
    assert posterior.streamlined.trace((a, b)).dynamic


def test_inputs_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, *, x: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    posterior = around(Named())
    x, scale = torch.randn(5, 3), torch.rand(5, 1)
    p = posterior.predict({"x": x, "scale": scale}, "streamlined")
    torch.testing.assert_close(p.f_var, (0.004 * (x.square().sum(-1, keepdim=True) + 1) * scale**2).expand(5, 2))


def test_sizes_follow_the_batch():
    engine = around(Ways()).streamlined
    found = engine.trace((torch.randn(5, 4), torch.randn(5, 6)))
    sizes = [arg for step in found.steps for arg in step.args if isinstance(arg, Size)]
    assert Size(0, 1) in sizes
    assert Size(0, 2) in sizes
    assert all(ref.slot in found.shapes for step in found.steps for ref in refs(step.out))


def test_layers_before_the_first_random_one_run_plainly():
    posterior = around(mlp(4, 8, 8, 2), only=r"^4\.")
    engine = posterior.streamlined
    code = engine.program(torch.randn(3, 4)).code
    assert code.count("rules_linear_head") == 1
    assert "rules_linear_linear" not in code
    assert "rules_activations" not in code


def test_powers_of_what_is_certain():
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y **= 2
            return self.layer(x**2 + y)

    posterior, x = around(Powers()), torch.randn(4, 3)
    expected = 0.004 * ((2 * x**2).square().sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(posterior.predict(x, "streamlined").f_var, expected.expand(4, 2))


def test_nothing_random_gives_no_variance():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    posterior = around(Half(), only=r"^b")
    assert posterior.predict(torch.randn(3, 2), "streamlined").f_var.eq(0).all()


def test_another_way_for_another_number_of_examples():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if len(x) > 2 else torch.tanh(self.layer(x))

    posterior = around(Counting(), variance=0.01)
    x = torch.randn(5, 2)
    for part in (x, x[:2], x[:1]):
        truth = posterior.predict(part, "sampled", draws=DRAWS)
        assert kl(truth, posterior.predict(part, "streamlined")) < 0.002


def test_names_of_operations():
    assert {canonical(f) for f in (torch.relu, F.relu, torch.Tensor.relu, torch.Tensor.relu_)} == {"relu"}
    assert canonical(torch.Tensor.__iadd__) == canonical(torch.Tensor.__radd__) == canonical(torch.add) == "add"
    assert canonical(torch.Tensor.__rsub__) == "rsub"
    assert canonical(torch.Tensor.__truediv__) == "div"
    assert canonical(F.logsigmoid) == "logsigmoid"
    assert canonical(F.threshold) == "threshold"


class Token(nn.Module):
    """Reads one token of its last block; queries, keys and values from one matrix or from three, in several ways."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.tokens = way, nn.Linear(3, 8)
        self.qkv, self.project, self.norm, self.last = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        b, t, d = h.shape
        if self.way == "packed":
            q, k, v = self.qkv(self.norm(h)).reshape(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(h)).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v)
        o = o.transpose(1, 2).reshape(b, t, d) if self.way == "packed" else o.permute(0, 2, 1, 3).flatten(2)
        h = h + self.project(o)
        h = h + self.narrow(F.gelu(self.wide(self.norm(h))))
        return self.last(h[:, 0] if self.way == "packed" else self.norm(h).select(1, 2))


@pytest.mark.parametrize("way", ["packed", "chunks"])
@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_what_the_head_does_not_read_is_not_computed(way, how, monkeypatch):
    posterior, x = around(Token(way), variance=0.001), torch.randn(3, 5, 3)
    options = {"rank": 0} if how == "streamlined" else {}
    found = posterior.predict(x, how, **options)
    code = [(s.name, posterior.streamlined.trace(x).shapes[s.out.slot]) for s in posterior.streamlined.trace(x).steps[-4:]]
    assert any(shape[1:] == (1, 8) for _, shape in code)
    monkeypatch.setattr("dubito.posteriors.predict.streamlined.engine.prune", lambda trace: trace)
    whole = replace(posterior).predict(x, how, **options)
    torch.testing.assert_close(found.f_mean, whole.f_mean)
    torch.testing.assert_close(found.covariances, whole.covariances)


# --- what cannot be done is said --------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.how == "unknown":
            return torch.cumprod(h, -1)
        if self.how == "chooses":
            best, which = h.softmax(-1).topk(2)
            return torch.stack([h, 2 * h], -1).gather(1, which.unsqueeze(-1).expand(-1, -1, 2)).mul(best.unsqueeze(-1)).sum(-1)
        if self.how == "complex":
            return torch.fft.irfft(torch.fft.rfft(h) * 1j, n=3)
        if self.how == "decides":
            return h if h.sum() > 0 else -h
        view = h[:, :1]
        h.mul_(2)
        return h + view


def test_an_unknown_operation_is_named_with_the_ways_out():
    posterior = around(nn.Sequential(nn.Linear(3, 3), Odd("unknown")))
    with pytest.raises(ValueError, match=r"no rule .* cumprod\(\) in 1\. .*write one.*only=.*draws=64.*linearized"):
        posterior.predict(torch.randn(2, 3), "streamlined")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("chooses", r"topk\(\) in Odd chooses by random numbers.*only=.*linearized.*sampled"),
        ("complex", r"fft_rfft\(\) in Odd gives complex numbers.*only=.*linearized.*sampled"),
    ],
)
@pytest.mark.parametrize("draws", [None, 64])
def test_what_no_pass_can_follow_is_refused_with_ways_out_that_work(how, message, draws):
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match=message):
        around(Odd(how)).predict(x, "streamlined", draws=draws)
    assert (around(Odd(how)).predict(x, "linearized").f_var > 0).all()
    assert (around(Odd(how)).predict(x, "sampled").f_var > 0).all()
    certain = nn.Sequential(Odd(how), nn.Linear(2 if how == "chooses" else 3, 1))
    assert (around(certain, only="^1").predict(x, "streamlined").f_var > 0).all()


def test_data_must_not_decide():
    with pytest.raises(ValueError, match="decides by the values of its data"):
        around(Odd("decides")).predict(torch.randn(2, 3), "streamlined")


def test_changes_in_place_through_a_view_are_refused():
    with pytest.raises(ValueError, match=r"in place .* x.clone\(\)"):
        around(Odd("view")).predict(torch.randn(2, 3), "streamlined")


def test_a_rule_of_ones_own():
    def double(x: Moments) -> Moments:
        return Moments(2 * x.mean, 4 * x.var, None if x.factor is None else 2 * x.factor)

    try:
        rule(torch.cumprod)(lambda x, dim: double(x))
        posterior = around(Odd("unknown"))
        x = torch.randn(2, 3)
        expected = 4 * 0.004 * (x.square().sum(-1, keepdim=True) + 1)
        torch.testing.assert_close(posterior.predict(x, "streamlined").f_var, expected.expand(2, 3))
    finally:
        del RULES["cumprod"], KEYWORDS["cumprod"]


def test_options_that_do_not_belong():
    posterior = around(mlp(3, 4, 2))
    with pytest.raises(ValueError, match="x_var, rank and rule are for predictions in one pass"):
        posterior.predict(torch.randn(2, 3), "linearized", rank=3)


# --- contexts, and what is left as it was -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_nothing_of_the_users_changes(how):
    network = mlp(3, 8, 2)
    posterior, x = around(network), torch.randn(4, 3)
    network.train()
    network[0].weight.grad = torch.ones(8, 3)
    before, state = {n: p.clone() for n, p in network.named_parameters()}, torch.get_rng_state()
    first = posterior.predict(x, how)
    assert torch.equal(state, torch.get_rng_state())
    assert network.training
    assert all(torch.equal(before[n], p) for n, p in network.named_parameters())
    assert network[0].weight.grad.eq(1).all()
    assert not network[0]._forward_pre_hooks
    again = posterior.predict(x, how)
    assert torch.equal(first.f_var, again.f_var)
    assert not first.f_var.requires_grad


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
@pytest.mark.parametrize("first", [True, False])
def test_under_inference_mode(how, first):
    posterior, x = around(mlp(3, 8, 2)), torch.randn(4, 3)
    expected = around(mlp(3, 8, 2)) if first else posterior.predict(x, how)
    with torch.inference_mode():
        found = posterior.predict(x.clone(), how)
    if not first:
        torch.testing.assert_close(found.f_var, expected.f_var)
    torch.testing.assert_close(posterior.predict(x, how).f_var, found.f_var.clone())


def test_no_inputs():
    posterior = around(mlp(3, 8, 2))
    for how in ("streamlined", "adjoint"):
        assert posterior.predict(torch.randn(0, 3), how).f_mean.shape == (0, 2)


def test_it_says_how():
    wide, narrow = around(mlp(3, 400, 400, 2)), around(mlp(3, 8, 2))
    x = torch.randn(2, 3)
    assert wide.predict(x, "streamlined").how == "streamlined, variances only"
    assert narrow.predict(x, "streamlined").how == "streamlined, full covariance"
    assert narrow.predict(x, "streamlined", rank=16).how == "streamlined, 16 directions"
    assert narrow.predict(x, "adjoint").how == "adjoint"


def test_little_memory_gives_the_same():
    posterior, x = around(mlp(3, 8, 8, 2), variance=0.01), torch.randn(9, 3)
    x_var = torch.full_like(x, 0.01)
    whole = posterior.predict(x, "adjoint", x_var=x_var)
    torch.testing.assert_close(posterior.predict(x, "adjoint", x_var=x_var, memory=1e-6).covariances, whole.covariances)


def test_many_outputs():
    """Of the largest the adjoint's variances, of the others those of the forward pass; above 100 outputs by itself."""
    posterior, x = around(mlp(3, 8, 8, 6), variance=0.01), torch.randn(4, 3)
    whole, some, forward = (
        posterior.predict(x, "adjoint"),
        posterior.predict(x, "adjoint", top=2),
        posterior.predict(x, "streamlined", rank=0),
    )
    largest = torch.zeros_like(whole.f_mean).scatter(1, whole.f_mean.topk(2).indices, 1).bool()
    torch.testing.assert_close(some.f_mean, whole.f_mean)
    torch.testing.assert_close(some.f_var[largest], whole.f_var[largest])
    torch.testing.assert_close(some.f_var[~largest], forward.f_var[~largest])
    assert some.how == "adjoint, 2 largest outputs"
    assert posterior.predict(x, "adjoint", top=9).how == "adjoint"
    many = around(mlp(3, 8, 120), variance=0.01, likelihood=Categorical()).predict(x, "adjoint")
    assert many.how == "adjoint, 16 largest outputs"
    assert many.cov is not None
    assert many.cov.shape == (1, 4, 120)
    with pytest.raises(ValueError, match="top must be at least 1"):
        posterior.predict(x, "adjoint", top=0)


class Pixels(nn.Module):
    """A class for every pixel, with norms of the kinds that have a backward pass of their own."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm(4)
        self.second, self.group, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.first(x)).movedim(1, -1)).movedim(-1, 1)
        return self.last(self.dropout(self.group(torch.tanh(self.second(h)))))


def test_the_adjoint_of_a_class_for_every_pixel_has_no_luck():
    """432 outputs an example: it was 30 draws from the global generator, whose probabilities differed by .28 from call to call."""
    torch.manual_seed(0)
    posterior, x = around(Pixels(), variance=0.01, likelihood=Categorical(dim=1)), torch.randn(2, 1, 12, 12)
    state = torch.get_rng_state()
    first, again = posterior.predict(x, "adjoint"), posterior.predict(x, "adjoint", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.mean, again.mean)
    assert first.how == "adjoint"
    truth = posterior.predict(x, "sampled", draws=4000)
    torch.testing.assert_close(first.mean, truth.mean, rtol=0, atol=0.02)
    assert float((first.f_var / truth.f_var).sqrt().mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("form", ["gaussian", "inputs", "dropout"])
def test_the_adjoint_of_too_many_outputs_is_drawn_from_its_seed(monkeypatch, form):
    torch.manual_seed(0)
    x, given = torch.randn(3, 1, 12, 12), {}
    if form == "dropout":
        model = Model(Pixels(dropout=0.3), Categorical(dim=1))
        posterior = dubito.fit(model, dubito.MCDropout(epochs=1), (x, torch.zeros(3, 12, 12).long()))
    else:
        posterior = around(Pixels(), variance=0.01, likelihood=Categorical(dim=1))
        given = {"x_var": torch.full_like(x, 0.01)} if form == "inputs" else {}
    exact = posterior.predict(x, "adjoint", **given)
    assert exact.how == "adjoint"
    monkeypatch.setattr("dubito.posteriors.predict.adjoint.SWEPT", 0)
    state = torch.get_rng_state()
    first, again = posterior.predict(x, "adjoint", **given), posterior.predict(x, "adjoint", **given)
    other = posterior.predict(x, "adjoint", seed=1, **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.how == "adjoint, 30 draws"
    assert torch.equal(first.means, again.means)
    assert not torch.equal(first.means, other.means)
    torch.testing.assert_close(first.stretched(4.0).f_var, 4 * first.f_var)
    many = posterior.predict(x, "adjoint", draws=1000, memory=1e-4, **given)  # a few examples and draws at a time
    few = posterior.predict(x, "adjoint", memory=1e-4, **given)
    torch.testing.assert_close(few.means, first.means, rtol=1e-4, atol=1e-5)  # memory changes no number
    torch.testing.assert_close(many.f_mean, exact.f_mean, rtol=0, atol=0.2 * float(exact.f_var.max()) ** 0.5)
    assert float((many.f_var / exact.f_var).sqrt().mean()) == pytest.approx(1, abs=0.02)


def test_a_scale_of_variances():
    posterior, x = around(mlp(3, 8, 2)), torch.randn(4, 3)
    plain = posterior.predict(x, "adjoint")
    assert torch.equal(replace(posterior, variance_scale=2.0).predict(x, "adjoint").covariances, 2 * plain.covariances)


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_the_scale_that_fits_held_out_data(how):
    """Targets from a posterior four times as wide in variance: a factor of four is found, and scores best."""
    posterior = around(nn.Linear(3, 1).double(), variance=0.5, likelihood=Gaussian(scale=0.1))
    x = torch.randn(4000, 3).double()
    truth = posterior.predict(x, how).stretched(4.0)
    y = truth.sample(1, torch.Generator().manual_seed(0))[0]
    found = posterior.calibrated([(x[:2000], y[:2000]), (x[2000:], y[2000:])], how)
    assert found.variance_scale == pytest.approx(4.0, rel=0.1)
    scores = {
        s: replace(posterior, variance_scale=s).predict(x, how).log_prob(y).sum() for s in (1.0, 2.0, found.variance_scale, 8.0)
    }
    assert max(scores, key=lambda s: scores[s]) == found.variance_scale
    assert posterior.variance_scale == 1.0
    with pytest.raises(ValueError, match="streamlined"):
        posterior.calibrated((x, y), "sampled")


def test_the_pairwise_link_is_closer_than_probit():
    torch.manual_seed(3)
    means, root = 2 * torch.randn(1, 200, 4).double(), torch.randn(1, 200, 4, 4).double()
    p = dubito.posteriors.predictive.LatentMixture(Categorical(), means, root @ root.mT)
    draws = means[0] + (root[0] @ torch.randn(20_000, 200, 4, 1).double()).squeeze(-1)
    truth = draws.softmax(-1).mean(0)
    errors = {link: float((p.linked(link).mean - truth).abs().mean()) for link in ("nodes", "pairwise", "probit")}
    assert errors["nodes"] < errors["pairwise"] < errors["probit"]


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("only", ["", r"^2\.|^4\.", "weight", "bias", r"^0\.", r"^4\."])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_short_way_of_a_chain_is_the_long_way(structure, only, noisy, monkeypatch):
    x, y = torch.randn(40, 3).double(), torch.randint(3, (40,))
    model = Model(mlp(3, 7, 5, 3, activation=nn.GELU).double(), Categorical(), only=only)
    method = Laplace(structure=structure, check=False, optimize_evidence=False)
    posterior = dubito.fit(model, method, (x, y), progress=False)
    x_var = 0.1 * torch.rand(4, 3).double() if noisy else None
    short = posterior.predict(x[:4], "adjoint", x_var=x_var)
    monkeypatch.setattr("dubito.posteriors.predict.adjoint._known_chain", lambda *_: None)
    long = posterior.predict(x[:4], "adjoint", x_var=x_var)
    torch.testing.assert_close(short.f_mean, long.f_mean)
    torch.testing.assert_close(short.covariances, long.covariances)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
@pytest.mark.parametrize("build", [lambda: mlp(4, 20, 20, 3), lambda: Token("packed"), lambda: nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
)], ids=["mlp", "attention", "convolutions"])  # fmt: skip
def test_the_same_on_a_gpu(how, build):
    network = build().eval()
    x = (
        torch.randn(6, 5, 3)
        if isinstance(network, Token)
        else torch.randn(6, 1, 4, 4)
        if len(network) == 6
        else torch.randn(6, 4)
    )
    here = around(network, variance=0.002).predict(x, how)
    there = around(network.cuda(), variance=0.002).predict(x, how)
    assert there.f_mean.is_cuda
    torch.testing.assert_close(there.f_mean.cpu(), here.f_mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(there.f_var.cpu(), here.f_var, rtol=5e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_half_precision_on_a_gpu(how):
    posterior = around(Token("packed").cuda().bfloat16(), variance=0.001)
    x = torch.randn(6, 5, 3, device="cuda", dtype=torch.bfloat16)
    found = posterior.predict(x, how)
    assert found.f_var.dtype == torch.float32
    exact = around(Token("packed").cuda(), variance=0.001)
    assert (found.f_var > 0).all()
    assert exact.predict(x.float(), how).f_var.shape == found.f_var.shape


class Again(nn.Module):
    """One layer, used four times."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sin(self.layer(x))
        return self.layer(x)


def test_uses_of_one_weight_move_together():
    model = Model(Again(), Gaussian(scale=1.0))
    posterior = Posterior.diagonal(model, {}, {name: torch.full_like(leaf, 1e-6) for name, leaf in model.parameters().items()})
    x = torch.zeros(1, 1)
    torch.testing.assert_close(posterior.predict(x, "adjoint").f_var, torch.full((1, 1), 1.6e-5), rtol=1e-3, atol=0)
    assert posterior.predict(x, "streamlined").how.endswith("uses of a weight apart")


@pytest.mark.parametrize("structure", ["kronecker", "dense", "lowrank"])
@pytest.mark.parametrize("network", [(1, 8, 1), (1, 3)])
def test_biases_alone_move_together(structure, network):
    """Of a linear network all ways agree; the biases are strongly anticorrelated, since their sum is what the data know."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(network)]
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.Identity())))
    model = Model(net, Gaussian(scale=0.1), dubito.priors.Normal(scale=1.0), only=r"0\.bias")
    x = torch.randn(50, 1)
    posterior = dubito.fit(model, Laplace(structure, check=False), (x, x.expand(-1, network[-1])))
    exact = posterior.predict(x, "linearized").f_var
    torch.testing.assert_close(posterior.predict(x, "streamlined", rank=-1).f_var, exact, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(posterior.predict(x, "adjoint").f_var, exact, rtol=0.01, atol=1e-6)


def test_a_computed_weight_is_no_chain():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    model, x = Model(net, Gaussian(scale=0.5)), torch.randn(20, 4)
    with pytest.raises(ValueError, match="computed from others"):
        dubito.fit(model, Laplace(check=False, subset="last_layer"), (x, x[:, :2]))
    posterior = dubito.fit(model, Laplace(check=False, subset=r"2\.bias"), (x, x[:, :2]))
    torch.testing.assert_close(posterior.predict(x, "adjoint").f_var, posterior.predict(x, "linearized").f_var)


def test_two_functions_after_each_other_are_no_chain():
    posterior, x = around(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 2)), 0.01), torch.randn(4, 2)
    forward = posterior.predict(x, "streamlined", rank=-1)
    adjoint = posterior.predict(x, "adjoint")
    torch.testing.assert_close(adjoint.f_mean, forward.f_mean)
    torch.testing.assert_close(adjoint.f_var, forward.f_var, rtol=0.05, atol=0)


@pytest.mark.parametrize("function", [lambda: nn.ELU(inplace=True), lambda: nn.LeakyReLU(0.2, inplace=True)])
@pytest.mark.parametrize("taylor", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode calls it
def test_a_function_in_place_is_the_same_function(function, taylor):
    x, layers = torch.randn(4, 2), (nn.Linear(2, 8), nn.Linear(8, 2))
    plain = function()
    plain.inplace = False
    found, expected = (
        around(nn.Sequential(layers[0], g, layers[1])).streamlined.predict(x, taylor=taylor) for g in (function(), plain)
    )
    torch.testing.assert_close(found.f_mean, expected.f_mean)
    torch.testing.assert_close(found.f_var, expected.f_var)


def test_hardtanh_without_bounds_is_between_minus_one_and_one():
    x = Moments(torch.tensor([-3.0, 0.5, 3.0]), torch.full((3,), 1e-6))
    torch.testing.assert_close(RULES["hardtanh"](x).mean, torch.tensor([-1.0, 0.5, 1.0]))
