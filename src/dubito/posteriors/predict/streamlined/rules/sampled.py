"""The moments of any operation, by draws of its inputs: slower and noisier than a rule, but there for everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dubito.posteriors.predict.streamlined.moments import Moments, factor_of, residual_of, still, uncertain


def by_draws(func: Callable, n: int, *args: Any, adjoint: bool = False, **kwargs: Any) -> Any:
    """Moments of func over n draws (n / 2 pairs on either side of the mean) of its random inputs, each number on its own but for the
    directions in which they move together. The draws are the same every time; directions of the result are not known."""
    results = []
    for pair, sign in product(range(max(1, n // 2)), (1.0, -1.0)):
        generator = torch.Generator().manual_seed(pair)  # anew for the other side, so that it is the same draw
        given = tree_map(partial(_draw, sign=sign, generator=generator, adjoint=adjoint), (args, kwargs), is_leaf=uncertain)
        results.append(func(*given[0], **given[1]))
    if isinstance(results[0], tuple | list):
        return tuple(_moments(list(values), adjoint) for values in zip(*results, strict=True))
    return _moments(results, adjoint)


class Sampled(nn.Module):
    """`by_draws` as a module of a program, whose code cannot name any function there is."""

    def __init__(self, func: Callable, n: int, adjoint: bool):
        super().__init__()
        self.func, self.n, self.adjoint = func, n, adjoint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Moments of the operation."""
        return by_draws(self.func, self.n, *args, adjoint=self.adjoint, **kwargs)


def _moments(values: list[Tensor], adjoint: bool) -> Moments:
    if not values[0].is_floating_point():
        raise ValueError(
            "an operation that gives whole numbers, such as argmax(), has no mean and variance: predict with how='sampled'"
        )
    mean = sum(values[1:], values[0]) / len(values)
    with still(adjoint):
        var = sum(((value - mean) ** 2 for value in values), torch.zeros_like(mean)) / (len(values) - 1)
    return Moments(mean, var)


def _draw(value: Any, sign: float, generator: torch.Generator, adjoint: bool) -> Any:
    """One draw in the place of everything random."""
    own, factor = residual_of(value), factor_of(value)
    if own is None:
        return value
    with still(adjoint):
        noise = own.sqrt() * torch.randn(own.shape, generator=generator, dtype=own.dtype).to(own.device)
        if factor is not None:
            z = torch.randn(len(factor), generator=generator, dtype=own.dtype).to(own.device)
            noise = noise + torch.tensordot(z, factor, 1)
    return value.mean + sign * noise
