"""Every output of a regression on its own: density, truncated moments, and quantiles of many levels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Normal

from dubito.model.likelihoods import average
from dubito.posteriors.predictive import LatentMixture, Predictive, StudentT
from dubito.posteriors.predictive.student_t import log_beta, student_t_tail

Exact = LatentMixture | StudentT


def exact(name: str, p: Predictive) -> Exact:
    """The predictive, if the distribution of its outputs is known in closed form; else an error in words."""
    if isinstance(p, StudentT) or (isinstance(p, LatentMixture) and isinstance(p.marginals[0], Normal)):
        return p
    raise ValueError(f"{name} is for mixtures of Gaussians and for Student-t predictives; a {type(p).__name__} is neither")


def log_density(p: Exact, y: Tensor) -> Tensor:
    """The log density of every output, [B, *D, C], in float64."""
    if isinstance(p, StudentT):
        z, dof = ((y - p.mean) / p._scale).double(), 2 * p.shape.double()
        return (
            -(dof + 1) / 2 * torch.log1p(z * z / dof) - 0.5 * dof.log() - log_beta(dof.new_tensor(0.5), dof / 2) - p._scale.log()
        )
    marginal, weights = p.marginals
    scores = marginal.log_prob(y.to(p.means)).double()
    return (scores + weights.double().log().reshape(-1, *[1] * (scores.ndim - 1))).logsumexp(0)


def below(p: Exact, q: Tensor) -> tuple[Tensor, Tensor]:
    r"""E[d 1(d <= q)] and E[d^2 1(d <= q)] of d, an output's distance from its mean, for q [B, *D, C], in float64.

    For a Gaussian :math:`N(m, s^2)` with :math:`z = (q - m) / s` they are :math:`m \Phi(z) - s \varphi(z)` and
    :math:`(m^2 + s^2) \Phi(z) - s (m + q) \varphi(z)`; for a standard Student-t :math:`-\frac{\nu + q^2}{\nu - 1} t_\nu(q)` and
    :math:`\nu (\frac{\nu - 1}{\nu - 2} F_{\nu - 2}(q \sqrt{(\nu - 2) / \nu}) - F_\nu(q))`, where these exist.
    """
    if isinstance(p, StudentT):
        z, dof = (q / p._scale).double(), 2 * p.shape.double()
        log_t = -(dof + 1) / 2 * torch.log1p(z * z / dof) - 0.5 * dof.log() - log_beta(dof.new_tensor(0.5), dof / 2)
        first = -(dof + z * z) / (dof - 1) * log_t.exp()
        less = (dof - 2).clamp_min(1e-3)
        second = dof * ((dof - 1) / less * _student_t_cdf(z * (less / dof).sqrt(), less) - _student_t_cdf(z, dof))
        return torch.where(dof > 1, p._scale * first, math.nan), torch.where(dof > 2, p._scale**2 * second, torch.inf)
    marginal, weights = p.marginals
    mean, scale = (marginal.mean - p.mean).double(), marginal.stddev.double()
    z = (q - mean) / scale
    share, density = torch.special.ndtr(z), torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    first = mean * share - scale * density
    second = (mean**2 + scale**2) * share - scale * (mean + q) * density
    return average(first, weights), average(second, weights)


def quantile_at(p: Exact, levels: Tensor) -> Tensor:
    """Quantiles whose levels [n, B, *D, C] differ, by bisection."""
    low, high = (p.quantile(level).double().expand_as(levels) for level in (1e-9, 1 - 1e-9))
    for _ in range(60 if p.means.dtype == torch.float64 else 35):
        middle = (low + high) / 2
        less = cdf(p, middle) < levels
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return (low + high) / 2


def cdf(p: Exact, y: Tensor) -> Tensor:
    """P(Y <= y) for y [n, B, *D, C], in float64; component by component, since all at once might not fit."""
    if isinstance(p, StudentT):
        return _student_t_cdf((y - p.mean) / p._scale, 2 * p.shape.double())
    marginal, weights = p.marginals
    parts = zip(weights.double(), marginal.mean.double(), marginal.stddev.double(), strict=True)
    return sum((w * torch.special.ndtr((y - mean) / scale) for w, mean, scale in parts), torch.zeros_like(y))


def _student_t_cdf(z: Tensor, dof: Tensor) -> Tensor:
    tail = student_t_tail(z.abs(), dof)
    return torch.where(z > 0, 1 - tail, tail)
