r"""Scores of failure that a predictive has by itself: `[B]`, larger is less certain, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dubito.evaluation.measures import MEASURES, one_minus_max, predictive_entropy
from dubito.evaluation.metrics.reading import Array, tensor
from dubito.model.likelihoods import Bernoulli, Classes, MultiTask
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of

# the names that the literature has for them, and those of all measures
SCORES: dict[str, Callable[[Predictive], Tensor]] = {"mcp": one_minus_max, "entropy": predictive_entropy, **MEASURES}
USUAL = ("mcp", "entropy", "mutual_information", "variation_ratio")


def scores(p: Predictive, names: Sequence[str] = USUAL) -> dict[str, Tensor]:
    """Scores of a predictive by name, each [B, *D]: "mcp" (one minus the maximum class probability), "entropy", and any measure.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]]).log())
    >>> scores(p, ["mcp", "variation_ratio"])
    {'mcp': tensor([0.3000]), 'variation_ratio': tensor([0.2500])}
    """
    for name in names:
        one_of(SCORES, score=name)
    return {name: SCORES[name](p) for name in names}


def one_minus_true(p: Predictive, y: Array) -> Tensor:
    r"""One minus the true class probability, :math:`1 - \bar p_y`, [B, *D]: the oracle, which has to be told the answer.

    Below 1/2 only where the most probable class is right, above :math:`1 - 1/C` only where it is wrong. NaN where the target is
    `ignore_index`.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> one_minus_true(p, torch.tensor([0, 1]))
    tensor([0.1000, 0.6000])
    """
    probs, target, kept = read(p, y, "one_minus_true")
    others = probs.scatter(
        -1, torch.where(kept, target, 0).unsqueeze(-1), 0.0
    )  # all but the true one: 1 - p without its rounding
    return torch.where(kept, others.sum(-1), torch.nan)


def errors(p: Predictive, y: Array) -> Tensor:
    """Where the most probable class is not the true one, [B, *D]; False where the target is `ignore_index`.

    A prediction that is NaN is an error. One label that is on or off (`Bernoulli`) is two classes, here as in all of this package.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> errors(p, torch.tensor([0, 1]))
    tensor([False,  True])
    """
    return wrong(*read(p, y, "errors"))


def wrong(probs: Tensor, target: Tensor, kept: Tensor) -> Tensor:
    """Errors, [B, *D], of what `read` gives."""
    confidence, top = probs.max(-1)
    return ((top != target) | confidence.isnan()) & kept


def class_probs(p: Predictive, name: str) -> Tensor:
    """Probabilities of classes, [B, *D, K], for the function of that name; one label is two classes."""
    likelihood = p.likelihood
    if isinstance(likelihood, Classes):
        return p.mean
    if isinstance(likelihood, MultiTask):
        raise ValueError(f"{name} is for one task at a time: use p.task(name), one of {list(likelihood.tasks)}")
    if not isinstance(likelihood, Bernoulli):
        raise ValueError(
            f"{name} is for classes, and {type(likelihood).__name__} predicts numbers: dubito.judge ranks their squared errors, "
            "and metrics.risk_coverage and metrics.threshold take any loss"
        )
    if likelihood.width(p.f_mean) > 1:
        raise ValueError(
            f"{name} is for one class an input, and here are {likelihood.width(p.f_mean)} labels that are each on or off: look at them "
            "one by one, or use dubito.judge, for which one wrong label is an error"
        )
    return torch.cat([p.complement, p.mean], -1)


def read(p: Predictive, y: Array, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of classes, [B, *D, K], the true class, and whether there is one, [B, *D] each."""
    probs = class_probs(p, name)
    y = tensor(y).to(p.f_mean.device)
    p.likelihood.check(p.f_mean, y)
    target = p.likelihood.target(y, p.f_mean)
    if isinstance(p.likelihood, Classes):
        return probs, target, target != p.likelihood.ignore_index
    target = target.squeeze(-1).long()
    return probs, target, torch.ones_like(target, dtype=torch.bool)
