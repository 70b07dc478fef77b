"""The tables of a report on a terminal."""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dubito.report.content import Content, Table


def show(report: Content, console: Console | None = None) -> None:
    """Print the tables. The best value of a column is bold and green, or has a star where there are no colours (in a file or pipe).

    A value that does not differ significantly from the best is green but not bold, or has a tilde.
    """
    console = console or Console()
    for table in report.tables:
        for part in _fitting(table, console.width):
            console.print(_rich(table, part, plain=not console.is_terminal))
        if table.caption:
            console.print(Text(table.caption, style="dim"))
        console.print()


def _fitting(table: Table, width: int) -> list[tuple[int, ...]]:
    """The columns, in several parts that each begin with the first column if the numbers do not fit; text is wrapped instead."""
    if len(table.columns) < 3 or any(_words(table, j) for j in range(1, len(table.columns))):
        return [tuple(range(len(table.columns)))]

    def _size(j: int) -> int:  # three spaces between columns, and a mark
        return 4 + _width(table, j)

    parts, room = [[0]], width - _size(0)
    for j in range(1, len(table.columns)):
        if _size(j) > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - _size(0)
        parts[-1].append(j)
        room -= _size(j)
    return [tuple(part) for part in parts]


def _words(table: Table, j: int) -> bool:
    return all(isinstance(row[j], str) for row in table.rows)


def _width(table: Table, j: int) -> int:
    """The length of the longest value, or of the longest word of the header, which is wrapped."""
    return max([1, *map(len, table.columns[j].name.split()), *(len(table.text(i, j)) for i in range(len(table.rows)))])


def _rich(table: Table, columns: tuple[int, ...], *, plain: bool) -> RichTable:
    look = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "pad_edge": False}
    shown = RichTable(title=Text(table.title) if columns[-1] == len(columns) - 1 else None, **look)
    words = [_words(table, j) for j in columns]
    for j, word in zip(columns, words, strict=True):
        # numbers and names are never cut; headers are wrapped here, since rich does not wrap them in such a column
        long = word and j > 0 and j == max(columns)
        header = textwrap.fill(table.columns[j].name, _width(table, j), break_long_words=False)
        shown.add_column(Text(header), justify="left" if word else "right", no_wrap=not long, overflow="fold")
    best = table.best
    for i in range(len(table.rows)):
        places = [(i, j) for j in columns]
        marks = ["bold green" if place in best else "green" if place in table.alike else "" for place in places]
        signs = {"bold green": "*", "green": "~", "": " "}
        stars = ["" if word or not plain else signs[mark] for mark, word in zip(marks, words, strict=True)]
        cells = [Text(table.text(i, j) + star, style=mark) for (_, j), star, mark in zip(places, stars, marks, strict=True)]
        shown.add_row(*cells)
    return shown
