"""Methods under distribution shift: tables, lines over the levels of shift, and box plots over its kinds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Literal, NamedTuple

from dubito.evaluation.shift import Sweep
from dubito.report.canvas import CYCLE, SOFT, Drawing, grid, line_style, picture
from dubito.report.content import Column, Figure, Picture, Section, Table
from dubito.tensors.checks import require


class Reading(NamedTuple):
    """The name of a metric, whether higher or lower is better, and what it means."""

    name: str
    better: Literal["higher", "lower"] | None = None
    meaning: str = ""


READINGS = {
    "accuracy": Reading("accuracy", "higher", "share of inputs whose most probable class is right"),
    "nll": Reading("NLL", "lower", "mean negative log probability of the truth, in nats"),
    "ece": Reading("ECE", "lower", "expected calibration error: how far confidence is from accuracy"),
    "brier": Reading("Brier", "lower"),
    "rmse": Reading("RMSE", "lower"),
    "crps": Reading("CRPS", "lower"),
    "confidence": Reading("confidence", None, "mean probability of the most probable class; it should fall as accuracy does"),
    "epistemic": Reading("epistemic", None, "mean epistemic uncertainty; it should grow with the shift"),
}


def table(sweeps: Mapping[str, Sweep], *, title: str = "Under shift") -> Table:
    """A row per method: every metric on clean inputs, and its mean over all kinds and levels of the shift."""
    first = checked(sweeps)
    columns, rows = [Column("method")], [[label] for label in sweeps]
    for metric in first.metrics:
        reading = READINGS.get(metric, Reading(metric))
        columns.append(Column(f"{reading.name}, clean", better=reading.better, meaning=reading.meaning))
        columns.append(Column(f"{reading.name}, shifted", better=reading.better, meaning=reading.meaning))
        for row, one in zip(rows, sweeps.values(), strict=True):
            row += [one.mean(metric, 0), one.mean(metric)]  # pyright: ignore[reportArgumentType, reportOperatorIssue]
    levels = ", ".join(f"{level:g}" for level in first.levels[1:])
    caption = f"Shifted: the mean over {first.axis} {levels} of {', '.join(first.kinds)}."
    return Table(title, tuple(columns), tuple(tuple(row) for row in rows), caption=caption)


def details(label: str, sweep: Sweep, metric: str) -> Table:
    """One method and one metric: a row for every kind of shift, a column for every level."""
    reading = READINGS.get(metric, Reading(metric))
    columns = (Column("shift"), *(Column("clean" if level == 0 else f"{level:g}") for level in sweep.levels))
    rows = tuple((kind, *(sweep.scores[kind, level][metric] for level in sweep.levels)) for kind in sweep.kinds)
    return Table(f"{label}: {reading.name} by {sweep.axis}", columns, rows, caption=reading.meaning)


def lines(sweeps: Mapping[str, Sweep], metric: str) -> Picture:
    """The mean over kinds at every level, a line per method, and a band from the first to the third quartile of the kinds."""
    first, name = checked(sweeps), READINGS.get(metric, Reading(metric)).name

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (label, one) in enumerate(sweeps.items()):
            style = line_style(i)
            means = [one.mean(metric, level) for level in one.levels]
            axes.plot(one.levels, means, "o", label=label, **style)
            if len(one.kinds) > 3:
                ends = [statistics.quantiles(one.over_kinds(metric, level), n=4, method="inclusive") for level in one.levels]
                axes.fill_between(
                    one.levels, [e[0] for e in ends], [e[2] for e in ends], color=style["color"], alpha=0.15, linewidth=0
                )
        axes.set(title=name, xlabel=first.axis, xticks=ticks(first.levels))
        grid(axes, "y")
        if len(sweeps) > 1:
            axes.legend(handlelength=2.6)

    return picture(_draw, (4.2, 3.1), alt=_alt(sweeps, metric))


def boxes(sweeps: Mapping[str, Sweep], metric: str) -> Picture:
    """At every level a box per method: quartiles and median over the kinds, with whiskers to the smallest and the largest."""
    first, name = checked(sweeps), READINGS.get(metric, Reading(metric)).name
    width = 0.8 / len(sweeps)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (label, one) in enumerate(sweeps.items()):
            colour = CYCLE[i % len(CYCLE)]
            places = [j + width * (i - (len(sweeps) - 1) / 2) for j in range(len(one.levels))]
            drawn = axes.boxplot(
                [one.over_kinds(metric, level) for level in one.levels], positions=places, widths=0.8 * width, whis=(0, 100),
                patch_artist=True, manage_ticks=False, showcaps=False, boxprops={"facecolor": colour, "alpha": 0.55, "linewidth": 0},
                medianprops={"color": colour, "linewidth": 2}, whiskerprops={"color": colour, "linewidth": 1},
            )  # fmt: skip
            drawn["boxes"][0].set_label(label)
        for edge in range(len(first.levels) - 1):
            axes.axvline(edge + 0.5, color=SOFT, linewidth=0.4, alpha=0.4)
        axes.set(title=name, xlabel=first.axis, xlim=(-0.5, len(first.levels) - 0.5))
        axes.set_xticks(range(len(first.levels)), ["clean", *(f"{level:g}" for level in first.levels[1:])])
        grid(axes, "y")
        if len(sweeps) > 1:
            axes.legend(handlelength=1.2)

    size = (max(4.2, 0.6 + 0.32 * len(sweeps) * len(first.levels)), 3.1)
    return picture(_draw, size, alt=_alt(sweeps, metric))


def section(sweeps: Mapping[str, Sweep], *, title: str = "Under shift") -> Section:
    """The table, and a picture of every metric: boxes where there are several kinds of shift, else lines."""
    first = checked(sweeps)
    several = len(first.kinds) > 3
    pictures = tuple((boxes if several else lines)(sweeps, metric) for metric in first.metrics)
    boxed = f"Each box is over {len(first.kinds)} kinds of shift: quartiles, median, smallest and largest."
    caption = boxed if several else f"The mean over {', '.join(first.kinds)}."
    return Section(title, tables=(table(sweeps, title=title),), figures=(Figure("By " + first.axis, pictures, caption=caption),))


def checked(sweeps: Mapping[str, Sweep]) -> Sweep:
    """The first sweep, after a check that all are of the same shift."""
    require(sweeps, "sweeps is empty: give at least one, by the name of its method")
    first = next(iter(sweeps.values()))
    for label, one in sweeps.items():
        same = (one.kinds, one.levels, one.metrics) == (first.kinds, first.levels, first.metrics)
        require(same, f"the sweep of {label!r} has other kinds, levels or metrics than the first: use the same `shift` for all")
    return first


def ticks(levels: tuple[float, ...], most: int = 8) -> list[float]:
    """At most `most` evenly spaced levels, for the ticks of an axis."""
    return list(levels[:: -(-len(levels) // most)])


def _alt(sweeps: Mapping[str, Sweep], metric: str) -> str:
    name = READINGS.get(metric, Reading(metric)).name
    first = checked(sweeps)
    last = first.levels[-1]
    means = ", ".join(f"{label} {one.mean(metric, 0):.3g} to {one.mean(metric, last):.3g}" for label, one in sweeps.items())
    return f"{name} from clean inputs to {first.axis} {last:g}, means over {len(first.kinds)} kinds of shift: {means}."
