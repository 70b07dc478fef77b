"""IVON beyond the contract: its formulas, the mean field it finds, the Hessian it estimates, and what it leaves alone."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

import dubito
from dubito import IVON, Categorical, Ensemble, Gaussian, Model, posteriors
from dubito.inference.method import Start
from dubito.methods import ivon
from dubito.model import Target
from dubito.posteriors import Mixture
from dubito.priors import MultivariateNormal, Normal
from dubito.tensors import tree
from dubito.tensors.covariances import Diagonal
from dubito.testing import tensors

NOISE, SCALE, ROWS = 0.5, 0.8, 200


def seeded(build) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def data(n: int = 48):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def begun(method: IVON, target: Target, batch) -> ivon.IVONState:
    model = target.model
    start = Start(model.parameters(batch[1]), model.buffers())
    return method.init(target, start, batch, torch.Generator().manual_seed(0), steps=100)


def regressions(n: int):
    """The same Bayesian linear regression for each of many outputs, which do not know of each other: runs of a method, side by side."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x[:, 2] += 0.5 * x[:, 0]
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    model = Model(seeded(lambda: nn.Linear(3, ROWS, bias=False).double()), Gaussian(scale=NOISE), Normal(scale=SCALE))
    precision = x.mT @ x / NOISE**2 + torch.eye(3, dtype=torch.float64) / SCALE**2
    mean = torch.linalg.solve(precision, x.mT @ y / NOISE**2).squeeze(1)
    return model, (x, y.expand(-1, ROWS)), mean, precision


@pytest.mark.parametrize(("n", "size", "temperature", "samples"), [(60, 20, 1.0, 2), (60, 60, 0.1, 1), (24, 24, 3.0, 1)])
def test_on_linear_regression_it_finds_the_mean_field(n, size, temperature, samples):
    """The exact mean, and variances T / diag(A), whatever the number of data, the batches and the temperature."""
    model, source, mean, precision = regressions(n)
    method = IVON(epochs=500 * size // n, samples=samples, hessian_momentum=0.988, initial_hessian=5.0)
    found = dubito.fit(model, method, source, batch_size=size, temperature=temperature)
    w = found.params["weight"]  # [ROWS, 3]
    width = (temperature / precision.diag()).sqrt()
    # of the noise, batches are the same for all rows, draws are not
    assert ((w.mean(0) - mean).abs() < 5 * w.std(0) / ROWS**0.5 + 0.02 * width).all()
    assert (w.std(0) < 0.25 * width).all(), "means vary less than q does"
    # of order rho are the bias of the quadratic term and the share that is left of the start
    average = (1 / found.covariance.variance()["weight"]).mean(0)
    assert torch.allclose(average, precision.diag() / temperature, rtol=0.04)
    assert (average > 0.9 / temperature / torch.linalg.inv(precision).diag()).all(), "known bias: narrower than the truth"


def test_pairs_cancel_the_noise_of_batches_and_draws():
    """On a quadratic the mean of a pair of gradients is that at the mean of the pair."""
    model, source, mean, _ = regressions(60)
    found = dubito.fit(model, IVON(epochs=200, samples=2, initial_hessian=5.0), source, batch_size=60)
    assert torch.allclose(found.params["weight"], mean.expand(ROWS, 3), rtol=0, atol=1e-3)
    spread = {}
    for samples in (1, 2):
        method = IVON(epochs=10, samples=samples, hessian_momentum=0.97, initial_hessian=4.0)
        spread[samples] = dubito.fit(model, method, source, batch_size=6).covariance.variance()["weight"].log().std(0)
    assert (spread[2] < 0.6 * spread[1]).all(), "the Hessian varies less"


def test_the_estimate_of_the_hessian_is_unbiased():
    """On a network, against the Hessian itself, averaged over q; all members of a stacked target estimate the same."""
    many, n, temperature = 4_000, 20, 0.3
    x, y = (leaf.double() for leaf in data(n))
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double())
    model = Model(net, Gaussian(scale=1.0), Normal(scale=2.0))
    target = Target(model, n, temperature, members=many)
    rho = 1e-6
    method = IVON(initial_hessian=0.5, hessian_momentum=1 - rho, learning_rate=1e-9)
    start = Start(tree.repeat(model.parameters(), many), {})
    generator = torch.Generator().manual_seed(0)
    state = method.init(target, start, (x, y), generator, steps=1)
    before = tree.clone(state.spread)
    state, _ = method.step(target, state, [(x, y)], generator)
    delta = 1 / (n * 2.0**2)
    found = {name: (1 / state.spread[name] - 1 / before[name]) / rho + 0.5 for name in before}  # x^2 / 2 is of order rho

    def loss(params):
        return 0.5 * (y - functional_call(net, params, (x,))).square().sum() / n

    scale = math.sqrt(temperature / (n * (0.5 + delta)))
    drawn = {
        name: leaf + scale * torch.randn(2_000, *leaf.shape, generator=generator, dtype=torch.float64)
        for name, leaf in model.parameters().items()
    }
    exact = vmap(jacrev(jacrev(loss)))(drawn)
    for name in found:
        size = found[name][0].numel()
        diagonal = exact[name][name].reshape(2_000, size, size).diagonal(dim1=1, dim2=2)
        each = found[name].reshape(many, size)
        error = (each.var(0) / many + diagonal.var(0) / 2_000).sqrt()
        assert ((each.mean(0) - diagonal.mean(0)).abs() < 5 * error + 1e-4).all()
        assert (error < 0.2).all()


@pytest.mark.parametrize(
    "options", [{"clip": None}, {"clip": 1e-2, "warmup": 0.2}, {"clip": None, "samples": 2}], ids=["plain", "clipped", "a pair"]
)
@pytest.mark.parametrize("outputs", [2, 300], ids=["small", "in pieces"])
def test_a_step_is_the_formulas(options, outputs):
    """As the paper writes them, also where leaves are cut into pieces or put together."""
    net = seeded(lambda: nn.Sequential(nn.Linear(outputs, 300), nn.ReLU(), nn.Linear(300, 2)).double())
    x, y = torch.randn(16, outputs).double(), torch.randint(2, (16,))
    model = Model(net, Categorical(), Normal(scale={"weight": 0.2, "bias": 1.0}))
    target, method = Target(model, 100, 0.5), IVON(hessian_momentum=0.9, **options)
    state, generator = begun(method, target, (x, y)), torch.Generator().manual_seed(1)
    delta = {name: model.prior.scale_of(name) ** -2 / 100 for name in state.params}
    flat = replace(target, model=replace(model, prior=ivon._Flat()))
    assert (max(leaf.numel() for leaf in state.params.values()) > ivon.PIECE) == (outputs == 300)
    clipped = 0
    for t in range(1, 4):
        old = copy.deepcopy(state)
        draws = [old.drawn, tree.apply(lambda m, leaf: 2 * m - leaf, old.params, old.drawn)][: method.samples]
        slopes = [flat.gradient(w, [(x, y)], {}, train=True, factor=-0.5 / 100).gradient for w in draws]
        state, _ = method.step(target, state, [(x, y)], generator)
        rate = 0.1 * (min(1, t / 20) if method.warmup else 0.5 * (1 + math.cos(math.pi * (t - 1) / 100)))
        for name, m in old.params.items():
            h, d = 1 / old.spread[name] - delta[name], delta[name]
            variance = 1 / (200 * (h + d))
            g = sum(s[name] for s in slopes) / len(slopes)
            estimate = sum(s[name] * (w[name] - m) / variance for s, w in zip(slopes, draws, strict=True)) / len(slopes)
            momentum = 0.9 * old.momentum[name] + 0.1 * g
            h = 0.9 * h + 0.1 * estimate + 0.5 * 0.1**2 * (h - estimate) ** 2 / (h + d)
            step = (0.5 + d) * momentum / (1 - 0.9**t) / (h + d)
            if method.clip is not None:
                clipped += int((step.abs() > 1e-2).sum())
                step = step.clamp(-1e-2, 1e-2)
            step = rate * (step + (0.5 + d) * d * m / (h + d))
            assert torch.allclose(state.momentum[name], momentum, rtol=1e-9, atol=1e-15)
            assert torch.allclose(1 / state.spread[name], h + d, rtol=1e-9)
            assert torch.allclose(state.params[name], m - step, rtol=1e-9, atol=1e-12)
    assert (clipped > 0) == (method.clip is not None)
    with torch.no_grad():
        away = tree.flatten(tree.apply(lambda w, m, s: (w - m) / s.sqrt(), state.drawn, state.params, state.spread)) * 200**0.5
    assert abs(float(away.mean())) < 5 / len(away) ** 0.5
    assert abs(float(away.var()) - 1) < 5 * (2 / len(away)) ** 0.5


def test_noise_of_wide_networks_is_that_of_q():
    """Drawn by the faster generator, in single precision."""
    model = Model(seeded(lambda: nn.Linear(300, 300)), Gaussian(scale=1.0))
    target = Target(model, 50, 2.0)
    state = begun(IVON(), target, (torch.zeros(4, 300), torch.zeros(4, 300)))
    away = (state.drawn["weight"] - state.params["weight"]) / (2 / 50 * state.spread["weight"]).sqrt()
    at = torch.arange(1, 10) / 10
    assert torch.allclose(away.flatten().quantile(at), torch.distributions.Normal(0.0, 1.0).icdf(at), atol=0.03)
    assert abs(float(away.var()) - 1) < 5 * (2 / 90_000) ** 0.5


def test_one_leaf_and_many_move_alike():
    g = torch.Generator().manual_seed(0)
    mean, spread, momentum, drawn, slope = (torch.rand(5, generator=g, dtype=torch.float64) for _ in range(5))
    for most in (None, [0.2]):
        rule = ivon._Rule(0.1, 0.6, 0.3, [0.02], [-0.01], [-0.2], most)
        one, many = ([leaf.clone() for leaf in (mean, spread, momentum)] for _ in range(2))
        rule.one(*one, drawn, slope, torch.empty(5).double(), torch.empty(5).double())
        rule.many(*([leaf] for leaf in many), [drawn], [slope], [], [torch.empty(5).double()], [torch.empty(5).double()])
        assert all(torch.allclose(a, b, rtol=1e-14) for a, b in zip(one, many, strict=True))


def test_spreads_stay_positive_whatever_the_gradients():
    x, y = data()
    model = Model(seeded(plain), Gaussian(scale=0.01), Normal(scale=100.0))
    method = IVON(epochs=5, hessian_momentum=0.0, learning_rate=1e-6)  # the Hessian is the last estimate, of either sign
    variance = dubito.fit(model, method, (x, y), batch_size=4).covariance.variance()
    assert all((leaf > 0).all() and torch.isfinite(leaf).all() for leaf in variance.values())


def test_what_the_data_say_nothing_of_is_as_the_prior_has_it():
    """With a scale for each parameter, exactly: there is no noise in a gradient of zero."""
    x, y = torch.zeros(30, 2), torch.zeros(30, 1)
    model = Model(nn.Linear(2, 1), Gaussian(scale=0.5), Normal(scale={"weight": 0.3, "bias": 2.0}))
    found = dubito.fit(model, IVON(epochs=250, hessian_momentum=0.9, learning_rate=1.0), (x, y))
    assert torch.allclose(found.covariance.variance()["weight"], torch.tensor(0.09))
    assert torch.allclose(found.params["weight"], torch.zeros(1, 2), atol=1e-3)
    assert float(found.covariance.variance()["bias"]) < 0.1


def test_any_prior_will_do():
    """A Gaussian that is not known to be one is estimated, and comes to the same."""
    model, source, mean, precision = regressions(60)
    like = {"weight": torch.full((ROWS, 3), SCALE**2, dtype=torch.float64)}
    prior = MultivariateNormal({"weight": torch.zeros(ROWS, 3).double()}, Diagonal.of(like))
    method = IVON(epochs=320, samples=2, hessian_momentum=0.985, initial_hessian=5.0)
    found = dubito.fit(replace(model, prior=prior), method, source, batch_size=60, temperature=0.5)
    assert torch.allclose(found.params["weight"].mean(0), mean, rtol=0, atol=1e-3)
    assert torch.allclose((1 / found.covariance.variance()["weight"]).mean(0), 2 * precision.diag(), rtol=0.04)


def test_scales_of_the_prior_count_in_the_bound():
    prior = dubito.priors.Hierarchical(dubito.priors.InverseGamma(2.0, 2.0))
    model = dubito.Model(nn.Linear(2, 1), dubito.Gaussian(scale=0.5), prior)
    data = torch.ones(8, 2), torch.ones(8, 1)
    posterior = dubito.fit(model, IVON(epochs=2), data)
    assert "prior:log_scale:weight" in posterior.covariance.shapes
    exact, drawn = (dubito.elbo(posterior, data, draws=n).complexity for n in (2, 3))
    assert exact == drawn, "in closed form"


def test_a_learned_noise_is_gaussian_too():
    """Its mean is near the size of the residuals, its variance 1 / (2 N)."""
    x, y = data(400)
    y = y + 0.5 * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    found = dubito.fit(Model(nn.Linear(3, 1), Gaussian()), IVON(epochs=100, samples=2), (x, y), batch_size=100)
    rms = (y - found.predict(x).mean).square().mean().sqrt()
    assert float(found.params["likelihood:log_scale"].exp()) == pytest.approx(float(rms), rel=0.05)
    assert float(found.covariance.variance()["likelihood:log_scale"]) == pytest.approx(1 / 800, rel=0.6)
    drawn = found.sample(50)
    assert drawn["likelihood:log_scale"].std() > 0
    for how in ("sampled", "streamlined", "linearized"):
        p = found.predict(x, how)
        assert torch.isfinite(p.log_prob(y)).all()
        assert (p.uncertainty.aleatoric > 0).all()


def test_an_exception_leaves_the_state_as_it_was():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            f = self.norm(self.inner(x))
            calls.append(1)
            if len(calls) > limit:
                raise OSError("the disk is full")
            return f[:, :1]

    calls, limit = [], 10**9
    model, batch = Model(seeded(Fragile), Gaussian()), data(16)
    target, method, generator = Target(model, 16), IVON(samples=3), torch.Generator().manual_seed(0)
    state = begun(method, target, batch)
    state, _ = method.step(target, state, [batch], generator)
    for last in (0, 2):  # in the first draw's pass, or the third's
        calls, limit, before = [], last, copy.deepcopy(state)
        with pytest.raises(OSError, match="disk is full"):
            method.step(target, state, [batch], generator)
        assert state.step == before.step
        for name in ("params", "buffers", "spread", "momentum", "drawn"):
            assert all(torch.equal(leaf, getattr(before, name)[key]) for key, leaf in getattr(state, name).items()), name


def test_accumulated_batches_are_one_batch():
    x, y = data()
    for samples in (1, 2):
        method = IVON(epochs=4, samples=samples)
        model = Model(seeded(plain).double(), Gaussian(scale=0.3), Normal(scale=1.0))
        a = dubito.fit(model, method, (x.double(), y.double()), batch_size=8, accumulate=2)
        b = dubito.fit(model, method, (x.double(), y.double()), batch_size=16)
        for name in ("params", "covariance"):
            for p, q in zip(tensors(getattr(a, name)), tensors(getattr(b, name)), strict=True):
                assert torch.allclose(p, q, rtol=1e-9)


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_ensemble_is_a_mixture_of_modes(vectorize):
    model, (x, y) = Model(seeded(plain), Gaussian(scale=0.3)), data()
    found = dubito.fit(model, Ensemble(IVON(epochs=100), 3, vectorize=vectorize), (x, y), batch_size=48)
    assert isinstance(found, Mixture)
    assert all(isinstance(member, posteriors.Gaussian) for member in found.members)
    first, second, _ = (member.params["0.weight"] for member in found.members)
    assert not torch.allclose(first, second, atol=0.1)
    assert dubito.metrics.rmse(found.predict(x), y) < 1.2  # of 2.2 without a network


def test_batchnorm_statistics_follow_the_passes_at_the_draws():
    x, y = data()
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    found = dubito.fit(Model(net, Gaussian(scale=0.3)), IVON(epochs=2, samples=2), (x, y), batch_size=16)
    assert int(found.buffers["1.num_batches_tracked"]) == 2 * 3 * 2
    assert not torch.allclose(found.buffers["1.running_mean"], torch.zeros(4))
    assert int(net[1].num_batches_tracked) == 0


def test_parameters_that_are_not_bayesian_stay():
    x, y = data()
    model = Model(seeded(plain), Gaussian(scale=0.3), only="^2")
    found = dubito.fit(model, IVON(epochs=2), (x, y), batch_size=16)
    assert set(found.covariance.shapes) == {"2.weight", "2.bias"}
    assert torch.equal(found.buffers["0.weight"], model.network[0].weight)


def test_other_layouts_of_memory():
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(2)))
    x, y = torch.randn(8, 3, 6, 6), torch.randint(2, (8,))
    net(x)
    wide = dubito.fit(Model(net, Categorical()), IVON(epochs=3), (x, y), batch_size=4)
    last = dubito.fit(Model(net.to(memory_format=torch.channels_last), Categorical()), IVON(epochs=3), (x, y), batch_size=4)
    assert last.params["0.weight"].shape == wide.params["0.weight"].shape
    assert dubito.metrics.nll(last.predict(x), y) == pytest.approx(float(dubito.metrics.nll(wide.predict(x), y)), abs=0.3)


def test_it_can_be_the_prior_of_more_data():
    """At a temperature, the prior of the next fit is what it was before tempering."""
    model, (x, y), _, _ = regressions(60)
    method = IVON(epochs=100, samples=2, hessian_momentum=0.96, initial_hessian=5.0)
    first = dubito.fit(model, method, (x[:30], y[:30]), batch_size=30, temperature=0.5)
    prior = first.as_prior()
    halves = first.covariance.precision["weight"]
    assert torch.allclose(prior.covariance.precision["weight"], halves / 2)
    both = dubito.fit(replace(model, prior=prior), method, (x[30:], y[30:]), start=first, batch_size=30, temperature=0.5)
    whole = dubito.fit(model, method, (x, y), batch_size=60, temperature=0.5)
    ratio = both.covariance.precision["weight"].mean(0) / whole.covariance.precision["weight"].mean(0)
    assert torch.allclose(ratio, torch.ones(3).double(), atol=0.08)


def test_the_learning_rate_rises_and_falls():
    method = IVON(warmup=0.1)
    model = Model(nn.Linear(1, 1), Gaussian(scale=1.0))
    state = begun(method, Target(model, 4), (torch.zeros(4, 1), torch.zeros(4, 1)))
    shares = [method._share(replace(state, step=step)) for step in range(100)]
    assert shares[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] < 0.001
    assert IVON(schedule="constant")._share(replace(state, step=99)) == 1
    assert method._replaced(replace(state, steps=10_000)) == pytest.approx(0.001)
    assert method._replaced(replace(state, steps=5)) == 0.1


def test_bad_options_are_refused_in_words():
    bad = [
        ({"epochs": -1}, "epochs must be at least 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"hessian_momentum": 1.0}, "hessian_momentum must be"),
        ({"initial_hessian": 0.0}, "initial_hessian must be positive"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"schedule": "linear"}, "'cosine', 'constant'"),
    ]
    for options, words in bad:
        with pytest.raises(ValueError, match=words):
            IVON(**options)
    x, y = data()
    with pytest.raises(ValueError, match='precision="bfloat16"'):
        dubito.fit(Model(plain().bfloat16(), Gaussian(scale=0.3)), IVON(), (x.bfloat16(), y.bfloat16()))
