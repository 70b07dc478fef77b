r"""Weights in as many bits as the posterior allows, and whole numbers in about as many bits as their entropy.

A weight that is known up to a standard deviation :math:`\sigma` needs no more digits than that. All weights of a tensor are whole
multiples of one step

.. math:: \Delta = \tfrac12\, 2^{1 - t} \le s \Big( \frac1n \sum_i \sigma_i^{-2} \Big)^{-1/2},

the unit round-off of t bits, at most s standard deviations. The mean is over precisions, so that rounding n weights costs at most
:math:`n s^2 / 24` nats of log posterior density, in expectation. The shortest description of data and weights together has
:math:`s = \sqrt{12}`, where a bit saved in a weight costs as much in the error (Hinton & van Camp 1993); a network that was not trained
with noise on its weights wants finer steps to stay as good as it was.

The coder is a range coder with asymmetric numeral systems (rANS). A number becomes a symbol. Small ones have a symbol each;
larger ones share one with those of the same sign, the same number of bits and the same second bit, and their lower bits, which
are close to uniform, are written as they are. Numbers come in contexts, each with frequencies of its own, written in half powers
of two (five bits a symbol, and .007 bits a number lost). A state x takes in a symbol that has f of the M = 2^14 places, from c
on, by

.. math:: x \leftarrow M \lfloor x / f \rfloor + c + (x \bmod f),

so that it grows by a factor M / f, :math:`-\log_2 p` bits. Many states run side by side in one numpy array, which makes it fast;
how many is chosen so that what they leave behind is less than a hundredth of the whole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dubito.tensors.checks import require
from dubito.tensors.tree import Params

FINEST = 23  # bits below the leading one, those of a float32


def exponents(mean: Params, variance: Params, *, step: float = 1.0) -> dict[str, int]:
    """By weight, the t of its step 2^-t. Weights that are zero do not count, unless all are, nor do those without variance. A tensor
    without any has no step: it is not to be rounded.

    >>> import torch
    >>> exponents({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.04, 0.04])})      # 2^-3 is the first below 0.2
    {'w': 3}
    """
    require(step > 0, f"step must be a positive number of posterior standard deviations; got {step}")
    steps = {}
    for name, leaf in variance.items():
        value, spread = mean[name].detach().double(), leaf.detach().double()
        largest = float(value.abs().max()) if value.numel() else 0.0
        counts = (spread > 0) & ((value != 0) | (largest == 0))
        if not bool(counts.any()):
            continue
        width = step * float((1 / spread[counts]).mean()) ** -0.5
        finest = FINEST - math.floor(math.log2(largest)) if largest else 120
        steps[name] = min(math.ceil(-math.log2(width) - 1e-9), finest, 120)
    return steps


def whole(value: Tensor, t: int) -> Tensor:
    """The multiples of 2^-t that are nearest, as whole numbers in float64."""
    return (value.detach().double() * 2.0**t).round()


def rounded(value: Tensor, t: int) -> Tensor:
    """The nearest multiples of 2^-t.

    >>> import torch
    >>> rounded(torch.tensor([0.3, -0.6]), 1)
    tensor([ 0.5000, -0.5000])
    """
    return (whole(value, t) * 2.0**-t).to(value.dtype)


def width(value: Tensor, t: int | None) -> int:
    """Bits for each number of a tensor: a sign and the magnitude; of one that was not rounded, those of its dtype."""
    if t is None:
        return 8 * value.dtype.itemsize
    largest = int(whole(value, t).abs().max()) if value.numel() else 0
    return 1 + largest.bit_length() if largest else 0


DIRECT = 16  # numbers below have a symbol of their own
PLACES = 14  # log2 M
LOW = 16  # a state has from 16 to 32 bits
SYMBOLS = 2 * DIRECT - 1 + 4 * 27  # up to 31 bits
LEVELS = np.array([0, *(round(2 ** (level / 2)) for level in range(31))])  # frequencies, by the five bits that stand for them
HEADER = struct.Struct("<HII")


def encode(numbers: Sequence[np.ndarray]) -> bytes:
    """Arrays of whole numbers, each a context, as bytes; their lengths are not part of them.

    >>> data = encode([np.array([0, 0, 0, 5, 0, -3000]), np.array([1, 1])])
    >>> [array.tolist() for array in decode(data, [6, 2])]
    [[0, 0, 0, 5, 0, -3000], [1, 1]]
    """
    arrays = [np.asarray(array, dtype=np.int64).reshape(-1) for array in numbers]
    require(all(np.abs(array).max(initial=0) < 2**31 for array in arrays), "numbers to code must be below 2^31")
    if not arrays:
        return b""
    symbols, extra, counts = zip(*(_symbols(array) for array in arrays), strict=True)
    levels = [_levels(symbol) for symbol in symbols]
    tables = np.concatenate([[0], *(np.r_[_bits(np.array([len(level)]), 8), _bits(level, 5)] for level in levels)])[1:]
    contexts = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
    frequency, start = _places(levels)
    flat = np.concatenate([[0], *symbols])[1:].astype(np.int64)
    cost = float(np.sum(PLACES - np.log2(frequency[contexts, flat]))) if len(flat) else 0.0
    lanes = int(min(1024, max(1, cost // 12800, len(flat) // 20_000)))
    states, words = _push(frequency[contexts, flat], start[contexts, flat], lanes)
    low = np.concatenate([[0], *(_bits(lower, count) for lower, count in zip(extra, counts, strict=True))])[1:]
    head = np.packbits(np.concatenate([tables, low]).astype(np.uint8)).tobytes()
    return HEADER.pack(lanes, len(words), len(head)) + states.astype("<u4").tobytes() + words.astype("<u2").tobytes() + head


def decode(data: bytes, sizes: Sequence[int]) -> list[np.ndarray]:
    """The arrays that `encode` was given."""
    if not sizes:
        return []
    try:
        lanes, count, packed = HEADER.unpack_from(data)
        at = HEADER.size
        states = np.frombuffer(data, "<u4", lanes, at).astype(np.uint64)
        words = np.frombuffer(data, "<u2", count, at + 4 * lanes).astype(np.uint64)
        bits = np.unpackbits(np.frombuffer(data, np.uint8, packed, at + 4 * lanes + 2 * count))
        levels, place = [], 0
        for _ in sizes:
            n = int(_numbers(bits[place : place + 8], 8)[0])
            levels.append(_numbers(bits[place + 8 : place + 8 + 5 * n], 5))
            place += 8 + 5 * n
        contexts = np.repeat(np.arange(len(sizes)), sizes)
        symbols = _pull(contexts, levels, states, words)
        return np.split(_joined(symbols, bits[place:]), np.cumsum(sizes)[:-1])
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"coded numbers that are cut short or damaged ({error})") from None


def entropy(numbers: np.ndarray) -> float:
    """Bits that numbers drawn independently with these frequencies need, all together.

    >>> entropy(np.array([0, 0, 1, 1]))
    4.0
    """
    counts = np.unique(numbers, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) if len(counts) else 0.0


def _symbols(array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symbols, and the lower bits of large numbers with their count."""
    size, negative = np.abs(array), (array < 0).astype(np.int64)
    small = np.where(size == 0, 0, 2 * size - 1 + negative)
    length = np.frexp(np.maximum(size, 1).astype(np.float64))[1].astype(np.int64)  # bits of the number
    second = size >> np.maximum(length - 2, 0) & 1
    large = 2 * DIRECT - 1 + 4 * (length - 5) + 2 * second + negative
    big = size >= DIRECT
    count = (length - 2)[big]
    return np.where(big, large, small), size[big] & ((1 << count) - 1), count


def _joined(symbols: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The inverse: numbers from symbols and lower bits."""
    big = symbols >= 2 * DIRECT - 1
    code = np.where(big, symbols - (2 * DIRECT - 1), 0)
    size, negative = (symbols + 1) // 2, np.where(big, code & 1, (symbols % 2 == 0) & (symbols > 0))
    length = code // 4 + 5
    low = _numbers(bits, np.where(big, length - 2, 0))
    size = np.where(big, (2 + (code >> 1 & 1) << length - 2) + low, size)
    return np.where(negative, -size, size)


def _bits(numbers: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """Numbers as bits, the highest first, `count` for each."""
    counts = np.broadcast_to(np.asarray(count), numbers.shape)
    which = np.repeat(np.arange(len(numbers)), counts)
    place = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(int(counts.sum()))
    return (numbers[which] >> place & 1).astype(np.uint8)


def _numbers(bits: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """The inverse of `_bits`; bits that are left over are not read."""
    counts = np.full(len(bits) // count, count) if isinstance(count, int) else count
    total = int(counts.sum())
    require(total <= len(bits), "too few bits")
    which = np.repeat(np.arange(len(counts)), counts)
    place = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(total)
    return np.bincount(which, bits[:total].astype(np.float64) * 2.0**place, minlength=len(counts)).astype(np.int64)


def _levels(symbols: np.ndarray) -> np.ndarray:
    """Frequencies on the scale of `LEVELS`, relative to the largest."""
    counts = np.bincount(symbols, minlength=1)
    levels = np.zeros(len(counts), dtype=np.int64)
    there = counts > 0
    levels[there] = np.clip(np.round(31 + 2 * np.log2(counts[there] / max(1, counts.max()))), 1, 31)
    return levels


def _places(levels: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """How many of the M places each symbol has in each context, and where they begin."""
    frequency = np.zeros((len(levels), SYMBOLS), dtype=np.int64)
    for k, level in enumerate(levels):
        weight = LEVELS[level]
        if not weight.any():
            continue
        share = np.where(weight > 0, np.maximum(1, weight * ((1 << PLACES) - 256) // weight.sum()), 0)
        share[np.argmax(share)] += (1 << PLACES) - share.sum()
        frequency[k, : len(level)] = share
    return frequency, np.cumsum(frequency, 1) - frequency


def _push(frequency: np.ndarray, start: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """All symbols into the states, the last ones first, so that they come out in order."""
    states, rows = np.full(lanes, 1 << LOW, dtype=np.uint64), []
    for begin in range((len(frequency) - 1) // lanes * lanes, -1, -lanes) if len(frequency) else ():
        f = frequency[begin : begin + lanes].astype(np.uint64)
        c = start[begin : begin + lanes].astype(np.uint64)
        x = states[: len(f)]
        full = x >= f << np.uint64(32 - PLACES)
        rows.append((x[full] & np.uint64(0xFFFF)).astype(np.uint16))
        x = np.where(full, x >> np.uint64(16), x)
        states[: len(f)] = (x // f << np.uint64(PLACES)) + x % f + c
    return states, np.concatenate([np.zeros(0, np.uint16), *reversed(rows)])


def _pull(contexts: np.ndarray, levels: Sequence[np.ndarray], states: np.ndarray, words: np.ndarray) -> np.ndarray:
    frequency, start = _places(levels)
    lookup = np.stack([np.repeat(np.arange(SYMBOLS), f) if f.any() else np.zeros(1 << PLACES, int) for f in frequency])
    symbols, lanes, at = np.zeros(len(contexts), dtype=np.int64), len(states), 0
    for begin in range(0, len(contexts), lanes):
        context = contexts[begin : begin + lanes]
        x = states[: len(context)]
        place = (x & np.uint64((1 << PLACES) - 1)).astype(np.int64)
        symbol = lookup[context, place]
        f, c = frequency[context, symbol], start[context, symbol]
        x = f.astype(np.uint64) * (x >> np.uint64(PLACES)) + (place - c).astype(np.uint64)
        low = x < 1 << LOW
        read = words[at : at + int(low.sum())]
        x[low] = (x[low] << np.uint64(16)) + read
        states[: len(context)], at = x, at + len(read)
        symbols[begin : begin + lanes] = symbol
    return symbols
