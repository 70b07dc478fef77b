"""Vector and matrix scaling: an affine map of log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito._moved import renamed_fields
from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.recalibrate import convex, forecasts
from dubito.evaluation.recalibrate.classes import RecalibratedClasses, recalibrated
from dubito.evaluation.recalibrate.forecasts import Batches, Held
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of, require
from dubito.tensors.randomness import generator

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
        _check(self.penalty)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Affine:
        """The best factors and offsets for held-out data."""
        return _chosen(forecasts.classes("VectorScaling", predictive, y), _vector, self.penalty)


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
        _check(self.penalty)
        one_of(("odir", "l2"), regularizer=self.regularizer)

    def fit(self, predictive: Predictive | Batches, y: Array | None = None) -> Affine:
        """The best matrix and offsets for held-out data."""
        odir = self.regularizer == "odir"
        return _chosen(
            forecasts.classes("MatrixScaling", predictive, y), lambda f, penalty: _matrix(f, penalty, odir=odir), self.penalty
        )


@dataclass(frozen=True)
class Affine:
    """The map that `VectorScaling` and `MatrixScaling` fit."""

    weight: Tensor  # [C] or [C, C]
    bias: Tensor  # [C]
    penalty: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive) -> RecalibratedClasses:
        forecasts.fits("vector or matrix scaling", predictive, len(self.bias), classes=True)
        z = forecasts.finite(forecasts.log_forecasts(predictive))
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


def _chosen(held: Held, fitted: Callable[[Held, float], Affine], penalty: Penalties) -> Affine:
    """With the penalty that is best in cross-validation, where there is a choice."""
    if isinstance(penalty, tuple) and len(penalty) > 1:
        n = len(held.truth)
        if n < 2 * FOLDS:
            raise ValueError(
                f"{n} held-out examples are too few to choose a penalty by cross-validation: give one, as in penalty=0.1"
            )
        order = torch.randperm(n, generator=generator("cpu", "folds")).to(held.truth.device)
        parts = [
            (held.rows(torch.cat([*folds[:i], *folds[i + 1 :]])), held.rows(folds[i]))
            for folds in [order.chunk(FOLDS)]
            for i in range(FOLDS)
        ]

        def score(candidate: float) -> float:
            """The summed negative log score of the left-out folds."""
            total = 0.0
            for rest, part in parts:
                try:
                    affine = fitted(rest, candidate)
                except ValueError:  # too small a penalty for so few examples
                    return float("inf")
                total += float(convex.score(part, _affine(part.logits, affine.weight, affine.bias))) * len(part.truth)
            return total

        return fitted(held, min(sorted(penalty, reverse=True), key=score))
    return fitted(held, min(penalty) if isinstance(penalty, tuple) else penalty)


def _check(penalty: Penalties) -> None:
    values = penalty if isinstance(penalty, tuple) else (penalty,)
    require(values and all(value >= 0 for value in values), f"a penalty is 0 or more, or several to choose from; got {penalty}")
