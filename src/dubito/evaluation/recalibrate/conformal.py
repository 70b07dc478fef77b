"""Conformal prediction: sets of classes and intervals that hold the target with a given probability."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dubito._moved import renamed_fields
from dubito.evaluation.judge.scorers import Means
from dubito.evaluation.metrics.reading import Array, labelled, targets
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches, refuse
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import at_least, between, one_of
from dubito.tensors.randomness import fresh_generator


def conformal_quantile(scores: Tensor, level: float) -> Tensor:
    r"""The :math:`\lceil (n + 1)\, \mathrm{level} \rceil`-th smallest of n scores along the first axis; infinite if there are fewer.

    >>> conformal_quantile(torch.arange(1.0, 10.0), 0.8), conformal_quantile(torch.arange(1.0, 10.0), 0.95)
    (tensor(8.), tensor(inf))
    """
    if len(scores):
        refuse("a conformal rule", int(scores.isnan().reshape(len(scores), -1).any(-1).sum()), len(scores))
    rank = place(len(scores), level)
    if rank > len(scores):
        return torch.full_like(scores.sum(0), torch.inf)
    return scores.kthvalue(rank, 0).values


def place(n: int, level: float) -> int:
    """The rank of the conformal quantile among n scores, from 1; more than n if there is none."""
    return math.ceil((n + 1) * level - 1e-9)  # less the rounding, by which 10 * 0.9 might be more than 9


def tell(groups: list[tuple[int, str]], level: float, instead: str) -> None:
    """Warn of groups, (examples, name), that are too small for any promise but an empty one."""
    small = [(n, name) for n, name in groups if place(n, level) > n]
    if not small:
        return
    least = math.ceil(level / (1 - level) - 1e-9)
    named = ", ".join(f"{name} ({n})" if name else str(n) for n, name in small[:5]) + (", ..." if len(small) > 5 else "")
    warnings.warn(
        f"too few held-out examples: {named}. A level of {level:g} needs at least {least}; with fewer the quantile is infinite, and "
        f"the answer is {instead}",
        stacklevel=3,
    )


class SetCoverage(NamedTuple):
    """How sets did on data whose classes are known."""

    coverage: float  # share of sets that hold the true class
    size: float  # mean number of classes in a set
    by_class: Tensor  # [C], coverage of the examples of each class; nan where there are none
    n: int
    standard_error: float = math.nan  # of the coverage, over examples


@renamed_fields(randomised="randomized")
@dataclass(frozen=True)
class ConformalSets:
    r"""Sets of classes that hold the true one with probability `level`, whatever the model and the data, if those are exchangeable.

    A score tells how strange class c is at x; a set holds the classes with a score of at most the :math:`\lceil (n + 1)\,
    \mathrm{level} \rceil`-th smallest score of the n held-out examples and their true classes. The probability is over
    these examples as well; it is at least `level`, and at most 1 / (n + 1) more if no scores are tied.

    - "lac", :math:`1 - \bar p_c`: the smallest sets on average; some are empty (Sadinle et al. 2019).
    - "aps", :math:`\sum_{d: p_d > p_c} p_d + u\, p_c`: larger where the model is less sure, so that coverage is more even (Romano et
      al. 2020).
    - "raps", the same plus :math:`\mathrm{penalty} \cdot \max(0, \mathrm{rank}_c - \mathrm{free})`: no long tails of improbable classes
      (Angelopoulos et al. 2021).

    u is uniform, one for each example; `randomized=False` takes 1, for larger sets that are the same each time. With `by_class`
    every class has a quantile of its own, from the examples of that class: it is then covered in each class (Mondrian). `nonempty` adds
    the most probable class to an empty set. Labels (`Bernoulli`) have sets of {0, 1}, and each label its own quantile. A prediction
    that is NaN says nothing, and gets the set of all classes, so that the promise is kept; none may be among the held-out ones.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Categorical(), torch.tensor([[[0.7, 0.2, 0.1]] * 9]).log())
    >>> rule = ConformalSets(score="lac").fit(p, torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2]), level=0.8)
    >>> rule(p)[0], rule.threshold
    (tensor([ True,  True, False]), tensor([[0.8000]], dtype=torch.float64))
    """

    score: Literal["lac", "aps", "raps"] = "aps"
    by_class: bool = False
    randomized: bool = True
    nonempty: bool = False
    penalty: float = 0.01
    free: int = 5

    def __post_init__(self):
        one_of(("lac", "aps", "raps"), score=self.score)
        at_least(0, penalty=self.penalty, free=self.free)

    def fit(
        self,
        predictive: Predictive | Batches,
        y: Array | None = None,
        *,
        level: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> SetRule:
        """The quantiles of held-out data; `generator` draws u."""
        between(0, 1, level=level)
        held = forecasts.classes("ConformalSets", predictive, y)
        probs = _classes(held.logits, held.labels)
        truth = held.truth.reshape(len(probs), -1, 1)  # [n, L, 1]
        own = _scores(self, probs, generator).gather(-1, truth).squeeze(-1)  # [n, L]
        groups, kinds = own.shape[1], probs.shape[-1]
        if self.by_class:
            chosen = [[own[truth[:, i, 0] == k, i] for k in range(kinds)] for i in range(groups)]
        else:
            chosen = [[own[:, i]] for i in range(groups)]
        threshold = torch.stack([torch.stack([conformal_quantile(s, level) for s in row]) for row in chosen])
        tell([(len(s), f"class {k}" if self.by_class else "") for row in chosen for k, s in enumerate(row)], level, "all classes")
        return SetRule(self, threshold, level, len(probs))


@dataclass(frozen=True)
class SetRule:
    """Predictives to sets: what `ConformalSets` fits."""

    settings: ConformalSets
    threshold: Tensor  # [1, 1], or [1, C] by class; of labels [L, 1] or [L, 2]
    level: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive, *, generator: torch.Generator | None = None) -> Tensor:
        """Which classes are in the set of each input, [B, *D, C] of bool; of labels [B, *D, L, 2]: whether it may be 0, whether 1."""
        forecasts.suits("ConformalSets", predictive, classes=True)
        labels, z = not predictive.likelihood.indexed, predictive.log_forecasts
        probs = _classes(z, labels)
        if self.threshold.shape[0] != probs.shape[-2] or self.threshold.shape[1] not in (1, probs.shape[-1]):
            width = self.threshold.shape[0] if labels else self.threshold.shape[1]
            raise ValueError(f"these sets were fitted to {width} outputs; this predictive has {z.shape[-1]}")
        sets = _scores(self.settings, probs, generator) <= self.threshold.to(probs)
        if self.settings.nonempty:
            top = torch.zeros_like(sets).scatter(-1, probs.argmax(-1, keepdim=True), True)
            sets = sets | (top & ~sets.any(-1, keepdim=True))
        sets = sets | probs.isnan().any(-1, keepdim=True).any(-2, keepdim=True)
        return sets if labels else sets.squeeze(-2)

    def judge(
        self, predictive: Predictive | Batches, y: Array | None = None, *, generator: torch.Generator | None = None
    ) -> SetCoverage:
        """Coverage and size on data that is neither that of training nor that of `fit`."""
        covered, sizes, truths, width, means = [], [], [], 0, Means()
        for p, given in forecasts.pairs("ConformalSets", predictive, y):
            sets, target = self(p, generator=generator), targets(p, given, "ConformalSets").long()
            keep = labelled(p, target)
            sets, target = sets[keep], target[keep]  # [n, C] and [n]; of labels [n, L, 2] and [n, L]
            inside = sets.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            means.add(keep, {"coverage": inside.double().reshape(len(inside), -1).mean(1)})
            covered.append(inside.flatten().cpu())
            sizes.append(sets.sum(-1).flatten().cpu())
            truths.append(target.flatten().cpu())
            width = sets.shape[-1]
        inside, truth = torch.cat(covered).double(), torch.cat(truths)
        zero = torch.zeros(width, dtype=torch.float64)
        by_class = zero.index_add(0, truth, inside) / torch.bincount(truth, minlength=width)
        size, error = float(torch.cat(sizes).double().mean()), means.standard_errors()["coverage"]
        return SetCoverage(float(inside.mean()), size, by_class, len(inside), error)


def _classes(z: Tensor, labels: bool) -> Tensor:
    """Log probabilities, or log odds of labels, [..., C] to probabilities [..., L, K]. One function for both sides of a rule: where
    scores are tied, the last bit decides what is in a set."""
    return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], -1) if labels else z.exp().unsqueeze(-2)


def _scores(settings: ConformalSets, probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """How strange each class is, in the shape of probs [..., K]."""
    if settings.score == "lac":
        return 1 - probs
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    if settings.randomized:
        source = fresh_generator(probs.device) if generator is None else generator
        u = torch.rand(*probs.shape[:-1], 1, generator=source, dtype=probs.dtype, device=source.device).to(probs.device)
    else:
        u = 1.0
    score = before + u * ordered
    if settings.score == "raps":
        rank = torch.arange(1, probs.shape[-1] + 1, dtype=probs.dtype, device=probs.device)
        score = score + settings.penalty * (rank - settings.free).clamp_min(0)
    return torch.empty_like(score).scatter(-1, order, score)


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
        one_of(("absolute", "scaled", "quantile"), score=self.score)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None, *, level: float = 0.9) -> IntervalRule:
        """The quantiles of held-out scores, for intervals of that level."""
        between(0, 1, level=level)
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
        each = torch.cat(inside)
        coverage = each.all(-1) if self.settings.joint else each
        width, error = float(torch.cat(widths).mean()), means.standard_errors()["coverage"]
        return IntervalCoverage(float(coverage.double().mean()), width, each.double().mean(0), len(each), error)


def _scale(p: Predictive) -> Tensor:
    scale = p.uncertainty.total.double().sqrt()
    if not bool(((scale.isfinite() & (scale > 0)) | scale.isnan()).all()):
        raise ValueError("a predictive whose variance is zero or infinite has no scale: use score='quantile' or score='absolute'")
    return scale
