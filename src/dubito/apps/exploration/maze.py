"""A small maze with the interface of gymnasium, which it does not need."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dubito.tensors.randomness import generator

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left

ROOMS = """
S....#....
.....#....
.....#....
..........
.....#....
##.####.##
.....#....
.....#....
..........
.....#...G
"""


@dataclass(frozen=True)
class Discrete:
    """A set of n actions, 0 to n - 1: as much of `gymnasium.spaces.Discrete` as is needed."""

    n: int


@dataclass(frozen=True)
class Box:
    """Vectors of numbers from low to high: as much of `gymnasium.spaces.Box` as is needed."""

    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0


class Maze:
    """A grid with walls (#), a start (S) and a goal (G). Four moves; what runs into a wall stays where it is.

    The goal pays 1 and ends the episode, all other steps pay `cost`, and after `limit` steps the episode is cut off (None: four times
    the number of free cells). What is seen is the cell: a vector with a one at its place. With a chance of `slip` a step goes anywhere.

    >>> maze = Maze("S.G")
    >>> seen, _ = maze.reset(seed=0)
    >>> seen
    array([1., 0., 0.], dtype=float32)
    >>> [maze.step(1)[1:4] for _ in range(2)]
    [(0.0, False, False), (1.0, True, False)]
    """

    def __init__(self, plan: str = ROOMS, *, cost: float = 0.0, slip: float = 0.0, limit: int | None = None):
        rows = plan.split()
        if (
            len({len(row) for row in rows}) != 1
            or plan.count("S") != 1
            or plan.count("G") != 1
            or set("".join(rows)) - set("S.G#")
        ):
            raise ValueError("a maze is lines of equal length of '.', '#', one 'S' and one 'G'")
        if not 0 <= slip < 1 or (limit is not None and limit < 1):
            raise ValueError(f"slip is a chance in [0, 1) and limit at least 1; got {slip} and {limit}")
        cells = [(i, j) for i, row in enumerate(rows) for j, mark in enumerate(row) if mark != "#"]
        self.plan, self.cost, self.slip = rows, cost, slip
        self.cells = {cell: number for number, cell in enumerate(cells)}
        marks = {rows[i][j]: number for (i, j), number in self.cells.items()}
        self.start, self.goal = marks["S"], marks["G"]
        self.next = np.array(
            [[self.cells.get((i + di, j + dj), self.cells[i, j]) for di, dj in MOVES] for i, j in cells]
        )  # [cells, 4]
        self.limit = 4 * len(cells) if limit is None else limit
        self.action_space, self.observation_space = Discrete(len(MOVES)), Box((len(cells),))
        if self.shortest < 0:
            raise ValueError("no way leads from the start to the goal of this maze")
        self._at, self._steps, self._source = self.start, 0, generator("cpu", 0, "maze")

    def __len__(self) -> int:
        """Free cells: the width of what is seen."""
        return len(self.cells)

    @property
    def shortest(self) -> int:
        """Steps from the start to the goal by the shortest way; -1 where there is none."""
        known, waiting = {self.start: 0}, deque([self.start])
        while waiting:
            here = waiting.popleft()
            for there in self.next[here].tolist():
                if there not in known:
                    known[there] = known[here] + 1
                    waiting.append(there)
        return known.get(self.goal, -1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._source = generator("cpu", seed, "maze")
        self._at, self._steps = self.start, 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not 0 <= int(action) < len(MOVES):
            raise ValueError(f"the moves are 0 to {len(MOVES) - 1}: up, right, down, left; got {action}")
        if self.slip:
            import torch

            chance, other = torch.rand(2, generator=self._source).tolist()
            action = int(other * len(MOVES)) if chance < self.slip else action
        self._at, self._steps = int(self.next[self._at, int(action)]), self._steps + 1
        there = self._at == self.goal
        return self._seen(), 1.0 if there else self.cost, there, not there and self._steps >= self.limit, {}

    def _seen(self) -> np.ndarray:
        seen = np.zeros(len(self), dtype=np.float32)
        seen[self._at] = 1
        return seen

    def close(self) -> None:
        pass
