"""How well scores rank the errors of a model first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dubito.apps.failure.scores import USUAL, one_minus_true, read, scores, wrong
from dubito.evaluation.judge import rank
from dubito.evaluation.metrics.reading import Array, tensor
from dubito.posteriors.predictive import Predictive


class Failure(NamedTuple):
    """What a score of failure is worth.

    `fpr95`: the share of errors that are accepted where 95 % of what is right is. `aupr_error` and `aupr_success`: average
    precision with the errors, or with what is right, as what is to be found. `aurc`: the mean risk over all coverages; `excess_aurc`
    is what is left of it when the best order's is taken away.
    """

    fpr95: float
    aupr_error: float
    aupr_success: float
    auroc: float
    aurc: float
    excess_aurc: float


def failure(score: Array, is_error: Array) -> Failure:
    """All figures of one score, [N], larger is less certain, and of the errors, [N].

    >>> import torch
    >>> failure(torch.tensor([0.1, 0.2, 0.3, 0.9]), torch.tensor([False, False, False, True]))
    Failure(fpr95=0.0, aupr_error=1.0, aupr_success=1.0, auroc=1.0, aurc=0.0625, excess_aurc=0.0)
    """
    return Failure(**rank(score, is_error, Failure._fields))


def failures(
    p: Predictive, y: Array, *, names: Sequence[str] = USUAL, others: Mapping[str, Array] | None = None, oracle: bool = False
) -> dict[str, Failure]:
    """Scores of a predictive by name, and others that were found elsewhere ([B, *D] each), all judged by the errors of p.

    `oracle` adds the true class probability, "tcp", which bounds what a learned confidence can reach.

    >>> import dubito, torch
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> failures(p, torch.tensor([0, 1]), names=["mcp"])["mcp"].auroc
    1.0
    """
    probs, target, kept = read(p, y, "failures")
    found = scores(p, names) | ({"tcp": one_minus_true(p, y)} if oracle else {})
    for name, other in (others or {}).items():
        score = tensor(other)
        if score.shape != kept.shape:
            raise ValueError(f"the score {name!r} is {list(score.shape)} for predictions {list(kept.shape)}")
        found[name] = score.to(kept.device)
    is_error = wrong(probs, target, kept)[kept]
    return {name: failure(score[kept], is_error) for name, score in found.items()}
