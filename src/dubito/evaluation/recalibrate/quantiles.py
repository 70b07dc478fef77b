"""Quantile recalibration: levels of quantiles replaced by the shares of targets that were seen below them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches
from dubito.evaluation.recalibrate.marginals import exact
from dubito.evaluation.recalibrate.numbers import RecalibratedNumbers
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import require

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
        require(self.pieces is None or self.pieces >= 1, f"a map has one piece or more; got pieces={self.pieces}")

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> QuantileMap:
        """The map for held-out data."""
        levels = []
        for p, target in forecasts.numbers("Quantiles", predictive, y):
            levels.append(exact("Quantiles", p).cdf(target).double().clamp(0, 1).flatten(0, -2))
        found = torch.cat(levels)  # [n, C]
        outputs, count = found.shape[1], len(found)
        lost = ((found < LOST) | (found > 1 - LOST)).double().mean()
        if count >= 20 and float(lost) > 0.05:
            raise ValueError(
                f"{float(lost):.0%} of the held-out targets lie so far from what is predicted that their levels are 0 or 1: fit "
                "Variance first, and Quantiles to the predictives that it gives"
            )
        found = found if self.per_output else found.reshape(-1, 1)
        n = len(found)
        pieces = min(n + 1, self.pieces or max(2, round(2 * n ** (1 / 3))))
        shares = _shares(n, pieces).to(found.device)
        return QuantileMap(_levels(found, shares).expand(-1, outputs).contiguous(), shares, count)


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


def _levels(found: Tensor, shares: Tensor) -> Tensor:
    """Quantiles of each column: the i-th smallest of n values is that of level i / (n + 1), and 0 and 1 are the ends."""
    n, width = found.shape
    ordered = torch.cat([found.new_zeros(1, width), found.sort(0).values, found.new_ones(1, width)])
    place = shares * (n + 1)
    left = place.floor().long().clamp_max(n)
    levels = torch.lerp(ordered[left], ordered[left + 1], (place - left).unsqueeze(-1))
    return (1 - MIXED) * levels + MIXED * shares.unsqueeze(-1)
