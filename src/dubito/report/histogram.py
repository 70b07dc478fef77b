"""Histograms of uncertainty, of two or more groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dubito.report.canvas import CYCLE, Drawing, grid, picture
from dubito.report.content import Picture


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
    top = 1.05 * max(
        float(share.max()) for groups in shares.values() for share in groups.values()
    )  # the same scale for all panels

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
