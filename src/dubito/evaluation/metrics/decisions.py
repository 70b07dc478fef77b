r"""Decisions made with a score of uncertainty: larger scores should mean positives (errors, unfamiliar inputs).

Tied scores are never told apart: a threshold takes all of them or none, and where an order is needed they share what they have.
Scores and errors are tensors, NumPy arrays or lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array, suits, tensor
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import between

STEPS = 50  # coverages that `threshold` looks at for a guarantee: 2 %, 4 %, ..., and all


class Ranking(NamedTuple):
    """Scores in groups of equal ones, from the most certain to the least: all decisions follow from these counts."""

    values: Tensor  # [G], ascending
    size: Tensor  # [G], how many have that score
    losses: Tensor  # [G], the sum of their errors, in float64

    @staticmethod
    def of(scores: Tensor, errors: Tensor) -> Ranking:
        """From scores and errors of the same number."""
        scores, errors = scores.detach().flatten(), errors.detach().flatten().to(scores.device, torch.float64)
        if scores.isnan().any():
            raise ValueError("the scores hold NaN, which cannot be ranked: look for inputs or weights that are not finite")
        ordered, order = (scores.byte() if scores.dtype == torch.bool else scores).sort()
        values, group, size = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
        # group by group: of differences of a running sum one huge loss would leave nothing to those after it
        return Ranking(values, size, errors.new_zeros(len(values)).index_add(0, group, errors[order]))

    @property
    def n(self) -> int:
        """How many examples there are."""
        return int(self.size.sum())

    @property
    def reversed(self) -> Ranking:
        """The same for the negated scores and the opposite truth."""
        return Ranking(-self.values.double().flip(0), self.size.flip(0), (self.size - self.losses).flip(0))

    @property
    def risk(self) -> Tensor:
        """The mean error of the k first, for every k: [n]."""
        each = (self.losses / self.size).repeat_interleave(self.size)
        return each.cumsum(0) / torch.arange(1, len(each) + 1, device=each.device)

    def auroc(self) -> Tensor:
        """Area under the ROC curve, in float64; errors are the positives."""
        positive, negative = self.losses, self.size - self.losses
        below = negative.cumsum(0) - negative / 2
        return (positive * below).sum() / (positive.sum() * negative.sum())

    def average_precision(self) -> Tensor:
        """Area under the precision-recall curve, in float64."""
        positive = self.losses.flip(0)
        precision = positive.cumsum(0) / self.size.flip(0).cumsum(0)
        return (positive * precision).sum() / positive.sum() if len(positive) else positive.new_tensor(math.nan)

    def fpr_at_tpr(self, tpr: float) -> Tensor:
        """The share of negatives above the highest threshold that raises a share `tpr` of the positives."""
        positive, negative = self.losses.flip(0), (self.size - self.losses).flip(0)
        raised, wanted = positive.cumsum(0), tpr * positive.sum() * (1 - 1e-12)  # 0.95 times 20 is 19, whatever it rounds to
        at = torch.searchsorted(raised, wanted)
        return negative.cumsum(0)[at] / negative.sum()


def auroc(scores: Array, is_positive: Array) -> Tensor:
    r"""Area under the ROC curve, :math:`P(s_+ > s_-) + \frac12 P(s_+ = s_-)`; nan if there is only one kind.

    >>> auroc(torch.tensor([0.1, 0.4, 0.4, 9.0]), torch.tensor([False, False, True, True]))
    tensor(0.8750)
    """
    return _detection(scores, is_positive, Ranking.auroc)


def average_precision(scores: Array, is_positive: Array) -> Tensor:
    r"""Area under the precision-recall curve, :math:`\sum_k (R_k - R_{k-1}) P_k`; nan if there is only one kind.

    >>> average_precision(torch.tensor([0.1, 0.4, 0.6, 9.0]), torch.tensor([False, True, False, True]))
    tensor(0.8333)
    """
    return _detection(scores, is_positive, Ranking.average_precision)


def fpr_at_tpr(scores: Array, is_positive: Array, *, tpr: float = 0.95) -> Tensor:
    r"""The share of negatives that are raised, too, at the highest threshold that raises a share `tpr` of the positives.

    It is read off the ROC curve at the first of its points with at least that TPR, without interpolation; nan if there is
    only one kind. Mind what is positive: the literature on failures and on unfamiliar inputs asks how many of *those* pass
    where 95 % of the others do, which is `fpr95`.

    >>> fpr_at_tpr(torch.tensor([0.1, 0.4, 0.6, 9.0]), torch.tensor([False, True, False, True]))
    tensor(0.5000)
    """
    between(0, 1, tpr=tpr, include="high")
    return _detection(scores, is_positive, lambda ranking: ranking.fpr_at_tpr(tpr))


def fpr95(scores: Array, errors: Array) -> Tensor:
    r"""The share of errors (or of unfamiliar inputs) that pass unnoticed where 95 % of the others pass: 0 is best.

    This is "FPR at 95 % TPR" as it is published, with what is right, or familiar, as the positives, found by low scores.

    >>> fpr95(torch.tensor([0.1, 0.2, 0.3, 0.25, 9.0]), torch.tensor([False, False, False, True, True]))
    tensor(0.5000)
    """
    return _detection(scores, errors, lambda ranking: ranking.reversed.fpr_at_tpr(0.95))


def aupr_error(scores: Array, errors: Array) -> Tensor:
    r"""Average precision with errors as the positives, found by high scores. At random it is the share of errors.

    >>> aupr_error(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 0, 1, 0]))
    tensor(0.5000)
    """
    return average_precision(scores, errors)


def aupr_success(scores: Array, errors: Array) -> Tensor:
    r"""Average precision with successes as the positives, found by low scores. At random it is the share of successes.

    >>> aupr_success(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 0, 1, 0]))
    tensor(0.9167)
    """
    return _detection(scores, errors, lambda ranking: ranking.reversed.average_precision())


def risk_coverage(scores: Array | Predictive, errors: Array) -> tuple[Tensor, Tensor]:
    r"""The mean error of the k most certain examples, for every k: (coverage k/n, risk), each [n].

    `errors` are 0 and 1 or any loss. Scores that are tied are taken in random order, in expectation: each has the mean
    error of its group. A predictive instead of scores is ranked by 1 - max probability, a regression by its variance.

    >>> risk_coverage(torch.tensor([0.2, 0.1, 0.3, 0.3]), torch.tensor([0, 0, 1, 0]))
    (tensor([0.2500, 0.5000, 0.7500, 1.0000]), tensor([0.0000, 0.0000, 0.1667, 0.2500]))
    """
    scores, errors = _matching(scores, errors)
    dtype = _dtype(scores)
    risk = Ranking.of(scores, errors).risk
    count = torch.arange(1, len(risk) + 1, device=risk.device)
    return (count / max(1, len(risk))).to(dtype), risk.to(dtype)


def aurc(scores: Array | Predictive, errors: Array) -> Tensor:
    r"""Area under the risk-coverage curve, :math:`\frac{1}{n} \sum_k \mathrm{risk}_k`: lower is better.

    >>> aurc(torch.tensor([0.2, 0.1, 0.3, 0.3]), torch.tensor([0, 0, 1, 0]))
    tensor(0.1042)
    """
    scores, errors = _matching(scores, errors)
    return Ranking.of(scores, errors).risk.mean().to(_dtype(scores))


def excess_aurc(scores: Array | Predictive, errors: Array) -> Tensor:
    r"""How much the area under the risk-coverage curve exceeds the least possible for these errors (Geifman et al. 2019).

    The least is that of an oracle, which ranks by the errors themselves; it is found exactly, for any loss.

    >>> excess_aurc(torch.tensor([0.2, 0.1, 0.3, 0.3]), torch.tensor([0, 0, 1, 0]))
    tensor(0.0417)
    """
    scores, errors = _matching(scores, errors)
    return (Ranking.of(scores, errors).risk.mean() - oracle_aurc(errors)).to(_dtype(scores))


def oracle_aurc(errors: Tensor) -> Tensor:
    """The area under the risk-coverage curve of one who knows the errors, in float64."""
    errors = errors.detach().flatten()
    ordered = (errors.byte() if errors.dtype == torch.bool else errors).sort().values.double()
    return (ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)).mean()


class Threshold(NamedTuple):
    """Answer where the score is at most `value`; -inf if never."""

    value: float
    coverage: float  # the share of the given examples that are answered
    risk: float  # their mean error
    bound: float  # the risk on new examples is at most that, with the confidence asked for; nan if none was


def threshold(scores: Array, errors: Array, *, risk: float, confidence: float | None = None) -> Threshold:
    r"""Where to stop answering: the threshold with the most coverage whose risk is at most the one wanted.

    Give scores and errors of held-out examples that were used for nothing else. Without `confidence` the risk is that of these
    examples, and that of new ones will be higher as often as lower. With it, as in `confidence=0.95`, the *true* risk of what is
    answered is at most `risk` with that probability over the choice of held-out examples, as long as new ones come from the same
    source; errors must be 0 or 1 then. If nothing can be promised the threshold is -inf.

    The guarantee: at a threshold t that is an order statistic of the scores, those below t are, given t, independent examples of
    what will be answered, so that their number of errors is binomial, and :math:`P(\mathrm{Bin}(m, \mathrm{risk}) \le e) \le \delta`
    is the test of Clopper and Pearson. There are 51 such tests, at coverages in steps of 2 % and for all, with :math:`\delta = (1 -
    \mathrm{confidence}) / 51` each, so that the chance that any of them errs is bounded, and the largest coverage that passes is
    taken.

    >>> scores, errors = torch.arange(1000.0), torch.arange(1000) % 10 == 9
    >>> errors[:500] = False
    >>> threshold(scores, errors, risk=0.02)                       # 12 errors among 629
    Threshold(value=628.0, coverage=0.629, risk=0.0190..., bound=nan)
    >>> sure = threshold(scores, errors, risk=0.02, confidence=0.95)
    >>> sure.coverage, sure.bound <= 0.02
    (0.5..., True)
    """
    between(0, 1, include="both", risk=None if confidence is None else risk)
    scores, errors = _matching(scores, errors)
    ranking = Ranking.of(scores, errors)
    count, lost = ranking.size.cumsum(0), ranking.losses.cumsum(0)
    if confidence is None:
        fine = (lost / count <= risk).nonzero()
        return _answer(ranking, count, lost, int(fine[-1]) if len(fine) else -1, math.nan)
    between(0, 1, confidence=confidence)
    if not bool(((errors == 0) | (errors == 1)).all()):
        raise ValueError("the guarantee is for errors that are 0 or 1: leave out `confidence` for other losses")
    return _guaranteed(ranking, count, lost, risk, (1 - confidence) / (STEPS + 1))


def _guaranteed(ranking: Ranking, count: Tensor, lost: Tensor, risk: float, delta: float) -> Threshold:
    from scipy.special import bdtr
    from scipy.stats import beta

    n = ranking.n
    if not n:
        return _answer(ranking, count, lost, -1, math.nan)
    # the order statistics k = n j / STEPS, and infinity: which group each is in; those of lower groups are below it
    ranks = torch.tensor([-(-n * j // STEPS) for j in range(1, STEPS + 1)], device=count.device)
    groups = torch.cat([torch.searchsorted(count, ranks), torch.tensor([len(count)], device=count.device)]) - 1
    some = groups >= 0
    below = torch.where(some, count[groups.clamp_min(0)], 0).cpu().numpy()
    wrong = torch.where(some, lost[groups.clamp_min(0)], 0.0).round().cpu().numpy()
    fine = ((below > 0) & (bdtr(wrong, below.clip(1), risk) <= delta)).nonzero()[0]
    last = int(fine[-1]) if len(fine) else -1
    if last < 0:
        return _answer(ranking, count, lost, -1, math.nan)
    m, e = float(below[last]), float(wrong[last])
    bound = 1.0 if e >= m else float(beta.ppf(1 - delta, e + 1, m - e))
    answer = _answer(ranking, count, lost, int(groups[last]), bound)
    if last == STEPS:
        return answer._replace(value=math.inf)
    # anything below the order statistic itself, which is more than the largest score seen below it
    limit = ranking.values[int(groups[last]) + 1]
    if not limit.is_floating_point():  # compared with whole numbers, a fraction below one would round to it
        return answer._replace(value=float(limit) - 1)
    return answer._replace(value=float(torch.nextafter(limit, limit.new_tensor(-math.inf))))


def _answer(ranking: Ranking, count: Tensor, lost: Tensor, group: int, bound: float) -> Threshold:
    if group < 0:
        return Threshold(-math.inf, 0.0, math.nan, bound)
    m = float(count[group])
    return Threshold(float(ranking.values[group]), m / ranking.n, float(lost[group]) / m, bound)


def _matching(scores: Array | Predictive, errors: Array) -> tuple[Tensor, Tensor]:
    """Scores, or those of a predictive, and as many errors, [n] each."""
    scores = (_doubt(scores) if isinstance(scores, Predictive) else tensor(scores)).detach().flatten()
    errors = tensor(errors).detach().flatten()
    if scores.numel() != errors.numel():
        raise ValueError(f"there are {scores.numel()} scores for {errors.numel()} errors: give one error for each score")
    return scores, errors


def _dtype(scores: Tensor) -> torch.dtype:
    """Of results: that of the scores, but not half precision, which has three digits."""
    return torch.promote_types(scores.dtype, torch.float32) if scores.is_floating_point() else torch.get_default_dtype()


def _detection(scores: Array, is_positive: Array, function: Callable[[Ranking], Tensor]) -> Tensor:
    scores = tensor(scores).detach().flatten()
    truth = tensor(is_positive).detach().flatten().to(scores.device).bool()
    if scores.shape != truth.shape:
        raise ValueError(f"there are {scores.numel()} scores for {truth.numel()} truths: give one for each")
    ranking = Ranking.of(scores, truth)
    if bool(truth.all()) or not bool(truth.any()):
        return torch.tensor(math.nan, dtype=_dtype(scores), device=scores.device)
    return function(ranking).to(_dtype(scores))


def _doubt(p: Predictive) -> Tensor:
    """A default score of uncertainty, [B, *D]."""
    suits(p, "risk_coverage", classes=None)
    if not p.likelihood.discrete:
        return p.uncertainty.total.sum(-1)
    if not p.likelihood.indexed:
        return torch.minimum(p.mean, p.complement).sum(-1)
    top = p.mean.argmax(-1, keepdim=True)
    return p.mean.scatter(-1, top, 0.0).sum(-1)  # 1 - max, but without its rounding, which ties all confident inputs
