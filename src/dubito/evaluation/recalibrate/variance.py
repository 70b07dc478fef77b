"""Variance scaling: predictives of a regression made wider or narrower around their means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches
from dubito.evaluation.recalibrate.marginals import Exact, exact, log_density
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of, require

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
            ratio = (target - p.mean).double() ** 2 / p.uncertainty.total.double()
            squares.append(ratio.flatten(0, -2))
            plain = plain and _gaussian(p)
            if self.by == "nll":
                kept.append((p, target))
        found = torch.cat(squares)  # [n, C]
        start = found.mean(0).sqrt() if self.per_output else found.mean().sqrt().expand(found.shape[1])
        if plain:
            exactly = bool((found.sum(0) == 0).any())
            require(not exactly, "the held-out targets are predicted without an error: every smaller variance looks better still")
        elif self.by == "nll":
            start = _search(kept, start, shared=not self.per_output)
        else:
            fine = start.isfinite().all() & (start > 0).all()
            require(fine, "a predictive without a variance cannot be stretched by='moments': use by='nll'")
        return Stretched(start, len(found))


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
        means, width = wide.means.clone(), len(factor)
        means[..., :width] += (1 - factor) * p.mean  # beyond these a network may have predicted log variances
        return replace(wide, means=means)


def _gaussian(p: Exact) -> bool:
    marginals = getattr(p, "marginals", None)
    return marginals is not None and len(marginals[1]) == 1


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
            "no factor of the variance is best within reason: the held-out targets are predicted without an error, or are not those of "
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
