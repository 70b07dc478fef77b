"""Conformal intervals: as wide as it takes to hold the target with a given probability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dubito.evaluation.judge.means import Means
from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches
from dubito.evaluation.recalibrate.rank import check_level, conformal_quantile, tell
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of

SCORES = ("absolute", "scaled", "quantile")
ROUNDING = 8 * torch.finfo(torch.float64).eps  # relative: a target that lies on the threshold must not fall out by the last bit


class IntervalCoverage(NamedTuple):
    """How intervals did on data whose targets are known."""

    coverage: float  # share of targets inside; with `joint` of examples all of whose outputs are
    width: float  # mean over examples and outputs
    by_output: Tensor  # [C], coverage of each output
    n: int
    standard_error: float = math.nan  # of the coverage, over examples


@dataclass(frozen=True)
class ConformalIntervals:
    r"""Intervals that hold the target with probability `level`, whatever the model and the data, if those are exchangeable.

    A score tells how strange a target is, and q is the :math:`\lceil (n + 1)\, \mathrm{level} \rceil`-th smallest of the n held-out
    ones.

    - "absolute", :math:`|y - m(x)|`: :math:`m \pm q`, as wide everywhere.
    - "scaled", :math:`|y - m(x)| / s(x)` with the predictive's standard deviation: :math:`m \pm q\, s(x)` (Lei et al. 2018).
    - "quantile", :math:`\max(l(x) - y, y - u(x))` with the predictive's central interval of that level:
      :math:`[l - q, u + q]`; q may be negative (conformalized quantile regression, Romano et al. 2019).

    The probability is over the held-out examples as well; it is at least `level`, and at most 1 / (n + 1) more if no scores are tied.
    Each output is covered on its own; with `joint` all outputs of an example at once, by the largest of their scores. Where a
    prediction is NaN or infinite, the intervals are the whole line, so that the promise is kept; none may be among the held-out ones.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Gaussian(scale=2.0), torch.zeros(1, 9, 1))
    >>> rule = ConformalIntervals("scaled").fit(p, torch.arange(1.0, 10.0), level=0.8)
    >>> lower, upper = rule(p)
    >>> lower[0], upper[0]
    (tensor([-8.]), tensor([8.]))
    """

    score: Literal["absolute", "scaled", "quantile"] = "scaled"
    joint: bool = False

    def __post_init__(self):
        one_of(SCORES, score=self.score)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None, *, level: float = 0.9) -> IntervalRule:
        """The quantiles of held-out scores, for intervals of that level."""
        check_level(level)
        parts = [self._scores(p, target, level) for p, target in forecasts.numbers("ConformalIntervals", predictive, y)]
        scores = torch.cat(parts)  # [n, C]
        width = scores.shape[1]
        if self.joint:
            scores = scores.amax(-1, keepdim=True)
        tell([(len(scores), "")], level, "the whole line")
        return IntervalRule(self, conformal_quantile(scores, level).expand(width).contiguous(), level, len(scores))

    def _scores(self, p: Predictive, y: Tensor, level: float) -> Tensor:
        """[n, C] in float64."""
        if self.score == "quantile":
            lower, upper = (end.double() for end in p.interval(level))
            score = torch.maximum(lower - y, y - upper)
        else:
            score = (y.double() - p.mean).abs()
            if self.score == "scaled":
                score = score / _scale(p)
        return score.flatten(0, -2)


@dataclass(frozen=True)
class IntervalRule:
    """Predictives to intervals: what `ConformalIntervals` fits."""

    settings: ConformalIntervals
    threshold: Tensor  # [C]
    level: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> tuple[Tensor, Tensor]:
        """(lower, upper), each [B, *D, C]."""
        lower, upper = self._ends(predictive)
        nothing = ~((lower < torch.inf) & (upper > -torch.inf)).all(-1, keepdim=True)  # NaN, or infinite on one side
        return lower.masked_fill(nothing, -torch.inf), upper.masked_fill(nothing, torch.inf)

    def _ends(self, p: Predictive) -> tuple[Tensor, Tensor]:
        forecasts.fits("ConformalIntervals", p, len(self.threshold), classes=False)
        q, dtype = self.threshold.to(p.means.device), p.mean.dtype
        if self.settings.score == "quantile":
            low, high = (end.double() for end in p.interval(self.level))
            middle = (low + high) / 2  # where both ends meet, if q takes more than there is
            slack = ROUNDING * (torch.maximum(low.abs(), high.abs()) + q.abs())
            return torch.minimum(low - q - slack, middle).to(dtype), torch.maximum(high + q + slack, middle).to(dtype)
        mean, half = p.mean.double(), q * _scale(p) if self.settings.score == "scaled" else q.expand_as(p.mean)
        half = half + ROUNDING * (mean.abs() + half)
        return (mean - half).to(dtype), (mean + half).to(dtype)

    def judge(self, predictive: Predictive | Batches, y: Array | None = None) -> IntervalCoverage:
        """Coverage and width on data that is neither that of training nor that of `fit`."""
        inside, widths, means = [], [], Means()
        for p, target in forecasts.numbers("ConformalIntervals", predictive, y, finite=False):
            lower, upper = self(p)
            covered = (lower <= target) & (target <= upper)
            each = covered.all(-1).double() if self.settings.joint else covered.double().mean(-1)  # [B, *D]
            means.add(torch.ones_like(each, dtype=torch.bool), {"coverage": each.flatten()})
            inside.append(covered.flatten(0, -2).cpu())
            widths.append((upper - lower).flatten(0, -2).double().cpu())
        found = torch.cat(inside)
        coverage = found.all(-1) if self.settings.joint else found
        width, error = float(torch.cat(widths).mean()), means.standard_errors()["coverage"]
        return IntervalCoverage(float(coverage.double().mean()), width, found.double().mean(0), len(found), error)


def _scale(p: Predictive) -> Tensor:
    scale = p.uncertainty.total.double().sqrt()
    if not bool(((scale.isfinite() & (scale > 0)) | scale.isnan()).all()):
        raise ValueError("a predictive whose variance is zero or infinite has no scale: use score='quantile' or score='absolute'")
    return scale
