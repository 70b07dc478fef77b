"""Apply a diagnostic to many quantities at once, in pieces: to all weights of a network in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dubito.tensors.checks import require

Diagnostic = Callable[[Tensor], tuple[Tensor, ...]]
NUMBERS = {"cpu": 2**19, "cuda": 2**26}  # numbers in a piece


def map_quantities(function: Diagnostic, draws: Tensor, *, answers: int, least: int = 4) -> tuple[Tensor, ...]:
    """Apply `function` to draws [chains, n, ...], in pieces [P, chains, n] in float64; its `answers`, [P] each, are returned as [...].

    The answer is nan for quantities with a draw that is not finite, for quantities that are equal in all draws (a constant, or chains
    that never moved), and for all quantities if a chain has fewer than `least` draws.
    """
    require(draws.ndim >= 2, f"draws must be [chains, n, ...], with a first axis also for one chain; got {list(draws.shape)}")
    require(not draws.is_complex(), "draws must be real numbers: pass the real and the imaginary part separately")
    (chains, n), shape = draws.shape[:2], draws.shape[2:]
    if chains < 1 or n < least or not draws.numel():
        return (torch.full(shape, math.nan, dtype=torch.float64, device=draws.device),) * answers
    flat = draws.detach().reshape(chains * n, -1)
    size = max(1, NUMBERS.get(draws.device.type, 2**22) // (chains * n))
    results = [_mask_undefined(function, piece.T.contiguous().double().view(-1, chains, n)) for piece in flat.split(size, 1)]
    return tuple(torch.cat(values).reshape(shape) for values in zip(*results, strict=True))


def map_quantity(function: Callable[[Tensor], Tensor], draws: Tensor, *, least: int = 4) -> Tensor:
    """`map_quantities` for a function with one answer."""
    return map_quantities(lambda x: (function(x),), draws, answers=1, least=least)[0]


def _mask_undefined(function: Diagnostic, x: Tensor) -> tuple[Tensor, ...]:
    low, high = x.amin((1, 2)), x.amax((1, 2))  # nan where a draw is
    defined = torch.isfinite(low) & torch.isfinite(high) & (low < high)
    return tuple(answer.masked_fill(~defined, math.nan) for answer in function(x))


def split_chains(x: Tensor) -> Tensor:
    """Both halves of every chain as separate chains, [P, 2 chains, n // 2]; an odd n loses its middle draw."""
    half = x.shape[-1] // 2
    if x.shape[-1] == 2 * half:
        return x.view(len(x), -1, half)
    return torch.cat([x[..., :half], x[..., -half:]], 1)
