"""Whole numbers in as few bits as can be: what goes in comes out, and the bits are close to the entropy."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.apps.compression.coding import decode, encode, entropy

numbers = st.one_of(st.integers(-20, 20), st.sampled_from([0, 0, 0, 15, 16, -16, 31, 32, 2**31 - 1, -(2**31) + 1]))


@settings(max_examples=40, deadline=None)
@given(arrays=st.lists(st.lists(numbers, max_size=40), max_size=4))
def test_what_goes_in_comes_out(arrays):
    data = encode([np.array(array, dtype=np.int64) for array in arrays])
    assert [array.tolist() for array in decode(data, [len(array) for array in arrays])] == arrays


def draws(n: int, share: float, scale: float) -> np.ndarray:
    """Weights of a sparse layer, as whole numbers."""
    rng = np.random.default_rng(0)
    return np.where(rng.random(n) < share, np.round(rng.normal(size=n) * scale), 0).astype(np.int64)


def huffman(values: np.ndarray) -> int:
    """Bits of an optimal prefix code, with a table of five bits a symbol."""
    heap = [int(count) for count in np.unique(values, return_counts=True)[1]]
    heapq.heapify(heap)
    total = 5 * len(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


def with_gaps(values: np.ndarray) -> int:
    """The other way: distances between numbers that are not zero, and the numbers, each with a prefix code."""
    at = np.flatnonzero(values)
    return huffman(np.diff(at, prepend=-1)) + huffman(values[at])


@pytest.mark.parametrize(("n", "share", "scale"), [(200_000, 0.02, 5), (200_000, 0.2, 5), (200_000, 1.0, 5), (200_000, 0.1, 30)])
def test_close_to_the_entropy(n, share, scale):
    """Within 2 %, and less than gaps and Huffman codes, or Huffman codes alone, take."""
    values = draws(n, share, scale)
    bits = 8 * len(encode([values]))
    assert entropy(values) < bits < 1.02 * entropy(values)
    assert bits < min(with_gaps(values), huffman(values))


def test_small_arrays():
    """Frequencies cost 5 bits a symbol, not more than the numbers."""
    values = draws(2000, 0.5, 4)
    assert 8 * len(encode([values])) < entropy(values) + 500


def test_contexts():
    """Arrays of different kinds do not spoil each other's frequencies."""
    a, b = draws(8000, 0.02, 3), draws(8000, 1.0, 30)
    assert len(encode([a, b])) < 1.01 * (len(encode([a])) + len(encode([b])))
    assert len(encode([a, b])) < len(encode([np.concatenate([a, b])]))


def test_nothing():
    assert decode(encode([]), []) == []
    assert [array.tolist() for array in decode(encode([np.zeros(0, int), np.ones(3, int)]), [0, 3])] == [[], [1, 1, 1]]


def test_refused():
    with pytest.raises(ValueError, match="below 2"):
        encode([np.array([2**31])])
    data = encode([draws(1000, 0.5, 10)])
    with pytest.raises(ValueError, match="cut short or damaged"):
        decode(data[:40], [1000])
