"""Independent groups of leaves, each with a structure of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.tensors.covariances.covariance import Covariance
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Blocks(Covariance):
    """A block-diagonal covariance, block after block."""

    blocks: tuple[Covariance, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves of all blocks, in order."""
        return {name: shape for block in self.blocks for name, shape in block.shapes.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of every block, one block after another."""
        return {name: leaf for block in self.blocks for name, leaf in block.sample(n, generator).items()}

    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""
        return {name: leaf for block in self.blocks for name, leaf in block.product(v).items()}

    def solve(self, v: Params) -> Params:
        """The precision times v; leaves [n, *shape]."""
        return {name: leaf for block in self.blocks for name, leaf in block.solve(v).items()}

    def logdet(self) -> Tensor:
        """The sum over the blocks."""
        return torch.stack([block.logdet() for block in self.blocks]).sum()

    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""
        return {name: leaf for block in self.blocks for name, leaf in block.variance().items()}

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """The sum over the blocks."""
        return torch.stack([block.log_precision({n: prior[n] for n in block.shapes}, scale) for block in self.blocks]).sum()

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> Blocks:
        """The same curvature under another prior, noise or temperature."""
        return Blocks(tuple(block.with_prior(prior, scale, temperature) for block in self.blocks))

    def times(self, factor: float) -> Blocks:
        """The covariance under a multiple of the prior's precision."""
        return Blocks(tuple(block.times(factor) for block in self.blocks))

    def with_temperature(self, temperature: float) -> Blocks:
        """The same curvature and prior at another temperature."""
        return Blocks(tuple(block.with_temperature(temperature) for block in self.blocks))

    @property
    def independent_blocks(self) -> tuple[Covariance, ...]:
        """The blocks."""
        return self.blocks

    def picked(self) -> dict[str, Tensor]:
        """The picked positions of all blocks."""
        return {name: leaf for block in self.blocks for name, leaf in block.picked().items()}

    @property
    def moving(self) -> int:
        """The sum over the blocks."""
        return sum(block.moving for block in self.blocks)

    def plus(self, other: Covariance) -> Covariance:
        """Block by block; both must have the same blocks."""
        if not isinstance(other, Blocks) or [set(b.shapes) for b in self.blocks] != [set(b.shapes) for b in other.blocks]:
            raise ValueError(
                "the earlier posterior has another structure: fit with the same structure on the same weights, or start from scratch"
            )
        return Blocks(tuple(mine.plus(theirs) for mine, theirs in zip(self.blocks, other.blocks, strict=True)))
