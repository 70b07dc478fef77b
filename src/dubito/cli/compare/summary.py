"""Results as a table: means and standard errors over seeds, the best value of each score, and the values that do not differ from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dubito.cli.compare.result import Result
from dubito.cli.compare.spec import Spec
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
NOMINAL, SLACK = 0.9, 0.03  # level of the intervals, and how far off a coverage may be whatever the number of targets
CALIBRATION = (
    "ece",
    "ece_mass",
    "classwise_ece",
    "mce",
    "quantile_error",
)  # a predictive that ignores its inputs is best in these
WIDTHS = ("width", "sharpness")  # and a wrong one that is sure of itself in these
MAIN = {
    "classification": ("accuracy", "nll", "brier", "ece", "errors auroc", "errors aurc"),
    "regression": ("rmse", "nll", "crps", "coverage", "width", "quantile_error"),
}


class Mean(NamedTuple):
    """A mean over seeds with its standard error.

    >>> Mean.of([1.0, 2.0, 3.0])
    Mean(value=2.0, error=0.5773502691896258, n=3)
    """

    value: float
    error: float  # standard error; NaN for a single value
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Mean:
        """The mean of the finite values."""
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return Mean(math.nan, math.nan, 0)
        error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
        return Mean(statistics.fmean(known), error, len(known))


MARKS = (
    "Errors of calibration are not marked, since a method that ignores the inputs has the least; widths only of methods whose coverage "
    "is right."
)


@dataclass(frozen=True)
class Score:
    """A column: what a score is called, which way it is better, and how to read it."""

    key: str
    name: str
    better: Literal["higher", "lower"] | None
    meaning: str = field(default="", kw_only=True)


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each method, in the order of the methods."""
    grouped: dict[str, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.key.label, []).append(result)
    return grouped


def values(results: Sequence[Result], key: str) -> dict[int, float]:
    """A score by seed, of those results that have it."""
    done = [result for result in results if result.error is None]
    every = {result.key.seed: result.seconds if key == SECONDS else result.scores.get(key, math.nan) for result in done}
    return {seed: value for seed, value in every.items() if math.isfinite(value)}


def differ(first: Mapping[int, float], second: Mapping[int, float]) -> bool | None:
    """Whether two methods differ significantly over the seeds that they share; None with fewer than two such seeds.

    A paired t-test: with the same seed both have seen the same data. They differ where the 95 % interval of the mean difference
    does not include 0.

    >>> differ({0: 0.90, 1: 0.80}, {0: 0.91, 1: 0.82}), differ({0: 0.9}, {0: 0.8})
    (False, None)
    """
    from scipy.stats import t

    shared = [seed for seed in first if seed in second]
    if len(shared) < 2:
        return None
    difference = [first[seed] - second[seed] for seed in shared]
    mean, error = statistics.fmean(difference), statistics.stdev(difference) / math.sqrt(len(shared))
    return bool(abs(mean) > float(t.ppf(0.5 + LEVEL / 2, len(shared) - 1)) * error)


def scores(results: Sequence[Result], kind: str) -> tuple[list[Score], list[Score]]:
    """The scores of the main table, and all others that the results have."""
    keys = list(dict.fromkeys(key for result in results for key in result.scores))
    errors = [key for key in keys if key.startswith("errors auroc by ")]
    unfamiliar = [
        key for key in keys if " auroc " in key and key not in errors and not key.endswith((" aleatoric", " epistemic"))
    ]
    others = [key for key in keys if key in ("human spearman", "shifted accuracy", "shifted nll")]
    main = [key for key in (*MAIN[kind], *errors, *unfamiliar, *others) if key in keys]
    return [describe(key) for key in [*main, SECONDS]], [describe(key) for key in keys if key not in main]


def describe(key: str) -> Score:
    """The column of a score: its name, which way it is better, and how to read it.

    >>> describe("notmnist auroc total").name, describe("errors auroc").better
    ('AUROC notmnist', 'higher')
    """
    if key == SECONDS:
        return Score(key, "seconds", "lower", meaning="time to fit, including the training of the network it starts from")
    if key in metrics.METRICS:
        metric = metrics.METRICS[key]
        better = "lower" if key in WIDTHS else metric.better
        return Score(key, NAMES.get(key, key.replace("_", " ")), better, meaning=metric.meaning)
    # a file of unfamiliar inputs may have any name, such as "errors", so those come last
    readers = (_of_errors, _of_people, _of_shift, _of_separation, _of_missed)
    return next((score for reader in readers if (score := reader(key)) is not None), Score(key, key.replace("_", " "), None))


def _of_errors(key: str) -> Score | None:
    first, _, rest = key.partition(" ")
    figure, _, way = rest.partition(" by ")
    if first != "errors" or figure not in metrics.DECISIONS:
        return None
    decision, by = metrics.DECISIONS[figure], way.replace("_", " ") or "1 - the largest probability"
    name = f"{NAMES.get(figure, figure)} errors{way and ', ' + by}"
    return Score(key, name, decision.better, meaning=f"{decision.meaning}; by {by}")


def _of_people(key: str) -> Score | None:
    if key not in ("human spearman", "human pearson"):
        return None
    meaning = "correlation of the predicted aleatoric entropy with the entropy of people's answers (CIFAR-10H)"
    return Score(key, f"{key.split()[1].capitalize()} people", "higher", meaning=meaning)


def _of_shift(key: str) -> Score | None:
    first, _, rest = key.partition(" ")
    if first != "shifted" or rest not in metrics.METRICS:
        return None
    inner = describe(rest)
    meaning = f"{inner.meaning}; mean over the corruptions at the highest severity"
    return replace(inner, key=key, name=f"{inner.name} shifted", meaning=meaning)


def _of_separation(key: str) -> Score | None:
    name, sign, measure = key.partition(" auroc ")
    if not sign:
        return None
    kind = measure in ("total", "aleatoric", "epistemic")
    by = "" if measure == "total" else f" {measure}" if kind else f", {measure.replace('_', ' ')}"
    more = f"more {measure} uncertainty" if kind else f"a higher score of {measure.replace('_', ' ')}"
    return Score(key, f"AUROC {name}{by}", "higher", meaning=f"probability that an input of {name} has {more} than a test input")


def _of_missed(key: str) -> Score | None:
    name, sign, measure = key.partition(" fpr95")
    if not sign or (measure and not measure.startswith(" ")):
        return None
    by = f", {measure.strip().replace('_', ' ')}" if measure else ""
    meaning = f"share of {name} accepted as familiar where 95 % of the test inputs are"
    return Score(key, f"FPR95 {name}{by}", "lower", meaning=meaning)


def table(title: str, results: Sequence[Result], wanted: Sequence[Score], *, seeds: int, caption: str = "") -> Table:
    """A row for every method. Bold is the best mean; `alike` are the values that do not differ significantly from it, which includes
    methods that share fewer than two seeds with the best. Errors of calibration have neither, and narrow intervals only if they
    cover."""
    rows = by_method(results)
    by_seed = {label: {score.key: values(own, score.key) for score in wanted} for label, own in rows.items()}
    means = {label: {key: Mean.of(list(by.values())) for key, by in own.items()} for label, own in by_seed.items()}
    columns = [Column("method")]
    for score in wanted:
        digits = 1 if score.key == SECONDS else _digits([means[label][score.key] for label in rows])
        columns.append(Column(score.name, digits=digits, better=score.better, meaning=score.meaning))
    shown = tuple((label, *(means[label][score.key].value for score in wanted)) for label in rows)
    errors = tuple((None, *(means[label][score.key].error for score in wanted)) for label in rows)
    unmarked = {
        (i, j)
        for j, score in enumerate(wanted, 1)
        for i, own in enumerate(rows.values())
        if score.key in CALIBRATION or (score.key in WIDTHS and not covers(own))
    }
    made = Table(
        title,
        tuple(columns),
        shown,
        caption=caption,
        errors=errors if seeds > 1 else (),
        unmarked=frozenset(unmarked),
        sortable=True,
    )
    alike = set()
    for j, score in enumerate(wanted, 1):
        best = [i for i, k in made.best if k == j]
        if best and seeds > 1 and score.key != SECONDS:
            fair = [{} if (i, j) in unmarked else by[score.key] for i, by in enumerate(by_seed.values())]
            alike |= {(i, j) for i in _alike(fair, score) if i not in best}
    return replace(made, alike=frozenset(alike))


def covers(results: Sequence[Result]) -> bool:
    """Whether the 90 % intervals of a method hold 90 % of the targets, up to 3 % or two binomial standard errors.

    >>> from dubito.cli.compare.result import Key
    >>> [covers([Result(Key("a", 0, {}), {"coverage": share})]) for share in (0.86, 0.88, 0.92, 0.94)]
    [False, True, True, False]
    """
    share = Mean.of(list(values(results, "coverage").values())).value
    targets = sum(len(result.arrays["y"]) for result in results if "y" in result.arrays)
    noise = math.sqrt(NOMINAL * (1 - NOMINAL) / targets) if targets else 0.0
    return abs(share - NOMINAL) <= max(SLACK, 2 * noise)


def _alike(by_row: Sequence[Mapping[int, float]], score: Score) -> list[int]:
    """The rows that do not differ significantly from the row with the best mean."""
    sign = -1 if score.better == "higher" else 1
    known = [i for i, by_seed in enumerate(by_row) if by_seed]
    best = min(known, key=lambda i: sign * Mean.of(list(by_row[i].values())).value)
    return [i for i in known if not differ(by_row[i], by_row[best])]


def _digits(means: Sequence[Mean]) -> int:
    """So many that a standard error has two figures, or without one a value four."""
    errors = sorted(mean.error for mean in means if math.isfinite(mean.error) and mean.error > 0)
    if errors:
        return min(6, max(0, 1 - math.floor(math.log10(errors[len(errors) // 2]))))
    sizes = [abs(mean.value) for mean in means if mean.n and mean.value]
    return min(6, max(0, 3 - math.floor(math.log10(max(sizes))))) if sizes else 3


def table_caption(results: Sequence[Result], seeds: int, *, splits: bool) -> str:
    """How to read the table."""
    noun = "split" if splits else "seed"
    if seeds < 2:
        return (
            f"One {noun}, so there are no standard errors, and small differences are chance. Bold: the best of a column. {MARKS}"
        )
    done = {label: sum(result.error is None for result in own) for label, own in by_method(results).items()}
    few = [f"{label} ({n} of {seeds})" for label, n in done.items() if n < seeds and len(set(done.values())) > 1]
    fewer = f" Means over fewer {noun}s cannot be compared with the others: {', '.join(few)}." if few else ""
    return (
        f"Mean ± standard error over {seeds} {noun}s. Bold: the best mean of a column. {MARKS} Pale (~ in print): not significantly "
        f"different from the best; the {100 * LEVEL:.0f} % interval of the paired difference includes 0. Of many comparisons, one in "
        f"twenty is wrong by chance.{fewer}"
    )


def departures_caption(specs: Sequence[Spec]) -> str:
    """What the labels tempered, generalized and tuned mean, for the rows that have one."""
    changed = [f"{spec.label}: {spec.departure}" for spec in specs if spec.departure]
    tuned = [spec.label for spec in specs if spec.tuned]
    texts = []
    if changed:
        texts.append(f"Not the posterior of Bayes' rule: {'; '.join(changed)}.")
    if tuned:
        texts.append(
            f"Tuned on held-out training rows: {', '.join(tuned)}. Compare tuned rows only with other tuned rows, such as "
            "`map+temperature` and `ensemble+temperature`."
        )
    return " ".join(texts)
