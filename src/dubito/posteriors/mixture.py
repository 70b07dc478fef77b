"""Several posteriors, mixed."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from dubito.posteriors.conjugate import Conjugate
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predictive import LatentMixture, mix
from dubito.posteriors.stochastic import Stochastic
from dubito.tensors import tree
from dubito.tensors.randomness import derive, fresh
from dubito.tensors.tree import Params


@dataclass(frozen=True, repr=False)
class Mixture(Posterior):
    """A weighted mixture of posteriors of the same model: what an ensemble of Bayesian members gives."""

    members: tuple[Posterior, ...]
    weights: tuple[float, ...]

    @staticmethod
    def equal(members: list[Posterior]) -> Mixture:
        """All members alike."""
        return Mixture(members[0].model, tuple(members), tuple([1 / len(members)] * len(members)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        source = generator or fresh(self.model.device)
        which = torch.multinomial(torch.tensor(self.weights, device=source.device), n, replacement=True, generator=source)
        counts = torch.bincount(which, minlength=len(self.members)).tolist()
        drawn = [member.sample(k, source) for member, k in zip(self.members, counts, strict=True) if k]
        if isinstance(self.members[0], Stochastic):  # seeds mean nothing without the network they are for
            used = [i for i, k in enumerate(counts) if k]
            drawn = [
                {**draw, "mixture:member": torch.full_like(draw["dropout:seed"], i)} for i, draw in zip(used, drawn, strict=True)
            ]
        return tree.select(tree.concatenate(drawn), torch.randperm(n, generator=source, device=source.device))

    def predict(
        self, x: Any, how: str | None = None, *, draws: int | None = None, memory: float = 1.0, seed: int = 0, **options: Any
    ) -> LatentMixture:
        """`draws` is shared out evenly among the members; `options`, such as `link` of Gaussians, are handed to each."""
        for member in self.members:
            if unknown := set(options) - set(signature(member.predict).parameters):
                raise TypeError(
                    f"a member that is a {type(member).__name__} posterior predicts without {', '.join(sorted(unknown))}"
                )
        if how is None and any(isinstance(member, Conjugate) and member.rate is not None for member in self.members):
            how = "sampled"  # Student-t predictives cannot be mixed in closed form
        each = None if draws is None else -(-draws // len(self.members))
        parts = [
            member.predict(x, how, draws=each, memory=memory, seed=derive(seed, i), **options)
            for i, member in enumerate(self.members)
        ]
        return mix(parts, list(self.weights))
