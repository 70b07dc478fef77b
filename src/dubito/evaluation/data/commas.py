"""Commas in numbers: before the decimals, as in 1.234,5, or between thousands, as in 1,234.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dubito.evaluation.data.cells import is_missing

SIGNS = r"[+-]?\s*[$€£]?\s*"
DIGITS = re.compile(SIGNS + r"[\d.,]*\d[\d.,]*([eE][+-]?\d+)?\s*[%€$£]?")  # a number, whichever way it is written
DECIMAL = re.compile(SIGNS + r"(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?\s*[%€$£]?")  # one that may have a decimal comma
EITHER = re.compile(SIGNS + r"[1-9]\d{0,2},\d{3}\s*[%€$£]?")  # one whose comma may also stand between thousands

Columns = Mapping[str, Sequence[str]]


def decimal_commas(columns: Columns, *, likely: bool) -> dict[str, bool]:
    """Whether decimals stand after the comma, of every column that has commas in its numbers.

    Where all that a column holds may be read in both ways, as 1,234 may, other columns tell, or else what is `likely`. Cells that are
    no numbers do not count.

    >>> decimal_commas({"a": ["1,234", "5"], "b": ["0,5", "?", "many"], "c": ["1,234.5"], "d": ["Oslo"]}, likely=False)
    {'a': True, 'b': True, 'c': False}
    """
    known: dict[str, bool | None] = {}
    for name, cells in columns.items():
        commas = [cell for cell in cells if "," in cell and DIGITS.fullmatch(cell)]
        if not commas:
            continue
        if not all(DECIMAL.fullmatch(cell) for cell in cells if DIGITS.fullmatch(cell)):
            known[name] = False
        else:
            known[name] = None if all(EITHER.fullmatch(cell) for cell in commas) else True
    usual = True in known.values() or (likely and False not in known.values())
    return {name: usual if decimal is None else decimal for name, decimal in known.items()}


def with_points(cells: Sequence[str]) -> list[str]:
    """Numbers with decimal commas as numbers with decimal points, and other cells as they are.

    >>> with_points(["1.234,5", "7 %", "0.5", "many"])
    ['1234.5', '7 %', '0.5', 'many']
    """
    return [cell.replace(".", "").replace(",", ".") if _is_number(cell) else cell for cell in cells]


def _is_number(cell: str) -> bool:
    return not is_missing(cell) and DECIMAL.fullmatch(cell) is not None
