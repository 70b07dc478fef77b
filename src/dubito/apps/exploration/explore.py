"""How to choose what to try: by a drawn function, or by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.apps.network import only_network
from dubito.posteriors import Posterior
from dubito.tensors.randomness import generator


@dataclass(frozen=True)
class Thompson:
    """The best action by a function drawn from the posterior, which is kept for `hold` steps; None keeps it for an episode.

    A function that is kept makes plans of many steps and carries them out; one that is new at each step tries, where it
    is uncertain, now this and now that.
    """

    hold: int | None = None

    def __post_init__(self):
        if self.hold is not None and self.hold < 1:
            raise ValueError(f"a function is kept for at least one step, or for an episode with None; got hold={self.hold}")

    def values(self, posterior: Posterior, seen: Tensor, seed: int, *, episode: int, step: int, total: int) -> Tensor:
        """Of the actions, [K]. The same seed gives the same mask, member or noise, with the weights as they have become."""
        part = 0 if self.hold is None else step // self.hold
        source = generator(posterior.model.device, seed, "function", episode, part)
        x: Any = (seen.unsqueeze(0),)  # without an action: all
        return posterior.function(source)(x).means.reshape(-1)


@dataclass(frozen=True)
class EpsilonGreedy:
    """The best action by the network at the centre of the posterior (dropout off), and with a chance of epsilon any.

    Epsilon falls linearly from `first` to `last` over so many `steps` of the environment.

    >>> [EpsilonGreedy(1.0, 0.1, steps=100).epsilon(n) for n in (0, 50, 1000)]
    [1.0, 0.55, 0.1]
    """

    first: float = 1.0
    last: float = 0.05
    steps: int = 2000

    def __post_init__(self):
        if not 0 <= self.last <= self.first <= 1 or self.steps < 1:
            raise ValueError(
                f"epsilon falls from first to last, both in [0, 1]; got {self.first} and {self.last}, in {self.steps} steps"
            )

    def epsilon(self, total: int) -> float:
        return max(self.last, self.first - (self.first - self.last) * total / self.steps)

    def values(self, posterior: Posterior, seen: Tensor, seed: int, *, episode: int, step: int, total: int) -> Tensor:
        source = generator("cpu", seed, "chance", episode, step)
        f = only_network(posterior, "EpsilonGreedy")((seen.unsqueeze(0),)).reshape(-1)
        if float(torch.rand((), generator=source)) < self.epsilon(total):
            return torch.rand(f.shape, generator=source).to(f.device)
        return f


Explore = Thompson | EpsilonGreedy
