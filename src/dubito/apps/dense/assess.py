"""How good dense predictions and their uncertainties are, in one pass over data: pixels are counted, not stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.apps.dense.maps import Maps, Piece, Portions, pieces, predictives
from dubito.evaluation.judge import finite
from dubito.evaluation.judge.judgement import MEANINGS as USUAL
from dubito.evaluation.judge.judgement import rows, score_text
from dubito.evaluation.judge.scorers import Means, QuantileCounts
from dubito.evaluation.judge.stream import Predictor, check_names, for_each_batch, model_of, predictor
from dubito.evaluation.metrics import QuantileCalibration, Reliability
from dubito.evaluation.metrics.decisions import Ranking
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors import tree
from dubito.tensors.checks import at_least, require


@dataclass(frozen=True)
class Confusion:
    r"""Counts of pixels by true and predicted class; those of two batches add up.

    .. math:: \mathrm{IoU}_c = \frac{n_{cc}}{\sum_d n_{cd} + \sum_d n_{dc} - n_{cc}}

    `miou` is the mean over classes that occur, in the truth or in the prediction; the others are nan in `iou`.

    >>> found = Confusion.of(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 0]]), classes=3)
    >>> found.iou, found.miou, found.accuracy
    (tensor([0.5000, 0.5000,    nan], dtype=torch.float64), 0.5, 0.66...)
    """

    counts: Tensor  # [C, C] int64, truth by prediction

    @staticmethod
    def of(prediction: Tensor, y: Tensor, *, classes: int, ignore_index: int | None = None) -> Confusion:
        """From predicted and true classes of the same shape; positions whose truth is `ignore_index` are left out."""
        same = prediction.shape == y.shape
        require(same, f"predictions {list(prediction.shape)} and labels {list(y.shape)} must have the same shape")
        prediction, y = prediction.flatten(), y.flatten().to(prediction.device)
        if ignore_index is not None:
            prediction, y = prediction[y != ignore_index], y[y != ignore_index]
        for name, values in (("predictions", prediction), ("labels", y)):
            if values.numel() and (int(values.min()) < 0 or int(values.max()) >= classes):
                span = f"from 0 to {classes - 1}, or ignore_index; got {int(values.min())} to {int(values.max())}"
                raise ValueError(f"{name} must be {span}")
        return Confusion(torch.bincount(classes * y.long() + prediction.long(), minlength=classes**2).reshape(classes, classes))

    def __add__(self, other: Confusion) -> Confusion:
        return Confusion(self.counts + other.counts)

    def cpu(self) -> Confusion:
        """The same counts on the CPU."""
        return Confusion(self.counts.cpu())

    @property
    def n(self) -> int:
        """All pixels that were counted."""
        return int(self.counts.sum())

    @property
    def iou(self) -> Tensor:
        """Intersection over union of every class, [C] in float64."""
        hit = self.counts.diagonal().double()
        return hit / (self.counts.sum(0) + self.counts.sum(1) - hit)

    @property
    def recall(self) -> Tensor:
        """The share of every class's pixels that are found, [C] in float64; nan for classes that are not there."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    @property
    def miou(self) -> float:
        """The mean of `iou` over the classes that occur."""
        return float(self.iou.nanmean())

    @property
    def accuracy(self) -> float:
        """The share of all pixels that are right."""
        return float(self.counts.diagonal().sum().double() / self.counts.sum())

    @property
    def class_accuracy(self) -> float:
        """The mean recall of the classes that are there: a rare one counts as much as the road."""
        return float(self.recall.nanmean())


SHIFT = 12  # of a float32's 23 binary digits that are dropped: eleven are left
BINS = 2 ** (31 - SHIFT)  # every exponent, with those digits


class Detector:
    r"""How well a score of uncertainty, larger is less certain, tells errors from what is right.

    A score is rounded down to eleven binary digits (by less than 0.05 %), and counted there, whatever its size: memory is bounded and
    batches can be added. `precision_recall` takes errors as what is to be found: of the pixels with the largest scores, how many are
    wrong, and how many of all wrong ones are among them. `kept` is the curve of Kendall & Gal (2017): how wrong the most certain pixels
    are, for every share of them. With numbers the loss is the squared error, and only `kept` and `aurc` are for those.

    >>> found = Detector()
    >>> found.add(torch.tensor([0.1, 0.4, 0.5, 2.0]), torch.tensor([False, True, False, True]))
    >>> precision, recall = found.precision_recall()
    >>> precision.tolist(), recall.tolist()
    ([1.0, 0.5, 0.66..., 0.5], [0.5, 0.5, 1.0, 1.0])
    >>> round(found.average_precision, 4), found.auroc
    (0.8333, 0.75)
    """

    def __init__(self) -> None:
        self._size, self._losses = torch.zeros(BINS, dtype=torch.long), torch.zeros(BINS, dtype=torch.float64)

    def add(self, score: Tensor, loss: Tensor) -> None:
        """Count scores, at least 0, and whether each is an error, or its loss."""
        score, loss = score.detach().float().flatten(), loss.detach().flatten().to(score.device, torch.float64)
        require(score.shape == loss.shape, f"there are {len(score)} scores for {len(loss)} errors: give one for each")
        require((score >= 0).all(), "scores of uncertainty must be at least 0; these hold NaN or negative numbers")
        # the bits of numbers that are not negative are ordered as the numbers are; adding 0 makes a plus of the sign of -0
        which = (score + 0.0).view(torch.int32) >> SHIFT
        size, losses = torch.bincount(which, minlength=BINS), torch.bincount(which, loss, minlength=BINS)
        self._size, self._losses = self._size.to(size.device) + size, self._losses.to(size.device) + losses

    @property
    def ranking(self) -> Ranking:
        """The scores that occur, ascending, with counts and losses."""
        some = self._size.nonzero().squeeze(1)
        require(len(some), "nothing has been counted: add scores first")
        values = (some.to(torch.int32) << SHIFT).view(torch.float32)
        return Ranking(*(leaf.cpu() for leaf in (values, self._size[some], self._losses[some])))

    @property
    def n(self) -> int:
        """How many pixels were counted."""
        return int(self._size.sum())

    def precision_recall(self) -> tuple[Tensor, Tensor]:
        """(precision, recall), each [G] in float64: of all pixels above a score, from the most uncertain down."""
        ranking = self._errors()
        wrong, shown = ranking.losses.flip(0).cumsum(0), ranking.size.flip(0).cumsum(0)
        return wrong / shown, wrong / wrong[-1]

    @property
    def average_precision(self) -> float:
        """Area under the precision-recall curve of the errors."""
        return float(self._errors().average_precision())

    @property
    def auroc(self) -> float:
        """The chance that an error has a larger score than a pixel that is right."""
        return float(self._errors().auroc())

    @property
    def figures(self) -> dict[str, float]:
        """`aurc`, and `average_precision` and `auroc` if the losses are 0 or 1 and both occur."""
        ranking = self.ranking
        if not _are_errors(ranking) or not 0 < float(ranking.losses.sum()) < float(ranking.size.sum()):
            return {"aurc": self.aurc}
        return {"average_precision": self.average_precision, "auroc": self.auroc, "aurc": self.aurc}

    def _errors(self) -> Ranking:
        ranking = self.ranking
        require(_are_errors(ranking), "precision and recall are of errors that are 0 or 1: for other losses use kept() or aurc")
        require(float(ranking.losses.sum()), "no pixel is wrong: precision and recall need some errors")
        return ranking

    def kept(self) -> tuple[Tensor, Tensor]:
        """(coverage, risk), each [G] in float64: the mean loss of all pixels up to a score, from the most certain up."""
        ranking = self.ranking
        size = ranking.size.cumsum(0).double()
        return size / size[-1], ranking.losses.cumsum(0) / size

    @property
    def aurc(self) -> float:
        r"""The mean risk over all coverages, :math:`\frac1n \sum_k r_k`, tied scores in random order, in expectation.

        In a group of m pixels with the mean loss e, after a others with the losses L, the risks are :math:`(L + j e) / (a + j)`,
        whose sum over j is :math:`m e + (L - a e) (\psi(a + m + 1) - \psi(a + 1))`.
        """
        ranking = self.ranking
        size, losses = ranking.size.double(), ranking.losses
        before, lost, each = size.cumsum(0) - size, losses.cumsum(0) - losses, losses / size
        steps = torch.special.digamma(before + size + 1) - torch.special.digamma(before + 1)
        return float((losses + (lost - before * each) * steps).sum() / size.sum())


def _are_errors(ranking: Ranking) -> bool:
    """Whether the losses can be sums of zeros and ones."""
    return not bool((ranking.losses > ranking.size).any() or (ranking.losses % 1 != 0).any())


SCORES = ("total", "aleatoric", "epistemic", "spread", "noise", "one_minus_max")  # by which errors are looked for
MEANINGS = {
    "miou": "mean intersection over union of the classes that occur",
    "accuracy": "share of pixels that are right",
    "class_accuracy": "the same for each class, averaged",
    "rmse": USUAL["rmse"],
    "nll": "negative log likelihood of a pixel; lower is better",
    "ece": USUAL["ece"],
    "quantile_error": USUAL["quantile_error"],
    "total": USUAL["total"],
    "aleatoric": USUAL["aleatoric"],
    "epistemic": USUAL["epistemic"],
    "spread": "variance of the network's outputs over the posterior",
    "noise": "variance that the network predicts for its own outputs",
}


@dataclass(frozen=True)
class Assessment:
    """The result of `assess`. `print` shows it; `values` holds the numbers by name, `detectors` the curves by score.

    `standard_errors` are those of values that are means, with images as the independent examples: pixels of one image are not
    independent. `confusion` and `reliability` are of classes, `quantiles` of numbers, and None otherwise.
    """

    values: Mapping[str, float]
    n: int  # pixels that have a target
    detectors: Mapping[str, Detector] = field(repr=False)
    confusion: Confusion | None = field(repr=False, default=None)
    reliability: Reliability | None = field(repr=False, default=None)
    quantiles: QuantileCalibration | None = field(repr=False, default=None)
    standard_errors: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def data(self) -> dict[str, Any]:
        """The numbers in plain types, for JSON: None where a number is not finite."""
        iou = None if self.confusion is None else [one if math.isfinite(one) else None for one in self.confusion.iou.tolist()]
        detectors = {
            name: {key: value for key, value in detector.figures.items() if math.isfinite(value)}
            for name, detector in self.detectors.items()
        }
        errors = finite(self.standard_errors)
        return {"n": self.n, "values": finite(self.values), "standard_errors": errors, "iou": iou, "detectors": detectors}

    def table(self, names: Sequence[str] | None = None) -> str:
        """Name, value and meaning, a line each; then how well each score finds errors, and, with `names`, the IoU of each class."""
        more = {
            f"{key} by {score}": value for score, detector in self.detectors.items() for key, value in detector.figures.items()
        }
        if names is not None and self.confusion is not None:
            more |= {f"IoU of {name}": iou for name, iou in zip(names, self.confusion.iou.tolist(), strict=True)}
        return score_text(f"{self.n:,} pixels", rows({**self.values, **more}, self.standard_errors, MEANINGS))

    def __str__(self) -> str:
        return self.table()


class Tally:
    """Collects what is needed to judge dense predictions, batch by batch; of a pixel nothing is kept but counts.

    `scores` are the maps by which errors are looked for: total, aleatoric, epistemic, spread, noise, or one_minus_max.
    Confidence is counted in `bins` of equal width, as in `metrics.ece`, and numbers are judged by quantiles in steps of 1 %.

    >>> import dubito
    >>> tally = Tally()
    >>> f = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]).reshape(1, 1, 1, 3, 2)
    >>> tally.update(LatentMixture(dubito.Categorical(dim=1, ignore_index=9), f), torch.tensor([[[0, 0, 9]]]))
    >>> print(tally.compute())
    2 pixels
      miou                        0.25  mean intersection over union of the classes that occur
      ...
    """

    def __init__(self, *, scores: Sequence[str] = ("total", "aleatoric", "epistemic"), bins: int = 15, memory: float = 1.0):
        check_names(SCORES, scores=scores)
        at_least(1, bins=bins)
        self.scores, self.bins, self.memory = tuple(scores), bins, memory
        self.n = 0
        self.detectors = {name: Detector() for name in self.scores}
        self._task: tuple[bool, int] | None = None  # whether there are classes, and the number of outputs
        self._confusion: Confusion | None = None
        self._bins: Tensor | None = None  # [3, bins]: count, summed confidence and successes in each bin of confidence
        self._means, self._quantiles = Means(), QuantileCounts()

    @torch.no_grad()
    def update(self, p: Predictive, y: Tensor) -> None:
        """Take in a batch: its predictive and its targets, as the likelihood knows them."""
        likelihood = p.likelihood
        names = list(likelihood.task_names)
        require(not names, f"a tally is of one task: give p.task(name), one of {names}, and its targets")
        y = tree.tensors(y).to(p.f_mean.device)
        likelihood.check(p.f_mean, y)
        target = likelihood.target(y, p.f_mean)
        task = (likelihood.discrete, likelihood.width(p.f_mean))
        require(self._task in (None, task), "the batches are of different tasks: tally them apart")
        self._task = task
        labels = target if likelihood.indexed or not likelihood.discrete else target.squeeze(-1).long()
        keep = likelihood.observed(target)
        truth = labels.flatten(0, p.f_mean.ndim - 2) if keep is None else labels[keep]
        if not len(truth):
            return
        parts, log_probs = [], []
        for piece, place in pieces(p, self.memory, keep):
            parts.append(piece.maps)
            log_probs += self._score(piece, truth[place])
        self._add(Maps.joined(parts), truth, p, y, keep, log_probs)
        self.n += len(truth)

    def _score(self, piece: Piece, truth: Tensor) -> list[Tensor]:
        """The log scores of a piece, [n], where it has draws; the PIT values of numbers are counted."""
        if not isinstance(piece.p, LatentMixture):
            return []
        if not piece.maps.discrete:
            self._quantiles.add(piece.p.cdf(truth).clamp(0, 1))
            return [piece.p.log_prob(truth)]
        true = piece.maps.mean.gather(-1, truth.unsqueeze(-1))
        if bool((true < 1e4 * torch.finfo(true.dtype).tiny).any()):  # only the logarithm of such a probability is a float
            return [piece.p.log_prob(truth if piece.p.likelihood.indexed else truth.unsqueeze(-1).to(true.dtype))]
        return [true.log().squeeze(-1)]

    def _add(self, maps: Maps, truth: Tensor, p: Predictive, y: Tensor, keep: Tensor | None, log_probs: list[Tensor]) -> None:
        """Take in maps of the positions that have a target, in a row: [n]."""
        losses = self._classes(maps, truth) if maps.discrete else (maps.mean - truth).double().square()
        values = {name: getattr(maps, name) for name in ("total", "aleatoric", "epistemic", "spread")}
        values["accuracy" if maps.discrete else "squares"] = (~losses).double() if maps.discrete else losses.mean(-1)
        if maps.noise is not None:
            values["noise"] = maps.noise
        if log_probs:
            values["nll"] = -torch.cat(log_probs)
        everywhere = torch.ones(p.f_mean.shape[:-1], dtype=torch.bool, device=truth.device) if keep is None else keep
        self._means.add(everywhere, values, None if log_probs else {"nll": -p.log_prob(y)})
        for name, detector in self.detectors.items():
            detector.add(_uncertainty(maps, name), losses if maps.discrete else losses.sum(-1))

    def _classes(self, maps: Maps, truth: Tensor) -> Tensor:
        """Take in classes; which of them are wrong, [n]."""
        confidence, top = maps.mean.max(-1)
        counts = Confusion.of(top, truth, classes=maps.mean.shape[-1])
        self._confusion = counts if self._confusion is None else self._confusion + counts
        # bins (a, b], as those of `metrics.ece`
        edges = torch.arange(1, self.bins, dtype=confidence.dtype, device=confidence.device) / self.bins
        which, right = torch.bucketize(confidence, edges), (top == truth) & ~confidence.isnan()
        weights = (torch.ones_like(confidence), confidence, right)
        bins = torch.stack([torch.bincount(which, weight.double(), minlength=self.bins) for weight in weights])
        self._bins = bins if self._bins is None else self._bins + bins
        return ~right

    def compute(self) -> Assessment:
        """The assessment of all batches so far."""
        require(self.n, "there is nothing to judge: no batch, or none with a labelled pixel")
        values, errors = self._means.values(), self._means.standard_errors()
        if self._confusion is None or self._bins is None:
            return self._numbers(values, errors)
        confusion, (count, confidence, right) = self._confusion.cpu(), self._bins.cpu()
        edges = torch.arange(self.bins + 1, dtype=torch.float64) / self.bins
        reliability = Reliability.from_sums(edges, count, confidence, right)
        hits = {"miou": confusion.miou, "accuracy": confusion.accuracy, "class_accuracy": confusion.class_accuracy}
        if bool(confidence.isnan().any()):  # as the other figures are: predictions that are NaN have no class
            hits = dict.fromkeys(hits, math.nan)
        values |= {**hits, "ece": float(reliability.ece)}
        return Assessment(_ordered(values), self.n, self.detectors, confusion, reliability, standard_errors=_ordered(errors))

    def _numbers(self, values: dict[str, float], errors: dict[str, float]) -> Assessment:
        rmse = math.sqrt(values["squares"])
        values["rmse"], errors["rmse"] = rmse, errors["squares"] / (2 * rmse) if rmse else math.nan  # by the delta method
        quantiles = self._quantiles.calibration if self._quantiles.n else None
        if quantiles is not None:
            values["quantile_error"] = float(quantiles.error)
        return Assessment(_ordered(values), self.n, self.detectors, quantiles=quantiles, standard_errors=_ordered(errors))


def assess(
    posterior: Posterior | Predictor,
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
    tally, portions = Tally(scores=scores, bins=bins, memory=memory), Portions(memory)
    predict, model = predictor(posterior, how=how, draws=draws, memory=memory, seed=seed), model_of(posterior)

    def take(x: Any, y: Any) -> int:
        """Assess a batch; returns the pixels so far."""
        y, done = y[task] if isinstance(y, dict) and task is not None else y, 0
        for p in predictives(predict, model, x, portions, task=task):
            n = p.f_mean.shape[0]
            tally.update(p, y[done : done + n])
            done += n
        return tally.n

    for_each_batch(data, model, take, size=32, title="Assessing", unit="pixels", progress=progress)
    return tally.compute()


def _uncertainty(maps: Maps, name: str) -> Tensor:
    """The score by which errors are looked for, [n]."""
    if name == "one_minus_max":
        require(maps.discrete, "one_minus_max is a score of classes; numbers have total, aleatoric and epistemic variances")
        return maps.mean.scatter(-1, maps.mean.argmax(-1, keepdim=True), 0.0).sum(-1)  # 1 - max without its rounding
    values = getattr(maps, name)
    require(values is not None, "this likelihood predicts no noise of its own, so 'noise' is no score of it: leave it out")
    return values.clamp_min(0)


def _ordered(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in MEANINGS if name in values}
