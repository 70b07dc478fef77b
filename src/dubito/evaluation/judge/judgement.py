"""What `judge` returns: numbers by name, with standard errors, and their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dubito.evaluation.judge.decisions import Decision
from dubito.evaluation.judge.score import finite
from dubito.evaluation.metrics import DECISIONS, METRICS, QuantileCalibration, Reliability
from dubito.tensors.text import TextTable, number

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
    found = list(lines)
    if any(row[2] for row in found):
        return TextTable(found, ("metric", "value", "± s.e.", "meaning"), title=title, right=(1,), styles={3: "dim"})
    short = [(name, value, text) for name, value, _, text in found]
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
