r"""Layers that multiply by weights. With input means m and variances v, weights W with variances S, biases with variances s:

.. math:: E[h] = W m + b, \qquad \mathrm{Var}[h] = S m^2 + (W^2 + S) v + s.

With directions u (`factor`) the input's covariance is not diagonal: :math:`W u` goes on, and what of v is each unit's own makes new
directions, :math:`W \mathrm{diag}(\sqrt{d})`, all of them (`rank=-1`) or mixed into `rank` of them by random signs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from dubito.curvature.capture import heard, noted, tapped
from dubito.posteriors.predict.streamlined.moments import Moments, Weight, mean_of, residual, still, uncertain, var_of
from dubito.posteriors.predict.streamlined.registry import rule
from dubito.posteriors.predict.streamlined.rules.shapes import widened
from dubito.tensors.covariances.noise import Noise, Rotated


def affine(
    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Moments | Tensor,
    weight: Any,
    bias: Any,
    adjoint: bool,
    rank: int,
    kronecker: Callable[[Any, Tensor], Tensor] | None = None,
    square: Tensor | None = None,
) -> Moments:
    """The rule of a map that is linear in its input and in its weight, such as a product or a convolution."""
    m, v = mean_of(x), var_of(x)
    w, s, b, sb = mean_of(weight), var_of(weight), mean_of(bias), var_of(bias)
    mean = apply(m if v is None or not adjoint else noted(m, v), w, b)
    with still(adjoint):
        m, w = (m.detach(), w.detach()) if adjoint else (m, w)
        block = weight.block if isinstance(weight, Weight) else None
        if block is not None and kronecker is not None:
            var = kronecker(block, m)
            sb = None if block.biased else sb  # its part of the bias is inside
        elif s is not None:
            var, sb = apply(m * m, s, sb), None
        else:
            var = None
        factor = None
        if v is None:
            pass
        elif rank and isinstance(x, Moments):
            own = residual(x)
            extra, factor = _directions(apply, x, own, w, rank)
            spread = extra + (apply(own, w * w, None) if s is None else apply(own, w * w, None) + apply(v, s, None))
            var = spread if var is None else var + spread
        else:
            if isinstance(weight, Weight):
                square = weight.second
            elif square is None:
                square = w * w if s is None else w * w + s
            assert square is not None
            spread = apply(v, square, None)
            var = spread if var is None else var + spread
        if rank and block is not None and apply is F.linear and m.ndim == 2:  # outputs move together by their weights too
            factor = _joined(factor, block.directions(m), rank)
        if rank and isinstance(bias, Weight) and bias.block is not None and apply is F.linear and m.ndim == 2:
            factor = _joined(factor, bias.block.directions(m), rank)
        if sb is not None:
            shape = [1] * mean.ndim
            shape[_channel(apply, mean)] = -1
            var = sb.view(shape).expand_as(mean) if var is None else var + sb.view(shape)
    assert var is not None
    return Moments(mean, var, factor)


def _channel(apply: Callable, mean: Tensor) -> int:
    return getattr(apply, "channel", -1)


def _directions(apply: Callable, x: Moments, own: Tensor, w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Variances that directions explain, and the directions after the layer."""

    def once(u: Tensor) -> Tensor:  # [R, B, ...]; (vmap would fix the number of examples in what is exported)
        return apply(u.flatten(0, 1), w, None).unflatten(0, u.shape[:2])

    old = None if x.factor is None else once(x.factor)
    explained = torch.zeros((), dtype=own.dtype, device=own.device) if old is None else old.square().sum(0)
    root = (own + torch.finfo(own.dtype).tiny ** 0.5).sqrt()  # its slope stays finite where there is no variance
    if rank < 0:
        if apply is F.linear and root.ndim == 2:  # W diag(root), for which no matrix product is needed
            new = root.mT.unsqueeze(-1) * w.mT.unsqueeze(1)
            return explained, new if old is None else torch.cat([old, new])
        flat = root.flatten(1)  # every unit of its own
        units = torch.diag_embed(flat).transpose(0, 1).reshape(flat.shape[1], *root.shape)
        new = once(units)
        return explained, new if old is None else torch.cat([old, new])
    signs = _signs(rank, own[0].numel()).to(own).reshape(rank, 1, *own.shape[1:])
    new = once(root * signs)
    return explained, new if old is None else old + new


def _joined(factor: Tensor | None, new: Tensor, rank: int) -> Tensor:
    """Directions and new ones: all of them, or mixed into `rank`."""
    if rank > 0:
        new = torch.tensordot(_signs(rank, len(new)).to(new), new, 1)
        return new if factor is None else factor + new
    return new if factor is None else torch.cat([factor, new])


def _signs(rank: int, size: int) -> Tensor:
    """[rank, size] of +-1 / sqrt(rank), the same every time. (Without a cache here, a compiler can take it for a constant.)"""
    return _known_signs(rank, size)


@lru_cache(maxsize=64)
def _known_signs(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 1_000_003 + size)
    return (torch.randint(2, (rank, size), generator=generator) * 2.0 - 1.0) / rank**0.5


@rule("linear")
def linear(
    input: Any, weight: Any, bias: Any = None, *, adjoint: bool = False, rank: int = 0, square: Tensor | None = None
) -> Moments:
    independent = isinstance(weight, Weight) and weight.block is None
    if independent and not adjoint and not rank and not isinstance(bias, Tensor):
        return _independent(input, weight, bias)
    return affine(_linear if adjoint else F.linear, input, weight, bias, adjoint, rank, _kronecker, square)


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return heard(F.linear, x, w, b)


def _independent(input: Any, weight: Weight, bias: Weight | None) -> Moments:
    """The common case, without detours."""
    m, v = mean_of(input), var_of(input)
    mean = F.linear(m, weight.mean, mean_of(bias))
    var = F.linear(m * m, weight.var, var_of(bias))
    if v is None:
        return Moments(mean, var)
    if torch.is_grad_enabled():
        return Moments(mean, var + F.linear(v, weight.second))
    var.view(-1, var.shape[-1]).addmm_(v.reshape(-1, v.shape[-1]), weight.second.mT)
    return Moments(mean, var)


def _kronecker(block: Noise, m: Tensor) -> Tensor:
    """Variances of W m + b for certain m."""
    return block.var(m)


def _convolution(function: Callable) -> Callable:
    def apply(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
        *, adjoint: bool = False, rank: int = 0, square: Tensor | None = None,
    ) -> Moments:  # fmt: skip
        def convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            given = (x, w, b, stride, padding, dilation, groups)
            return heard(function, *given) if adjoint else function(*given)

        def kronecker(block: Any, m: Tensor) -> Tensor:
            """As of a linear layer: the eigenbasis is a convolution, and what follows is a map of channels."""
            filters = (block.basis[:-1] if block.biased else block.basis).mT.reshape(-1, *mean_of(weight).shape[1:])
            turned = convolve(m, filters, block.basis[-1] if block.biased else None)
            return torch.einsum("oi,bi...->bo...", block.marginal, turned.square())

        convolve.channel = 1  # pyright: ignore[reportFunctionMemberAccess]
        block = weight.block if isinstance(weight, Weight) and groups == 1 else None
        return affine(convolve, input, weight, bias, adjoint, rank, kronecker if isinstance(block, Rotated) else None, square)

    return apply


def _transposed(function: Callable) -> Callable:
    def apply(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1,
        dilation: Any = 1, *, adjoint: bool = False, rank: int = 0,
    ) -> Moments:  # fmt: skip
        def convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return function(x, w, b, stride, padding, output_padding, groups, dilation)

        convolve.channel = 1  # pyright: ignore[reportFunctionMemberAccess]
        return affine(convolve, input, weight, bias, adjoint, rank)

    return apply


for _function in (F.conv1d, F.conv2d, F.conv3d):
    rule(_function)(_convolution(_function))
for _function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    rule(_function)(_transposed(_function))


@rule("embedding")
def embedding(
    input: Tensor, weight: Weight, padding_idx: int | None = None, max_norm: Any = None, *_: Any, adjoint: bool = False, **__: Any
) -> Moments:
    if max_norm is not None:
        raise ValueError("an embedding that is renormalised while it is used (max_norm) has no streamlined rule")
    mean = heard(F.embedding, input, weight.mean, padding_idx) if adjoint else F.embedding(input, weight.mean, padding_idx)
    with still(adjoint):
        var = F.embedding(input, weight.var)
        if padding_idx is not None:
            var = var * (input != padding_idx % weight.var.shape[0]).unsqueeze(-1)
    return Moments(mean, var)


def product(
    function: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any, adjoint: bool = False, axis: int | None = None
) -> Moments:
    """A product that is linear in each of two tensors, of which either may be random; the two are taken to be independent."""
    (m, v), (w, s) = ((mean_of(t), var_of(t)) for t in (a, b))
    mean = function(m, w)
    with still(adjoint):
        m, w = (m.detach(), w.detach()) if adjoint else (m, w)
        var, both = None, None
        own_a, own_b = (residual(t) if isinstance(t, Moments) else var_of(t) for t in (a, b))
        if own_a is not None:
            var = function(own_a, w * w)
        if own_b is not None:
            part = function(m * m, own_b)
            var = part if var is None else var + part
        assert var is not None
        if v is not None and s is not None:
            both = function(v, s)
            var = var + both
        factors = [
            vmap(one)(u)
            for one, u in (
                (lambda u: function(u, w), getattr(a, "factor", None)),
                (lambda u: function(m, u), getattr(b, "factor", None)),
            )
            if u is not None
        ]
        factor = None
        if factors:  # what moves together adds up before it is squared
            factor = factors[0] if len(factors) == 1 else sum(widened(factors), torch.zeros((), device=mean.device))
            var = var + factor.square().sum(0)
    if adjoint and axis is not None and both is not None:  # noise times noise, which no slope tells of
        mean = tapped(mean, both, axis)
    return Moments(mean, var, factor)


@rule("mm")
def mm(a: Any, b: Any, *, adjoint: bool = False, axis: int | None = None) -> Moments:
    return product(torch.matmul, a, b, adjoint, axis)


@rule("rmatmul")
def rmatmul(b: Any, a: Any, *, adjoint: bool = False, axis: int | None = None) -> Moments:
    return product(torch.matmul, a, b, adjoint, axis)


@rule("baddbmm", "addmm")
def baddbmm(
    input: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1, adjoint: bool = False, axis: int | None = None
) -> Moments:
    from dubito.posteriors.predict.streamlined.rules.arithmetic import add, mul

    if not uncertain(a) and not uncertain(b):
        found: Any = torch.matmul(a, b)
    else:
        found = product(torch.matmul, a, b, adjoint, axis)
    if not uncertain(input):
        first: Any = input if beta == 1 else input * beta
    else:
        first = input if beta == 1 else mul(input, beta, adjoint=adjoint)
    return add(first, found, alpha=alpha, adjoint=adjoint)


@rule("einsum")
def einsum(equation: str, *operands: Any, adjoint: bool = False, axis: int | None = None) -> Moments:
    """Of one or two tensors, where no letter stands twice in one of them."""
    given: Any = operands[0] if isinstance(operands[0], list) else operands
    letters = equation.split("->")[0].replace(" ", "").split(",")
    if len(given) > 2 or any(len(set(one)) < len(one.replace("...", ".")) for one in letters):
        raise ValueError("einsum() has a streamlined rule for one or two tensors, and no letter twice in one of them")
    if len(given) == 1:
        x = given[0]
        return product(lambda t, one: torch.einsum(equation, t) * one, x, torch.ones((), device=x.mean.device), adjoint, axis)
    return product(lambda t, u: torch.einsum(equation, t, u), given[0], given[1], adjoint, axis)


@rule("lerp")
def lerp(a: Any, b: Any, weight: Any, *, adjoint: bool = False, axis: int | None = None) -> Moments:
    r""":math:`a + w (b - a)` of three independent numbers: :math:`(1 - w)^2 v_a + w^2 v_b + v_w ((b - a)^2 + v_a + v_b)`."""
    (m, v), (n, u), (w, s) = ((mean_of(t), var_of(t)) for t in (a, b, weight))
    mean = torch.lerp(m, n, w)
    with still(adjoint):
        zero = torch.zeros((), dtype=mean.dtype, device=mean.device)
        own = [zero if t is None else t for t in (v, u)]
        var = (1 - w) ** 2 * own[0] + w**2 * own[1]
        beyond = None
        if s is not None:
            beyond = s * (own[0] + own[1])
            var = var + s * (n - m) ** 2 + beyond
        slopes = ((a, 1 - w), (b, w), (weight, n - m))
        known = [(t.factor, slope) for t, slope in slopes if getattr(t, "factor", None) is not None]
        factor = None
        if known:
            apart = sum((slope**2 * u.square().sum(0) for u, slope in known), zero)
            factor = sum(widened([u * slope for u, slope in known]), zero)
            var = (var - apart).clamp_min(0) + factor.square().sum(0)
        var = var.expand(mean.shape)
    if adjoint and axis is not None and beyond is not None:
        mean = tapped(mean, beyond.expand(mean.shape), axis)
    return Moments(mean, var, factor)
