"""Drawing with matplotlib, without a trace: its figures are made by hand, and the user's settings are neither used nor changed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dubito.report.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito (2008): told apart by readers with any kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
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
    """Have `draw` draw on a figure of that size (inches, shown as 96 pixels each) and keep it as SVG, or PNG where that is lighter.

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


def grid(axes: Axes, axis: str = "both") -> None:
    """Faint lines behind the data."""
    axes.grid(True, axis=axis, color=LINE, linewidth=0.6)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)


def _clean(svg: str) -> str:
    """The <svg> element alone, sized by the page it is in."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return re.sub(r'(<svg[^>]*?)\s(?:width|height)="[^"]*"([^>]*?)\s(?:width|height)="[^"]*"', r"\1\2", svg, count=1)
