"""Decisions against scikit-learn, brute force and simulation."""

import itertools
import math

import pytest
import sklearn.metrics
import torch
from dubito.metrics.decisions import Ranking
from scipy.stats import beta

from dubito.metrics import (
    aupr_error,
    aupr_success,
    aurc,
    auroc,
    excess_aurc,
    fpr95,
    fpr_at_tpr,
    threshold,
)


def given(n=300, ties=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    errors = torch.rand(n, generator=generator) < 0.3
    scores = torch.randn(n, generator=generator, dtype=torch.float64) + errors
    return ((3 * scores).round() if ties else scores), errors


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tpr", [0.5, 0.95, 1.0])
def test_fpr_is_the_first_point_of_the_roc_with_that_tpr(ties, tpr):
    scores, positive = given(ties=ties)
    false, true, _ = sklearn.metrics.roc_curve(positive, scores, drop_intermediate=False)
    assert float(fpr_at_tpr(scores, positive, tpr=tpr)) == pytest.approx(false[(true >= tpr - 1e-12).argmax()])
    brute = min(
        float((scores[~positive] >= t).double().mean()) for t in scores if (scores[positive] >= t).double().mean() >= tpr - 1e-12
    )
    assert float(fpr_at_tpr(scores, positive, tpr=tpr)) == pytest.approx(brute)


def test_fpr95_takes_successes_for_the_positives():
    scores, errors = given()
    false, true, _ = sklearn.metrics.roc_curve(~errors, -scores, drop_intermediate=False)
    assert float(fpr95(scores, errors)) == pytest.approx(false[(true >= 0.95).argmax()])
    # 20 successes of which 19 are 0.95, exactly: one of two errors is as certain as the last of these
    scores = torch.cat([torch.arange(20.0), torch.tensor([17.5, 30.0])])
    assert float(fpr95(scores, torch.arange(22) >= 20)) == 0.5
    scores[20] = 18.5
    assert float(fpr95(scores, torch.arange(22) >= 20)) == 0.0
    assert fpr95(torch.ones(5), torch.tensor([0, 1, 0, 1, 1])) == 1  # nothing told apart: all pass


@pytest.mark.parametrize("ties", [False, True])
def test_precision_against_sklearn(ties):
    scores, errors = given(ties=ties)
    assert float(aupr_error(scores, errors)) == pytest.approx(sklearn.metrics.average_precision_score(errors, scores))
    assert float(aupr_success(scores, errors)) == pytest.approx(sklearn.metrics.average_precision_score(~errors, -scores))
    assert float(auroc(scores, errors)) == pytest.approx(sklearn.metrics.roc_auc_score(errors, scores))


@pytest.mark.parametrize("metric", [fpr95, fpr_at_tpr, aupr_success, aupr_error])
def test_one_kind_only_is_nan_and_nonsense_is_refused(metric):
    assert metric(torch.rand(3), torch.ones(3)).isnan()
    assert metric(torch.rand(3), torch.zeros(3)).isnan()
    assert metric(torch.rand(0), torch.zeros(0)).isnan()
    with pytest.raises(ValueError, match="NaN"):
        metric(torch.tensor([0.0, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="3 scores for 2"):
        metric(torch.rand(3), torch.ones(2))
    with pytest.raises(ValueError, match="tpr must be above 0 and at most 1; got 95"):
        fpr_at_tpr(torch.rand(2), torch.tensor([0, 1]), tpr=95)


def test_the_oracle_is_the_best_of_all_orders():
    errors = torch.tensor([0.0, 2.0, 0.0, 0.5, 1.0])
    ranks = torch.arange(5.0)
    areas = [float(aurc(ranks, errors[list(order)])) for order in itertools.permutations(range(5))]
    scores = torch.tensor([0.3, 0.1, 0.3, 0.9, 0.2])
    assert float(excess_aurc(scores, errors)) == pytest.approx(float(aurc(scores, errors)) - min(areas), abs=1e-6)
    assert float(excess_aurc(errors, errors)) == pytest.approx(0, abs=1e-7)
    wrong = torch.arange(1000) >= 900
    r = 0.1  # the continuous form of the literature
    assert float(aurc(wrong.double(), wrong)) == pytest.approx(r + (1 - r) * math.log(1 - r), abs=1e-3)


def test_the_threshold_of_a_risk_by_brute_force():
    scores, errors = given(ties=True)
    for risk in (0.0, 0.1, 0.2, 0.5):
        fine = [t for t in scores.unique() if errors[scores <= t].double().mean() <= risk]
        found = threshold(scores, errors, risk=risk)
        if not fine:
            assert found[:2] == (-math.inf, 0.0)
            assert math.isnan(found.risk)
            continue
        best = max(fine)
        assert found.value == float(best)
        assert found.coverage == pytest.approx(float((scores <= best).double().mean()))
        assert found.risk == pytest.approx(float(errors[scores <= best].double().mean()))


def test_the_bound_is_clopper_and_pearsons():
    scores, errors = torch.arange(2000.0), torch.arange(2000) >= 1500
    found = threshold(scores, errors, risk=0.05, confidence=0.9)
    answered = scores <= found.value
    m, e = int(answered.sum()), int(errors[answered].sum())
    assert found.coverage == m / 2000
    assert found.bound == pytest.approx(beta.ppf(1 - 0.1 / 51, e + 1, m - e))
    assert found.bound <= 0.05
    assert 0.7 < found.coverage < 0.8
    assert threshold(scores, torch.zeros(2000), risk=0.05, confidence=0.9).value == math.inf
    assert threshold(scores[:20], errors[:20], risk=0.01, confidence=0.9).value == -math.inf  # too few to promise anything
    assert threshold(scores.long() // 40, errors, risk=0.05, confidence=0.9).coverage == pytest.approx(found.coverage, abs=0.03)


def test_the_guarantee_holds_and_the_plain_threshold_has_none():
    """Errors have the probability s at a score s that is uniform: the true risk at a threshold t is t / 2."""
    generator = torch.Generator().manual_seed(0)
    broken, plain, coverages = 0, 0, []
    for _ in range(150):
        scores = torch.rand(2000, generator=generator)
        errors = torch.rand(2000, generator=generator) < scores
        found = threshold(scores, errors, risk=0.2, confidence=0.8)
        broken += min(found.value, 1.0) / 2 > 0.2
        plain += min(threshold(scores, errors, risk=0.2).value, 1.0) / 2 > 0.2
        coverages.append(found.coverage)
    assert broken <= 0.2 * 150
    assert plain > 50
    assert sum(coverages) / 150 > 0.25  # of 0.4 at most: the promise is not an empty one


def test_thresholds_refuse_nonsense():
    scores, errors = given()
    with pytest.raises(ValueError, match="0 or 1: leave out `confidence`"):
        threshold(scores, errors * 0.5, risk=0.1, confidence=0.9)
    with pytest.raises(ValueError, match="risk must be at least 0 and at most 1; got 5"):
        threshold(scores, errors, risk=5, confidence=0.9)
    with pytest.raises(ValueError, match="confidence must be above 0 and below 1; got 95"):
        threshold(scores, errors, risk=0.1, confidence=95)
    with pytest.raises(ValueError, match="300 scores for 2 errors"):
        threshold(scores, errors[:2], risk=0.1)


def test_scores_that_are_flags_or_whole_numbers():
    scores, errors = given(ties=True)
    flags = scores > 0
    for metric in (auroc, fpr95, aupr_error, aupr_success, aurc):
        assert metric(flags, errors) == metric(flags.float(), errors)
        assert metric(scores.long() + 100, errors) == metric(scores.float(), errors)
    assert auroc(scores.bfloat16(), errors) == auroc(scores.float(), errors)  # and not three digits of it
    scores, errors = torch.arange(2000) // 40, torch.arange(2000) >= 1500
    found = threshold(scores, errors, risk=0.05, confidence=0.9)
    assert float((scores <= found.value).double().mean()) == found.coverage
    assert float((scores.float() <= found.value).double().mean()) == found.coverage


def test_one_huge_loss_does_not_hide_the_others():
    scores, errors = torch.arange(4.0), torch.tensor([1.0, 1e30, 1.0, 1.0])
    found = threshold(torch.tensor([0.0, 9.0, 1.0, 2.0]), errors, risk=2.0)
    assert found.risk == 1.0
    losses = Ranking.of(scores, errors).losses
    assert losses.tolist() == pytest.approx([1.0, 1e30, 1.0, 1.0])
