"""Calibration by out-of-fold predictions: a mixture of scales for numbers, a temperature for classes, and more doubt for odd rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.apps.tables.training import best_weights
from dubito.evaluation.recalibrate import RecalibratedClasses, Tempered
from dubito.model.likelihoods import HeteroscedasticGaussian, Uncertainty, average
from dubito.posteriors.predictive import LatentMixture, Predictive

FACTORS = tuple(2 ** (k / 2) for k in range(-4, 7))  # of the width, from a quarter to eight
BELIEF = 0.35  # standard deviation of the ln factor before the data
LEAST = 1e-3  # share below which a factor is left out
FIRM = 0.25  # standard deviation of ln temperature before the data


@dataclass(frozen=True)
class Scales:
    r"""A predictive made wider or narrower by several factors at once: :math:`p'(y) = \sum_k w_k\, p(y; s_k)`.

    In :math:`p(y; s)` the predictive is stretched around its mean by s. One factor corrects the width alone; several also correct the
    tails: a mixture of scales of a Gaussian may be a Student-t. The result is a mixture of Gaussians, of which everything is exact.
    All of the variance is stretched alike, so its parts have the shares that they had before.
    """

    factors: tuple[float, ...]
    weights: tuple[float, ...]
    n: int  # rows that they were fitted to

    @staticmethod
    def fit(p: LatentMixture, y: Tensor) -> Scales:
        """The weights of the factors with the best log score on out-of-fold predictions, by expectation-maximization."""
        believed = torch.tensor([math.exp(-0.5 * (math.log(s) / BELIEF) ** 2) for s in FACTORS], dtype=torch.float64)
        believed = believed / believed.sum()
        scores = torch.stack([log_density(stretch(p, s), y) for s in FACTORS])  # [K, N]
        weights = best_weights(scores, believed)
        kept = weights >= LEAST
        weights = weights / weights[kept].sum()
        pairs = [(s, w) for s, w, k in zip(FACTORS, weights.tolist(), kept.tolist(), strict=True) if k]
        return Scales(tuple(s for s, _ in pairs), tuple(w for _, w in pairs), len(y))

    def __call__(self, p: LatentMixture) -> LatentMixture:
        return mixture([stretch(p, s) for s in self.factors], self.weights)


@dataclass(frozen=True)
class Experts(LatentMixture):
    """A mixture in which several components may be the noise of one function: their spread around its mean is aleatoric."""

    functions: Tensor | None = None  # [S]: to which function a component belongs

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Total = aleatoric + epistemic."""
        split = super().uncertainty
        if self.functions is None or self.likelihood.discrete:
            return split
        means, weights = self.means.chunk(2, -1)[0], self.component_weights
        noise = torch.zeros_like(split.total)
        for k in self.functions.unique():
            own = self.functions == k
            center = average(means[own], weights[own] / weights[own].sum())
            noise = noise + average((means[own] - center) ** 2, weights[own])
        return Uncertainty.of(split.total, split.aleatoric + noise)


def mixture(parts: Sequence[LatentMixture], weights: Sequence[float]) -> LatentMixture:
    """Mixtures of Gaussians (means and log variances), or of class probabilities, as one."""
    spreads = [torch.zeros_like(p.means) if p.cov is None else p.cov for p in parts]
    functions: list[Tensor] = []
    for p in parts:
        own = functions_of(p)
        functions.append(own + (int(functions[-1].max()) + 1 if functions else 0))
    return Experts(
        parts[0].likelihood,
        torch.cat([p.means for p in parts]),
        None if all(p.cov is None for p in parts) else torch.cat(spreads),
        torch.cat([w * p.component_weights for p, w in zip(parts, weights, strict=True)]),
        functions=torch.cat(functions),
    )


def functions_of(p: LatentMixture) -> Tensor:
    """To which function each component belongs, [S]: each to its own, unless the mixture says otherwise."""
    known = p.functions if isinstance(p, Experts) else None
    return torch.arange(len(p.means)) if known is None else known


def stretch(p: LatentMixture, factor: float | Tensor) -> LatentMixture:
    """A mixture of Gaussians (means and log variances) stretched around its mean, by one factor or one for each output [B, T]."""
    means, logs = p.means.chunk(2, -1)
    factor = torch.as_tensor(factor, dtype=means.dtype)
    center = p.f_mean[..., : means.shape[-1]]
    wide = torch.cat([center + factor * (means - center), logs + 2 * factor.log()], -1)
    spread = None if p.cov is None else p.cov * torch.cat([factor.expand_as(center), factor.expand_as(center)], -1) ** 2
    return replace(p, likelihood=HeteroscedasticGaussian(), means=wide, cov=spread)


def log_density(p: LatentMixture, y: Tensor) -> Tensor:
    """The log density of every output on its own, [N * T], in float64."""
    means, logs = p.means.double().chunk(2, -1)
    logs = logs if p.cov is None else (logs.exp() + p.cov.double().chunk(2, -1)[0]).log()
    scores = -0.5 * ((y - means) ** 2 * (-logs).exp() + logs + math.log(2 * math.pi))
    weights = p.component_weights.double().log().reshape(-1, 1, 1)
    return (scores + weights).logsumexp(0).flatten()


def temperature(p: Predictive, y: Tensor) -> Tempered:
    """The temperature with the best log score on out-of-fold predictions, believed to be near 1 before.

    Out-of-fold predictions are by fewer members than others. With few rows, or no errors among them, the belief decides.
    """
    logs = p.log_forecasts
    grid = torch.linspace(-2, 2, 401, dtype=torch.float64)
    scores = torch.stack([-(logs / t.exp()).log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum() for t in grid])
    best = grid[(scores + 0.5 * (grid / FIRM) ** 2).argmin()]
    return Tempered(float(best.exp()), len(y))


def at_least(p: Predictive, floor: Tensor, rows: Tensor) -> Predictive:
    """The predictive whose uncertainty at some `rows` [B] is at least a floor ([T] variances, or [] entropy)."""
    if not bool(rows.any()):
        return p
    if p.mixture is not None and not p.likelihood.discrete:
        total = p.uncertainty.total
        lift = (floor.to(total) / total).clamp_min(1).sqrt()
        return stretch(p.mixture, torch.where(rows.unsqueeze(-1), lift, 1.0))
    assert isinstance(p, RecalibratedClasses)
    logs = p.log_forecasts.log_softmax(-1)
    low, high = torch.zeros(len(logs), dtype=torch.float64), torch.full((len(logs),), 7.0, dtype=torch.float64)
    for _ in range(40):  # ln temperature
        middle = (low + high) / 2
        less = torch.special.entr((logs / middle.exp().unsqueeze(-1)).softmax(-1)).sum(-1) < floor
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    heat = torch.where(rows & (high > 1e-9), high, 0.0).exp().unsqueeze(-1)
    return RecalibratedClasses(p.before, (logs / heat).log_softmax(-1).to(p.logits))
