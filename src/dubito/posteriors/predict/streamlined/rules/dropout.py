r"""Dropout that stays on. With a mask that is 0 with probability p and else 1 / (1 - p), independent of x:

.. math:: E[z x] = m, \qquad \mathrm{Var}[z x] = v + \tfrac{p}{1 - p} (m^2 + v).
"""

from __future__ import annotations

from typing import Any

import torch

from dubito.curvature.capture import tapped
from dubito.posteriors.predict.streamlined.moments import Moments, mean_of, still, var_of
from dubito.posteriors.predict.streamlined.registry import rule


def dropped(x: Any, p: float, shared: tuple[int, ...], adjoint: bool, axis: int | None) -> Moments:
    """x with dropout; the mask is the same along the `shared` axes (from the end).

    The adjoint keeps that; the forward pass takes every number to be dropped on its own, which is right for each of them."""
    m, v = mean_of(x), var_of(x)
    if p in (0, 1):
        return Moments(m * (1 - p), torch.zeros_like(m) if v is None else v * (1 - p))
    noise = p / (1 - p)
    if adjoint and not m.requires_grad:  # nothing before it was random: it is here that a gradient has to arrive
        m = m.detach().requires_grad_()
    with still(adjoint):
        square = m * m if v is None else m * m + v
        var = noise * square if v is None else v + noise * square
    mean = m
    if adjoint and axis is not None:
        if shared:
            axes = {a % m.ndim for a in shared}
            one = torch.ones([1 if i in axes else n for i, n in enumerate(m.shape)], dtype=m.dtype, device=m.device)
            one = tapped(one.requires_grad_(), torch.full_like(one, noise), axis)
            mean = m * one
            if v is not None:
                mean = tapped(mean, noise * v, axis)
        else:
            mean = tapped(m, noise * square.detach(), axis)
    return Moments(mean, var, getattr(x, "factor", None))


@rule("dropout")
def dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False,
    *, shared: tuple[int, ...] = (), adjoint: bool = False, axis: int | None = None,
) -> Any:  # fmt: skip
    return dropped(input, p, tuple(shared), adjoint, axis) if training else input


def _channels(n: int) -> None:
    def apply(
        input: Any,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        adjoint: bool = False,
        axis: int | None = None,
    ) -> Any:
        return dropped(input, p, tuple(range(-n, 0)), adjoint, axis) if training else input

    rule(f"dropout{n}d")(apply)


for _n in (1, 2, 3):
    _channels(_n)


@rule("alpha_dropout", "feature_alpha_dropout")
def alpha_dropout(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    if training and p > 0:
        raise ValueError("alpha dropout has no streamlined rule: predict with how='sampled'")
    return input
