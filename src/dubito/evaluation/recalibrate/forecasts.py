"""What is read from held-out data: log probabilities and labels, or predictives of numbers and targets, from one batch or many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.metrics import reading
from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate.predictives import RecalibratedNumbers
from dubito.posteriors.predictive import Predictive
from dubito.posteriors.predictive.predictive import FLOOR
from dubito.tensors.checks import require
from dubito.tensors.randomness import fork_rng

Batches = Iterable[tuple[Predictive, Array]]
ADVICE = (
    "for these there are Temperature, VectorScaling, MatrixScaling, Isotonic, Histogram and ConformalSets",
    "for these there are Variance, Quantiles and ConformalIntervals",
)


@dataclass(frozen=True)
class Held:
    """Forecasts of held-out examples (or labelled positions of dense outputs), in float64, and what came true."""

    logits: Tensor  # [n, C]: log probabilities of classes, log odds of labels
    truth: Tensor  # [n] of classes, [n, C] of labels
    labels: bool  # each output is a label of its own

    @property
    def probs(self) -> Tensor:
        """Probabilities of classes or labels, [n, C]."""
        return torch.sigmoid(self.logits) if self.labels else self.logits.exp()

    @property
    def hits(self) -> Tensor:
        """1 where an output came true, [n, C]."""
        return self.truth.double() if self.labels else F.one_hot(self.truth, self.logits.shape[-1]).double()

    def rows(self, which: Tensor) -> Held:
        """Some of the examples."""
        return Held(self.logits[which], self.truth[which], self.labels)


def classes(name: str, predictive: Predictive | Batches, y: Array | None) -> Held:
    """Forecasts and truth of all batches, for the map of that name."""
    logits, truth, labels = [], [], False
    for p, given in pairs(name, predictive, y):
        target = reading.targets(p, given, name, classes=True, advice=ADVICE)
        keep, labels = reading.labelled(p, target), not p.likelihood.indexed
        logits.append(p.log_forecasts[keep])
        truth.append(target[keep].long())
    require(sum(map(len, truth)), f"there is nothing to fit {name} to: no batch, or none with a labelled target")
    whole = torch.cat(logits)
    refuse(name, int(whole.isnan().any(-1).sum()), len(whole))
    return Held(finite(whole), torch.cat(truth), labels)


def numbers(
    name: str, predictive: Predictive | Batches, y: Array | None, *, finite: bool = True
) -> Iterator[tuple[Predictive, Tensor]]:
    """Predictives of a regression and targets in the layout of their means, batch by batch.

    If some predictions are not `finite`, as they have to be for a fit, that is an error at the end, when they have been counted.
    """
    n = bad = 0
    for p, given in pairs(name, predictive, y):
        target = reading.targets(p, given, name, classes=False, advice=ADVICE)
        n += target.shape[:-1].numel()
        bad += int(_broken(p).any(-1).sum()) if finite else 0
        if not bad:
            yield p, target
    require(n, f"there is nothing to fit {name} to: no batch, or none with a target")
    refuse(name, bad, n)


def _broken(p: Predictive) -> Tensor:
    """Which outputs have no mean or no variance, [B, *D, C]; an infinite variance, as a Student-t may have, is one."""
    p = p.before if isinstance(p, RecalibratedNumbers) else p  # whose map is finite
    return ~p.mean.isfinite() | p.uncertainty.total.isnan()


def refuse(name: str, bad: int, n: int) -> None:
    """Raise, in words, if some of n held-out predictions are NaN or infinite."""
    if bad:
        raise ValueError(
            f"{bad} of {n} held-out predictions are NaN or infinite, and {name} cannot be fitted to them: look for inputs or weights "
            "that are not finite, or leave these rows out"
        )


def pairs(name: str, predictive: Predictive | Batches, y: Array | None) -> Iterator[tuple[Predictive, Array]]:
    """One predictive and its targets, or batches of them."""
    if isinstance(predictive, Predictive):
        if y is None:
            raise ValueError(f"{name} is fitted to held-out targets: fit(predictive, y)")
        yield predictive, y
        return
    if not isinstance(predictive, Iterable) or y is not None:
        raise TypeError(
            f"{name} is fitted to a Predictive and its targets, fit(posterior.predict(x), y), or to pairs of them, "
            f"fit(posterior.predict_batches(loader)); got a {type(predictive).__name__}"
        )
    with fork_rng():  # a DataLoader behind the batches draws from the global generator
        for pair in predictive:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Predictive):
                raise TypeError(
                    f"the batches that {name} is fitted to are pairs (predictive, y), as posterior.predict_batches gives"
                )
            if pair[1] is None:
                raise ValueError(f"the batches hold inputs only: {name} needs the targets as well")
            yield pair


def suits(name: str, p: Predictive, *, classes: bool) -> None:
    """Raise for what is no predictive, or one of the other kind."""
    if not isinstance(p, Predictive):
        raise TypeError(f"{name} maps predictives, as posterior.predict(x) gives; got a {type(p).__name__}")
    reading.suits(p, name, classes=classes, advice=ADVICE)


def fits(name: str, p: Predictive, width: int, *, classes: bool) -> None:
    """Raise, in words, if a map was fitted to predictives of another kind or with another number of outputs."""
    suits(name, p, classes=classes)
    if width != p.likelihood.width(p.means):
        raise ValueError(f"{name} was fitted to {width} outputs; this predictive has {p.likelihood.width(p.means)}")


def finite(logits: Tensor) -> Tensor:
    """With a large number in the place of infinity, the logarithm or the log odds of a probability of 0 or 1: it cannot be scaled."""
    return logits.nan_to_num(nan=math.nan, posinf=-FLOOR, neginf=FLOOR)
