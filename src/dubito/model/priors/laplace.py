"""Independent Laplace priors, which pull small weights to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.model.priors.factorized import Factorized
from dubito.model.priors.scales import keep_positive


@dataclass(frozen=True)
class Laplace(Factorized):
    r""":math:`p(w) = e^{-|w| / b} / (2b)` with :math:`b = \mathrm{scale} / \sqrt 2`, so that `scale` is the standard deviation.

    Its mode is sparse (the lasso); its posterior is not.

    >>> Laplace(scale=math.sqrt(2)).log_prob({"w": torch.ones(1)})  # -1 - ln 2
    tensor(-1.6931)
    """

    scale: float = 1.0

    def __post_init__(self):
        keep_positive(self, "scale")

    @property
    def _b(self) -> float:
        return self.scale / math.sqrt(2)

    def density(self, leaf: Tensor) -> Tensor:
        """-|w| / b - log 2b."""
        return -leaf.abs() / self._b - math.log(2 * self._b)

    def slope(self, leaf: Tensor) -> Tensor:
        """-sign(w) / b."""
        return leaf.sign() / -self._b

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """An exponential number with a random sign."""
        sign = torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device).to(leaf) * 2 - 1
        return torch.empty_like(leaf).exponential_(1 / self._b, generator=generator) * sign

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        r"""Of the folded normal,
        :math:`E|w| = \sigma \sqrt{2 / \pi}\, e^{-\mu^2 / 2 \sigma^2} + \mu\, \mathrm{erf}(\mu / \sqrt 2 \sigma)`."""
        scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        z = mean / scale / math.sqrt(2)
        folded = scale * math.sqrt(2 / math.pi) * (-z.square()).exp() + mean * z.erf()
        return -folded / self._b - math.log(2 * self._b)

    def typical(self) -> float:
        """`scale`."""
        return self.scale
