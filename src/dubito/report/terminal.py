"""A report on a terminal: its tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dubito.report.report import Report, Table


def show(report: Report, console: Console | None = None) -> None:
    """Print the tables; the best of a column is bold and green, or has a star where there are no colours (in a file, a pipe).

    What is not told apart from the best is green but not bold, or has a tilde.
    """
    console = console or Console()
    for table in report.tables:
        for part in _fitting(table, console.width):
            console.print(_rich(table, part, plain=not console.is_terminal))
        if table.caption:
            console.print(Text(table.caption, style="dim"))
        console.print()


def _fitting(table: Table, width: int) -> list[tuple[int, ...]]:
    """The columns; where they do not fit side by side and hold means and errors, in parts that each begin with the first."""
    if not table.errors or len(table.columns) < 3:
        return [tuple(range(len(table.columns)))]

    def size(j: int) -> int:  # three spaces between columns, and a mark
        longest = max(map(len, table.columns[j].name.split()), default=1)
        return 4 + max([longest, *(len(table.text(i, j)) for i in range(len(table.rows)))])

    parts, room = [[0]], width - size(0)
    for j in range(1, len(table.columns)):
        if size(j) > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - size(0)
        parts[-1].append(j)
        room -= size(j)
    return [tuple(part) for part in parts]


def _rich(table: Table, columns: tuple[int, ...], *, plain: bool) -> RichTable:
    look = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False}
    shown = RichTable(title=Text(table.title) if columns[-1] == len(columns) - 1 else None, **look)
    words = [all(isinstance(row[j], str) for row in table.rows) for j in columns]
    for j, word in zip(columns, words, strict=True):
        longest = max(map(len, table.columns[j].name.split()), default=1)  # headers wrap between words only
        kind = {"justify": "left" if word else "right", "no_wrap": word or bool(table.errors)}
        shown.add_column(Text(table.columns[j].name), min_width=longest, **kind)
    best = table.best
    for i in range(len(table.rows)):
        places = [(i, j) for j in columns]
        marks = ["bold green" if place in best else "green" if place in table.alike else "" for place in places]
        signs = {"bold green": "*", "green": "~", "": " "}
        stars = ["" if word or not plain else signs[mark] for mark, word in zip(marks, words, strict=True)]
        cells = [Text(table.text(i, j) + star, style=mark) for (_, j), star, mark in zip(places, stars, marks, strict=True)]
        shown.add_row(*cells)
    return shown
