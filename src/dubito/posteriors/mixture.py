"""Several posteriors, mixed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch

from dubito.network.examples import Inputs
from dubito.posteriors.conjugate import Conjugate
from dubito.posteriors.functions import Functions, Mixed, Setting, on_cpu
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predictive import LatentMixture, mix
from dubito.posteriors.stochastic import Stochastic
from dubito.tensors import tree
from dubito.tensors.randomness import derive_seed, fresh_generator
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True, repr=False)
class Mixture(Posterior):
    """A weighted mixture of posteriors of the same model: what an ensemble of Bayesian members gives."""

    members: tuple[Posterior, ...]
    weights: tuple[float, ...]

    @staticmethod
    def equal(members: list[Posterior]) -> Mixture:
        """All members alike."""
        return Mixture(members[0].model, tuple(members), tuple([1 / len(members)] * len(members)))

    def _held(self) -> str:
        return f"{len(self.members)} members, "

    def _departures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.departures, *(one for member in self.members for one in member._departures()))))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of the weights, each from a member that is drawn by its weight."""
        source = generator or fresh_generator(self.model.device)
        which = torch.multinomial(torch.tensor(self.weights, device=source.device), n, replacement=True, generator=source)
        counts = torch.bincount(which, minlength=len(self.members)).tolist()
        drawn = [member.sample(k, source) for member, k in zip(self.members, counts, strict=True) if k]
        if isinstance(self.members[0], Stochastic):  # seeds mean nothing without the network they are for
            used = [i for i, k in enumerate(counts) if k]
            drawn = [
                {**draw, "mixture:member": torch.full_like(draw["dropout:seed"], i)} for i, draw in zip(used, drawn, strict=True)
            ]
        return tree.select(tree.concatenate(drawn), torch.randperm(n, generator=source, device=source.device))

    def modes(self) -> tuple[Params, Buffers] | None:
        """The centers of the members, if all have one."""
        centers = [member.center for member in self.members if member.center is not None]
        if len(centers) < len(self.members):
            return None
        return tree.stack([params for params, _ in centers]), tree.stack([buffers for _, buffers in centers])

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Mixed:
        each = None if draws is None else -(-draws // len(self.members))
        parts = [member.functions(how, draws=each, seed=derive_seed(seed, i)) for i, member in enumerate(self.members)]
        return Mixed(tuple(parts), self.weights)

    def function(self, source: torch.Generator) -> Functions:
        """One of a member, which is drawn by its weight."""
        which = int(torch.multinomial(torch.tensor(self.weights), 1, generator=on_cpu(source)))
        return self.members[which].function(source)

    def settings(self, draws: int = 10) -> list[Setting]:
        """Those of the members that have a weight."""
        each = max(1, draws // len(self.members))
        parts = [(share, member.settings(each)) for share, member in zip(self.weights, self.members, strict=True) if share > 0]
        return [one._replace(weight=share * one.weight) for share, settings in parts for one in settings]

    def with_fixed_masks(self) -> Mixture:
        """Those of every member."""
        return replace(self, members=tuple(member.with_fixed_masks() for member in self.members))

    def predict(
        self,
        x: Inputs,
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float | None = None,
        seed: int = 0,
        **options: Any,
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
            member.predict(x, how, draws=each, memory=memory, seed=derive_seed(seed, i), **options)
            for i, member in enumerate(self.members)
        ]
        return mix(parts, list(self.weights))
