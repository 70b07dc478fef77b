"""Many quantities at once, in pieces: all weights of a network in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NUMBERS = {"cpu": 2**19, "cuda": 2**26}  # in a piece


def each(function: Callable[[Tensor], tuple[Tensor, ...]], draws: Tensor, *, answers: int, least: int = 4) -> tuple[Tensor, ...]:
    """`function` of pieces [P, chains, n] in float64, for draws [chains, n, ...]: its `answers`, [P] each, as [...].

    Three kinds of quantities have no answer, and it is nan: those with a draw that is not finite, those that are the same in all draws
    (a constant, or chains that never moved: nobody can tell), and all where a chain has fewer than `least` draws.
    """
    if draws.ndim < 2:
        raise ValueError(f"draws are [chains, n, ...], with an axis for the chains even if there is one; got {list(draws.shape)}")
    if draws.is_complex():
        raise ValueError("draws are real numbers; look at the real and the imaginary part of complex ones")
    (chains, n), shape = draws.shape[:2], draws.shape[2:]
    if chains < 1 or n < least or not draws.numel():
        return (torch.full(shape, math.nan, dtype=torch.float64, device=draws.device),) * answers
    flat = draws.detach().reshape(chains * n, -1)
    size = max(1, NUMBERS.get(draws.device.type, 2**22) // (chains * n))
    found = [_checked(function, piece.T.contiguous().double().view(-1, chains, n)) for piece in flat.split(size, 1)]
    return tuple(torch.cat(parts).reshape(shape) for parts in zip(*found, strict=True))


def one(function: Callable[[Tensor], Tensor], draws: Tensor, *, least: int = 4) -> Tensor:
    """`each` of a function with one answer."""
    return each(lambda x: (function(x),), draws, answers=1, least=least)[0]


def _checked(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    low, high = x.amin((1, 2)), x.amax((1, 2))  # nan where there is one
    known = torch.isfinite(low) & torch.isfinite(high) & (low < high)
    return tuple(answer.masked_fill(~known, math.nan) for answer in function(x))


def halves(x: Tensor) -> Tensor:
    """The first and the last half of every chain as chains of their own, [P, 2 chains, n // 2]; of an odd n, without the middle."""
    half = x.shape[-1] // 2
    if x.shape[-1] == 2 * half:
        return x.view(len(x), -1, half)
    return torch.cat([x[..., :half], x[..., -half:]], 1)
