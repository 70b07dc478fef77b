"""Bayesian optimisation: improvement against Monte Carlo and brute force, a search that finds, and a model for BoTorch."""

from __future__ import annotations

import sys
from itertools import combinations
from types import ModuleType

import pytest
import torch
from torch import nn

import dubito
from dubito.apps.optimize import Optimization, expected_improvement, greedy_improvement, surrogate
from dubito.posteriors import Gaussian, Mixture, Point, Samples, Stochastic
from dubito.posteriors.predict.dropout import Dropout
from dubito.posteriors.predictive import LatentMixture
from dubito.priors import Normal


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(width: int = 1) -> dubito.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, 20), nn.Tanh(), nn.Linear(20, 1))
    return dubito.Model(net, dubito.Gaussian(scale=0.01), Normal(scale=1.0))


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 1), (3, 4, 1, 1), None])
def test_expected_improvement_is_that_of_draws(maximize, shape):
    means, weights = torch.randn(3, 4, 1, generator=generator(1)), torch.tensor([0.5, 0.3, 0.2])
    cov = None if shape is None else 0.1 + torch.rand(shape, generator=generator(2))
    p = LatentMixture(dubito.Gaussian(scale=0.1), means, cov, weights)
    found = expected_improvement(p, 0.2, maximize=maximize)
    source, n = generator(3), 200_000
    which = torch.multinomial(weights, n, True, generator=source)
    spread = torch.zeros(3, 4) if cov is None else cov.reshape(3, 4).sqrt()
    f = means[which, :, 0] + spread[which] * torch.randn(n, 4, generator=source)
    gain = ((f - 0.2) if maximize else (0.2 - f)).clamp_min(0)
    assert bool(((found - gain.mean(0)).abs() < 5 * gain.std(0) / n**0.5 + 1e-6).all())


def test_expected_improvement_far_away_is_zero_and_never_negative():
    p = LatentMixture(dubito.Gaussian(scale=0.1), torch.tensor([[[-50.0], [50.0]]]), torch.ones(1, 2, 1))
    assert expected_improvement(p, 0.0).tolist() == [0.0, 50.0]


def test_what_has_no_improvement_is_refused():
    with pytest.raises(ValueError, match="single output"):
        expected_improvement(LatentMixture(dubito.Gaussian(scale=0.1), torch.zeros(1, 2, 3)), 0.0)
    with pytest.raises(ValueError, match="single output"):
        expected_improvement(LatentMixture(dubito.Categorical(), torch.zeros(1, 2, 1)), 0.0)


def test_greedy_improvement_against_all_pairs():
    values, weights = torch.randn(50, 7, generator=generator(4)), torch.rand(50, generator=generator(5))
    weights = weights / weights.sum()

    def together(rows):
        return float(weights @ (values[:, list(rows)].amax(1) - 0.5).clamp_min(0))

    chosen, gains = greedy_improvement(values, 0.5, 3, weights=weights)
    assert float(gains.sum()) == pytest.approx(together(chosen.tolist()), rel=1e-5)
    assert chosen[0] == max(range(7), key=lambda i: together([i]))
    best = max(together(pair) for pair in combinations(range(7), 2))
    assert together(chosen[:2].tolist()) >= (1 - 1 / torch.e) * best  # what greedy choice is known to reach
    with pytest.raises(ValueError, match="k must be"):
        greedy_improvement(values, 0.5, 8)


@pytest.mark.parametrize("acquisition", ["ei", "thompson"])
@pytest.mark.parametrize("maximize", [True, False])
def test_a_search_finds_the_best_input(acquisition, maximize):
    method = [dubito.MAP(epochs=60, learning_rate=0.02), dubito.NeuralLinear()]
    search = Optimization(
        model(2), method, [(0.0, 1.0), (10.0, 30.0)], acquisition=acquisition, maximize=maximize, initial=6, draws=16, candidates=100,
        refine=5,
    )  # fmt: skip
    sign = 1.0 if maximize else -1.0
    for k in (6, 3, 3, 3):
        x = search.ask(k)
        assert x.shape == (k, 2)
        assert bool(((x >= search.bounds[:, 0]) & (x <= search.bounds[:, 1])).all())
        search.tell(x, -sign * ((x[:, 0] - 0.3) ** 2 + ((x[:, 1] - 15) / 20) ** 2))
    assert abs(search.best[1]) < 0.01


def test_a_search_goes_on_where_it_was_left(tmp_path):
    method = dubito.Ensemble(dubito.MAP(epochs=20, learning_rate=0.02), 3)

    def made():
        return Optimization(model(), method, [(-1.0, 1.0)], acquisition="thompson", initial=3, candidates=20, refine=2)

    def f(x):
        return torch.sin(3 * x[:, 0])

    whole, part = made(), made()
    for search in (whole, part):
        for _ in range(4):
            x = search.ask()
            search.tell(x, f(x))
    part.save(tmp_path / "search.safetensors")
    again = made()
    again.load(tmp_path / "search.safetensors")
    before = torch.get_rng_state()
    assert torch.equal(whole.ask(2), again.ask(2))
    assert torch.equal(before, torch.get_rng_state())
    early = made()
    early.tell(early.ask(), [0.0])
    early.save(tmp_path / "early.safetensors")
    again = made()
    again.load(tmp_path / "early.safetensors")
    assert torch.equal(again.ask(), made().ask(2)[1:])  # the next of those that are spread evenly
    other = Optimization(model(), method, [(-1.0, 2.0)])
    with pytest.raises(ValueError, match="another search"):
        other.load(tmp_path / "search.safetensors")


def test_a_climb_never_ends_lower_than_it_began():
    search = Optimization(model(), dubito.MAP(), [(0.0, 1.0)], refine=1)

    def value(z):
        return -(100 * z**2).sum()

    start = torch.tensor([[0.005]])  # a step of .02 goes past the top
    assert torch.equal(search._climb(value, start), start)
    assert float(search._climb(value, torch.tensor([[0.5]]))) < 0.5


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="low < high"):
        Optimization(model(), dubito.MAP(), [(1.0, 0.0)])
    with pytest.raises(ValueError, match="finite"):
        Optimization(model(), dubito.MAP(), [(0.0, float("inf"))])
    with pytest.raises(ValueError, match="'ei', 'thompson'"):
        Optimization(model(), dubito.MAP(), [(0.0, 1.0)], acquisition="pi")
    search = Optimization(model(), dubito.MAP(), [(0.0, 1.0)])
    with pytest.raises(ValueError, match="before the first value"):
        search.posterior  # noqa: B018
    with pytest.raises(ValueError, match="outside"):
        search.tell([[2.0]], [0.0])
    with pytest.raises(ValueError, match="NaN"):
        search.tell([[0.5]], [float("nan")])
    with pytest.raises(ValueError, match="got 2 for 1 inputs"):
        search.tell([[0.5]], [0.0, 1.0])
    assert len(search.y) == 0
    search.tell([[0.5]], [1.0])
    with pytest.raises(ValueError, match="is a point"):
        search.posterior  # noqa: B018


def test_inputs_that_come_back_in_single_precision_are_taken():
    search = Optimization(model(2), dubito.MAP(), [(-0.7, 0.1), (1e6, 1e6 + 0.1)])
    assert float(torch.tensor(0.1)) > 0.1
    search.tell(torch.tensor([[0.1, 1e6 + 0.1]]), [0.0])
    assert bool((search.x <= search.bounds[:, 1]).all())


def forms() -> dict[str, dubito.posteriors.Posterior]:
    one = model()
    params, buffers = one.parameters(), one.buffers()
    stacked = {name: torch.stack([leaf, leaf + 0.3, -leaf]) for name, leaf in params.items()}
    small = {name: torch.full_like(leaf, 0.1) for name, leaf in params.items()}
    return {
        "samples": Samples(one, stacked, buffers),
        "weighted": Samples(one, stacked, buffers, weights=torch.tensor([0.5, 0.3, 0.2])),
        "gaussian": Gaussian.diagonal(one, params, small),
        "dropout": Stochastic(one, params, buffers, Dropout({"0": 0.2, "2": 0.2})),
        "mixture": Mixture(one, (Point(one, params, buffers), Point(one, params, buffers)), (0.5, 0.5)),
    }


class Old:
    """As much of BoTorch's posterior of an ensemble as is filled in, before it had weights."""

    def __init__(self, values):
        self.values = values


class New(Old):
    def __init__(self, values, weights=None):
        super().__init__(values)
        self.weights = weights


def stand_in(monkeypatch, kind: type) -> None:
    parts = {"botorch.models.model": {"Model": nn.Module}, "botorch.posteriors.ensemble": {"EnsemblePosterior": kind}}
    for name in ("botorch", "botorch.models", "botorch.posteriors", *parts):
        module = ModuleType(name)
        vars(module).update(parts.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", list(forms()))
def test_what_a_surrogate_hands_over(name, monkeypatch):
    """Also without BoTorch: values [..., S, q, m] of the same functions at every call, and weights where they are not equal."""
    stand_in(monkeypatch, New)
    posterior = forms()[name]
    wrapped = surrogate(posterior, draws=6)
    x = torch.rand(4, 2, 1, dtype=torch.float64, generator=generator(6)).requires_grad_()
    p = wrapped.posterior(x)
    assert p.values.shape == (4, {"samples": 3, "weighted": 3, "mixture": 2}.get(name, 6), 2, 1)
    assert p.values.dtype == torch.float64
    assert bool((torch.autograd.grad(p.values.sum(), x)[0] != 0).all())
    torch.testing.assert_close(wrapped.posterior(x[1:, :1]).values, p.values[1:, :, :1], rtol=1e-5, atol=1e-5)
    if name == "weighted":
        torch.testing.assert_close(p.weights, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
        exact = posterior.predict(x.detach().float().reshape(-1, 1)).f_mean.reshape(4, 2, 1)
        torch.testing.assert_close((p.values * p.weights[:, None, None]).sum(-3).float(), exact)
    else:
        assert p.weights is None
    with pytest.raises(NotImplementedError, match="without the noise"):
        wrapped.posterior(x, observation_noise=True)
    stand_in(monkeypatch, Old)
    wrapped = surrogate(posterior, draws=6)
    if name == "weighted":
        with pytest.raises(ImportError, match="upgrade"):
            wrapped.posterior(x)
    else:
        torch.testing.assert_close(wrapped.posterior(x).values, p.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(forms()))
def test_surrogate_is_a_model_of_botorch(name):
    pytest.importorskip("botorch")
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.sampling.index_sampler import IndexSampler

    posterior = forms()[name]
    wrapped = surrogate(posterior, draws=40)
    x = torch.rand(4, 2, 1, dtype=torch.float64, generator=generator(6)).requires_grad_()
    p = wrapped.posterior(x)
    exact = posterior.predict(x.detach().float().reshape(-1, 1), draws=None if name in ("samples", "weighted", "mixture") else 40)
    torch.testing.assert_close(p.mean.reshape(-1, 1).float(), exact.f_mean, rtol=1e-4, atol=0.25 if name == "gaussian" else 1e-5)
    torch.autograd.grad(p.mean.sum(), x)
    score = qLogExpectedImprovement(wrapped, best_f=0.0, sampler=IndexSampler(torch.Size([40]), seed=0))(x)
    assert score.shape == (4,)
    assert bool(torch.isfinite(torch.autograd.grad(score.sum(), x)[0]).all())
    with pytest.raises(NotImplementedError, match="without the noise"):
        wrapped.posterior(x, observation_noise=True)


def test_botorch_optimises_a_surrogate():
    pytest.importorskip("botorch")
    from botorch.acquisition.analytic import LogExpectedImprovement
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf

    x = torch.linspace(-1, 1, 12, dtype=torch.float64).unsqueeze(1)
    one = model()
    one.network.double()  # in single precision L-BFGS complains of line searches that end early
    fitted = dubito.fit(one, dubito.Ensemble(dubito.MAP(epochs=150, learning_rate=0.02), 4), (x, -((x - 0.4) ** 2)))
    wrapped = surrogate(fitted)
    bounds = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    grid = torch.linspace(-1, 1, 201, dtype=torch.float64).reshape(-1, 1, 1)
    for score in (qLogExpectedImprovement(wrapped, best_f=-0.3), LogExpectedImprovement(wrapped, best_f=-0.3)):
        found, value = optimize_acqf(score, bounds, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 50})
        assert float(value) >= float(score(grid).max()) - 0.05  # members are drawn, for every batch its own
        assert abs(float(found) - 0.4) < 0.2
