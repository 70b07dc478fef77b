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
        return {name: shape for block in self.blocks for name, shape in block.shapes.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        return {name: leaf for block in self.blocks for name, leaf in block.sample(n, generator).items()}

    def product(self, v: Params) -> Params:
        return {name: leaf for block in self.blocks for name, leaf in block.product(v).items()}

    def solve(self, v: Params) -> Params:
        return {name: leaf for block in self.blocks for name, leaf in block.solve(v).items()}

    def logdet(self) -> Tensor:
        return torch.stack([block.logdet() for block in self.blocks]).sum()

    def variance(self) -> Params:
        return {name: leaf for block in self.blocks for name, leaf in block.variance().items()}

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return torch.stack([block.log_precision({n: prior[n] for n in block.shapes}, scale) for block in self.blocks]).sum()

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> Blocks:
        return Blocks(tuple(block.with_prior(prior, scale, temperature) for block in self.blocks))

    def times(self, factor: float) -> Blocks:
        return Blocks(tuple(block.times(factor) for block in self.blocks))

    def with_temperature(self, temperature: float) -> Blocks:
        return Blocks(tuple(block.with_temperature(temperature) for block in self.blocks))

    @property
    def independent_blocks(self) -> tuple[Covariance, ...]:
        return self.blocks

    def picked(self) -> dict[str, Tensor]:
        return {name: leaf for block in self.blocks for name, leaf in block.picked().items()}

    @property
    def moving(self) -> int:
        return sum(block.moving for block in self.blocks)

    def plus(self, other: Covariance) -> Covariance:
        if not isinstance(other, Blocks) or [set(b.shapes) for b in self.blocks] != [set(b.shapes) for b in other.blocks]:
            raise ValueError(
                "the earlier posterior has another structure: fit with the same structure on the same weights, or start from scratch"
            )
        return Blocks(tuple(mine.plus(theirs) for mine, theirs in zip(self.blocks, other.blocks, strict=True)))
