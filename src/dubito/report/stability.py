"""Methods under small changes of their inputs: tables, lines over the size of an attack, and local slopes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from dubito.apps.stability import Stability
from dubito.report.canvas import CYCLE, SOFT, Drawing, grid, line_style, picture
from dubito.report.content import Column, Figure, Picture, Section, Table
from dubito.tensors.checks import one_of, require

LINES = {
    "accuracy": "accuracy",
    "confidence": "confidence",
    "total": "uncertainty, nats",
    "epistemic": "epistemic uncertainty, nats",
    "noticed": "AUROC, attacked or not",
    "errors": "AUROC, wrong or right",
    "slope": "slope of the probabilities",
    "nll": "NLL",
    "ece": "ECE",
}


def table(reports: Mapping[str, Stability], size: float | None = None, *, title: str = "Stability") -> Table:
    """A row per method: accuracy on clean inputs and under attacks of a size (None: the largest), and local slopes."""
    first = checked(reports)
    at = first.levels[-1].size if size is None else size
    columns = (
        Column("method"),
        Column("accuracy", better="higher"),
        Column(
            "accuracy, attacked", better="higher", meaning=f"inputs moved by at most {at:g} in {first.norm}, to mislead the model"
        ),
        Column("confidence, attacked", meaning="mean probability of the most probable class; it should fall as accuracy does"),
        Column("noticed", better="higher", meaning="AUROC of the uncertainty at separating attacked from clean inputs"),
        Column("slope, median", better="lower", meaning="norm of the Jacobian of the class probabilities"),
        Column("slope, 99 %", better="lower"),
        Column("bound", better="lower", meaning="upper bound on the Lipschitz constant of the outputs"),
        Column("certified", better="higher", meaning="share that is right and that no such attack can change, by the bound"),
    )
    rows = []
    for label, one in reports.items():
        clean, level = one.levels[0], one.level(at)
        slopes = one.slopes.double()
        middle, high = (float(torch.quantile(slopes, q)) for q in (0.5, 0.99))
        bound = None if one.bound is None else one.bound.value
        attacked = (level.accuracy, level.confidence, level.noticed)
        rows.append((label, clean.accuracy, *attacked, middle, high, bound, level.certified))
    return Table(title, columns, tuple(rows), caption=f"Attacks by projected gradients, within {at:g} in the norm {first.norm}.")


def lines(reports: Mapping[str, Stability], what: str = "accuracy") -> Picture:
    """A quantity of `Level` over the size of the attack, a line per method; beside the accuracy, dashed, what is certified."""
    first = checked(reports)
    one_of(LINES, what=what)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (label, one) in enumerate(reports.items()):
            colour = CYCLE[i % len(CYCLE)]
            shown = [(level.size, getattr(level, what)) for level in one.levels if not math.isnan(getattr(level, what))]
            axes.plot([size for size, _ in shown], [value for _, value in shown], "o-", color=colour, label=label, markersize=4)
            if what == "accuracy":
                sure = [(level.size, level.certified) for level in one.levels if level.certified is not None]
                axes.plot([size for size, _ in sure], [value for _, value in sure], linestyle=(0, (3, 1.5)), color=colour)
        axes.set(title=LINES[what], xlabel=f"size of the attack, {first.norm}")
        grid(axes, "y")
        if len(reports) > 1:
            axes.legend()

    ends = {label: [getattr(one.levels[i], what) for i in (0, -1)] for label, one in reports.items()}
    told = ", ".join(f"{label} {low:.3g} to {high:.3g}" for label, (low, high) in ends.items())
    return picture(_draw, (4.2, 3.1), alt=f"{LINES[what]} from no attack to one of size {first.levels[-1].size:g}: {told}.")


def slopes(reports: Mapping[str, Stability]) -> Picture:
    """Share of inputs at which the prediction is steeper than a value, a line per method."""
    checked(reports)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (label, one) in enumerate(reports.items()):
            values = one.slopes.double().sort().values.cpu()
            share = 1 - torch.arange(len(values), dtype=torch.float64) / len(values)
            axes.step(values.clamp_min(1e-6), share, where="post", label=label, **line_style(i))
        axes.set(title="Local slopes", xlabel="norm of the Jacobian of the probabilities", ylabel="share that is steeper")
        axes.set_xscale("log")
        axes.axhline(0.5, color=SOFT, linewidth=0.5)
        grid(axes)
        axes.legend()

    told = ", ".join(f"{label} {float(one.slopes.double().median()):.3g}" for label, one in reports.items())
    return picture(_draw, (4.2, 3.1), alt=f"Local slopes of the predicted probabilities; medians: {told}.")


def section(reports: Mapping[str, Stability], *, title: str = "Stability") -> Section:
    """The table, lines of accuracy and uncertainty under attack, and slopes."""
    pictures = (*(lines(reports, what) for what in ("accuracy", "total", "noticed")), slopes(reports))
    caption = "Dashed: the share that is right and that no attack of this size can change, by the bound on the network."
    return Section(title, tables=(table(reports, title=title),), figures=(Figure("Under attack", pictures, caption=caption),))


def checked(reports: Mapping[str, Stability]) -> Stability:
    """The first, after a check that all have the same attacks."""
    require(reports, "reports is empty: give at least one stability report, by the name of its method")
    first = next(iter(reports.values()))
    sizes = [level.size for level in first.levels]
    for label, one in reports.items():
        same = one.norm == first.norm and [level.size for level in one.levels] == sizes
        require(same, f"{label!r} was attacked otherwise than the first: use the same norm and sizes for all")
    return first
