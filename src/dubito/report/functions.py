"""Functions of one input: drawn from a prior or a posterior, and regression with bands of aleatoric and epistemic uncertainty."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.report.canvas import BLUE, CYCLE, INK, SOFT, Axes, Drawing, grid, picture, render
from dubito.report.content import Picture
from dubito.tensors.checks import require

EPISTEMIC, ALEATORIC = "#5b9bd0", "#f5c776"  # lighter than the lines' blue and orange, as areas should be
LEGEND = (
    (INK, "mean prediction"),
    (EPISTEMIC, "epistemic: ±2 standard deviations of the function"),
    (ALEATORIC, "plus aleatoric: ±2 standard deviations of an observation (total)"),
    ("#8a94a0", "dots: training data; dotted line: the truth"),
)


class Curve(NamedTuple):
    """A prediction at points of a line, with the training data and the truth."""

    x: Tensor  # [G]
    p: Predictive  # of G inputs with one output
    truth: Tensor  # [G]
    data: tuple[Tensor, Tensor]  # x [N], y [N]


def band(curve: Curve, *, title: str, ylim: tuple[float, float]) -> Picture:
    """One panel: the mean, and bands of the epistemic and the total uncertainty."""
    alt = f"{title}: mean and ±2 standard deviations, inner band epistemic, outer band with the noise."
    return picture(lambda figure: _panel(figure.subplots(), curve, title, ylim), (4.6, 3.0), alt=alt)


def poster(curves: Mapping[str, Mapping[str, Curve]], path: str | Path, *, ylim: tuple[float, float], width: int = 1200) -> Path:
    """All panels as one PNG: a row for every method, a column for every variant, and a legend that says what the bands are."""
    rows, names = list(curves), list(next(iter(curves.values())))
    size = (9.0, 0.75 + 2.35 * len(rows))

    def _draw(figure: Drawing) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        panels = figure.subplots(len(rows), len(names), sharex=True, sharey=True, squeeze=False)
        for i, row in enumerate(rows):
            for j, name in enumerate(names):
                _panel(panels[i][j], curves[row][name], f"{row}, {name}", ylim, labels=(i == len(rows) - 1, j == 0))
        handles = [
            Line2D([], [], color=INK, label="mean prediction"),
            Patch(color=EPISTEMIC, label="epistemic, ±2 sd"),
            Patch(color=ALEATORIC, label="plus aleatoric = total, ±2 sd"),
            Line2D([], [], color=SOFT, linestyle=":", label="truth"),
            Line2D([], [], color=INK, marker="o", markersize=3, linestyle="", label="data"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.6)

    from PIL import Image

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = Image.open(io.BytesIO(render(_draw, size, kind="png", dpi=width / size[0])))
    drawn.convert("RGB").quantize(64).save(path, optimize=True)  # few colours, so a third of the bytes
    return path


def _panel(axes: Axes, curve: Curve, title: str, ylim: tuple[float, float], *, labels: Sequence[bool] = (True, True)) -> None:
    mean, parts = curve.p.mean[:, 0], curve.p.uncertainty
    for variance, colour in ((parts.total, ALEATORIC), (parts.epistemic, EPISTEMIC)):
        half = 2 * variance[:, 0].sqrt()
        axes.fill_between(curve.x, mean - half, mean + half, color=colour, linewidth=0)
    axes.plot(curve.x, curve.truth, color=SOFT, linestyle=":", linewidth=1.3)
    axes.plot(curve.x, mean, color=INK, linewidth=1.6)
    axes.plot(*curve.data, "o", color=INK, markersize=2, markeredgewidth=0, alpha=0.7)
    axes.set(xlim=(float(curve.x[0]), float(curve.x[-1])), ylim=ylim, title=title)
    if labels[0]:
        axes.set_xlabel("x")
    if labels[1]:
        axes.set_ylabel("y")
    grid(axes)


def functions(x: Tensor, p: LatentMixture, *, title: str, count: int = 8, ylim: tuple[float, float] | None = None) -> Picture:
    """`count` of the functions in a sampled predictive of the inputs x [G] (first output), over ±2 standard deviations of all.

    >>> import dubito, torch
    >>> x, model = torch.linspace(-1, 1, 9), dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> functions(x, dubito.prior_predictive(model, x.unsqueeze(1)), title="lines").image[:4]
    '<svg'
    """
    fits = p.means.ndim == 3 and p.means.shape[1] == len(x)
    require(fits, f"p must be a predictive of the {len(x)} inputs x; its means have the shape {list(p.means.shape)}")
    drawn = p.means[..., 0].cpu()  # [S, G]
    mean, half = drawn.mean(0), 2 * drawn.std(0, correction=0)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        axes.fill_between(x.cpu(), mean - half, mean + half, color=EPISTEMIC, alpha=0.35, linewidth=0)
        for i, f in enumerate(drawn[:count]):
            axes.plot(x.cpu(), f, color=CYCLE[i % len(CYCLE)] if count > 1 else BLUE, linewidth=1.0)
        axes.plot(x.cpu(), mean, color=INK, linewidth=1.6)
        axes.set(xlim=(float(x[0]), float(x[-1])), title=title, xlabel="x", ylabel="f")
        if ylim is not None:
            axes.set_ylim(*ylim)
        grid(axes)

    shown = min(count, len(drawn))
    return picture(_draw, (4.6, 3.0), alt=f"{title}: {shown} functions, their mean and ±2 standard deviations.")
