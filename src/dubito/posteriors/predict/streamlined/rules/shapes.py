"""Operations that only move numbers about: each does the same to means, variances and directions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.moments import Moments, Value, Weight, factor_of, mean_of, var_of, widen
from dubito.posteriors.predict.streamlined.registry import rule


def movement(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operation that moves numbers: function(m), function(v) and function(u) of every direction u."""

    def _apply(x: Moments | Weight, *args: Any, **kwargs: Any) -> Moments | tuple[Moments, ...]:
        def _move(value: Tensor) -> Any:
            return function(value, *args, **kwargs)

        mean, var, factor = _move(x.mean), _move(x.var), factor_of(x)
        factor = None if factor is None else vmap(_move)(factor)
        if isinstance(mean, Tensor):
            return Moments(mean, var, factor)
        factors = [None] * len(mean) if factor is None else factor
        return tuple(Moments(*parts) for parts in zip(mean, var, factors, strict=True))

    return _apply


METHODS = (
    "reshape", "flatten", "transpose", "permute", "movedim", "swapaxes", "t", "squeeze", "unsqueeze", "expand",
    "expand_as", "view_as", "contiguous", "clone", "chunk", "split", "unbind", "narrow", "select", "flip", "roll", "repeat",
    "repeat_interleave", "index_select", "gather", "detach", "to", "type_as", "float", "double", "half", "bfloat16", "tile", "diagonal",
)  # fmt: skip
for _name in METHODS:
    rule(_name)(movement(getattr(torch.Tensor, _name)))
rule("view")(movement(torch.Tensor.reshape))  # the network's own tensor can be contiguous where its moments are not
for _name in ("T", "mT", "data"):
    rule(f"get_{_name}")(movement(operator.attrgetter(_name)))
for _function in (torch.broadcast_to, torch.swapdims, torch.moveaxis, torch.tensor_split, torch.unflatten):
    rule(_function)(movement(_function))  # (of unflatten, torch.compile does not know the method)


@rule("getitem")
def getitem(x: Moments | Weight, index: Any) -> Moments:
    """x[index]: the entries' means and variances."""
    return movement(lambda value: value[index])(x)


@rule("pad")
def pad(x: Moments, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Moments:
    """Padding with a constant has no variance; that with entries of x has theirs."""
    padded = movement(lambda v: F.pad(v, pad, mode, 0.0 if mode == "constant" else None))(x)
    return padded._replace(mean=F.pad(x.mean, pad, mode, value)) if value else padded


def _join(function: Callable[..., Tensor], values: Sequence[Value], dim: int) -> Moments:
    means = [mean_of(value) for value in values]
    variances = [torch.zeros_like(m) if (v := var_of(value)) is None else v for m, value in zip(means, values, strict=True)]
    factors = [factor_of(value) for value in values]
    first, factor = next((u for u in factors if u is not None), None), None
    if first is not None:
        whole = [m.new_zeros(first.shape[0], *m.shape) if u is None else u for m, u in zip(means, factors, strict=True)]
        factor = vmap(lambda *parts: function(parts, dim))(*widen(whole))
    return Moments(function(means, dim), function(variances, dim), factor)


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[Value], dim: int = 0) -> Moments:
    """Means and variances side by side."""
    return _join(torch.cat, tensors, dim)


@rule("stack")
def stack(tensors: Sequence[Value], dim: int = 0) -> Moments:
    """Means and variances along a new axis."""
    return _join(torch.stack, tensors, dim)


@rule("where")
def where(condition: Value, x: Value, y: Value) -> Moments:
    """A choice that does not depend on what is random: the mean and the variance of the one that is chosen."""
    if not isinstance(condition, Tensor):
        raise ValueError("where() with a random condition has no rule for one pass: predict with how='sampled'")
    zero = torch.zeros((), device=condition.device)
    mean = torch.where(condition, mean_of(x), mean_of(y))
    var = torch.where(condition, *(zero if v is None else v for v in (var_of(x), var_of(y)))).to(mean.dtype)
    factors = [factor_of(value) for value in (x, y)]
    known = [u for u in factors if u is not None]
    if not known:
        return Moments(mean, var)
    a, b = widen(known) if len(known) == 2 else (zero if u is None else u for u in factors)
    return Moments(mean, var, torch.where(condition.expand(known[0].shape[1:]), a, b))


@rule("masked_fill")
def masked_fill(x: Moments, mask: Tensor, value: float) -> Moments:
    """What is filled has no variance."""
    factor = None if x.factor is None else x.factor.masked_fill(mask, 0.0)
    return Moments(x.mean.masked_fill(mask, value), x.var.masked_fill(mask, 0.0), factor)
