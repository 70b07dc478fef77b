"""Independent Student-t priors, whose tails are heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors.factorized import Factorized
from dubito.model.priors.scales import keep_positive


@dataclass(frozen=True)
class StudentT(Factorized):
    r""":math:`p(w) \propto (1 + w^2 / (\nu\, \mathrm{width}^2))^{-(\nu + 1) / 2}` with :math:`\nu` = `df` degrees of freedom.

    Large weights are expected now and then, so a wide network does not become a Gaussian process, and a far-off weight is hardly pulled
    back. `df=1` is Cauchy's. `width` is not a standard deviation, which is :math:`\sqrt{\nu / (\nu - 2)}` times as large, and infinite
    for :math:`\nu \le 2`. A normal whose variance is InverseGamma(df / 2, df width^2 / 2) has this density.

    >>> StudentT(df=1.0).log_prob({"w": torch.zeros(1)}).exp()  # 1 / pi
    tensor(0.3183)
    """

    width: float = 1.0
    df: float = field(default=3.0, kw_only=True)

    def __post_init__(self):
        keep_positive(self, "width", "df")

    def density(self, leaf: Tensor) -> Tensor:
        """Log density of every weight."""
        half = 0.5 * (self.df + 1)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.df) - 0.5 * math.log(math.pi * self.df) - math.log(self.width)
        return constant - half * torch.log1p((leaf / self.width).square() / self.df)

    def slope(self, leaf: Tensor) -> Tensor:
        """Derivative of the log density at every weight."""
        return -(self.df + 1) * leaf / (self.df * self.width**2 + leaf.square())

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A draw for every weight."""
        half = torch.full(leaf.shape, 0.5 * self.df, dtype=torch.float64, device=leaf.device)
        precision = torch._standard_gamma(half, generator=generator) / half
        return (self.width * torch.empty_like(precision).normal_(generator=generator) * precision.rsqrt()).to(leaf)

    def typical(self) -> float:
        """`width`: the standard deviation may be infinite."""
        return self.width
