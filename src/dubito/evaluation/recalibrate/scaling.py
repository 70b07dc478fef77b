"""Temperature, vector and matrix scaling: affine maps of log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito._moved import renamed_fields
from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import convex, forecasts
from dubito.evaluation.recalibrate.forecasts import Batches, Held
from dubito.evaluation.recalibrate.predictives import RecalibratedClasses, recalibrated
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of, require
from dubito.tensors.randomness import generator


@dataclass(frozen=True)
class Temperature:
    r"""The temperature with the best log score on held-out data (Guo et al. 2017).

    .. math:: p_T(c \mid x) \propto \bar p(c \mid x)^{1/T}, \qquad
        T = \arg\min_T -\frac{1}{n} \sum_i \ln p_T(y_i \mid x_i), \qquad \bar p = \sum_s w_s p_s

    It acts on the logarithm of the *averaged* probabilities, not on the logits of every draw: what is to be calibrated is the
    average, and an average of calibrated draws is not calibrated but too careful. For a single network the two are the same. The
    order of the classes, and so the accuracy, stays. Labels (`Bernoulli`) have their log odds divided by T.

    The score is convex in 1/T, and Newton steps, kept in a bracket, go on to the minimum. If there is none, because all answers
    are right (T would go to 0) or no better than chance (to infinity), that is an error.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Categorical(), torch.tensor([[[4.0, 0.0]] * 4]))     # 98 % sure, and 3 of 4 times right
    >>> fix = Temperature().fit(p, torch.tensor([0, 0, 0, 1]))
    >>> round(fix.temperature, 4), fix(p).mean[0]
    (3.641, tensor([0.7500, 0.2500]))
    """

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Tempered:
        """The best temperature for held-out data."""
        held = forecasts.classes("Temperature", predictive, y)
        return Tempered(1 / _best_power(held), len(held.truth))


@dataclass(frozen=True)
class Tempered:
    """The map that `Temperature` fits."""

    temperature: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> RecalibratedClasses:
        forecasts.suits("Temperature", predictive, classes=True)
        return recalibrated(predictive, predictive.log_forecasts / self.temperature)


def _best_power(held: Held) -> float:
    """The root of the slope of the mean negative log score in b = 1/T, which rises."""
    z = held.logits
    if held.labels:  # two classes each, of log odds z and 0
        z = torch.stack([torch.zeros_like(z), z], -1).flatten(0, 1)
    z = z - z.amax(-1, keepdim=True)
    true = z.gather(-1, held.truth.reshape(-1, 1)).squeeze(-1)
    require(
        (true < 0).any(),
        f"all {len(true)} held-out answers are right, so that every smaller temperature looks better still, down to 0: fit it to "
        "more held-out data, with some errors among them, or leave the predictive as it is",
    )
    require(
        float((z.mean(-1) - true).mean()) < 0,
        "the held-out labels are no more probable under the predictive than by chance, so that every higher temperature looks "
        "better still, up to infinity: check that predictive and targets belong together",
    )
    low, high, place = -math.inf, math.inf, 0.0  # of ln b
    for _ in range(500):
        slope, curvature = _derivatives(z, true, math.exp(place))
        low, high = (place, high) if slope < 0 else (low, place)
        new = _next(low, high, place, slope, curvature)
        if abs(new - place) < 1e-12 or slope == 0:
            return math.exp(place)
        place = new
    raise RuntimeError(f"no temperature found near {math.exp(-place):.3g}; please report this")  # pragma: no cover


def _next(low: float, high: float, place: float, slope: float, curvature: float) -> float:
    """A Newton step of ln b, of at most 2, or the middle of the bracket where that leaves it."""
    step = -slope / (curvature * math.exp(place)) if curvature > 0 else math.inf
    new = place + max(-2.0, min(2.0, step))
    if low < new < high:
        return new
    return (low + high) / 2 if math.isfinite(low + high) else place + (2.0 if slope < 0 else -2.0)


def _derivatives(z: Tensor, true: Tensor, power: float) -> tuple[float, float]:
    probs = F.softmax(power * z, -1)
    mean = (probs * z).sum(-1)
    return float((mean - true).mean()), float((probs * (z - mean.unsqueeze(-1)) ** 2).sum(-1).mean())


Penalties = float | tuple[float, ...]
CANDIDATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
FOLDS = 5


@dataclass(frozen=True)
class VectorScaling:
    r"""A factor and an offset for every class, with the best log score on held-out data (Guo et al. 2017).

    .. math:: p(c \mid x) \propto \exp(a_c \ln \bar p(c \mid x) + b_c), \qquad
        \min_{a, b} -\frac{1}{n} \sum_i \ln p(y_i \mid x_i) + \lambda \frac{1}{C} \sum_c \left((a_c - 1)^2 + b_c^2\right)

    It acts on the log of the averaged probabilities (see `Temperature`). Of labels (`Bernoulli`) it acts on the log odds, each
    on its own: Platt scaling. `penalty` is :math:`\lambda`, without which a class that is never seen would get an offset of minus
    infinity; of several candidates the one is taken that is best in a cross-validation on the held-out data.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Categorical(), torch.zeros(1, 4, 2))
    >>> VectorScaling(penalty=1e-6).fit(p, torch.tensor([0, 0, 0, 1]))(p).mean[0]
    tensor([0.7500, 0.2500])
    """

    penalty: Penalties = CANDIDATES

    def __post_init__(self):
        _candidates(self.penalty)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Affine:
        """The best factors and offsets for held-out data."""
        return _best(forecasts.classes("VectorScaling", predictive, y), _vector, self.penalty)


@renamed_fields(regulariser="regularizer")
@dataclass(frozen=True)
class MatrixScaling:
    r"""A matrix and an offset, with the best log score on held-out data.

    .. math:: p(\cdot \mid x) = \mathrm{softmax}(W \ln \bar p(\cdot \mid x) + b), \qquad
        \min_{W, b} -\frac{1}{n} \sum_i \ln p(y_i \mid x_i)
        + \lambda \left(\frac{1}{C (C - 1)} \sum_{c \ne d} W_{cd}^2 + \frac{1}{C} \sum_c b_c^2\right)

    On log probabilities it is Dirichlet calibration, with the penalty on off-diagonal entries and offsets, ODIR, that goes with it
    (Kull et al. 2019); `regularizer="l2"` draws all of W to the identity instead. So does ODIR with the diagonal entry of a class that
    is always or never seen, since nothing else would keep that from infinity. There are C (C + 1) numbers to fit: for many
    classes and few examples it overfits where the penalty is small, and `penalty`, of several, is chosen by cross-validation.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Categorical(), torch.zeros(1, 4, 2))
    >>> MatrixScaling(penalty=1e-6).fit(p, torch.tensor([0, 0, 0, 1]))(p).mean[0]
    tensor([0.7500, 0.2500])
    """

    penalty: Penalties = CANDIDATES
    regularizer: str = "odir"  # or l2

    def __post_init__(self):
        _candidates(self.penalty)
        one_of(("odir", "l2"), regularizer=self.regularizer)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Affine:
        """The best matrix and offsets for held-out data."""
        fit_map = partial(_matrix, odir=self.regularizer == "odir")
        return _best(forecasts.classes("MatrixScaling", predictive, y), fit_map, self.penalty)


@dataclass(frozen=True)
class Affine:
    """The map that `VectorScaling` and `MatrixScaling` fit."""

    weight: Tensor  # [C] or [C, C]
    bias: Tensor  # [C]
    penalty: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> RecalibratedClasses:
        forecasts.fits("vector or matrix scaling", predictive, len(self.bias), classes=True)
        z = forecasts.finite(predictive.log_forecasts)
        return recalibrated(predictive, _affine(z, self.weight.to(z), self.bias.to(z)))


def _affine(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (z * weight if weight.ndim == 1 else z @ weight.mT) + bias


def _vector(held: Held, penalty: float) -> Affine:
    features = torch.stack([held.logits, torch.ones_like(held.logits)], -1)  # [n, C, 2]
    fines = torch.full_like(features[0], 2 * penalty / features.shape[1])
    change = convex.minimize(convex.Problem(held, features, fines), "VectorScaling")
    return Affine(1 + change[:, 0], change[:, 1].clone(), penalty, len(held.truth))


def _matrix(held: Held, penalty: float, *, odir: bool) -> Affine:
    classes = held.logits.shape[-1]
    features = torch.cat([held.logits, torch.ones_like(held.logits[:, :1])], -1).unsqueeze(1)  # [n, 1, C + 1]
    fines = features.new_full((classes, classes + 1), 2 * penalty / max(1, classes * (classes - 1)))
    fines[:, -1] = 2 * penalty / classes
    if odir:  # the diagonal is free, but not where the data would take it to infinity
        share = held.hits.mean(0)
        fines.diagonal().masked_fill_((share > 0) & (share < 1), 0.0)
    change = convex.minimize(convex.Problem(held, features, fines), "MatrixScaling")
    return Affine(torch.eye(classes).to(change) + change[:, :-1], change[:, -1].clone(), penalty, len(held.truth))


def _best(held: Held, fit_map: Callable[[Held, float], Affine], penalty: Penalties) -> Affine:
    """The map with the penalty that is best in cross-validation, where there is a choice."""
    candidates = _candidates(penalty)
    if len(candidates) == 1:
        return fit_map(held, candidates[0])
    n = len(held.truth)
    few = f"{n} held-out examples are too few to choose a penalty by cross-validation: give one, as in penalty=0.1"
    require(n >= 2 * FOLDS, few)
    folds = torch.randperm(n, generator=generator("cpu", "folds")).to(held.truth.device).chunk(FOLDS)
    parts = [(held.rows(torch.cat([*folds[:i], *folds[i + 1 :]])), held.rows(folds[i])) for i in range(FOLDS)]

    def score(candidate: float) -> float:
        """The summed negative log score of the left-out folds."""
        total = 0.0
        for rest, part in parts:
            try:
                affine = fit_map(rest, candidate)
            except ValueError:  # too small a penalty for so few examples
                return math.inf
            total += float(convex.score(part, _affine(part.logits, affine.weight, affine.bias))) * len(part.truth)
        return total

    return fit_map(held, min(candidates, key=score))


def _candidates(penalty: Penalties) -> Sequence[float]:
    """The penalties to choose from, the largest first."""
    values = sorted(penalty if isinstance(penalty, tuple) else (penalty,), reverse=True)
    require(
        values and all(value >= 0 for value in values),
        f"penalty must be at least 0, or several such numbers; got {penalty}",
    )
    return values
