"""Isotonic regression against scikit-learn, binning by hand."""

import math

import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from dubito import Bernoulli, Categorical, Gaussian
from dubito.metrics import classwise_ece, ece, nll
from dubito.posteriors.predictive import LatentMixture
from dubito.recalibrate import Histogram, Isotonic

DOUBLE = torch.float64


def drawn(n=200, classes=3, *, seed=0, ties=False):
    source = torch.Generator().manual_seed(seed)
    f = 3 * torch.randn(1, n, classes, dtype=DOUBLE, generator=source)
    p = LatentMixture(Categorical(), f.round() if ties else f)
    return p, torch.multinomial((p.means[0] / 3).softmax(-1), 1, generator=source).squeeze(-1)


@pytest.mark.parametrize("ties", [False, True])
def test_isotonic_against_sklearn(ties):
    p, y = drawn(ties=ties)
    other, _ = drawn(300, seed=1)
    fix = Isotonic(floor=0.0).fit(p, y)
    columns = []
    for c in range(3):
        oracle = IsotonicRegression(out_of_bounds="clip").fit(p.mean[:, c].numpy(), (y == c).double().numpy())
        columns.append(torch.from_numpy(oracle.predict(other.mean[:, c].numpy())))
    raw = torch.stack(columns, -1)
    raw = torch.where(raw.sum(-1, keepdim=True) > 0, raw, 1.0)
    torch.testing.assert_close(fix(other).mean, raw / raw.sum(-1, keepdim=True), atol=1e-9, rtol=1e-9)
    # one label is that label's regression alone
    labels = LatentMixture(Bernoulli(), torch.logit(p.mean[:, :1]).unsqueeze(0))
    probe = LatentMixture(Bernoulli(), torch.logit(other.mean[:, :1]).unsqueeze(0))
    fitted = Isotonic(floor=0.0).fit(labels, (y == 0).long())
    torch.testing.assert_close(fitted(probe).mean[:, 0], columns[0], atol=1e-9, rtol=1e-6)


def test_maps_mend_what_is_too_bold_and_no_score_is_infinite():
    (p, y), (other, answers) = drawn(4000), drawn(4000, seed=1)
    for method in (Isotonic(), Histogram()):
        q = method.fit(p, y)(other)
        torch.testing.assert_close(q.mean.sum(-1), torch.ones(4000, dtype=DOUBLE))
        assert ece(q, answers) < 0.25 * ece(other, answers)
        assert classwise_ece(q, answers) < 0.4 * classwise_ece(other, answers)
        assert nll(q, answers) < nll(other, answers)
        assert nll(q, answers).isfinite()


def test_rising_and_with_the_frequencies_it_has_seen():
    p, y = drawn(500)
    fix = Isotonic(floor=0.0).fit(p, y)
    assert bool((fix.values.diff() >= 0).all())
    assert bool((fix.probs.diff() >= 0).all())
    assert float(fix._mapped(p.mean)[:, 0].sum()) == pytest.approx(float((y == 0).sum()))  # least squares keep the mean


def test_bins_by_hand():
    probs = torch.tensor([0.1, 0.2, 0.3, 0.45, 0.9, 0.95], dtype=DOUBLE)
    p = LatentMixture(Bernoulli(), torch.logit(probs).reshape(1, 6, 1))
    y = torch.tensor([0, 1, 0, 1, 1, 1])
    wide = Histogram(bins=4, by="width", floor=0.0).fit(p, y)
    torch.testing.assert_close(wide.values[0], torch.tensor([0.5, 0.5, 0.625, 1.0], dtype=DOUBLE))  # the third is empty
    equal = Histogram(bins=3, floor=0.0).fit(p, y)
    torch.testing.assert_close(equal(p).mean[:, 0], torch.tensor([0.5, 0.5, 0.5, 0.5, 1, 1], dtype=DOUBLE))
    assert Histogram(bins=3).fit(p, y).values.max() == 1 - 1 / 8


def test_positions_and_errors():
    p, y = drawn(24)
    dense = LatentMixture(Categorical(), p.means.reshape(1, 2, 3, 4, 3))
    fix = Isotonic().fit(p, y)
    torch.testing.assert_close(fix(dense).mean.reshape(24, 3), fix(p).mean)
    with pytest.raises(ValueError, match="Isotonic is for classes, and Gaussian predicts numbers"):
        Isotonic().fit(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1)), torch.zeros(2))
    with pytest.raises(ValueError, match="a map of frequencies was fitted to 3 outputs; this predictive has 2"):
        fix(LatentMixture(Categorical(), torch.zeros(1, 1, 2)))
    with pytest.raises(ValueError, match="floor must be at least 0 and below 0.5"):
        Isotonic(floor=0.5)
    with pytest.raises(ValueError, match="bins must be at least 1|by must be one of"):
        Histogram(bins=0)


@pytest.mark.parametrize("method", [Isotonic(), Histogram(bins=3), Isotonic(floor=0.0)])
def test_what_is_nan_stays_nan(method):
    p, y = drawn()
    fix = method.fit(p, y)
    broken = p.means.clone()
    broken[:, 3, 0] = math.nan
    found = fix(LatentMixture(Categorical(), broken)).mean
    assert found[3].isnan().all()
    torch.testing.assert_close(found[4:], fix(p).mean[4:])
    label = LatentMixture(Bernoulli(), p.means[..., :1])
    assert method.fit(label, (y == 0).long())(LatentMixture(Bernoulli(), broken[..., :1])).mean[3].isnan().all()
