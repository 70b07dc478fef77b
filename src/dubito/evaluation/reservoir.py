"""A random part of more rows than are to be kept, from one pass over batches of them."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.tensors.randomness import generator


class Reservoir:
    """Rows of one or several tensors, at most `most` of them: every row has the same chance to be kept, and their order stays.

    Memory is that of twice as many rows, however many there are. The same seed and the same number of rows keep the same ones.

    >>> some = Reservoir(3, seed=0)
    >>> for batch in torch.arange(100).split(7):
    ...     some.add(batch, -batch)
    >>> rows, negative = some.rows()
    >>> len(rows), bool((rows == -negative).all()), bool((rows.diff() > 0).all())
    (3, True, True)
    """

    def __init__(self, most: int | None = None, *, seed: int = 0):
        self.most, self.count, self.limit = most, 0, 1.0
        self.source = generator("cpu", seed, "reservoir")
        self.parts: list[tuple[Tensor, ...]] = []  # keys, and the tensors
        self.held = 0

    def add(self, *tensors: Tensor) -> None:
        """Tensors with a row for each of the same things, [n, ...]."""
        n = len(tensors[0])
        if self.most is None:
            self.count, self.held = self.count + n, self.held + n
            self.parts.append((torch.zeros(0), *tensors))
            return
        # the rows with the least keys are those that are kept
        keys = torch.rand(n, generator=self.source, dtype=torch.float64)
        if self.count >= self.most:
            some = (keys < self.limit).nonzero().squeeze(1)
            keys, tensors = keys[some], tuple(t[some.to(t.device)] for t in tensors)
        self.parts.append((keys, *tensors))
        self.count, self.held = self.count + n, self.held + len(keys)
        if self.held >= 2 * self.most:
            self._thin()

    def _thin(self) -> None:
        assert self.most is not None
        keys, *tensors = (torch.cat(each) for each in zip(*self.parts, strict=True))
        least = torch.topk(keys, min(self.most, len(keys)), largest=False).indices.sort().values
        self.parts = [(keys[least], *(t[least.to(t.device)] for t in tensors))]
        self.held = len(least)
        self.limit = float(keys[least].max()) if self.held == self.most else 1.0

    def rows(self) -> tuple[Tensor, ...]:
        """What was kept, a tensor for each of those that were added; nothing if none was."""
        if not self.parts:
            return ()
        if self.most is not None and self.held > self.most:
            self._thin()
        return tuple(torch.cat(each) for each in list(zip(*self.parts, strict=True))[1:])
