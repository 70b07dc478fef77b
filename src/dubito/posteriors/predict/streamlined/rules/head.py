r"""The output layer, whose outputs have a covariance: through the inputs they share, and through weights that are not independent.

.. math:: \mathrm{Cov}[h] = W\, C\, W^T + \Sigma_W(m) + \mathrm{diag}(S v)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.predict.streamlined.moments import Output, Weight, mean_of, residual, var_of

FEW = 32  # outputs up to which their pairs are few beside the inputs


def head(input: Any, weight: Any, bias: Any = None) -> Output:
    """Mean and covariance [B, ..., C, C] of a linear layer's output."""
    m, v = mean_of(input), var_of(input)
    w, s, b, sb = mean_of(weight), var_of(weight), mean_of(bias), var_of(bias)
    mean = F.linear(m, w, b)
    noise = weight.block if isinstance(weight, Weight) else None
    shift = bias.block if isinstance(bias, Weight) else None
    sb = None if shift is not None else sb
    own = None  # variances that are each output's own
    cov = None
    if noise is not None:
        cov = noise.cov(m)
        assert s is not None
        own = None if noise.biased or sb is None else sb.expand_as(mean)  # a bias in a block of its own
        if v is not None:
            own = F.linear(v, s, None if own is None else sb)
    elif s is not None:
        own = F.linear(m * m if v is None else torch.addcmul(v, m, m), s, sb)
    elif sb is not None:
        own = sb.expand_as(mean)
    if v is not None:
        shared = sandwich(residual(input), w)
        if input.factor is not None:
            along = F.linear(input.factor, w)  # [R, B, C]
            shared = shared + torch.einsum("r...c,r...d->...cd", along, along)
        cov = shared if cov is None else cov + shared
    if shift is not None:
        cov = shift.cov(m) if cov is None else cov + shift.cov(m)
    if own is not None:
        cov = torch.diag_embed(own) if cov is None else cov + torch.diag_embed(own)
    assert cov is not None
    return Output(mean, cov)


def sandwich(v: Tensor, w: Tensor) -> Tensor:
    """W diag(v) W^T for every v [..., D]: [..., C, C]."""
    classes = len(w)
    if classes > FEW:
        return (v.unsqueeze(-2) * w) @ w.mT
    pairs = (w.unsqueeze(1) * w).flatten(0, 1)  # [C C, D]: one product for all examples
    return F.linear(v, pairs).unflatten(-1, (classes, classes))
