r"""Norms. What is normalised depends on all of its numbers, so that the whole Jacobian is used: with :math:`x = (m - \bar m) / s`,

.. math:: \frac{\partial x_i}{\partial m_j} = \frac{1}{s} \Big( \delta_{ij} - \frac{1 + x_i x_j}{D} \Big), \qquad
          \mathrm{Var}_i = \frac{1}{s^2} \Big[ v_i \big(1 - \tfrac{2}{D} (1 + x_i^2)\big)
          + \tfrac{1}{D^2} (S_0 + 2 x_i S_1 + x_i^2 S_2) \Big],

where :math:`S_p = \sum_j v_j x_j^p` and :math:`s^2 = \mathrm{Var}(m) + \bar v (1 - 1/D) + \epsilon` is the expected square. Without the
mean (rms_norm, normalize) the terms of the 1 are gone. With certain statistics (batch_norm) the map is linear.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dubito.curvature.capture import rescaled, tapped
from dubito.posteriors.predict.streamlined.moments import Moments, Weight, mean_of, residual, still, var_of
from dubito.posteriors.predict.streamlined.registry import RULES, rule

Axes = tuple[int, ...]


def normalised(x: Moments, axes: Axes, eps: float, adjoint: bool, *, centred: bool = True) -> Moments:
    """x over its root mean square along the axes (counted from the end), its mean taken off before if `centred`."""
    size = math.prod([x.mean.shape[axis] for axis in axes])

    def average(t: Tensor) -> Tensor:
        return t.mean(axes, keepdim=True)

    with still(adjoint):
        m = x.mean.detach() if adjoint else x.mean
        middle = average(m) if centred else torch.zeros((), dtype=m.dtype, device=m.device)
        apart = m - middle if centred else m
        i = torch.rsqrt(average(apart * apart) + average(x.var) * (1 - 1 / size if centred else 1) + eps)
        z = apart * i
        own = residual(x)
        weighted = own * z
        inner = torch.add(z * (average(weighted * z) / size), weighted, alpha=-2 / size)
        if centred:
            inner = inner + average(weighted) * (2 / size)
            own = torch.add(average(own) / size, own, alpha=1 - 2 / size)
        var = (torch.addcmul(own, z, inner) * (i * i)).clamp_min(0)
        factor = None
        if x.factor is not None:
            factor = torch.func.vmap(lambda u: _along(u, z, i, axes, centred))(x.factor)
            var = var + factor.square().sum(0)
    mean: Any = _Normalised.apply(x.mean, z, middle, i, axes, centred) if adjoint else z
    return Moments(mean, var, factor)


def _along(u: Tensor, z: Tensor, i: Tensor, axes: Axes, centred: bool) -> Tensor:
    """The Jacobian, which is symmetric, times a direction."""
    rest = u - z * (u * z).mean(axes, keepdim=True)
    return i * (rest - u.mean(axes, keepdim=True) if centred else rest)


class _Normalised(torch.autograd.Function):
    """z, with its gradient in m in one operation: by torch's operations for each step it would be a dozen passes over memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, z: Tensor, middle: Tensor, i: Tensor, axes: Axes, centred: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        m, z, middle, i, ctx.axes, ctx.centred = inputs
        ctx.save_for_backward(m.detach(), z, middle, i)
        ctx.save_for_forward(m.detach(), z, middle, i)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        m, z, middle, i = ctx.saved_tensors
        traced = any(
            isinstance(n, torch.SymInt) for n in m.shape
        )  # for any number of examples, where batched it would hold for one
        if ctx.centred and ctx.axes == (-1,) and (m.dtype.itemsize >= 4 or m.is_cuda) and not traced:
            back = torch.ops.aten.native_layer_norm_backward  # which takes any inverse, not only that of m alone
            middle, i = (t.float() if t.dtype.itemsize < 4 else t for t in (middle, i))
            found = back(g, m, m.shape[-1:], middle, i, None, None, [True, False, False])[0]
        else:
            found = _along(g, z, i, ctx.axes, ctx.centred)
        return found, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, m: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, z, _, i = ctx.saved_tensors
        return _along(m, z, i, ctx.axes, ctx.centred)


def scaled(x: Moments | Tensor, weight: Any, bias: Any, channel: int, adjoint: bool, axis: int | None) -> Moments:
    """x times a scale plus a shift, either of which may be random."""
    m, v, factor = mean_of(x), var_of(x), x.factor if isinstance(x, Moments) else None
    if weight is None and bias is None:
        assert isinstance(x, Moments)
        return x
    mean = (
        rescaled(m, mean_of(weight), mean_of(bias), channel) if adjoint else _affine(m, mean_of(weight), mean_of(bias), channel)
    )
    with still(adjoint):
        g, s = _shaped(mean_of(weight), m, channel), _shaped(var_of(weight), m, channel)
        var = torch.zeros_like(m) if v is None else v if g is None else v * (g * g)
        if s is not None:
            var = var + s * (m * m if v is None else m * m + v)
        shift = _shaped(var_of(bias), m, channel)
        var = var if shift is None else var + shift
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


def _last(shape: Any) -> Axes:
    return tuple(range(-len(shape), 0))


@rule("layer_norm")
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any,
    adjoint: bool = False, axis: int | None = None,
) -> Moments:  # fmt: skip
    if not isinstance(input, Moments):
        input = torch.nn.functional.layer_norm(input, normalized_shape, eps=eps)
    else:
        input = normalised(input, _last(normalized_shape), eps, adjoint)
    return scaled(input, weight, bias, -1, adjoint, axis)


@rule("rms_norm")
def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None,
    *, adjoint: bool = False, axis: int | None = None,
) -> Moments:  # fmt: skip
    if not isinstance(input, Moments):
        input = torch.nn.functional.rms_norm(input, normalized_shape, eps=eps)
    else:
        eps = torch.finfo(input.mean.dtype).eps if eps is None else eps
        input = normalised(input, _last(normalized_shape), eps, adjoint, centred=False)
    return scaled(input, weight, None, -1, adjoint, axis)


@rule("group_norm")
def group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any,
    adjoint: bool = False, axis: int | None = None,
) -> Moments:  # fmt: skip
    if not isinstance(input, Moments):
        input = torch.nn.functional.group_norm(input, num_groups, eps=eps)
    else:
        shape = input.mean.shape
        found = normalised(_reshaped(input, (shape[0], num_groups, -1)), (-1,), eps, adjoint)
        input = _reshaped(found, shape)
    return scaled(input, weight, bias, 1, adjoint, axis)


def _reshaped(x: Moments, shape: Any) -> Moments:
    return Moments(
        x.mean.reshape(shape), x.var.reshape(shape), None if x.factor is None else x.factor.reshape(len(x.factor), *shape)
    )


@rule("batch_norm")
def batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5, *, adjoint: bool = False, axis: int | None = None,
) -> Moments:  # fmt: skip
    if training or running_mean is None:
        raise ValueError(
            "a BatchNorm layer uses the statistics of the batch, which makes every output depend on all inputs: means and variances "
            "go through the network in eval mode. Keep running statistics (track_running_stats=True), and do not override train()"
        )
    return scaled(_by_statistics(input, running_mean, running_var, eps, adjoint), weight, bias, 1, adjoint, axis)


def _by_statistics(x: Any, mean: Tensor, var: Tensor, eps: float, adjoint: bool) -> Any:
    """Normalised by running statistics, which are certain."""
    m = mean_of(x)
    inverse = torch.rsqrt(var + eps)
    center, by = (t.view(-1, *[1] * (m.ndim - 2)) for t in (mean, inverse))
    m = (m - center) * by
    if not isinstance(x, Moments):
        return m
    with still(adjoint):
        return Moments(m, x.var * (by * by), None if x.factor is None else x.factor * by)


@rule("instance_norm")
def instance_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *, adjoint: bool = False, axis: int | None = None,
) -> Moments:  # fmt: skip
    if not use_input_stats:
        return scaled(_by_statistics(input, running_mean, running_var, eps, adjoint), weight, bias, 1, adjoint, axis)
    if not isinstance(input, Moments):
        input = torch.nn.functional.instance_norm(input, eps=eps)
    else:
        input = normalised(input, tuple(range(2 - input.mean.ndim, 0)), eps, adjoint)
    return scaled(input, weight, bias, 1, adjoint, axis)


@rule("normalize")
def normalize(
    input: Moments | Weight, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None, *, adjoint: bool = False
) -> Moments:
    """x / |x|, which is its rms_norm over the root of its size."""
    if p != 2 or not isinstance(dim, int):
        raise ValueError("normalize() has a streamlined rule for p=2 and one axis")
    x = input if isinstance(input, Moments) else Moments(input.mean, input.var)
    dim = dim if dim < 0 else dim - x.mean.ndim
    size = x.mean.shape[dim]
    found = normalised(x, (dim,), eps * eps / size, adjoint, centred=False)
    with still(adjoint):
        var, factor = found.var / size, None if found.factor is None else found.factor / size**0.5
    return Moments(found.mean / size**0.5, var, factor)


@rule("var")
def variance(
    x: Moments, dim: Any = None, unbiased: Any = None, keepdim: bool = False,
    *, correction: float | None = None, adjoint: bool = False, axis: int | None = None,
) -> Moments:  # fmt: skip
    r""":math:`\frac{1}{D - 1} \sum_j (x_j - \bar x)^2`: the square of the mean's part, what the noise adds on average, and twice the
    deviation times the noise, with the noise's own square."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    axes = tuple(range(-x.mean.ndim, 0)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    axes = tuple(a if a < 0 else a - x.mean.ndim for a in axes)
    size = math.prod(x.mean.shape[a] for a in axes)
    correction = (1.0 if unbiased is None else float(unbiased)) if correction is None else correction
    by = 1 / (size - correction)
    c = x.mean - x.mean.mean(axes, keepdim=True)
    with still(adjoint):
        own = residual(x)
        extra = x.var.sum(axes, keepdim) * (by * (1 - 1 / size))
        linear = own.mul(c.detach() ** 2 if adjoint else c * c).sum(axes, keepdim) * (4 * by * by)
        # of the centred noise: 2 tr((P V)^2)
        squares, total = (own * own).sum(axes, keepdim), own.sum(axes, keepdim)
        beyond = (squares * (1 - 2 / size) + (total / size) ** 2) * (2 * by * by)
        factor = None if x.factor is None else (2 * by) * (x.factor * c).sum(axes, keepdim)
        var = linear + beyond + (0 if factor is None else factor.square().sum(0))
    mean = (c * c).sum(axes, keepdim) * by + extra
    if adjoint and axis is not None:
        mean = tapped(mean, beyond, axis)
    return Moments(mean, var, factor)


@rule("std")
def deviation(x: Moments, *args: Any, adjoint: bool = False, axis: int | None = None, **kwargs: Any) -> Moments:
    return RULES["sqrt"](variance(x, *args, adjoint=adjoint, axis=axis, **kwargs), adjoint=adjoint, axis=axis)
