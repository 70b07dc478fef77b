"""How good dense predictions and their uncertainties are, in one pass over data and in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.apps.dense.confusion import Confusion
from dubito.apps.dense.detector import Detector
from dubito.apps.dense.maps import Maps, Piece, Portions, pieces, predictives
from dubito.evaluation.metrics import QuantileCalibration, Reliability, wilson
from dubito.evaluation.metrics.regression import LEVELS
from dubito.inference.batches import Arrays
from dubito.inference.progress import Progress
from dubito.model.likelihoods import Bernoulli, Classes, MultiTask
from dubito.network.examples import split_batch
from dubito.posteriors import Posterior
from dubito.posteriors.posterior import inputs_of
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors import tree
from dubito.tensors.randomness import forked, lent

SCORES = ("total", "aleatoric", "epistemic", "spread", "noise", "one_minus_max")  # by which errors are looked for
MEANINGS = {
    "miou": "mean intersection over union of the classes that occur",
    "accuracy": "share of pixels that are right",
    "class_accuracy": "the same for each class, averaged",
    "rmse": "root mean squared error, in the target's units",
    "nll": "negative log likelihood of a pixel; lower is better",
    "ece": "gap between confidence and accuracy; 0 is calibrated",
    "quantile_error": "gap between levels and shares below quantiles; 0 is calibrated",
    "total": "mean uncertainty, in nats for classes, a variance for numbers",
    "aleatoric": "of which noise",
    "epistemic": "of which ignorance",
    "spread": "variance of the network's outputs over the posterior",
    "noise": "variance that the network predicts for its own outputs",
}


@dataclass(frozen=True)
class Assessment:
    """What came out. `print` shows it; `values` holds the numbers by name, `detectors` the curves by score.

    `confusion` and `reliability` are of classes, `quantiles` of numbers, and None otherwise.
    """

    values: Mapping[str, float]
    n: int  # pixels that have a target
    detectors: Mapping[str, Detector] = field(repr=False)
    confusion: Confusion | None = field(repr=False, default=None)
    reliability: Reliability | None = field(repr=False, default=None)
    quantiles: QuantileCalibration | None = field(repr=False, default=None)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def data(self) -> dict[str, Any]:
        """The numbers in plain types, for JSON: what is not finite is None."""
        found = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        iou = None if self.confusion is None else [one if math.isfinite(one) else None for one in self.confusion.iou.tolist()]
        scores = {
            name: {key: value for key, value in _figures(one).items() if math.isfinite(value)}
            for name, one in self.detectors.items()
        }
        return {"n": self.n, "values": found, "iou": iou, "detectors": scores}

    def table(self, names: Sequence[str] | None = None) -> str:
        """Name, value and meaning, a line each; then how well each score finds errors, and, with `names`, the IoU of each class."""
        rows = [(name, f"{value:.4g}", MEANINGS.get(name, "")) for name, value in self.values.items()]
        for score, one in self.detectors.items():
            rows += [(f"{key} by {score}", f"{value:.4g}", "") for key, value in _figures(one).items()]
        if names is not None and self.confusion is not None:
            rows += [(f"IoU of {name}", f"{one:.4g}", "") for name, one in zip(names, self.confusion.iou.tolist(), strict=True)]
        left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"  {name:<{left}}  {value:>{right}}  {text}".rstrip() for name, value, text in rows]
        return "\n".join([f"{self.n:,} pixels", *lines])

    def __str__(self) -> str:
        return self.table()


class Tally:
    """Collects what is needed to judge dense predictions, batch by batch; of a pixel nothing is kept but counts.

    `scores` are the maps by which errors are looked for: total, aleatoric, epistemic, spread, noise, or one_minus_max.
    Confidence is counted in `bins` of equal width, as in `metrics.ece`, and numbers are judged by quantiles in steps of 1 %.

    >>> import dubito
    >>> found = Tally()
    >>> f = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]).reshape(1, 1, 1, 3, 2)
    >>> found.update(LatentMixture(dubito.Categorical(dim=1, ignore_index=9), f), torch.tensor([[[0, 0, 9]]]))
    >>> print(found.compute())
    2 pixels
      miou                        0.25  mean intersection over union of the classes that occur
      ...
    """

    def __init__(self, *, scores: Sequence[str] = ("total", "aleatoric", "epistemic"), bins: int = 15, memory: float = 1.0):
        unknown = [scores] if isinstance(scores, str) else [name for name in scores if name not in SCORES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no list of scores: give some of {', '.join(SCORES)}")
        if bins < 1:
            raise ValueError(f"there is at least one bin; got bins={bins}")
        self.scores, self.bins, self.memory = tuple(scores), bins, memory
        self.discrete: bool | None = None
        self.n = 0
        self.confusion: Confusion | None = None
        self.detectors = {name: Detector() for name in self.scores}
        self._sums: dict[str, Tensor | float] = {}
        self._width = 1

    @torch.no_grad()
    def update(self, p: Predictive, y: Tensor) -> None:
        """Take in a batch: its predictive and its targets, as the likelihood knows them."""
        if isinstance(p.likelihood, MultiTask):
            raise ValueError(f"a tally is of one task: give p.task(name), one of {list(p.likelihood.tasks)}, and its targets")
        y = tree.tensors(y).to(p.f_mean.device)
        p.likelihood.check(p.f_mean, y)
        target = p.likelihood.target(y, p.f_mean)
        if self.discrete is None:
            self.discrete, self._width = p.likelihood.discrete, p.likelihood.width(p.f_mean)
        elif (self.discrete, self._width) != (p.likelihood.discrete, p.likelihood.width(p.f_mean)):
            raise ValueError("the batches are of different tasks: tally them apart")
        labels = target if isinstance(p.likelihood, Classes) else target.squeeze(-1).long() if self.discrete else target
        keep = p.likelihood.observed(target)
        truth = labels.flatten(0, p.f_mean.ndim - 2) if keep is None else labels[keep]
        if not len(truth):
            return
        if not isinstance(p, LatentMixture):
            self._add(nll=-p.log_prob(y).double().sum())
        parts = []
        for piece, at in pieces(p, self.memory, keep):
            self._score(piece, truth[at])
            parts.append(piece.maps)
        self._take(Maps.joined(parts), truth)
        self.n += len(truth)

    def _score(self, piece: Piece, truth: Tensor) -> None:
        """Take in what needs the draws: log scores, and, of numbers, where targets lie in their distributions."""
        if not isinstance(piece.p, LatentMixture):
            return
        if not self.discrete:
            self._add(nll=-piece.p.log_prob(truth).double().sum())
            values = piece.p.cdf(truth).clamp(0, 1).flatten().double()
            cuts = torch.tensor(LEVELS, dtype=torch.float64, device=values.device)
            self._add(below=torch.bincount(torch.bucketize(values, cuts), minlength=len(cuts) + 1)[:-1].cumsum(0).double())
            return
        true = piece.maps.mean.gather(-1, truth.unsqueeze(-1))
        if bool((true < 1e4 * torch.finfo(true.dtype).tiny).any()):  # only logs are left of such a probability
            given = truth.unsqueeze(-1).to(true.dtype) if isinstance(piece.p.likelihood, Bernoulli) else truth
            self._add(nll=-piece.p.log_prob(given).double().sum())
        else:
            self._add(nll=-true.log().double().sum())

    def _take(self, found: Maps, truth: Tensor) -> None:
        """Take in maps of positions in a row, [n]."""
        losses = self._classes(found, truth) if self.discrete else (found.mean - truth).double().square()
        if not self.discrete:
            self._add(squares=losses.sum())
            losses = losses.sum(-1)
        for name in ("total", "aleatoric", "epistemic", "spread", "noise"):
            if (values := getattr(found, name)) is not None:
                self._add(**{name: values.double().sum()})
        for name, detector in self.detectors.items():
            if name == "one_minus_max":
                if not self.discrete:
                    raise ValueError("one_minus_max is a score of classes; numbers have total, aleatoric and epistemic variances")
                top = found.mean.argmax(-1, keepdim=True)
                beside = found.mean.scatter(-1, top, 0.0).sum(-1)  # all but the largest: 1 - max without its rounding
                detector.add(beside, losses)
            elif (score := getattr(found, name)) is not None:
                detector.add(score.clamp_min(0), losses)
            else:
                raise ValueError("this likelihood predicts no noise of its own, so 'noise' is no score of it: leave it out")

    def _classes(self, found: Maps, truth: Tensor) -> Tensor:
        """Take in classes; which of them are wrong, [n]."""
        confidence, top = found.mean.max(-1)
        counts = Confusion.of(top, truth, classes=found.mean.shape[-1])
        self.confusion = counts if self.confusion is None else self.confusion + counts
        # bins (a, b], as those of `metrics.ece`
        edges = torch.arange(1, self.bins, dtype=confidence.dtype, device=confidence.device) / self.bins
        which, right = torch.bucketize(confidence, edges), (top == truth) & ~confidence.isnan()
        self._add(
            count=torch.bincount(which, minlength=self.bins).double(),
            confidence=torch.bincount(which, confidence.double(), minlength=self.bins),
            right=torch.bincount(which, right.double(), minlength=self.bins),
        )
        return ~right

    def _add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value  # tensors stay on their device: nobody waits for them

    def compute(self) -> Assessment:
        """The assessment of all batches so far."""
        if self.discrete is None or not self.n:
            raise ValueError("there is nothing to judge: no batch, or none with a labelled pixel")
        sums = {name: value.double().cpu() if isinstance(value, Tensor) else value for name, value in self._sums.items()}
        means = {
            name: float(sums[name]) / self.n
            for name in ("nll", "total", "aleatoric", "epistemic", "spread", "noise")
            if name in sums
        }
        if not self.discrete:
            quantiles = None
            values = {"rmse": math.sqrt(float(sums["squares"]) / (self.n * self._width)), **means}
            if "below" in sums:
                observed = torch.as_tensor(sums["below"]) / (self.n * self._width)
                quantiles = QuantileCalibration(torch.tensor(LEVELS, dtype=torch.float64), observed, self.n * self._width)
                values["quantile_error"] = float(quantiles.error)
            return Assessment(_ordered(values), self.n, self.detectors, quantiles=quantiles)
        assert self.confusion is not None
        confusion, count = self.confusion.cpu(), torch.as_tensor(sums["count"])
        accuracy = torch.as_tensor(sums["right"]) / count
        edges = torch.arange(self.bins + 1, dtype=torch.float64) / self.bins
        reliability = Reliability(edges, count, torch.as_tensor(sums["confidence"]) / count, accuracy, *wilson(accuracy, count))
        values = {"miou": confusion.miou, "accuracy": confusion.accuracy, "class_accuracy": confusion.class_accuracy}
        if bool(
            torch.as_tensor(sums["confidence"]).isnan().any()
        ):  # as the other figures are: predictions that are NaN have no class
            values = dict.fromkeys(values, math.nan)
        values |= {"ece": float(reliability.ece), **means}
        return Assessment(_ordered(values), self.n, self.detectors, confusion, reliability)


def assess(
    posterior: Posterior | Callable[[Any], Predictive],
    data: Any,
    *,
    task: str | None = None,
    scores: Sequence[str] = ("total", "aleatoric", "epistemic"),
    how: str | None = None,
    draws: int | None = None,
    memory: float = 1.0,
    seed: int = 0,
    bins: int = 15,
    progress: bool | None = None,
) -> Assessment:
    """How good a posterior's dense predictions are, and its uncertainties, on data whose targets are known.

    `data` is a tuple (x, y), a Dataset, a DataLoader or any iterable of batches. Images are taken a few at a time, as `memory` allows,
    and pixels without a target (`ignore_index`, or NaN with `missing=True`) are left out. With `MultiTask` one `task` is judged, and y
    is a dict, or the targets of that task.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Conv2d(3, 4, 1), dubito.Categorical(dim=1, ignore_index=255))
    >>> x, y = torch.rand(6, 3, 5, 7), torch.randint(4, (6, 5, 7))
    >>> found = assess(dubito.fit(model, dubito.MAP(epochs=1), (x, y)), (x, y))
    >>> found.n, sorted(found.detectors), found.confusion.counts.shape
    (210, ['aleatoric', 'epistemic', 'total'], torch.Size([4, 4]))
    """
    tally, model = Tally(scores=scores, bins=bins, memory=memory), posterior.model if isinstance(posterior, Posterior) else None
    kind = torch.get_default_dtype() if model is None else next(model.network.parameters()).dtype
    loader, portions = _batches(data, kind), Portions(memory)
    total = len(loader) if hasattr(loader, "__len__") else 0  # pyright: ignore[reportArgumentType]
    with Progress("Assessing", total, show=progress if total else False) as bar, lent(loader), forked():
        for i, batch in enumerate(loader):
            x, y = split_batch(batch) if model is None else inputs_of(model, batch)
            if y is None:
                raise ValueError("the batches hold inputs only: judging needs the targets as well")
            y, done = y[task] if isinstance(y, dict) and task is not None else y, 0
            for p in predictives(posterior, x, portions, task=task, how=how, draws=draws, seed=seed):
                n = p.f_mean.shape[0]
                tally.update(p, y[done : done + n])
                done += n
            bar.update(i + 1, {"pixels": tally.n})
    return tally.compute()


def _batches(data: Any, kind: torch.dtype) -> Iterable[Any]:
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple):
        x, y = tree.tensors(data[0], kind), tree.tensors(data[1], kind)
        counts = {leaf.shape[0] for leaf in [*tree.leaves(x), *tree.leaves(y)]}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"inputs and targets must have the same, positive number of rows; got {sorted(counts)}")
        return Arrays(x, y, 32, shuffle=False)
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=32)
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise TypeError(f"data is a tuple (x, y), a Dataset, a DataLoader or batches; got a {type(data).__name__}")
    return data


def _figures(one: Detector) -> dict[str, float]:
    """Average precision and AUROC of errors, where they are that, and the mean risk over all coverages."""
    found = one.ranking
    wrong = float(found.losses.sum())
    if bool((found.losses > found.size).any()) or bool((found.losses % 1 != 0).any()):
        return {"aurc": one.aurc}
    if not 0 < wrong < float(found.size.sum()):
        return {"aurc": one.aurc}
    return {"average_precision": one.average_precision, "auroc": one.auroc, "aurc": one.aurc}


def _ordered(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in MEANINGS if name in values}
