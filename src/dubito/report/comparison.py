"""Several methods side by side: a score against another quantity, and histograms of uncertainty."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.report.canvas import CYCLE, Drawing, grid, line_style, picture
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
            style, mark = line_style(i), MARKS[i // len(CYCLE) % len(MARKS)]
            name = textwrap.shorten(label, NAME, placeholder=" …")
            axes.plot(line.x, line.y, mark, markersize=4, label=name, **style)
            if line.error is not None and line.error.isfinite().all():
                low, high = line.y - line.error, line.y + line.error
                axes.fill_between(line.x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if ticks:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        grid(axes)
        figure.legend(loc="outside lower left", ncols=1 if len(drawn) <= FEW // 2 else 2, handlelength=2.6, fontsize=8.5)

    rows = (len(drawn) + 1) // 2 if len(drawn) > FEW // 2 else len(drawn)
    return picture(_draw, (4.6, 3.0 + 0.2 * rows), alt=f"{title}: {ylabel} against {xlabel} for {', '.join(drawn)}.")


def histograms(panels: Mapping[str, Mapping[str, Tensor]], *, xlabel: str, upper: float, n: int = 24) -> tuple[Picture, ...]:
    """Histograms of a measure of uncertainty from 0 to `upper`: title -> group -> values [N]. Each group adds up to 100 %."""
    edges = [upper * i / n for i in range(n + 1)]
    shares = {
        title: {
            name: 100 * torch.histogram(values.double().clamp(0, upper), bins=n, range=(0.0, upper)).hist / max(1, len(values))
            for name, values in groups.items()
        }
        for title, groups in panels.items()
    }
    top = 1.05 * max(float(share.max()) for groups in shares.values() for share in groups.values())  # one scale for all panels

    def _panel(title: str) -> Picture:
        def _draw(figure: Drawing) -> None:
            axes = figure.subplots()
            for i, share in enumerate(shares[title].values()):
                axes.stairs(share.numpy(), edges, fill=True, color=CYCLE[i % len(CYCLE)], alpha=0.35, linewidth=0)
                axes.stairs(share.numpy(), edges, color=CYCLE[i % len(CYCLE)], linewidth=1.5)
            axes.set(title=title, xlabel=xlabel, ylabel="share of the inputs in %", xlim=(0, upper), ylim=(0, top))
            grid(axes, "y")

        means = ", ".join(f"{name} {float(values.mean()):.2f}" for name, values in panels[title].items())
        return picture(_draw, (3.6, 2.8), alt=f"Histogram of {xlabel}, {title}; means: {means}.")

    return tuple(_panel(title) for title in panels)
