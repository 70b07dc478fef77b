r"""Attention. With scores :math:`s_{ij} = q_i \cdot k_j / \sqrt{D}`, their softmax A and :math:`o_i = \sum_j A_{ij} V_j`, to first
order:

.. math:: \mathrm{Var}[o_i] = \sum_j A_{ij}^2 \mathrm{Var}[V_j] + \sum_j A_{ij}^2 (V_j - o_i)^{\circ 2} u_{ij}, \qquad
          u_{ij} = \tfrac{1}{D} \sum_d (q_{id}^2 + v^q_{id}) v^k_{jd} + c_i (k_{jd} - \bar k_{id})^2 v^q_{id},

with :math:`\bar k = A k`, since what moves all scores alike changes nothing. The squares are expanded, so that all are products of
matrices of the size of A. A query's noise moves all of its scores at once; that is not followed (it would take a matrix [D, D] for each
token), but :math:`c_i`, a function of the weights :math:`A_i`, makes it right on average where keys and values are independent.

Else noise is taken to be each token's own, but for that of the weights that made the values: they are the same for all tokens, so that
their part is :math:`S (A m)^{\circ 2}` and not :math:`A^{\circ 2} (S m^{\circ 2})`, m being what those weights multiplied (`origin`).

`find_origin` tells where the values come from: the layer that made them, found once in the trace. Between a linear layer and
the attention there are only operations that move numbers about: they split off q, k and v and the heads. They are replayed on the
numbers' positions, for three examples, and what comes out tells which of the layer's outputs each head has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dubito.curvature.capture import tapped
from dubito.posteriors.predict.streamlined.moments import (
    RULES,
    Moments,
    Value,
    Weight,
    block_of,
    factor_of,
    mean_of,
    plus,
    residual,
    residual_of,
    rule,
    still,
    total,
    uncertain,
    var_of,
)
from dubito.posteriors.predict.streamlined.operations import Step, Trace, resolve, slot_of
from dubito.posteriors.predict.streamlined.rules.linear import bilinear
from dubito.tensors.covariances.propagation import Rotated

MOVES = {
    "view", "reshape", "unflatten", "flatten", "transpose", "permute", "movedim", "swapaxes", "squeeze", "unsqueeze", "contiguous",
    "clone", "chunk", "split", "unbind", "select", "narrow", "getitem", "tensor_split",
}  # fmt: skip


class Origin(NamedTuple):
    """A linear layer with random weights, and which of its outputs are which head's."""

    input: Value  # [B, T, I], or [T, B, I]
    weight: Moments | Weight
    bias: Value | None
    channels: (
        Tensor | tuple[int, int, int]
    )  # [H, D], among the layer's outputs; or (start, H, D) where they stand in order, so that no copy is made
    swapped: bool  # tokens before examples

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows r [B, T, I], variances S [H, D, I] and s [H, D]: what the weights make of a sum of rows has the variance S r^2 + s."""
        m = mean_of(self.input).detach()
        rows = m.transpose(0, 1) if self.swapped else m
        block, bias = block_of(self.weight), var_of(self.bias)
        if not isinstance(block, Rotated):  # independent, or taken to be
            return rows, self.of(self.weight.var), None if bias is None else self.of(bias)
        return block.rotate(rows), self.of(block.marginal), None if bias is None or block.biased else self.of(bias)

    def of(self, outputs: Tensor) -> Tensor:
        """[H, D, ...] of something [O, ...] that the layer's outputs have."""
        if isinstance(self.channels, Tensor):
            return outputs[self.channels]
        start, heads, width = self.channels
        return outputs[start : start + heads * width].unflatten(0, (heads, width))


class LayerOutputs(NamedTuple):
    """A linear layer in the trace, and which of its outputs the values are."""

    step: Step
    channels: Tensor  # [H, D]
    swapped: bool  # tokens before examples


def find_origin(trace: Trace, slot: int | None, uncertain: set[int]) -> LayerOutputs | None:
    """Of the values in that slot, if it is a linear layer with random weights over tokens and the way from there is understood."""
    makers, path = trace.makers, []
    step = makers.get(slot)
    while step is not None and slot is not None and step.name in MOVES:
        if step.source is None or len(step.inputs) > 1:
            return None
        path.append((step, step.outputs.index(slot)))
        slot = step.source
        step = makers.get(slot)
    if step is None or step.name != "linear" or len(step.args) < 2 or slot_of(step.args[1]) not in uncertain:
        return None
    shape = trace.shapes[step.out.slot]
    return _read(step, _replay(path, shape, trace.batch), shape) if len(shape) == 3 else None


def _replay(path: list[tuple[Step, int]], shape: tuple[int, ...], batch: int) -> Tensor:
    """Positions in a tensor of that shape, moved as the steps do (the last comes first); of several results one is followed."""
    where = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for step, place in reversed(path):
        args, kwargs = resolve((step.args[1:], step.kwargs), lambda slot: slot, lambda size: size.value(batch))
        moved = step.func(where, *args, **kwargs)
        where = moved if step.result is not None else moved[place]
    return where


def _read(step: Step, where: Tensor, shape: tuple[int, ...]) -> LayerOutputs | None:
    """Positions [B, H, T, D] (or [B, T, D], or [B H, T, D]) in the layer's output, read as tokens and channels."""
    rows, channels = where // shape[-1], where % shape[-1]
    for swapped in (False, True):
        tokens, batch = (shape[0], shape[1]) if swapped else (shape[1], shape[0])
        if where.ndim < 3 or where.shape[-2] != tokens or where.shape[:-2].numel() % batch:
            continue
        row, channel = (t.reshape(batch, -1, tokens, where.shape[-1]) for t in (rows, channels))
        grid = torch.arange(batch * tokens)
        grid = grid.reshape(tokens, batch).mT if swapped else grid.reshape(batch, tokens)
        first = channel[:1, :, :1]
        if torch.equal(row, grid[:, None, :, None].expand(row.shape)) and torch.equal(channel, first.expand(channel.shape)):
            return LayerOutputs(step, first[0, :, 0].clone(), swapped)
    return None


@rule("softmax")
def softmax(
    x: Moments, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, *, adjoint: bool = False
) -> Moments:
    r"""The softmax A of the means, and :math:`\mathrm{Var}_i = A_i^2 [v_i (1 - 2 A_i) + \sum_j A_j^2 v_j]`."""
    x, dim = _scores_of(x, dtype), _axis(dim)
    mean = torch.softmax(x.mean, dim)
    with still(adjoint):
        a = mean.detach() if adjoint else mean
        own, square = residual(x), a * a
        var = (square * (own * (1 - 2 * a) + (square * own).sum(dim, keepdim=True))).clamp_min(0)
        factor = None if x.factor is None else vmap(lambda u: a * (u - (a * u).sum(dim, keepdim=True)))(x.factor)
        var = var if factor is None else var + factor.square().sum(0)
    return Moments(mean, var, factor)


@rule("log_softmax")
def log_softmax(
    x: Moments, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None, *, adjoint: bool = False
) -> Moments:
    r"""The log softmax of the means, and :math:`\mathrm{Var}_i = v_i (1 - 2 A_i) + \sum_j A_j^2 v_j`."""
    x, dim = _scores_of(x, dtype), _axis(dim)
    mean = torch.log_softmax(x.mean, dim)
    with still(adjoint):
        a, own = mean.detach().exp() if adjoint else mean.exp(), residual(x)
        var = (own * (1 - 2 * a) + (a * a * own).sum(dim, keepdim=True)).clamp_min(0)
        factor = None if x.factor is None else vmap(lambda u: u - (a * u).sum(dim, keepdim=True))(x.factor)
        var = var if factor is None else var + factor.square().sum(0)
    return Moments(mean, var, factor)


def _scores_of(x: Moments, dtype: torch.dtype | None) -> Moments:
    return x if dtype is None else RULES["to"](x, dtype)


def _axis(dim: int | None) -> int:
    if dim is None:
        raise ValueError("softmax() without an axis has no rule for one pass: give its axis, as softmax(x, dim=-1)")
    return dim


class _Scores(NamedTuple):
    """Means of an attention: queries, keys, values, weights A and outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    o: Tensor


@rule("scaled_dot_product_attention")
def attention(
    query: Value, key: Value, value: Value, attn_mask: Value | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False, adjoint: bool = False, axis: int | None = None,
    origin: tuple | None = None, taylor: bool = False,
) -> Moments:  # fmt: skip
    """The attention of the means, with the variance that is written at the head of this module; a random mask (a learned bias of
    positions) adds to the scores' noise. `taylor`: of the values' noise only, each token's own."""
    groups = mean_of(query).shape[-3] // mean_of(key).shape[-3] if enable_gqa else 1
    if groups > 1:
        key, value = _repeat(key, groups), _repeat(value, groups)
    scale = 1 / math.sqrt(mean_of(query).shape[-1]) if scale is None else scale
    q, k, v = mean_of(query), mean_of(key), mean_of(value)
    mask = _mask(mean_of(attn_mask), is_causal, q, k)
    a = torch.softmax(plus((q * scale) @ k.mT, mask), -1)
    mean = a @ v
    noise = None
    with still(adjoint):
        means = _Scores(*(t.detach() if adjoint else t for t in (q, k, v, a, mean)))
        vq, vk, vv, vm = (residual_of(t) for t in (query, key, value, attn_mask))
        vq, vk, vm, origin = (None, None, None, None) if taylor and vv is not None else (vq, vk, vm, origin)
        square = means.a * means.a
        var = torch.zeros((), dtype=mean.dtype, device=mean.device)
        if vv is not None:
            var = var + (square @ vv if origin is None else shared_by_tokens(square, means.a, vv, Origin(*origin), groups))
        if any(t is not None for t in (vq, vk, vm)):
            var = var + _from_scores(means, square, (vq, vk, vm), scale, taylor)
        if dropout_p > 0:  # kept on, as by MC dropout
            noise = dropout_p / (1 - dropout_p) * (square @ plus(means.v * means.v, vv))
            var = var + noise
        factor = _directions(means, scale, *(factor_of(t) for t in (query, key, value, attn_mask)))
        var = var if factor is None else var + factor.square().sum(0)
    if adjoint and noise is not None and axis is not None:
        mean = tapped(mean, noise, axis)
    return Moments(mean, var.expand(mean.shape), factor)


def _from_scores(
    means: _Scores, square: Tensor, variances: Sequence[Tensor | None], scale: float, taylor: bool = False
) -> Tensor:
    r"""What noise of queries, keys and the mask adds: :math:`\sum_j A_{ij}^2 (V_j - o_i)^2 u_{ij}`."""
    q, k, v, a, o = means
    vq, vk, vm = variances
    u = torch.zeros((), dtype=o.dtype, device=o.device)
    if vk is not None:
        u = plus(q * q, None if taylor else vq) @ vk.mT
    if vq is not None:
        average = a @ k
        apart = vq @ (k * k).mT - 2 * (vq * average) @ k.mT + (vq * average * average).sum(-1, keepdim=True)
        u = u + _together(a, square) * apart.clamp_min(0)
    p = square * plus(u * scale**2, vm)
    return (p @ (v * v) - 2 * o * (p @ v) + o * o * p.sum(-1, keepdim=True)).clamp_min(0)


def _together(a: Tensor, square: Tensor) -> Tensor:
    """c, [..., T, 1]: what squares of sums over tokens are to sums of squares, on average over independent keys and values."""
    second, third, fourth = (t.sum(-1, keepdim=True) for t in (square, square * a, square * square))
    sums = second - 2 * third + second * second
    squares = (1 + second) ** 2 * second - 4 * (1 + second) * third + 4 * fourth
    return (sums / squares.clamp_min(1e-12)).clamp(1, 2)  # both are zero where all weight is on one token


def _repeat(x: Value, times: int) -> Value:
    """Heads shared by several queries, once for each."""
    if not uncertain(x):
        return x.repeat_interleave(times, -3)
    factor = factor_of(x)
    factor = None if factor is None else factor.repeat_interleave(times, -3)
    return Moments(x.mean.repeat_interleave(times, -3), x.var.repeat_interleave(times, -3), factor)


def _mask(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores."""
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask.logical_not(), -math.inf)


def _directions(
    means: _Scores, scale: float, query: Tensor | None, key: Tensor | None, value: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Directions through the attention, linearized at its means."""
    q, k, v, a, _ = means

    def _move(u: Tensor) -> Tensor:  # a move of the scores, to the outputs
        return (a * (u - (a * u).sum(-1, keepdim=True))) @ v

    steps = (
        (query, lambda u: _move((u * scale) @ k.mT)), (key, lambda u: _move((q * scale) @ u.mT)), (value, lambda u: a @ u),
        (mask, _move),
    )  # fmt: skip
    moved = [vmap(step)(factor) for factor, step in steps if factor is not None]
    return total(moved, a) if moved else None


def shared_by_tokens(square: Tensor, a: Tensor, var: Tensor, origin: Origin, groups: int = 1) -> Tensor:
    r"""The values' part of the variance where the weights behind them are the same for all tokens:
    :math:`A^{\circ 2} (v - S m^{\circ 2}) + S (A m)^{\circ 2}`."""
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
    result = square @ (var - alike).clamp_min(0) + together
    return result.reshape(*shape[:-1], result.shape[-1])


@rule("bmm", "matmul")
def matmul(
    a: Value, b: Value, *, adjoint: bool = False, axis: int | None = None, origin: tuple | None = None, taylor: bool = False
) -> Moments:
    """a @ b, see `bilinear`; of attention weights and values the part that the tokens share is that of `shared_by_tokens`."""
    result, v = bilinear(torch.matmul, a, b, adjoint, axis, taylor), var_of(b)
    if origin is None or taylor or result.factor is not None or v is None:
        return result
    with still(adjoint):
        weights = mean_of(a).detach() if adjoint else mean_of(a)
        square = weights * weights
        var = result.var - square @ v + shared_by_tokens(square, weights, v, Origin(*origin))
    return Moments(result.mean, var)
