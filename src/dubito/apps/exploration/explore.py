"""How an agent chooses actions: by a function drawn from the posterior, or at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dubito.apps.action_values import action_values
from dubito.apps.network import only_network
from dubito.posteriors import Posterior
from dubito.tensors.checks import at_least, require
from dubito.tensors.randomness import generator


@dataclass(frozen=True)
class Thompson:
    """The best action by a function drawn from the posterior, which is kept for `hold` steps; None keeps it for an episode.

    An agent that keeps its function follows a plan over many steps. With a new function at every step it changes its mind wherever
    it is uncertain.
    """

    hold: int | None = None
    needs_spread: ClassVar[bool] = True  # whether a posterior with a single function is a mistake

    def __post_init__(self):
        at_least(1, hold=self.hold)

    def values(self, posterior: Posterior, observation: Tensor, seed: int, *, episode: int, step: int, total: int) -> Tensor:
        """The values of the actions, [K]. The same seed gives the same mask, member or noise, at the current weights."""
        period = 0 if self.hold is None else step // self.hold
        source = generator(posterior.model.device, seed, "function", episode, period)
        return action_values(posterior.function(source), observation)


@dataclass(frozen=True)
class EpsilonGreedy:
    """The best action by the network at the center of the posterior (dropout off), or a random one with probability epsilon.

    Epsilon falls linearly from `first` to `last` over `steps` steps of the environment.

    >>> [EpsilonGreedy(1.0, 0.1, steps=100).epsilon(n) for n in (0, 50, 1000)]
    [1.0, 0.55, 0.1]
    """

    first: float = 1.0
    last: float = 0.05
    steps: int = 2000
    needs_spread: ClassVar[bool] = False

    def __post_init__(self):
        ordered = 0 <= self.last <= self.first <= 1
        require(ordered, f"first and last must satisfy 0 <= last <= first <= 1; got first={self.first} and last={self.last}")
        at_least(1, steps=self.steps)

    def epsilon(self, total: int) -> float:
        """The probability of a random action after `total` steps."""
        return max(self.last, self.first - (self.first - self.last) * total / self.steps)

    def values(self, posterior: Posterior, observation: Tensor, seed: int, *, episode: int, step: int, total: int) -> Tensor:
        """The values of the actions, [K]: those of the network, or random numbers with probability `epsilon(total)`."""
        source = generator("cpu", seed, "chance", episode, step)
        f = only_network(posterior, "EpsilonGreedy")((observation.unsqueeze(0),)).reshape(-1)
        if float(torch.rand((), generator=source)) < self.epsilon(total):
            return torch.rand(f.shape, generator=source).to(f.device)
        return f


Explore = Thompson | EpsilonGreedy
