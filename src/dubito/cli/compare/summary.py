"""Cells as a table: means and standard errors over the seeds, the best of each score, and what cannot be told apart from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dubito.cli.compare.result import Cell
from dubito.evaluation import metrics
from dubito.report import Column, Table

LEVEL = 0.95  # of the interval of a paired difference
SECONDS = "seconds"
NAMES = {
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "ece_mass": "ECE by mass",
    "classwise_ece": "ECE by class",
    "mce": "MCE",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage": "coverage of 90 %",
    "width": "width of 90 %",
    "auroc": "AUROC",
    "fpr95": "FPR95",
    "aupr_error": "AUPR",
    "aurc": "AURC",
}
MAIN = {
    "classification": ("accuracy", "nll", "brier", "ece", "errors auroc", "errors aurc"),
    "regression": ("rmse", "nll", "crps", "coverage", "width", "quantile_error"),
}


class Mean(NamedTuple):
    """
    >>> Mean.of([1.0, 2.0, 3.0])
    Mean(value=2.0, error=0.5773502691896258, n=3)
    """

    value: float
    error: float  # standard error; nan of a single value
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return Mean(math.nan, math.nan, 0)
        error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        return Mean(statistics.fmean(known), error, len(known))


@dataclass(frozen=True)
class Score:
    """A column: what a score is called, which way it is better, and how to read it."""

    key: str
    name: str
    better: Literal["higher", "lower"] | None
    meaning: str = field(default="", kw_only=True)


def by_method(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each method, in the order of the methods."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.key.label, []).append(cell)
    return found


def values(cells: Sequence[Cell], key: str) -> dict[int, float]:
    """A score by seed, of those cells that have it."""
    done = [cell for cell in cells if cell.error is None]
    found = {cell.key.seed: cell.seconds if key == SECONDS else cell.scores.get(key, math.nan) for cell in done}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def told_apart(one: Mapping[int, float], two: Mapping[int, float]) -> bool | None:
    """Whether the mean difference of two methods, over the seeds they share, is more than chance; None with less than two seeds.

    The difference is taken seed by seed, since both have seen the same data with a seed, and is told from 0 where its 95 % interval,
    by the t distribution, does not hold it.

    >>> told_apart({0: 0.90, 1: 0.80}, {0: 0.91, 1: 0.82}), told_apart({0: 0.9}, {0: 0.8})
    (False, None)
    """
    from scipy.stats import t

    shared = [seed for seed in one if seed in two]
    if len(shared) < 2:
        return None
    difference = [one[seed] - two[seed] for seed in shared]
    mean, error = statistics.fmean(difference), statistics.stdev(difference) / math.sqrt(len(shared))
    return bool(abs(mean) > float(t.ppf(0.5 + LEVEL / 2, len(shared) - 1)) * error)


def scores(cells: Sequence[Cell], kind: str) -> tuple[list[Score], list[Score]]:
    """The scores of the main table, and all others that the cells have."""
    there = list(dict.fromkeys(key for cell in cells for key in cell.scores))
    asked = [key for key in there if key.startswith("errors auroc by ")]
    told = [key for key in there if " auroc " in key and key not in asked]
    unfamiliar = [key for key in told if not key.endswith((" aleatoric", " epistemic"))]
    people = [key for key in there if key == "human spearman"]
    shifted = [key for key in there if key in ("shifted accuracy", "shifted nll")]
    main = [key for key in (*MAIN[kind], *asked, *unfamiliar, *people, *shifted) if key in there]
    return [described(key) for key in [*main, SECONDS]], [described(key) for key in there if key not in main]


def described(key: str) -> Score:
    """How a score is called and read.

    >>> described("notmnist auroc total").name, described("errors auroc").better
    ('AUROC notmnist', 'higher')
    """
    name = NAMES.get(key, key.replace("_", " "))
    if key in metrics.METRICS:
        metric = metrics.METRICS[key]
        return Score(key, name, metric.better, meaning=metric.meaning)
    if key == SECONDS:
        return Score(key, "seconds", "lower", meaning="time to fit, with the training of the network it goes on from")
    first, _, rest = key.partition(" ")
    figure, _, way = rest.partition(" by ")
    if first == "errors" and figure in metrics.DECISIONS:  # a file of unfamiliar inputs may have any name, this one too
        decision, by = metrics.DECISIONS[figure], way.replace("_", " ") or "1 - the largest probability"
        name = f"{NAMES.get(figure, figure)} errors{way and ', ' + by}"
        return Score(key, name, decision.better, meaning=f"{decision.meaning}; by {by}")
    if first == "human" and rest in ("spearman", "pearson"):
        meaning = "correlation of the predicted aleatoric entropy with the entropy of people's answers (CIFAR-10H)"
        return Score(key, f"{rest.capitalize()} people", "higher", meaning=meaning)
    if first == "shifted" and rest in metrics.METRICS:
        inner = described(rest)
        return replace(
            inner, key=key, name=f"{inner.name} shifted", meaning=f"{inner.meaning}; mean over the corruptions, most severe"
        )
    if " auroc " in key:
        name, _, measure = key.partition(" auroc ")
        kind = measure in ("total", "aleatoric", "epistemic")
        by = "" if measure == "total" else f" {measure}" if kind else f", {measure.replace('_', ' ')}"
        more = f"more {measure} uncertainty" if kind else f"a higher score of {measure.replace('_', ' ')}"
        meaning = f"how often an input of {name} has {more} than a test input"
        return Score(key, f"AUROC {name}{by}", "higher", meaning=meaning)
    if key.endswith(" fpr95") or " fpr95 " in key:
        name, _, measure = key.partition(" fpr95")
        by = f", {measure.strip().replace('_', ' ')}" if measure else ""
        meaning = f"share of {name} taken for familiar where 95 % of the test inputs are"
        return Score(key, f"FPR95 {name}{by}", "lower", meaning=meaning)
    return Score(key, name, None)


def table(title: str, cells: Sequence[Cell], wanted: Sequence[Score], *, seeds: int, caption: str = "") -> Table:
    """A row for every method. Bold is the best mean; `alike` are the cells that are not told apart from it, also because the two have
    fewer than two seeds in common."""
    rows = by_method(cells)
    found = {label: {score.key: values(own, score.key) for score in wanted} for label, own in rows.items()}
    means = {label: {key: Mean.of(list(by.values())) for key, by in own.items()} for label, own in found.items()}
    columns = [Column("method")]
    for score in wanted:
        digits = 1 if score.key == SECONDS else _digits([means[label][score.key] for label in rows])
        columns.append(Column(score.name, digits=digits, better=score.better, meaning=score.meaning))
    shown = tuple((label, *(means[label][score.key].value for score in wanted)) for label in rows)
    errors = tuple((None, *(means[label][score.key].error for score in wanted)) for label in rows)
    made = Table(title, tuple(columns), shown, caption=caption, errors=errors if seeds > 1 else (), sortable=True)
    alike = set()
    for j, score in enumerate(wanted, 1):
        best = [i for i, k in made.best if k == j]
        if best and score.key != SECONDS:
            leader = _leader(list(rows), means, score)
            for i, label in enumerate(rows):
                known = seeds > 1 and means[label][score.key].n
                if known and i not in best and not told_apart(found[label][score.key], found[leader][score.key]):
                    alike.add((i, j))
    return replace(made, alike=frozenset(alike))


def _leader(labels: Sequence[str], means: Mapping[str, Mapping[str, Mean]], score: Score) -> str:
    sign = -1 if score.better == "higher" else 1
    return min((label for label in labels if means[label][score.key].n), key=lambda label: sign * means[label][score.key].value)


def _digits(means: Sequence[Mean]) -> int:
    """So many that a standard error has two figures, or without one a value four."""
    errors = sorted(mean.error for mean in means if math.isfinite(mean.error) and mean.error > 0)
    if errors:
        return min(6, max(0, 1 - math.floor(math.log10(errors[len(errors) // 2]))))
    sizes = [abs(mean.value) for mean in means if mean.n and mean.value]
    return min(6, max(0, 3 - math.floor(math.log10(max(sizes))))) if sizes else 3


def words(cells: Sequence[Cell], seeds: int, *, splits: bool) -> str:
    """How to read the table."""
    what = "splits" if splits else "seeds"
    if seeds < 2:
        return f"One {what[:-1]}: there are no standard errors, and small differences are chance. Bold is the best of a column."
    each = what[:-1]
    done = {label: sum(cell.error is None for cell in own) for label, own in by_method(cells).items()}
    unequal = len(set(done.values())) > 1
    few = ", ".join(f"{label} ({n} of {seeds})" for label, n in done.items() if unequal and n < seeds)
    fewer = f" Not all {what} count for {few}: means over different {what} are not alike." if few else ""
    return (
        f"Mean ± standard error over {seeds} {what}. Bold is the best mean of a column; a pale cell (~ in print) is not told apart "
        f"from it: the {100 * LEVEL:.0f} % interval of the difference, {each} by {each}, holds 0. Of many comparisons one in twenty "
        f"errs by chance.{fewer}"
    )
