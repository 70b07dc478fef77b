"""Calibration errors against torchmetrics, scikit-learn, hand values and brute force."""

import math

import pytest
import torch
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from dubito import Bernoulli, Categorical
from dubito.metrics import brier, brier_decomposition, classwise_ece, ece, mce, reliability, wilson
from dubito.posteriors.predictive import LatentMixture


def given(n=300, classes=4, likelihood=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f = 2 * torch.randn(3, n, classes, dtype=torch.float64, generator=generator)
    likelihood = likelihood or Categorical()
    labels = isinstance(likelihood, Bernoulli)
    y = torch.randint(2 if labels else classes, (n, classes) if labels else (n,), generator=generator)
    return LatentMixture(likelihood, f), y


def certain(probs):
    return LatentMixture(Categorical(), torch.tensor(probs, dtype=torch.float64).log()[None])


def test_errors_against_torchmetrics():
    p, y = given()
    for ours, norm in ((ece, "l1"), (mce, "max")):
        oracle = multiclass_calibration_error(p.mean.float(), y, 4, n_bins=10, norm=norm)
        assert float(ours(p, y, bins=10)) == pytest.approx(float(oracle), abs=1e-6)
    each = [binary_calibration_error(p.mean[:, c].float(), (y == c).long(), n_bins=15, norm="l1") for c in range(4)]
    assert float(classwise_ece(p, y)) == pytest.approx(float(sum(each)) / 4, abs=1e-6)
    p, y = given(likelihood=Bernoulli())
    each = [binary_calibration_error(p.mean[:, c].float(), y[:, c], n_bins=15, norm="l1") for c in range(4)]
    assert float(classwise_ece(p, y)) == pytest.approx(float(sum(each)) / 4, abs=1e-6)


@pytest.mark.parametrize("by", ["width", "mass"])
def test_reliability_against_sklearn(by):
    p, y = given()  # 300 predictions: ten bins of 30
    found = reliability(p, y, bins=10, by=by)
    confidence, top = p.mean.max(-1)
    strategy = {"width": "uniform", "mass": "quantile"}[by]
    right, mean = calibration_curve((top == y).long(), confidence, n_bins=10, strategy=strategy)
    some = found.count > 0
    torch.testing.assert_close(found.accuracy[some], torch.from_numpy(right))
    torch.testing.assert_close(found.confidence[some], torch.from_numpy(mean))
    if by == "mass":
        assert found.count.tolist() == [30] * 10
    gaps = (found.accuracy - found.confidence).abs()[some]
    assert float(ece(p, y, bins=10, by=by)) == pytest.approx(float((gaps * found.count[some]).sum() / 300))
    assert float(mce(p, y, bins=10, by=by)) == pytest.approx(float(gaps.max()))


@pytest.mark.parametrize(("n", "bins"), [(7, 3), (10, 15), (1, 4)])
def test_equal_mass_counts_differ_by_one(n, bins):
    p, y = given(n)
    count = reliability(p, y, bins=bins, by="mass").count
    assert count.sum() == n
    assert set(count.tolist()) <= {n // bins, n // bins + 1}


def test_equal_mass_does_not_depend_on_the_order_of_ties():
    p = certain([[0.75, 0.25]] * 4 + [[0.6, 0.4]] * 2)
    y = torch.tensor([0, 0, 1, 1, 0, 1])
    found = reliability(p, y, bins=3, by="mass")
    assert found.count.tolist() == [2, 4, 0]
    assert found.accuracy[:2].tolist() == [0.5, 0.5]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    same = LatentMixture(p.likelihood, p.means[:, order])
    assert ece(p, y, bins=3, by="mass") == ece(same, y[order], bins=3, by="mass")
    assert float(ece(p, y, bins=3, by="mass")) == pytest.approx((2 * 0.1 + 4 * 0.25) / 6)


def test_classwise_by_hand():
    p = certain([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.1, 0.3, 0.6]])
    y = torch.tensor([0, 1, 2, 2])
    # class 0: |0.5 - 0.7| and |0 - 0.1|; class 1: |0.5 - 0.2| and |0 - 0.3|; class 2: 0.1 and 0.4; two examples in each bin
    expected = (0.5 * (0.2 + 0.1) + 0.5 * (0.3 + 0.3) + 0.5 * (0.1 + 0.4)) / 3
    assert float(classwise_ece(p, y, bins=10)) == pytest.approx(expected)
    assert float(classwise_ece(p, y, bins=2, by="mass")) == pytest.approx(expected)


@pytest.mark.parametrize("bins", [1, 7, 15, None])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_the_parts_add_up_to_the_brier_score(bins, likelihood):
    p, y = given(likelihood=likelihood)
    parts = brier_decomposition(p, y, bins=bins)
    assert float(parts.score) == pytest.approx(float(brier(p, y)), abs=1e-12)
    assert min(parts.reliability, parts.resolution, parts.uncertainty) >= 0
    rate = y.double().mean(0) if y.ndim > 1 else torch.bincount(y, minlength=4) / 300
    assert float(parts.uncertainty) == pytest.approx(float((rate * (1 - rate)).sum()))
    if bins == 1:
        assert float(parts.resolution) == pytest.approx(0, abs=1e-12)
    if bins is None:  # every forecast is a group of its own
        assert float(parts.within) == pytest.approx(0, abs=1e-12)
        assert float(parts.reliability) == pytest.approx(float(brier(p, y)))


def test_the_decomposition_by_brute_force():
    probs = torch.tensor([[0.1], [0.1], [0.4], [0.4], [0.4], [0.9]], dtype=torch.float64)
    y = torch.tensor([[0], [1], [0], [1], [1], [1]])
    parts = brier_decomposition(LatentMixture(Bernoulli(), torch.logit(probs)[None]), y, bins=None)
    groups = {0.1: [0, 1], 0.4: [0, 1, 1], 0.9: [1]}
    mean = 4 / 6
    assert float(parts.reliability) == pytest.approx(sum(len(v) * (k - sum(v) / len(v)) ** 2 for k, v in groups.items()) / 6)
    assert float(parts.resolution) == pytest.approx(sum(len(v) * (sum(v) / len(v) - mean) ** 2 for v in groups.values()) / 6)
    assert float(parts.uncertainty) == pytest.approx(mean * (1 - mean))


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_wilson_against_scipy(level):
    for k, n in ((0, 5), (3, 7), (50, 50), (499, 1000)):
        oracle = binomtest(k, n).proportion_ci(level, method="wilson")
        found = wilson(torch.tensor(k / n, dtype=torch.float64), torch.tensor(float(n)), level=level)
        assert [float(v) for v in found] == pytest.approx([oracle.low, oracle.high], abs=1e-7)
    assert wilson(torch.tensor(math.nan), torch.tensor(0.0))[0].isnan()


def test_without_examples_and_with_nonsense():
    p, y = given()
    none = LatentMixture(p.likelihood, p.means[:, :0])
    for by in ("width", "mass"):
        assert ece(none, y[:0], by=by).isnan()
        assert mce(none, y[:0], by=by).isnan()
        assert classwise_ece(none, y[:0], by=by).isnan()
    assert brier_decomposition(none, y[:0]).score.isnan()
    with pytest.raises(ValueError, match="by must be one of 'width', 'mass'; got 'size'"):
        ece(p, y, by="size")
    with pytest.raises(ValueError, match="bins must be at least 1; got 0"):
        ece(p, y, bins=0)
    with pytest.raises(ValueError, match="level must be above 0 and below 1; got 90"):
        reliability(p, y, level=90)


def test_a_prediction_that_is_nan_is_not_passed_over():
    p, y = given()
    means = p.means.clone()
    means[:, 7] = math.nan
    broken = LatentMixture(p.likelihood, means)
    for by in ("width", "mass"):
        assert ece(broken, y, by=by).isnan()
        assert mce(broken, y, by=by).isnan()
        assert classwise_ece(broken, y, by=by).isnan()
