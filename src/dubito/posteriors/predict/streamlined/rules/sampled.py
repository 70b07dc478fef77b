"""Any operation, by draws of what goes in: slower and noisier than a rule, but there for everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.posteriors.predict.streamlined.moments import Moments, Weight, residual, still


def by_draws(func: Callable, n: int, *args: Any, adjoint: bool = False, **kwargs: Any) -> Any:
    """Moments of func over n draws (n / 2 pairs on either side of the mean) of its random inputs, each number on its own but for the
    directions in which they move together. The draws are the same every time; directions of the result are not known."""
    draws = [(pair, sign) for pair in range(max(1, n // 2)) for sign in (1.0, -1.0)]
    results = []
    for pair, sign in draws:
        generator = torch.Generator().manual_seed(pair)  # anew for the other side, so that it is the same draw
        given = _drawn((args, kwargs), sign, generator, adjoint)
        results.append(func(*given[0], **given[1]))
    if isinstance(results[0], tuple | list):
        return tuple(_moments(list(values), adjoint) for values in zip(*results, strict=True))
    return _moments(results, adjoint)


class Sampled(nn.Module):
    """The same as a part of a program, whose code cannot name any function there is."""

    def __init__(self, func: Callable, n: int, adjoint: bool):
        super().__init__()
        self.func, self.n, self.adjoint = func, n, adjoint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return by_draws(self.func, self.n, *args, adjoint=self.adjoint, **kwargs)


def _moments(values: list[Tensor], adjoint: bool) -> Any:
    if not values[0].is_floating_point():
        raise ValueError("an operation that gives whole numbers (such as an index of what is largest) has no mean and variance")
    mean = sum(values[1:], values[0]) / len(values)
    with still(adjoint):
        var = sum(((value - mean) ** 2 for value in values), torch.zeros_like(mean)) / (len(values) - 1)
    return Moments(mean, var)


def _drawn(value: Any, sign: float, generator: torch.Generator, adjoint: bool) -> Any:
    """One draw in the place of everything random."""
    if isinstance(value, Moments | Weight):
        with still(adjoint):
            own = residual(value) if isinstance(value, Moments) else value.var
            noise = own.sqrt() * torch.randn(own.shape, generator=generator, dtype=own.dtype).to(own.device)
            if isinstance(value, Moments) and value.factor is not None:
                z = torch.randn(len(value.factor), generator=generator, dtype=own.dtype).to(own.device)
                noise = noise + torch.tensordot(z, value.factor, 1)
        return value.mean + sign * noise
    if isinstance(value, dict):
        return {key: _drawn(item, sign, generator, adjoint) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_drawn(item, sign, generator, adjoint) for item in value)
    return value
