"""Temperature scaling: one number that makes all probabilities bolder or more careful."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.classes import RecalibratedClasses, recalibrated
from dubito.evaluation.recalibrate.forecasts import Batches, Held
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import require


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
        return recalibrated(predictive, forecasts.log_forecasts(predictive) / self.temperature)


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
    raise RuntimeError(
        f"the search for a temperature has not ended near {math.exp(-place):.3g}; please report this"
    )  # pragma: no cover


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
