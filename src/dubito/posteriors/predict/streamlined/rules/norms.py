r"""Norms. What is normalized depends on all of its numbers, so that the whole Jacobian is used: with :math:`x = (m - \bar m) / s`,

.. math:: \frac{\partial x_i}{\partial m_j} = \frac{1}{s} \Big( \delta_{ij} - \frac{1 + x_i x_j}{D} \Big), \qquad
          \mathrm{Var}_i = \frac{1}{s^2} \Big[ v_i \big(1 - \tfrac{2}{D} (1 + x_i^2)\big)
          + \tfrac{1}{D^2} (S_0 + 2 x_i S_1 + x_i^2 S_2) \Big],

where :math:`S_p = \sum_j v_j x_j^p` and :math:`s^2 = \mathrm{Var}(m) + \bar v (1 - 1/D) + \epsilon` is the expected square. Without the
mean (rms_norm, normalize) the terms of the 1 are gone. With certain statistics (batch_norm) the map is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.curvature.capture import rescaled, tapped
from dubito.posteriors.predict.streamlined.moments import (
    RULES,
    Dims,
    Moments,
    Value,
    Weight,
    factor_of,
    from_end,
    is_moments,
    mean_of,
    plus,
    residual,
    rule,
    still,
    uncertain,
    var_of,
)
from dubito.tensors.checks import require
from dubito.tensors.tree import full_precision, symbolic

Axes = tuple[int, ...]


def normalized(
    x: Moments | Weight, axes: Axes, eps: float, adjoint: bool, *, centered: bool = True, taylor: bool = False
) -> Moments:
    """x over its root mean square along the axes (counted from the end), its mean taken off before if `centered`; `taylor`: over that
    of the means."""
    size = math.prod([x.mean.shape[axis] for axis in axes])

    def _average(t: Tensor) -> Tensor:
        return t.mean(axes, keepdim=True)

    with still(adjoint):
        m = x.mean.detach() if adjoint else x.mean
        middle = _average(m) if centered else torch.zeros((), dtype=m.dtype, device=m.device)
        apart = m - middle if centered else m
        noise = 0.0 if taylor else _average(x.var) * (1 - 1 / size if centered else 1)
        i = torch.rsqrt(_average(apart * apart) + noise + eps)
        z = apart * i
        own = residual(x)
        weighted = own * z
        inner = torch.add(z * (_average(weighted * z) / size), weighted, alpha=-2 / size)
        if centered:
            inner = inner + _average(weighted) * (2 / size)
            own = torch.add(_average(own) / size, own, alpha=1 - 2 / size)
        var = (torch.addcmul(own, z, inner) * (i * i)).clamp_min(0)
        factor = None
        if x.factor is not None:
            factor = torch.func.vmap(lambda u: _along(u, z, i, axes, centered))(x.factor)
            var = var + factor.square().sum(0)
    mean: Any = _Normalized.apply(x.mean, z, middle, i, axes, centered) if adjoint else z
    return Moments(mean, var, factor)


def _along(u: Tensor, z: Tensor, i: Tensor, axes: Axes, centered: bool) -> Tensor:
    """The Jacobian, which is symmetric, times a direction."""
    rest = u - z * (u * z).mean(axes, keepdim=True)
    return i * (rest - u.mean(axes, keepdim=True) if centered else rest)


class _Normalized(torch.autograd.Function):
    """z, with its gradient in m in one operation: by torch's operations for each step it would be a dozen passes over memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, z: Tensor, middle: Tensor, i: Tensor, axes: Axes, centered: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """z itself."""
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the Jacobian is made of."""
        m, z, middle, i, ctx.axes, ctx.centered = inputs
        ctx.save_for_backward(m.detach(), z, middle, i)
        ctx.save_for_forward(m.detach(), z, middle, i)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient times the Jacobian; by torch's own kernel where that is possible."""
        m, z, middle, i = ctx.saved_tensors
        traced = any(map(symbolic, m.shape))  # for any number of examples, where batched it would hold for one
        if ctx.centered and ctx.axes == (-1,) and (m.dtype.itemsize >= 4 or m.is_cuda) and not traced:
            back = torch.ops.aten.native_layer_norm_backward  # which takes any inverse, not only that of m alone
            middle, i = (full_precision(t) for t in (middle, i))
            result = back(g, m, m.shape[-1:], middle, i, None, None, [True, False, False])[0]
        else:
            result = _along(g, z, i, ctx.axes, ctx.centered)
        return result, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, m: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The Jacobian times the tangent."""
        _, z, _, i = ctx.saved_tensors
        return _along(m, z, i, ctx.axes, ctx.centered)


def rescale(
    x: Value, weight: Value | None, bias: Value | None, channel: int, adjoint: bool, axis: int | None, taylor: bool = False
) -> Moments:
    r"""x times a scale plus a shift, either of which may be random: :math:`g^2 v + s (m^2 + v) + s_b` for a scale with mean g and
    variance s. Its channels are on the axis 1, or on the last ones (-1)."""
    m, v, factor = mean_of(x), var_of(x), factor_of(x)
    if weight is None and bias is None and is_moments(x):
        return x
    mean = (rescaled if adjoint else _affine)(m, mean_of(weight), mean_of(bias), channel)
    with still(adjoint):
        g, s, shift = (_shaped(t, m, channel) for t in (mean_of(weight), var_of(weight), var_of(bias)))
        var = torch.zeros_like(m) if v is None else v if g is None else v * (g * g)
        if s is not None:
            var = var + s * plus(m * m, None if taylor else v)
        var = plus(var, shift)
        factor = factor if factor is None or g is None else factor * g
        beyond = None if s is None or v is None else (s * v).expand(m.shape)
    if adjoint and axis is not None and beyond is not None:
        mean = tapped(mean, beyond, axis)
    return Moments(mean, var, factor)


def _shaped(value: Tensor | None, like: Tensor, channel: int) -> Tensor | None:
    return value if value is None or channel == -1 else value.view(-1, *[1] * (like.ndim - 2))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, channel: int) -> Tensor:
    weight, bias = _shaped(weight, x, channel), _shaped(bias, x, channel)
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _normalize(
    x: Value, axes: Axes, eps: float, adjoint: bool, plain: Callable[[Tensor], Tensor], *, centered: bool = True,
    taylor: bool = False,
) -> Moments | Tensor:  # fmt: skip
    """`normalized` if x is random, else `plain(x)`."""
    return normalized(x, axes, eps, adjoint, centered=centered, taylor=taylor) if uncertain(x) else plain(mean_of(x))


@rule("layer_norm")
def layer_norm(
    input: Value, normalized_shape: list[int], weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5,
    *_: object, adjoint: bool = False, axis: int | None = None, taylor: bool = False,
) -> Moments:  # fmt: skip
    """`normalized` over the last axes, then `rescale`."""
    axes = tuple(range(-len(normalized_shape), 0))
    x = _normalize(input, axes, eps, adjoint, lambda t: F.layer_norm(t, normalized_shape, eps=eps), taylor=taylor)
    return rescale(x, weight, bias, -1, adjoint, axis, taylor)


@rule("rms_norm")
def rms_norm(
    input: Value, normalized_shape: list[int], weight: Value | None = None, eps: float | None = None,
    *, adjoint: bool = False, axis: int | None = None, taylor: bool = False,
) -> Moments:  # fmt: skip
    """`normalized` over the last axes, not centered, then `rescale`."""
    axes, small = tuple(range(-len(normalized_shape), 0)), torch.finfo(mean_of(input).dtype).eps if eps is None else eps
    x = _normalize(input, axes, small, adjoint, lambda t: F.rms_norm(t, normalized_shape, eps=eps), centered=False, taylor=taylor)
    return rescale(x, weight, None, -1, adjoint, axis, taylor)


@rule("group_norm")
def group_norm(
    input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5, *_: object,
    adjoint: bool = False, axis: int | None = None, taylor: bool = False,
) -> Moments:  # fmt: skip
    """`normalized` over the channels and positions of each group, then `rescale`."""
    if uncertain(input):
        groups = _reshape(input, (input.mean.shape[0], num_groups, -1))
        x = _reshape(normalized(groups, (-1,), eps, adjoint, taylor=taylor), input.mean.shape)
    else:
        x = F.group_norm(mean_of(input), num_groups, eps=eps)
    return rescale(x, weight, bias, 1, adjoint, axis, taylor)


def _reshape(x: Moments | Weight, shape: Sequence[int]) -> Moments:
    factor = None if x.factor is None else x.factor.reshape(len(x.factor), *shape)
    return Moments(x.mean.reshape(shape), x.var.reshape(shape), factor)


@rule("batch_norm")
def batch_norm(
    input: Value, running_mean: Tensor | None, running_var: Tensor | None, weight: Value | None = None, bias: Value | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, adjoint: bool = False, axis: int | None = None,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    r"""By running statistics, which are certain: :math:`(m - \mu) / \sigma` and :math:`v / \sigma^2`, then `rescale`."""
    if training or running_mean is None or running_var is None:
        raise ValueError(
            "a BatchNorm layer uses the statistics of the batch, so every output depends on all inputs, and means and variances cannot "
            "go through it. Keep running statistics (track_running_stats=True), and do not override train()"
        )
    return rescale(_by_statistics(input, running_mean, running_var, eps, adjoint), weight, bias, 1, adjoint, axis, taylor)


def _by_statistics(x: Value, mean: Tensor, var: Tensor, eps: float, adjoint: bool) -> Value:
    m = mean_of(x)
    center, by = (t.view(-1, *[1] * (m.ndim - 2)) for t in (mean, torch.rsqrt(var + eps)))
    m = (m - center) * by
    if not uncertain(x):
        return m
    with still(adjoint):
        return Moments(m, x.var * (by * by), None if x.factor is None else x.factor * by)


@rule("instance_norm")
def instance_norm(
    input: Value, running_mean: Any = None, running_var: Any = None, weight: Value | None = None, bias: Value | None = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *, adjoint: bool = False, axis: int | None = None,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    """`normalized` over the positions of each channel, or by running statistics; then `rescale`."""
    if use_input_stats:
        axes = tuple(range(2 - mean_of(input).ndim, 0))
        x = _normalize(input, axes, eps, adjoint, lambda t: F.instance_norm(t, eps=eps), taylor=taylor)
    else:
        x = _by_statistics(input, running_mean, running_var, eps, adjoint)
    return rescale(x, weight, bias, 1, adjoint, axis, taylor)


@rule("normalize")
def normalize(
    input: Moments | Weight, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None, *, adjoint: bool = False,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    """x / |x|, which is its rms_norm over the root of its size."""
    require(p == 2 and isinstance(dim, int), f"normalize() has a rule for p=2 and one axis only; got p={p}, dim={dim}")
    dim = dim if dim < 0 else dim - input.mean.ndim
    size = input.mean.shape[dim]
    result = normalized(input, (dim,), eps * eps / size, adjoint, centered=False, taylor=taylor)
    with still(adjoint):
        var, factor = result.var / size, None if result.factor is None else result.factor / size**0.5
    return Moments(result.mean / size**0.5, var, factor)


@rule("_weight_norm")
def weight_norm(v: Value, g: Value, dim: int = 0, *, adjoint: bool = False, taylor: bool = False) -> Moments:
    """g v / |v|, the norm over all axes but one (-1: over all), as `torch.nn.utils.parametrizations.weight_norm` makes a weight."""
    direction, ndim = mean_of(v), mean_of(v).ndim
    if uncertain(v):
        axes = tuple(axis for axis in range(-ndim, 0) if dim == -1 or axis != dim - ndim)
        root = math.sqrt(math.prod(v.mean.shape[axis] for axis in axes))
        direction = RULES["mul"](normalized(v, axes, 0.0, adjoint, centered=False, taylor=taylor), 1 / root, adjoint=adjoint)
    else:
        direction = direction / torch.norm_except_dim(direction, 2, dim)
    return RULES["mul"](direction, g, adjoint=adjoint, taylor=taylor)


@rule("var")
def variance(
    x: Moments, dim: Dims | bool = None, unbiased: bool | None = None, keepdim: bool = False,
    *, correction: float | None = None, adjoint: bool = False, axis: int | None = None, taylor: bool = False,
) -> Moments:  # fmt: skip
    r""":math:`\frac{1}{D - 1} \sum_j (x_j - \bar x)^2`: the square of the mean's part, what the noise adds on average, and twice the
    deviation times the noise, with the noise's own square."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    axes = from_end(dim, x.mean.ndim)
    size = math.prod(x.mean.shape[a] for a in axes)
    if correction is None:
        correction = 1.0 if unbiased is None else float(unbiased)
    by = 1 / (size - correction)
    c = x.mean - x.mean.mean(axes, keepdim=True)
    with still(adjoint):
        own = residual(x)
        extra = 0.0 if taylor else x.var.sum(axes, keepdim) * (by * (1 - 1 / size))
        linear = own.mul(c.detach() ** 2 if adjoint else c * c).sum(axes, keepdim) * (4 * by * by)
        # of the centered noise: 2 tr((P V)^2)
        squares, total = (own * own).sum(axes, keepdim), own.sum(axes, keepdim)
        beyond = (squares * (1 - 2 / size) + (total / size) ** 2) * (2 * by * by)
        factor = None if x.factor is None else (2 * by) * (x.factor * c).sum(axes, keepdim)
        var = linear + (0 if taylor else beyond) + (0 if factor is None else factor.square().sum(0))
    mean = (c * c).sum(axes, keepdim) * by + extra
    if adjoint and axis is not None:
        mean = tapped(mean, beyond, axis)
    return Moments(mean, var, factor)


@rule("std")
def deviation(
    x: Moments, *args: Any, adjoint: bool = False, axis: int | None = None, taylor: bool = False, **kwargs: Any
) -> Moments:
    """The root of `variance`, to second order."""
    modes: dict[str, Any] = {"adjoint": adjoint, "axis": axis, "taylor": taylor}
    return RULES["sqrt"](variance(x, *args, **modes, **kwargs), **modes)
