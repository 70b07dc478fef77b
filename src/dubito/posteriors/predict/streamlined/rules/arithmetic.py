"""Sums, differences, products and quotients of numbers, of which some or all are random."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dubito.posteriors.predict.streamlined.moments import (
    RULES,
    Dims,
    Moments,
    Value,
    Weight,
    factor_of,
    from_end,
    mean_of,
    plus,
    residual,
    rule,
    still,
    uncertain,
    var_of,
    widen,
)
from dubito.posteriors.predict.streamlined.rules.activations import elementwise
from dubito.posteriors.predict.streamlined.rules.groups import group_softmax
from dubito.tensors.checks import require

Number = float | Tensor
Operand = Value | float


def _factors(a: Operand, b: Operand, left: Number, right: Number, shape: torch.Size) -> Tensor | None:
    """left * directions of a + right * directions of b, which add up where they are the same directions."""
    sides = ((factor_of(a), left), (factor_of(b), right))
    factors = [_scaled(factor, by, shape) for factor, by in sides if factor is not None]
    if not factors:
        return None
    return factors[0] if len(factors) == 1 else torch.stack(widen(factors)).sum(0)


def _scaled(factor: Tensor, by: Number, shape: torch.Size) -> Tensor:
    """Directions [R, ...] times a number, of a result of that shape, which may have more axes."""
    factor = factor.reshape(len(factor), *[1] * (len(shape) + 1 - factor.ndim), *factor.shape[1:])
    return (factor * by).expand(len(factor), *shape)


def _sum(a: Operand, b: Operand, scale: float, adjoint: bool) -> Moments:
    r"""a + scale * b of independent numbers: :math:`v_a + c^2 v_b`, and the directions of both added up."""
    if a is b and uncertain(a):
        return _scale(a, 1 + scale, adjoint)
    m, n = mean_of(a), mean_of(b)
    mean = torch.add(m, n, alpha=scale) if isinstance(m, Tensor) else m + scale * n
    with still(adjoint):
        va, vb = var_of(a), var_of(b)
        var = plus(va, vb if vb is None or scale in (1, -1) else vb * scale**2)
        var = var if var.shape == mean.shape else var.expand(mean.shape)
        factor, ua, ub = _factors(a, b, 1.0, scale, mean.shape), factor_of(a), factor_of(b)
        if ua is not None and ub is not None and factor is not None:  # the cross term: of what moves together in the two
            apart = (ua.square().sum(0) + scale**2 * ub.square().sum(0)).expand(mean.shape)
            var = (var - apart).clamp_min(0) + factor.square().sum(0)
    return Moments(mean, var, factor)


@rule("add")
def add(a: Operand, b: Operand, *, alpha: float = 1, adjoint: bool = False) -> Moments:
    r"""a + alpha * b: :math:`v_a + \alpha^2 v_b`."""
    return _sum(a, b, alpha, adjoint)


@rule("sub", "subtract")
def sub(a: Operand, b: Operand, *, alpha: float = 1, adjoint: bool = False) -> Moments:
    r"""a - alpha * b: :math:`v_a + \alpha^2 v_b`."""
    return _sum(a, b, -alpha, adjoint)


@rule("rsub")
def rsub(a: Moments | Weight, b: Operand, *, adjoint: bool = False) -> Moments:
    """b - a."""
    return _sum(_scale(a, -1.0, adjoint), b, 1, adjoint)


def _scale(x: Moments | Weight, by: Number, adjoint: bool) -> Moments:
    """Times what is certain."""
    mean, factor = x.mean * by, factor_of(x)
    with still(adjoint):
        var = x.var * by**2
    return Moments(mean, var.expand(mean.shape), None if factor is None else _scaled(factor, by, mean.shape))


@rule("neg", "negative")
def neg(x: Moments, *, adjoint: bool = False) -> Moments:
    """-x: the same variance."""
    return _scale(x, -1.0, adjoint)


@rule("mul", "multiply")
def mul(a: Operand, b: Operand, *, adjoint: bool = False, taylor: bool = False) -> Moments:
    r"""Of independent numbers: :math:`v_a v_b + m_a^2 v_b + m_b^2 v_a`; of a number with itself see `square`."""
    if a is b:
        return RULES["square"](a, adjoint=adjoint, taylor=taylor)
    if not uncertain(a):
        a, b = b, a
    assert uncertain(a)
    if not uncertain(b):
        return _scale(a, b, adjoint)
    mean = a.mean * b.mean
    with still(adjoint):
        var = a.var * (b.mean**2 if taylor else b.var + b.mean**2) + a.mean**2 * b.var
        factor = _factors(a, b, b.mean, a.mean, mean.shape)
    return Moments(mean, var, factor)


@rule("div", "divide", "true_divide")
def div(
    a: Operand, b: Operand, *, rounding_mode: str | None = None, adjoint: bool = False, taylor: bool = False,
    groups: tuple | None = None,
) -> Moments:  # fmt: skip
    """a times 1 / b, whose moments are those of `reciprocal`; of `groups` see `group_softmax`."""
    if groups is not None:
        return group_softmax(*groups, adjoint=adjoint)
    require(rounding_mode is None, f"a division that rounds has no rule for one pass; got rounding_mode={rounding_mode!r}")
    inverse = RULES["reciprocal"](b, adjoint=adjoint, taylor=taylor) if uncertain(b) else 1 / b  # pyright: ignore[reportOperatorIssue]
    return mul(a, inverse, adjoint=adjoint, taylor=taylor)


@rule("rdiv")
def rdiv(a: Operand, b: Operand, *, adjoint: bool = False, taylor: bool = False) -> Moments:
    """b / a."""
    return div(b, a, adjoint=adjoint, taylor=taylor)


@rule("pow")
def power(x: Moments, exponent: float, *, adjoint: bool = False, taylor: bool = False) -> Moments:
    r""":math:`x^p`: of p = 2 exactly, else to second order in the mean, :math:`m^p + \tfrac{1}{2} p (p - 1) m^{p - 2} v`, and to first
    in the variance, :math:`(p m^{p - 1})^2 v`."""
    require(
        uncertain(x) and not uncertain(exponent),
        "a power with a random exponent has no rule for one pass: write it as exp(p * log(x))",
    )
    if exponent == 2:
        return RULES["square"](x, adjoint=adjoint, taylor=taylor)

    def _moments(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope = exponent * m ** (exponent - 1)
        bend = 0.0 if taylor else 0.5 * exponent * (exponent - 1) * m ** (exponent - 2) * v
        return m**exponent + bend, slope * slope * v, slope

    return elementwise(_moments, x, adjoint)


@rule("addcmul")
def addcmul(x: Operand, a: Operand, b: Operand, *, value: float = 1, adjoint: bool = False, taylor: bool = False) -> Moments:
    """x + value * a * b of independent numbers."""
    product = mul(a, b, adjoint=adjoint, taylor=taylor) if uncertain(a) or uncertain(b) else a * b  # pyright: ignore[reportOperatorIssue]
    return add(x, product, alpha=value, adjoint=adjoint)


def _reduction(function: Callable[..., Tensor], mean: bool) -> Callable[..., Moments]:
    """The rule of a sum over axes, or of a mean: variances add up, and are divided by the square of the count."""

    def _apply(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: None = None, adjoint: bool = False) -> Moments:
        axes = from_end(dim, x.mean.ndim)
        count = math.prod(x.mean.shape[axis] for axis in axes)
        result, factor = function(x.mean, axes, keepdim), None
        with still(adjoint):
            var = residual(x).sum(axes, keepdim)
            if x.factor is not None:
                factor = x.factor.sum(axes, keepdim)
                var = var + factor.square().sum(0)
            if mean:
                var, factor = var / count**2, None if factor is None else factor / count
        return Moments(result, var, factor)

    return _apply


rule("sum")(_reduction(torch.sum, False))
rule("mean")(_reduction(torch.mean, True))
