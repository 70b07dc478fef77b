r"""Scores of failure that a predictive has by itself: `[B]`, larger is less certain, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dubito.likelihoods import Classes
from dubito.measures import MEASURES, one_minus_max, predictive_entropy
from dubito.predictive import Predictive

# the names that the literature has for them, and those of all measures
SCORES: dict[str, Callable[[Predictive], Tensor]] = {"mcp": one_minus_max, "entropy": predictive_entropy, **MEASURES}
USUAL = ("mcp", "entropy", "mutual_information", "variation_ratio")


def scores(p: Predictive, names: Sequence[str] = USUAL) -> dict[str, Tensor]:
    """Scores of a predictive by name, each [B, *D]: "mcp" (one minus the maximum class probability), "entropy", and any measure.

    >>> import dubito
    >>> p = dubito.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]]).log())
    >>> scores(p, ["mcp", "variation_ratio"])
    {'mcp': tensor([0.3000]), 'variation_ratio': tensor([0.2500])}
    """
    unknown = [name for name in names if name not in SCORES]
    if unknown:
        raise ValueError(f"there is no score {unknown[0]!r}; there are {', '.join(SCORES)}")
    return {name: SCORES[name](p) for name in names}


def one_minus_true(p: Predictive, y: Tensor) -> Tensor:
    r"""One minus the true class probability, :math:`1 - \bar p_y`, [B, *D]: the oracle, which has to be told the answer.

    Below 1/2 only where the most probable class is right, above :math:`1 - 1/C` only where it is wrong. NaN where the target is
    `ignore_index`.

    >>> import dubito
    >>> p = dubito.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> one_minus_true(p, torch.tensor([0, 1]))
    tensor([0.1000, 0.6000])
    """
    target, kept = _targets(p, y, "one_minus_true")
    others = p.mean.scatter(
        -1, torch.where(kept, target, 0).unsqueeze(-1), 0.0
    )  # all but the true one: 1 - p without its rounding
    return torch.where(kept, others.sum(-1), torch.nan)


def errors(p: Predictive, y: Tensor) -> Tensor:
    """Where the most probable class is not the true one, [B, *D]; False where the target is `ignore_index`.

    >>> import dubito
    >>> p = dubito.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> errors(p, torch.tensor([0, 1]))
    tensor([False,  True])
    """
    target, kept = _targets(p, y, "errors")
    return (p.mean.argmax(-1) != target) & kept


def labelled(p: Predictive, y: Tensor) -> Tensor:
    """Which positions have a target, [B, *D]."""
    return _targets(p, y, "labelled")[1]


def _targets(p: Predictive, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if not isinstance(p.likelihood, Classes):
        raise ValueError(f"{name} is for one of several classes; {type(p.likelihood).__name__} predicts something else")
    y = y.to(p.f_mean.device)
    p.likelihood.check(p.f_mean, y)
    target = p.likelihood.target(y, p.f_mean)
    return target, target != p.likelihood.ignore_index
