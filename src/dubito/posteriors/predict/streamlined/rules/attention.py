r"""Attention. With scores :math:`s_{ij} = q_i \cdot k_j / \sqrt{D}`, their softmax A and :math:`o_i = \sum_j A_{ij} V_j`, to first
order:

.. math:: \mathrm{Var}[o_i] = \sum_j A_{ij}^2 \mathrm{Var}[V_j] + \sum_j A_{ij}^2 (V_j - o_i)^{\circ 2} u_{ij}, \qquad
          u_{ij} = \tfrac{1}{D} \sum_d (q_{id}^2 + v^q_{id}) v^k_{jd} + c_i (k_{jd} - \bar k_{id})^2 v^q_{id},

with :math:`\bar k = A k`, since what moves all scores alike changes nothing. The squares are expanded, so that all are products of
matrices of the size of A. A query's noise moves all of its scores at once; that is not followed (it would take a matrix [D, D] for each
token), but :math:`c_i`, a function of the weights :math:`A_i`, makes it right on average where keys and values are independent.

Else noise is taken to be each token's own, but for that of the weights that made the values: they are the same for all tokens, so that
their part is :math:`S (A m)^{\circ 2}` and not :math:`A^{\circ 2} (S m^{\circ 2})`, m being what those weights multiplied (`origin`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dubito.curvature.capture import tapped
from dubito.posteriors.predict.streamlined.moments import Moments, Weight, mean_of, residual, still, var_of
from dubito.posteriors.predict.streamlined.origin import Origin
from dubito.posteriors.predict.streamlined.registry import rule
from dubito.posteriors.predict.streamlined.rules.shapes import widened


@rule("softmax")
def softmax(x: Moments, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None, *, adjoint: bool = False) -> Moments:
    r""":math:`\mathrm{Var}_i = A_i^2 [v_i (1 - 2 A_i) + \sum_j A_j^2 v_j]`."""
    dim = _axis(dim, dtype)
    mean = torch.softmax(x.mean, dim)
    with still(adjoint):
        a = mean.detach() if adjoint else mean
        own, square = residual(x), a * a
        var = (square * (own * (1 - 2 * a) + (square * own).sum(dim, keepdim=True))).clamp_min(0)
        factor = None if x.factor is None else vmap(lambda u: a * (u - (a * u).sum(dim, keepdim=True)))(x.factor)
        var = var if factor is None else var + factor.square().sum(0)
    return Moments(mean, var, factor)


@rule("log_softmax")
def log_softmax(x: Moments, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None, *, adjoint: bool = False) -> Moments:
    r""":math:`\mathrm{Var}_i = v_i (1 - 2 A_i) + \sum_j A_j^2 v_j`."""
    dim = _axis(dim, dtype)
    mean = torch.log_softmax(x.mean, dim)
    with still(adjoint):
        a, own = mean.detach().exp() if adjoint else mean.exp(), residual(x)
        var = (own * (1 - 2 * a) + (a * a * own).sum(dim, keepdim=True)).clamp_min(0)
        factor = None if x.factor is None else vmap(lambda u: u - (a * u).sum(dim, keepdim=True))(x.factor)
        var = var if factor is None else var + factor.square().sum(0)
    return Moments(mean, var, factor)


def _axis(dim: int | None, dtype: Any) -> int:
    if dim is None:
        raise ValueError("softmax() needs its axis (dim) in a streamlined network")
    if dtype is not None:
        raise ValueError("softmax() that changes the type of its numbers has no streamlined rule: write x.to(dtype) before it")
    return dim


@rule("scaled_dot_product_attention")
def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False, adjoint: bool = False, axis: int | None = None, origin: Any = None,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    """`taylor`: of the values' noise only, each token's own."""
    if isinstance(attn_mask, Moments | Weight):
        raise ValueError("attention with a random mask has no streamlined rule: make its weights certain by `only=`")
    groups = mean_of(query).shape[-3] // mean_of(key).shape[-3] if enable_gqa else 1
    if groups > 1:
        key, value = _repeated(key, groups), _repeated(value, groups)
    scale = 1 / math.sqrt(mean_of(query).shape[-1]) if scale is None else scale
    mask = _mask(attn_mask, is_causal, mean_of(query), mean_of(key))

    q, k, v = mean_of(query), mean_of(key), mean_of(value)
    scores = (q * scale) @ k.mT
    a = torch.softmax(scores if mask is None else scores + mask, -1)
    mean = a @ v
    noise = None
    with still(adjoint):
        q, k, v, a, o = (t.detach() for t in (q, k, v, a, mean)) if adjoint else (q, k, v, a, mean)
        vq, vk, vv = (None if var_of(t) is None else _own(t) for t in (query, key, value))
        vq, vk, origin = (None, None, None) if taylor and vv is not None else (vq, vk, origin)
        square = a * a
        var = torch.zeros((), dtype=o.dtype, device=o.device)
        if vv is not None:
            var = var + _values(square, a, vv, origin, groups)
        if vq is not None or vk is not None:
            u = torch.zeros((), dtype=o.dtype, device=o.device)
            if vk is not None:
                u = (q * q if vq is None else q * q + vq) @ vk.mT
            if vq is not None:
                average = a @ k
                apart = vq @ (k * k).mT - 2 * (vq * average) @ k.mT + (vq * average * average).sum(-1, keepdim=True)
                u = u + _together(a, square) * apart.clamp_min(0)
            p = square * (u * scale**2)
            var = var + (p @ (v * v) - 2 * o * (p @ v) + o * o * p.sum(-1, keepdim=True)).clamp_min(0)
        if dropout_p > 0:  # kept on, as by MC dropout
            noise = dropout_p / (1 - dropout_p) * (square @ (v * v if vv is None else v * v + vv))
            var = var + noise
        factor = _directions(a, scale, query, key, value)
        var = var if factor is None else var + factor.square().sum(0)
    if adjoint and noise is not None and axis is not None:
        mean = tapped(mean, noise, axis)
    return Moments(mean, var.expand(mean.shape), factor)


def _together(a: Tensor, square: Tensor) -> Tensor:
    """c, [..., T, 1]: what squares of sums over tokens are to sums of squares, on average over independent keys and values."""
    second, third, fourth = (t.sum(-1, keepdim=True) for t in (square, square * a, square * square))
    sums = second - 2 * third + second * second
    squares = (1 + second) ** 2 * second - 4 * (1 + second) * third + 4 * fourth
    return (sums / squares.clamp_min(1e-12)).clamp(1, 2)  # both are zero where all weight is on one token


def _own(x: Any) -> Tensor:
    return residual(x) if isinstance(x, Moments) else x.var


def _repeated(x: Any, times: int) -> Any:
    """Heads shared by several queries, once for each."""
    if isinstance(x, Tensor):
        return x.repeat_interleave(times, -3)
    factor = None if isinstance(x, Weight) or x.factor is None else x.factor.repeat_interleave(times, -3)
    return Moments(x.mean.repeat_interleave(times, -3), x.var.repeat_interleave(times, -3), factor)


def _mask(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores."""
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask.logical_not(), -math.inf)


def _directions(a: Tensor, scale: float, query: Any, key: Any, value: Any) -> Tensor | None:
    """Directions through the attention, linearised at its means."""
    q, k, v = mean_of(query), mean_of(key), mean_of(value)

    def scores(move: Tensor) -> Tensor:  # a move of the scores, to the outputs
        return (a * (move - (a * move).sum(-1, keepdim=True))) @ v

    steps = (
        (query, lambda u: scores((u * scale) @ k.mT)),
        (key, lambda u: scores((q * scale) @ u.mT)),
        (value, lambda u: a @ u),
    )
    found = [vmap(step)(x.factor) for x, step in steps if isinstance(x, Moments) and x.factor is not None]
    return sum(widened(found), torch.zeros((), dtype=a.dtype, device=a.device)) if found else None


def _values(square: Tensor, a: Tensor, var: Tensor, origin: Any, groups: int = 1) -> Tensor:
    """The values' part of the variance."""
    if origin is None:
        return square @ var
    return shared(square, a, var, Origin(*origin), groups)


def shared(square: Tensor, a: Tensor, var: Tensor, origin: Origin, groups: int = 1) -> Tensor:
    """Where the weights behind the values are the same for all tokens."""
    rows, each, shift = origin.parts()  # [B, T, I], [H, D, I], [H, D]
    if groups > 1:
        each, shift = each.repeat_interleave(groups, 0), None if shift is None else shift.repeat_interleave(groups, 0)
    heads, shape = each.shape[0], a.shape
    a, square, var = (t.reshape(rows.shape[0], heads, *t.shape[-2:]) for t in (a, square, var))
    rows, each = rows.unsqueeze(1), each.mT  # [B, 1, T, I], [H, I, D]
    alike = (rows * rows) @ each  # of every token
    together = (a @ rows).square() @ each
    if shift is not None:  # attention weights add up to 1
        alike, together = alike + shift.unsqueeze(1), together + shift.unsqueeze(1)
    found = square @ (var - alike).clamp_min(0) + together
    return found.reshape(*shape[:-1], found.shape[-1])


@rule("bmm", "matmul")
def matmul(a: Any, b: Any, *, adjoint: bool = False, axis: int | None = None, origin: Any = None) -> Moments:
    """A product of two matrices of which either may be random; the two are taken to be independent."""
    from dubito.posteriors.predict.streamlined.rules.linear import product

    found = product(torch.matmul, a, b, adjoint, axis)
    if origin is None or found.factor is not None:
        return found
    with still(adjoint):  # weights of attention times values: the part that the tokens share, in the place of each one's own
        weights = mean_of(a).detach() if adjoint else mean_of(a)
        square = weights * weights
        var = found.var - square @ b.var + shared(square, weights, b.var, Origin(*origin))
    return Moments(found.mean, var, found.factor)
