r"""Nonlinear functions of single numbers, by their exact moments under a Gaussian.

For every function, with :math:`x \sim N(m, v)`: the mean :math:`E[g(x)]`, the variance, and the expected slope
:math:`E[g'(x)]`, which is the derivative of the mean in m and by which directions and the adjoint go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.curvature.capture import tapped
from dubito.posteriors.predict.streamlined.moments import Moments, attached, still
from dubito.posteriors.predict.streamlined.registry import rule

ROOT = math.sqrt(0.5)
LOG_ROOT = 0.5 * math.log(2 * math.pi)
NODES = 8
Found = tuple[Tensor, Tensor, Tensor]  # mean, variance, expected slope


def elementwise(
    function: Callable[[Tensor, Tensor], Found],
    x: Moments,
    adjoint: bool,
    axis: int | None = None,
    taylor: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Moments:
    """The rule of a function whose moments are known; or, with `taylor` (value and slope at the mean), to first order."""
    with still(adjoint):
        if taylor is not None:
            mean, slope = taylor(x.mean)
            var = slope * slope * x.var
        else:
            mean, var, slope = function(x.mean, x.var)
    if adjoint:
        mean = attached(mean, x.mean, slope)
        if axis is not None:  # what the function makes of its input beyond its expected slope is noise of its own
            mean = tapped(mean, (var - slope * slope * x.var).clamp_min(0), axis)
    return Moments(mean, var, None if x.factor is None else x.factor * slope)


def at_mean(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Value and slope at the mean."""

    def both(m: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = torch.func.jvp(g, (m,), (torch.ones_like(m),))  # pyright: ignore[reportAssignmentType]
        return value, slope

    return both


def _tiny(m: Tensor) -> float:
    return torch.finfo(m.dtype).tiny ** 0.5


def _standard(z: Tensor) -> tuple[Tensor, Tensor]:
    """Normal distribution function and density. (By erf, fast on a CPU and exportable; `torch.special.ndtr` is neither.)"""
    if not torch.is_grad_enabled():
        return (z * ROOT).erf_().mul_(0.5).add_(0.5), (z * z).mul_(-0.5).sub_(LOG_ROOT).exp_()
    upper = torch.erf(z * ROOT).mul(0.5).add(0.5)
    return upper, torch.exp((z * z).mul(-0.5).sub(LOG_ROOT))


def relu_moments(m: Tensor, v: Tensor) -> Found:
    r"""With :math:`z = m / s` and :math:`h = z \Phi + \phi`: :math:`E = m \Phi + s \phi`, variance :math:`v (\Phi + h (z - h))`.

    z is cut off at 20: beyond, a ReLU is the identity or zero, and the variance would drown in rounding."""
    if torch.is_grad_enabled():
        r = (v + _tiny(m)).rsqrt()
        z = (m * r).clamp(-20, 20)
        upper, density = _standard(z)
        h = torch.addcmul(density, z, upper)
        return torch.addcmul(v * r * density, m, upper), v * torch.addcmul(upper, h, z - h).clamp_min(0), upper
    # the same in place: on a CPU most of the time goes into memory
    r = (v + _tiny(m)).rsqrt_()
    z = (m * r).clamp_(-20, 20)
    upper, density = _standard(z)
    mean = r.mul_(v).mul_(density).addcmul_(m, upper)
    h = density.addcmul_(z, upper)
    return mean, z.sub_(h).mul_(h).add_(upper).clamp_min_(0).mul_(v), upper


@rule("relu")
def relu(x: Moments, inplace: bool = False, *, adjoint: bool = False, axis: int | None = None, taylor: bool = False) -> Moments:
    if taylor and x.factor is None and not adjoint:
        return Moments(x.mean.relu(), x.var * (x.mean > 0))
    return elementwise(relu_moments, x, adjoint, axis, (lambda m: (m.relu(), (m > 0).to(m.dtype))) if taylor else None)


@rule("leaky_relu")
def leaky_relu(
    x: Moments,
    negative_slope: float = 0.01,
    inplace: bool = False,
    *,
    adjoint: bool = False,
    axis: int | None = None,
    taylor: bool = False,
) -> Moments:
    def moments(m: Tensor, v: Tensor) -> Found:
        mean, var, upper = relu_moments(m, v)
        a, b = negative_slope, 1 - negative_slope
        return a * m + b * mean, (a * a) * v + (b * b) * var + (2 * a * b) * v * upper, a + b * upper

    return elementwise(moments, x, adjoint, axis, at_mean(lambda m: F.leaky_relu(m, negative_slope)) if taylor else None)


@rule("relu6", "hardtanh")
def clipped(x: Moments, *args: Any, adjoint: bool = False, axis: int | None = None, **kwargs: Any) -> Moments:
    low, high = (args[0], args[1]) if len(args) > 1 else (kwargs.get("min_val", 0.0), kwargs.get("max_val", 6.0))
    if isinstance(low, bool):
        low, high = 0.0, 6.0
    return elementwise(lambda m, v: quadrature(lambda t: t.clamp(low, high), m, v, 32), x, adjoint, axis)


def gelu_moments(m: Tensor, v: Tensor) -> Found:
    r"""With :math:`t^2 = 1 + v`: :math:`E = m \Phi(m/t) + (v/t) \phi(m/t)`, slope :math:`\Phi + m \phi / t^3`; the variance by the
    series :math:`\sum_n E[g^{(n)}]^2 v^n / n!`, whose terms are all positive, up to n = 3: off by .01 % of s at v = .1, .4 % at
    v = .5, 2 % at most."""
    q = (v + 1).reciprocal()
    root = q.sqrt()
    z = m * root
    upper, density = _standard(z)
    density = density * root
    # derivatives of E in m, relative to phi / t: 1 + (1 - z^2) q, then -(z / t) (1 + (3 - z^2) q)
    if torch.is_grad_enabled():
        first, z2 = torch.addcmul(upper, z * root, density), z * z
        second, third = 1 + (1 - z2) * q, 1 + (3 - z2) * q
        series = 3 * second * second + v * q * z2 * third * third  # times 6
        return torch.addcmul(v * density, m, upper), v * (first * first + density * density * v * series / 6), first
    mean = (v * density).addcmul_(m, upper)
    first = root.mul_(z).mul_(density).add_(upper)
    z2 = z.mul_(z)
    second = torch.rsub(z2, 1).mul_(q).add_(1)
    third = torch.rsub(z2, 3).mul_(q).add_(1)
    series = second.mul_(second).mul_(3).addcmul_(third.mul_(third).mul_(z2), q.mul_(v))
    return mean, (first * first).addcmul_(density.mul_(density).mul_(v), series, value=1 / 6).mul_(v), first


@rule("gelu")
def gelu(
    x: Moments, approximate: str = "none", *, adjoint: bool = False, axis: int | None = None, taylor: bool = False
) -> Moments:
    return elementwise(gelu_moments, x, adjoint, axis, _gelu_at_mean if taylor else None)


def _gelu_at_mean(m: Tensor) -> tuple[Tensor, Tensor]:
    upper, density = _standard(m)
    return m * upper, torch.addcmul(upper, m, density)


@rule("erf")
def erf(x: Moments, *, adjoint: bool = False, axis: int | None = None) -> Moments:
    def moments(m: Tensor, v: Tensor) -> Found:
        t = (1 + 2 * v).sqrt()
        mean = torch.erf(m / t)
        slope = 2 / math.sqrt(math.pi) * torch.exp(-((m / t) ** 2)) / t
        _, var, _ = quadrature(torch.erf, m, v, 24)
        return mean, var, slope

    return elementwise(moments, x, adjoint, axis)


@rule("exp")
def exp(x: Moments, *, adjoint: bool = False, axis: int | None = None) -> Moments:
    def moments(m: Tensor, v: Tensor) -> Found:
        mean = torch.exp(m + 0.5 * v)
        return mean, mean * mean * torch.expm1(v), mean

    return elementwise(moments, x, adjoint, axis)


HERMITE: dict[int, list[tuple[float, float]]] = {}  # what is known of `hermite`, which a compiler then need not look into


def hermite(n: int) -> list[tuple[float, float]]:
    """Nodes above zero and weights of a rule for N(0, 1), symmetric: (node, weight of each of the two)."""
    if n not in HERMITE:
        import numpy as np

        nodes, weights = np.polynomial.hermite_e.hermegauss(n)
        weights = weights / weights.sum()
        HERMITE[n] = [(float(t), float(w)) for t, w in zip(nodes, weights, strict=True) if t > 1e-12]
    return HERMITE[n]


def quadrature(g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, n: int = NODES) -> Found:
    r"""Gauss-Hermite: an even number of nodes, one pair at a time. The slope is :math:`E[g(m + s z) z] / s`."""
    s = (v + _tiny(m)).sqrt()
    center = g(m)
    total, square, slope = torch.zeros_like(m), torch.zeros_like(m), torch.zeros_like(m)
    for node, weight in hermite(n):
        up, down = g(torch.add(m, s, alpha=node)) - center, g(torch.sub(m, s, alpha=node)) - center
        total = torch.add(total, up + down, alpha=weight)
        square = torch.add(square, up * up + down * down, alpha=weight)
        slope = torch.add(slope, up - down, alpha=weight * node)
    return center + total, (square - total * total).clamp_min(0), slope / s


def by_quadrature(
    g: Callable[[Tensor], Tensor],
    x: Moments,
    *,
    adjoint: bool = False,
    axis: int | None = None,
    taylor: bool = False,
    nodes: int = NODES,
) -> Moments:
    """The rule of any smooth function of single numbers."""
    return elementwise(lambda m, v: quadrature(g, m, v, nodes), x, adjoint, axis, at_mean(g) if taylor else None)


def smooth(g: Callable[..., Tensor], *names: str, nodes: int = NODES) -> None:
    def apply(
        x: Moments, *args: Any, adjoint: bool = False, axis: int | None = None, taylor: bool = False, **kwargs: Any
    ) -> Moments:
        kwargs.pop("inplace", None)
        return by_quadrature(lambda t: g(t, *args, **kwargs), x, adjoint=adjoint, axis=axis, taylor=taylor, nodes=nodes)

    rule(*names)(apply)


smooth(torch.tanh, "tanh")
smooth(torch.sigmoid, "sigmoid")
smooth(F.silu, "silu")
smooth(F.softplus, "softplus")
smooth(F.mish, "mish")
smooth(F.logsigmoid, "logsigmoid")
smooth(F.softsign, "softsign", nodes=24)
smooth(torch.sin, "sin", nodes=16)
smooth(torch.cos, "cos", nodes=16)
smooth(F.elu, "elu", nodes=24)
smooth(F.selu, "selu", nodes=24)
smooth(F.celu, "celu", nodes=24)
smooth(F.hardswish, "hardswish", nodes=24)
smooth(F.hardsigmoid, "hardsigmoid", nodes=24)
smooth(torch.abs, "abs", nodes=64)
smooth(lambda t, low=None, high=None, **kw: torch.clamp(t, low, high, **kw), "clamp", "clip", nodes=64)


@rule("square")
def square(x: Moments, *, adjoint: bool = False, axis: int | None = None) -> Moments:
    def moments(m: Tensor, v: Tensor) -> Found:
        return m * m + v, 2 * v * v + 4 * m * m * v, 2 * m

    return elementwise(moments, x, adjoint, axis)


def second_order(
    g: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], name: str
) -> None:
    """Functions with a pole, which a Gaussian would always reach: mean to second order, slope at the mean."""

    def apply(x: Moments, *, adjoint: bool = False, axis: int | None = None) -> Moments:
        def moments(m: Tensor, v: Tensor) -> Found:
            slope = first(m)
            return g(m) + 0.5 * second(m) * v, slope * slope * v, slope

        return elementwise(moments, x, adjoint, axis)

    rule(name)(apply)


second_order(torch.rsqrt, lambda m: -0.5 * m**-1.5, lambda m: 0.75 * m**-2.5, "rsqrt")
second_order(torch.sqrt, lambda m: 0.5 * m**-0.5, lambda m: -0.25 * m**-1.5, "sqrt")
second_order(torch.reciprocal, lambda m: -(m**-2), lambda m: 2 * m**-3, "reciprocal")
second_order(torch.log, lambda m: 1 / m, lambda m: -(m**-2), "log")
second_order(torch.log1p, lambda m: 1 / (1 + m), lambda m: -((1 + m) ** -2), "log1p")
second_order(torch.expm1, torch.exp, torch.exp, "expm1")
