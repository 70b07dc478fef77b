"""How well a score of uncertainty tells errors from successes: figures, the risk-coverage curve, and a histogram."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.evaluation.metrics import DECISIONS
from dubito.evaluation.metrics.decisions import Ranking, oracle_aurc

POINTS = 1000  # of a risk-coverage curve that are kept
BINS = 50  # of the histograms


@dataclass(frozen=True)
class Counts:
    """Histograms of a score over successes and over errors, in the same bins."""

    edges: Tensor  # [n + 1]
    right: Tensor  # [n], of successes
    wrong: Tensor  # [n], of errors

    @staticmethod
    def of(scores: Tensor, errors: Tensor, *, bins: int = BINS) -> Counts | None:
        """Of all finite scores, from the least, or 0 if that is less, to the largest; None if there is none."""
        scores, errors = scores.double().cpu(), errors.cpu().bool()
        scores, errors = scores[scores.isfinite()], errors[scores.isfinite()]
        if not len(scores):
            return None
        low, high = min(0.0, float(scores.min())), float(scores.max())
        high = high if high > low else low + 1.0
        right, wrong = (torch.histc(scores[group], bins, low, high) for group in (~errors, errors))
        return Counts(torch.linspace(low, high, bins + 1, dtype=torch.float64), right, wrong)


@dataclass(frozen=True)
class Decision:
    """How well a score of uncertainty tells errors from successes."""

    values: Mapping[str, float]  # as in `metrics.DECISIONS`
    coverage: Tensor = field(repr=False)  # [K], up to 1000 points of the risk-coverage curve
    risk: Tensor = field(repr=False)  # [K]
    counts: Counts | None = field(repr=False, default=None)  # of the score, over successes and errors; of classes only


def decide(scores: Mapping[str, Tensor], errors: Tensor, names: Collection[str], *, discrete: bool) -> dict[str, Decision]:
    """The `Decision` of every score [n] about the same errors [n], which are 0 or 1 if `discrete`, and losses otherwise."""
    best = float(oracle_aurc(errors))
    return {name: _decision(one, errors, best, names, discrete=discrete) for name, one in scores.items()}


def _decision(scores: Tensor, errors: Tensor, best: float, names: Collection[str], *, discrete: bool) -> Decision:
    ranking = Ranking.of(scores, errors)
    risk = ranking.risk
    area, n = float(risk.mean()), len(risk)
    values = {"aurc": area, "excess_aurc": area - best} | (_detection(ranking, errors) if discrete else {})
    place = torch.arange(n) if n <= POINTS else (torch.arange(1, POINTS + 1) * n // POINTS) - 1
    chosen = {name: values[name] for name in DECISIONS if name in names and name in values}
    counts = Counts.of(scores, errors) if discrete else None
    return Decision(chosen, (place + 1).double() / n, risk[place.to(risk.device)].cpu(), counts)


def _detection(ranking: Ranking, errors: Tensor) -> dict[str, float]:
    """The figures that need errors as well as successes, and are nan without."""
    if not 0 < int(errors.sum()) < len(errors):
        return dict.fromkeys(("auroc", "fpr95", "aupr_error", "aupr_success"), math.nan)
    opposite = ranking.reversed
    return {
        "auroc": float(ranking.auroc()),
        "fpr95": float(opposite.fpr_at_tpr(0.95)),
        "aupr_error": float(ranking.average_precision()),
        "aupr_success": float(opposite.average_precision()),
    }
