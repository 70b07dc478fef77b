"""Work that must be done by some time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SHARE = 0.1  # of the work, after which the time of the rest is foretold


def in_time(items: Sequence[T], end: float) -> Iterator[T]:
    """The items one by one, and a TimeoutError as soon as it is clear that `time.monotonic()` will reach the end before all are done.

    >>> list(in_time("abc", time.monotonic() + 60))
    ['a', 'b', 'c']
    """
    started = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        rest = (now - started) / done * (len(items) - done) if done and done >= SHARE * len(items) else 0.0
        if now + rest > end:
            raise TimeoutError
        yield item
