"""Functions of one input, drawn from a prior or a posterior."""

from __future__ import annotations

from torch import Tensor

from dubito.posteriors.predictive import LatentMixture
from dubito.report.canvas import BLUE, CYCLE, INK, Drawing, grid, picture
from dubito.report.content import Picture
from dubito.report.regression import EPISTEMIC


def functions(x: Tensor, p: LatentMixture, *, title: str, count: int = 8, ylim: tuple[float, float] | None = None) -> Picture:
    """`count` of the functions in a sampled predictive of the inputs x [G] (first output), over ±2 standard deviations of all.

    >>> import dubito, torch
    >>> x, model = torch.linspace(-1, 1, 9), dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> functions(x, dubito.prior_predictive(model, x.unsqueeze(1)), title="lines").image[:4]
    '<svg'
    """
    if p.means.ndim != 3 or p.means.shape[1] != len(x):
        raise ValueError(f"p must be a predictive of the {len(x)} inputs x; its means have the shape {list(p.means.shape)}")
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
