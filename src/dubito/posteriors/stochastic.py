"""A network that is random in itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.network.examples import Inputs
from dubito.posteriors.functions import Functions
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predict.adjoint import ONE_PASS, one_pass, refuse_one_pass_options
from dubito.posteriors.predict.dropout import Dropout, learned_rates
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predict.streamlined import Streamlined
from dubito.posteriors.predictive import LINKS, LatentMixture
from dubito.tensors.checks import one_of, require
from dubito.tensors.randomness import fresh_generator, generator
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True, repr=False)
class Stochastic(Posterior):
    """One setting of the weights and dropout that stays on: a distribution over functions, what MC dropout gives.

    `consistent` masks make a draw one function over all inputs; independent ones are drawn anew for every input.
    """

    params: Params
    buffers: Buffers
    dropout: Dropout
    draws: int = 50
    consistent: bool = True

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of functions: there are no draws of the weights, only seeds that fix all masks, under "dropout:seed", [n]."""
        source = generator or fresh_generator()
        return {"dropout:seed": torch.randint(2**62, (n,), generator=source, device=source.device).to(self.model.device)}

    @property
    def center(self) -> tuple[Params, Buffers]:
        """The weights, without dropout."""
        return self.params, self.buffers

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        self._only(how, "sampled", "point")
        seeds = self.sample(draws or self.draws, generator("cpu", seed, "masks"))["dropout:seed"]
        shared = {**self.buffers, **self.params}
        return Functions(self.model, shared, {}, dropout=self.dropout, seeds=seeds, consistent=self.consistent)

    def with_fixed_masks(self) -> Stochastic:
        """With `consistent` masks."""
        return replace(self, consistent=True)

    @cached_property
    def streamlined(self) -> Streamlined:
        """The network as a program of means and variances, in which dropout is noise; independent masks."""
        rates = learned_rates(self.dropout, {**self.buffers, **self.params})
        weights = {name: leaf for name, leaf in self.params.items() if not name.startswith("dropout:")}
        return Streamlined(self.model, weights, self.buffers, dropout=rates)

    def predict(
        self,
        x: Inputs,
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float | None = None,
        seed: int = 0,
        consistent: bool | None = None,
        link: str = "nodes",
        x_var: Tensor | None = None,
        rank: int | None = None,
        top: int | None = None,
        rule: str = "moments",
    ) -> LatentMixture:
        """The predictive at x, by draws of masks, in one pass, or (`how="point"`) of the network with dropout off, as it is
        used without Bayes; `link`, `x_var`, `rank`, `top` and `rule` are as in `Gaussian.predict`."""
        self._only(how, "sampled", "streamlined", "adjoint", "point", draws=draws)
        one_of(LINKS, link=link)
        consistent = self.consistent if consistent is None else consistent
        if how is not None and how in ONE_PASS:
            require(
                not (self.model.coupled and consistent),
                "coupled rows share the masks of a draw, which one pass cannot follow: say consistent=False, so that each row has its "
                "own, or predict with how='sampled'",
            )
            p = one_pass(
                self.streamlined, x, how, draws=draws, memory=memory, seed=seed, x_var=x_var, rank=rank, top=top, rule=rule
            )
            return p.linked(link)
        refuse_one_pass_options(x_var, rank, top, rule)
        shared = {**self.buffers, **self.params}
        if how == "point":
            return sampled(self.model, x, shared=shared, memory=memory)
        return sampled(
            self.model,
            x,
            shared=shared,
            dropout=self.dropout,
            seeds=self.sample(draws or self.draws, generator("cpu", seed, "masks"))["dropout:seed"],
            consistent=consistent,
            memory=memory,
        )
