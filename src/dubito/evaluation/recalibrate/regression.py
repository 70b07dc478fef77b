"""Predictives of a regression recalibrated: made wider or narrower around their means, or mapped quantile by quantile."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches
from dubito.evaluation.recalibrate.outputs import Exact, exact, log_density
from dubito.evaluation.recalibrate.predictives import RecalibratedNumbers
from dubito.model.likelihoods import NaturalGaussian
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import at_least, one_of, require

RANGE, GRID, SECTIONS = 4.0, 33, 60


@dataclass(frozen=True)
class Variance:
    r"""The factor by which predictives are to be stretched around their means, for the best log score on held-out data.

    .. math:: y' = m(x) + s\, (y - m(x)), \qquad s^2 = \frac{1}{n} \sum_i \frac{(y_i - m_i)^2}{v_i} \text{ for Gaussians } N(m_i, v_i)

    All of the variance is multiplied by :math:`s^2`, noise and ignorance alike; means stay. The closed form is the optimum for a single
    Gaussian; for mixtures and Student-t it is where a search begins. `by="moments"` stops there, with a variance
    that fits the squared errors, and keeps two numbers a target in memory rather than the predictives.
    `per_output=False` takes one factor for all outputs.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    >>> fix = Variance().fit(p, torch.tensor([1.0, 7.0]))
    >>> fix.factor, fix(p).uncertainty.total[0]
    (tensor([5.], dtype=torch.float64), tensor([25.]))
    """

    per_output: bool = True
    by: Literal["nll", "moments"] = "nll"

    def __post_init__(self):
        one_of(("nll", "moments"), by=self.by)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Stretched:
        """The best factor for held-out data."""
        squares, kept, plain = [], [], True
        for p, target in forecasts.numbers("Variance", predictive, y):
            p = exact("Variance", p)
            _moved(p, torch.zeros_like(p.mean))
            ratio = (target - p.mean).double() ** 2 / p.uncertainty.total.double()
            squares.append(ratio.flatten(0, -2))
            plain = plain and _gaussian(p)
            if self.by == "nll":
                kept.append((p, target))
        ratios = torch.cat(squares)  # [n, C]
        start = ratios.mean(0).sqrt() if self.per_output else ratios.mean().sqrt().expand(ratios.shape[1])
        if plain:
            exactly = bool((ratios.sum(0) == 0).any())
            require(not exactly, "the held-out targets are predicted without an error: every smaller variance looks better still")
        elif self.by == "nll":
            start = _search(kept, start, shared=not self.per_output)
        else:
            fine = start.isfinite().all() & (start > 0).all()
            require(fine, "a predictive without a variance cannot be stretched by='moments': use by='nll'")
        return Stretched(start, len(ratios))


@dataclass(frozen=True)
class Stretched:
    """The map that `Variance` fits."""

    factor: Tensor  # [C], of standard deviations
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> Exact:
        forecasts.fits("variance scaling", predictive, len(self.factor), classes=False)
        p = exact("Variance", predictive)
        factor = self.factor.to(p.means)
        wide = p.rescaled(torch.zeros_like(factor), factor)
        return replace(wide, means=_moved(wide, (1 - factor) * p.mean))


def _moved(p: Exact, offset: Tensor) -> Tensor:
    """The outputs [S, B, *D, C] that move the targets by an offset [B, *D, T]; an error in words where there are none."""
    moved, name = p.likelihood.moved(p.means, offset), type(p.likelihood).__name__
    if moved is None:
        raise ValueError(f"Variance stretches numbers around their means, and no outputs of {name} do that: use Quantiles")
    if isinstance(p.likelihood, NaturalGaussian) and p.mixture is not None and not p.mixture.certain:
        raise ValueError(
            f"Variance needs draws of the outputs of {name}, which are not means: predict(..., how='sampled'), or use Quantiles"
        )
    return moved


def _gaussian(p: Exact) -> bool:
    return p.mixture is not None and p.mixture.gaussian and len(p.mixture.marginals[1]) == 1


def _search(kept: list[tuple[Exact, Tensor]], start: Tensor, *, shared: bool) -> Tensor:
    """The factors [C] with the least negative log score: on a grid around the start, then by golden sections."""
    start = torch.where(start.isfinite() & (start > 0), start, 1.0).log()

    def score(at: Tensor) -> Tensor:
        """The negative log score of factors exp(at), for every output."""
        total = torch.zeros_like(at)
        for p, y in kept:
            back = p.mean + (y - p.mean) / at.exp()
            total = total + (at - log_density(p, back)).flatten(0, -2).sum(0)
        return total.sum().expand_as(at) if shared else total

    offsets = torch.linspace(-RANGE, RANGE, GRID, dtype=torch.float64).tolist()
    best = torch.stack([score(start + offset) for offset in offsets]).argmin(0)
    if bool(((best == 0) | (best == GRID - 1)).any()):
        raise ValueError(
            "no factor between e^-4 and e^4 is best: the held-out targets are predicted without an error, or are not those of "
            "this predictive"
        )
    step, golden = 2 * RANGE / (GRID - 1), (math.sqrt(5) - 1) / 2
    low, high = start - RANGE + (best - 1) * step, start - RANGE + (best + 1) * step
    for _ in range(SECTIONS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        lower = score(left) < score(right)
        low, high = torch.where(lower, low, left), torch.where(lower, right, high)
        if float((high - low).max()) < 1e-7:  # the score is flat there beyond its rounding
            break
    return ((low + high) / 2).exp()


LOST = 1e-6  # closer to 0 or 1 than this, a level says little of where the target was
MIXED = 1e-6  # of the identity, so that no two knots coincide
FEWEST = 10  # targets in a piece of a tail


@dataclass(frozen=True)
class Quantiles:
    r"""A rising map R of the predictives' distribution functions, after which PIT values are uniform (Kuleshov et al. 2018).

    .. math:: F'(y \mid x) = R(F(y \mid x)), \qquad R(u) \approx \frac{\#\{i : F(y_i \mid x_i) \le u\}}{n + 1}

    R goes through `pieces` equally spaced quantiles of the held-out PIT values and is linear between them, so that F' has a
    density, f'(y) = R'(F(y)) f(y); the first and the last piece are halved, and halved again, as long as ten targets are left in
    each part. Few pieces are smooth; as many as there are targets plus one are the shares themselves, with the best quantiles
    and a rough density; by default there are :math:`2 n^{1/3}`. Each output has its own map, or with `per_output=False` all have one.

    The map acts on levels, wherever they are in space: it cannot see targets that are so far outside that their level is 0 or 1 to all
    digits. Where too many are, `Variance` is to be fitted first, and this to what it gives.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Gaussian(scale=2.0), torch.zeros(1, 999, 1))
    >>> y = torch.distributions.Normal(1.0, 1.0).icdf(torch.arange(1, 1000) / 1000)         # shifted, and narrower
    >>> fixed = Quantiles().fit(p, y)(p)
    >>> fixed.mean[0], fixed.quantile(0.9)[0], p.quantile(0.9)[0]
    (tensor([0.99...]), tensor([2.28...]), tensor([2.56...]))
    """

    pieces: int | None = None
    per_output: bool = True

    def __post_init__(self):
        at_least(1, pieces=self.pieces)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> QuantileMap:
        """The map for held-out data."""
        batches = []
        for p, target in forecasts.numbers("Quantiles", predictive, y):
            batches.append(exact("Quantiles", p).cdf(target).double().clamp(0, 1).flatten(0, -2))
        levels = torch.cat(batches)  # [n, C]
        outputs, count = levels.shape[1], len(levels)
        lost = ((levels < LOST) | (levels > 1 - LOST)).double().mean()
        if count >= 20 and float(lost) > 0.05:
            raise ValueError(
                f"{float(lost):.0%} of the held-out targets lie so far from the prediction that their quantile levels are 0 or 1: fit "
                "Variance first, and Quantiles to the predictives that it gives"
            )
        levels = levels if self.per_output else levels.reshape(-1, 1)
        n = len(levels)
        pieces = min(n + 1, self.pieces or max(2, round(2 * n ** (1 / 3))))
        shares = _shares(n, pieces).to(levels.device)
        return QuantileMap(_levels(levels, shares).expand(-1, outputs).contiguous(), shares, count)


@dataclass(frozen=True)
class QuantileMap:
    """The map that `Quantiles` fits."""

    levels: Tensor  # [K + 1, C], from 0 to 1: those that are mapped to
    shares: Tensor  # [K + 1], from 0 to 1
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> RecalibratedNumbers:
        forecasts.fits("quantile recalibration", predictive, self.levels.shape[1], classes=False)
        return RecalibratedNumbers(
            exact("Quantiles", predictive), *(part.to(predictive.means.device) for part in (self.levels, self.shares))
        )


def _shares(n: int, pieces: int) -> Tensor:
    """Equally spaced, and closer at the ends, where quantiles of high levels are."""
    shares, end = [k / pieces for k in range(1, pieces)], 1 / pieces
    while n * end / 2 >= FEWEST:
        end = end / 2
        shares += [end, 1 - end]
    return torch.tensor([0.0, *sorted(shares), 1.0], dtype=torch.float64)


def _levels(levels: Tensor, shares: Tensor) -> Tensor:
    """Quantiles of each column: the i-th smallest of n values is that of level i / (n + 1), and 0 and 1 are the ends."""
    n, width = levels.shape
    ordered = torch.cat([levels.new_zeros(1, width), levels.sort(0).values, levels.new_ones(1, width)])
    place = shares * (n + 1)
    left = place.floor().long().clamp_max(n)
    levels = torch.lerp(ordered[left], ordered[left + 1], (place - left).unsqueeze(-1))
    return (1 - MIXED) * levels + MIXED * shares.unsqueeze(-1)
