"""Decisions by a score of uncertainty: risk against coverage, and the score of successes and errors."""

from __future__ import annotations

from collections.abc import Mapping

from dubito.evaluation.judge import Counts, Decision
from dubito.report.calibration import LEAST
from dubito.report.canvas import BLUE, CYCLE, STYLES, VERMILION, Drawing, grid, picture
from dubito.report.content import Picture

LEGEND = ((BLUE, "successes"), (VERMILION, "errors"))


def risk(title: str, found: Mapping[str, Decision], *, loss: str = "risk: share of errors among these") -> Picture:
    """Mean error on the most confident share of the inputs, by label, with the area under the curve."""
    if not found:
        raise ValueError(f"no curves for the figure {title!r}")
    shown = {label: (one.coverage[one.coverage >= LEAST], one.risk[one.coverage >= LEAST]) for label, one in found.items()}
    top = 1.06 * max(float(risk.max()) for _, risk in shown.values()) or 1.0
    areas = {label: float(one.values.get("aurc", one.risk.mean())) for label, one in found.items()}

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (label, (share, risk)) in enumerate(shown.items()):
            style = STYLES[i % 3]
            axes.plot(share, risk, color=CYCLE[i % len(CYCLE)], linestyle=style, label=f"{label} · AURC {areas[label]:.3g}")
        axes.set(xlim=(0, 1), ylim=(0, top), title=title, xlabel="coverage: share of inputs answered", ylabel=loss)
        grid(axes)
        axes.legend(loc="upper left", handlelength=2.6)

    words = ", ".join(f"{label} {area:.3g}" for label, area in areas.items())
    return picture(_draw, (4.6, 3.3), alt=f"{title}: risk against coverage; area under the curve: {words}.")


def scores(title: str, counts: Counts, *, xlabel: str = "score of uncertainty") -> Picture:
    """Histograms of a score for successes and for errors; each adds up to 100 %, since errors are few."""
    groups = [(100 * one.double() / max(1.0, float(one.sum()))).cpu().numpy() for one in (counts.right, counts.wrong)]
    edges, number = counts.edges.cpu().numpy(), [int(counts.right.sum()), int(counts.wrong.sum())]

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for share, (colour, name), n in zip(groups, LEGEND, number, strict=True):
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.35, linewidth=0)
            axes.stairs(share, edges, color=colour, linewidth=1.5, label=f"{n:,} {name}")
        top = 1.25 * max(1.0, *(float(share.max()) for share in groups))
        axes.set(title=title, xlabel=xlabel, ylabel="share of the group in %", xlim=(edges[0], edges[-1]), ylim=(0, top))
        grid(axes, "y")
        axes.legend(loc="upper center", ncols=2, handlelength=1.4)

    return picture(_draw, (3.6, 2.8), alt=f"Histogram of {xlabel}, {title}: {number[0]} successes and {number[1]} errors.")
