"""Tables of text: the one renderer behind everything that the library prints.

A `TextTable` holds strings. `str` aligns its columns with spaces; `rich` draws the same rows on a terminal.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class TextTable:
    """Rows of cells, with an optional title and header.

    `right` lists the columns that are aligned to the right, `styles` gives rich styles by column, and `overflow` says what a
    terminal does with cells that are too long: "fold" wraps them, "ellipsis" never wraps and cuts them.

    >>> print(TextTable([("nll", "0.25", "lower is better"), ("accuracy", "0.9", "")], title="100 examples", right=[1]))
    100 examples
      nll       0.25  lower is better
      accuracy   0.9
    """

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    title: str = field(default="", kw_only=True)
    right: Collection[int] = field(default=(), kw_only=True)
    styles: Mapping[int, str] = field(default_factory=dict, kw_only=True)
    overflow: Literal["fold", "ellipsis"] = field(default="fold", kw_only=True)

    def lines(self) -> list[str]:
        """The header and the rows, indented by two spaces, columns two spaces apart, without the title."""
        rows = [self.header, *self.rows] if self.header else self.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = ([self._pad(cell, j, width) for j, (cell, width) in enumerate(zip(row, widths, strict=True))] for row in rows)
        return [f"  {'  '.join(row)}".rstrip() for row in cells]

    def _pad(self, cell: str, column: int, width: int) -> str:
        return cell.rjust(width) if column in self.right else cell.ljust(width)

    def __str__(self) -> str:
        return "\n".join([self.title, *self.lines()] if self.title else self.lines())

    def __rich__(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        title = Text(self.title) if self.title else None
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for j, name in enumerate(self.header):
            justify = "right" if j in self.right else "left"
            wrap = self.overflow == "fold"
            table.add_column(Text(name), justify=justify, style=self.styles.get(j), overflow=self.overflow, no_wrap=not wrap)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def rich_text(renderable: RenderableType, *, width: int = 110) -> str:
    """What rich prints of an object on a terminal of `width` columns without colors, trailing spaces removed."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def number(value: float, error: float | None = None) -> str:
    r"""A number with four significant digits, and its standard error, if it has one, to two of them.

    >>> number(0.87423, 0.01111), number(12345.6), number(0.5, math.nan)
    ('0.8742 ± 0.011', '1.235e+04', '0.5')
    """
    return f"{value:.4g}" if error is None or not math.isfinite(error) else f"{value:.4g} ± {error:.2g}"
