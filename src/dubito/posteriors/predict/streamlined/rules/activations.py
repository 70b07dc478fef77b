r"""Nonlinear functions of single numbers, by their exact moments under a Gaussian.

For every function, with :math:`x \sim N(m, v)`: the mean :math:`E[g(x)]`, the variance, and the expected slope
:math:`E[g'(x)]`, which is the derivative of the mean in m and by which directions and the adjoint go on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.curvature.capture import tapped
from dubito.posteriors.predict.streamlined.moments import Moments, attached, rule, still
from dubito.posteriors.predict.streamlined.operations import canonical

ROOT = math.sqrt(0.5)
LOG_ROOT = 0.5 * math.log(2 * math.pi)
NODES = 8
Triple = tuple[Tensor, Tensor, Tensor]  # mean, variance, expected slope
Tangent = Callable[[Tensor], tuple[Tensor, Tensor]]  # value and slope at a point


def elementwise(
    function: Callable[[Tensor, Tensor], Triple],
    x: Moments,
    adjoint: bool,
    axis: int | None = None,
    taylor: Tangent | None = None,
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


def tangent(g: Callable[[Tensor], Tensor]) -> Tangent:
    """Value and slope of a function, by forward-mode differentiation."""
    return lambda m: torch.func.jvp(g, (m,), (torch.ones_like(m),))  # pyright: ignore[reportReturnType]


@cache
def load_forward_mode() -> None:
    """Let torch load its forward mode before it is traced: it warns of a deprecated part of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        tangent(torch.tanh)(torch.zeros(1))


def pointwise(
    *names: str, plain: Callable[..., Tensor] | None = None
) -> Callable[[Callable[..., Triple]], Callable[..., Triple]]:
    """Register a rule by its moments, a function (m, v, ...) of mean, variance and the arguments of the operation.

    To first order (`taylor`) it is the function `plain` at the mean; without it, the moments all the same."""

    def _register(moments: Callable[..., Triple]) -> Callable[..., Triple]:
        def _apply(
            x: Moments, *args: Any, adjoint: bool = False, axis: int | None = None, taylor: bool = False, **kwargs: Any
        ) -> Moments:
            kwargs.pop("inplace", None)
            args = tuple(value for value in args if not isinstance(value, bool))  # `inplace` by its place
            first_order = tangent(partial(_call, plain, args, kwargs)) if taylor and plain is not None else None
            return elementwise(lambda m, v: moments(m, v, *args, **kwargs), x, adjoint, axis, first_order)

        rule(*names)(_apply)
        return moments

    return _register


def _call(function: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any], m: Tensor) -> Tensor:
    return function(m, *args, **kwargs)


def _tiny(m: Tensor) -> float:
    return torch.finfo(m.dtype).tiny ** 0.5


def _standard(z: Tensor) -> tuple[Tensor, Tensor]:
    """Normal distribution function and density. (By erf, fast on a CPU and exportable; `torch.special.ndtr` is neither.)"""
    if not torch.is_grad_enabled():
        return (z * ROOT).erf_().mul_(0.5).add_(0.5), (z * z).mul_(-0.5).sub_(LOG_ROOT).exp_()
    upper = torch.erf(z * ROOT).mul(0.5).add(0.5)
    return upper, torch.exp((z * z).mul(-0.5).sub(LOG_ROOT))


def relu_moments(m: Tensor, v: Tensor) -> Triple:
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
    """See `relu_moments`."""
    if taylor and x.factor is None and not adjoint:
        return Moments(x.mean.relu(), x.var * (x.mean > 0))
    return elementwise(relu_moments, x, adjoint, axis, (lambda m: (m.relu(), (m > 0).to(m.dtype))) if taylor else None)


@pointwise("leaky_relu", plain=F.leaky_relu)
def leaky_relu_moments(m: Tensor, v: Tensor, negative_slope: float = 0.01) -> Triple:
    r""":math:`a x + (1 - a)\, \mathrm{relu}(x)`, whose terms have the covariance :math:`a (1 - a)\, v\, \Phi`."""
    mean, var, upper = relu_moments(m, v)
    a, b = negative_slope, 1 - negative_slope
    return a * m + b * mean, (a * a) * v + (b * b) * var + (2 * a * b) * v * upper, a + b * upper


@pointwise("relu6", plain=F.relu6)
def relu6_moments(m: Tensor, v: Tensor) -> Triple:
    """By quadrature."""
    return quadrature(lambda t: t.clamp(0.0, 6.0), m, v, 32)


@pointwise("hardtanh", plain=F.hardtanh)
def hardtanh_moments(m: Tensor, v: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Triple:
    """By quadrature."""
    return quadrature(lambda t: t.clamp(min_val, max_val), m, v, 32)


def gelu_moments(m: Tensor, v: Tensor) -> Triple:
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
    """See `gelu_moments`; the approximation by tanh is taken for the exact function."""
    if approximate != "none" and taylor:
        return elementwise(gelu_moments, x, adjoint, axis, tangent(partial(F.gelu, approximate=approximate)))
    return elementwise(gelu_moments, x, adjoint, axis, _gelu_tangent if taylor else None)


def _gelu_tangent(m: Tensor) -> tuple[Tensor, Tensor]:
    upper, density = _standard(m)
    return F.gelu(m), torch.addcmul(upper, m, density)


@pointwise("erf", plain=torch.erf)
def erf_moments(m: Tensor, v: Tensor) -> Triple:
    r"""With :math:`t^2 = 1 + 2 v`: mean :math:`\mathrm{erf}(m / t)`, slope :math:`2 / (\sqrt{\pi} t)\, e^{-(m/t)^2}`; the variance by
    quadrature."""
    t = (1 + 2 * v).sqrt()
    slope = 2 / math.sqrt(math.pi) * torch.exp(-((m / t) ** 2)) / t
    return torch.erf(m / t), quadrature(torch.erf, m, v, 24)[1], slope


@pointwise("exp", plain=torch.exp)
def exp_moments(m: Tensor, v: Tensor) -> Triple:
    r"""Log-normal: mean :math:`e^{m + v/2}`, which is the slope too, and variance :math:`E^2 (e^v - 1)`."""
    mean = torch.exp(m + 0.5 * v)
    return mean, mean * mean * torch.expm1(v), mean


@pointwise("square", plain=torch.square)
def square_moments(m: Tensor, v: Tensor) -> Triple:
    """Mean m^2 + v, variance 2 v^2 + 4 m^2 v, slope 2 m."""
    return m * m + v, 2 * v * v + 4 * m * m * v, 2 * m


HERMITE: dict[int, list[tuple[float, float]]] = {}  # what is known of `hermite`, which a compiler then need not look into


def hermite(n: int) -> list[tuple[float, float]]:
    """Nodes above zero and weights of a rule for N(0, 1), symmetric: (node, weight of each of the two)."""
    if n not in HERMITE:
        import numpy as np

        nodes, weights = np.polynomial.hermite_e.hermegauss(n)
        weights = weights / weights.sum()
        HERMITE[n] = [(float(t), float(w)) for t, w in zip(nodes, weights, strict=True) if t > 1e-12]
    return HERMITE[n]


def quadrature(g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, n: int = NODES) -> Triple:
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
    return elementwise(lambda m, v: quadrature(g, m, v, nodes), x, adjoint, axis, tangent(g) if taylor else None)


def smooth(g: Callable[..., Tensor], *names: str, nodes: int = NODES) -> None:
    """Register the rule of a function, by quadrature."""
    pointwise(*names, plain=g)(lambda m, v, *args, **kwargs: quadrature(lambda t: g(t, *args, **kwargs), m, v, nodes))


SMOOTH: dict[int, tuple[Callable[..., Tensor], ...]] = {  # by the number of nodes
    8: (torch.tanh, torch.sigmoid, F.silu, F.softplus, F.mish, F.logsigmoid),
    16: (torch.sin, torch.cos),
    24: (F.softsign, F.elu, F.selu, F.celu, F.hardswish, F.hardsigmoid),
    64: (torch.abs,),
}
for _nodes, _functions in SMOOTH.items():
    for _function in _functions:
        smooth(_function, canonical(_function), nodes=_nodes)
smooth(lambda t, low=None, high=None, **kw: torch.clamp(t, low, high, **kw), "clamp", "clip", nodes=64)


def second_order(
    g: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], name: str
) -> None:
    r"""Register the rule of a function with a pole, which a Gaussian would always reach: mean to second order,
    :math:`g(m) + \tfrac{1}{2} g''(m) v`, slope at the mean, variance :math:`g'(m)^2 v`."""

    def _moments(m: Tensor, v: Tensor) -> Triple:
        slope = first(m)
        return g(m) + 0.5 * second(m) * v, slope * slope * v, slope

    pointwise(name, plain=g)(_moments)


second_order(torch.rsqrt, lambda m: -0.5 * m**-1.5, lambda m: 0.75 * m**-2.5, "rsqrt")
second_order(torch.sqrt, lambda m: 0.5 * m**-0.5, lambda m: -0.25 * m**-1.5, "sqrt")
second_order(torch.reciprocal, lambda m: -(m**-2), lambda m: 2 * m**-3, "reciprocal")
second_order(torch.log, lambda m: 1 / m, lambda m: -(m**-2), "log")
second_order(torch.log1p, lambda m: 1 / (1 + m), lambda m: -((1 + m) ** -2), "log1p")
second_order(torch.expm1, torch.exp, torch.exp, "expm1")
