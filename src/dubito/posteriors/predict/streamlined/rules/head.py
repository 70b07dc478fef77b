r"""The output layer, whose outputs have a covariance: through the inputs they share, and through weights that are not independent.

.. math:: \mathrm{Cov}[h] = W\, C\, W^T + \Sigma_W(m) + \mathrm{diag}(S v)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.predict.streamlined.moments import Moments, Output, Value, block_of, mean_of, plus, residual, var_of

FEW = 32  # outputs up to which their pairs are few beside the inputs


def head(input: Value, weight: Value, bias: Value | None = None) -> Output:
    """Mean and covariance [B, ..., C, C] of a linear layer's output."""
    m, w = mean_of(input), mean_of(weight)
    mean = F.linear(m, w, mean_of(bias))
    noise, shift = block_of(weight), block_of(bias)
    cov = None if noise is None else noise.cov(m)
    if isinstance(input, Moments):
        shared = sandwich(residual(input), w)
        if input.factor is not None:
            along = F.linear(input.factor, w)  # [R, B, C]
            shared = shared + torch.einsum("r...c,r...d->...cd", along, along)
        cov = plus(cov, shared)
    if shift is not None:
        cov = plus(cov, shift.cov(m))
    own = _own(m, var_of(input), weight, None if shift is not None else var_of(bias), mean)
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
