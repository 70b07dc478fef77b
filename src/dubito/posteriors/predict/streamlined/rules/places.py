"""Operations that put numbers into places of another tensor, or add them up there: linear in both, the places certain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.moments import (
    Moments,
    Value,
    factor_of,
    linear_map,
    mean_of,
    residual_of,
    rule,
    still,
    uncertain,
    widen,
)
from dubito.tensors.checks import require

Placing = Callable[[Tensor, Any], Tensor]


def placed(function: Placing, x: Value, source: Value | float, adjoint: bool, squared: Placing | None = None) -> Moments:
    """function(x, source), which is linear in both together; `squared`: the same with squared coefficients."""
    a, b = (t if isinstance(t, Tensor) or uncertain(t) else torch.tensor(t, device=mean_of(x).device) for t in (x, source))
    mean = function(mean_of(a), mean_of(b))
    with still(adjoint):
        zeros = [torch.zeros_like(mean_of(t)) for t in (a, b)]
        own = [zero if (v := residual_of(t)) is None else v for t, zero in zip((a, b), zeros, strict=True)]
        var, factor = (squared or function)(*own), None
        if factor_of(a) is not None or factor_of(b) is not None:
            sides = [zero.unsqueeze(0) if (u := factor_of(t)) is None else u for t, zero in zip((a, b), zeros, strict=True)]
            factor = vmap(function)(*widen(sides))
            var = var + factor.square().sum(0)
    return Moments(mean, var, factor)


def set_item(x: Tensor, index: Any, value: Tensor | float) -> Tensor:
    """A copy of x with x[index] = value."""
    x = x.clone()
    x[index] = value
    return x


@rule("setitem")
def setitem(x: Value, index: Any, value: Value | float, *, adjoint: bool = False) -> Moments:
    """x with x[index] = value: the moments of the one that is there."""
    return placed(lambda t, u: set_item(t, index, u.to(t.dtype)), x, value, adjoint)


@rule("index_put")
def index_put(x: Value, indices: Any, values: Value, accumulate: bool = False, *, adjoint: bool = False) -> Moments:
    """The same, of indices by axis; with `accumulate` values are added."""
    return placed(lambda t, u: torch.index_put(t, tuple(indices), u, accumulate), x, values, adjoint)


@rule("index_add")
def index_add(x: Value, dim: int, index: Tensor, source: Value, *, alpha: float = 1, adjoint: bool = False) -> Moments:
    """x, to whose rows alpha * source is added."""

    def _squared(v: Tensor, s: Tensor) -> Tensor:
        return torch.index_add(v, dim, index, s, alpha=alpha**2)

    return placed(lambda t, u: torch.index_add(t, dim, index, u, alpha=alpha), x, source, adjoint, _squared)


@rule("scatter_add")
def scatter_add(x: Value, dim: int, index: Tensor, src: Value, *, adjoint: bool = False) -> Moments:
    """x, to whose numbers those of `src` are added."""
    return placed(lambda t, u: torch.scatter_add(t, dim, index, u), x, src, adjoint)


@rule("scatter")
def scatter(
    x: Value, dim: int, index: Tensor, src: Value | float | None = None, *, value: float = 0.0, reduce: None = None,
    adjoint: bool = False,
) -> Moments:  # fmt: skip
    """x with numbers of `src` in the places that `index` tells, each place at most once."""
    require(
        reduce is None, f"scatter(reduce={reduce!r}) has no rule for one pass: use scatter_add, or predict with how='sampled'"
    )
    source = value if src is None else src

    def _put(t: Tensor, u: Tensor) -> Tensor:
        return torch.scatter(t, dim, index, u.to(t.dtype).expand(index.shape) if u.ndim == 0 else u)

    return placed(_put, x, source, adjoint)


@rule("cumsum")
def cumsum(x: Moments, dim: int, *, dtype: None = None, adjoint: bool = False) -> Moments:
    """Variances add up as numbers do."""
    require(dtype is None, f"cumsum(dtype={dtype}) has no rule for one pass: write x.to(dtype) before it")
    dim = dim if dim < 0 else dim - x.mean.ndim
    with still(adjoint):
        found = linear_map(lambda t: t.cumsum(dim), x, squared=lambda v: v.cumsum(dim))
    return found._replace(mean=x.mean.cumsum(dim))
