r"""Layers that multiply by weights. With input means m and variances v, weights W with variances S, biases with variances s:

.. math:: E[h] = W m + b, \qquad \mathrm{Var}[h] = S m^2 + (W^2 + S) v + s.

With directions u (`factor`) the input's covariance is not diagonal: :math:`W u` goes on, and what of v is each unit's own makes new
directions, :math:`W \mathrm{diag}(\sqrt{d})`, all of them (`rank=-1`) or mixed into `rank` of them by random signs.

`head` is the output layer, whose outputs have a covariance: through the inputs they share, and through weights that are not
independent.

.. math:: \mathrm{Cov}[h] = W\, C\, W^T + \Sigma_W(m) + \mathrm{diag}(S v)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from dubito.curvature.capture import heard, noted, tapped, tapped_inputs
from dubito.posteriors.predict.streamlined.moments import (
    RULES,
    Moments,
    Output,
    Sizes,
    Value,
    Weight,
    block_of,
    factor_of,
    is_moments,
    is_weight,
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
from dubito.posteriors.predict.streamlined.rules.arithmetic import add, mul
from dubito.tensors.checks import require
from dubito.tensors.covariances.propagation import Noise, Rotated

# -- a map that is linear in its input and in its weight


@dataclass(frozen=True)
class Layer:
    """A map that is linear in its input and in its weight, such as a product or a convolution: `apply(x, w, b)`.

    `noise(block, m)` is the variance that weights with the covariance `block` put on the outputs of inputs m; None where weights are
    taken to be independent. `channel` is the axis of the outputs that biases are on. `dense`: the map is a matrix product."""

    apply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    noise: Callable[[Noise, Tensor], Tensor] | None = None
    channel: int = -1
    dense: bool = False

    def moments(
        self, x: Value, weight: Value, bias: Value | None, adjoint: bool, rank: int, square: Tensor | None = None,
        taylor: bool = False,
    ) -> Moments:  # fmt: skip
        """:math:`W m + b` and :math:`S m^2 + (W^2 + S) v + s`; `square` is :math:`W^2`, where it is known. `taylor`: without S v."""
        m, v, w = mean_of(x), var_of(x), mean_of(weight)
        mean = self.apply(noted(m, v) if adjoint and v is not None else m, w, mean_of(bias))
        if adjoint and v is not None and (own := var_of(weight)) is not None:
            mean = tapped_inputs(mean, lambda: self.apply(v, own, None))
        with still(adjoint):
            m, w = (m.detach(), w.detach()) if adjoint else (m, w)
            var, shift = self._from_weights(m, weight, var_of(bias))
            factor = None
            if rank and is_moments(x):
                spread, factor = self._with_directions(x, w, None if taylor else var_of(weight), rank)
                var = plus(var, spread)
            elif v is not None:
                if square is None:  # of what is certain it is given
                    square = weight.second if is_weight(weight) else plus(w * w, None if taylor else var_of(weight))
                var = plus(var, self.apply(v, square, None))  # pyright: ignore[reportArgumentType]
            if rank and self.dense and m.ndim == 2:  # outputs move together by their weights too
                for block in [block for block in (block_of(weight), block_of(bias)) if block is not None]:
                    factor = _join(factor, block.directions(m), rank)
            if shift is not None:
                shape = [1] * mean.ndim
                shape[self.channel] = -1
                var = plus(var, shift.view(shape)).expand_as(mean)
        return Moments(mean, var, factor)

    def _from_weights(self, m: Tensor, weight: Value, shift: Tensor | None) -> tuple[Any, Tensor | None]:
        """:math:`S m^2`, which the weights' own noise adds, and what it leaves of the bias's variances to be added."""
        block, s = block_of(weight), var_of(weight)
        if block is not None and self.noise is not None:
            return self.noise(block, m), None if block.biased else shift
        return (None, shift) if s is None else (self.apply(m * m, s, shift), None)

    def _with_directions(self, x: Moments, w: Tensor, s: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
        """:math:`W C W^T + S v`, on the diagonal, where the inputs have the covariance C; and the directions after the layer."""
        own = residual(x)
        explained, factor = _directions(self, x.factor, own, w, rank)
        spread = self.apply(own, w * w, None)
        return explained + (spread if s is None else spread + self.apply(x.var, s, None)), factor


def _directions(layer: Layer, factor: Tensor | None, own: Tensor, w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Variances that directions explain, and the directions after the layer."""

    def _each(u: Tensor) -> Tensor:  # [R, B, ...]; (vmap would fix the number of examples in what is exported)
        return layer.apply(u.flatten(0, 1), w, None).unflatten(0, u.shape[:2])

    old = None if factor is None else _each(factor)
    explained = torch.zeros((), dtype=own.dtype, device=own.device) if old is None else old.square().sum(0)
    root = (own + torch.finfo(own.dtype).tiny ** 0.5).sqrt()  # its slope stays finite where there is no variance
    if rank > 0:
        signs = mixing_signs(rank, own[0].numel()).to(own).reshape(rank, 1, *own.shape[1:])
        return explained, plus(old, _each(root * signs))
    if layer.dense and root.ndim == 2:  # W diag(root), for which no matrix product is needed
        new = root.mT.unsqueeze(-1) * w.mT.unsqueeze(1)
    else:
        flat = root.flatten(1)  # every unit of its own
        new = _each(torch.diag_embed(flat).transpose(0, 1).reshape(flat.shape[1], *root.shape))
    return explained, new if old is None else torch.cat([old, new])


def _join(factor: Tensor | None, new: Tensor, rank: int) -> Tensor:
    """Directions and new ones: all of them, or mixed into `rank`."""
    if rank > 0:
        return plus(factor, torch.tensordot(mixing_signs(rank, len(new)).to(new), new, 1))
    return new if factor is None else torch.cat([factor, new])


def mixing_signs(rank: int, size: int) -> Tensor:
    """[rank, size] of +-1 / sqrt(rank), the same every time. (Without a cache here, a compiler can take it for a constant.)"""
    return _known_signs(rank, size)


@lru_cache(maxsize=64)
def _known_signs(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 1_000_003 + size)
    return (torch.randint(2, (rank, size), generator=generator) * 2.0 - 1.0) / rank**0.5


# -- layers


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return heard(F.linear, x, w, b)


def _block_variance(block: Noise, m: Tensor) -> Tensor:
    return block.var(m)


LINEAR, LINEAR_ADJOINT = Layer(F.linear, _block_variance, dense=True), Layer(_linear, _block_variance)


@rule("linear")
def linear(
    input: Value, weight: Value, bias: Value | None = None, *, adjoint: bool = False, rank: int = 0, square: Tensor | None = None,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    r""":math:`W m + b` and :math:`S m^2 + (W^2 + S) v + s`; of weights that are not independent :math:`\Sigma_W(m)` for
    :math:`S m^2 + s`."""
    if rank and is_moments(input) and input.mean.ndim == 1:  # one row, of what coupled rows have in common
        row = linear(RULES["unsqueeze"](input, 0), weight, bias, adjoint=adjoint, rank=rank, square=square, taylor=taylor)
        return RULES["squeeze"](row, 0)
    if is_weight(weight) and weight.block is None and not adjoint and not rank and (bias is None or uncertain(bias)):
        return _independent(input, weight, bias)
    return (LINEAR_ADJOINT if adjoint else LINEAR).moments(input, weight, bias, adjoint, rank, square, taylor)


def _independent(input: Value, weight: Weight, bias: Value | None) -> Moments:
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


def _convolution(function: Callable[..., Tensor]) -> Callable[..., Moments]:
    """The rule of a convolution."""

    def _apply(
        input: Value, weight: Value, bias: Value | None = None, stride: Sizes = 1, padding: Sizes | str = 0, dilation: Sizes = 1,
        groups: int = 1, *, adjoint: bool = False, rank: int = 0, square: Tensor | None = None, taylor: bool = False,
    ) -> Moments:  # fmt: skip
        def _convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            given = (x, w, b, stride, padding, dilation, groups)
            return heard(function, *given) if adjoint else function(*given)

        def _rotated(block: Rotated, m: Tensor) -> Tensor:
            """As of a linear layer: the eigenbasis is a convolution, and what follows is a map of channels."""
            filters = (block.basis[:-1] if block.biased else block.basis).mT.reshape(-1, *mean_of(weight).shape[1:])
            rotated = _convolve(m, filters, block.basis[-1] if block.biased else None)
            return torch.einsum("oi,bi...->bo...", block.marginal, rotated.square())

        known = groups == 1 and isinstance(block_of(weight), Rotated)
        layer = Layer(_convolve, _rotated if known else None, channel=1)  # pyright: ignore[reportArgumentType]
        return layer.moments(input, weight, bias, adjoint, rank, square, taylor)

    return _apply


def _transposed(function: Callable[..., Tensor]) -> Callable[..., Moments]:
    """The rule of a transposed convolution."""

    def _apply(
        input: Value, weight: Value, bias: Value | None = None, stride: Sizes = 1, padding: Sizes = 0, output_padding: Sizes = 0,
        groups: int = 1, dilation: Sizes = 1, *, adjoint: bool = False, rank: int = 0, taylor: bool = False,
    ) -> Moments:  # fmt: skip
        def _convolve(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return function(x, w, b, stride, padding, output_padding, groups, dilation)

        return Layer(_convolve, channel=1).moments(input, weight, bias, adjoint, rank, taylor=taylor)

    return _apply


for _function in (F.conv1d, F.conv2d, F.conv3d):
    rule(_function)(_convolution(_function))
for _function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    rule(_function)(_transposed(_function))


@rule("embedding")
def embedding(
    input: Tensor, weight: Weight, padding_idx: int | None = None, max_norm: float | None = None, *_: object,
    adjoint: bool = False, **__: object,
) -> Moments:  # fmt: skip
    """The rows of the mean and of the variance; that of the padding has no variance."""
    require(
        max_norm is None, "an embedding with max_norm changes while it is used and has no rule for one pass: leave out max_norm"
    )
    mean = (heard if adjoint else _call)(F.embedding, input, weight.mean, padding_idx)
    with still(adjoint):
        var = F.embedding(input, weight.var)
        if padding_idx is not None:
            var = var * (input != padding_idx % weight.var.shape[0]).unsqueeze(-1)
    return Moments(mean, var)


def _call(function: Callable[..., Tensor], *args: object) -> Tensor:
    return function(*args)


# -- products of two values


def bilinear(
    function: Callable[[Tensor, Tensor], Tensor], a: Value, b: Value, adjoint: bool = False, axis: int | None = None,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    """The rule of a product that is linear in each of two tensors, which are taken to be independent; either may be random:
    f(m_a, m_b) and f(v_a, m_b^2) + f(m_a^2, v_b) + f(v_a, v_b), without the last to first order (`taylor`)."""
    m, w = mean_of(a), mean_of(b)
    mean = function(m, w)
    with still(adjoint):
        m, w = (m.detach(), w.detach()) if adjoint else (m, w)
        v, s, own_a, own_b = var_of(a), var_of(b), residual_of(a), residual_of(b)
        var = plus(None if own_a is None else function(own_a, w * w), None if own_b is None else function(m * m, own_b))
        both = None if v is None or s is None or taylor else function(v, s)
        var = plus(var, both)
        sides = ((lambda u: function(u, w), factor_of(a)), (lambda u: function(m, u), factor_of(b)))
        factors = [vmap(side)(u) for side, u in sides if u is not None]
        factor = None
        if factors:  # what moves together adds up before it is squared
            factor = factors[0] if len(factors) == 1 else total(factors, mean)
            var = var + factor.square().sum(0)
    if adjoint and axis is not None and both is not None:  # noise times noise, which no slope tells of
        mean = tapped(mean, both, axis)
    return Moments(mean, var, factor)


@rule("mm")
def mm(a: Value, b: Value, *, adjoint: bool = False, axis: int | None = None, taylor: bool = False) -> Moments:
    """a @ b, see `bilinear`."""
    return bilinear(torch.matmul, a, b, adjoint, axis, taylor)


@rule("mv")
def mv(a: Value, b: Value, *, adjoint: bool = False, axis: int | None = None, taylor: bool = False) -> Moments:
    """A matrix times a vector, see `bilinear`."""
    return bilinear(torch.mv, a, b, adjoint, axis, taylor)


@rule("dot", "vdot")
def dot(a: Value, b: Value, *, adjoint: bool = False, axis: int | None = None, taylor: bool = False) -> Moments:
    """Of two vectors, see `bilinear`."""
    return bilinear(torch.dot, a, b, adjoint, axis, taylor)


@rule("rmatmul")
def rmatmul(b: Value, a: Value, *, adjoint: bool = False, axis: int | None = None, taylor: bool = False) -> Moments:
    """a @ b, called as b.__rmatmul__(a); see `bilinear`."""
    return bilinear(torch.matmul, a, b, adjoint, axis, taylor)


@rule("baddbmm", "addmm")
def baddbmm(
    input: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1, adjoint: bool = False, axis: int | None = None,
    taylor: bool = False,
) -> Moments:  # fmt: skip
    """beta * input + alpha * a @ b, the two taken to be independent."""
    random = uncertain(a) or uncertain(b)
    product = bilinear(torch.matmul, a, b, adjoint, axis, taylor) if random else torch.matmul(mean_of(a), mean_of(b))
    if beta != 1:
        input = mul(input, beta, adjoint=adjoint) if uncertain(input) else input * beta
    return add(input, product, alpha=alpha, adjoint=adjoint)


@rule("einsum")
def einsum(
    equation: str, *operands: Value | list[Value], adjoint: bool = False, axis: int | None = None, taylor: bool = False
) -> Moments:
    """Of one or two tensors, where no letter stands twice in one of them; see `bilinear`."""
    given: Any = operands[0] if isinstance(operands[0], list) else operands
    letters = equation.split("->")[0].replace(" ", "").split(",")
    repeated = any(len(set(term)) < len(term.replace("...", ".")) for term in letters)
    require(
        len(given) <= 2 and not repeated, f"einsum({equation!r}) has no rule: use one or two tensors, and no letter twice in one"
    )
    if len(given) == 2:
        return bilinear(lambda t, u: torch.einsum(equation, t, u), given[0], given[1], adjoint, axis, taylor)
    one = torch.ones((), device=mean_of(given[0]).device)
    return bilinear(lambda t, one: torch.einsum(equation, t) * one, given[0], one, adjoint, axis)


@rule("lerp")
def lerp(a: Value, b: Value, weight: Value, *, adjoint: bool = False, axis: int | None = None, taylor: bool = False) -> Moments:
    r""":math:`a + w (b - a)` of three independent numbers: :math:`(1 - w)^2 v_a + w^2 v_b + v_w ((b - a)^2 + v_a + v_b)`."""
    m, n, w = mean_of(a), mean_of(b), mean_of(weight)
    mean = torch.lerp(m, n, w)
    with still(adjoint):
        zero = torch.zeros((), dtype=mean.dtype, device=mean.device)
        va, vb = (zero if t is None else t for t in (var_of(a), var_of(b)))
        var, s, beyond = (1 - w) ** 2 * va + w**2 * vb, var_of(weight), None
        if s is not None:
            beyond = None if taylor else s * (va + vb)
            var = plus(var + s * (n - m) ** 2, beyond)
        slopes = ((factor_of(a), 1 - w), (factor_of(b), w), (factor_of(weight), n - m))
        known = [(u, slope) for u, slope in slopes if u is not None]
        factor = None
        if known:
            apart = sum((slope**2 * u.square().sum(0) for u, slope in known), zero)
            factor = total([u * slope for u, slope in known], mean)
            var = (var - apart).clamp_min(0) + factor.square().sum(0)
        var = var.expand(mean.shape)
    if adjoint and axis is not None and beyond is not None:
        mean = tapped(mean, beyond.expand(mean.shape), axis)
    return Moments(mean, var, factor)


FEW = 32  # outputs up to which their pairs are few beside the inputs


def head(input: Value, weight: Value, bias: Value | None = None, *, taylor: bool = False) -> Output:
    """Mean and covariance [B, ..., C, C] of a linear layer's output."""
    m, w = mean_of(input), mean_of(weight)
    mean = F.linear(m, w, mean_of(bias))
    noise, shift = block_of(weight), block_of(bias)
    cov = None if noise is None else noise.cov(m)
    if uncertain(input):
        shared = sandwich(residual(input), w)
        if input.factor is not None:
            along = F.linear(input.factor, w)  # [R, B, C]
            shared = shared + torch.einsum("r...c,r...d->...cd", along, along)
        cov = plus(cov, shared)
    if shift is not None:
        cov = plus(cov, shift.cov(m))
    own = _own(m, None if taylor else var_of(input), weight, None if shift is not None else var_of(bias), mean)
    return Output(mean, plus(cov, None if own is None else torch.diag_embed(own)))


def _own(m: Tensor, v: Tensor | None, weight: Value, shift: Tensor | None, mean: Tensor) -> Tensor | None:
    """Variances that are each output's own: :math:`S (m^2 + v) + s`; what a block of weights that are not independent has is not."""
    s, noise = var_of(weight), block_of(weight)
    if noise is not None:
        shift = None if noise.biased else shift  # a bias in a block of its own
        if v is not None and s is not None:
            return F.linear(v, s, shift)
    elif s is not None:
        return F.linear(m * m if v is None else torch.addcmul(v, m, m), s, shift)
    return None if shift is None else shift.expand_as(mean)


def sandwich(v: Tensor, w: Tensor) -> Tensor:
    """W diag(v) W^T for every v [..., D]: [..., C, C]."""
    classes = len(w)
    if classes > FEW:
        return (v.unsqueeze(-2) * w) @ w.mT
    pairs = (w.unsqueeze(1) * w).flatten(0, 1)  # [C C, D]: one product for all examples
    return F.linear(v, pairs).unflatten(-1, (classes, classes))
