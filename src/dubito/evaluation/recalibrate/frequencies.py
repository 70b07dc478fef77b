"""Maps of single probabilities to the frequencies that were seen: isotonic regression and histogram binning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches
from dubito.evaluation.recalibrate.predictives import RecalibratedClasses, recalibrated
from dubito.posteriors.predictive import Predictive
from dubito.posteriors.predictive.predictive import FLOOR
from dubito.tensors.checks import at_least, between, one_of


@dataclass(frozen=True)
class Isotonic:
    r"""Every class's probability by a rising function of its own, renormalized (Zadrozny & Elkan 2002).

    .. math:: g_c = \arg\min_{g\ \text{rising}} \sum_i (g(\bar p_{ic}) - y_{ic})^2, \qquad
        p_c = \frac{g_c(\bar p_c)}{\sum_d g_d(\bar p_d)}

    g is found by pooling adjacent violators, linear between the values it was fitted at, and constant beyond. Labels (`Bernoulli`)
    are not renormalized. A frequency of 0 or 1 is one of the data at hand: frequencies are kept `floor` away from both, by default
    1 / (n + 2), the rule of succession, so that no log score is infinite. It has as many degrees of freedom as there are steps:
    below a thousand examples temperature scaling is the safer choice.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Bernoulli(), torch.tensor([[[-1.0], [0.0], [0.0], [3.0]]]))
    >>> Isotonic(floor=0.0).fit(p, torch.tensor([0, 0, 1, 1]))(p).mean.squeeze(-1).round(decimals=4)
    tensor([0.0000, 0.5000, 0.5000, 1.0000])
    """

    floor: float | None = None

    def __post_init__(self):
        between(0, 0.5, include="low", floor=self.floor)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Frequencies:
        """The best rising function of every class for held-out data."""
        return _columns(forecasts.classes("Isotonic", predictive, y), _isotonic, self.floor, steps=False)


@dataclass(frozen=True)
class Histogram:
    r"""Every class's probability by the frequency that was seen in its bin, renormalized (Zadrozny & Elkan 2001).

    `bins` bins have as many held-out examples each (`by="mass"`), or equal widths; a bin without any leaves its middle as it is.
    `floor` is that of `Isotonic`.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Bernoulli(), torch.tensor([[[-1.0], [-1.0], [1.0], [1.0]]]))
    >>> Histogram(bins=2, floor=0.0).fit(p, torch.tensor([0, 0, 0, 1]))(p).mean.squeeze(-1).round(decimals=4)
    tensor([0.0000, 0.0000, 0.5000, 0.5000])
    """

    bins: int = 15
    by: Literal["mass", "width"] = "mass"
    floor: float | None = None

    def __post_init__(self):
        between(0, 0.5, include="low", floor=self.floor)
        at_least(1, bins=self.bins)
        one_of(("mass", "width"), by=self.by)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Frequencies:
        """The frequencies in every bin of held-out data."""
        held = forecasts.classes("Histogram", predictive, y)
        return _columns(held, lambda probs, hits: _histogram(probs, hits, self.bins, self.by), self.floor, steps=True)


@dataclass(frozen=True)
class Frequencies:
    """The map that `Isotonic` and `Histogram` fit: for every class probabilities, which rise, and the frequencies in their place."""

    probs: Tensor  # [C, K]: knots, or of bins the upper edges
    values: Tensor  # [C, K]
    steps: bool  # constant up to each of `probs`, or linear between them
    floor: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> RecalibratedClasses:
        forecasts.fits("a map of frequencies", predictive, len(self.probs), classes=True)
        labels, z = not predictive.likelihood.indexed, predictive.log_forecasts
        shares = self._mapped((torch.sigmoid(z) if labels else z.exp()).flatten(0, -2)).reshape(z.shape)
        if labels:
            return recalibrated(predictive, torch.logit(shares, eps=0.0 if self.floor else 1e-12))
        shares = torch.where(shares.sum(-1, keepdim=True) == 0, 1.0, shares)  # none of the classes, says each: as good as any
        return recalibrated(predictive, shares.log().clamp_min(FLOOR))

    def _mapped(self, probs: Tensor) -> Tensor:
        """[n, C] to [n, C]; what is NaN stays so."""
        x, knots, values = probs.mT.contiguous(), self.probs.to(probs), self.values.to(probs)
        last = knots.shape[1] - 1
        right = torch.searchsorted(knots, x).clamp(0, last)
        if self.steps:
            return torch.where(x.isnan(), torch.nan, values.gather(1, right)).mT
        left = (right - 1).clamp_min(0)
        a, b = knots.gather(1, left), knots.gather(1, right)
        share = ((x - a) / torch.where(b > a, b - a, 1.0)).clamp(0, 1)
        return torch.lerp(values.gather(1, left), values.gather(1, right), share).mT


def _columns(
    held: forecasts.Held, one: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], floor: float | None, *, steps: bool
) -> Frequencies:
    """A map for every class on its own."""
    n, probs, hits = len(held.truth), held.probs, held.hits
    floor = 1 / (n + 2) if floor is None else floor
    maps = [one(p, hit) for p, hit in zip(probs.mT.contiguous(), hits.mT.contiguous(), strict=True)]
    most = max(len(x) for x, _ in maps)

    def padded(values: Tensor) -> Tensor:
        """Repeat the last value, so that all classes have as many knots."""
        return torch.cat([values, values[-1:].expand(most - len(values))])

    knots, values = (torch.stack([padded(pair[i]) for pair in maps]) for i in (0, 1))
    return Frequencies(knots, values.clamp(floor, 1 - floor), steps, floor, n)


def _isotonic(probs: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    from scipy.optimize import isotonic_regression

    x, where, count = torch.unique(probs, return_inverse=True, return_counts=True)
    mean = torch.zeros_like(x).index_add(0, where, hits) / count  # equal probabilities have one value
    y = torch.from_numpy(isotonic_regression(mean.cpu().numpy(), weights=count.cpu().double().numpy()).x).to(x)
    ends = torch.ones_like(y, dtype=torch.bool)  # of a run of equal values only the first and the last are needed
    ends[1:-1] = (y[1:-1] != y[:-2]) | (y[1:-1] != y[2:])
    return x[ends], y[ends]


def _histogram(probs: Tensor, hits: Tensor, bins: int, by: str) -> tuple[Tensor, Tensor]:
    if by == "width":
        edges = torch.arange(1, bins + 1, dtype=probs.dtype, device=probs.device) / bins
    else:
        last = torch.arange(1, bins, device=probs.device) * len(probs) // bins
        edges = torch.cat([probs.sort().values[(last - 1).clamp_min(0)], probs.new_ones(1)])
    which = torch.searchsorted(edges, probs).clamp_max(bins - 1)
    zero = torch.zeros_like(edges)
    count, seen = zero.index_add(0, which, torch.ones_like(probs)), zero.index_add(0, which, hits)
    middle = (edges + torch.cat([zero[:1], edges[:-1]])) / 2
    return edges, torch.where(count > 0, seen / count.clamp_min(1), middle)
