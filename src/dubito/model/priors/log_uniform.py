"""The log-uniform prior, of sparse variational dropout (Kingma et al. 2015, Molchanov et al. 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.model.priors.factorized import Factorized
from dubito.model.priors.scales import IMPROPER

EULER = 0.5772156649015329
FIT = (0.63576, 1.87320, 1.48695)  # of Molchanov et al., section 4.2


@dataclass(frozen=True)
class LogUniform(Factorized):
    r""":math:`p(w) \propto 1 / |w|`, flat in :math:`\ln |w|`: a normal weight with a scale of its own under Jeffreys' prior.

    It is improper, and so is its posterior; asked to sample or to score it says so. Its expectation under a Gaussian exists, up to a
    constant, and is what sparse variational dropout uses. `bounds=(low, high)` of :math:`|w|` make it a density.

    >>> LogUniform(bounds=(math.exp(-1), math.e)).log_prob({"w": torch.ones(1)}).exp()  # 1 / 4
    tensor(0.2500)
    """

    bounds: tuple[float, float] | None = None

    def __post_init__(self):
        if self.bounds is not None and not 0 < self.bounds[0] < self.bounds[1] < math.inf:
            raise ValueError(f"the bounds of |w| are 0 < low < high; got {self.bounds}")

    @property
    def improper(self) -> bool:
        """True without bounds."""
        return self.bounds is None

    def density(self, leaf: Tensor) -> Tensor:
        """-log |w| - log(2 log(high / low)) between the bounds."""
        if self.bounds is None:
            raise ValueError(IMPROPER.format(name="the log-uniform prior", what="scored"))
        low, high = self.bounds
        inside = (leaf.abs() >= low) & (leaf.abs() <= high)
        return torch.where(inside, -leaf.abs().clamp_min(low).log() - math.log(2 * math.log(high / low)), -torch.inf)

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A uniform log |w| with a random sign."""
        if self.bounds is None:
            raise ValueError(IMPROPER.format(name="the log-uniform prior", what="sampled"))
        low, high = map(math.log, self.bounds)
        log = torch.empty_like(leaf).uniform_(low, high, generator=generator)
        sign = torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device).to(leaf) * 2 - 1
        return log.exp() * sign

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        r""":math:`-E \ln |w|`, by the fit of Molchanov et al. to what depends on :math:`\alpha = \sigma^2 / \mu^2`, and exact at both
        ends of it; the error is less than 0.01 of a nat between them."""
        if self.bounds is not None:
            return None
        tiny = torch.finfo(variance.dtype).tiny
        squares = mean.square()
        log_alpha = variance.clamp_min(tiny).log() - squares.clamp_min(tiny).log()
        first, second, third = FIT
        course = first * (torch.sigmoid(second + third * log_alpha) - 1)
        return course - 0.5 * (variance + squares).clamp_min(tiny).log() + 0.5 * (EULER + math.log(2))

    def typical(self) -> float:
        """The upper bound, or 1."""
        return 1.0 if self.bounds is None else self.bounds[1]
