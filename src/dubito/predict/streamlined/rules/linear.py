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

from dubito.curvature.capture import noted
from dubito.linalg import Kronecker
from dubito.predict.streamlined.moments import Moments, Weight, mean_of, residual, still, var_of
from dubito.predict.streamlined.registry import rule


def affine(
    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Moments | Tensor,
    weight: Any,
    bias: Any,
    adjoint: bool,
    rank: int,
    kronecker: Callable[[Kronecker, Tensor], Tensor] | None = None,
) -> Moments:
    """The rule of a map that is linear in its input and in its weight, such as a product or a convolution."""
    m, v = mean_of(x), var_of(x)
    w, s, b, sb = mean_of(weight), var_of(weight), mean_of(bias), var_of(bias)
    mean = apply(m if v is None or not adjoint else noted(m, v), w, b)
    with still(adjoint):
        m, w = (m.detach(), w.detach()) if adjoint else (m, w)
        block = weight.block if isinstance(weight, Weight) else None
        if block is not None and kronecker is not None:
            var, sb = kronecker(block, m), None  # its part of the bias is inside
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
            second = weight.second if isinstance(weight, Weight) else w * w if s is None else w * w + s
            spread = apply(v, second, None)
            var = spread if var is None else var + spread
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
    once = vmap(lambda u: apply(u, w, None))
    old = None if x.factor is None else once(x.factor)
    explained = torch.zeros((), dtype=own.dtype, device=own.device) if old is None else old.square().sum(0)
    root = own.sqrt()
    if rank < 0:
        flat = root.flatten(1)  # every unit of its own
        units = torch.diag_embed(flat).transpose(0, 1).reshape(flat.shape[1], *root.shape)
        new = once(units)
        return explained, new if old is None else torch.cat([old, new])
    signs = _signs(rank, own[0].numel()).to(own).reshape(rank, 1, *own.shape[1:])
    new = once(root * signs)
    return explained, new if old is None else old + new


@lru_cache(maxsize=64)
def _signs(rank: int, size: int) -> Tensor:
    """[rank, size] of +-1 / sqrt(rank), the same every time."""
    generator = torch.Generator().manual_seed(rank * 1_000_003 + size)
    return (torch.randint(2, (rank, size), generator=generator) * 2.0 - 1.0) / rank**0.5


@rule("linear")
def linear(input: Any, weight: Any, bias: Any = None, *, adjoint: bool = False, rank: int = 0) -> Moments:
    return affine(F.linear, input, weight, bias, adjoint, rank, _kronecker)


def _kronecker(block: Kronecker, m: Tensor) -> Tensor:
    """Marginal variances of W m for certain m, in the eigenbasis; the bias is the input that is always 1."""
    basis = block.inputs
    turned = F.linear(m, basis[:-1].mT, basis[-1]) if block.bias is not None else m @ basis
    return (turned.square() @ block.variances.mT) @ (block.left**2).mT


def _convolution(function: Callable) -> Callable:
    def apply(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
        *, adjoint: bool = False, rank: int = 0,
    ) -> Moments:  # fmt: skip
        def convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return function(x, w, b, stride, padding, dilation, groups)

        convolve.channel = 1  # pyright: ignore[reportFunctionMemberAccess]
        return affine(convolve, input, weight, bias, adjoint, rank)

    return apply


for _function in (F.conv1d, F.conv2d, F.conv3d):
    rule(_function)(_convolution(_function))


@rule("embedding")
def embedding(
    input: Tensor, weight: Weight, padding_idx: int | None = None, max_norm: Any = None, *_: Any, adjoint: bool = False, **__: Any
) -> Moments:
    if max_norm is not None:
        raise ValueError("an embedding that is renormalised while it is used (max_norm) has no streamlined rule")
    mean = F.embedding(input, weight.mean, padding_idx)
    with still(adjoint):
        var = F.embedding(input, weight.var)
        if padding_idx is not None:
            var = var * (input != padding_idx % weight.var.shape[0]).unsqueeze(-1)
    return Moments(mean, var)


def _product(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A product of two matrices of which either may be random; the two are taken to be independent."""

    def apply(a: Any, b: Any, *, adjoint: bool = False) -> Moments:
        (m, v), (w, s) = ((mean_of(t), var_of(t)) for t in (a, b))
        mean = function(m, w)
        with still(adjoint):
            var = 0
            if v is not None:
                var = function(v, w * w if s is None else w * w + s)
            if s is not None:
                var = var + function(m * m, s)
        factor = None
        fa, fb = getattr(a, "factor", None), getattr(b, "factor", None)
        if fa is not None:
            factor = vmap(lambda u: function(u, w))(fa)
        if fb is not None:
            other = vmap(lambda u: function(m, u))(fb)
            if factor is None:
                factor = other
            else:
                from dubito.predict.streamlined.rules.shapes import widened

                factor, other = widened([factor, other])
                factor = factor + other
        if factor is not None and fb is None and isinstance(a, Moments):  # what moves together adds up before it is squared
            explained = factor.square().sum(0)
            own = residual(a)
            var = function(own, w * w) + explained + (0 if s is None else function(v + m * m, s))
        assert isinstance(var, Tensor)
        return Moments(mean, var, factor)

    rule(name)(apply)


_product("matmul", torch.matmul)
_product("mm", torch.matmul)
_product("bmm", torch.bmm)
