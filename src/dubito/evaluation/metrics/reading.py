"""Targets in the layout of what is predicted, and what a metric cannot be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import require

Array = Tensor | np.ndarray | Sequence[Any]  # what targets, scores and errors may come as
ADVICE = ("use nll, accuracy or ece", "use nll, rmse, crps or coverage")  # advice for classes, and for numbers


def tensor(values: Array) -> Tensor:
    """A tensor as it is; an array or a list (of targets, scores, errors) as a tensor in the precision that it has."""
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values, order="C"))


def precise(values: Tensor) -> Tensor:
    """In single precision at least: a result in half of it would have three digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def suits(p: Predictive, name: str, *, classes: bool | None, advice: tuple[str, str] = ADVICE) -> None:
    """Raise for a predictive that the function of that name is not for; `advice` says what there is for classes, and for numbers."""
    if tasks := p.likelihood.task_names:
        raise ValueError(f"{name} is for one task at a time: use p.task(name), one of {list(tasks)}")
    if classes is not None:
        needs, predicts = ("classes", "numbers") if classes else ("regression", "classes")
        message = f"{name} is for {needs}, and {type(p.likelihood).__name__} predicts {predicts}: {advice[classes]}"
        require(p.likelihood.discrete == classes, message)


def targets(p: Predictive, y: Array, name: str, *, classes: bool | None = None, advice: tuple[str, str] = ADVICE) -> Tensor:
    """The targets, checked, in the layout of p.mean: [B, *D] for classes, [B, *D, C] else."""
    suits(p, name, classes=classes, advice=advice)
    f = p.f_mean if p.mixture is None else p.means[0]  # for its shape alone
    y = tensor(y).to(f.device)
    p.likelihood.check(f, y)
    target = p.likelihood.target(y, f)
    if classes is False and p.likelihood.observed(target) is not None:
        raise ValueError(
            f"{name} needs all targets, and some are NaN: leave them out, or use dubito.apps.dense.assess, which does"
        )
    return p.likelihood.numbers(target) if classes is False else target


def labelled(p: Predictive, target: Tensor) -> Tensor:
    """Which positions count, [B, *D]."""
    keep = p.likelihood.observed(target)
    shape = target.shape if p.likelihood.indexed else target.shape[:-1]
    return torch.ones(shape, dtype=torch.bool, device=target.device) if keep is None else keep


def forecasts(p: Predictive, y: Array, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities [n, C] of the positions that count, and what came true: the class [n], or every label [n, C]."""
    target = targets(p, y, name, classes=True)
    keep = labelled(p, target)
    return precise(p.mean[keep]), target[keep].long()


def choices(p: Predictive, y: Array, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities [n, K] and the true index [n] of every choice: among classes, or 0 or 1 for each label."""
    probs, label = forecasts(p, y, name)
    if p.likelihood.indexed:
        return probs, label
    return torch.stack([1 - probs, probs], -1).flatten(0, 1), label.flatten()


def judged(probs: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence, which is the largest of the probabilities [n, K], and whether that is the truth's: where they are NaN it is not."""
    confidence, top = probs.max(-1)
    return confidence, (top == label) & ~confidence.isnan()
