"""Likelihoods of tables: outliers, counts, grades, censored times, several modes. Fitted by all kinds of methods, saved and judged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dubito
from dubito import (
    HMC,
    MAP,
    BetaNLL,
    CensoredGaussian,
    CensoredLogNormal,
    CensoredWeibull,
    Ensemble,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Laplace,
    Model,
    MultiTask,
    NaturalGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Variational,
)
from dubito.posteriors.predictive import LatentMixture
from dubito.priors import Normal

X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
MEAN = X[:, :1] - 0.5 * X[:, 1:]
Y = MEAN + 0.3 * torch.randn(40, 1, generator=torch.Generator().manual_seed(1))
COUNTS = torch.poisson(MEAN.exp(), generator=torch.Generator().manual_seed(2))
SEEN = torch.rand(40, 1, generator=torch.Generator().manual_seed(3)) < 0.6
TIMES = torch.cat([Y, torch.where(SEEN, Y, torch.inf)], -1)
GRADES = (Y > -0.5).long() + (Y > 0.5).long()

CASES = {
    "StudentT": (StudentT(), 1, Y),
    "HeteroscedasticStudentT": (HeteroscedasticStudentT(), 2, Y),
    "Poisson": (Poisson(), 1, COUNTS),
    "NegativeBinomial": (NegativeBinomial(), 1, COUNTS),
    "Ordinal": (Ordinal(3), 1, GRADES),
    "CensoredGaussian": (CensoredGaussian(), 1, TIMES),
    "CensoredLogNormal": (CensoredLogNormal(), 1, TIMES.exp()),
    "CensoredWeibull": (CensoredWeibull(), 1, TIMES.exp()),
    "GaussianMixture": (GaussianMixture(2), 6, Y),
    "NaturalGaussian": (NaturalGaussian(), 2, Y),
    "BetaNLL": (BetaNLL(), 2, Y),
}


def model_of(name: str) -> tuple[Model, torch.Tensor]:
    likelihood, outputs, y = CASES[name]
    torch.manual_seed(0)
    return Model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)), likelihood, Normal(scale=1.0)), y


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_method_fits_it(name, tmp_path):
    model, y = model_of(name)
    start = dubito.fit(model, MAP(epochs=150, learning_rate=0.02), (X, y))
    methods = {
        "ensemble": Ensemble(MAP(epochs=2), 2),
        "kronecker": Laplace("kronecker", check=False),
        "dense": Laplace("dense", check=False),
        "hmc": HMC(chains=2, draws=2, burn_in=2, step_size=1e-3, tune=False, path_length=0.01),
        "variational": Variational(epochs=2),
    }
    params = {leaf: value[None] for leaf, value in model.parameters(y).items() if ":" in leaf}
    untrained = LatentMixture(model.likelihood, torch.zeros(1, 40, CASES[name][1]), params=params).log_prob(y).mean()
    assert start.predict(X).log_prob(y).mean() > untrained + 0.1, "training does not improve the log score"
    for kind, method in methods.items():
        posterior = dubito.fit(model, method, (X, y), start=start if kind != "ensemble" else None)
        dubito.save(posterior, tmp_path / kind)
        p, q = posterior.predict(X), dubito.load(tmp_path / kind, model).predict(X)
        assert torch.equal(p.mean, q.mean), kind
        assert torch.isfinite(p.log_prob(y)).all(), kind
        assert p.sample(3).shape[:2] == (3, 40), kind
        torch.testing.assert_close(p.uncertainty.total, p.uncertainty.aleatoric + p.uncertainty.epistemic)
        if kind == "ensemble":
            assert all(math.isfinite(value) for value in dubito.judge(posterior, (X, y)).values.values())
        assert posterior.label == ("generalized (beta = 0.5)" if name == "BetaNLL" else ""), kind
    module = dubito.as_module(dubito.load(tmp_path / "dense", model), X[:3])
    assert torch.isfinite(module(X[:3])["total"]).all()


def test_what_the_judge_says_of_counts_and_of_intervals():
    f = MEAN.unsqueeze(0)
    counts = dubito.judge(lambda x: LatentMixture(Poisson(), f), (X, COUNTS)).values
    assert {"nll", "rmse", "coverage", "interval_score"} <= counts.keys()
    assert "quantile_error" not in counts  # levels of counts are not uniform
    lower, upper = LatentMixture(Poisson(), f).interval(0.9)
    assert torch.equal(lower, lower.round())
    assert torch.equal(upper, upper.round())
    seen = dubito.judge(lambda x: LatentMixture(CensoredGaussian(0.3), f), (X, TIMES))
    assert seen.values.keys() == {"nll", "sharpness", "total", "aleatoric", "epistemic"}
    exact = dubito.judge(lambda x: LatentMixture(CensoredGaussian(0.3), f), (X, Y), metrics=["rmse", "crps", "coverage"])
    plain = dubito.judge(lambda x: LatentMixture(Gaussian(scale=0.3), f), (X, Y), metrics=["rmse", "crps", "coverage"])
    assert exact.values == pytest.approx(plain.values)
    with pytest.raises(ValueError, match="some targets are intervals"):
        dubito.metrics.rmse(LatentMixture(CensoredGaussian(0.3), f), TIMES)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
def test_censored_targets_tell_less_of_the_weights(structure):
    """The curvature is that of the intervals' probabilities: for a linear model it is the Hessian of the log likelihood."""
    model = Model(nn.Linear(2, 1, bias=False), CensoredGaussian(0.5), Normal(scale=1.0))

    def spread(y: torch.Tensor, structure: str, curvature: str = "ggn") -> torch.Tensor:
        method = Laplace(structure, curvature=curvature, check=False)
        return dubito.fit(model, method, (X, y), start=model.parameters()).predict(X).f_var.sum()

    censored = spread(TIMES, structure)
    assert censored > 1.1 * spread(Y, structure)
    if structure == "dense":
        torch.testing.assert_close(censored, spread(TIMES, "dense", "hessian"), rtol=1e-4, atol=0)


def test_likelihoods_of_tasks_of_which_only_one_has_a_prior():
    """The gradient of the prior must not fail over a learned number that has none."""
    precision = torch.distributions.Gamma(2.0, 1.0)
    tasks = MultiTask({"a": (Gaussian(prior=precision), 1), "b": (Gaussian(), 1), "c": (StudentT(), 1)})
    posterior = dubito.fit(Model(nn.Linear(2, 3), tasks), MAP(epochs=1), (X, torch.cat([Y, Y, Y], -1)))
    assert torch.isfinite(posterior.predict(X).mean).all()


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "message"),
    [
        (Poisson(), (3, 1), torch.tensor([0.0, 1.5, 2.0]), "Poisson are counts, whole numbers from 0 on"),
        (NegativeBinomial(), (3, 1), torch.tensor([0.0, -1.0, 2.0]), "NegativeBinomial are counts"),
        (Ordinal(3), (3, 2), torch.tensor([0, 1, 2]), "one output; this one has 2"),
        (Ordinal(3), (3, 1), torch.tensor([0, 1, 3]), "the network has 3 classes"),
        (Ordinal(3), (3, 1), torch.tensor([0.0, 1.0, 2.0]), "integer indices"),
        (CensoredGaussian(), (2, 1), torch.tensor([[0.0, 1.0], [2.0, 1.0]]), "ends must not be NaN or swapped"),
        (CensoredGaussian(), (2, 1), torch.tensor([[math.nan, 1.0], [0.0, 1.0]]), "ends must not be NaN or swapped"),
        (CensoredGaussian(), (2, 1), torch.tensor([[math.inf, math.inf], [0.0, 1.0]]), "ends must not be NaN or swapped"),
        (CensoredGaussian(), (2, 1), torch.zeros(2, 3), "do not fit CensoredGaussian"),
        (CensoredWeibull(), (2, 1), torch.tensor([[0.0, 0.0], [1.0, 2.0]]), "positive; a lower end may be 0"),
        (CensoredLogNormal(), (2, 1), torch.tensor([[-1.0, 2.0], [1.0, 2.0]]), "positive; a lower end may be 0"),
        (GaussianMixture(3), (2, 8), torch.zeros(2), "9 outputs for each target; the network gives 8"),
        (NaturalGaussian(), (2, 3), torch.zeros(2), "even number of outputs; the network gives 3"),
        (StudentT((1.0, 2.0)), (2, 3), torch.zeros(2, 3), "2 noise scales, but the network has 3 outputs"),
    ],
)
def test_targets_that_do_not_fit(likelihood, f, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check(torch.zeros(f), y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StudentT(dof=2.0), "dof must be above 2"),
        (lambda: HeteroscedasticStudentT(dof=0.5), "dof must be above 2"),
        (lambda: NegativeBinomial(0.0), "positive standard deviation"),
        (lambda: Ordinal(1), "classes must be at least 2; got 1"),
        (lambda: GaussianMixture(0), "components must be at least 1; got 0"),
        (lambda: BetaNLL(beta=1.5), "beta must be at least 0 and at most 1; got 1.5"),
        (lambda: Poisson().rescaled(torch.zeros(1), torch.ones(1), {}), "counts, which have no units"),
        (lambda: CensoredWeibull(1.0).rescaled(torch.ones(1), torch.ones(1), {}), "do not shift them"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradients_of_intervals_are_finite_everywhere():
    ends = torch.tensor([[1.0, 1.0], [1.0, math.inf], [0.0, 1.0], [0.5, 0.6], [0.0, math.inf]])
    for made in (CensoredGaussian, CensoredLogNormal, CensoredWeibull):
        y = ends if made is not CensoredGaussian else torch.where(ends == 0, -math.inf, ends)
        for at in (-30.0, 0.0, 30.0):
            params = {"likelihood:log_scale": torch.zeros(1, requires_grad=True)}
            f = torch.full((5, 1), at, requires_grad=True)
            scores = made().log_prob(f, y, params)
            slopes = torch.autograd.grad(scores[scores.isfinite()].sum(), [f, *params.values()])
            assert not any(slope.isnan().any() for slope in slopes), (made, at)


def test_heteroscedastic_remedies_train_the_means():
    """A sine with little noise, of which the log likelihood alone explains most as noise (Seitzer et al. 2022)."""
    x = torch.linspace(0, 12, 300).unsqueeze(1)
    y = torch.sin(x) * 0.4 + 0.01 * torch.randn(300, 1, generator=torch.Generator().manual_seed(0))
    errors = {}
    for likelihood in (HeteroscedasticGaussian(), BetaNLL(), NaturalGaussian()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        posterior = dubito.fit(
            Model(net, likelihood, Normal(scale=3.0)), MAP(epochs=300, learning_rate=0.003), (x, y), batch_size=100
        )
        errors[type(likelihood).__name__] = float(dubito.metrics.rmse(posterior.predict(x), y))
    assert errors["BetaNLL"] < 0.5 * errors["HeteroscedasticGaussian"]
    assert errors["NaturalGaussian"] < 0.9 * errors["HeteroscedasticGaussian"]
