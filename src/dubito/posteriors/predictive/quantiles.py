"""Quantiles of mixtures, as roots of their cdf."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor
from torch.distributions import Distribution

CACHE = 2**16  # numbers that quantiles work on at a time, so that they stay in the cache


def normal_mixture_quantile(mean: Tensor, scale: Tensor, weights: Tensor, level: float) -> Tensor:
    """The level-quantile of mixtures of Normals, [...], whose components are [S, ...]."""
    shape, weights = mean.shape[1:], weights.to(mean.dtype)
    # the upper half is the lower one of the mirror image: small probabilities keep all their digits
    sign = 1 if level <= 0.5 else -1
    columns = max(1, CACHE // len(mean)) if mean.device.type == "cpu" else max(1, mean[0].numel())
    parts = zip((sign * mean).flatten(1).split(columns, 1), scale.flatten(1).split(columns, 1), strict=True)
    found = [_lower_quantile(m.contiguous(), s.contiguous(), weights, min(level, 1 - level)) for m, s in parts]
    return sign * torch.cat(found).reshape(shape)


def _lower_quantile(mean: Tensor, scale: Tensor, weights: Tensor, level: float) -> Tensor:
    """The same for [S, n] and a level of at most 1/2: Newton's method on ln F, and bisection where that goes astray.

    Every component's own quantile is a bound of the mixture's on one side or the other, so that the least and the largest of them
    enclose it.
    """
    ends = mean + NormalDist().inv_cdf(level) * scale
    low, high, result = ends.amin(0), ends.amax(0), torch.empty_like(mean[0])
    at, x, least = torch.arange(len(result), device=mean.device), (weights @ ends).clamp(low, high), scale.amin(0)
    eps, before = torch.finfo(mean.dtype).eps, high - low
    for _ in range(200):  # many times what it takes: bisection alone needs as many as a number has bits
        z = (x - mean) / scale
        below = 0.5 * (weights @ torch.erfc(z * -math.sqrt(0.5)))
        density = weights @ (torch.exp(-0.5 * z * z) / scale) / math.sqrt(2 * math.pi)
        step = (below / level).log() * below / density
        low, high = torch.where(below < level, x, low), torch.where(below < level, high, x)
        # the next step would be about the square of this one, in units of the narrowest component: less than can be told
        close = (step.abs() <= 0.1 * eps**0.5 * least + 2 * eps * x.abs()) | (below == level)
        # other steps have to stay between the ends and to halve, or bisection does it
        newton = close | ((x - step > low) & (x - step < high) & (step.abs() <= before / 2))
        before = torch.where(newton, step.abs(), (high - low) / 2)
        x = torch.where(newton, (x - step.nan_to_num(0.0)).clamp(low, high), (low + high) / 2)
        left = (~close & (high - low > 2 * eps * x.abs())).nonzero().squeeze(1)  # what is NaN stays so
        result[at] = x
        if not len(left):
            break
        if 2 * len(left) <= len(at):
            at, x, low, high, before, least = (t[left] for t in (at, x, low, high, before, least))
            mean, scale = mean[:, left], scale[:, left]
    return result


def within_support(distribution: Distribution, y: Tensor) -> Tensor:
    """Within the bounds of what a distribution gives, such as 0 of a duration: its cdf is NaN or an error outside."""
    try:
        support = distribution.support
    except NotImplementedError:  # of a distribution of one's own
        return y
    low, high = (getattr(support, name, None) for name in ("lower_bound", "upper_bound"))
    return y if low is None and high is None else y.clamp(low, high)
