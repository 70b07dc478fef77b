"""Scores of predictions that are in memory: metrics of a predictive, and decisions made with a score of uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dubito.evaluation.metrics import DECISIONS, METRICS
from dubito.evaluation.metrics.reading import Array
from dubito.model.likelihoods import Likelihood
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of, require


def _confidence(p: Predictive) -> Tensor:
    require(
        p.likelihood.discrete,
        f"confidence is for classes, and {type(p.likelihood).__name__} predicts numbers: leave it out of `metrics`",
    )
    return p.mean.amax(-1) if p.likelihood.indexed else torch.maximum(p.mean, 1 - p.mean)


MEANS: dict[str, Callable[[Predictive], Tensor]] = {  # what needs no targets: averaged over all predictions
    "total": lambda p: p.uncertainty.total,
    "aleatoric": lambda p: p.uncertainty.aleatoric,
    "epistemic": lambda p: p.uncertainty.epistemic,
    "confidence": _confidence,
}


def suitable(likelihood: Likelihood) -> list[str]:
    """The names in `METRICS` that are for this likelihood: those of classes, or those of regression.

    >>> from dubito import Gaussian
    >>> suitable(Gaussian(scale=1.0))[:3]
    ['nll', 'rmse', 'crps']
    """
    return [name for name, metric in METRICS.items() if metric.suits(likelihood.discrete)]


def score(p: Predictive, y: Array, metrics: Sequence[str] | None = None) -> dict[str, float]:
    """The metrics of a predictive, given the targets, by name.

    `metrics` are names from `METRICS`, or of means over all predictions: "total", "aleatoric", "epistemic", and "confidence", the
    largest probability of a class. None takes all of `METRICS` that suit the likelihood.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.75, 0.25]] * 4]).log())
    >>> score(p, torch.tensor([0, 0, 1, 1]), ["accuracy", "ece", "confidence"])
    {'accuracy': 0.5, 'ece': 0.25..., 'confidence': 0.75...}
    """
    names = suitable(p.likelihood) if metrics is None else metrics
    for name in names:
        one_of([*METRICS, *MEANS], metric=name)
    return {
        name: float(MEANS[name](p).double().mean()) if name in MEANS else float(METRICS[name].function(p, y)) for name in names
    }


def rank(scores: Array | Predictive, errors: Array, figures: Sequence[str] = tuple(DECISIONS)) -> dict[str, float]:
    """How well scores (larger is less certain) find the errors, by the names of `DECISIONS`.

    >>> rank(torch.tensor([0.1, 0.2, 0.3, 0.9]), torch.tensor([0, 0, 0, 1]), ["auroc", "aurc"])
    {'auroc': 1.0, 'aurc': 0.0625}
    """
    return {name: float(DECISIONS[name].function(scores, errors)) for name in figures}


def separation(familiar: Tensor, unfamiliar: Tensor, figures: Sequence[str] = ("auroc", "fpr95")) -> dict[str, float]:
    """How well a score, larger is less familiar, tells unfamiliar inputs [M] from familiar ones [N].

    >>> separation(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))
    {'auroc': 0.875, 'fpr95': 0.5}
    """
    both = torch.cat([familiar, unfamiliar])
    return rank(both, torch.arange(len(both), device=both.device) >= len(familiar), figures)


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """The numbers for JSON, which has no infinity and no NaN: these become None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
