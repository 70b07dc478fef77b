"""Scores of predictions in memory; what `judge` returns, with its text; and how well a score of uncertainty finds errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.evaluation.metrics import DECISIONS, METRICS, QuantileCalibration, Reliability
from dubito.evaluation.metrics.decisions import Ranking, oracle_aurc
from dubito.evaluation.metrics.reading import Array
from dubito.model.likelihoods import Likelihood
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of, require
from dubito.tensors.text import TextTable, number


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


DECOMPOSITION = {
    "brier_reliability": "part of the Brier score: distance of forecasts from observed frequencies; 0 is calibrated",
    "brier_resolution": "part of the Brier score: how much frequencies differ between forecasts; higher is better",
    "brier_uncertainty": "part of the Brier score: that of always forecasting the overall frequencies",
    "brier_within": "part of the Brier score: variation inside the bins of the other parts",
}
SPLIT = {
    "total": "mean uncertainty, in nats for classes, a variance for numbers",
    "aleatoric": "of which noise, as the model sees it",
    "epistemic": "of which disagreement between draws of the weights",
}
MEANINGS = {name: metric.meaning for name, metric in (METRICS | DECISIONS).items()} | DECOMPOSITION | SPLIT


def meanings(level: float) -> dict[str, str]:
    """How to read every number that a judgement may hold, with intervals of that level."""
    percent = f"{100 * level:.6g} %"
    return MEANINGS | {
        "coverage": f"share inside the {percent} interval; {level:.6g} is calibrated",
        "width": f"mean width of the {percent} interval, in the target's units",
    }


def rows(values: Mapping[str, float], errors: Mapping[str, float], texts: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Name, value, standard error where there is one, and meaning: the rows of every table of scores."""
    return [(name, number(value), _error(errors.get(name)), texts.get(name, "")) for name, value in values.items()]


def score_table(title: str, lines: Iterable[tuple[str, str, str, str]]) -> TextTable:
    """A table of the rows of `rows`; the column of standard errors is left out if it is empty."""
    rows = list(lines)
    if any(row[2] for row in rows):
        return TextTable(rows, ("metric", "value", "± s.e.", "meaning"), title=title, right=(1,), styles={3: "dim"})
    short = [(name, value, text) for name, value, _, text in rows]
    return TextTable(short, ("metric", "value", "meaning"), title=title, right=(1,), styles={2: "dim"})


def _error(error: float | None) -> str:
    return "" if error is None or error != error else f"± {error:.2g}"


@dataclass(frozen=True)
class Judgement:
    """The result of `judge`. `print` shows it; `values` holds the numbers by name, those of `decisions` for the first score.

    `standard_errors` are the sampling errors of those values that are means over examples. `reliability` is of classes, `quantiles`
    and `pit` (counts of PIT values in equal bins) are of regression, and None otherwise.
    """

    values: Mapping[str, float]
    n: int  # examples, or labelled positions of dense outputs
    decisions: Mapping[str, Decision]  # by score
    level: float = 0.9  # of intervals
    reliability: Reliability | None = field(repr=False, default=None)
    quantiles: QuantileCalibration | None = field(repr=False, default=None)
    pit: Tensor | None = field(repr=False, default=None)
    standard_errors: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def data(self) -> dict[str, Any]:
        """The numbers in plain types, for JSON: None where a number is not finite."""
        decisions = {score: finite(decision.values) for score, decision in self.decisions.items()}
        errors = finite(self.standard_errors)
        return {"n": self.n, "values": finite(self.values), "standard_errors": errors, "decisions": decisions}

    def table(self) -> str:
        """Name, value, standard error and meaning, a line each; every score but the first has a table of its own."""
        texts = meanings(self.level)
        scores = list(self.decisions)
        title = f"{self.n:,} examples" + (f" by {scores[0]}" if scores else "")
        tables = [(title, rows(self.values, self.standard_errors, texts))]
        tables += [(f"by {score}", rows(self.decisions[score].values, {}, texts)) for score in scores[1:]]
        return "\n".join(score_text(*table) for table in tables)

    def __str__(self) -> str:
        return self.table()


def score_text(title: str, lines: Iterable[tuple[str, str, str, str]]) -> str:
    """The table of `score_table` as plain text, without its header."""
    return str(TextTable(score_table(title, lines).rows, title=title, right=(1,)))
