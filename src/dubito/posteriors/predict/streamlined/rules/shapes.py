"""Operations that only move numbers about: each does the same to means, variances and directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.moments import Moments, Weight
from dubito.posteriors.predict.streamlined.registry import rule


def moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of such an operation."""

    def apply(x: Moments | Weight, *args: Any, **kwargs: Any) -> Any:
        def one(value: Tensor) -> Any:
            return function(value, *args, **kwargs)

        mean, var = one(x.mean), one(x.var)
        factor = None if isinstance(x, Weight) or x.factor is None else vmap(one)(x.factor)
        if isinstance(mean, tuple | list):
            factors = [None] * len(mean) if factor is None else factor
            return tuple(Moments(*parts) for parts in zip(mean, var, factors, strict=True))
        return Moments(mean, var, factor)

    return apply


METHODS = (
    "view", "reshape", "flatten", "transpose", "permute", "movedim", "swapaxes", "t", "squeeze", "unsqueeze", "expand",
    "expand_as", "view_as", "contiguous", "clone", "chunk", "split", "unbind", "narrow", "select", "flip", "roll", "repeat",
    "repeat_interleave", "index_select", "gather", "detach", "to", "type_as", "float", "double", "half", "bfloat16", "tile", "diagonal",
)  # fmt: skip
for _name in METHODS:
    rule(_name)(moved(getattr(torch.Tensor, _name)))
rule("get_T")(moved(lambda x: x.T))
rule("get_mT")(moved(lambda x: x.mT))
rule("get_data")(moved(lambda x: x.data))
rule("broadcast_to")(moved(torch.broadcast_to))
rule("swapdims")(moved(torch.swapdims))
rule("moveaxis")(moved(torch.moveaxis))
rule("tensor_split")(moved(torch.tensor_split))
rule("unflatten")(moved(torch.unflatten))  # torch.compile does not know the method


@rule("getitem")
def getitem(x: Any, index: Any) -> Moments:
    return moved(lambda value: value[index])(x)


@rule("pad")
def pad(x: Moments, pad: Any, mode: str = "constant", value: float | None = None) -> Moments:
    import torch.nn.functional as F

    found = moved(lambda v: F.pad(v, pad, mode, 0.0 if mode == "constant" else None))(x)
    return found if not value else found._replace(mean=F.pad(x.mean, pad, mode, value))


def _joined(function: Callable[..., Tensor], parts: Any, dim: int) -> Moments:
    means = [p.mean if isinstance(p, Moments | Weight) else p for p in parts]
    shape = torch.broadcast_shapes(*(m.shape for m in means)) if function is torch.stack else None
    variances = [p.var if isinstance(p, Moments | Weight) else torch.zeros_like(p) for p in parts]
    assert shape is None or all(m.shape == shape for m in means)
    factors = [getattr(p, "factor", None) for p in parts]
    factor = None
    if any(one is not None for one in factors):
        first = next(one for one in factors if one is not None)
        whole = [m.new_zeros(first.shape[0], *m.shape) if u is None else u for m, u in zip(means, factors, strict=True)]
        factor = vmap(lambda *values: function(values, dim))(*widened(whole))
    return Moments(function(means, dim), function(variances, dim), factor)


def widened(factors: list[Tensor]) -> list[Tensor]:
    """Directions of several values side by side: where some have more, the others do not move in those."""
    count = max(len(one) for one in factors)
    return [one if len(one) == count else torch.cat([one, one.new_zeros(count - len(one), *one.shape[1:])]) for one in factors]


@rule("cat", "concat", "concatenate")
def cat(tensors: Any, dim: int = 0) -> Moments:
    return _joined(torch.cat, tensors, dim)


@rule("stack")
def stack(tensors: Any, dim: int = 0) -> Moments:
    return _joined(torch.stack, tensors, dim)


@rule("where")
def where(condition: Tensor, x: Any, y: Any) -> Moments:
    """A choice that does not depend on what is random."""
    if isinstance(condition, Moments):
        raise ValueError("a choice (where) by a random condition has no rule")
    zero = torch.zeros((), device=condition.device)
    means = [v.mean if isinstance(v, Moments | Weight) else v for v in (x, y)]
    variances = [v.var if isinstance(v, Moments | Weight) else zero for v in (x, y)]
    factors = [getattr(v, "factor", None) for v in (x, y)]
    factor = None
    if any(u is not None for u in factors):
        first = next(u for u in factors if u is not None)
        a, b = (zero if u is None else u for u in factors)
        if a.ndim and b.ndim:
            a, b = widened([a, b])
        factor = torch.where(condition.expand(first.shape[1:]), a, b)
    mean = torch.where(condition, *means)
    return Moments(mean, torch.where(condition, *variances).to(mean.dtype), factor)


@rule("masked_fill")
def masked_fill(x: Moments, mask: Tensor, value: float) -> Moments:
    factor = None if x.factor is None else x.factor.masked_fill(mask, 0.0)
    return Moments(x.mean.masked_fill(mask, value), x.var.masked_fill(mask, 0.0), factor)
