"""Whether a regression's distributions hold what they promise: calibration of quantiles, and PIT histograms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dubito.evaluation.metrics import QuantileCalibration
from dubito.report.canvas import BLUE, CYCLE, INK, LINE, SOFT, grid, picture
from dubito.report.report import Picture

BAND = 0.95  # of histograms and curves of calibrated predictives, this share lies inside the band, point by point


def quantiles(title: str, found: Mapping[str, QuantileCalibration]) -> Picture:
    """The share of targets below every quantile against its level, by label; the band is what chance does to calibrated ones."""
    from scipy.stats import binom

    if not found:
        raise ValueError(f"the figure {title!r} has no curve to show")
    n = min(one.n for one in found.values())  # the widest band
    levels = next(iter(found.values())).levels.cpu().numpy()
    low, high = (binom.ppf(q, n, levels) / n for q in ((1 - BAND) / 2, (1 + BAND) / 2))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.fill_between(levels, low, high, color=LINE, linewidth=0, label=f"calibrated, {BAND:.0%}")
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        for i, (label, one) in enumerate(found.items()):
            axes.plot(
                one.levels.cpu(), one.observed.cpu(), color=CYCLE[i % len(CYCLE)], label=f"{label} · {float(one.error):.3f}"
            )
        axes.set(xlim=(0, 1), ylim=(0, 1), title=title, xlabel="level of the quantile", ylabel="share of targets below it")
        grid(axes)
        axes.legend(loc="upper left", handlelength=1.8)

    errors = ", ".join(f"{label} {float(one.error):.3f}" for label, one in found.items())
    return picture(
        draw, (3.8, 3.5), alt=f"{title}: observed share of targets below each quantile; mean distance from the level: {errors}."
    )


def pit(title: str, counts: Tensor) -> Picture:
    """A histogram of PIT values, given as counts in equal bins, with the band in which those of calibrated predictives lie."""
    from scipy.stats import binom

    n, bins = int(counts.sum()), len(counts)
    if not n:
        raise ValueError(f"the figure {title!r} has no PIT values to show")
    density = (counts.double() * bins / n).cpu().numpy()
    low, high = (float(binom.ppf(q, n, 1 / bins)) * bins / n for q in ((1 - BAND) / 2, (1 + BAND) / 2))
    edges = [i / bins for i in range(bins + 1)]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.stairs(density, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0)
        axes.axhspan(low, high, color=INK, alpha=0.12, linewidth=0)
        axes.axhline(1.0, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        axes.stairs(density, edges, color=BLUE, linewidth=1.5)
        axes.set(title=title, xlabel="PIT: predicted probability of less than the target", ylabel="density")
        axes.set(xlim=(0, 1), ylim=(0, 1.12 * max(float(density.max()), high)))
        grid(axes, "y")

    outside = int(((density < low) | (density > high)).sum())
    alt = f"PIT histogram of {title}: {outside} of {bins} bins lie outside the {BAND:.0%} band of calibrated predictives, {n} values."
    return picture(draw, (3.6, 2.8), alt=alt)
