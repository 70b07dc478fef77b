r"""How good predictions are, given the truth: `(Predictive, y) -> scalar`.

Dense outputs count every labelled position as an example; class targets equal to `ignore_index` are left out of
everything. `Bernoulli` counts each label on its own in `accuracy` and `ece`. Regression with several outputs averages
over them, except in `nll`, which scores all outputs of an example jointly.

`auroc`, `average_precision`, `risk_coverage` and `aurc` are for decisions made with a score of uncertainty: larger
scores should mean positives (errors, unfamiliar inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal

from dubito.likelihoods import Bernoulli, Classes, MultiTask
from dubito.predictive import LatentMixture, Predictive, StudentT

PAIRS = 2**22  # pairs of components that `crps` holds in memory at once


def accuracy(p: Predictive, y: Tensor) -> Tensor:
    r"""The share of examples whose most probable class is the true one (of labels that are right, with `Bernoulli`).

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> accuracy(p, torch.tensor([0, 1]))
    tensor(0.5000)
    """
    probs, label = _choices(p, y, "accuracy")
    return (probs.argmax(-1) == label).to(probs.dtype).mean()


def nll(p: Predictive, y: Tensor) -> Tensor:
    r"""Mean negative log predictive density, :math:`-\frac{1}{n} \sum_i \ln p(y_i \mid x_i, D)`, in nats.

    n counts examples; with dense outputs it counts the labelled positions (pixels, steps), each scored on its own.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]).log())
    >>> nll(p, torch.tensor([1, 0]))
    tensor(0.3466)
    """
    target = _target(p, y, "nll")
    count = _labelled(p, target).sum()
    return -p.log_prob(y.to(target.device)).sum() / count


def brier(p: Predictive, y: Tensor) -> Tensor:
    r"""Brier score, :math:`\frac{1}{n} \sum_i \sum_c (\bar p_{ic} - y_{ic})^2` with y one-hot: from 0 to 2.

    With `Bernoulli` y are the labels, and one label gives the binary score from 0 to 1.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]).log())
    >>> brier(p, torch.tensor([1, 0]))
    tensor(0.2500)
    """
    target = _target(p, y, "brier", classes=True)
    keep = _labelled(p, target)
    probs, truth = p.mean[keep], target[keep]  # [n, C] and [n] or, for labels, [n, C]
    if isinstance(p.likelihood, Classes):
        truth = F.one_hot(truth, probs.shape[-1])
    return ((probs - truth) ** 2).sum(-1).mean()


def ece(p: Predictive, y: Tensor, *, bins: int = 15) -> Tensor:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|`.

    Confidence is the probability of the top class. The bins have equal width and are (a, b]: one on an edge
    counts below it.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.75, 0.25]] * 4]).log())
    >>> ece(p, torch.tensor([0, 0, 1, 1]))
    tensor(0.2500)
    """
    probs, label = _choices(p, y, "ece")
    confidence, top = probs.max(-1)
    edges = torch.arange(1, bins, dtype=probs.dtype, device=probs.device) / bins  # inner ones: all above 1 - 1/bins is the last
    gap = (top == label).double() - confidence.double()
    sums = gap.new_zeros(bins).index_add(0, torch.bucketize(confidence, edges), gap)  # n_b (accuracy_b - confidence_b)
    return (sums.abs().sum() / label.numel()).to(probs.dtype) if label.numel() else probs.new_tensor(math.nan)


def rmse(p: Predictive, y: Tensor) -> Tensor:
    r"""Root mean squared error of the mean, over examples and outputs alike.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    >>> rmse(p, torch.tensor([3.0, 4.0]))
    tensor(3.5355)
    """
    return (p.mean - _target(p, y, "rmse", classes=False)).square().mean().sqrt()


def crps(p: Predictive, y: Tensor) -> Tensor:
    r"""Continuous ranked probability score, :math:`E|X - y| - \frac12 E|X - X'|`, the mean over examples and outputs.

    It is in the units of y and 0 at best; for a point it is the absolute error. Exact for a Student-t (see there), and for a
    mixture of Gaussians, from :math:`E|N(\mu, \sigma^2)| = 2 \sigma \varphi(\mu/\sigma) + \mu (2 \Phi(\mu/\sigma) - 1)` of each one and
    each pair.

    >>> from dubito import Gaussian
    >>> crps(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 1, 1)), torch.tensor([0.0]))
    tensor(0.2337)
    """
    y = _target(p, y, "crps", classes=False)
    if isinstance(p, StudentT):
        return p.crps(y).mean()
    if not isinstance(p, LatentMixture):
        raise ValueError(f"crps is exact for mixtures of Gaussians; a {type(p).__name__} is none")
    marginal, weights = p.marginals
    if not isinstance(marginal, Normal):
        raise ValueError(f"crps is exact for Gaussian noise; {type(p.likelihood).__name__} has another")
    mean, variance, weights = (
        marginal.mean.flatten(1),
        marginal.variance.flatten(1),
        weights.to(y),
    )  # [S, n], [S, n], [S]
    error = weights @ _mean_absolute(mean - y.flatten(), variance)  # [n]
    spread = torch.zeros_like(error)
    rows = max(1, PAIRS // mean.numel())  # of the S x S pairs as many at a time as keep memory bounded
    for m, v, w in zip(mean.split(rows), variance.split(rows), weights.split(rows), strict=True):
        pairs = _mean_absolute(m.unsqueeze(1) - mean, v.unsqueeze(1) + variance)  # [rows, S, n]
        spread = spread + torch.einsum("r,s,rsn->n", w, weights, pairs)
    return (error - 0.5 * spread).mean()


def coverage(p: Predictive, y: Tensor, *, level: float = 0.9) -> Tensor:
    r"""The share of targets inside the central interval of that level; calibrated if equal to the level.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    >>> coverage(p, torch.tensor([1.6, 1.7]))
    tensor(0.5000)
    """
    y = _target(p, y, "coverage", classes=False)
    lower, upper = p.interval(level)
    return ((lower <= y) & (y <= upper)).to(y.dtype).mean()


def width(p: Predictive, y: Tensor | None = None, *, level: float = 0.9) -> Tensor:
    r"""The mean width of the central interval of that level. y is not needed; it is there to call all metrics alike.

    >>> from dubito import Gaussian
    >>> width(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1)))
    tensor(3.2897)
    """
    _suits(p, "width", classes=False)
    lower, upper = p.interval(level)
    return (upper - lower).mean()


class Metric(NamedTuple):
    """A metric and what it is for."""

    function: Callable[..., Tensor]  # (Predictive, y) -> scalar
    classes: bool
    regression: bool


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy, classes=True, regression=False),
    "nll": Metric(nll, classes=True, regression=True),
    "brier": Metric(brier, classes=True, regression=False),
    "ece": Metric(ece, classes=True, regression=False),
    "rmse": Metric(rmse, classes=False, regression=True),
    "crps": Metric(crps, classes=False, regression=True),
    "coverage": Metric(coverage, classes=False, regression=True),
    "width": Metric(width, classes=False, regression=True),
}


def auroc(scores: Tensor, is_positive: Tensor) -> Tensor:
    r"""Area under the ROC curve, :math:`P(s_+ > s_-) + \frac12 P(s_+ = s_-)`; nan if there is only one kind.

    >>> auroc(torch.tensor([0.1, 0.4, 0.4, 9.0]), torch.tensor([False, False, True, True]))
    tensor(0.8750)
    """
    from torchmetrics.functional.classification import binary_auroc

    return _detection(binary_auroc, scores, is_positive)


def average_precision(scores: Tensor, is_positive: Tensor) -> Tensor:
    r"""Area under the precision-recall curve, :math:`\sum_k (R_k - R_{k-1}) P_k`; nan if there is only one kind.

    >>> average_precision(torch.tensor([0.1, 0.4, 0.6, 9.0]), torch.tensor([False, True, False, True]))
    tensor(0.8333)
    """
    from torchmetrics.functional.classification import binary_average_precision

    return _detection(binary_average_precision, scores, is_positive)


def risk_coverage(scores: Tensor | Predictive, errors: Tensor) -> tuple[Tensor, Tensor]:
    r"""The mean error of the k most certain examples, for every k: (coverage k/n, risk), each [n].

    `errors` are 0 and 1 or any loss. Scores that are tied are taken in random order, in expectation: each has the mean
    error of its group. A predictive instead of scores is ranked by 1 - max probability, a regression by its variance.

    >>> risk_coverage(torch.tensor([0.2, 0.1, 0.3, 0.3]), torch.tensor([0, 0, 1, 0]))
    (tensor([0.2500, 0.5000, 0.7500, 1.0000]), tensor([0.0000, 0.0000, 0.1667, 0.2500]))
    """
    scores = (_doubt(scores) if isinstance(scores, Predictive) else scores).detach().flatten()
    errors = errors.detach().flatten().to(scores.device, torch.float64)
    if scores.shape != errors.shape:
        raise ValueError(f"there are {scores.numel()} scores for {errors.numel()} errors: give one error for each score")
    _, rank, size = _ranks(scores)
    group = errors.new_zeros(size.numel()).index_add(0, rank, errors) / size  # mean error of each group of ties
    count = torch.arange(1, len(errors) + 1, device=errors.device)
    risk = group.repeat_interleave(size).cumsum(0) / count
    dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
    return (count / max(1, len(errors))).to(dtype), risk.to(dtype)


def aurc(scores: Tensor | Predictive, errors: Tensor) -> Tensor:
    r"""Area under the risk-coverage curve, :math:`\frac{1}{n} \sum_k \mathrm{risk}_k`: lower is better.

    >>> aurc(torch.tensor([0.2, 0.1, 0.3, 0.3]), torch.tensor([0, 0, 1, 0]))
    tensor(0.1042)
    """
    return risk_coverage(scores, errors)[1].mean()


def _suits(p: Predictive, name: str, *, classes: bool | None) -> None:
    kind = type(p.likelihood).__name__
    if isinstance(p.likelihood, MultiTask):
        raise ValueError(f"{name} is for one task at a time: use p.task(name), one of {list(p.likelihood.tasks)}")
    if classes is not None and p.likelihood.discrete != classes:
        fitting = [key for key, metric in METRICS.items() if (metric.regression if classes else metric.classes)]
        ours, theirs = ("classes", "numbers") if classes else ("regression", "classes")
        raise ValueError(f"{name} is for {ours}, and {kind} predicts {theirs}: use one of {', '.join(fitting)}")


def _target(p: Predictive, y: Tensor, name: str, *, classes: bool | None = None) -> Tensor:
    """The targets, checked, in the layout of p.mean: [B, *D] for classes, [B, *D, C] else."""
    _suits(p, name, classes=classes)
    f = p.f_mean
    y = y.to(f.device)
    p.likelihood.check(f, y)
    return p.likelihood.target(y, f)


def _labelled(p: Predictive, target: Tensor) -> Tensor:
    """Which positions count, [B, *D]."""
    if isinstance(p.likelihood, Classes):
        return target != p.likelihood.ignore_index
    return torch.ones(target.shape[:-1], dtype=torch.bool, device=target.device)


def _choices(p: Predictive, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities [n, K] and the true index [n] of every choice: among classes, or 0 or 1 for each label."""
    target = _target(p, y, name, classes=True)
    keep = _labelled(p, target)
    probs, label = p.mean[keep], target[keep].long()
    if isinstance(p.likelihood, Bernoulli):
        return torch.stack([1 - probs, probs], -1).flatten(0, 1), label.flatten()
    return probs, label


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, variance)."""
    scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    z = mean / scale
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 2 * scale * density + mean * torch.erf(z / math.sqrt(2))


def _ranks(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(distinct values, each score's place among them, how many scores have each value)."""
    if scores.isnan().any():
        raise ValueError("the scores hold NaN, which cannot be ranked")
    return torch.unique(scores, return_inverse=True, return_counts=True)


def _detection(function: Callable[..., Tensor], scores: Tensor, is_positive: Tensor) -> Tensor:
    scores, truth = scores.detach().flatten(), is_positive.detach().flatten().to(scores.device).bool()
    if scores.shape != truth.shape:
        raise ValueError(f"there are {scores.numel()} scores for {truth.numel()} truths: give one for each")
    dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
    values, rank, _ = _ranks(scores)
    if truth.all() or not truth.any():
        return torch.tensor(math.nan, dtype=dtype, device=scores.device)
    # ranks, since torchmetrics puts scores outside [0, 1] through a sigmoid, which ties the large ones
    return function(rank.double() / len(values), truth.long()).to(dtype)


def _doubt(p: Predictive) -> Tensor:
    """A default score of uncertainty, [B, *D]."""
    _suits(p, "risk_coverage", classes=None)
    if not p.likelihood.discrete:
        return p.uncertainty.total.sum(-1)
    if isinstance(p.likelihood, Bernoulli):
        return torch.minimum(p.mean, 1 - p.mean).sum(-1)
    top = p.mean.argmax(-1, keepdim=True)
    return p.mean.scatter(-1, top, 0.0).sum(-1)  # 1 - max, but without its rounding, which ties all confident inputs
