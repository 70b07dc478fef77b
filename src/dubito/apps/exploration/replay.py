"""What was lived through, to learn from again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Transitions(NamedTuple):
    """Steps of an environment."""

    seen: Tensor  # [B, ...]
    action: Tensor  # [B]
    reward: Tensor  # [B]
    after: Tensor  # [B, ...], what was seen then
    over: Tensor  # [B], whether nothing comes after: terminated, and not merely cut off


@dataclass
class Replay:
    """The last `capacity` transitions, in memory that is set aside once, on a device.

    >>> replay = Replay(2)
    >>> for reward in (1.0, 2.0, 3.0):
    ...     replay.add(torch.zeros(4), 0, reward, torch.ones(4), False)
    >>> len(replay), sorted(replay.rows.reward.tolist())
    (2, [2.0, 3.0])
    """

    capacity: int
    device: torch.device | str = "cpu"
    count: int = 0  # of all that were ever added
    kept: Transitions | None = None

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def add(self, seen: Tensor, action: int, reward: float, after: Tensor, over: bool) -> None:
        if self.kept is None:
            shape, n = tuple(seen.shape), self.capacity
            space = [torch.zeros(s, dtype=d) for s, d in (((n, *shape), seen.dtype), ((n,), torch.long), ((n,), torch.float32))]
            self.kept = Transitions(*(leaf.to(self.device) for leaf in (*space, space[0].clone(), torch.zeros(n))))
        place = self.count % self.capacity
        for leaf, value in zip(self.kept, (seen, action, reward, after, float(over)), strict=True):
            leaf[place] = value
        self.count += 1

    @property
    def rows(self) -> Transitions:
        """All that are kept, in no order."""
        if self.kept is None:
            raise ValueError("nothing was kept yet")
        return Transitions(*(leaf[: len(self)] for leaf in self.kept))

    def sample(self, n: int, generator: torch.Generator) -> Transitions:
        """n of them at random, with replacement."""
        which = torch.randint(len(self), (n,), generator=generator, device=generator.device).to(self.device)
        return Transitions(*(leaf[which] for leaf in self.rows))
