"""Weights that have one of two values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors.factorized import Factorized
from dubito.model.priors.prior import zero
from dubito.model.priors.scales import keep_positive
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Bernoulli(Factorized):
    r"""Every weight is the second of `values` with `probability`, and else the first: (0, 1), or (-1, 1) for signs.

    A discrete prior has no density, so no method that follows a gradient can use it: it says so, and `log_mass` scores weights that are
    discrete. With a `temperature` :math:`\lambda` it is the binary concrete relaxation (Maddison et al. 2017), with which discrete
    weights are trained: :math:`x = \sigma((\ln \alpha + \ln u - \ln(1 - u)) / \lambda)`, :math:`\alpha = p / (1 - p)`, with the density

    .. math:: p(x) = \frac{\lambda \alpha x^{-\lambda - 1} (1 - x)^{-\lambda - 1}}{(\alpha x^{-\lambda} + (1 - x)^{-\lambda})^2}

    between the two values, and none outside. As :math:`\lambda` falls the draws approach the discrete ones.

    >>> Bernoulli(0.25, values=(-1.0, 1.0)).log_mass({"w": torch.tensor([1.0, -1.0])}).exp()
    tensor(0.1875)
    """

    probability: float = 0.5
    values: tuple[float, float] = field(default=(0.0, 1.0), kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)

    def __post_init__(self):
        if not 0 < self.probability < 1:
            raise ValueError(f"a probability is between 0 and 1; got {self.probability}")
        if not self.values[0] < self.values[1]:
            raise ValueError(f"the two values are in order, such as (0, 1) or (-1, 1); got {self.values}")
        if self.temperature is not None:
            keep_positive(self, "temperature")

    @property
    def _logit(self) -> float:
        return math.log(self.probability) - math.log1p(-self.probability)

    def log_mass(self, params: Params) -> Tensor:
        """Log probability of weights that have these values exactly."""
        total = zero(params)
        for leaf in params.values():
            first, second = (leaf == value for value in self.values)
            mass = torch.where(second, math.log(self.probability), torch.where(first, math.log1p(-self.probability), -torch.inf))
            total = total + mass.sum()
        return total

    def divergence(self, logits: Params) -> Tensor:
        """KL(q || p) for q in which every weight is the second value with probability sigmoid(logit), on its own."""
        parts = []
        for leaf in logits.values():
            log, not_log = torch.nn.functional.logsigmoid(leaf), torch.nn.functional.logsigmoid(-leaf)
            there = leaf.sigmoid() * (log - math.log(self.probability))
            parts.append((there + (-leaf).sigmoid() * (not_log - math.log1p(-self.probability))).sum())
        return torch.stack(parts).sum()

    def density(self, leaf: Tensor) -> Tensor:
        """Log density of the binary concrete relaxation."""
        if self.temperature is None:
            raise ValueError(
                f"weights that are {self.values[0]:g} or {self.values[1]:g} have no density, so they cannot be sampled or trained by "
                "following a gradient. Train a relaxation of them, Bernoulli(temperature=0.5), by a variational method"
            )
        low, high = self.values
        x = (leaf - low) / (high - low)
        inside = (x > 0) & (x < 1)
        x = torch.where(inside, x, 0.5)
        log, other, t = x.log(), torch.log1p(-x), self.temperature
        value = math.log(t) + self._logit - (t + 1) * (log + other) - 2 * torch.logaddexp(self._logit - t * log, -t * other)
        return torch.where(inside, value - math.log(high - low), -torch.inf)

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """One of the two values, or with a temperature a number between them."""
        low, high = self.values
        u = torch.rand(leaf.shape, dtype=torch.float64, device=leaf.device, generator=generator)
        if self.temperature is None:
            x = (u < self.probability).double()
            return (low + (high - low) * x).to(leaf)
        x = low + (high - low) * ((torch.logit(u) + self._logit) / self.temperature).sigmoid()
        edge = torch.finfo(leaf.dtype).eps * max(
            abs(low), abs(high), high - low
        )  # rounded to a value, a draw would have no density
        return x.clamp(low + edge, high - edge).to(leaf)

    def typical(self) -> float:
        """The standard deviation of a discrete weight."""
        return (self.values[1] - self.values[0]) * math.sqrt(self.probability * (1 - self.probability))
