"""A process's share of a batch that several processes have in common, and random numbers that do not depend on how it is divided.

What is drawn for the examples of a batch is drawn for all of them on every process, from generators in the same state, and each takes
the numbers of its own examples: then any number of processes draws what one draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = Sequence[int]
_SHARE: ContextVar[Share | None] = ContextVar("share", default=None)


@dataclass(frozen=True)
class Share:
    """The rows of a common batch that this process has.

    Where there is no example for it, it still takes part, with a row that stands in for one: the first `idle` rows count for nothing.
    """

    rows: tuple[range, ...]  # in the common batch, in the order in which they are here
    total: int  # rows of the common batch
    idle: int = 0

    @staticmethod
    def of(total: int, rank: int, size: int) -> Share:
        """The part of `rank` of a batch cut into `size` nearly equal parts.

        >>> Share.of(5, 0, 2).rows, Share.of(5, 1, 2).rows, Share.of(1, 0, 2)
        ((range(0, 2),), (range(2, 5),), Share(rows=(range(0, 1),), total=1, idle=1))
        """
        own = range(total * rank // size, total * (rank + 1) // size)
        return Share((own,), total) if own else Share((range(1),), total, idle=1)

    @property
    def count(self) -> int:
        """Rows that are here, with those that stand in."""
        return sum(map(len, self.rows))

    def followed_by(self, other: Share) -> Share:
        """The share of two batches, one after the other."""
        later = tuple(range(rows.start + self.total, rows.stop + self.total) for rows in other.rows)
        return Share((*self.rows, *later), self.total + other.total, self.idle)

    def axis(self, shape: Shape) -> int | None:
        """Along which of the first two axes the examples are; also where each has several rows, one after the other."""
        if shape and shape[0] == self.count:
            return 0
        if len(shape) > 1 and shape[1] == self.count:
            return 1
        return 0 if shape and shape[0] and shape[0] % self.count == 0 else None

    def take(self, whole: Tensor, axis: int = 0) -> Tensor:
        """The rows of this process."""
        each = whole.shape[axis] // self.total
        parts = [whole.narrow(axis, rows.start * each, len(rows) * each) for rows in self.rows]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, axis)  # not a view, which would keep the whole

    def draw(self, draw: Callable[[Shape], Tensor], shape: Shape, axis: int = 0) -> Tensor:
        """What `draw` gives for this shape, as part of what it gives for the common batch."""
        each = shape[axis] // self.count
        return self.take(draw((*shape[:axis], self.total * each, *shape[axis + 1 :])), axis)

    def pad(self, x: Tensor) -> Tensor:
        """The common batch with this process's rows in their places, and its first row in all others."""
        whole, first = x[:1].expand(self.total, *x.shape[1:]).clone(), 0
        for rows in self.rows:
            whole[rows.start : rows.stop] = x[first : first + len(rows)]
            first += len(rows)
        return whole

    def alone(self, x: Tensor) -> Tensor:
        """The common batch with the rows that count in their places, and zero in all others: the sum over processes is all of it."""
        whole, first = x.new_zeros(self.total, *x.shape[1:]), 0
        for rows in self.rows:
            if first >= self.idle:
                whole[rows.start : rows.stop] = x[first : first + len(rows)]
            first += len(rows)
        return whole


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """In this block `draw_rows` draws for a share."""
    token = _SHARE.set(share)
    try:
        yield
    finally:
        _SHARE.reset(token)


def draw_rows(draw: Callable[[Shape], Tensor], shape: Shape, axis: int = 0) -> Tensor:
    """`draw(shape)`, numbers for examples along an axis; within `sharing`, those of this process's share.

    >>> draw_rows(torch.zeros, (2, 3)).shape
    torch.Size([2, 3])
    """
    share = _SHARE.get()
    if share is None or shape[axis] % share.count or not shape[axis]:
        return draw(shape)
    return share.draw(draw, shape, axis)


def draw_given(draw: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`draw(x)`, random numbers for the rows of x that depend on them; within `sharing`, those of this process's share."""
    share = _SHARE.get()
    return draw(x) if share is None or len(x) != share.count else share.take(draw(share.pad(x)))
