"""Pictures of a sampler's chains: traces, histograms of R-hat, energies, and the log score as draws are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.report.canvas import BLUE, CYCLE, INK, ORANGE, SOFT, VERMILION, Drawing, grid, picture
from dubito.report.content import Picture

POINTS = 500  # points of a line, at most
MANY = 8  # largest number of chains that get a colour each


def trace(values: Tensor, *, title: str = "", label: str = "") -> Picture:
    """The draws of one quantity [chains, n] in their order, and a histogram of their values."""
    values = values.detach().double().cpu()
    n = values.shape[1]
    at = np.unique(np.linspace(0, n - 1, min(n, POINTS)).round().astype(int))
    colours = chain_colours(len(values))
    finite = values[values.isfinite()]
    edges = np.histogram_bin_edges(finite.numpy(), bins=16) if len(finite) else None

    def _draw(figure: Drawing) -> None:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
        for chain, colour in zip(values, colours, strict=True):
            line = {"color": colour, "linewidth": 0.8, "alpha": 0.8}
            left.plot(at + 1, chain[at], rasterized=True, **line)
            if edges is not None:
                height, _ = np.histogram(chain[chain.isfinite()].numpy(), edges)
                right.stairs(height, edges, orientation="horizontal", color=colour, linewidth=1.1)
        left.set(title=title, xlabel="draw", ylabel=label, xlim=(1, max(2, n)))
        right.set(xticks=[])
        right.spines["bottom"].set_visible(False)
        right.tick_params(left=False)
        grid(left, "y")

    means = ", ".join(f"{float(mean):.4g}" for mean in values.mean(1)[:MANY])
    return picture(_draw, (4.6, 2.1), alt=f"{title or label}: trace of {len(values)} chains of {n} draws; means {means}.")


def chain_colours(chains: int) -> tuple[str, ...]:
    """A colour for each chain, or one for all if there are too many."""
    return tuple(CYCLE[i % len(CYCLE)] for i in range(chains)) if chains <= MANY else (BLUE,) * chains


def rhats(values: Tensor, *, title: str, good: float) -> Picture:
    """A histogram of R-hat, with counts on a logarithmic scale, so that a single bad one is visible."""
    known = values[~values.isnan()].double().cpu()
    finite = known[known.isfinite()]
    low = min(0.999, float(finite.min())) if len(finite) else 0.999
    high = max(1.02, float(finite.max())) if len(finite) else 1.02
    high = 2 * high if len(finite) < len(known) else high
    wide = high > 1.5
    # bins of equal width, one of whose edges is the limit of good values
    step = math.log(high / low) / 40 if wide else (high - low) / 40
    way = [math.log(end / good) if wide else end - good for end in (low, high)]
    at = step * np.arange(math.floor(way[0] / step), math.floor(way[1] / step) + 2)
    edges = good * np.exp(at) if wide else good + at
    count, _ = np.histogram(known.clamp(max=high).numpy(), edges)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        fine = 0.5 * (edges[1:] + edges[:-1]) <= good
        for part, colour in ((fine, BLUE), (~fine, VERMILION)):
            axes.bar(
                edges[:-1][part], count[part], np.diff(edges)[part], align="edge", color=colour, edgecolor="white", linewidth=0.4
            )
        axes.axvline(good, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        if count.any():
            axes.set_yscale("log")
        if wide:
            axes.set_xscale("log")
            ticks = [t for t in (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000, 10000) if low <= t <= high]
            axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axes.minorticks_off()
        top = max(1, math.ceil(math.log10(max(1, count.max()) * 1.2)))
        ticks = [10**k for k in range(top + 1)]
        axes.set_yticks(ticks, [f"{t:,}" for t in ticks])
        axes.yaxis.set_minor_locator(_no_ticks())
        axes.set(title=title, xlabel="R-hat", ylabel="number", ylim=(0.7, 10**top), xlim=(edges[0], edges[-1]))
        grid(axes, "y")

    share = float((known <= good).double().mean()) if len(known) else math.nan
    worst = float(known.max()) if len(known) else math.nan
    alt = f"Histogram of R-hat, {title}: {100 * share:.0f} % of {len(known)} are at most {good}, the largest is {worst:.3g}."
    return picture(_draw, (4.6, 2.8), alt=alt)


def energies(energy: Tensor) -> Picture:
    """The energies [chains, n] around their mean, and their changes from draw to draw: equally wide if the chain mixes well."""
    energy = energy.detach().double().cpu()
    around = (energy - energy.mean(1, keepdim=True)).flatten()
    change = energy.diff(dim=1).flatten()
    parts = [(around[around.isfinite()], BLUE, "energies"), (change[change.isfinite()], ORANGE, "changes from draw to draw")]
    half = max([float(part.abs().quantile(0.999)) for part, _, _ in parts if len(part)] or [1.0]) or 1.0
    edges = np.linspace(-half, half, 41)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for part, colour, name in parts:
            height, _ = np.histogram(part.clamp(-half, half).numpy(), edges, density=len(part) > 0)
            axes.stairs(height, edges, fill=True, color=colour, alpha=0.3, linewidth=0)
            axes.stairs(height, edges, color=colour, linewidth=1.5, label=name)
        axes.set(xlabel="energy, less the mean of its chain", ylabel="density", yticks=[], xlim=(-half, half))
        axes.legend(loc="upper left", fontsize=8.5)
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])

    widths = ", ".join(f"{name} {float(part.std()):.3g}" for part, _, name in parts if len(part) > 1)
    return picture(_draw, (4.6, 2.8), alt=f"Distributions of energy; standard deviations: {widths}.")


def running_scores(together: Tensor, each: Sequence[Tensor], *, label: str) -> Picture:
    """The log score of the first k draws of all chains together [n], and of each chain alone."""
    n = len(together)
    at = np.unique(np.geomspace(1, n, min(n, POINTS)).round().astype(int)) - 1
    colours = chain_colours(len(each))

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        if len(each) > 1:
            for line, colour in zip(each, colours, strict=True):
                axes.plot(at + 1, line.cpu()[at], color=colour, linewidth=0.9, alpha=0.75)
        axes.plot(at + 1, together.cpu()[at], color=INK, linewidth=2)
        axes.set(xlabel="draws of each chain", ylabel=label)
        # the first draws would compress the scale
        lines = torch.stack([together, *each]).cpu()[:, n // 10 :]
        low, high = float(lines.min()), float(lines.max())
        margin = 0.08 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(1, max(2, n))
        if n > 20:
            axes.set_xscale("log")
            ticks = [t * 10**k for k in range(6) for t in (1, 2, 5) if t * 10**k <= n]
            axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
            axes.minorticks_off()
        grid(axes)

    return picture(
        _draw, (4.6, 2.8), alt=f"Log score against the number of draws: {float(together[0]):.4g} to {float(together[-1]):.4g}."
    )


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
