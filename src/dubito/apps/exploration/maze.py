"""A small maze with the interface of gymnasium, without needing that package."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from dubito.tensors.checks import at_least, between, require
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
    """A set of n actions, 0 to n - 1, with the attribute of `gymnasium.spaces.Discrete`."""

    n: int


@dataclass(frozen=True)
class Box:
    """Arrays of numbers from low to high, with the attributes of `gymnasium.spaces.Box`."""

    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0


class Maze:
    """A grid with walls (#), a start (S) and a goal (G), and four moves; a move into a wall has no effect.

    The goal pays 1 and ends the episode, all other steps pay `cost`, and after `limit` steps the episode is truncated (None: four times
    the number of free cells). The observation is the cell, one-hot encoded. With probability `slip` a move is random.

    >>> maze = Maze("S.G")
    >>> maze.reset(seed=0)[0]
    array([1., 0., 0.], dtype=float32)
    >>> [maze.step(1)[1:4] for _ in range(2)]
    [(0.0, False, False), (1.0, True, False)]
    """

    def __init__(self, plan: str = ROOMS, *, cost: float = 0.0, slip: float = 0.0, limit: int | None = None):
        rows = plan.split()
        valid = len({len(row) for row in rows}) == 1 and set("".join(rows)) <= set("S.G#")
        valid = valid and plan.count("S") == plan.count("G") == 1
        require(valid, "a maze must be lines of equal length made of '.', '#', one 'S' and one 'G'")
        between(0, 1, slip=slip, include="low")
        at_least(1, limit=limit)
        cells = [(i, j) for i, row in enumerate(rows) for j, mark in enumerate(row) if mark != "#"]
        self.plan, self.cost, self.slip = rows, cost, slip
        self.cells = {cell: number for number, cell in enumerate(cells)}
        marks = {rows[i][j]: number for (i, j), number in self.cells.items()}
        self.start, self.goal = marks["S"], marks["G"]
        neighbours = [[self.cells.get((i + di, j + dj), self.cells[i, j]) for di, dj in MOVES] for i, j in cells]
        self.next = np.array(neighbours)  # [cells, 4]
        self.limit = 4 * len(cells) if limit is None else limit
        self.action_space, self.observation_space = Discrete(len(MOVES)), Box((len(cells),))
        require(self.shortest >= 0, "the goal of the maze cannot be reached from the start")
        self._cell, self._steps, self._source = self.start, 0, generator("cpu", 0, "maze")

    def __len__(self) -> int:
        """The number of free cells, which is the width of an observation."""
        return len(self.cells)

    @property
    def shortest(self) -> int:
        """The number of steps of the shortest path from the start to the goal; -1 if there is none."""
        distance, waiting = {self.start: 0}, deque([self.start])
        while waiting:
            cell = waiting.popleft()
            for neighbour in self.next[cell].tolist():
                if neighbour not in distance:
                    distance[neighbour] = distance[cell] + 1
                    waiting.append(neighbour)
        return distance.get(self.goal, -1)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode: the first observation, and an empty dict."""
        if seed is not None:
            self._source = generator("cpu", seed, "maze")
        self._cell, self._steps = self.start, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move: the observation, the reward, whether the episode has ended, whether it was truncated, and an empty dict."""
        require(0 <= int(action) < len(MOVES), f"moves are 0 to {len(MOVES) - 1} (up, right, down, left); got {action}")
        if self.slip:
            chance, other = torch.rand(2, generator=self._source).tolist()
            action = int(other * len(MOVES)) if chance < self.slip else action
        self._cell, self._steps = int(self.next[self._cell, int(action)]), self._steps + 1
        terminated = self._cell == self.goal
        truncated = not terminated and self._steps >= self.limit
        return self._observation(), 1.0 if terminated else self.cost, terminated, truncated, {}

    def _observation(self) -> np.ndarray:
        return np.eye(1, len(self), self._cell, dtype=np.float32)[0]

    def close(self) -> None:
        """Does nothing; part of gymnasium's interface."""
