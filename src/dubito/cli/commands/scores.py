"""The metrics of a predictive, as numbers and as a table on the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from torch import Tensor

from dubito.evaluation.metrics import METRICS
from dubito.posteriors.predictive import Predictive
from dubito.tensors.text import TextTable, number

MEANINGS = {name: metric.meaning for name, metric in METRICS.items()}


def scores(p: Predictive, y: Tensor) -> dict[str, float]:
    """All metrics that suit the predictive."""
    suit = {name: m for name, m in METRICS.items() if (m.classes if p.likelihood.discrete else m.regression)}
    return {name: float(metric.function(p, y)) for name, metric in suit.items()}


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """For JSON, which has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def show(values: dict[str, float], title: str) -> None:
    """Print a table of metric, value and meaning."""
    rows = [(name, number(value), MEANINGS.get(name, "")) for name, value in values.items()]
    Console().print(TextTable(rows, ("metric", "value", "meaning"), title=title, right=[1], styles={2: "dim"}))
