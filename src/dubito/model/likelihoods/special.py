"""Special functions that torch lacks."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_beta(a: Tensor, b: Tensor) -> Tensor:
    r""":math:`\ln B(a, b)`."""
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def incomplete_beta(a: Tensor, b: Tensor, log_x: Tensor, log_rest: Tensor, *, terms: int = 40) -> Tensor:
    r"""The regularized incomplete beta function :math:`I_x(a, b)`, given ln x and ln(1 - x), in float64.

    It is the continued fraction, on the side where that converges, in about as many terms as the root of the larger of a and b.
    """
    direct = log_x.exp() < (a + 1) / (a + b + 2)
    p, q, x = torch.where(direct, a, b), torch.where(direct, b, a), torch.where(direct, log_x, log_rest).exp()
    upper, lower = torch.ones_like(x), 1 / (1 - (p + q) * x / (p + 1))
    fraction = lower
    for m in range(1, terms + 1):
        even = m * (q - m) * x / ((p + 2 * m - 1) * (p + 2 * m))
        odd = -(p + m) * (p + q + m) * x / ((p + 2 * m) * (p + 2 * m + 1))
        for term in (even, odd):
            upper, lower = 1 + term / upper, 1 / (1 + term * lower)
            fraction = fraction * upper * lower
    value = (a * log_x + b * log_rest - log_beta(a, b)).exp() / p * fraction
    return torch.where(direct, value, 1 - value)


def student_t_tail(z: Tensor, dof: Tensor) -> Tensor:
    r"""P(T > z) of a standard Student-t for z >= 0: :math:`\frac12 I_x(\nu/2, 1/2)` at :math:`x = \nu / (\nu + z^2)`."""
    ratio = z * z / dof
    log_x, log_rest = -torch.log1p(ratio), ratio.log() - torch.log1p(ratio)
    return 0.5 * incomplete_beta((dof / 2).expand_as(z), torch.full_like(z, 0.5), log_x, log_rest)


def log_ndtr(z: Tensor) -> Tensor:
    r""":math:`\ln \Phi(z)`, of which torch's own has no rule for vmap."""
    low, high = z.clamp_max(0), z.clamp_min(0)
    below = torch.log(0.5 * torch.special.erfcx(-low / math.sqrt(2))) - 0.5 * low * low
    return torch.where(z < 0, below, torch.log1p(-0.5 * torch.erfc(high / math.sqrt(2))))
