"""A distribution that one can draw weights from, and no more is known of it in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dubito.network.examples import Inputs
from dubito.posteriors.families import Family
from dubito.posteriors.functions import Functions
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.randomness import fresh_generator, generator
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True, repr=False)
class Drawn(Posterior):
    """A member of a variational family that is not Gaussian: its parameters, `leaves`, and what was learned as a point."""

    family: Family
    leaves: Params
    points: Params
    buffers: Buffers
    draws: int = 30

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of the family's weights; points are the same in all."""
        source = generator or fresh_generator(self.model.device)
        with torch.no_grad():
            drawn = tree.stack([self.family.sample(self.leaves, self.family.noise(self.leaves, source)) for _ in range(n)])
        return {**drawn, **tree.repeat(self.points, n)}

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        self._only(how, "sampled")
        shared, stacked = self._drawn(draws, seed)
        return Functions(self.model, shared, stacked)

    def _drawn(self, draws: int | None, seed: int) -> tuple[Buffers, Params]:
        """Leaves that all draws share, and those that differ."""
        drawn = self.sample(draws or self.draws, generator(self.model.device, seed, "weights"))
        stacked = {name: leaf for name, leaf in drawn.items() if name not in self.points}
        return {**self.buffers, **self.points}, stacked

    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float | None = None, seed: int = 0
    ) -> LatentMixture:
        """The average over `draws` of the weights."""
        self._only(how, "sampled", draws=draws)
        shared, stacked = self._drawn(draws, seed)
        return sampled(self.model, x, shared=shared, stacked=stacked, memory=memory)

    def moments(self) -> tuple[Params, Params]:
        """Mean and variance of every weight, of families that know them."""
        found = self.family.weight_moments(self.leaves)
        if found is None:
            raise ValueError(f"the family {type(self.family).__name__} knows no moments of its weights in closed form")
        return found

    def units(self) -> Params:
        """How little each unit is needed, by the name of its weight (an input of a matrix, a filter of a convolution): of families
        that have a factor for every unit."""
        found = self.family.units(self.leaves)
        if found is None:
            raise ValueError(f"the family {type(self.family).__name__} has no factors for units: fit family='grouped'")
        return found
