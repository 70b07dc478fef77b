"""Calibration: reliability diagrams, accuracy and risk against coverage, scores of errors, quantile levels, and PIT histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from dubito.evaluation import metrics
from dubito.evaluation.judge import Counts, Decision
from dubito.evaluation.metrics import QuantileCalibration, Reliability
from dubito.report.canvas import BLUE, INK, LINE, SOFT, VERMILION, Axes, Drawing, grid, line_style, picture
from dubito.report.content import Picture
from dubito.tensors.checks import require

FEW = 5  # predictions in a bin
LEAST = 0.05  # smallest coverage for which accuracy is shown: below it is mostly chance


class Bins(NamedTuple):
    """Predictions by their confidence, in the bins (a, b] of `metrics.ece`; all are [bins]."""

    edges: Tensor  # [bins + 1]
    number: Tensor  # of predictions
    confidence: Tensor  # mean in each bin; nan in an empty one
    accuracy: Tensor


def bins(probs: Tensor, y: Tensor, *, n: int = 15) -> Bins:
    r"""Sort predictions [N, C] into bins. The gaps weighted by the counts add up to the expected calibration error.

    >>> import torch
    >>> b = bins(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]), n=2)
    >>> b.number.tolist(), b.accuracy.tolist()
    ([0.0, 4.0], [nan, 0.75])
    """
    bins = _reliability(probs, y, n)
    return Bins(bins.edges, bins.count, bins.confidence, bins.accuracy)


def reliability(label: str, probs: Tensor, y: Tensor, *, n: int = 15) -> Picture:
    """Accuracy in every bin of confidence, with its 90 % interval, over the number of predictions in the bin."""
    return diagram(label, _reliability(probs, y, n))


def diagram(label: str, bins: Reliability) -> Picture:
    """A reliability diagram of given bins, from `metrics.reliability` or `judge`, of equal width or equal mass."""
    total, ece = int(bins.count.sum()), float(bins.ece)
    require(total, f"no predictions for the reliability diagram of {label}")
    some, edges = bins.count > 0, bins.edges
    parts = (edges[:-1], edges.diff(), bins.count, bins.confidence, bins.accuracy, bins.lower, bins.upper)
    left, widths, count, confidence, accuracy, low, high = (t[some].cpu().numpy() for t in parts)

    def _draw(figure: Drawing) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        top.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        for few in (True, False):
            some = (count < FEW) == few
            if not some.any():  # empty lines that are not clipped break the layout
                continue
            x, y, strength = confidence[some], accuracy[some], 0.3 if few else 1.0
            top.vlines(x, low[some], high[some], color=BLUE, linewidth=1.1, alpha=0.6 * strength)
            top.vlines(x, x, y, color=VERMILION, linewidth=3, alpha=strength)
            top.plot(x, y, "o", color=BLUE, markersize=5.5, markeredgewidth=0, alpha=strength, clip_on=False, zorder=5)
        top.set(xlim=(0, 1), ylim=(0, 1.0), ylabel="accuracy", title=f"{label} · ECE {ece:.3f}")
        grid(top)
        bottom.bar(left, count, widths, align="edge", color=BLUE, alpha=0.75, edgecolor="white", linewidth=0.6)
        bottom.set_yscale("log")
        top_tick = max(1, math.ceil(math.log10(count.max())))
        bottom.set(xlabel="confidence", ylabel="count", ylim=(0.7, 10**top_tick * 1.5))
        ticks = range(0, top_tick + 1, 1 + top_tick // 4)  # a label per decade, or fewer if there are many
        bottom.set_yticks([10**k for k in ticks], [f"{10**k}" if k < 6 else f"$10^{k}$" for k in ticks])
        bottom.minorticks_off()
        grid(bottom, "y")

    alt = f"Reliability diagram of {label}: expected calibration error {ece:.3f} on {total} predictions."
    return picture(_draw, (3.6, 3.7), alt=alt)


def _curves(
    title: str,
    curves: Mapping[str, tuple[Tensor, Tensor]],
    *,
    size: tuple[float, float] = (4.6, 3.3),
    alt: str,
    legend: Literal["lower left", "upper left"],
    behind: Callable[[Axes], object] = id,
    **settings: Any,
) -> Picture:
    """A line for every label. `behind` draws what lies behind them; `settings` are those of the axes."""

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        behind(axes)
        for i, (label, (x, y)) in enumerate(curves.items()):
            axes.plot(x.cpu(), y.cpu(), label=label, **line_style(i))
        axes.set(title=title, **settings)
        grid(axes)
        axes.legend(loc=legend, handlelength=2.6)

    return picture(_draw, size, alt=alt)


def coverage(title: str, scores: Mapping[str, tuple[Tensor, Tensor]]) -> Picture:
    """Accuracy on the most confident share of the inputs. `scores`: by label, (uncertainty [N], is wrong [N])."""
    risks = {label: metrics.risk_coverage(doubt, wrong.float()) for label, (doubt, wrong) in scores.items()}
    curves = {label: (share[share >= LEAST], 1 - risk[share >= LEAST]) for label, (share, risk) in risks.items()}
    floor = min(float(accuracy.min()) for _, accuracy in curves.values())
    # leave out the coverages at which every method is always right
    perfect = min(float(share[accuracy < 1].min()) if (accuracy < 1).any() else 1.0 for share, accuracy in curves.values())
    return _curves(
        title,
        curves,
        alt=f"{title}: accuracy against coverage for {', '.join(curves)}.",
        legend="lower left",
        xlim=(max(0.0, math.floor(10 * perfect) / 10 - 0.1), 1),
        ylim=(floor - 0.08 * (1 - floor) - 1e-3, 1 + 0.04 * (1 - floor) + 1e-3),
        xlabel="coverage: share of inputs answered",
        ylabel="accuracy on these",
    )


def _reliability(probs: Tensor, y: Tensor, n: int) -> Reliability:
    confidence, top = probs.max(-1)
    return Reliability.of(confidence, top == y, bins=n)


LEGEND = ((BLUE, "successes"), (VERMILION, "errors"))


def risk(title: str, decisions: Mapping[str, Decision], *, loss: str = "risk: share of errors among these") -> Picture:
    """Mean error on the most confident share of the inputs, by label, with the area under the curve."""
    require(decisions, f"no curves for the figure {title!r}")
    areas = {label: float(decision.values.get("aurc", decision.risk.mean())) for label, decision in decisions.items()}
    curves = {
        f"{label} · AURC {areas[label]:.3g}": (
            decision.coverage[decision.coverage >= LEAST],
            decision.risk[decision.coverage >= LEAST],
        )
        for label, decision in decisions.items()
    }
    top = 1.06 * max(float(risk.max()) for _, risk in curves.values()) or 1.0
    words = ", ".join(f"{label} {area:.3g}" for label, area in areas.items())
    alt = f"{title}: risk against coverage; area under the curve: {words}."
    axes = {"xlim": (0, 1), "ylim": (0, top), "xlabel": "coverage: share of inputs answered", "ylabel": loss}
    return _curves(title, curves, alt=alt, legend="upper left", **axes)


def scores(title: str, counts: Counts, *, xlabel: str = "score of uncertainty") -> Picture:
    """Histograms of a score for successes and for errors; each adds up to 100 %, since errors are few."""
    groups = [(100 * group.double() / max(1.0, float(group.sum()))).cpu().numpy() for group in (counts.right, counts.wrong)]
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


BAND = 0.95  # share of the points of calibrated predictives that lie inside the band


def quantiles(title: str, calibrations: Mapping[str, QuantileCalibration]) -> Picture:
    """Observed share of targets below each quantile against its nominal level, by label. Calibrated curves stay inside the band."""
    from scipy.stats import binom

    require(calibrations, f"no curves for the figure {title!r}")
    n = min(quantile.n for quantile in calibrations.values())  # the widest band
    levels = next(iter(calibrations.values())).levels.cpu().numpy()
    low, high = (binom.ppf(q, n, levels) / n for q in ((1 - BAND) / 2, (1 + BAND) / 2))

    def _band(axes: Axes) -> None:
        axes.fill_between(levels, low, high, color=LINE, linewidth=0, label=f"calibrated, {BAND:.0%}")
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))

    errors = {label: f"{float(quantile.error):.3f}" for label, quantile in calibrations.items()}
    curves = {f"{label} · {errors[label]}": (quantile.levels, quantile.observed) for label, quantile in calibrations.items()}
    words = ", ".join(f"{label} {error}" for label, error in errors.items())
    alt = f"{title}: observed share of targets below each quantile; average gap between nominal and observed levels: {words}."
    axes = {"xlim": (0, 1), "ylim": (0, 1), "xlabel": "nominal quantile level", "ylabel": "observed share of targets"}
    return _curves(title, curves, size=(3.8, 3.5), alt=alt, legend="upper left", behind=_band, **axes)


def pit(title: str, counts: Tensor) -> Picture:
    """A histogram of PIT values, given as counts in equal bins, with the band of calibrated predictives."""
    from scipy.stats import binom

    n, bins = int(counts.sum()), len(counts)
    require(n, f"no PIT values for the figure {title!r}")
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
