"""Accuracy and proper scores of class probabilities, and the log score of anything."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.metrics.reading import Array, choices, forecasts, judged, labelled, precise, targets, tensor
from dubito.posteriors.predictive import Predictive


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
