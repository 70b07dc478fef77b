"""The flat log density is the target's, for any network: what was traced, cut, joined and cleaned must not change a number."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, LogNormal, Weibull
from torch.utils.data import DataLoader, TensorDataset

from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Model
from dubito.inference import log_density as density
from dubito.inference import tracing
from dubito.inference.batches import batches
from dubito.inference.log_density import Density
from dubito.inference.tracing import Traced
from dubito.model import Target
from dubito.priors import MultivariateNormal, Normal
from dubito.tensors import tree
from dubito.tensors.covariances import Diagonal


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(n: int, k: int) -> Tensor:
    return torch.arange(n) % k


class Branching(nn.Module):
    """Python looks at a value: the two sides of the `if` are different functions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer(x)
        return f.tanh() if f.sum() > 0 else 2 * f


class Writing(nn.Module):
    """Writes into tensors that it makes, and into a copy that is its original times one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        held = torch.zeros_like(x)
        held[:, 0] = x[:, 0] * 2
        held += x
        f = self.layer(held)
        more = f * 1.0
        more += 1
        return (f * more).sum(1, keepdim=True)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class Looking(nn.Module):
    """An embedding: its gradient is summed into zeros."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x).mean(1))


@dataclass(frozen=True)
class Shifted(Normal):
    """A kind of Normal, but not one: no precision says what it is."""

    def log_prob(self, params: dict[str, Tensor]) -> Tensor:
        return super().log_prob({name: leaf - 1 for name, leaf in params.items()})

    def gradient(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().gradient({name: leaf - 1 for name, leaf in params.items()})

    def add_gradient(self, gradient: dict[str, Tensor], params: dict[str, Tensor], factor: float = 1.0) -> None:
        super().add_gradient(gradient, {name: leaf - 1 for name, leaf in params.items()}, factor)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def normed() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    net(noise(32, 3, seed=5))  # statistics other than those it is born with
    return net


def around(model: nn.Module) -> MultivariateNormal:
    shapes = {name: p.detach() for name, p in model.named_parameters()}
    spread = {name: 0.5 + noise(*p.shape, seed=2).abs() for name, p in shapes.items()}
    return MultivariateNormal({name: noise(*p.shape, seed=1) for name, p in shapes.items()}, Diagonal.of(spread))


REGRESSION = (noise(7, 3), noise(7, 1, seed=1))
IMAGES = (noise(7, 1, 6, 6), classes(7, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


# name: the model, the data, and whether it is traced for several chains
CASES: dict[str, tuple[Callable[[], Model], Any, bool]] = {
    "mlp": (lambda: Model(mlp(), Gaussian(scale=0.3), Normal(scale={"bias": 2.0, "": 0.7})), REGRESSION, True),
    "cnn, categorical": (lambda: Model(convolutional(), Categorical()), IMAGES, True),
    "bernoulli": (lambda: Model(mlp(), Bernoulli()), (REGRESSION[0], classes(7, 2).float()), True),
    "norm, in-place relu": (lambda: Model(normed(), Gaussian(scale=0.3)), REGRESSION, True),
    "network predicts the noise": (
        lambda: Model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), HeteroscedasticGaussian()),
        REGRESSION,
        True,
    ),
    "learned noise": (lambda: Model(mlp(), Gaussian()), REGRESSION, True),
    "learned noise, gamma": (lambda: Model(mlp(), Gaussian(prior=Gamma(2.0, 0.5))), REGRESSION, True),
    "multivariate prior": (lambda: Model(net := mlp(), Gaussian(scale=0.3), around(net)), REGRESSION, True),
    "a kind of normal": (lambda: Model(mlp(), Gaussian(scale=0.3), Shifted(scale=0.5)), REGRESSION, True),
    "only the last layer": (lambda: Model(normed(), Gaussian(scale=0.3), only="^3"), REGRESSION, True),
    "embedding": (lambda: Model(Looking(), Gaussian(scale=0.3)), (torch.arange(21).view(7, 3) % 5, REGRESSION[1]), True),
    "writes in place": (lambda: Model(Writing(), Gaussian(scale=0.3)), REGRESSION, True),
    "lstm": (lambda: Model(Recurrent(), Gaussian(scale=0.3)), (noise(7, 4, 2), REGRESSION[1]), False),
    "looks at values": (lambda: Model(Branching(), Gaussian(scale=0.3)), REGRESSION, False),
}


def positions(held: Density, chains: int, seed: int = 3) -> Tensor:
    return 0.5 * noise(chains, held.size, seed=seed).to(held.dtype)


def assert_agrees(held: Density, data: list[Any], *, chains: int = 3, repeats: int = 2, rtol: float = 1e-5) -> None:
    """Every chain's gradient, likelihood and prior are what the target says of that chain alone, however often it is asked."""
    target, model = held.target, held.target.model
    plain = Target(model, target.n_data)
    for repeat in range(repeats):
        position = positions(held, chains, seed=3 + repeat)
        found, only_values = held(position), held.values(position)
        for c in range(chains):
            params = tree.unflatten(position[c], held.like)
            gradient = tree.flatten(target.gradient(params, data, held.buffers).gradient)
            prior = plain.log_prior(tree.unflatten(position[c].double(), held.like)).double()
            likelihood = plain.log_joint(params, data, held.buffers) - plain.log_prior(params)
            assert torch.allclose(found.gradient[c], gradient, rtol=rtol, atol=rtol * float(gradient.abs().max()))
            for value in (found, only_values):
                assert value.log_likelihood.dtype == value.log_prior.dtype == torch.float64
                assert float(value.log_likelihood[c]) == pytest.approx(float(likelihood), rel=rtol, abs=rtol)
                assert float(value.log_prior[c]) == pytest.approx(float(prior), rel=rtol, abs=rtol)


def make(model: Model, data: list[Any], n_data: int | None = None, temperature: float = 1.0) -> Density:
    seen = sum(len(model.split(batch)[1]) for batch in data)
    y = torch.cat([model.split(batch)[1] for batch in data])
    return Density(Target(model, n_data or seen, temperature), data, model.parameters(y), model.buffers())


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_target(name, chains):
    build, batch, traced = CASES[name]
    torch.manual_seed(0)
    held = make(build(), [batch])
    assert_agrees(held, [batch], chains=chains)
    if chains > 1:
        assert traced == all(isinstance(run, Traced) for run in held._traced.values()), "runs as it was thought to"


@pytest.mark.parametrize("name", ["mlp", "learned noise, gamma", "lstm"])
def test_in_float64_to_the_last_digits(name):
    build, (x, y), _ = CASES[name]
    torch.manual_seed(0)
    model = build()
    model.network.double()
    data = [(x.double(), y.double())]
    held = make(model, data)
    assert held.dtype == torch.float64
    assert_agrees(held, data, rtol=1e-12)


@pytest.mark.parametrize(("n_data", "temperature"), [(70, 0.3), (7, 3.0)])
@pytest.mark.parametrize("name", ["mlp", "learned noise, gamma", "multivariate prior"])
def test_temperature_and_the_number_of_data_enter_once(name, n_data, temperature):
    """The gradient is tempered, its two parts are not; n_data scales the likelihood alone."""
    build, batch, _ = CASES[name]
    torch.manual_seed(0)
    held = make(build(), [batch], n_data=n_data, temperature=temperature)
    assert_agrees(held, [batch], repeats=1)
    plain = make(held.target.model, [batch])
    position = positions(held, 3)
    assert torch.allclose(held(position).log_likelihood, n_data / 7 * plain(position).log_likelihood)
    assert torch.equal(held(position).log_prior, plain(position).log_prior)


def uneven() -> list[tuple[Tensor, Tensor]]:
    x, y = noise(29, 3), noise(29, 1, seed=1)
    return [(x[i:j], y[i:j]) for i, j in ((0, 9), (9, 12), (12, 20), (20, 29))]


@pytest.mark.parametrize("kept", ["as given", "joined", "in three chunks", "read anew"])
def test_the_data_may_be_cut_in_any_way(kept, monkeypatch):
    torch.manual_seed(0)
    model, data = Model(normed(), Gaussian()), uneven()
    if kept == "read anew":
        monkeypatch.setitem(density.HELD, "cpu", 100)
    held = make(model, data)
    if kept == "in three chunks":
        used = held._footprint(positions(held, 3), data[0]) / 9
        monkeypatch.setitem(density.WORKING, "cpu", int(10.5 * used))
    if kept in ("joined", "in three chunks", "read anew"):
        held.fit_chunks(3)
    sizes = None if held.chunks is None else [len(y) for _, y in held.chunks]
    assert sizes == {"as given": [9, 3, 8, 9], "joined": [29], "in three chunks": [10, 10, 9], "read anew": None}[kept]
    assert_agrees(held, data)


@pytest.mark.parametrize("name", ["mlp", "learned noise, gamma", "multivariate prior"])
@pytest.mark.parametrize(("n_data", "temperature"), [(29, 1.0), (70, 0.3)])
def test_a_gradient_derived_by_hand_is_the_same(name, n_data, temperature):
    build, _, _ = CASES[name]
    torch.manual_seed(0)
    data = uneven()
    held = make(build(), data, n_data=n_data, temperature=temperature)
    held.fit_chunks(3)
    assert held.hand is not None
    assert_agrees(held, data)


@pytest.mark.parametrize("factor", [torch.nan, 1e30])
def test_where_the_density_is_not_finite_a_gradient_by_hand_cannot_be_judged(factor):
    """NaN in the data, or data that overflow: no error of a comparison, so that a sampler can say where its chains start."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    held = make(Model(network, Gaussian(scale=0.3)), [(REGRESSION[0] * factor, REGRESSION[1])])
    held.fit_chunks(3)
    assert held.hand is None
    assert not held(positions(held, 3)).log_likelihood.isfinite().any()


@pytest.mark.parametrize("held_at_hand", [True, False])
@pytest.mark.parametrize("own_generator", [True, False])
def test_a_loader_that_shuffles_is_one_function_to_the_bit(held_at_hand, own_generator, monkeypatch):
    """Else the difference of two energies would hold the rounding of two orders. The global generators are left as they are."""
    if not held_at_hand:
        monkeypatch.setitem(density.HELD, "cpu", 100)
    torch.manual_seed(0)
    model, (x, y) = Model(mlp(), Gaussian(scale=0.01)), (noise(40, 3), noise(40, 1, seed=1))
    generator = torch.Generator().manual_seed(7) if own_generator else None
    loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True, generator=generator)
    before = torch.get_rng_state(), None if generator is None else generator.get_state()
    held = Density(Target(model, 40), batches(model, loader), model.parameters(), model.buffers())
    assert (held.chunks is not None) == held_at_hand
    position = positions(held, 2)
    one, two = held(position), held(position)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(before[0], torch.get_rng_state())
    assert generator is None or torch.equal(before[1], generator.get_state())
    assert_agrees(held, [(x, y)], repeats=1)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * self.layer(x)


OTHER: dict[str, Callable[[Tensor, Tensor, float], Any]] = {
    "numbers beside the tensors": lambda x, y, k: ((x, k), y),
    "a dict of its own kind": lambda x, y, k: OrderedDict(x=x, factor=k, labels=y),
    "what only looks like a dict": lambda x, y, k: UserDict(x=x, factor=k, labels=y),
}


@pytest.mark.parametrize("form", OTHER)
def test_what_is_beside_the_tensors_of_a_batch_is_no_constant(form):
    """Two batches of one shape, with other numbers in them: neither traced as one, nor joined."""
    torch.manual_seed(0)
    x, y = noise(2, 5, 3), noise(2, 5, 1, seed=1)
    data = [OTHER[form](x[0], y[0], 1.0), OTHER[form](x[1], y[1], -3.0)]
    held = make(Model(Scaled(), Gaussian(scale=0.3)), data)
    held.fit_chunks(3)
    assert_agrees(held, data)


def test_batches_that_are_all_different_are_not_all_traced(monkeypatch):
    monkeypatch.setattr(density, "TRACED", 3)
    torch.manual_seed(0)
    data = [(noise(n, 3), noise(n, 1, seed=1)) for n in range(1, 9)]
    held = make(Model(mlp(), Gaussian(scale=0.3)), data)
    assert_agrees(held, data)
    assert len(held._traced) == 3


@pytest.mark.parametrize(
    "name", ["cnn, categorical", "norm, in-place relu", "learned noise, gamma", "embedding", "writes in place"]
)
def test_cleaning_the_operations_changes_nothing(name, monkeypatch):
    build, batch, _ = CASES[name]
    torch.manual_seed(0)
    model = build()
    clean, as_traced = make(model, [batch]), make(model, [batch])
    position = positions(clean, 3)
    one = clean(position)
    monkeypatch.setattr(tracing, "clean", lambda graph: 0)
    two = as_traced(position)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    count = {held: sum(len(run.module.graph.nodes) for run in held._traced.values()) for held in (clean, as_traced)}
    assert count[clean] < count[as_traced]


@pytest.mark.parametrize("chains", [1, 3])
def test_a_network_that_is_random_in_eval_mode_is_refused(chains):
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(nn.functional.dropout(x, 0.5, training=True))

    held = make(Model(Random(), Gaussian(scale=0.3)), [REGRESSION])
    with pytest.raises(ValueError, match="another output every time"):
        held(positions(held, chains))


def test_no_data_is_an_error():
    model = Model(mlp(), Gaussian(scale=0.3))
    with pytest.raises(ValueError, match="no data"):
        Density(Target(model, 1), [], model.parameters(), model.buffers())


def test_energies_of_many_data_and_weights_are_right_to_a_fraction_in_float32():
    """Sums of 10^7 in float32 are off by one or more, and an acceptance probability by a factor e or more."""
    n, width = 30_000, 30
    torch.manual_seed(0)
    net = nn.Linear(width, 1, bias=False)
    x = noise(n, width)
    y = x @ noise(width, 1, seed=4)
    likelihood, prior = Gaussian(scale=0.3), Normal(scale=1e-3)
    position = noise(2, width, seed=6)
    position[1] = position[0] + 1e-5 * noise(width, seed=7)
    found = make(Model(net, likelihood, prior), [(x, y)])(position)
    exact = make(Model(copy.deepcopy(net).double(), likelihood, prior), [(x.double(), y.double())])(position.double())
    assert float(exact.log_likelihood.abs().min()) > 5e6
    assert float(exact.log_prior.abs().min()) > 5e6
    for a, b in ((found.log_likelihood, exact.log_likelihood), (found.log_prior, exact.log_prior)):
        assert float(a[1] - a[0]) == pytest.approx(float(b[1] - b[0]), abs=0.05)


def test_outputs_are_those_of_every_chain():
    torch.manual_seed(0)
    model, data = Model(normed(), Gaussian()), uneven()
    held = make(model, data)
    position = positions(held, 3)
    for (f, y), (x, expected) in zip(held.outputs(position), data, strict=True):
        assert f.shape == (3, len(x), 1)
        assert torch.equal(y, expected)
        for c in range(3):
            f_c, _ = model.forward(tree.unflatten(position[c], held.like), x, held.buffers)
            assert torch.allclose(f[c], f_c)


def test_the_network_is_left_as_it_was():
    torch.manual_seed(0)
    net = normed().train()
    state = {name: leaf.clone() for name, leaf in net.state_dict().items()}
    held = make(Model(net, Gaussian(scale=0.3)), [REGRESSION])
    held(positions(held, 3))
    assert all(torch.equal(leaf, state[name]) for name, leaf in net.state_dict().items())
    assert net.training
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("kind", [Gamma, LogNormal, Weibull])
def test_a_noise_that_is_no_number_is_no_error(kind):
    """A trajectory may end there, and a sampler counts a divergence. Priors that are made of others check their arguments too."""
    model = Model(nn.Linear(1, 1, bias=False), Gaussian(prior=kind(1.0, 1.0)))
    x = torch.ones(3, 1)
    found = Density(Target(model, 3), [(x, x)], model.parameters(), model.buffers())
    value = found(torch.tensor([[0.5, torch.nan], [0.5, 0.0]]))
    assert value.log_prior[0].isnan()
    assert value.log_prior[1].isfinite()
    with pytest.raises(ValueError, match="support"):
        model.likelihood.prior.log_prob(torch.tensor(torch.nan))  # the user's distribution checks as before


class Spectrum(nn.Module):
    """Pairs of weights are read as complex numbers, behind an odd number of others."""

    def __init__(self):
        super().__init__()
        self.shift, self.pairs = nn.Parameter(torch.ones(1)), nn.Parameter(0.3 * noise(3, 2))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.pairs), n=4) + self.shift


def test_weights_may_be_read_as_complex_numbers():
    model = Model(Spectrum(), Gaussian(scale=1.0), Normal(scale=1.0))
    x, y, params = noise(6, 4), noise(6, 4, seed=1), model.parameters()
    made = Density(Target(model, 6), [(x, y)], params, model.buffers())
    position = tree.flatten(params) + 0.1 * noise(2, 7, seed=2)
    for row, gradient in zip(position, made(position).gradient, strict=True):
        row = row.clone().requires_grad_()
        weights = {name: leaf.clone() for name, leaf in tree.unflatten(row, params).items()}
        f = torch.func.functional_call(model.network, weights, x)
        (-0.5 * ((y - f) ** 2).sum() - 0.5 * (row**2).sum()).backward()
        torch.testing.assert_close(gradient, row.grad)
