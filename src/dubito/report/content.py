"""The content of a report: sections with tables, figures and text to copy, and facts about the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dubito.tensors.checks import require

Value = str | float | None


@dataclass(frozen=True)
class Column:
    """A column of a table: `better` says whether higher or lower values are better, `meaning` how to read them."""

    name: str
    digits: int = field(default=3, kw_only=True)
    better: Literal["higher", "lower"] | None = field(default=None, kw_only=True)
    meaning: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers. Numbers that are not finite, such as an AUROC without errors, are shown as a dash.

    >>> table = Table("scores", (Column("method"), Column("NLL", better="lower")), (("a", 0.2), ("b", 0.1), ("c", math.nan)))
    >>> [[table.text(row, column) for column in range(2)] for row in range(3)]
    [['a', '0.200'], ['b', '0.100'], ['c', '–']]
    >>> table.best
    {(1, 1)}
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = field(default="", kw_only=True)
    errors: tuple[tuple[float | None, ...], ...] = field(default=(), kw_only=True)  # standard errors; None where there is none
    alike: frozenset[tuple[int, int]] = field(
        default=frozenset(), kw_only=True
    )  # (row, column): as good as the best, up to chance
    unmarked: frozenset[tuple[int, int]] = field(default=frozenset(), kw_only=True)  # (row, column): never the best of the column
    sortable: bool = field(default=False, kw_only=True)  # by a click on a header, with a box that filters the rows

    def __post_init__(self):
        widths = {len(row) for row in self.rows} - {len(self.columns)}
        require(not widths, f"table {self.title!r}: rows must have {len(self.columns)} values; got {sorted(widths)}")
        same = not self.errors or [len(row) for row in self.errors] == [len(row) for row in self.rows]
        require(same, f"table {self.title!r}: errors must have the shape of rows: give None where there is no standard error")

    def text(self, row: int, column: int) -> str:
        """A value as it is printed, with its standard error if it has one."""
        value = self.rows[row][column]
        if isinstance(value, str):
            return value
        if value is None or not math.isfinite(value):
            return "–"
        error = self.errors[row][column] if self.errors else None
        digits = self.columns[column].digits
        return f"{value:.{digits}f}" + ("" if error is None or not math.isfinite(error) else f" ± {error:.{digits}f}")

    @property
    def best(self) -> set[tuple[int, int]]:
        """(row, column) of the best value of each column, and of all values that round to the same number, but of no `unmarked` one."""
        marked = set()
        for j, column in enumerate(self.columns):
            numbers = {i: float(row[j]) for i, row in enumerate(self.rows) if isinstance(row[j], int | float)}  # pyright: ignore
            shown = {i: round(number, column.digits) for i, number in numbers.items() if math.isfinite(number)}
            allowed = {i: number for i, number in shown.items() if (i, j) not in self.unmarked}
            if column.better is None or len(shown) < 2 or not allowed:
                continue
            top = max(allowed.values()) if column.better == "higher" else min(allowed.values())
            marked |= {(i, j) for i, number in allowed.items() if number == top}
        return marked


@dataclass(frozen=True)
class Picture:
    """An image for a page: an `<svg>` element, or PNG bytes. `width` is its natural width in CSS pixels."""

    image: str | bytes = field(repr=False)
    alt: str
    width: int
    label: str = field(default="", kw_only=True)  # row of a sortable table: hidden when the row is


@dataclass(frozen=True)
class Figure:
    """Pictures with a caption, which says how to read them, and a legend of colours."""

    title: str
    pictures: tuple[Picture, ...]
    caption: str = field(default="", kw_only=True)
    legend: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)  # (colour, meaning)


@dataclass(frozen=True)
class Snippet:
    """Text to copy, such as a command; if `folded`, only its title is shown until it is clicked."""

    title: str
    text: str
    folded: bool = field(default=False, kw_only=True)
    label: str = field(default="", kw_only=True)  # as in `Picture`


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, and what follows it."""

    title: str
    text: str = ""
    tables: tuple[Table, ...] = field(default=(), kw_only=True)
    figures: tuple[Figure, ...] = field(default=(), kw_only=True)
    snippets: tuple[Snippet, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Content:
    """What a report says, without how it is shown.

    >>> report = Content("Scores", (Section("Digits", tables=(Table("t", (Column("method"),), (("MAP",),)),)),))
    >>> report.data["sections"][0]["tables"][0]["rows"]
    [{'method': 'MAP'}]
    """

    title: str
    sections: tuple[Section, ...]
    summary: str = field(default="", kw_only=True)
    facts: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def tables(self) -> Iterator[Table]:
        """The tables of all sections."""
        return (table for section in self.sections for table in section.tables)

    @property
    def data(self) -> dict[str, Any]:
        """Everything but the images, in plain types; numbers that are not finite are None."""
        return {
            "title": self.title,
            "summary": self.summary,
            "facts": dict(self.facts),
            "sections": [
                {
                    "title": section.title,
                    "text": section.text,
                    "tables": [_table(table) for table in section.tables],
                    "figures": [{"title": figure.title, "caption": figure.caption} for figure in section.figures],
                    **({"snippets": {s.title: s.text for s in section.snippets}} if section.snippets else {}),
                }
                for section in self.sections
            ],
        }

    def json(self) -> str:
        """The report without its images, as JSON."""
        return json.dumps(self.data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _table(table: Table) -> dict[str, Any]:
    names = [column.name for column in table.columns]

    def _named(rows: tuple[tuple[Value, ...], ...]) -> list[dict[str, Value]]:
        finite = [[None if isinstance(v, float) and not math.isfinite(v) else v for v in row] for row in rows]
        return [dict(zip(names, row, strict=True)) for row in finite]

    more: dict[str, Any] = {"standard_errors": _named(table.errors)} if table.errors else {}
    if table.alike:
        more["not_told_from_the_best"] = [[names[j] for k, j in sorted(table.alike) if k == i] for i in range(len(table.rows))]
    return {"title": table.title, "caption": table.caption, "rows": _named(table.rows), **more}


def join_words(words: Sequence[str]) -> str:
    """The words as an enumeration.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
