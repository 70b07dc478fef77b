"""Operations that only move numbers about: each does the same to means, variances and directions. Averages over positions and
interpolations between them are linear: variances have the same coefficients, squared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.moments import (
    RULES,
    Moments,
    Sizes,
    Value,
    Weight,
    factor_of,
    linear_map,
    mean_of,
    rule,
    still,
    uncertain,
    var_of,
    widen,
)


def movement(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operation that moves numbers: function(m), function(v) and function(u) of every direction u."""

    def _apply(x: Moments | Weight, *args: Any, **kwargs: Any) -> Moments | tuple[Moments, ...]:
        like = [mean_of(arg) for arg in args]

        def _move(value: Tensor) -> Any:
            return function(value, *like, **kwargs)

        mean, var, factor = _move(x.mean), _move(x.var), factor_of(x)
        factor = None if factor is None else vmap(_move)(factor)
        if isinstance(mean, Tensor):
            return Moments(mean, var, factor)
        factors = [None] * len(mean) if factor is None else factor
        return tuple(Moments(*parts) for parts in zip(mean, var, factors, strict=True))

    return _apply


METHODS = (
    "reshape", "flatten", "transpose", "permute", "movedim", "swapaxes", "t", "squeeze", "unsqueeze", "expand",
    "expand_as", "view_as", "reshape_as", "contiguous", "clone", "chunk", "split", "unbind", "narrow", "select", "flip", "roll",
    "repeat", "repeat_interleave", "index_select", "gather", "detach", "to", "type_as", "float", "double", "half", "bfloat16", "tile",
    "diagonal",
)  # fmt: skip
for _name in METHODS:
    rule(_name)(movement(getattr(torch.Tensor, _name)))
rule("view")(movement(torch.Tensor.reshape))  # the network's own tensor can be contiguous where its moments are not
for _name in ("T", "mT", "data"):
    rule(f"get_{_name}")(movement(operator.attrgetter(_name)))
for _function in (
    torch.broadcast_to, torch.swapdims, torch.moveaxis, torch.tensor_split, torch.unflatten,
    torch.pixel_shuffle, torch.pixel_unshuffle, torch.channel_shuffle,
):  # fmt: skip
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
    if uncertain(condition):
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


POOLS: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE: dict[int, Callable[..., Tensor]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def each(value: Sizes, n: int) -> tuple[int, ...]:
    """One number for each of n axes."""
    return (value,) * n if isinstance(value, int | float) else tuple(value) * (n // len(value))


def _linear(function: Callable[[Tensor], Tensor], squared: Callable[[Tensor], Tensor], x: Moments, adjoint: bool) -> Moments:
    if not adjoint:
        return linear_map(function, x, squared=squared)
    with still(adjoint):
        var = squared(x.var)
    return Moments(function(x.mean), var)


def _average(n: int) -> Callable[..., Moments]:
    r"""The rule of an average over windows of k positions: :math:`\sum v / k^2`."""

    def _apply(
        input: Moments, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None, *, adjoint: bool = False,
    ) -> Moments:  # fmt: skip
        divisor = (divisor_override,) if n > 1 else ()

        def _pool(x: Tensor) -> Tensor:
            return POOLS[n](x, kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor)

        kernel, sides = each(kernel_size, n), each(padding, n)
        if divisor_override is not None:
            by: float | Tensor = 1 / divisor_override
        elif not any(sides) and not ceil_mode:
            by = 1 / math.prod(kernel)
        else:  # fewer numbers at the borders
            one = torch.ones((1, 1, *input.mean.shape[-n:]), dtype=input.mean.dtype, device=input.mean.device)
            by = _pool(one) / _counts(one, kernel, each(stride or kernel_size, n), sides, ceil_mode)
            by = by if input.mean.ndim == n + 2 else by.squeeze(0)
        return _linear(_pool, lambda v: _pool(v) * by, input, adjoint)

    return _apply


def _counts(one: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], sides: tuple[int, ...], ceil_mode: bool) -> Tensor:
    """How many positions every window sees."""
    if len(kernel) == 3:
        return F.avg_pool3d(one, kernel, stride, sides, ceil_mode, divisor_override=1)
    if len(kernel) == 2:
        return F.avg_pool2d(one, kernel, stride, sides, ceil_mode, divisor_override=1)
    return _counts(one.unsqueeze(2), (1, *kernel), (1, *stride), (0, *sides), ceil_mode).squeeze(2)


def _adaptive_average(n: int) -> Callable[..., Moments]:
    r"""The rule of an average over as many windows as are asked for: :math:`\sum v / k^2`."""

    def _apply(input: Moments, output_size: Outputs, *, adjoint: bool = False) -> Moments:
        sizes, by = input.mean.shape[-n:], 1.0
        for axis, (size, output) in enumerate(zip(sizes, outputs(output_size, sizes), strict=True)):
            if size % output == 0:
                by = by / (size // output)
            else:
                counts = [len(window) for window in adaptive_windows(size, output)]
                shape = [output if i == axis else 1 for i in range(n)]
                by = by / torch.tensor(counts, dtype=input.mean.dtype, device=input.mean.device).view(shape)
        return _linear(lambda x: ADAPTIVE[n](x, output_size), lambda v: ADAPTIVE[n](v, output_size) * by, input, adjoint)

    return _apply


Outputs = int | Sequence[int | None] | None


def outputs(value: Outputs, sizes: Sequence[int]) -> list[int]:
    """The number of outputs along each axis of those sizes; None keeps the size."""
    n = len(sizes)
    given = (value,) * n if isinstance(value, int) or value is None else tuple(value) * (n // len(value))
    return [size if output is None else output for size, output in zip(sizes, given, strict=True)]


def adaptive_windows(size: int, outputs: int) -> list[range]:
    """The positions that each output of an adaptive pooling sees."""
    return [range(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]


for _n in (1, 2, 3):
    rule(f"avg_pool{_n}d")(_average(_n))
    rule(f"adaptive_avg_pool{_n}d")(_adaptive_average(_n))


@rule("interpolate", "upsample")
def interpolate(
    input: Moments, size: Sizes | None = None, scale_factor: float | Sequence[float] | None = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
    *, adjoint: bool = False,
) -> Moments:  # fmt: skip
    """Axis by axis a matrix of coefficients, which is squared."""

    def _resize(x: Tensor) -> Tensor:
        return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)  # pyright: ignore[reportArgumentType]

    if mode in ("nearest", "nearest-exact"):
        return _linear(_resize, _resize, input, adjoint)
    n = input.mean.ndim - 2
    if mode == "area":
        return RULES[f"adaptive_avg_pool{n}d"](input, tuple(_resize(input.mean[:1, :1]).shape[-n:]), adjoint=adjoint)
    sizes = [None] * n if size is None else [(length, 1) for length in each(size, n)]
    scales = [None] * n if scale_factor is None else [(float(by), 1.0) for by in each(scale_factor, n)]  # pyright: ignore[reportArgumentType]
    kind = "bicubic" if mode == "bicubic" else "bilinear"
    matrices = []
    for length, target, by in zip(input.mean.shape[-n:], sizes, scales, strict=True):
        unit = torch.eye(length, dtype=input.mean.dtype, device=input.mean.device)[None, :, :, None]
        matrix = F.interpolate(unit, target, by, kind, align_corners, recompute_scale_factor, antialias)  # pyright: ignore[reportArgumentType]
        matrices.append(matrix[0, :, :, 0].square())

    def _squared(v: Tensor) -> Tensor:
        for axis, matrix in enumerate(matrices):
            v = (v.movedim(axis - n, -1) @ matrix).movedim(-1, axis - n)
        return v

    return _linear(_resize, _squared, input, adjoint)
