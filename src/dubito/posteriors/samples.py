"""A set of draws of the weights, or a single setting of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.network.examples import Inputs
from dubito.posteriors.diagnostics import Summary, summarize, to_arviz
from dubito.posteriors.functions import Functions, Setting, UnequalWeights, on_cpu, spaced, spaced_by_weight
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.randomness import fresh_generator
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

    @property
    def certain(self) -> bool:
        """True."""
        return True

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        self._only(how, "point", "sampled")
        return Functions(self.model, {**self.buffers, **self.params}, {})

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """The setting, n times."""
        return tree.repeat(self.params, n)

    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float | None = None, seed: int = 0
    ) -> LatentMixture:
        """The predictive of the network at this setting."""
        self._only(how, "sampled", "point", draws=draws)
        return sampled(self.model, x, shared={**self.buffers, **self.params}, memory=memory)


@dataclass(frozen=True, repr=False)
class Samples(Posterior):
    """S draws, leaves [S, ...]: what samplers and ensembles of points give. `weights` [S] sums to 1; None is equal weights.

    `own_buffers` are the buffers that differ between draws (BatchNorm statistics of each member), [S, ...]; `buffers` the others.

    Draws of a sampler come chain after chain: `chains` of them, of S / chains draws each. `trace` is what the sampler noted at every
    draw ("energy", "acceptance", "divergent", ...), [S] each, and `sampler` how they were made: {"method": "HMC", "adjusted": True}.
    """

    params: Params
    buffers: Buffers
    own_buffers: Buffers = field(default_factory=dict)
    weights: Tensor | None = None
    chains: int = 1
    trace: Params = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if len(self) % self.chains:
            raise ValueError(f"{len(self)} draws are not {self.chains} chains of equal length")

    def __len__(self) -> int:
        return tree.count(self.params)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n of the draws, at random with replacement."""
        leaf = next(iter(self.params.values()))
        weights = torch.ones(len(self), device=leaf.device) if self.weights is None else self.weights
        which = torch.multinomial(weights, n, replacement=True, generator=generator or fresh_generator(leaf.device))
        return tree.select(self.params, which)

    def modes(self) -> tuple[Params, Buffers]:
        """All draws."""
        return self.params, self.own_buffers

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        self._only(how, "sampled")
        return Functions(self.model, self.buffers, self._stacked(draws), self.weights)

    def _stacked(self, draws: int | None) -> Params:
        """What differs between draws: of all, or of so many that are evenly spaced."""
        stacked = {**self.params, **self.own_buffers}
        if draws is None or draws >= len(self):
            return stacked
        if self.weights is not None:
            raise UnequalWeights
        return tree.select(stacked, spaced(len(self), draws))

    def function(self, source: torch.Generator) -> Functions:
        """One of the draws, by their weights."""
        shares = torch.ones(len(self)) if self.weights is None else self.weights.cpu()
        which = int(torch.multinomial(shares, 1, generator=on_cpu(source)))
        own = {**tree.select(self.params, which), **tree.select(self.own_buffers, which)}
        return Functions(self.model, {**self.buffers, **own}, {})

    def settings(self, draws: int = 10) -> list[Setting]:
        """Some of the draws."""
        which = spaced(len(self), draws).tolist()
        shares = [1 / len(which)] * len(which)
        if self.weights is not None:
            which, shares = spaced_by_weight(self.weights, draws)
        chosen = [(tree.select(self.params, i), tree.select(self.own_buffers, i)) for i in which]
        return [Setting(p, {**self.buffers, **own}, share) for (p, own), share in zip(chosen, shares, strict=True)]

    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float | None = None, seed: int = 0
    ) -> LatentMixture:
        """All draws by default; `draws` takes that many, evenly spaced."""
        self._only(how, "sampled", draws=draws)
        return sampled(self.model, x, shared=self.buffers, stacked=self._stacked(draws), weights=self.weights, memory=memory)

    def summary(self, x: Inputs = None) -> Summary:
        """Whether the chains can be trusted, as a table to print: R-hat, effective draws, divergences, and a verdict in words.

        Give inputs x: what matters is whether the chains agree in what they predict there, class probabilities or means. Weights are
        symmetric, hidden units may change places, and chains that differ in them may be the same in all that counts.
        """
        self._chains("summary")
        predictions = None if x is None else self.predict(x).probs
        return summarize(self.params, chains=self.chains, trace=self.trace, sampler=self.sampler, predictions=predictions)

    def to_arviz(self, x: Inputs = None) -> Any:
        """The draws and what the sampler noted as ArviZ's DataTree (`pip install dubito[arviz]`); with x also the predictions, "f"."""
        self._chains("to_arviz")
        predictions = None if x is None else self.predict(x).probs
        return to_arviz(self.params, chains=self.chains, trace=self.trace, predictions=predictions)

    def _chains(self, name: str) -> None:
        if self.weights is not None or not (self.sampler or self.trace or self.chains > 1):
            raise ValueError(
                f"{name} is for chains of a sampler; these {len(self)} draws were made one by one, as an ensemble's are"
            )
