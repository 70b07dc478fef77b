"""Targets and scores of any kind, predictions that are NaN, and results that are not rounded to half precision."""

import math

import numpy as np
import pytest
import torch

from dubito import Bernoulli, Categorical, Gaussian
from dubito.metrics import DECISIONS, METRICS, accuracy, brier, nll, reliability, risk_coverage, threshold
from dubito.posteriors.predictive import LatentMixture


def given(classes: bool, *, n: int = 300, dtype: torch.dtype = torch.float32):
    source = torch.Generator().manual_seed(0)
    f = torch.randn(2, n, 3 if classes else 1, generator=source).to(dtype)
    if classes:
        return LatentMixture(Categorical(), f), torch.randint(3, (n,), generator=source)
    return LatentMixture(Gaussian(scale=1.0), f), torch.randn(n, generator=source)


@pytest.mark.parametrize("name", METRICS)
def test_targets_may_be_arrays_or_lists(name):
    metric = METRICS[name]
    p, y = given(metric.classes)
    expected = metric.function(p, y)
    for other in (y.numpy(), y.tolist(), np.flip(np.flip(y.numpy()).copy()), tuple(y.tolist())):
        assert torch.equal(metric.function(p, other), expected)


@pytest.mark.parametrize("name", DECISIONS)
def test_scores_and_errors_may_be_arrays_or_lists(name):
    source = torch.Generator().manual_seed(0)
    score, wrong = torch.rand(50, dtype=torch.float64, generator=source), torch.rand(50, generator=source) < 0.3
    function = DECISIONS[name].function
    assert function(score.numpy(), wrong.numpy()) == function(score, wrong)
    assert function(score.tolist(), wrong.tolist()) == function(score, wrong)


def test_thresholds_of_lists():
    score, wrong = [0.1, 0.2, 0.3, 0.4], [0, 0, 1, 0]
    assert threshold(score, wrong, risk=0.1).value == 0.2
    assert threshold(score, wrong, risk=0.9, confidence=0.1).coverage == 1
    assert risk_coverage(score, wrong)[1].tolist() == [0, 0, 1 / 3, 1 / 4]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_not_in_half_precision(name, dtype):
    p, y = given(METRICS[name].classes, dtype=dtype)
    found = METRICS[name].function(p, y)
    assert found.dtype == torch.float32
    wide = METRICS[name].function(
        LatentMixture(p.likelihood, p.means.float()), y.to(dtype).float() if y.is_floating_point() else y
    )
    if name in ("accuracy", "coverage"):
        assert float(found) * 300 == pytest.approx(round(float(found) * 300), abs=1e-3)  # a share of 300, to all digits
    assert float(found) == pytest.approx(float(wide), rel=0.1, abs=0.02)


def test_brier_of_half_precision_is_that_of_its_probabilities():
    p, y = given(True, dtype=torch.bfloat16)
    one_hot = torch.nn.functional.one_hot(y, 3)
    assert float(brier(p, y)) == pytest.approx(float(((p.mean.double() - one_hot) ** 2).sum(-1).mean()), rel=1e-6)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_a_prediction_that_is_nan_is_not_the_first_class(likelihood):
    f = torch.zeros(1, 4, 2)
    f[:, 0] = math.nan
    y = torch.zeros(4, 2).long() if isinstance(likelihood, Bernoulli) else torch.zeros(4).long()
    p = LatentMixture(likelihood, f)
    assert accuracy(p, y).isnan()
    assert nll(p, y).isnan()
    found = reliability(p, y)
    assert found.count.sum() == y.numel()
    assert (found.accuracy[-1], found.confidence[-1].isnan()) == (0, True)  # in a bin of their own, and wrong
    if isinstance(likelihood, Categorical):
        assert accuracy(LatentMixture(Categorical(ignore_index=9), f), torch.tensor([9, 0, 0, 0])) == 1
