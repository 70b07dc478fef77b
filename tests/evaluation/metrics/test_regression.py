"""Quantiles, intervals and PIT values against scipy and simulation."""

import math

import pytest
import torch
from scipy import stats

import dubito
from dubito import Categorical, Gaussian, HeteroscedasticGaussian
from dubito.metrics import coverage, crps, interval_score, pit, quantile_calibration, quantile_error, sharpness, width
from dubito.posteriors.predictive import LatentMixture, StudentT

DOUBLE = torch.float64


def mixture(n=40, covariance=False, likelihood=None):
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(5, n, 2, dtype=DOUBLE, generator=generator)
    cov = torch.rand(5, n, 2, dtype=DOUBLE, generator=generator) if covariance else None
    weights = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=DOUBLE)
    return LatentMixture(likelihood or Gaussian(scale=(0.3, 0.7)), f, cov, weights)


@pytest.mark.parametrize("covariance", [False, True])
def test_pit_of_a_mixture_against_scipy(covariance):
    p, y = mixture(covariance=covariance), torch.randn(40, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    variance = torch.tensor([0.3, 0.7], dtype=DOUBLE) ** 2 + (0 if p.cov is None else p.cov)
    each = stats.norm.cdf(y, p.means, variance.sqrt().expand_as(p.means))
    expected = (p.weights[:, None, None].numpy() * each).sum(0)
    torch.testing.assert_close(pit(p, y), torch.from_numpy(expected))


def test_pit_of_a_student_t_against_scipy():
    generator = torch.Generator().manual_seed(0)
    means, spread = (
        torch.randn(1, 9, 2, generator=generator, dtype=DOUBLE),
        torch.rand(1, 9, 2, generator=generator, dtype=DOUBLE),
    )
    shape, rate = torch.tensor([1.5, 4.0], dtype=DOUBLE), torch.tensor([2.0, 0.5], dtype=DOUBLE)
    p, y = StudentT(Gaussian(), means, spread, shape, rate), torch.randn(9, 2, generator=generator, dtype=DOUBLE)
    p = StudentT(Gaussian(outputs=2), means, spread, shape, rate)
    scale = (rate / shape * (1 + spread[0])).sqrt()
    torch.testing.assert_close(pit(p, y), torch.from_numpy(stats.t.cdf(y, 2 * shape, means[0], scale)))


@pytest.mark.parametrize("likelihood", [Gaussian(scale=(0.3, 0.7)), HeteroscedasticGaussian()])
def test_own_draws_are_calibrated(likelihood):
    one = mixture(1, covariance=True, likelihood=likelihood)
    y = one.sample(2000, torch.Generator().manual_seed(0))[:, 0]
    same = LatentMixture(likelihood, one.means.expand(-1, 2000, -1), one.cov.expand(-1, 2000, -1), one.weights)
    values = pit(same, y)
    for c in range(values.shape[1]):
        assert stats.kstest(values[:, c], "uniform").pvalue > 1e-3
    assert float(quantile_error(same, y)) < 0.02
    wide = LatentMixture(likelihood, same.means, 4 * same.cov + 4, same.weights)
    assert float(quantile_error(wide, y)) > 0.05


def test_quantile_calibration_is_the_share_below_the_quantiles():
    p, y = mixture(), torch.randn(40, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    levels = [0.05, 0.5, 0.8]
    found = quantile_calibration(p, y, levels=levels)
    assert found.observed.tolist() == [float((y <= p.quantile(level)).double().mean()) for level in levels]
    assert found.n == 80
    assert float(quantile_error(p, y, levels=levels)) == pytest.approx(
        float((found.observed - torch.tensor(levels)).abs().mean())
    )
    with pytest.raises(ValueError, match="lie between 0 and 1; got \\[0.5, 1.0\\]"):
        quantile_calibration(p, y, levels=[0.5, 1.0])
    with pytest.raises(ValueError, match="quantile_error is for regression"):
        quantile_error(LatentMixture(Categorical(), torch.zeros(1, 2, 3)), torch.zeros(2).long())


def test_interval_score_by_hand_and_proper():
    p = LatentMixture(Gaussian(scale=2.0), torch.zeros(1, 3, 1, dtype=DOUBLE))
    upper = 2 * stats.norm.ppf(0.9)
    y = torch.tensor([0.0, upper + 1, -upper - 2], dtype=DOUBLE)
    assert float(interval_score(p, y, level=0.8)) == pytest.approx(2 * upper + (0 + 10 + 20) / 3)
    y = torch.randn(4000, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    scores = [
        float(interval_score(LatentMixture(Gaussian(scale=s), torch.zeros(1, 4000, 1, dtype=DOUBLE)), y)) for s in (0.7, 1.0, 1.4)
    ]
    assert scores[1] < min(scores[0], scores[2])


def test_sharpness_is_the_spread_of_draws():
    p = mixture(3, covariance=True)
    draws = p.sample(40_000, torch.Generator().manual_seed(0))
    assert float(sharpness(p)) == pytest.approx(math.sqrt(float(draws.var(0).mean())), rel=0.02)
    assert sharpness(p, torch.zeros(3, 2)) == sharpness(p)


def test_the_level_of_an_interval_is_checked():
    p, y = mixture(), torch.zeros(40, 2)
    for metric in (coverage, width, interval_score):
        with pytest.raises(ValueError, match="level must be above 0 and below 1; got 90"):
            metric(p, y, level=90)


def test_a_target_at_a_quantile_counts_as_below_it():
    p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 3, 1))
    assert quantile_calibration(p, torch.tensor([0.0, 0.0, 1.0]), levels=[0.5]).observed.tolist() == pytest.approx([2 / 3])


def test_crps_of_no_examples():
    assert crps(LatentMixture(Gaussian(scale=1.0), torch.zeros(3, 0, 2)), torch.zeros(0, 2)).isnan()
    none, one = torch.zeros(1, 0, 1), torch.tensor([3.0])
    assert crps(StudentT(Gaussian(), none, none, one, one), torch.zeros(0)).isnan()


@pytest.mark.parametrize("scale", [1e-22, 1e-19, 1.0, 1e20])
def test_crps_at_scales_whose_squares_floats_do_not_hold(scale):
    p = LatentMixture(Gaussian(scale=scale), torch.zeros(1, 1, 1))
    assert float(crps(p, torch.zeros(1, 1))) / scale == pytest.approx((math.sqrt(2) - 1) / math.sqrt(math.pi), rel=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "shift"),
    [
        (dubito.StudentT(0.3, dof=3.0), 1, 0.0),
        (dubito.HeteroscedasticStudentT(dof=4.0), 2, 0.0),
        (dubito.GaussianMixture(2), 6, 0.0),
        (dubito.CensoredWeibull(0.5), 1, 0.0),
        (dubito.Poisson(), 1, 1.0),
        (dubito.NegativeBinomial(0.5), 1, 1.0),
        (dubito.Poisson(), 1, 10.0),
    ],
)
def test_crps_of_other_noise_is_that_of_draws(likelihood, outputs, shift):
    f = torch.randn(4, 30, outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + shift
    p = LatentMixture(likelihood, f)
    y = p.sample(1, torch.Generator().manual_seed(1))[0]
    first, second = (p.sample(4000, torch.Generator().manual_seed(seed)) for seed in (2, 3))
    draws = (first - y).abs() - 0.5 * (first - second).abs()
    mean, error = draws.mean((0, 1)), draws.mean(1).std() / 4000**0.5
    assert abs(float(crps(p, y) - mean)) < 4 * float(error)


def test_crps_by_quadrature_is_the_closed_form():
    f, y = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for shape in ((5, 40, 1), (40, 1))
    )
    gaussian, many = LatentMixture(Gaussian(scale=0.3), f), LatentMixture(dubito.StudentT(0.3, dof=1e6), f)
    assert float(crps(many, y)) == pytest.approx(float(crps(gaussian, y)), rel=1e-4)
    poisson, rates = LatentMixture(dubito.Poisson(), f), f.exp()
    grid = torch.arange(0, 60, dtype=torch.float64).reshape(-1, 1, 1, 1)
    below = torch.special.gammaincc(grid + 1, rates).mean(1)
    exact = (below - (grid[:, 0] >= y.round().abs()).double()).square().sum(0).mean()
    assert float(crps(poisson, y.round().abs())) == pytest.approx(float(exact))
