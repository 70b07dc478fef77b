"""Classes that have an order, such as grades."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.model.likelihoods.categorical import Classes
from dubito.model.likelihoods.likelihood import PREFIX, DiagonalFisher
from dubito.tensors.checks import at_least
from dubito.tensors.tree import Params

CUTS = PREFIX + "cuts"


@dataclass(frozen=True)
class Ordinal(DiagonalFisher, Classes):
    r"""One of K classes that have an order, such as grades: the network gives one number f, larger for higher classes.

    .. math:: P(y \le k \mid f) = \sigma(c_k - f), \qquad c_0 < c_1 < \dots < c_{K - 2}

    Targets are integers from 0 to K - 1. The cutpoints are learned along with the weights as `likelihood:cuts`: the first one, and
    the logs of the gaps between them. Their prior is a uniform distribution over the class probabilities at f = 0.

    >>> ordinal = Ordinal(3)
    >>> ordinal.mean(torch.zeros(1, 1), ordinal.parameters())
    tensor([[0.3333, 0.3333, 0.3333]])
    """

    classes: int = 2

    def __post_init__(self):
        at_least(2, classes=self.classes)

    def width(self, f: Tensor) -> int:
        """The number of classes; the network has one output."""
        if f.shape[-1] != 1:
            raise ValueError(f"Ordinal needs a network with one output; this one has {f.shape[-1]} (for {self.classes} classes)")
        return self.classes

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:cuts`, at which f = 0 has the frequencies of the classes in y, of which one more of each is assumed."""
        counts = torch.ones(self.classes)
        if y is not None:
            inside = y[(y != self.ignore_index) & (y >= 0) & (y < self.classes)].flatten().long().cpu()
            counts = counts + torch.bincount(inside, minlength=self.classes)
        cuts = (counts.cumsum(0) / counts.sum())[:-1].logit()
        return {CUTS: torch.cat([cuts[:1], cuts.diff().log()])}

    def cuts(self, params: Params) -> tuple[Tensor, Tensor]:
        """The cutpoints [..., K - 1], and the gaps between them [..., K - 2]."""
        first, gaps = params[CUTS][..., :1], params[CUTS][..., 1:].exp()
        return torch.cat([first, first + gaps.cumsum(-1)], -1), gaps

    def log_prior(self, params: Params) -> Tensor:
        """The density of the cuts for which the class probabilities at f = 0 are uniform."""
        cuts, _ = self.cuts(params)
        slopes = (F.logsigmoid(cuts) + F.logsigmoid(-cuts)).sum()  # of probabilities in cutpoints
        return math.lgamma(self.classes) + slopes + params[CUTS][1:].sum()

    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        r"""With :math:`u = c_k - f` and :math:`l = c_{k-1} - f`: :math:`\ln \sigma(u) + \ln \sigma(-l) + \ln(1 - e^{l - u})`."""
        self.width(f)
        cuts, gaps = self.cuts(params)
        below, above, ends = F.logsigmoid(cuts - f), F.logsigmoid(f - cuts), torch.zeros_like(f)
        inner = torch.log(-torch.expm1(-gaps)).expand(*f.shape[:-1], gaps.shape[-1])
        return torch.cat([below, ends], -1) + torch.cat([ends, above], -1) + torch.cat([ends, inner, ends], -1)

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """sum_k p_k (d log p_k / df)^2."""
        cuts, _ = self.cuts(params)
        below, ends = torch.sigmoid(cuts - f), torch.zeros_like(f)
        slopes = torch.cat([ends, below], -1) + torch.cat([below, ends + 1], -1) - 1  # of log p_k
        return (self.log_probs(f, params).exp() * slopes**2).sum(-1, keepdim=True)
