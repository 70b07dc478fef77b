"""Sums, differences, products and quotients of numbers, of which some or all are random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.posteriors.predict.streamlined.moments import Moments, Weight, mean_of, still, uncertain, var_of
from dubito.posteriors.predict.streamlined.registry import rule
from dubito.posteriors.predict.streamlined.rules.activations import square
from dubito.posteriors.predict.streamlined.rules.shapes import widened


def _factors(a: Any, b: Any, left: Any, right: Any, shape: torch.Size) -> Tensor | None:
    """left * directions of a + right * directions of b, which add up where they are the same directions."""
    found = [
        (factor * by).expand(len(factor), *shape)
        for factor, by in ((getattr(a, "factor", None), left), (getattr(b, "factor", None), right))
        if factor is not None
    ]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.stack(widened(found)).sum(0)


def _sum(a: Any, b: Any, sign: float, alpha: float, adjoint: bool) -> Moments:
    scale = sign * alpha
    if a is b:
        return _scaled(a, 1 + scale, adjoint)
    mean = torch.add(mean_of(a), mean_of(b), alpha=scale) if isinstance(mean_of(a), Tensor) else mean_of(a) + scale * mean_of(b)
    with still(adjoint):
        va, vb = var_of(a), var_of(b)
        vb = vb if vb is None or scale in (1, -1) else vb * scale**2
        var = va + vb if va is not None and vb is not None else va if vb is None else vb
        assert var is not None
        var = var if var.shape == mean.shape else var.expand(mean.shape)
        factor = _factors(a, b, 1.0, scale, mean.shape)
        both = getattr(a, "factor", None) is not None and getattr(b, "factor", None) is not None
        if both and factor is not None:  # the cross term: of what moves together in the two
            apart = (a.factor.square().sum(0) + scale**2 * b.factor.square().sum(0)).expand(mean.shape)
            var = (var - apart).clamp_min(0) + factor.square().sum(0)
    return Moments(mean, var, factor)


@rule("add")
def add(a: Any, b: Any, *, alpha: float = 1, adjoint: bool = False) -> Moments:
    return _sum(a, b, 1, alpha, adjoint)


@rule("sub", "subtract")
def sub(a: Any, b: Any, *, alpha: float = 1, adjoint: bool = False) -> Moments:
    return _sum(a, b, -1, alpha, adjoint)


@rule("rsub")
def rsub(a: Any, b: Any, *, adjoint: bool = False) -> Moments:
    return _sum(_scaled(a, -1.0, adjoint), b, 1, 1, adjoint)


def _scaled(x: Moments | Weight, by: Any, adjoint: bool) -> Moments:
    """Times what is certain."""
    mean = x.mean * by
    with still(adjoint):
        var = x.var * by**2
    factor = getattr(x, "factor", None)
    return Moments(mean, var.expand(mean.shape), None if factor is None else (factor * by).expand(len(factor), *mean.shape))


@rule("neg", "negative")
def neg(x: Moments, *, adjoint: bool = False) -> Moments:
    return _scaled(x, -1.0, adjoint)


@rule("mul", "multiply")
def mul(a: Any, b: Any, *, adjoint: bool = False) -> Moments:
    r"""Of independent numbers: :math:`v_a v_b + m_a^2 v_b + m_b^2 v_a`."""
    if a is b:
        return square(a, adjoint=adjoint)
    if not uncertain(a) or not uncertain(b):
        return _scaled(a, b, adjoint) if uncertain(a) else _scaled(b, a, adjoint)
    mean = a.mean * b.mean
    with still(adjoint):
        var = a.var * (b.var + b.mean**2) + a.mean**2 * b.var
        factor = _factors(a, b, b.mean, a.mean, mean.shape)
    return Moments(mean, var, factor)


@rule("div", "divide", "true_divide")
def div(a: Any, b: Any, *, rounding_mode: str | None = None, adjoint: bool = False) -> Moments:
    if rounding_mode is not None:
        raise ValueError("a division that rounds has no streamlined rule")
    if not uncertain(b):
        return _scaled(a, 1 / b, adjoint)
    from dubito.posteriors.predict.streamlined.registry import RULES

    return mul(a, RULES["reciprocal"](b, adjoint=adjoint), adjoint=adjoint)


@rule("rdiv")
def rdiv(a: Any, b: Any, *, adjoint: bool = False) -> Moments:
    return div(b, a, adjoint=adjoint)


@rule("pow")
def power(x: Moments, exponent: Any, *, adjoint: bool = False) -> Moments:
    from dubito.posteriors.predict.streamlined.rules.activations import elementwise

    if uncertain(exponent) or not uncertain(x):
        raise ValueError("a power with a random exponent has no streamlined rule")
    if exponent == 2:
        return square(x, adjoint=adjoint)

    def moments(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope = exponent * m ** (exponent - 1)
        return m**exponent + 0.5 * exponent * (exponent - 1) * m ** (exponent - 2) * v, slope * slope * v, slope

    return elementwise(moments, x, adjoint)


@rule("addcmul")
def addcmul(x: Any, a: Any, b: Any, *, value: float = 1, adjoint: bool = False) -> Moments:
    return add(x, product(a, b, adjoint), alpha=value, adjoint=adjoint)


def product(a: Any, b: Any, adjoint: bool) -> Any:
    """a * b, random or not."""
    return mul(a, b, adjoint=adjoint) if uncertain(a) or uncertain(b) else a * b


def _reduced(function: Any, mean: bool) -> Any:
    def apply(x: Moments, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, adjoint: bool = False) -> Moments:
        axes = tuple(range(x.mean.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        count = 1
        for axis in axes:
            count *= x.mean.shape[axis]
        total = function(x.mean, axes, keepdim)
        with still(adjoint):
            if x.factor is None:
                var, factor = x.var.sum(axes, keepdim), None
            else:
                from dubito.posteriors.predict.streamlined.moments import residual

                shifted = tuple(axis if axis < 0 else axis + 1 for axis in axes)
                factor = x.factor.sum(shifted, keepdim)
                var = residual(x).sum(axes, keepdim) + factor.square().sum(0)
            if mean:
                var, factor = var / count**2, None if factor is None else factor / count
        return Moments(total, var, factor)

    return apply


rule("sum")(_reduced(torch.sum, False))
rule("mean")(_reduced(torch.mean, True))
