"""A set of draws of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito import tree
from dubito.posteriors.posterior import Posterior
from dubito.predict.sampled import sampled
from dubito.predictive import LatentMixture
from dubito.randomness import fresh
from dubito.tree import Buffers, Params


@dataclass(frozen=True)
class Samples(Posterior):
    """S draws, leaves [S, ...]: what samplers and ensembles of points give. `weights` [S] sums to 1; None is equal weights.

    `own_buffers` are the buffers that differ between draws (BatchNorm statistics of each member), [S, ...]; `buffers` the others.
    """

    params: Params
    buffers: Buffers
    own_buffers: Buffers = field(default_factory=dict)
    weights: Tensor | None = None

    def __len__(self) -> int:
        return tree.count(self.params)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n of the draws, at random with replacement."""
        leaf = next(iter(self.params.values()))
        weights = torch.ones(len(self), device=leaf.device) if self.weights is None else self.weights
        which = torch.multinomial(weights, n, replacement=True, generator=generator or fresh(leaf.device))
        return tree.select(self.params, which)

    def predict(
        self, x: Any, how: str | None = None, *, draws: int | None = None, memory: float = 1.0, seed: int = 0
    ) -> LatentMixture:
        """All draws by default; `draws` takes that many, evenly spaced."""
        self._only(how, "sampled")
        stacked, weights = {**self.params, **self.own_buffers}, self.weights
        if draws is not None and draws < len(self):
            if weights is not None:
                raise ValueError("draws with unequal weights are used all together: leave out `draws`")
            stacked = tree.select(stacked, torch.linspace(0, len(self) - 1, draws).round().long())
        return sampled(self.model, x, shared=self.buffers, stacked=stacked, weights=weights, memory=memory)
