"""The Student-t predictive against scipy, against Monte Carlo, and as all of the library uses a predictive."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats

from dubito import Gaussian, measures, metrics
from dubito.posteriors.predictive import LatentMixture, StudentT, concatenate
from dubito.report.functions import Curve, band

DOUBLE = torch.float64


def predictive(*, shared: bool = False, dtype: torch.dtype = DOUBLE, a: float = 2.5) -> StudentT:
    g = torch.Generator().manual_seed(0)
    means, spread = torch.randn(1, 6, 2, generator=g, dtype=DOUBLE), torch.rand(1, 6, 2, generator=g, dtype=DOUBLE) + 0.1
    if shared:
        spread = spread[..., :1].expand_as(spread)
        return StudentT(Gaussian(), means.to(dtype), spread.to(dtype), torch.tensor([a]).double(), torch.tensor([0.8]).double())
    shape, rate = torch.tensor([a, 2 * a], dtype=DOUBLE), torch.tensor([0.8, 3.0], dtype=DOUBLE)
    return StudentT(Gaussian(outputs=2), means.to(dtype), spread.to(dtype), shape, rate)


def reference(p: StudentT):
    scale = (p.rate / p.shape * (1 + p.spread[0])).sqrt()
    return stats.t(df=2 * p.shape.numpy(), loc=p.mean.numpy(), scale=scale.numpy())


@pytest.mark.parametrize("a", [0.3, 0.501, 1.0, 2.5, 40.0, 5e3, 1e6])
def test_density_cdf_and_quantiles_are_scipys(a):
    p = predictive(a=a)
    exact, y = reference(p), torch.linspace(-30, 30, 12, dtype=DOUBLE).reshape(6, 2)
    assert torch.allclose(p.log_prob(y), torch.from_numpy(exact.logpdf(y.numpy())).sum(-1), rtol=1e-8)
    assert torch.allclose(p.cdf(y), torch.from_numpy(exact.cdf(y.numpy())), rtol=1e-7, atol=1e-300)
    assert torch.allclose(p.cdf(p.mean), torch.tensor(0.5).double())
    for level in (1e-6, 0.05, 0.4, 0.5, 0.95, 0.999):
        assert torch.allclose(p.quantile(level), torch.from_numpy(exact.ppf(level)), rtol=1e-7, atol=1e-9)
    low, high = p.interval(0.8)
    assert torch.allclose(p.cdf(high) - p.cdf(low), torch.tensor(0.8).double())


def test_total_is_aleatoric_plus_epistemic_and_the_variance():
    p = predictive()
    u = p.uncertainty
    assert torch.allclose(u.total, torch.from_numpy(reference(p).var()))
    assert torch.allclose(u.total, u.aleatoric + u.epistemic)
    assert torch.equal(u.epistemic, p.f_var)
    assert torch.allclose(u.aleatoric, (p.rate / (p.shape - 1)).expand(6, 2))
    assert torch.allclose(measures.total_variance(p), u.total.sum(-1))


def test_without_a_mean_of_the_noise_variances_are_infinite_and_the_rest_is_not():
    p = predictive(a=0.7)
    assert p.uncertainty.total[:, 0].isinf().all()
    assert torch.isfinite(p.uncertainty.total[:, 1]).all()
    assert torch.isfinite(p.log_prob(torch.zeros(6, 2))).all()
    assert torch.isfinite(p.interval(0.9)[1]).all()
    assert torch.isfinite(metrics.crps(p, torch.zeros(6, 2)))
    certain = StudentT(p.likelihood, p.means, 0 * p.spread, p.shape, p.rate)
    assert (certain.f_var == 0).all()
    assert predictive(a=0.5).crps(torch.zeros(6, 2))[:, 0].isinf().all()


@pytest.mark.parametrize("shared", [False, True])
def test_draws_have_the_distribution(shared):
    p = predictive(shared=shared)
    drawn = p.sample(20_000, torch.Generator().manual_seed(1))
    assert drawn.shape == (20_000, 6, 2)
    for c in range(2):
        df = float(2 * p.shape[0 if shared else c])
        scale = float((p.rate / p.shape * (1 + p.spread[0]))[3, c].sqrt())
        assert stats.kstest(drawn[:, 3, c].numpy(), stats.t(df=df, loc=float(p.mean[3, c]), scale=scale).cdf).pvalue > 1e-3
    far = ((drawn[:, 3] - p.mean[3]).abs() > 3).double()
    together = float((far[:, 0] * far[:, 1]).mean() / (far[:, 0].mean() * far[:, 1].mean()))
    assert (together > 3) == shared, "outputs that share a noise are far off together"
    assert torch.equal(drawn, p.sample(20_000, torch.Generator().manual_seed(1)))


def test_a_shared_noise_is_scored_jointly():
    p, y = predictive(shared=True), torch.randn(6, 2, dtype=DOUBLE)
    for i in range(6):
        scale = (p.rate / p.shape * (1 + p.spread[0, i])).diag().numpy()
        exact = stats.multivariate_t(loc=p.mean[i].numpy(), shape=scale, df=float(2 * p.shape)).logpdf(y[i].numpy())
        assert float(p.log_prob(y)[i]) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("a", [0.6, 2.5, 300.0])
def test_crps_is_its_integral(a):
    p, y = predictive(a=a), torch.randn(6, 2, dtype=DOUBLE)
    found = p.crps(y)
    scale = (p.rate / p.shape * (1 + p.spread[0])).sqrt()
    for i, c in ((0, 0), (3, 1)):
        one = stats.t(df=float(2 * p.shape[c]), loc=float(p.mean[i, c]), scale=float(scale[i, c]))
        at = float(y[i, c])
        below, _ = integrate.quad(lambda t, one=one: one.cdf(t) ** 2, -math.inf, at, limit=500)
        above, _ = integrate.quad(lambda t, one=one: one.sf(t) ** 2, at, math.inf, limit=500)
        assert float(found[i, c]) == pytest.approx(below + above, rel=1e-5)
    assert torch.allclose(metrics.crps(p, y), found.mean())


def test_with_much_data_it_is_the_gaussian():
    p = predictive(a=1e7)
    noise = (p.rate / p.shape).sqrt()
    normal = LatentMixture(Gaussian(scale=tuple(noise.tolist())), p.means, p.spread * noise**2)
    y = p.mean + noise * torch.randn(6, 2, dtype=DOUBLE)
    for name, metric in metrics.METRICS.items():
        if metric.regression:
            assert torch.allclose(metric.function(p, y), metric.function(normal, y), rtol=1e-5), name
    assert torch.allclose(p.quantile(0.1), normal.quantile(0.1), rtol=1e-5)
    assert torch.allclose(p.uncertainty.epistemic, normal.uncertainty.epistemic, rtol=1e-5)


def test_dense_outputs_batches_and_devices():
    p = predictive()
    maps = StudentT(p.likelihood, p.means.reshape(1, 3, 2, 2), p.spread.reshape(1, 3, 2, 2), p.shape, p.rate)
    y = torch.randn(6, 2, dtype=DOUBLE)
    assert torch.allclose(maps.log_prob(y.reshape(3, 2, 2)), p.log_prob(y).reshape(3, 2).sum(1))
    assert maps.sample(4).shape == (4, 3, 2, 2)
    assert torch.allclose(maps.quantile(0.2).reshape(6, 2), p.quantile(0.2))
    parts = [StudentT(p.likelihood, p.means[:, i], p.spread[:, i], p.shape, p.rate) for i in (slice(0, 4), slice(4, 6))]
    joined = concatenate(parts)
    assert torch.equal(joined.log_prob(y), p.log_prob(y))
    assert torch.equal(p.to("cpu").mean, p.mean)


@pytest.mark.parametrize("shared", [False, True])
def test_other_units(shared):
    p, y = predictive(shared=shared), torch.randn(6, 2, dtype=DOUBLE)
    shift, scale = torch.tensor([1.0, -2.0], dtype=DOUBLE), torch.tensor([10.0, 0.1], dtype=DOUBLE)
    q = p.rescaled(shift, scale)
    assert torch.allclose(q.log_prob(shift + scale * y), p.log_prob(y) - scale.log().sum())
    assert torch.allclose(q.quantile(0.3), shift + scale * p.quantile(0.3))
    assert torch.allclose(q.uncertainty.total, scale**2 * p.uncertainty.total)


def test_single_precision_keeps_its_digits_with_much_data():
    """A difference of log gammas in float32 would be off by whole nats."""
    p, q = predictive(a=1e5, dtype=torch.float32), predictive(a=1e5)
    y = q.mean + 1e-3
    assert p.log_prob(y.float()).dtype == torch.float32
    assert torch.allclose(p.log_prob(y.float()).double(), q.log_prob(y), atol=1e-3)
    assert p.cdf(y.float()).dtype == p.quantile(0.1).dtype == p.sample(1).dtype == p.uncertainty.total.dtype == torch.float32


def test_errors_in_words_and_a_figure():
    p = predictive()
    with pytest.raises(ValueError, match="above 0 and below 1"):
        p.quantile(1.0)
    with pytest.raises(ValueError, match=r"expects \[6, 2\]"):
        p.log_prob(torch.zeros(6))
    with pytest.raises(ValueError, match="is for classes"):
        measures.predictive_entropy(p)
    grid = torch.linspace(0, 1, 6)
    drawn = band(Curve(grid, p, grid, (grid, grid)), title="a", ylim=(-1, 1))
    assert drawn.image
