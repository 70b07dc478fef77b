"""Metrics against scikit-learn, torchmetrics, scipy, numerical integration and brute force."""

import itertools
import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy.stats import norm
from torchmetrics.functional.classification import multiclass_calibration_error

from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, MultiTask
from dubito.metrics import (
    METRICS,
    accuracy,
    aurc,
    auroc,
    average_precision,
    brier,
    coverage,
    crps,
    ece,
    nll,
    risk_coverage,
    rmse,
    width,
)
from dubito.posteriors.predictive import LatentMixture, Predictive


class Fixed(Predictive):
    """Class probabilities given exactly, not through logits."""

    mean = uncertainty = f_mean = f_var = log_prob = sample = interval = to = None

    def __init__(self, likelihood, mean):
        self.likelihood, self.mean, self.f_mean = likelihood, mean, mean


@pytest.fixture
def classified():
    generator = torch.Generator().manual_seed(0)
    f = 2 * torch.randn(5, 400, 4, dtype=torch.float64, generator=generator)
    return LatentMixture(Categorical(), f), torch.randint(4, (400,), generator=generator)


@pytest.fixture
def regressed():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(6, 40, 2, dtype=torch.float64, generator=generator)
    y = 2 * torch.randn(40, 2, dtype=torch.float64, generator=generator)
    return LatentMixture(Gaussian(scale=(0.3, 0.7)), f), y


@pytest.fixture
def labelled():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(5, 50, 3, dtype=torch.float64, generator=generator)
    return LatentMixture(Bernoulli(), f), torch.randint(2, (50, 3), generator=generator)


def test_classes_against_sklearn(classified):
    p, y = classified
    probs = p.mean.numpy()
    assert accuracy(p, y).item() == pytest.approx(sklearn.metrics.accuracy_score(y, probs.argmax(-1)))
    assert nll(p, y).item() == pytest.approx(sklearn.metrics.log_loss(y, probs))
    brute = np.mean([sum((probs[i, c] - (y[i].item() == c)) ** 2 for c in range(4)) for i in range(400)])
    assert brier(p, y).item() == pytest.approx(brute)
    # no confidence lies on an edge here, so the other convention for bins agrees
    oracle = multiclass_calibration_error(p.mean.float(), y, 4, n_bins=15, norm="l1")
    assert ece(p, y).item() == pytest.approx(oracle.item(), abs=1e-6)


def test_labels_against_sklearn(labelled):
    p, y = labelled
    probs, truth = p.mean.numpy(), y.numpy()
    assert accuracy(p, y).item() == pytest.approx(np.mean((probs > 0.5) == truth))
    by_label = [sklearn.metrics.log_loss(truth[:, c], probs[:, c], labels=[0, 1]) for c in range(3)]
    point = LatentMixture(Bernoulli(), torch.logit(p.mean)[None])
    assert nll(point, y).item() == pytest.approx(sum(by_label))
    by_label = [sklearn.metrics.brier_score_loss(truth[:, c], probs[:, c]) for c in range(3)]
    assert brier(p, y).item() == pytest.approx(sum(by_label))
    pairs = torch.stack([1 - p.mean, p.mean], -1).reshape(-1, 2)
    assert ece(p, y).item() == pytest.approx(ece(Fixed(Categorical(), pairs), y.flatten()).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", range(8, 15))
def test_a_confidence_on_an_edge_counts_in_the_bin_below(k, dtype):
    above = (k + 0.5) / 15
    probs = torch.tensor([[k / 15, 1 - k / 15], [above, 1 - above]], dtype=dtype)
    y = torch.tensor([0, 1])  # right on the edge, wrong above it: two bins, whose gaps do not cancel
    p = Fixed(Categorical(), probs)
    assert ece(p, y).item() == pytest.approx(0.5 * (1 - k / 15) + 0.5 * above, abs=1e-6)
    below = (k - 0.5) / 15
    probs = torch.tensor([[k / 15, 1 - k / 15], [below, 1 - below]], dtype=dtype)
    assert ece(Fixed(Categorical(), probs), y).item() == pytest.approx(0.5 * abs(1 - (k - 0.5 + k) / 15), abs=1e-6)


def test_ece_at_the_ends():
    sure = Fixed(Categorical(), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.95, 0.05]]))
    assert ece(sure, torch.tensor([0, 0, 1])).item() == pytest.approx(abs(2 - 2.95) / 3)
    assert ece(sure, torch.tensor([0, 0, 1]), bins=1).item() == pytest.approx(abs(2 - 2.95) / 3)
    assert ece(sure, torch.tensor([0, 0, 1]), bins=100).item() == pytest.approx(0.95 / 3)


@pytest.mark.parametrize("name", ["accuracy", "nll", "brier", "ece"])
@pytest.mark.parametrize("ignore", [-100, 255])
def test_dense_outputs_and_ignored_positions(name, ignore):
    torch.manual_seed(0)
    likelihood = Categorical(dim=1, ignore_index=ignore)
    f = torch.randn(3, 2, 5, 4, 6, dtype=torch.float64)  # [S, B, H, W, C]
    y = torch.randint(6, (2, 5, 4))
    y[0, :, :2] = ignore
    y[1, 0, 0] = ignore
    dense = METRICS[name].function(LatentMixture(likelihood, f), y)
    keep = (y != ignore).flatten()
    flat = METRICS[name].function(LatentMixture(Categorical(), f.reshape(3, 40, 6)[:, keep]), y.flatten()[keep])
    assert keep.sum() == 29
    torch.testing.assert_close(dense, flat)
    assert METRICS[name].function(LatentMixture(likelihood, f), torch.full_like(y, ignore)).isnan()


def test_dense_regression_is_scored_by_position():
    torch.manual_seed(0)
    f, y = torch.randn(3, 2, 5, 4, 1), torch.randn(2, 1, 5, 4)
    dense = LatentMixture(Gaussian(scale=0.5, dim=1), f)
    flat = LatentMixture(Gaussian(scale=0.5), f.reshape(3, 40, 1))
    for name in ("nll", "rmse", "crps", "coverage", "width"):
        torch.testing.assert_close(METRICS[name].function(dense, y), METRICS[name].function(flat, y.reshape(40)))


def test_regression_against_sklearn_and_scipy(regressed):
    p, y = regressed
    mean = p.means.mean(0)
    assert rmse(p, y).item() == pytest.approx(math.sqrt(sklearn.metrics.mean_squared_error(y, mean)))
    density = norm.pdf(y.numpy(), p.means.numpy(), [0.3, 0.7]).prod(-1).mean(0)
    assert nll(p, y).item() == pytest.approx(-np.log(density).mean())
    one = LatentMixture(Gaussian(scale=(0.3, 0.7)), p.means[:1])
    lower, upper = norm.interval(0.8, one.mean.numpy(), [0.3, 0.7])
    assert coverage(one, y, level=0.8).item() == pytest.approx(np.mean((lower <= y.numpy()) & (y.numpy() <= upper)))
    assert width(one, level=0.8).item() == pytest.approx(np.mean(upper - lower))
    assert width(one, y, level=0.8) == width(one, level=0.8)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_of_its_own_draws(regressed, level):
    p, _ = regressed
    one = LatentMixture(p.likelihood, p.means[:, :1])
    y = one.sample(2000, torch.Generator().manual_seed(0))[:, 0]  # [n, 2]
    same = LatentMixture(p.likelihood, p.means[:, :1].expand(-1, 2000, -1))  # the same input n times
    assert coverage(same, y, level=level).item() == pytest.approx(level, abs=0.03)


def test_crps_of_one_gaussian_in_closed_form():
    y = torch.linspace(-3, 3, 7, dtype=torch.float64)
    z = (y.numpy() - 0.5) / 2
    closed = 2 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    p = LatentMixture(Gaussian(scale=2.0), torch.full((1, 7, 1), 0.5, dtype=torch.float64))
    assert crps(p, y).item() == pytest.approx(closed.mean())


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize("likelihood", [Gaussian(scale=0.3), HeteroscedasticGaussian()])
def test_crps_of_a_mixture_is_the_integral_over_its_cdf(likelihood, covariance):
    torch.manual_seed(0)
    f = torch.randn(4, 3, 1 if isinstance(likelihood, Gaussian) else 2, dtype=torch.float64)
    cov = torch.rand_like(f) if covariance else None
    p = LatentMixture(likelihood, f, cov, weights=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), quadrature=16)
    y = torch.randn(3, 1, dtype=torch.float64)
    u = torch.linspace(0, 25, 500, dtype=torch.float64)
    gaps = torch.stack([p.cdf(y - x) ** 2 + (1 - p.cdf(y + x)) ** 2 for x in u])  # both sides of the step at y
    assert crps(p, y).item() == pytest.approx(torch.trapezoid(gaps, u, dim=0).mean().item(), abs=1e-3)


def test_crps_of_many_draws_in_chunks(monkeypatch):
    monkeypatch.setitem(crps.__globals__, "PAIRS", 300)  # one of the two columns at a time, and each row alone
    torch.manual_seed(0)
    f, y = torch.randn(220, 2, 1, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    draws = f[..., 0].mT  # [2, S]: without noise the draws are all there is
    pairs = (draws[:, :, None] - draws[:, None, :]).abs().mean((1, 2))
    expected = (draws - y[:, None]).abs().mean(1) - 0.5 * pairs
    assert crps(LatentMixture(Gaussian(scale=1e-9), f), y).item() == pytest.approx(expected.mean().item())
    weights = torch.rand(220, dtype=torch.float64).softmax(0)
    p = LatentMixture(Gaussian(scale=0.5), f, weights=weights)
    x = p.sample(200_000, torch.Generator().manual_seed(0))[..., 0]
    expected = ((x - y).abs().mean(0) - 0.5 * (x[::2] - x[1::2]).abs().mean(0)).mean()
    assert crps(p, y).item() == pytest.approx(expected.item(), abs=0.01)


@pytest.mark.parametrize("scale", [1.0, 1000.0])  # torchmetrics alone would put large scores through a sigmoid
@pytest.mark.parametrize("ties", [False, True])
def test_detection_against_sklearn(scale, ties):
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(300, generator=generator) < 0.3
    scores = torch.randn(300, generator=generator) + truth
    scores = scale * ((4 * scores).round() if ties else scores)
    assert auroc(scores, truth).item() == pytest.approx(sklearn.metrics.roc_auc_score(truth, scores))
    assert average_precision(scores, truth).item() == pytest.approx(sklearn.metrics.average_precision_score(truth, scores))
    assert auroc(scores.reshape(30, 10), truth.long().reshape(30, 10)) == auroc(scores, truth)


@pytest.mark.parametrize("metric", [auroc, average_precision])
def test_detection_edge_cases(metric):
    assert metric(torch.rand(3), torch.ones(3)).isnan()
    assert metric(torch.rand(3), torch.zeros(3)).isnan()
    assert metric(torch.rand(0), torch.zeros(0)).isnan()
    assert metric(torch.tensor([0.0, math.inf]), torch.tensor([0, 1])) == 1
    assert metric(torch.tensor([1, 2]), torch.tensor([False, True])) == 1  # votes, not probabilities
    with pytest.raises(ValueError, match="NaN"):
        metric(torch.tensor([0.0, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="3 scores for 2"):
        metric(torch.rand(3), torch.ones(2))


def test_risk_coverage_averages_over_the_orders_of_ties():
    scores, errors = torch.tensor([0.3, 0.1, 0.3, 0.3, 0.7]), torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0])
    tied = [0, 2, 3]
    curves = []
    for order in itertools.permutations(tied):
        sequence = errors[[1, *order, 4]]
        curves.append(sequence.cumsum(0) / torch.arange(1, 6))
    kept, risk = risk_coverage(scores, errors)
    torch.testing.assert_close(kept, torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0]))
    torch.testing.assert_close(risk, torch.stack(curves).mean(0))
    assert aurc(scores, errors).item() == pytest.approx(torch.stack(curves).mean().item())
    assert risk[-1] == errors.mean()


def test_risk_coverage_of_a_predictive(classified, regressed, labelled):
    p, y = classified
    errors = p.mean.argmax(-1) != y
    assert aurc(p, errors).item() == pytest.approx(aurc(1 - p.mean.amax(-1), errors).item())
    assert aurc(errors.float(), errors) < aurc(p, errors) < aurc(-errors.float(), errors)
    p, y = regressed
    errors = (p.mean - y).square().sum(-1)
    assert aurc(p, errors) == aurc(p.uncertainty.total.sum(-1), errors)
    p, y = labelled
    errors = ((p.mean > 0.5) != y).double().mean(-1)
    assert aurc(p, errors) == aurc(torch.minimum(p.mean, 1 - p.mean).sum(-1), errors)
    with pytest.raises(ValueError, match="50 scores for 2 errors"):
        risk_coverage(p, errors[:2])


@pytest.mark.parametrize("name", METRICS)
def test_metrics_know_what_they_are_for(name, classified, regressed):
    metric = METRICS[name]
    for fits, (p, y) in ((metric.classes, classified), (metric.regression, regressed)):
        if fits:
            value = metric.function(p, y)
            assert value.shape == ()
            assert value.isfinite()
            assert value.dtype == p.mean.dtype
        else:
            with pytest.raises(ValueError, match=f"{name.removesuffix('_mass')} is for .*: use nll, "):
                metric.function(p, y)
    tasks = MultiTask({"depth": (Gaussian(scale=1.0), 1), "label": (Categorical(), 3)})
    with pytest.raises(ValueError, match=r"use p\.task\(name\), one of"):
        metric.function(LatentMixture(tasks, torch.zeros(2, 5, 4)), torch.zeros(5, 2))


@pytest.mark.parametrize("name", METRICS)
def test_targets_that_do_not_fit(name, classified, regressed):
    metric = METRICS[name]
    if metric.classes:
        with pytest.raises(ValueError, match="from 0 to 7, but the network has 4 classes"):
            metric.function(classified[0], torch.tensor([0, 7] * 200))
    if metric.regression and name not in ("width", "sharpness"):
        with pytest.raises(ValueError, match="do not fit Gaussian"):
            metric.function(regressed[0], torch.zeros(40))


def test_other_predictives_have_no_exact_crps():
    with pytest.raises(ValueError, match="got a Fixed"):
        crps(Fixed(Gaussian(scale=1.0), torch.zeros(2, 1)), torch.zeros(2))
