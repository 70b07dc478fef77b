r"""Dropout that stays on. With a mask that is 0 with probability p and else 1 / (1 - p), independent of x:

.. math:: E[z x] = m, \qquad \mathrm{Var}[z x] = v + \tfrac{p}{1 - p} (m^2 + v).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dubito.curvature.capture import tapped
from dubito.posteriors.predict.streamlined.moments import Moments, Value, factor_of, mean_of, plus, rule, still, var_of
from dubito.tensors.checks import require


def dropped(x: Value, p: float, shared: tuple[int, ...], adjoint: bool, axis: int | None, taylor: bool = False) -> Moments:
    """x with dropout; the mask is the same along the `shared` axes (from the end).

    The adjoint keeps that; the forward pass takes every number to be dropped on its own, which is right for each of them."""
    m, v = mean_of(x), var_of(x)
    if p in (0, 1):
        return Moments(m * (1 - p), torch.zeros_like(m) if v is None else v * (1 - p))
    noise = p / (1 - p)
    if adjoint and not m.requires_grad:  # nothing before it was random: it is here that a gradient has to arrive
        m = m.detach().requires_grad_()
    with still(adjoint):
        square = plus(m * m, None if taylor else v)
        var = plus(v, noise * square)
    mean = _tap(m, v, noise, square, shared, axis) if adjoint and axis is not None else m
    return Moments(mean, var, factor_of(x))


def _tap(m: Tensor, v: Tensor | None, noise: float, square: Tensor, shared: tuple[int, ...], axis: int) -> Tensor:
    """The mean, with the noise of the masks added to it in the adjoint."""
    if not shared:
        return tapped(m, noise * square.detach(), axis)
    axes = {a % m.ndim for a in shared}
    one = torch.ones([1 if i in axes else n for i, n in enumerate(m.shape)], dtype=m.dtype, device=m.device)
    mean = m * tapped(one.requires_grad_(), torch.full_like(one, noise), axis)
    return mean if v is None else tapped(mean, noise * v, axis)


@rule("dropout")
def dropout(
    input: Value, p: float = 0.5, training: bool = True, inplace: bool = False,
    *, shared: Sequence[int] = (), adjoint: bool = False, axis: int | None = None, taylor: bool = False,
) -> Value:  # fmt: skip
    r""":math:`m` and :math:`v + \tfrac{p}{1 - p} (m^2 + v)`."""
    return dropped(input, p, tuple(shared), adjoint, axis, taylor) if training else input


def _of_channels(n: int) -> Callable[..., Value]:
    """The rule of dropout that drops whole channels over n positions."""

    def _apply(
        input: Value,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        adjoint: bool = False,
        axis: int | None = None,
        taylor: bool = False,
    ) -> Value:
        return dropped(input, p, tuple(range(-n, 0)), adjoint, axis, taylor) if training else input

    return _apply


for _n in (1, 2, 3):
    rule(f"dropout{_n}d")(_of_channels(_n))


@rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(input: Value, p: float = 0.5, training: bool = False, inplace: bool = False) -> Value:
    """The input, where it is off; on, it has no rule."""
    require(not training or p <= 0, "alpha dropout has no rule for one pass: predict with how='sampled'")
    return input
