"""Targets in the layout of what is predicted, and what a metric cannot be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.model.likelihoods import Bernoulli, Classes, MultiTask
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors.checks import require

Array = Tensor | np.ndarray | Sequence[Any]  # what targets, scores and errors may come as


def tensor(values: Array) -> Tensor:
    """A tensor as it is; an array or a list (of targets, scores, errors) as a tensor in the precision that it has."""
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values, order="C"))


def precise(values: Tensor) -> Tensor:
    """In single precision at least: a result in half of it would have three digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def suits(p: Predictive, name: str, *, classes: bool | None) -> None:
    """Raise, in words, for a predictive that the metric of that name is not for."""
    kind = type(p.likelihood).__name__
    if isinstance(p.likelihood, MultiTask):
        raise ValueError(f"{name} is for one task at a time: use p.task(name), one of {list(p.likelihood.tasks)}")
    if classes is not None:
        needs, predicts, use = (
            ("classes", "numbers", "rmse, crps or coverage") if classes else ("regression", "classes", "accuracy or ece")
        )
        require(p.likelihood.discrete == classes, f"{name} is for {needs}, and {kind} predicts {predicts}: use nll, {use}")


def targets(p: Predictive, y: Array, name: str, *, classes: bool | None = None) -> Tensor:
    """The targets, checked, in the layout of p.mean: [B, *D] for classes, [B, *D, C] else."""
    suits(p, name, classes=classes)
    f = p.means[0] if isinstance(p, LatentMixture) else p.f_mean  # for its shape alone
    y = tensor(y).to(f.device)
    p.likelihood.check(f, y)
    found = p.likelihood.target(y, f)
    if classes is False and p.likelihood.observed(found) is not None:
        raise ValueError(
            f"{name} needs all targets, and some are NaN: leave them out, or use dubito.apps.dense.assess, which does"
        )
    return found


def labelled(p: Predictive, target: Tensor) -> Tensor:
    """Which positions count, [B, *D]."""
    if isinstance(p.likelihood, Classes):
        return target != p.likelihood.ignore_index
    seen = p.likelihood.observed(target)
    return torch.ones(target.shape[:-1], dtype=torch.bool, device=target.device) if seen is None else seen


def forecasts(p: Predictive, y: Array, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities [n, C] of the positions that count, and what came true: the class [n], or every label [n, C]."""
    target = targets(p, y, name, classes=True)
    keep = labelled(p, target)
    return precise(p.mean[keep]), target[keep].long()


def choices(p: Predictive, y: Array, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities [n, K] and the true index [n] of every choice: among classes, or 0 or 1 for each label."""
    probs, label = forecasts(p, y, name)
    if isinstance(p.likelihood, Bernoulli):
        return torch.stack([1 - probs, probs], -1).flatten(0, 1), label.flatten()
    return probs, label


def judged(probs: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, which is the largest of the probabilities [n, K], and whether that is the truth's: where they are NaN it is not."""
    confidence, top = probs.max(-1)
    return confidence, (top == label) & ~confidence.isnan()
