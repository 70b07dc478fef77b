"""Predictives whose probabilities or quantiles were recalibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.evaluation.recalibrate.outputs import Exact, below, cdf, log_density, quantile_at
from dubito.model.likelihoods import Likelihood, Uncertainty
from dubito.network.examples import as_arrays
from dubito.posteriors.predictive import LatentMixture, Predictive, Units
from dubito.tensors import tree
from dubito.tensors.checks import between
from dubito.tensors.randomness import fresh_generator


@dataclass(frozen=True)
class Recalibrated(Predictive):
    """A predictive in the place of `before`. What is said of f, the network's output, is as it was."""

    before: Predictive

    @property
    def likelihood(self) -> Likelihood:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the predictive before."""
        return self.before.likelihood

    @property
    def means(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Outputs of the network, as before."""
        return self.before.means

    @property
    def f_mean(self) -> Tensor:
        """As before."""
        return self.before.f_mean

    @property
    def f_var(self) -> Tensor:
        """As before."""
        return self.before.f_var

    def split(self, total: Tensor) -> Uncertainty:
        """A new total uncertainty, split in the shares that it had before."""
        old = self.before.uncertainty
        known = old.total.isfinite() & (old.total > 0)
        share = torch.where(known, old.aleatoric / torch.where(known, old.total, 1.0), 1.0)
        return Uncertainty.of(total, total * share.to(total))


@dataclass(frozen=True)
class RecalibratedClasses(Recalibrated):
    r"""Class probabilities softmax(logits), or probabilities sigmoid(logits) of labels, in the place of those of `before`.

    Everything about y follows from the new probabilities. A map of averaged probabilities says nothing of single draws, so the total
    uncertainty, their entropy, is split in the shares that it had before. What is said of f, the network's output, is as it was.

    >>> import dubito
    >>> before = LatentMixture(dubito.Categorical(), torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]]))
    >>> p = RecalibratedClasses(before, torch.tensor([[0.75, 0.25]]).log())
    >>> p.mean, p.log_prob(torch.tensor([0])).exp()
    (tensor([[0.7500, 0.2500]]), tensor([0.7500]))
    """

    logits: Tensor  # [B, *D, C]

    @cached_property
    def _after(self) -> LatentMixture:
        """The same probabilities as those of a plain network."""
        return LatentMixture(self.before.likelihood.plain, self.logits.unsqueeze(0))

    @property
    def mean(self) -> Tensor:
        """The new probabilities, [B, *D, C]."""
        return self._after.mean

    @property
    def complement(self) -> Tensor:
        """One minus the new probabilities, without the rounding."""
        return self._after.complement

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The entropy of the new probabilities, split in the shares that it had before."""
        return self.split(self._after.uncertainty.total)

    @property
    def log_forecasts(self) -> Tensor:
        """The new logits in float64."""
        return self.logits.double()

    def log_prob(self, y: Tensor) -> Tensor:
        """ln p(y | x, D) of the new probabilities, [B]."""
        return self._after.log_prob(y)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y from the new probabilities."""
        return self._after.sample(n, generator)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Classes have none: an error that says so."""
        return self._after.interval(level)  # which says that there are none

    def to(self, device: torch.device | str) -> RecalibratedClasses:
        """The same predictive on another device."""
        return replace(self, before=self.before.to(device), logits=self.logits.to(device))


def recalibrated(before: Predictive, logits: Tensor) -> RecalibratedClasses:
    """With logits in the precision of the network's own outputs; class logits as log probabilities."""
    logits = logits.log_softmax(-1) if before.likelihood.indexed else logits
    return RecalibratedClasses(before, logits.to(torch.promote_types(before.means.dtype, torch.float32)))


FAR = (1e-7, 1e-5, 1e-4, 1e-3, 1e-2)  # levels of the tails at which the integral of the CRPS is cut
GAUSS = (  # five nodes and weights on [-1, 1]
    (0.0, 0.5688888888888889),
    (0.5384693101056831, 0.4786286704993665),
    (-0.5384693101056831, 0.4786286704993665),
    (0.9061798459386640, 0.2369268850561891),
    (-0.9061798459386640, 0.2369268850561891),
)


@dataclass(frozen=True)
class RecalibratedNumbers(Recalibrated):
    r"""Numbers whose distribution functions are F' = R(F), with those of `before` and a piecewise linear R for every output.

    R takes levels[k] to shares[k]. Mean and variance are exact, sums over the pieces of truncated moments. The outputs are
    independent of each other here: R is a map of each on its own, and joint densities are products. The variance is split in noise and
    ignorance in the shares that it had before; what is said of f, the network's output, is as it was.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> before = LatentMixture(dubito.Gaussian(scale=1.0), torch.zeros(1, 1, 1))
    >>> levels, shares = torch.tensor([[0.0], [0.2], [1.0]]), torch.tensor([0.0, 0.5, 1.0])
    >>> p = RecalibratedNumbers(before, levels, shares)            # the median is now what the 0.2-quantile was
    >>> p.cdf(before.quantile(0.2)), p.quantile(0.5) == before.quantile(0.2)
    (tensor([[0.5000]]), tensor([[True]]))
    """

    before: Exact  # pyright: ignore[reportIncompatibleVariableOverride]
    levels: Tensor  # [K + 1, C], from 0 to 1, rising
    shares: Tensor  # [K + 1], the same

    @cached_property
    def _slopes(self) -> Tensor:
        """R' of each piece, [K, C]."""
        return self.shares.diff().unsqueeze(-1) / self.levels.diff(dim=0)

    @cached_property
    def _knots(self) -> Tensor:
        """Where the pieces meet, [K - 1, B, *D, C]."""
        knots = [_quantiles(self.before, row) for row in self.levels[1:-1]]
        return torch.stack(knots) if knots else self.before.mean.new_zeros(0, *self.before.mean.shape)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, [B, *D, C] in float64."""
        centre = self.before.mean.double()
        first, second = torch.zeros_like(centre), torch.zeros_like(centre)
        ends = [below(self.before, knot - centre) for knot in self._knots]
        ends = [(torch.zeros_like(centre),) * 2, *ends, (torch.zeros_like(centre), self.before.uncertainty.total.double())]
        for slope, (a, a2), (b, b2) in zip(self._slopes, ends[:-1], ends[1:], strict=True):
            first, second = first + slope * (b - a), second + slope * (b2 - a2)
        return centre + first, (second - first**2).clamp_min(0)

    @property
    def mean(self) -> Tensor:
        """E[y] under F', [B, *D, C]."""
        return self._moments[0].to(self.before.mean)

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The variance under F', split in the shares that it had before."""
        return self.split(self._moments[1].to(self.before.mean))

    def _piece(self, u: Tensor) -> Tensor:
        """In which piece levels [..., C] of before lie."""
        flat = u.reshape(-1, u.shape[-1]).mT.contiguous()
        pieces = torch.searchsorted(self.levels.mT.contiguous(), flat, right=True) - 1
        return pieces.clamp(0, len(self._slopes) - 1).mT.reshape(u.shape)

    def _mapped(self, u: Tensor) -> Tensor:
        """R(u), for levels [..., C] of before."""
        k = self._piece(u)
        columns = torch.arange(u.shape[-1], device=u.device).expand_as(k)
        return (self.shares[k] + self._slopes[k, columns] * (u - self.levels[k, columns])).clamp(0, 1)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) of every output, [B, *D, C], for y [B, *D, C]."""
        return self._mapped(self.before.cdf(y).double()).to(self.before.mean)

    def quantile(self, level: float) -> Tensor:
        """The level-quantile of every output, [B, *D, C]."""
        between(0, 1, level=level)
        return _quantiles(self.before, self._inverse(torch.full_like(self.levels[0], level)))

    def _inverse(self, v: Tensor) -> Tensor:
        """R^-1(v), for levels [..., C]."""
        k = (torch.searchsorted(self.shares, v, right=True) - 1).clamp(0, len(self._slopes) - 1)
        columns = torch.arange(v.shape[-1], device=v.device).expand_as(k)
        return self.levels[k, columns] + (v - self.shares[k]) / self._slopes[k, columns]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval of that level, (lower, upper)."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def log_prob(self, y: Tensor) -> Tensor:
        """ln p(y | x, D), outputs and positions added up, [B]."""
        y = self.likelihood.target(tree.tensors(as_arrays(y)), self.means[0])
        seen, y = self.likelihood.observed(y), self.likelihood.numbers(y)
        if seen is not None:
            y = torch.where(seen.unsqueeze(-1), y, self.before.mean)
        k = self._piece(self.before.cdf(y).double())
        slope = self._slopes[k, torch.arange(y.shape[-1], device=y.device).expand_as(k)]
        score = log_density(self.before, y) + slope.log()
        score = score if seen is None else score * seen.unsqueeze(-1)
        return score.flatten(1).sum(1).to(self.before.mean)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y, by the inverse of F'."""
        device = self.means.device
        source = fresh_generator(device) if generator is None else generator
        shares = torch.rand((n, *self.before.mean.shape), generator=source, dtype=torch.float64, device=device)
        return quantile_at(self.before, self._inverse(shares)).to(self.before.mean)

    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of every output, :math:`\int (F'(t) - 1[t \ge y])^2 dt`, [B, *D, C] for y [B, *D, C].

        Five Gauss nodes in every piece, and in every part of the tails down to a level of 1e-7, on each side of y.
        """
        tails = [self.before.quantile(level) for level in (*FAR, *(1 - level for level in FAR))]
        cuts, y = torch.cat([self._knots, torch.stack(tails)]).double().sort(0).values, y.double()
        middle = torch.minimum(torch.maximum(y, cuts[:-1]), cuts[1:])  # y itself in its own piece, else one of the ends
        score = (cuts[0] - y).clamp_min(0) + (y - cuts[-1]).clamp_min(0)
        for low, high, above in ((cuts[:-1], middle, False), (middle, cuts[1:], True)):
            half = (high - low) / 2
            for node, weight in GAUSS:
                share = self._mapped(cdf(self.before, low + half * (1 + node)))
                score = score + weight * (half * (1 - share if above else share) ** 2).sum(0)
        return score.to(self.before.mean)

    def to(self, device: torch.device | str) -> RecalibratedNumbers:
        """The same predictive on another device."""
        return replace(self, before=self.before.to(device), levels=self.levels.to(device), shares=self.shares.to(device))

    def rescaled(self, shift: Units, scale: Units) -> RecalibratedNumbers:
        """The predictive of shift + scale * y."""
        return replace(self, before=self.before.rescaled(shift, scale))


def _quantiles(p: Exact, levels: Tensor) -> Tensor:
    """The quantiles of levels [C], one for each output: [B, *D, C]."""
    tiny = 1e-12
    quantiles = {level: p.quantile(min(max(level, tiny), 1 - tiny)) for level in set(levels.tolist())}
    return torch.stack([quantiles[level][..., c] for c, level in enumerate(levels.tolist())], -1)
