"""Variance scaling and quantile recalibration: closed forms, Monte Carlo, and PIT values that become uniform."""

import math
from dataclasses import replace

import pytest
import torch
from dubito.recalibrate.predictives import below, cdf, log_density
from scipy import stats
from scipy.optimize import minimize_scalar

from dubito import (
    Categorical,
    CensoredGaussian,
    CensoredLogNormal,
    CensoredWeibull,
    Gaussian,
    GaussianMixture,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    NaturalGaussian,
    Poisson,
    metrics,
)
from dubito import StudentT as StudentTNoise
from dubito.evaluation.judge import Judge
from dubito.likelihoods import NOISE
from dubito.posteriors.predictive import LatentMixture, StudentT
from dubito.recalibrate import Quantiles, RecalibratedNumbers, Variance

DOUBLE = torch.float64


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def mixture(n=6, outputs=2, draws=3, *, seed=0):
    means = torch.randn(draws, n, outputs, dtype=DOUBLE, generator=source(seed))
    return LatentMixture(Gaussian(scale=0.7), means, cov=0.1 + means**2 / 9)


def student(n=6, dof=5.0):
    means = torch.randn(1, n, 1, dtype=DOUBLE, generator=source())
    shape, rate = torch.tensor([dof / 2], dtype=DOUBLE), torch.tensor([1.5], dtype=DOUBLE)
    return StudentT(Gaussian(), means, means.abs(), shape, rate)


PREDICTIVES = {"mixture": mixture, "student": student}


def warped(before, knots=(0.0, 0.1, 0.3, 0.8, 1.0), shares=(0.0, 0.02, 0.5, 0.9, 1.0)):
    levels = torch.tensor(knots, dtype=DOUBLE).unsqueeze(-1).expand(-1, before.mean.shape[-1]).contiguous()
    return RecalibratedNumbers(before, levels, torch.tensor(shares, dtype=DOUBLE))


# --- variance ---


def test_a_gaussian_in_closed_form():
    f = torch.randn(1, 500, 2, dtype=DOUBLE, generator=source())
    y = f[0] + torch.tensor([0.5, 3.0], dtype=DOUBLE) * torch.randn(500, 2, dtype=DOUBLE, generator=source(1))
    p = LatentMixture(Gaussian(scale=1.0), f)
    fix = Variance().fit(p, y)
    torch.testing.assert_close(fix.factor, (y - f[0]).square().mean(0).sqrt())
    q = fix(p)
    torch.testing.assert_close(q.mean, p.mean)
    torch.testing.assert_close(q.uncertainty.total, (p.uncertainty.total * fix.factor**2))
    here = metrics.nll(q, y)
    for other in (0.98, 1.02):
        assert here < metrics.nll(type(fix)(fix.factor * other, 1)(p), y)
    shared = Variance(per_output=False).fit(p, y)
    torch.testing.assert_close(shared.factor, (y - f[0]).square().mean().sqrt().expand(2))


@pytest.mark.parametrize("kind", PREDICTIVES)
def test_others_at_the_minimum_of_the_log_score(kind):
    p = PREDICTIVES[kind](200)
    y = p.mean + 3 * (p.sample(1, source(1))[0] - p.mean)
    fix = Variance().fit(p, y)
    for c in range(y.shape[1]):

        def score(log_s, c=c):
            back = p.mean + (y - p.mean) / math.exp(log_s)
            return float((log_s - log_density(p, back))[:, c].sum())

        oracle = minimize_scalar(score, bounds=(-1, 3), method="bounded", options={"xatol": 1e-8})
        assert float(fix.factor[c]) == pytest.approx(math.exp(oracle.x), rel=1e-4)
    q = fix(p)
    assert type(q) is type(p)
    torch.testing.assert_close(q.mean, p.mean)
    torch.testing.assert_close(q.quantile(0.9), p.mean + fix.factor * (p.quantile(0.9) - p.mean), atol=1e-6, rtol=1e-6)
    assert metrics.crps(q, y) < metrics.crps(p, y)
    parts = (
        [(LatentMixture(p.likelihood, p.means[:, i : i + 70], p.cov[:, i : i + 70]), y[i : i + 70]) for i in range(0, 200, 70)]
        if (isinstance(p, LatentMixture))
        else [(p, y)]
    )
    torch.testing.assert_close(Variance().fit(parts).factor, fix.factor, rtol=1e-6, atol=0)


def test_noise_that_is_learned_or_predicted_is_stretched_as_well():
    f = torch.randn(2, 50, 1, generator=source())
    y = f.mean(0) + 2 * torch.randn(50, 1, generator=source(1))
    learned = LatentMixture(Gaussian(), f, params={NOISE: torch.zeros(1)})
    predicted = LatentMixture(HeteroscedasticGaussian(), torch.cat([f, torch.zeros_like(f)], -1))
    for p in (learned, predicted):
        fix = Variance().fit(p, y)
        torch.testing.assert_close(fix(p).mean, p.mean)
        torch.testing.assert_close(fix(p).uncertainty.total, (fix.factor**2 * p.uncertainty.total).float())
        torch.testing.assert_close(fix(p).uncertainty.epistemic, (fix.factor**2 * p.uncertainty.epistemic).float())
    torch.testing.assert_close(Variance().fit(learned, y).factor, Variance().fit(predicted, y).factor, rtol=1e-4, atol=0)
    moments = Variance(by="moments").fit(learned, y).factor
    torch.testing.assert_close(moments, ((y - f.mean(0)) ** 2 / learned.uncertainty.total).double().mean(0).sqrt())


# --- quantiles ---


def wide(p, n):
    """The first input n times."""
    rows = {"means": p.means[:, :1].expand(-1, n, -1)}
    name = "cov" if isinstance(p, LatentMixture) else "spread"
    return replace(p, **rows, **{name: getattr(p, name)[:, :1].expand(-1, n, -1)})


GRID = 0.2 * torch.linspace(-7, 7, 3001, dtype=DOUBLE).sinh()  # to 110 on each side, and fine in the middle


def integral(values):
    return float(torch.trapezoid(values, GRID))


@pytest.mark.parametrize("kind", PREDICTIVES)
def test_truncated_moments(kind):
    p = PREDICTIVES[kind](1)
    rows = wide(p, len(GRID))
    density = log_density(rows, rows.mean + GRID.unsqueeze(-1)).exp()[:, 0]
    assert integral(density) == pytest.approx(1, abs=1e-5)
    q = p.quantile(0.3) - p.mean
    for found, power in zip(below(p, q), (1, 2), strict=True):
        exact = integral(GRID**power * density * (q[0, 0] >= GRID))
        assert float(found[0, 0]) == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("kind", PREDICTIVES)
def test_the_mapped_predictive_against_integrals_of_its_density(kind):
    before = PREDICTIVES[kind](2)
    p, rows = warped(before), warped(wide(before, len(GRID)))
    y = before.mean[0] + GRID.unsqueeze(-1)
    k = rows._piece(rows.before.cdf(y))
    density = (log_density(rows.before, y) + rows._slopes[k, torch.arange(y.shape[1])].log()).exp()[:, 0]
    total, mean, square = (integral(y[:, 0] ** power * density) for power in range(3))
    assert total == pytest.approx(1, abs=1e-3)
    assert float(p.mean[0, 0]) == pytest.approx(mean, abs=2e-3)
    assert float(p.uncertainty.total[0, 0]) == pytest.approx(square - mean**2, abs=5e-3)
    torch.testing.assert_close(p.uncertainty.aleatoric + p.uncertainty.epistemic, p.uncertainty.total)
    share = rows.cdf(y)[:, 0]
    for at in (0.3, 4.0):
        score = integral((share - (y[:, 0] >= at).double()) ** 2)
        assert float(p.crps(torch.full_like(p.mean, at))[0, 0]) == pytest.approx(score, abs=6e-3)
    for level in (0.01, 0.4, 0.97):
        torch.testing.assert_close(p.cdf(p.quantile(level)), torch.full_like(p.mean, level))
    lower, upper = p.interval(0.8)
    torch.testing.assert_close(p.cdf(upper) - p.cdf(lower), torch.full_like(p.mean, 0.8))
    draws = p.sample(500, source())
    assert stats.kstest(share_of(p, draws), "uniform").pvalue > 1e-3
    assert torch.equal(draws[:5], p.sample(500, source())[:5])


def share_of(p, draws):
    """The levels of draws of the first output of the first input."""
    return p._mapped(cdf(p.before, draws))[:, 0, 0].numpy()


def test_joint_density_is_the_product_and_crps_is_that_of_a_gaussian():
    p = warped(mixture(3))
    y = torch.randn(3, 2, dtype=DOUBLE, generator=source())
    k = p._piece(p.before.cdf(y))
    each = log_density(p.before, y) + p._slopes[k, torch.arange(2)].log()
    torch.testing.assert_close(p.log_prob(y), each.sum(-1))
    for before in (mixture(4), student(4)):  # the identity changes nothing
        same = warped(before, (0.0, 0.5, 1.0), (0.0, 0.5, 1.0))
        y = before.mean + 1.3
        assert float(same.crps(y).mean()) == pytest.approx(float(metrics.crps(before, y)), abs=2e-4)
        torch.testing.assert_close(same.mean, before.mean, atol=1e-8, rtol=0)
        torch.testing.assert_close(same.uncertainty.total, before.uncertainty.total, atol=1e-6, rtol=0)
    moved = p.rescaled(torch.tensor([1.0, 2.0], dtype=DOUBLE), torch.tensor([3.0, 0.5], dtype=DOUBLE))
    torch.testing.assert_close(moved.mean, torch.tensor([1.0, 2.0]) + torch.tensor([3.0, 0.5]) * p.mean)


@pytest.mark.parametrize("per_output", [True, False])
def test_levels_become_uniform(per_output):
    def drawn(seed):  # the truth is skewed, shifted, and narrower
        f = torch.randn(1, 3000, 2, dtype=DOUBLE, generator=source(seed))
        noise = -torch.rand(3000, 2, dtype=DOUBLE, generator=source(seed + 100)).log() - 0.5
        return LatentMixture(Gaussian(scale=2.0), f), f[0] + noise

    (p, y), (other, answers) = drawn(0), drawn(1)
    fix = Quantiles(per_output=per_output).fit(p, y)
    q = fix(other)
    assert stats.kstest(metrics.pit(other, answers).flatten().numpy(), "uniform").pvalue < 1e-10
    assert stats.kstest(metrics.pit(q, answers).flatten().numpy(), "uniform").statistic < 0.025
    assert metrics.quantile_error(q, answers) < 0.1 * metrics.quantile_error(other, answers)
    assert metrics.nll(q, answers) < metrics.nll(other, answers) - 0.5
    assert float(metrics.coverage(q, answers)) == pytest.approx(0.9, abs=0.02)
    assert metrics.width(q, answers) < metrics.width(other, answers)
    shares = Quantiles(pieces=3001).fit(p, y)(p)  # as many pieces as it takes: uniform to one rank where it was fitted
    values = metrics.pit(shares, y).sort(0).values[:, 0]
    far = (values - torch.arange(1, 3001, dtype=DOUBLE) / 3001).abs().max()
    assert float(far) < (1.01 / 3001 if per_output else 0.03)


def test_judge_takes_what_comes_out():
    from dubito.evaluation.judge import Judge

    p = mixture(100, 1)
    y = p.sample(1, source(1))[0] + 1
    found = Judge()
    found.update(Quantiles(pieces=5).fit(p, y)(p), y)
    values = found.compute().values
    assert values["quantile_error"] < 0.06
    assert {"nll", "rmse", "coverage", "interval_score"} <= set(values)


def test_errors_in_words():
    p, y = mixture(40), mixture(40).mean
    classes = LatentMixture(Categorical(), torch.zeros(1, 2, 2))
    for method in (Variance(), Quantiles()):
        name = type(method).__name__
        with pytest.raises(ValueError, match=f"{name} is for regression, and Categorical predicts classes: .* Temperature"):
            method.fit(classes, torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="do not fit"):
            method.fit(p, y[:3])
        with pytest.raises(ValueError, match="was fitted to 2 outputs; this predictive has 1"):
            method.fit(p, y + torch.randn(40, 2, dtype=DOUBLE, generator=source()))(student(3))
        with pytest.raises(ValueError, match="a RecalibratedNumbers is neither"):
            method.fit(warped(p), y)
    with pytest.raises(ValueError, match=r"100% of the held-out targets .* fit Variance first"):
        Quantiles().fit(p, y + 100)
    with pytest.raises(ValueError, match="without an error"):
        Variance().fit(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 3, 1)), torch.zeros(3))
    with pytest.raises(ValueError, match="by must be one of 'nll', 'moments'; got 'mad'"):
        Variance(by="mad")
    with pytest.raises(ValueError, match="pieces must be at least 1"):
        Quantiles(pieces=0)
    with pytest.raises(ValueError, match="level must be above 0 and below 1"):
        warped(p).quantile(1.0)


# --- every likelihood of numbers ---

LIKELIHOODS = {  # and outputs for each of two targets
    "student": (StudentTNoise(0.5, dof=5.0), 1),
    "predicted student": (HeteroscedasticStudentT(dof=6.0), 2),
    "natural": (NaturalGaussian(), 2),
    "mixture": (GaussianMixture(2), 6),
    "censored": (CensoredGaussian(0.5), 1),
    "log-normal": (CensoredLogNormal(0.5), 1),
    "weibull": (CensoredWeibull(0.6), 1),
}
POSITIVE = ("log-normal", "weibull")


def predicted(kind, n=4, *, spread=False):
    """Draws of the outputs, or a Gaussian over each."""
    likelihood, width = LIKELIHOODS[kind]
    f = 0.7 * torch.randn(3, 1, 2 * width, dtype=DOUBLE, generator=source(3)).expand(-1, n, -1)
    return LatentMixture(likelihood, f, cov=torch.full_like(f, 0.2) if spread else None)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_draws_of_every_likelihood_have_the_moments_and_quantiles_of_the_map(kind):
    p = warped(predicted(kind, 1, spread=kind in ("student", "censored")))
    draws = p.before.sample(50_000, source(5))  # weighed by the slope of the map, these are draws of p
    weights = p._slopes[p._piece(cdf(p.before, draws)), torch.arange(2)].squeeze(1)
    draws = draws.squeeze(1)
    mean = (weights * draws).mean(0)
    scale = p.uncertainty.total[0].sqrt()
    assert (weights.mean(0) - 1).abs().max() < 0.02
    assert ((p.mean[0] - mean) / scale).abs().max() < 0.02
    assert ((weights * (draws - mean) ** 2).mean(0) / scale**2 - 1).abs().max() < 0.12
    for level in (0.1, 0.5, 0.9):
        share = (weights * (draws <= p.quantile(level))).mean(0)
        assert (share - level).abs().max() < 0.01
    assert stats.kstest(share_of(p, p.sample(1000, source())), "uniform").pvalue > 1e-3
    line = p.quantile(0.001) + (p.quantile(0.999) - p.quantile(0.001)) * torch.linspace(0, 1, 2001, dtype=DOUBLE).unsqueeze(-1)
    rows = warped(predicted(kind, len(line), spread=kind in ("student", "censored")))
    density = log_density(rows.before, line).exp() * rows._slopes[rows._piece(rows.before.cdf(line)), torch.arange(2)]
    assert (torch.trapezoid(density, line, dim=0) - 0.998).abs().max() < 0.005
    torch.testing.assert_close(rows.log_prob(line), density.log().sum(-1))


@pytest.mark.parametrize("kind", [kind for kind in LIKELIHOODS if kind not in POSITIVE])
def test_every_likelihood_on_a_line_is_stretched_around_its_means(kind):
    p = predicted(kind, 300)
    y = p.mean + 3 * (p.sample(300, source(1)).diagonal(dim1=0, dim2=1).mT - p.mean)
    fix = Variance().fit(p, y)
    q = fix(p)
    assert ((fix.factor - 3).abs() < 0.8).all()
    torch.testing.assert_close(q.mean, p.mean)
    torch.testing.assert_close(q.uncertainty.total, p.uncertainty.total * fix.factor**2)
    torch.testing.assert_close(q.uncertainty.epistemic, p.uncertainty.epistemic * fix.factor**2)
    torch.testing.assert_close(q.cdf(p.mean + fix.factor * (y - p.mean)), p.cdf(y))
    torch.testing.assert_close(log_density(q, p.mean + fix.factor * (y - p.mean)), log_density(p, y) - fix.factor.log())
    assert metrics.nll(q, y) < metrics.nll(p, y) - 0.5
    level = Quantiles().fit(q, y)(q)
    assert abs(float(metrics.coverage(level, y)) - 0.9) < 0.04


def test_what_cannot_be_stretched_or_mapped_exactly_is_refused():
    for kind in POSITIVE:
        with pytest.raises(ValueError, match="no outputs of Censored.* do that: use Quantiles"):
            Variance().fit(predicted(kind), torch.ones(4, 2))
    with pytest.raises(ValueError, match="Variance needs draws of the outputs of NaturalGaussian"):
        Variance().fit(predicted("natural", spread=True), torch.ones(4, 2))
    for method in (Variance(), Quantiles()):
        with pytest.raises(ValueError, match="Poisson predicts counts"):
            method.fit(LatentMixture(Poisson(), torch.zeros(2, 3, 1)), torch.tensor([0.0, 1.0, 2.0]))


def test_a_target_that_is_missing_counts_nothing():
    p = LatentMixture(HeteroscedasticGaussian(missing=True), torch.zeros(1, 2, 2, dtype=DOUBLE))
    score = warped(p).log_prob(torch.tensor([[0.3], [math.nan]], dtype=DOUBLE))
    assert score[0] != 0
    assert score[1] == 0


def test_a_recalibrated_predictive_is_judged_by_all_metrics():
    p, y = mixture(60, 1), torch.randn(60, 1, dtype=DOUBLE, generator=source())
    q = Quantiles().fit(p, y)(p)
    judge = Judge()
    judge.update(q, y)
    found = judge.compute().values
    assert found["crps"] == pytest.approx(float(metrics.crps(q, y)), rel=1e-9)
    assert found["crps"] == pytest.approx(float(q.crps(y).mean()), rel=1e-9)
    assert {"nll", "rmse", "coverage", "quantile_error"} <= found.keys()
