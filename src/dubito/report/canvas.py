"""Drawing with matplotlib: figures are made without pyplot, and the user's settings are neither used nor changed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dubito.report.content import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Drawing = Figure  # what a drawing function draws on
else:
    Drawing = Axes = Any  # matplotlib is loaded only when something is drawn

# Okabe & Ito (2008): distinguishable with any kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
STYLES = ((0, ()), (0, (6, 2)), (0, (2, 1.5)))  # solid, dashed, dotted
INK, SOFT, LINE = "#1c2430", "#5a6675", "#d9dfe6"

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a report looks the same everywhere
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "path",
    "svg.hashsalt": "dubito",  # the same numbers give the same file
    "figure.constrained_layout.use": True,
}


def picture(draw: Callable[[Figure], None], size: tuple[float, float], *, alt: str, kind: str = "svg") -> Picture:
    """Draw on a figure of this size (inches, 96 pixels each) by `draw`, and keep it as SVG, or as PNG where that is smaller.

    >>> p = picture(lambda figure: figure.subplots().plot([0, 1], [0, 1]) and None, (3, 2), alt="a line")
    >>> p.image[:4], p.width
    ('<svg', 288)
    """
    image = render(draw, size, kind=kind)
    width = round(96 * size[0])
    return Picture(image if kind == "png" else _clean(image.decode()), alt, width)


def render(draw: Callable[[Figure], None], size: tuple[float, float], *, kind: str, dpi: float = 192) -> bytes:
    """The file that matplotlib writes, "svg" or "png"."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=size)
        draw(figure)
        file = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=dpi, metadata=nothing)
    return file.getvalue()


def pixels(image: Tensor) -> np.ndarray:
    """An image as matplotlib takes it: grey [H, W] from [H, W] or [1, H, W], or colours [H, W, 3] from [3, H, W]."""
    image = image.detach().cpu()
    colours = image.ndim == 3 and len(image) == 3
    return (image.movedim(0, -1).clamp(0, 1) if colours else image.reshape(image.shape[-2:])).numpy()


def line_style(i: int) -> dict[str, Any]:
    """Colour and dashes of the i-th line of a figure: eighteen lines that differ, neighbours in both.

    >>> len({str(line_style(i)) for i in range(18)})
    18
    """
    return {"color": CYCLE[i % len(CYCLE)], "linestyle": STYLES[(i + i // len(CYCLE)) % len(STYLES)]}


def grid(axes: Axes, axis: str = "both") -> None:
    """Faint lines behind the data."""
    axes.grid(True, axis=axis, color=LINE, linewidth=0.6)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)


def _clean(svg: str) -> str:
    """The <svg> element alone, without a size, so that the page can scale it."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return re.sub(r'(<svg[^>]*?)\s(?:width|height)="[^"]*"([^>]*?)\s(?:width|height)="[^"]*"', r"\1\2", svg, count=1)
