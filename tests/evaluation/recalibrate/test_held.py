"""Held-out predictions that no map can be fitted to, and targets of any kind."""

import math

import pytest
import torch

from dubito import Bernoulli, Categorical, Gaussian
from dubito.posteriors.predictive import LatentMixture, StudentT
from dubito.recalibrate import (
    ConformalIntervals,
    ConformalSets,
    Histogram,
    Isotonic,
    MatrixScaling,
    Quantiles,
    Temperature,
    Variance,
    VectorScaling,
)

CLASSES = [Temperature(), VectorScaling(), MatrixScaling(), Isotonic(), Histogram(), ConformalSets()]
NUMBERS = [Variance(), Variance(by="moments"), Quantiles(), *(ConformalIntervals(s) for s in ("absolute", "scaled", "quantile"))]


def drawn(n=60, width=3):
    source = torch.Generator().manual_seed(0)
    f = 2 * torch.randn(1, n, width, generator=source)
    return f, torch.multinomial((f[0] / 2).softmax(-1), 1, generator=source).squeeze(-1), torch.randn(n, width, generator=source)


@pytest.mark.parametrize("method", CLASSES, ids=lambda m: type(m).__name__)
def test_classes_that_are_nan_are_refused_and_counted(method):
    f, y, _ = drawn()
    f[:, 7:10, 1] = math.nan
    words = f"3 of 60 held-out predictions are NaN or infinite, and {type(method).__name__} .* leave these rows out"
    with pytest.raises(ValueError, match=words):
        method.fit(LatentMixture(Categorical(), f), y)
    with pytest.raises(ValueError, match=words):
        method.fit([(LatentMixture(Categorical(), part), target) for part, target in zip(f.split(5, 1), y.split(5), strict=True)])
    ignored = torch.where(f[0].isnan().any(-1), -100, y)
    method.fit(LatentMixture(Categorical(), f), ignored)  # what is not labelled does not count


@pytest.mark.parametrize("method", NUMBERS, ids=lambda m: f"{type(m).__name__}-{getattr(m, 'score', getattr(m, 'by', ''))}")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_nan_are_refused_and_counted(method, bad):
    f, _, y = drawn()
    f[:, 7:10, 1] = bad
    words = f"3 of 60 held-out predictions are NaN or infinite, and {type(method).__name__} .* leave these rows out"
    with pytest.raises(ValueError, match=words):
        method.fit(LatentMixture(Gaussian(scale=1.0), f), y)
    parts = zip(f.split(5, 1), y.split(5), strict=True)
    with pytest.raises(ValueError, match=words):
        method.fit([(LatentMixture(Gaussian(scale=1.0), part), target) for part, target in parts])


def test_an_infinite_variance_is_none_of_these():
    _, _, y = drawn(width=1)
    p = StudentT(Gaussian(), torch.zeros(1, 60, 1), torch.ones(1, 60, 1), torch.tensor([0.9]), torch.tensor([1.0]))
    assert p.uncertainty.total.isinf().all()
    assert ConformalIntervals("quantile").fit(p, y).threshold.isfinite().all()
    assert Quantiles().fit(p, y).levels.isfinite().all()


def test_a_label_that_is_certain_is_scaled_from_a_large_number():
    f = torch.tensor([[[math.inf], [1.0], [-1.0], [-math.inf], [2.0], [-2.0]]])
    fix = VectorScaling(penalty=0.1).fit(LatentMixture(Bernoulli(), f), torch.tensor([1, 0, 0, 0, 1, 1]))
    assert fix.weight.isfinite().all()


def test_targets_may_be_arrays_or_lists():
    f, y, numbers = drawn()
    p, q = LatentMixture(Categorical(), f), LatentMixture(Gaussian(scale=1.0), f)
    for given in (y.numpy(), y.tolist()):
        assert Temperature().fit(p, given) == Temperature().fit(p, y)
    for given in (numbers.numpy(), numbers.tolist()):
        assert torch.equal(Variance().fit(q, given).factor, Variance().fit(q, numbers).factor)
