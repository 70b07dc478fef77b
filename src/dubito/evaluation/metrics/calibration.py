r"""How good class probabilities are: accuracy, proper scores, reliability by bins of confidence, and calibration errors.

Confidence is the probability of the top class. Bins are (a, b]: a confidence on an edge counts below it. They have equal width, or
equal mass: as many predictions in each, where ties allow, since equal confidences stay together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.metrics.reading import Array, choices, forecasts, judged, labelled, precise, targets, tensor
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import at_least, between, one_of

Binning = Literal["width", "mass"]


@dataclass(frozen=True)
class Reliability:
    """Predictions by their confidence, in float64; all but the edges are [bins], and nan in a bin without predictions."""

    edges: Tensor  # [bins + 1]
    count: Tensor
    confidence: Tensor  # mean in each bin
    accuracy: Tensor
    lower: Tensor  # Wilson interval of the accuracy
    upper: Tensor

    @property
    def ece(self) -> Tensor:
        """The gaps between confidence and accuracy, weighted by the counts; nan without predictions."""
        return (self.count * self._gaps).sum() / self.count.sum()

    @property
    def mce(self) -> Tensor:
        """The largest gap; nan without predictions."""
        return self._gaps.amax() if bool(self.count.sum()) else self.count.new_tensor(math.nan)

    @property
    def _gaps(self) -> Tensor:
        """0 in a bin without predictions; a confidence that is nan is no such bin."""
        return torch.where(self.count > 0, (self.accuracy - self.confidence).abs(), 0.0)

    def cpu(self) -> Reliability:
        """The same on the CPU."""
        parts = (self.edges, self.count, self.confidence, self.accuracy, self.lower, self.upper)
        return Reliability(*(part.cpu() for part in parts))

    @staticmethod
    def of(confidence: Tensor, correct: Tensor, *, bins: int = 15, by: Binning = "width", level: float = 0.9) -> Reliability:
        """From the confidence and the success of every prediction, each [n]."""
        edges = _edges(confidence, bins, by)
        which = torch.bucketize(confidence, edges[1:-1])
        zero = torch.zeros(len(edges) - 1, dtype=torch.float64, device=confidence.device)
        sums = (zero.index_add(0, which, one.double()) for one in (torch.ones_like(confidence), confidence, correct))
        return Reliability.from_sums(edges.double(), *sums, level=level)

    @staticmethod
    def from_sums(edges: Tensor, count: Tensor, confidence: Tensor, correct: Tensor, *, level: float = 0.9) -> Reliability:
        """From the number of predictions, the sum of their confidences and the number of successes in each bin."""
        accuracy = correct / count
        return Reliability(edges, count, confidence / count, accuracy, *wilson(accuracy, count, level=level))


def reliability(p: Predictive, y: Array, *, bins: int = 15, by: Binning = "width", level: float = 0.9) -> Reliability:
    r"""How often predictions of each confidence come true: edges, count, mean confidence, accuracy and its interval, bin by bin.

    `by="mass"` takes bins with as many predictions each. The interval of the accuracy is Wilson's, of that `level`.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.75, 0.25]] * 4]).log())
    >>> found = reliability(p, torch.tensor([0, 0, 1, 1]), bins=2)
    >>> found.count.tolist(), found.accuracy.tolist(), round(float(found.confidence[1]), 4)
    ([0.0, 4.0], [nan, 0.5], 0.75)
    """
    probs, label = choices(p, y, "reliability")
    return Reliability.of(*judged(probs, label), bins=bins, by=by, level=level)


def ece(p: Predictive, y: Array, *, bins: int = 15, by: Binning = "width") -> Tensor:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|`.

    Confidence is the probability of the top class. The bins are (a, b]: one on an edge counts below it. They have equal width, or,
    with `by="mass"`, as many predictions each (the adaptive calibration error), so that no bin is nearly empty.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.75, 0.25]] * 4]).log())
    >>> ece(p, torch.tensor([0, 0, 1, 1]))
    tensor(0.2500)
    """
    probs, label = choices(p, y, "ece")
    return Reliability.of(*judged(probs, label), bins=bins, by=by).ece.to(probs.dtype)


def mce(p: Predictive, y: Array, *, bins: int = 15, by: Binning = "width") -> Tensor:
    r"""Maximum calibration error, :math:`\max_b |\mathrm{accuracy}_b - \mathrm{confidence}_b|`, with the bins of `ece`.

    Bins with few predictions have large gaps by chance alone: with `by="mass"` there are none.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.75, 0.25]] * 4 + [[0.5, 0.5]] * 2]).log())
    >>> mce(p, torch.tensor([0, 0, 1, 1, 0, 1]))
    tensor(0.2500)
    """
    probs, label = choices(p, y, "mce")
    return Reliability.of(*judged(probs, label), bins=bins, by=by).mce.to(probs.dtype)


def classwise_ece(p: Predictive, y: Array, *, bins: int = 15, by: Binning = "width") -> Tensor:
    r"""The calibration error of every class's probability, averaged over the C classes (Kull et al. 2019).

    .. math:: \frac{1}{C} \sum_c \sum_b \frac{n_{bc}}{n} |\mathrm{frequency}_{bc} - \bar p_{bc}|

    Unlike `ece` it sees all probabilities, not only the largest. With `Bernoulli` the labels take the place of the classes.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.75, 0.25]] * 4]).log())
    >>> classwise_ece(p, torch.tensor([0, 0, 1, 1]))
    tensor(0.2500)
    """
    probs, truth = forecasts(p, y, "classwise_ece")
    return ClassBins.of(probs, truth, bins=bins, by=by).ece.to(probs.dtype)


class Decomposition(NamedTuple):
    """The Brier score in parts: score = reliability - resolution + uncertainty + within."""

    reliability: Tensor  # how far forecasts are from the frequencies that follow them: 0 if calibrated
    resolution: Tensor  # how far these frequencies are from the overall ones: the more the better
    uncertainty: Tensor  # what a forecast of the overall frequencies would score
    within: Tensor  # what bins hide, their variance of forecasts less twice the covariance with outcomes: 0 without bins

    @property
    def score(self) -> Tensor:
        """The Brier score itself."""
        return self.reliability - self.resolution + self.uncertainty + self.within


def brier_decomposition(p: Predictive, y: Array, *, bins: int | None = 15) -> Decomposition:
    r"""Murphy's parts of the Brier score, class by class and summed as the score is.

    .. math:: \underbrace{\frac{1}{n} \sum_{ic} (\bar p_{ic} - y_{ic})^2}_{\text{Brier}}
        = \underbrace{\sum_{bc} \tfrac{n_{bc}}{n} (\bar p_{bc} - \bar y_{bc})^2}_{\text{reliability}}
        - \underbrace{\sum_{bc} \tfrac{n_{bc}}{n} (\bar y_{bc} - \bar y_c)^2}_{\text{resolution}}
        + \underbrace{\sum_c \bar y_c (1 - \bar y_c)}_{\text{uncertainty}} + \text{within}

    b are bins of equal width of a class's probability; `within` is :math:`\sum_{bc} \frac{n_{bc}}{n} (\mathrm{Var}_{bc}[p] - 2
    \mathrm{Cov}_{bc}[p, y])`, with which the parts add up exactly (Stephenson et al. 2008). `bins=None` groups equal forecasts instead,
    where nothing is left within: for forecasts that take few values. If all of them differ, every one is a group of its own and
    reliability is just the score.

    >>> from dubito import Bernoulli
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Bernoulli(), torch.logit(torch.tensor([[[0.8]] * 5 + [[0.2]] * 5])))
    >>> parts = brier_decomposition(p, torch.tensor([1, 1, 1, 0, 0, 0, 0, 0, 0, 1]), bins=None)
    >>> [round(float(part), 4) for part in parts], round(float(parts.score), 4)
    ([0.02, 0.04, 0.24, 0.0], 0.22)
    """
    probs, truth = forecasts(p, y, "brier_decomposition")
    groups = _groups(probs, truth) if bins is None else ClassBins.of(probs, truth, bins=bins)
    return Decomposition(*(part.to(probs.dtype) for part in groups.decomposition))


@dataclass(frozen=True)
class ClassBins:
    """Sums over the forecasts in each bin of each class's probability, [C, bins] in float64: those of two batches add up."""

    n: int  # of forecasts of each class
    count: Tensor
    forecast: Tensor  # sum of p
    outcome: Tensor  # sum of y
    square: Tensor  # sum of p^2
    product: Tensor  # sum of p y

    @staticmethod
    def of(probs: Tensor, truth: Tensor, *, bins: int = 15, by: Binning = "width") -> ClassBins:
        """From probabilities [n, C] and the class [n] or the labels [n, C]."""
        if by == "width":
            which = torch.bucketize(probs, _edges(probs, bins, by)[1:-1])
        else:
            columns = [column.contiguous() for column in probs.unbind(-1)]
            which = torch.stack([torch.bucketize(c, _edges(c, bins, by)[1:-1]) for c in columns], -1)
        return ClassBins._sums(probs, truth, which, bins)

    @staticmethod
    def _sums(probs: Tensor, truth: Tensor, which: Tensor, bins: int) -> ClassBins:
        n, classes = probs.shape
        places, values = which + bins * torch.arange(classes, device=probs.device), probs.double()
        if truth.ndim == 1:  # one of the classes came true: of the others there is nothing to add
            true = (places.gather(-1, truth.unsqueeze(-1)), values.gather(-1, truth.unsqueeze(-1)))
        else:
            true = (places[truth.bool()], values[truth.bool()])

        def total(at: Tensor, weights: Tensor | None) -> Tensor:
            """Counts, or sums of weights, at each place: [C, bins]."""
            counts = torch.bincount(at.flatten(), None if weights is None else weights.flatten(), minlength=classes * bins)
            return counts.double().reshape(classes, bins)

        return ClassBins(
            n, total(places, None), total(places, values), total(true[0], None), total(places, values * values), total(*true)
        )

    def __add__(self, other: ClassBins) -> ClassBins:
        return ClassBins(
            self.n + other.n,
            self.count + other.count,
            self.forecast + other.forecast,
            self.outcome + other.outcome,
            self.square + other.square,
            self.product + other.product,
        )

    @property
    def ece(self) -> Tensor:
        """The classwise calibration error; nan without forecasts."""
        gaps = (self.forecast - self.outcome).abs().sum(-1).mean()
        return gaps / self.n if self.n else gaps.new_tensor(math.nan)

    @property
    def decomposition(self) -> Decomposition:
        """The parts of the Brier score; nan without forecasts."""
        some = self.count.clamp_min(1.0)
        forecast, outcome = self.forecast / some, self.outcome / some
        rate = self.outcome.sum(-1, keepdim=True) / self.n if self.n else torch.full_like(self.outcome[:, :1], math.nan)
        within = self.square - self.forecast * forecast - 2 * (self.product - self.forecast * outcome)
        n = max(1, self.n)
        return Decomposition(
            (self.count * (forecast - outcome) ** 2).sum() / n + 0 * rate.sum(),  # nan where there are none
            (self.count * (outcome - rate) ** 2).sum() / n,
            (rate * (1 - rate)).sum(),
            within.sum() / n,
        )


def wilson(share: Tensor, count: Tensor, *, level: float = 0.9) -> tuple[Tensor, Tensor]:
    r"""Wilson's interval of a probability from the share of `count` trials: right also for few trials and shares near 0 and 1.

    .. math:: \frac{s + z^2 / 2n \pm z \sqrt{s (1 - s) / n + z^2 / 4n^2}}{1 + z^2 / n}

    >>> wilson(torch.tensor(1.0), torch.tensor(10.0))
    (tensor(0.7871), tensor(1.))
    """
    between(0, 1, level=level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count**2)).sqrt()
    return (middle - half).clamp(0, 1), (middle + half).clamp(0, 1)


def _edges(confidence: Tensor, bins: int, by: Binning) -> Tensor:
    """[bins + 1]; of equal mass, the values at which sorted confidences are cut: fewer bins than asked for may hold any."""
    at_least(1, bins=bins)
    if by == "width":
        return torch.arange(bins + 1, dtype=confidence.dtype, device=confidence.device) / bins
    one_of(("width", "mass"), by=by)
    n = confidence.numel()
    ends = confidence.new_tensor([0.0, 1.0])
    if not n:
        return ends.repeat_interleave(torch.tensor([1, bins], device=ends.device))
    last = torch.tensor([-(-n * k // bins) - 1 for k in range(1, bins)], dtype=torch.long, device=confidence.device)
    return torch.cat([ends[:1], confidence.flatten().sort().values[last.clamp_min(0)], ends[1:]])


def _groups(probs: Tensor, truth: Tensor) -> ClassBins:
    """Every value that a class's probability takes as a bin of its own."""
    which = torch.stack([torch.unique(column, return_inverse=True)[1] for column in probs.unbind(-1)], -1)
    return ClassBins._sums(probs, truth, which, int(which.max()) + 1 if len(probs) else 1)


def accuracy(p: Predictive, y: Array) -> Tensor:
    r"""The share of examples whose most probable class is the true one (of labels that are right, with `Bernoulli`).

    nan if a prediction is, as other metrics are.

    >>> import torch
    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> accuracy(p, torch.tensor([0, 1]))
    tensor(0.5000)
    """
    probs, label = choices(p, y, "accuracy")
    confidence, right = judged(probs, label)
    return torch.where(confidence.isnan(), math.nan, right.to(probs.dtype)).mean()


def nll(p: Predictive, y: Array) -> Tensor:
    r"""Mean negative log predictive density, :math:`-\frac{1}{n} \sum_i \ln p(y_i \mid x_i, D)`, in nats.

    n counts examples; with dense outputs it counts the labelled positions (pixels, steps), each scored on its own.

    >>> import torch
    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]).log())
    >>> nll(p, torch.tensor([1, 0]))
    tensor(0.3466)
    """
    target = targets(p, y, "nll")
    count = labelled(p, target).sum()
    return -precise(p.log_prob(tensor(y).to(target.device))).sum() / count


def perplexity(p: Predictive, y: Array) -> Tensor:
    r"""The exponential of `nll`: among how many equally likely tokens a language model hesitates on average.

    >>> import torch
    >>> from dubito import NextToken
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(NextToken(), torch.zeros(1, 2, 3, 8))
    >>> perplexity(p, torch.zeros(2, 3, dtype=torch.long))
    tensor(8.)
    """
    return nll(p, y).exp()


def brier(p: Predictive, y: Array) -> Tensor:
    r"""Brier score, :math:`\frac{1}{n} \sum_i \sum_c (\bar p_{ic} - y_{ic})^2` with y one-hot: from 0 to 2.

    With `Bernoulli` y are the labels, and one label gives the binary score from 0 to 1.

    >>> import torch
    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]).log())
    >>> brier(p, torch.tensor([1, 0]))
    tensor(0.2500)
    """
    probs, truth = forecasts(p, y, "brier")
    if p.likelihood.indexed:
        truth = F.one_hot(truth, probs.shape[-1])
    return ((probs - truth) ** 2).sum(-1).mean()
