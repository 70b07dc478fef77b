"""Which channels of a network's tensors are one unit, because they can only go together."""

from __future__ import annotations

import numpy as np


class Units:
    """Sets of units that have been joined (union-find).

    >>> units = Units()
    >>> a, b = units.fresh(3), units.fresh(3)
    >>> units.join(a, b)
    >>> bool((units.roots(a) == units.roots(b)).all())
    True
    """

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.pins: list[np.ndarray] = []

    def fresh(self, n: int) -> np.ndarray:
        """n new units, each for itself."""
        start = len(self.parent)
        self.parent.extend(range(start, start + n))
        return np.arange(start, start + n)

    def root(self, unit: int) -> int:
        """The unit that stands for all of its set."""
        parent = self.parent
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    def roots(self, units: np.ndarray) -> np.ndarray:
        """The root of every unit."""
        return np.array([self.root(int(unit)) for unit in units], dtype=np.int64)

    def join(self, a: np.ndarray, b: np.ndarray) -> None:
        """From now on a[i] and b[i] go together."""
        for one, other in zip(a.tolist(), b.tolist(), strict=True):
            p, q = self.root(one), self.root(other)
            if p != q:
                self.parent[max(p, q)] = min(p, q)

    def pin(self, units: np.ndarray) -> None:
        """These stay, whatever the weights."""
        self.pins.append(units)

    @property
    def pinned(self) -> np.ndarray:
        """The roots of all that stay, [U]."""
        pinned = np.zeros(len(self.parent), dtype=bool)
        for units in self.pins:
            pinned[self.roots(units)] = True
        return pinned
