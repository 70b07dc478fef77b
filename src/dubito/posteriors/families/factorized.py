"""Independent weights of any distribution, drawn by the inverse of its distribution function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, distributions

from dubito._moved import renamed
from dubito.posteriors.families.family import ScaledFamily
from dubito.posteriors.families.leaves import pick, total
from dubito.tensors.checks import require
from dubito.tensors.tree import Params

SHAPES: dict[str, Callable[[Tensor, Tensor], distributions.Distribution]] = {
    "normal": distributions.Normal,
    "laplace": distributions.Laplace,
    "cauchy": distributions.Cauchy,
    "logistic": lambda loc, scale: distributions.TransformedDistribution(
        distributions.Uniform(torch.zeros_like(loc), torch.ones_like(loc)),
        [distributions.SigmoidTransform().inv, distributions.AffineTransform(loc, scale)],
    ),
    "uniform": lambda loc, scale: distributions.Uniform(loc - scale, loc + scale, validate_args=False),
}
EDGE = 1e-6  # smallest distance of uniform numbers from 0 and 1, where the inverse may be infinite


@dataclass(frozen=True)
class Factorized(ScaledFamily):
    r"""Independent weights of any distribution with a location and a scale: :math:`w = F^{-1}_{\mu, \sigma}(u)` with uniform u.

    `shape` is "normal", "laplace", "logistic", "cauchy" or "uniform". For another distribution derive a class from this one and
    override `distribution`. Density and entropy are those of the torch distribution. A distribution with bounded support cannot match
    the tails of an unbounded prior, but it may suit a quantizer.

    >>> q = Factorized("laplace")
    >>> leaves = q.leaves({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    >>> q.draw(leaves, {"w": torch.tensor([0.5])})["w"]                      # the median
    tensor([0.])
    """

    shape: str = "laplace"
    stored_name: ClassVar[str] = "Factorised"  # in checkpoints, as version 0.1 wrote it

    def __post_init__(self):
        require(
            self.shape in SHAPES or self._is_derived,
            f"shape must be one of {', '.join(SHAPES)}; got {self.shape!r}: for another distribution derive from Factorized",
        )

    @property
    def _is_derived(self) -> bool:
        return type(self) is not Factorized

    def distribution(self, location: Tensor, scale: Tensor) -> distributions.Distribution:
        """The distribution of weights with the given locations and scales: a torch distribution with `icdf` and `log_prob`."""
        return SHAPES[self.shape](location, scale)

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A uniform number in (0, 1) for every weight."""
        return uniform_like(pick(leaves, "mean"), generator)

    def _distributions(self, leaves: Params) -> dict[str, distributions.Distribution]:
        scales = self.scales(leaves)
        return {name: self.distribution(mean, scales[name]) for name, mean in pick(leaves, "mean").items()}

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`F^{-1}_{\mu, \sigma}(u)`."""
        return {name: q.icdf(noise[name]) for name, q in self._distributions(leaves).items()}

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """The sum of the log densities of the weights."""
        return total(q.log_prob(params[name]).sum() for name, q in self._distributions(leaves).items())

    def weight_moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight, if they are finite and known."""
        if self.shape == "logistic" and not self._is_derived:  # torch does not know these
            return pick(leaves, "mean"), {name: (scale * math.pi).square() / 3 for name, scale in self.scales(leaves).items()}
        try:
            mean, variance = {}, {}
            for name, q in self._distributions(leaves).items():
                mean[name], variance[name] = q.mean, q.variance
        except NotImplementedError:
            return None
        return (mean, variance) if all(bool(leaf.isfinite().all()) for leaf in variance.values()) else None

    def entropy(self, leaves: Params) -> Tensor | None:
        """The sum of the entropies of the weights, if torch knows them."""
        try:
            return total(q.entropy().sum() for q in self._distributions(leaves).values())
        except NotImplementedError:
            return None


def uniform_like(leaves: Params, generator: torch.Generator) -> Params:
    """Uniform numbers in (0, 1), not too near to its ends, in the shapes of some tensors."""
    return {
        name: torch.empty_like(leaf, requires_grad=False).uniform_(EDGE, 1 - EDGE, generator=generator)
        for name, leaf in leaves.items()
    }


__getattr__ = renamed(__name__, {"Factorised": "Factorized"})
