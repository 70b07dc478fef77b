"""How good predictions of numbers are: errors, proper scores, and whether quantiles and intervals hold what they promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array, precise, suits, targets
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.posteriors.predictive.predictive import takes_counts, within_support
from dubito.tensors.checks import between, require

PAIRS = 2**18  # pairs of components that `crps` works on at once: few enough to stay in the cache
SIDE = 96  # nodes of the quadrature for `crps` on each side of a target
MOST_COUNTS = 4000  # the largest count up to which `crps` is a sum
LEVELS = tuple(k / 100 for k in range(1, 100))


def rmse(p: Predictive, y: Array) -> Tensor:
    r"""Root mean squared error of the mean, over examples and outputs alike.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    >>> rmse(p, torch.tensor([3.0, 4.0]))
    tensor(3.5355)
    """
    return (precise(p.mean) - targets(p, y, "rmse", classes=False)).square().mean().sqrt()


def crps(p: Predictive, y: Array) -> Tensor:
    r"""Continuous ranked probability score, :math:`E|X - y| - \frac12 E|X - X'|`, the mean over examples and outputs.

    It is in the units of y and 0 at best; for a point it is the absolute error. Exact for a Student-t (see there), and for a
    mixture of Gaussians, from :math:`E|N(\mu, \sigma^2)| = 2 \sigma \varphi(\mu/\sigma) + \mu (2 \Phi(\mu/\sigma) - 1)` of each one and
    each pair. For other noise it is :math:`\int (F(t) - 1[t \ge y])^2 dt`, a sum for counts, and else a quadrature.

    >>> from dubito import Gaussian
    >>> crps(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 1, 1)), torch.tensor([0.0]))
    tensor(0.2337)
    """
    return crps_of(p, y).mean()


def crps_of(p: Predictive, y: Array) -> Tensor:
    """The `crps` of every output, [n]."""
    y = targets(p, y, "crps", classes=False)
    if (own := getattr(p, "crps", None)) is not None:  # of a Student-t, or recalibrated
        return precise(own(y)).flatten()
    if p.mixture is None:
        raise ValueError(f"crps needs a mixture of Gaussians or a predictive with a method `crps`; got a {type(p).__name__}")
    marginal, weights = p.mixture.marginals
    if not p.mixture.gaussian:
        return _integrated_crps(p.mixture, y).flatten()
    mean, scale = (precise(part).flatten(1) for part in (marginal.mean, marginal.stddev))  # [S, n] each
    weights = weights.to(mean)  # [S]
    error = weights @ _mean_absolute(mean - y.flatten(), scale)  # [n]
    columns = max(1, PAIRS // len(mean))
    blocks = zip(mean.split(columns, 1), scale.split(columns, 1), strict=True)
    return error - 0.5 * torch.cat([_spread(m, s, weights) for m, s in blocks])


def _integrated_crps(p: LatentMixture, y: Tensor) -> Tensor:
    """The `crps` of every output from the distribution function, in the layout of p.mean."""
    marginal, weights = p.marginals
    rows = max(1, PAIRS // max(1, marginal.mean.numel()))
    score = torch.zeros_like(y)
    if takes_counts(marginal) and y.numel():
        last = float(torch.maximum(y, p.quantile(1 - 1e-6)).max())
        if last <= MOST_COUNTS:
            below = torch.zeros_like(y)
            for counts in torch.arange(last + 1, dtype=y.dtype, device=y.device).reshape(-1, *[1] * y.ndim).split(rows):
                mass = _averaged(marginal.log_prob(counts.unsqueeze(1)).exp(), weights)
                shares = below + mass.cumsum(0)
                below, score = shares[-1], score + (shares - (counts >= y).to(y)).square().sum(0)
            return score
    reach = p.uncertainty.total.sqrt() + (y - p.mean).abs()
    nodes, shares = (torch.as_tensor(part / 2).to(y) for part in np.polynomial.legendre.leggauss(SIDE))
    steps, shares = ((0.5 + nodes) / (0.5 - nodes), shares / (0.5 - nodes) ** 2)  # t = y - reach u / (1 - u), and above y
    for some, share in zip(steps.split(rows), shares.split(rows), strict=True):
        for side in (-1, 1):
            at = y + side * reach * some.reshape(-1, *[1] * y.ndim)
            at = at if takes_counts(marginal) else within_support(marginal, at)
            tail = _averaged(marginal.cdf(at.unsqueeze(1)), weights)
            score = score + reach * torch.tensordot(share, (tail if side < 0 else 1 - tail) ** 2, dims=1)
    return score


def _averaged(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over the draws of values [n, S, ...]."""
    return torch.tensordot(weights.to(values), values, dims=([0], [1]))  # pyright: ignore[reportArgumentType]


def coverage(p: Predictive, y: Array, *, level: float = 0.9) -> Tensor:
    r"""The share of targets inside the central interval of that level; calibrated if equal to the level.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    >>> coverage(p, torch.tensor([1.6, 1.7]))
    tensor(0.5000)
    """
    y = targets(p, y, "coverage", classes=False)
    lower, upper = _interval(p, level)
    return precise(((lower <= y) & (y <= upper)).to(y.dtype)).mean()


def width(p: Predictive, y: Array | None = None, *, level: float = 0.9) -> Tensor:
    r"""The mean width of the central interval of that level. y is not needed; it is there to call all metrics alike.

    >>> from dubito import Gaussian
    >>> width(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1)))
    tensor(3.2897)
    """
    suits(p, "width", classes=False)
    lower, upper = _interval(p, level)
    return precise(upper - lower).mean()


def interval_score(p: Predictive, y: Array, *, level: float = 0.9) -> Tensor:
    r"""The width of the central interval plus a penalty for targets outside it, the mean over examples and outputs: lower is better.

    .. math:: (u - l) + \tfrac{2}{\alpha} \max(l - y, 0) + \tfrac{2}{\alpha} \max(y - u, 0), \qquad \alpha = 1 - \mathrm{level}

    It is proper (Gneiting & Raftery 2007): the expected score is the best for the true quantiles.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    >>> interval_score(p, torch.tensor([0.0, 2.64485]))           # one inside, one outside by 1
    tensor(13.2897)
    """
    y = targets(p, y, "interval_score", classes=False)
    return precise(interval_penalty(y, *_interval(p, level), level)).mean()


def sharpness(p: Predictive, y: Array | None = None) -> Tensor:
    r"""How wide predictives are, :math:`\sqrt{\frac{1}{n} \sum_i \mathrm{Var}[y_i]}`, noise included, in units of y.

    Of predictives that are calibrated the sharper ones are better. y is not needed; it is there to call all metrics alike.

    >>> from dubito import Gaussian
    >>> sharpness(LatentMixture(Gaussian(scale=2.0), torch.zeros(1, 2, 1)))
    tensor(2.)
    """
    suits(p, "sharpness", classes=False)
    return precise(p.uncertainty.total).mean().sqrt()


def pit(p: Predictive, y: Array) -> Tensor:
    r"""Probability integral transform, :math:`F_i(y_i)` of every output, in the layout of p.mean: uniform on (0, 1) if calibrated.

    Exact for mixtures of Gaussians and for a Student-t. Many values near 0 and 1 mean predictives that are too narrow, many near 1/2
    ones that are too wide.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.tensor([[[0.0]], [[2.0]]]))
    >>> pit(p, torch.tensor([1.0]))
    tensor([[0.5000]])
    """
    return pit_of(p, y, "pit")


class QuantileCalibration(NamedTuple):
    """Whether quantiles hold what they promise, in float64; each [L]."""

    levels: Tensor
    observed: Tensor  # the share of targets below each quantile
    n: int  # of targets

    @property
    def error(self) -> Tensor:
        """The mean distance of observed shares from their levels; nan without targets."""
        return (self.observed - self.levels).abs().mean()


def quantile_calibration(p: Predictive, y: Array, *, levels: Sequence[float] = LEVELS) -> QuantileCalibration:
    r"""How often targets lie at or below the predicted quantile of each level: :math:`\frac{1}{n} \sum_i 1[F_i(y_i) \le \alpha]`.

    A calibrated predictive has :math:`\alpha` of them there (Kuleshov et al. 2018).

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 4, 1))
    >>> found = quantile_calibration(p, torch.tensor([-2.0, -0.1, 0.1, 0.2]), levels=[0.1, 0.5, 0.9])
    >>> found.observed.tolist()
    [0.25, 0.5, 1.0]
    """
    return _quantile_calibration(p, y, levels, "quantile_calibration")


def quantile_error(p: Predictive, y: Array, *, levels: Sequence[float] = LEVELS) -> Tensor:
    r"""Mean distance between a quantile's level and the share of targets below it, :math:`\frac{1}{L} \sum_\alpha
    |\mathrm{observed}_\alpha - \alpha|`: 0 if calibrated, at most about 1/2.

    >>> from dubito import Gaussian
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 4, 1))
    >>> quantile_error(p, torch.tensor([-2.0, -0.1, 0.1, 0.2]), levels=[0.1, 0.5, 0.9])
    tensor(0.0833)
    """
    return _quantile_calibration(p, y, levels, "quantile_error").error.to(precise(p.mean).dtype)


def pit_of(p: Predictive, y: Array, name: str) -> Tensor:
    """F(y) of every output, in the layout of p.mean; `name` is the metric that error messages name."""
    y = targets(p, y, name, classes=False)
    cdf = getattr(p, "cdf", None)
    if cdf is None:
        raise ValueError(f"{name} needs the distribution function of the predictive, and a {type(p).__name__} has no `cdf`")
    return cdf(y).clamp(0, 1)


def _quantile_calibration(p: Predictive, y: Array, levels: Sequence[float], name: str) -> QuantileCalibration:
    at = torch.tensor(list(levels), dtype=torch.float64, device=p.mean.device)
    require(len(at) and bool(((at > 0) & (at < 1)).all()), f"levels must lie between 0 and 1; got {list(levels)}")
    values = pit_of(p, y, name).flatten().double()
    below = torch.searchsorted(values.sort().values, at, right=True)
    return QuantileCalibration(at, below.double() / len(values) if len(values) else torch.full_like(at, math.nan), len(values))


def _interval(p: Predictive, level: float) -> tuple[Tensor, Tensor]:
    between(0, 1, level=level)
    return p.interval(level)


def interval_penalty(y: Tensor, lower: Tensor, upper: Tensor, level: float) -> Tensor:
    """The `interval_score` of every output, in the shape of y."""
    return (upper - lower) + 2 / (1 - level) * ((lower - y).clamp_min(0) + (y - upper).clamp_min(0))


def _spread(mean: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """E|X - X'| of mixtures of Gaussians, [n], from all pairs of their components [S, n]."""
    spread = torch.zeros_like(mean[0])
    rows = max(1, PAIRS // max(1, mean.numel()))
    for i in range(0, len(mean), rows):
        # with the rows of this block and all after it: a pair that reaches over the block's end stands for its mirror image, too
        m, s, w, others = mean[i : i + rows], scale[i : i + rows], weights[i : i + rows], weights[i:].clone()
        others[rows:] *= 2
        pairs = _mean_absolute(m.unsqueeze(1) - mean[i:], torch.hypot(s.unsqueeze(1), scale[i:]))  # [rows, S - i, n]
        spread = spread + torch.einsum("r,s,rsn->n", w, others, pairs)
    return spread


def _mean_absolute(mean: Tensor, scale: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, scale^2), by the scale: its square may be more or less than a float holds."""
    scale = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    z = mean / scale
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 2 * scale * density + mean * torch.erf(z / math.sqrt(2))
