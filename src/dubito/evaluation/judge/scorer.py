"""What the scorers of classes and of numbers have in common: which metrics are wanted, means, and scores that are kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dubito.evaluation.judge.decisions import Decision, decide
from dubito.evaluation.judge.means import Means
from dubito.evaluation.measures import MEASURES
from dubito.evaluation.metrics import DECISIONS, METRICS, Metric
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import require

SPLIT = ("total", "aleatoric", "epistemic")


class Scorer(ABC):
    """Sums and kept numbers of batches that are all of classes, or all of numbers."""

    kind: str  # what it is for, in words
    extra: tuple[str, ...]  # names it takes beside those of METRICS and DECISIONS
    score: str  # by which errors are looked for unless others are named
    discrete: bool

    def __init__(self, p: Predictive, wanted: Sequence[str] | None, scores: Sequence[str] | None, bins: int, level: float):
        suitable = [name for name, metric in (METRICS | DECISIONS).items() if self.suits(metric)] + [*self.extra]
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

    @staticmethod
    @abstractmethod
    def suits(metric: Metric) -> bool:
        """Whether a metric is for this kind of prediction."""

    def available(self, p: Predictive, name: str) -> bool:
        """Whether a metric that suits can be computed for this predictive."""
        return True

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
