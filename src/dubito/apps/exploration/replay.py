"""The replay memory of Q-learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.tensors.checks import require


class Transitions(NamedTuple):
    """Steps of an environment."""

    observation: Tensor  # [B, ...]
    action: Tensor  # [B]
    reward: Tensor  # [B]
    next_observation: Tensor  # [B, ...]
    terminated: Tensor  # [B], 1 where the episode ended there; 0 also where it was only cut off


@dataclass
class Replay:
    """The last `capacity` transitions, in memory that is allocated once, on a device.

    >>> replay = Replay(2)
    >>> for reward in (1.0, 2.0, 3.0):
    ...     replay.add(torch.zeros(4), 0, reward, torch.ones(4), False)
    >>> len(replay), sorted(replay.rows.reward.tolist())
    (2, [2.0, 3.0])
    """

    capacity: int
    device: torch.device | str = "cpu"
    count: int = 0  # transitions ever added
    memory: Transitions | None = None

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def add(self, observation: Tensor, action: int, reward: float, next_observation: Tensor, terminated: bool) -> None:
        """Store a transition in the place of the oldest one."""
        if self.memory is None:
            shown = observation.new_zeros(self.capacity, *observation.shape).to(self.device)
            number = torch.zeros(self.capacity, device=self.device)
            self.memory = Transitions(shown, number.long(), number, shown.clone(), number.clone())
        values = (observation, action, reward, next_observation, float(terminated))
        for leaf, value in zip(self.memory, values, strict=True):
            leaf[self.count % self.capacity] = value
        self.count += 1

    def fill(self, rows: Transitions, count: int) -> None:
        """Replace the content by `rows`, the last of `count` transitions, as `Replay.rows` returned them."""
        self.memory = Transitions(*(leaf.new_zeros(self.capacity, *leaf.shape[1:]) for leaf in rows))
        for space, leaf in zip(self.memory, rows, strict=True):
            space[: len(leaf)] = leaf
        self.count = count

    @property
    def rows(self) -> Transitions:
        """All stored transitions, in no particular order."""
        require(self.memory is not None, "the replay memory is empty: add a transition first")
        return Transitions(*(leaf[: len(self)] for leaf in self.memory or ()))

    def sample(self, n: int, generator: torch.Generator) -> Transitions:
        """n random transitions, drawn with replacement."""
        which = torch.randint(len(self), (n,), generator=generator, device=generator.device).to(self.device)
        return Transitions(*(leaf[which] for leaf in self.rows))
