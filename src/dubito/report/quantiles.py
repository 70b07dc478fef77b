"""Calibration of a regression: observed against nominal quantile levels, and PIT histograms."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dubito.evaluation.metrics import QuantileCalibration
from dubito.report.canvas import BLUE, CYCLE, INK, LINE, SOFT, Drawing, grid, picture
from dubito.report.content import Picture

BAND = 0.95  # share of the points of calibrated predictives that lie inside the band


def quantiles(title: str, found: Mapping[str, QuantileCalibration]) -> Picture:
    """Observed share of targets below each quantile against its nominal level, by label. Calibrated curves stay inside the band."""
    from scipy.stats import binom

    if not found:
        raise ValueError(f"no curves for the figure {title!r}")
    n = min(one.n for one in found.values())  # the widest band
    levels = next(iter(found.values())).levels.cpu().numpy()
    low, high = (binom.ppf(q, n, levels) / n for q in ((1 - BAND) / 2, (1 + BAND) / 2))

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        axes.fill_between(levels, low, high, color=LINE, linewidth=0, label=f"calibrated, {BAND:.0%}")
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        for i, (label, one) in enumerate(found.items()):
            axes.plot(
                one.levels.cpu(), one.observed.cpu(), color=CYCLE[i % len(CYCLE)], label=f"{label} · {float(one.error):.3f}"
            )
        axes.set(xlim=(0, 1), ylim=(0, 1), title=title, xlabel="nominal quantile level", ylabel="observed share of targets")
        grid(axes)
        axes.legend(loc="upper left", handlelength=1.8)

    errors = ", ".join(f"{label} {float(one.error):.3f}" for label, one in found.items())
    return picture(
        _draw,
        (3.8, 3.5),
        alt=f"{title}: observed share of targets below each quantile; average gap between nominal and observed levels: {errors}.",
    )


def pit(title: str, counts: Tensor) -> Picture:
    """A histogram of PIT values, given as counts in equal bins, with the band of calibrated predictives."""
    from scipy.stats import binom

    n, bins = int(counts.sum()), len(counts)
    if not n:
        raise ValueError(f"no PIT values for the figure {title!r}")
    density = (counts.double() * bins / n).cpu().numpy()
    low, high = (float(binom.ppf(q, n, 1 / bins)) * bins / n for q in ((1 - BAND) / 2, (1 + BAND) / 2))
    edges = [i / bins for i in range(bins + 1)]

    def _draw(figure: Drawing) -> None:
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
    return picture(_draw, (3.6, 2.8), alt=alt)
