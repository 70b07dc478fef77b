"""A single setting of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dubito.network.examples import Inputs
from dubito.posteriors.functions import Functions
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True, repr=False)
class Point(Posterior):
    """All mass on one setting: what MAP gives. Its predictive has noise but no epistemic uncertainty."""

    params: Params
    buffers: Buffers

    @property
    def center(self) -> tuple[Params, Buffers]:
        """The setting itself."""
        return self.params, self.buffers

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        self._only(how, "point", "sampled")
        return Functions(self.model, {**self.buffers, **self.params}, {})

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """The setting, n times."""
        return tree.repeat(self.params, n)

    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float = 1.0, seed: int = 0
    ) -> LatentMixture:
        """The predictive of the network at this setting."""
        self._only(how, "sampled", "point")
        return sampled(self.model, x, shared={**self.buffers, **self.params}, memory=memory)
