"""A mixture of two normals, a wide and a narrow one (Blundell et al. 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors.factorized import Factorized
from dubito.model.priors.scales import positive


@dataclass(frozen=True)
class ScaleMixture(Factorized):
    r""":math:`p(w) = \pi N(w \mid 0, \sigma_1^2) + (1 - \pi) N(w \mid 0, \sigma_2^2)`: most weights are small, some are not.

    `share` is :math:`\pi`, `scales` are :math:`(\sigma_1, \sigma_2)`. Blundell et al. choose among :math:`\pi` of 1/4, 1/2, 3/4,
    :math:`\sigma_1` of 1, e^-1, e^-2 and :math:`\sigma_2` of e^-6, e^-7, e^-8.

    >>> ScaleMixture(share=0.5, scales=(1.0, 1.0)).log_prob({"w": torch.zeros(1)})  # two that are one
    tensor(-0.9189)
    """

    share: float = 0.5
    scales: tuple[float, float] = field(default=(1.0, math.exp(-6)), kw_only=True)

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise ValueError(f"share is that of the first normal, between 0 and 1; got {self.share}")
        first, second = self.scales
        object.__setattr__(self, "scales", (positive("first", first), positive("second", second)))

    def _logs(self, leaf: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities of both normals with their shares; a narrow one may be far below what a float can exponentiate."""
        shares = (math.log(self.share), math.log1p(-self.share))
        first, second = (
            share - math.log(scale) - 0.5 * math.log(2 * math.pi) - 0.5 * (leaf / scale).square()
            for share, scale in zip(shares, self.scales, strict=True)
        )
        return first, second

    def density(self, leaf: Tensor) -> Tensor:
        """Log density of every weight."""
        return torch.logaddexp(*self._logs(leaf))

    def slope(self, leaf: Tensor) -> Tensor:
        """Derivative of the log density at every weight."""
        first, second = self._logs(leaf)
        belongs = torch.sigmoid(first - second)  # to the first
        return -leaf * (belongs * self.scales[0] ** -2 + (1 - belongs) * self.scales[1] ** -2)

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A draw for every weight."""
        first = torch.rand(leaf.shape, device=leaf.device, generator=generator) < self.share
        return torch.empty_like(leaf).normal_(generator=generator) * torch.where(first, *map(leaf.new_tensor, self.scales))

    def typical(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.share * self.scales[0] ** 2 + (1 - self.share) * self.scales[1] ** 2)
