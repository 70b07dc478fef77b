r"""What is added up batch by batch, for classes from one pass over the draws, and for numbers; and means with standard errors.

An example is one row of a batch. With dense outputs its positions (pixels, steps) are not independent of each other, so the standard
error is that of a ratio of sums over examples: with :math:`s_i` the sum over the :math:`c_i` positions of example i,

.. math:: \bar v = \frac{\sum_i s_i}{\sum_i c_i}, \qquad
    \mathrm{se}^2 = \frac{m}{m - 1} \frac{\sum_i (s_i - \bar v c_i)^2}{(\sum_i c_i)^2}

over the m examples that have a position. With one position each it is the usual :math:`\sigma / \sqrt m`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from dubito.evaluation.judge.judgement import SPLIT, Decision, decide
from dubito.evaluation.measures import MEASURES
from dubito.evaluation.metrics import DECISIONS, METRICS, QuantileCalibration, Reliability
from dubito.evaluation.metrics.calibration import Binning, ClassBins
from dubito.evaluation.metrics.reading import labelled, precise
from dubito.evaluation.metrics.regression import LEVELS, crps_of, interval_penalty, pit_of
from dubito.model.likelihoods import Classes, entropy
from dubito.posteriors.predictive import Predictive
from dubito.posteriors.predictive.classes import class_terms
from dubito.posteriors.predictive.predictive import takes_counts
from dubito.tensors.checks import require

SHARES = ("accuracy", "coverage")  # means of zeros and ones
ROUNDING = 1e-13  # of a sum of squares: a variance below that is rounding


class Means:
    """Means of quantities that every position has, added up batch by batch; nothing is kept of single examples.

    >>> means = Means()
    >>> means.add(torch.tensor([True, True, True]), {"loss": torch.tensor([1.0, 2.0, 6.0])})
    >>> means.values()["loss"], round(means.standard_errors()["loss"], 4)
    (3.0, 1.5275)
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # of s, s^2 and s c
        self._counts: Tensor | None = None  # examples that have a position, sum of c, sum of c^2

    def add(self, keep: Tensor, values: Mapping[str, Tensor], sums: Mapping[str, Tensor] | None = None) -> None:
        """Take in a batch: which positions count, [B, *D]; quantities of those that do, [n] each; others summed over them, [B] each."""
        count = keep.flatten(1).sum(1).double() if keep.ndim > 1 else keep.double()  # [B]
        sums = {} if sums is None else sums
        by_row = row_sums(torch.stack([value.double() for value in values.values()]), keep)
        by_row = torch.cat([by_row, *(one.double().unsqueeze(0) for one in sums.values())])  # [K, B]
        added = torch.stack([by_row.sum(-1), by_row.square().sum(-1), by_row @ count], -1)
        for name, one in zip([*values, *sums], added.unbind(), strict=True):
            self._sums[name] = one + self._sums.get(name, 0.0)  # on their device: nobody waits for them
        counts = torch.stack([(count > 0).double().sum(), count.sum(), count.square().sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def merge(self, other: Means) -> None:
        """Take in the sums of other batches."""
        for name, sums in other._sums.items():
            self._sums[name] = sums + self._sums.get(name, 0.0)
        if other._counts is not None:
            self._counts = other._counts if self._counts is None else self._counts + other._counts

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def values(self) -> dict[str, float]:
        """The mean of every quantity over all positions."""
        n = math.nan if self._counts is None else float(self._counts[1])
        return {name: float(sums[0]) / n for name, sums in self._sums.items()}

    def standard_errors(self) -> dict[str, float]:
        """The standard error of every mean; nan for fewer than two examples.

        A share (of `SHARES`) of exactly 0 or 1 gets the standard deviation of the rule of succession, about 1 / m for m examples, since
        a share without a single exception is no certainty.
        """
        if self._counts is None or float(self._counts[0]) < 2:
            return dict.fromkeys(self._sums, math.nan)
        examples, n, squares = self._counts.tolist()
        errors = {}
        for name, sums in self._sums.items():
            total, square, product = sums.tolist()
            mean = total / n
            off = square - 2 * mean * product + mean * mean * squares
            off = 0.0 if off <= ROUNDING * square else off
            errors[name] = math.sqrt(examples / (examples - 1) * off) / n if math.isfinite(off) else math.nan
            if name in SHARES and mean in (0.0, 1.0):
                errors[name] = math.sqrt((examples + 1) / (examples + 3)) / (examples + 2)
        return errors


def row_sums(values: Tensor, keep: Tensor) -> Tensor:
    """Values [..., n] of the positions that count, `keep` [B, *D], summed over the positions of each row: [..., B]."""
    if keep.ndim == 1 and values.shape[-1] == len(keep):
        return values
    row = torch.arange(len(keep), device=keep.device).view(-1, *[1] * (keep.ndim - 1)).expand_as(keep)[keep]
    return values.new_zeros(*values.shape[:-1], len(keep)).index_add(-1, row, values)


class QuantileCounts:
    """How many PIT values lie at or below each level of 1 %, 2 %, ..., 99 %, counted batch by batch."""

    def __init__(self) -> None:
        self.n = 0
        self._below: Tensor | float = 0.0

    def add(self, pit: Tensor) -> None:
        """Count values F(y), of any shape."""
        values = pit.flatten().double()
        cuts = torch.tensor(LEVELS, dtype=torch.float64, device=values.device)
        self._below = self._below + torch.bincount(torch.bucketize(values, cuts), minlength=len(cuts) + 1)[:-1].cumsum(0).double()
        self.n += len(values)

    def merge(self, other: QuantileCounts) -> None:
        """Take in other counts."""
        self._below, self.n = self._below + other._below, self.n + other.n

    @property
    def calibration(self) -> QuantileCalibration:
        """The share of targets below the quantile of each level."""
        below = torch.as_tensor(self._below).cpu()
        return QuantileCalibration(torch.tensor(LEVELS, dtype=torch.float64), below / self.n, self.n)

    @property
    def histogram(self) -> Tensor:
        """Counts of PIT values in 20 equal bins."""
        below = torch.as_tensor(self._below).cpu()
        return torch.cat([below.new_zeros(1), below[4::5], below.new_full((1,), self.n)]).diff()


class Scorer(ABC):
    """Sums and kept numbers of batches that are all of classes, or all of numbers."""

    kind: str  # what it is for, in words
    extra: tuple[str, ...]  # names it takes beside those of METRICS and DECISIONS
    score: str  # by which errors are looked for unless others are named
    discrete: bool

    def __init__(self, p: Predictive, wanted: Sequence[str] | None, scores: Sequence[str] | None, bins: int, level: float):
        suitable = [name for name, metric in (METRICS | DECISIONS).items() if metric.suits(self.discrete)] + [*self.extra]
        self.wanted = [name for name in suitable if self.available(p, name)] if wanted is None else wanted
        for name in self.wanted:
            require(
                name in suitable,
                f"{name} is not for {self.kind}, which {type(p.likelihood).__name__} predicts: use some of {', '.join(suitable)}",
            )
        self.scores = [self.score] if scores is None else scores
        self.bins, self.level = bins, level
        self.n = 0
        self.means = Means()
        self.kept: dict[str, list[Tensor]] = {}

    def available(self, p: Predictive, name: str) -> bool:
        """Whether a metric that suits can be computed for this predictive."""
        return True

    def merge(self, others: Sequence[Scorer]) -> None:
        """Take in what others have seen. What is kept is put in the order of the batches, of which they took turns."""
        turns = [self.kept, *(other.kept for other in others)]
        self.kept = {
            name: [part for turn in zip_longest(*(kept.get(name, []) for kept in turns)) for part in turn if part is not None]
            for name in dict.fromkeys(chain(*turns))
        }
        for other in others:
            self.n += other.n
            self.means.merge(other.means)

    @abstractmethod
    def update(self, p: Predictive, y: Tensor, target: Tensor) -> None:
        """Take in a batch: y as it was given, and `target` in the layout of p.mean."""

    @abstractmethod
    def values(self) -> dict[str, float]:
        """All values but those of decisions and uncertainty."""

    def details(self) -> dict[str, Any]:
        """The fields of a `Judgement` that only this kind of prediction has."""
        return {}

    def standard_errors(self) -> dict[str, float]:
        """The standard errors of the values that are means."""
        errors = self.means.standard_errors()
        names = (*METRICS, *SPLIT) if self.wants("uncertainty") else (*METRICS,)
        return {name: errors[name] for name in names if name in errors and (name in SPLIT or self.wants(name))}

    def wants(self, *names: str) -> bool:
        """Whether any of these metrics is asked for."""
        return any(name in self.wanted for name in names)

    def keep(self, **values: Tensor) -> None:
        """Keep numbers of single examples, for what needs their ranks."""
        for name, value in values.items():
            self.kept.setdefault(name, []).append(value.clone() if value._base is not None else value)

    def keep_decisions(self, p: Predictive, errors: Tensor, ready: Mapping[str, Tensor], keep: Tensor) -> None:
        """Keep errors and scores; `ready` are scores that are computed already, `keep` which positions count."""
        if not self.wants(*DECISIONS):
            return
        self.keep(errors=errors)
        for name in self.scores:
            score = ready[name] if name in ready else MEASURES[name](p)[keep]
            if bool(score.isnan().any()):
                raise ValueError(
                    f"predictions are NaN, and {name} cannot rank them: look for inputs or weights that are not finite, or leave out "
                    f"{', '.join(DECISIONS)}"
                )
            self.keep(**{f"score {name}": score})

    def joined(self, name: str) -> Tensor:
        """The kept numbers of all batches."""
        return torch.cat(self.kept[name])

    def split(self) -> dict[str, float]:
        """The means of total, aleatoric and epistemic uncertainty, if asked for."""
        if not self.wants("uncertainty"):
            return {}
        means = self.means.values()
        total, aleatoric = means["total"], means["aleatoric"]
        epistemic = total - aleatoric if math.isfinite(total) else math.nan
        return {"total": total, "aleatoric": aleatoric, "epistemic": epistemic}

    def decisions(self) -> dict[str, Decision]:
        """How well each score finds the errors, if asked for."""
        if not self.wants(*DECISIONS):
            return {}
        scores = {name: self.joined(f"score {name}") for name in self.scores}
        return decide(scores, self.joined("errors"), self.wanted, discrete=self.discrete)

    def in_order(self, values: Mapping[str, float], names: Iterable[str] = METRICS) -> dict[str, float]:
        """The values that are asked for, in the order of `names`."""
        return {name: values[name] for name in names if name in values and self.wants(name)}


class ClassScorer(Scorer):
    """Classes, and labels that are each on or off. Kept for every choice: its confidence and whether it was right."""

    kind, extra, score, discrete = "classes", ("brier_decomposition", "uncertainty"), "one_minus_max", True
    bins_of_classes: ClassBins | None = None

    def merge(self, others: Sequence[Scorer]) -> None:
        """Also the bins of each class."""
        super().merge(others)
        for other in others:
            bins, more = self.bins_of_classes, other.bins_of_classes if isinstance(other, ClassScorer) else None
            self.bins_of_classes = bins + more if bins is not None and more is not None else bins or more

    def update(self, p: Predictive, y: Tensor, target: Tensor) -> None:
        """Take in a batch: y as it was given, and `target` [B, *D] or [B, *D, L]."""
        keep = labelled(p, target)
        truth = target[keep].long()
        terms = _terms(p, y, truth, keep)
        choice = _classes(terms.probs, truth) if p.likelihood.indexed else _labels(p, terms.probs, truth, keep)
        self.n += len(truth)
        correct = torch.where(choice.confidence.isnan(), math.nan, choice.correct.double())  # as the other metrics are NaN
        values = {
            "accuracy": correct.flatten(1).mean(1) if correct.ndim > 1 else correct,
            "total": terms.total,
            "aleatoric": terms.aleatoric,
            "epistemic": terms.total.double() - terms.aleatoric.double(),
        }
        if self.wants("brier"):
            values["brier"] = choice.gap.square().sum(-1, dtype=torch.float64)
        self.means.add(keep, values, {"nll": -terms.log_prob})
        if self.wants("classwise_ece", "brier_decomposition"):
            bins = ClassBins.of(terms.probs, truth, bins=self.bins)
            self.bins_of_classes = bins if self.bins_of_classes is None else self.bins_of_classes + bins
        if self.wants("ece", "ece_mass", "mce"):
            self.keep(confidence=choice.confidence.flatten(), correct=choice.correct.flatten())
        ready = {
            "one_minus_max": choice.doubt,
            "predictive_entropy": terms.total,
            "expected_entropy": terms.aleatoric,
            "mutual_information": terms.total - terms.aleatoric,
        }
        self.keep_decisions(p, ~choice.correct.flatten(1).all(1) if correct.ndim > 1 else ~choice.correct, ready, keep)

    def _reliability(self, by: Binning) -> Reliability | None:
        if "confidence" not in self.kept:
            return None
        return Reliability.of(self.joined("confidence"), self.joined("correct"), bins=self.bins, by=by, level=self.level).cpu()

    def values(self) -> dict[str, float]:
        """Accuracy, proper scores, calibration errors and the parts of the Brier score."""
        values = self.means.values()
        if (bins := self._reliability("width")) is not None:
            values |= {"ece": float(bins.ece), "mce": float(bins.mce)}
        if self.wants("ece_mass") and (bins := self._reliability("mass")) is not None:
            values["ece_mass"] = float(bins.ece)
        if self.bins_of_classes is None:
            return self.in_order(values)
        values["classwise_ece"] = float(self.bins_of_classes.ece)
        parts = self.bins_of_classes.decomposition._asdict() if self.wants("brier_decomposition") else {}
        return self.in_order(values) | {f"brier_{name}": float(part) for name, part in parts.items()}

    def details(self) -> dict[str, Any]:
        """The reliability diagram, if any calibration error is asked for."""
        return {"reliability": self._reliability("width")}


@dataclass(frozen=True)
class Choices:
    """What is chosen for n positions, among classes, or on and off for each of L labels."""

    confidence: Tensor  # [n] or [n, L], the probability of what is chosen
    correct: Tensor  # the same shape
    doubt: Tensor  # [n], the probability that it is wrong; of labels, how many are expected to be wrong
    gap: Tensor  # [n, C], probabilities minus what came true


def _classes(probs: Tensor, truth: Tensor) -> Choices:
    confidence, top = probs.max(-1)
    gap = probs.scatter_add(-1, truth.unsqueeze(-1), probs.new_full((len(probs), 1), -1.0))
    doubt = probs.scatter(-1, top.unsqueeze(-1), 0.0).sum(-1)
    return Choices(confidence, (top == truth) & ~confidence.isnan(), doubt, gap)


def _labels(p: Predictive, probs: Tensor, truth: Tensor, keep: Tensor) -> Choices:
    off = precise(p.complement[keep])
    confidence = torch.maximum(probs, off)
    correct = ((probs > off) == truth.bool()) & ~confidence.isnan()
    return Choices(confidence, correct, torch.minimum(probs, off).sum(-1), probs - truth)


@dataclass(frozen=True)
class Terms:
    """What n positions with a target need of the draws."""

    probs: Tensor  # [n, C]
    log_prob: Tensor  # [B], of the truth, summed over the positions of each row
    total: Tensor  # [n]
    aleatoric: Tensor  # [n]


def _terms(p: Predictive, y: Tensor, truth: Tensor, keep: Tensor) -> Terms:
    """The terms of all positions of `keep` [B, *D], in one pass over the draws where these are at hand."""
    if p.mixture is None or not isinstance(p.likelihood, Classes) or p.mixture.linked_points is not None:
        split = p.uncertainty
        return Terms(precise(p.mean[keep]), p.log_prob(y), split.total[keep], split.aleatoric[keep])
    terms = class_terms(p.mixture, keep, truth)
    probs = terms.probs.clamp_(0, 1)  # a mean of probabilities may round to more than 1
    total = entropy(probs)
    return Terms(probs, row_sums(terms.log_probs.double(), keep), total, torch.minimum(terms.entropy, total))


ROOTS = {"rmse": "squares", "sharpness": "variance"}  # metrics that are the root of a mean
OF_INTERVALS = ("coverage", "width", "interval_score")
OF_INTERVAL_TARGETS = ("nll", "sharpness", "uncertainty")  # what there is where some targets are only known to lie in an interval


class NumberScorer(Scorer):
    """Regression. The error of an example is its squared error, summed over outputs."""

    kind, extra, score, discrete = "regression", ("uncertainty",), "total_variance", False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.quantiles = QuantileCounts()

    def merge(self, others: Sequence[Scorer]) -> None:
        """Also the counts of PIT values."""
        super().merge(others)
        for other in others:
            if isinstance(other, NumberScorer):
                self.quantiles.merge(other.quantiles)

    def available(self, p: Predictive, name: str) -> bool:
        """A likelihood of one's own may have no CRPS and no distribution function, and intervals are compared with no number."""
        if p.likelihood.intervals:
            return name in OF_INTERVAL_TARGETS
        mixture = p.mixture
        if mixture is not None and mixture.gaussian:
            return True
        if name not in ("crps", *OF_INTERVALS, "quantile_error"):
            return True
        if name == "crps" and mixture is None:
            return hasattr(p, "crps")
        if name == "quantile_error" and mixture is not None and takes_counts(mixture.marginals[0]):
            return False  # levels of counts are not uniform, however good they are
        if not hasattr(p, "cdf"):
            return name != "quantile_error"
        with suppress(ValueError):
            p.cdf(p.mean)  # pyright: ignore[reportAttributeAccessIssue]
            return True
        return False

    def update(self, p: Predictive, y: Tensor, target: Tensor) -> None:
        """Take in a batch: y as it was given, and `target` [B, *D, C]."""
        if not target.numel():
            return
        if p.likelihood.intervals:
            of_numbers = set(self.wanted) - set(OF_INTERVAL_TARGETS)
            target = p.likelihood.numbers(target) if of_numbers else torch.full_like(p.mean, math.nan)
        keep = torch.ones_like(labelled(p, target))
        self.n += keep.numel()
        squares, split = (p.mean - target).double().square(), p.uncertainty
        total, aleatoric = split.total.double(), split.aleatoric.double()
        values = {"squares": squares, "variance": total}
        sums = {"total": total, "aleatoric": aleatoric, "epistemic": total - aleatoric}
        if self.wants("crps"):
            values["crps"] = crps_of(p, y).reshape(target.shape)
        if self.wants(*OF_INTERVALS):
            lower, upper = p.interval(self.level)
            values["coverage"] = (lower <= target) & (target <= upper)
            values["width"] = upper - lower
            values["interval_score"] = interval_penalty(target, lower, upper, self.level)
        each = {name: value.double().mean(-1).flatten() for name, value in values.items()}
        each |= {name: value.sum(-1).flatten() for name, value in sums.items()}
        self.means.add(keep, each, {"nll": -p.log_prob(y)} if self.wants("nll") else None)
        if self.wants("quantile_error"):
            self.quantiles.add(pit_of(p, y, "judge"))
        self.keep_decisions(p, squares.sum(-1).flatten(), {"total_variance": each["total"]}, keep)

    def values(self) -> dict[str, float]:
        """Errors, proper scores, intervals and quantiles."""
        values = self.means.values()
        values |= {name: math.sqrt(values[square]) for name, square in ROOTS.items()}
        if self.quantiles.n:
            values["quantile_error"] = float(self.quantiles.calibration.error)
        return self.in_order(values)

    def standard_errors(self) -> dict[str, float]:
        """Those of means, and of `rmse` and `sharpness` by the delta method: se / (2 root)."""
        errors, values = self.means.standard_errors(), self.values()
        roots = {name: errors[square] / (2 * values[name]) for name, square in ROOTS.items() if values.get(name)}
        return super().standard_errors() | roots  # of a root, by the delta method

    def details(self) -> dict[str, Any]:
        """Quantile calibration and the histogram of PIT values, if asked for."""
        return {"quantiles": self.quantiles.calibration, "pit": self.quantiles.histogram} if self.quantiles.n else {}
