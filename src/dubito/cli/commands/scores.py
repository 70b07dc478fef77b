"""The metrics of a predictive, as numbers and as a table on the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dubito.evaluation.metrics import METRICS
from dubito.posteriors.predictive import Predictive

MEANINGS = {name: metric.meaning for name, metric in METRICS.items()}


def scores(p: Predictive, y: Tensor) -> dict[str, float]:
    """All metrics that suit the predictive."""
    suit = {name: m for name, m in METRICS.items() if (m.classes if p.likelihood.discrete else m.regression)}
    return {name: float(metric.function(p, y)) for name, metric in suit.items()}


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """For JSON, which has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def show(values: dict[str, float], title: str) -> None:
    shown = Table(title=Text(title), title_justify="left", title_style="bold")
    shown.add_column("metric")
    shown.add_column("value", justify="right")
    shown.add_column("meaning", style="dim")
    for name, value in values.items():
        shown.add_row(name, f"{value:.4g}", MEANINGS.get(name, ""))
    Console().print(shown)
