"""Independent weights of any shape, through the inverse of their distribution function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.tensors import tree
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
EDGE = 1e-6  # uniform numbers are kept so far from 0 and 1, where an inverse may be infinite


@dataclass(frozen=True)
class Factorised(Family):
    r"""Every weight on its own, :math:`w = F^{-1}_{\mu, \sigma}(u)` with u uniform: any distribution with a location and a scale.

    `shape` is "normal", "laplace", "logistic", "cauchy" or "uniform". For another, derive from this class and give `distribution`:
    a torch distribution with `icdf` and `log_prob` of a location and a scale. One with bounded support can be no posterior of
    an unbounded prior's tails, but may be what a quantiser needs.

    >>> q = Factorised("laplace")
    >>> leaves = q.leaves({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    >>> q.draw(leaves, {"w": torch.tensor([0.5])})["w"]                      # the median
    tensor([0.])
    """

    shape: str = "laplace"

    def __post_init__(self):
        if self.shape not in SHAPES and type(self) is Factorised:
            raise ValueError(f"shape is one of {', '.join(SHAPES)}; got {self.shape!r}: for another, derive from Factorised")

    def distribution(self, location: Tensor, scale: Tensor) -> distributions.Distribution:
        """The distribution of one weight."""
        return SHAPES[self.shape](location, scale)

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        return {**of_kind("mean", tree.clone(start)), **of_kind("rho", tree.apply(inverse_softplus, scale))}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        like = kind(leaves, "mean")
        return {name: torch.empty_like(leaf).uniform_(EDGE, 1 - EDGE, generator=generator) for name, leaf in like.items()}

    def _parts(self, leaves: Params) -> dict[str, distributions.Distribution]:
        rho = kind(leaves, "rho")
        return {name: self.distribution(leaf, F.softplus(rho[name])) for name, leaf in kind(leaves, "mean").items()}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        return {name: part.icdf(noise[name]) for name, part in self._parts(leaves).items()}

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """Log density of some weights."""
        return torch.stack([part.log_prob(params[name]).sum() for name, part in self._parts(leaves).items()]).sum()

    def weight_moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight."""
        parts = self._parts(leaves)
        if self.shape == "logistic" and type(self) is Factorised:  # of which torch does not know them
            rho = kind(leaves, "rho")
            return kind(leaves, "mean"), {name: (F.softplus(leaf) * math.pi).square() / 3 for name, leaf in rho.items()}
        try:
            mean, variance = ({name: getattr(part, what) for name, part in parts.items()} for what in ("mean", "variance"))
        except NotImplementedError:
            return None
        return (mean, variance) if all(bool(leaf.isfinite().all()) for leaf in variance.values()) else None

    def entropy(self, leaves: Params) -> Tensor | None:
        """Entropy of q in nats."""
        try:
            return torch.stack([part.entropy().sum() for part in self._parts(leaves).values()]).sum()
        except NotImplementedError:
            return None
