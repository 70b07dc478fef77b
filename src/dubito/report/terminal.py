"""A report on a terminal: its tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dubito.report.report import Report, Table


def show(report: Report, console: Console | None = None) -> None:
    """Print the tables; the best of a column is bold and green, or has a star where there are no colours (in a file, a pipe)."""
    console = console or Console()
    for table in report.tables:
        console.print(_rich(table, plain=not console.is_terminal))
        if table.caption:
            console.print(Text(table.caption, style="dim"))
        console.print()


def _rich(table: Table, *, plain: bool) -> RichTable:
    look = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False}
    shown = RichTable(title=Text(table.title), **look)
    words = [all(isinstance(row[j], str) for row in table.rows) for j in range(len(table.columns))]
    for column, word in zip(table.columns, words, strict=True):
        longest = max(map(len, column.name.split()), default=1)  # headers wrap between words only
        shown.add_column(Text(column.name), justify="left" if word else "right", no_wrap=word, min_width=longest)
    best = table.best
    for i in range(len(table.rows)):
        marks = ["bold green" if (i, j) in best else "" for j in range(len(table.columns))]
        stars = ["" if word or not plain else "*" if mark else " " for mark, word in zip(marks, words, strict=True)]
        cells = [Text(table.text(i, j) + stars[j], style=mark) for j, mark in enumerate(marks)]
        shown.add_row(*cells)
    return shown
