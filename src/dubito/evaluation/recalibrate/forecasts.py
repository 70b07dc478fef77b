"""What is read from held-out data: log probabilities and labels, or predictives of numbers and targets, from one batch or many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.metrics.reading import Array, tensor
from dubito.evaluation.recalibrate.classes import RecalibratedClasses
from dubito.evaluation.recalibrate.numbers import RecalibratedNumbers
from dubito.model.likelihoods import Bernoulli, Classes, MultiTask
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors.checks import require
from dubito.tensors.randomness import fork_rng

Batches = Iterable[tuple[Predictive, Array]]
FLOOR = math.log(torch.finfo(torch.float64).tiny)
CLASSES = "Temperature, VectorScaling, MatrixScaling, Isotonic, Histogram and ConformalSets"
NUMBERS = "Variance, Quantiles and ConformalIntervals"


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
        suits(name, p, classes=True)
        target = targets(p, given)
        keep = target != p.likelihood.ignore_index if isinstance(p.likelihood, Classes) else slice(None)
        labels = isinstance(p.likelihood, Bernoulli)
        found = log_forecasts(p)
        logits.append(found[keep].reshape(-1, found.shape[-1]))
        truth.append((target[keep].reshape(-1, found.shape[-1]) if labels else target[keep]).long())
    require(sum(map(len, truth)), f"there is nothing to fit {name} to: no batch, or none with a labelled target")
    found = torch.cat(logits)
    refuse(name, int(found.isnan().any(-1).sum()), len(found))
    return Held(finite(found), torch.cat(truth), labels)


def numbers(
    name: str, predictive: Predictive | Batches, y: Array | None, *, finite: bool = True
) -> Iterator[tuple[Predictive, Tensor]]:
    """Predictives of a regression and targets in the layout of their means, batch by batch.

    If some predictions are not `finite`, as they have to be for a fit, that is an error at the end, when they have been counted.
    """
    n = bad = 0
    for p, given in pairs(name, predictive, y):
        suits(name, p, classes=False)
        target = targets(p, given)
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
    """Raise, in words, for a predictive of the other kind."""
    if not isinstance(p, Predictive):
        raise TypeError(f"{name} maps predictives, as posterior.predict(x) gives; got a {type(p).__name__}")
    kind = type(p.likelihood).__name__
    if isinstance(p.likelihood, MultiTask):
        raise ValueError(f"{name} is for one task at a time: use p.task(name), one of {list(p.likelihood.tasks)}")
    if p.likelihood.discrete != classes:
        ours, theirs, others = ("classes", "numbers", NUMBERS) if classes else ("regression", "classes", CLASSES)
        raise ValueError(f"{name} is for {ours}, and {kind} predicts {theirs}: for these there are {others}")


def targets(p: Predictive, y: Array) -> Tensor:
    """Checked, in the layout of the predictive's mean: [B, *D] for classes, [B, *D, C] else."""
    f = p.means[0]
    y = tensor(y).to(f.device)
    p.likelihood.check(f, y)
    return p.likelihood.target(y, f)


def fits(name: str, p: Predictive, width: int, *, classes: bool) -> None:
    """Raise, in words, if a map was fitted to predictives of another kind or with another number of outputs."""
    suits(name, p, classes=classes)
    if width != p.likelihood.width(p.means):
        raise ValueError(f"{name} was fitted to {width} outputs; this predictive has {p.likelihood.width(p.means)}")


def finite(logits: Tensor) -> Tensor:
    """With a large number in the place of infinity, the logarithm or the log odds of a probability of 0 or 1: it cannot be scaled."""
    return logits.nan_to_num(nan=math.nan, posinf=-FLOOR, neginf=FLOOR)


def log_forecasts(p: Predictive) -> Tensor:
    r"""Log class probabilities of the average over draws, :math:`\ln \sum_s w_s p_{sc}`, or a label's log odds, [B, *D, C] in float64.

    They are formed in logs, so that what is improbable is not lost.
    """
    if isinstance(p, RecalibratedClasses):
        return p.logits.double()
    if isinstance(p, LatentMixture) and p.linked_points is not None:
        p = p.linked_points
    if not isinstance(p, LatentMixture):
        probs = p.mean.double()
        return torch.logit(probs, eps=1e-12) if isinstance(p.likelihood, Bernoulli) else probs.log().clamp_min(FLOOR)
    points = p.points
    weights = points.component_weights.double().log().reshape(-1, *[1] * (points.means.ndim - 1))
    if isinstance(p.likelihood, Bernoulli):
        f = p.likelihood._logits(points.means, points.aligned_params).double()
        return (F.logsigmoid(f) + weights).logsumexp(0) - (F.logsigmoid(-f) + weights).logsumexp(0)
    assert isinstance(p.likelihood, Classes)
    return (p.likelihood.log_probs(points.means, points.aligned_params).double() + weights).logsumexp(0)
