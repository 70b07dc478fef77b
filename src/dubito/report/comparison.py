"""A score of several methods against another quantity, with standard errors over seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from dubito.report.canvas import CYCLE, STYLES, Drawing, grid, picture
from dubito.report.content import Picture

MARKS = "osD^v"
FEW = 4  # names that fit below a panel in one column
NAME = 34  # letters of a name in a legend


class Line(NamedTuple):
    """Points of a line, each [n], and the standard error of each where there is one."""

    x: Tensor
    y: Tensor
    error: Tensor | None = None


def lines(title: str, drawn: Mapping[str, Line], *, xlabel: str, ylabel: str, ticks: tuple[float, ...] = ()) -> Picture:
    """A line for every method, with its own colour, dashes and marker, in a band of one standard error.

    >>> import torch
    >>> lines("Shift", {"MAP": Line(torch.tensor([1.0, 5.0]), torch.tensor([0.9, 0.5]))}, xlabel="severity", ylabel="accuracy").width
    442
    """

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (label, line) in enumerate(drawn.items()):
            colour, round_ = CYCLE[i % len(CYCLE)], i // len(CYCLE)
            style, mark = STYLES[(i + round_) % len(STYLES)], MARKS[round_ % len(MARKS)]
            name = textwrap.shorten(label, NAME, placeholder=" …")
            axes.plot(line.x, line.y, mark, color=colour, linestyle=style, markersize=4, label=name)
            if line.error is not None and line.error.isfinite().all():
                low, high = line.y - line.error, line.y + line.error
                axes.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if ticks:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        grid(axes)
        figure.legend(loc="outside lower left", ncols=1 if len(drawn) <= FEW // 2 else 2, handlelength=2.6, fontsize=8.5)

    rows = (len(drawn) + 1) // 2 if len(drawn) > FEW // 2 else len(drawn)
    return picture(_draw, (4.6, 3.0 + 0.2 * rows), alt=f"{title}: {ylabel} against {xlabel} for {', '.join(drawn)}.")
