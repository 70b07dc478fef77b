"""A column of cells as numbers, as seconds since 1970, or as text, whichever way people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from dubito.evaluation.data.cells import class_name, is_missing

if TYPE_CHECKING:
    from typing_extensions import TypeIs

ENOUGH = 0.9  # share of the cells that must be readable as numbers or dates
FORMATS = (
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%Y/%m/%d",
    "%d-%m-%Y",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%d-%b-%Y",
)
TIMES = ("", " %H:%M", " %H:%M:%S")
GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # a comma between thousands
MARKS = re.compile(r"[\s$€£¥ ]|^'")
DURATION = re.compile(r"(?:(-?\d+) days?,?)?\s*(?:[+]?(\d+):(\d\d):(\d\d(?:\.\d+)?))?")  # as Python and pandas write timedeltas
DATE = re.compile(r"\d{1,4}[-/. ][\w]{1,9}[-/., ]+\d{1,4}|[A-Za-z]{3,9} \d{1,2}, \d{4}")  # what a date begins with

Raw = np.ndarray | Sequence[str]  # a column: numbers with NaN where they are missing, or cells of text


def is_numeric(raw: Raw) -> TypeIs[np.ndarray]:
    """Whether a column holds numbers rather than cells of text."""
    return isinstance(raw, np.ndarray)


def numbers(raw: Raw) -> np.ndarray:
    """A column as numbers, [N] float64; NaN where a cell is missing or is not one. 12 %, $1,200 and 1 200 are numbers.

    Durations are numbers of seconds.

    >>> numbers(["12 %", "1,200", "$3.50", "?", "many", "1 day, 0:30:00"])
    array([1.20e-01, 1.20e+03, 3.50e+00,      nan,      nan, 8.82e+04])
    """
    if is_numeric(raw):
        values = raw.astype(np.float64)
    else:
        try:
            values = np.array([cell or "nan" for cell in raw], dtype=np.float64)
        except ValueError:
            values = np.array([_number(cell) for cell in raw], dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isfinite(values.astype(np.float32)), values, math.nan)


def _number(cell: str) -> float:
    if is_missing(cell):
        return math.nan
    plain = GROUPED.sub("", MARKS.sub("", cell))
    try:
        return float(plain[:-1]) / 100 if plain.endswith("%") else float(plain)
    except ValueError:
        return _duration(cell)


def _duration(cell: str) -> float:
    """Seconds; NaN for what is no duration."""
    match = DURATION.fullmatch(cell)
    if match is None or not any(match.groups()):
        return math.nan
    days, hours, minutes, rest = (float(group or 0) for group in match.groups())
    return 86400 * days + 3600 * hours + 60 * minutes + rest


def missing(raw: Raw) -> np.ndarray:
    """Which cells are missing, [N]."""
    if is_numeric(raw):
        return ~np.isfinite(raw.astype(np.float64))
    return np.array([is_missing(cell) for cell in raw], dtype=bool)


def mostly(values: np.ndarray, gone: np.ndarray) -> bool:
    """Whether enough of the cells that are there could be read."""
    there = int((~gone).sum())
    return there > 0 and int(np.isfinite(values).sum()) >= ENOUGH * there


def date_format(raw: Raw) -> str | None:
    """How the dates of a column are written, "iso" or a format of `strptime`; None if these are not dates.

    >>> date_format(["2024-05-01", "", "2023-12-31 10:30"]), date_format(["13/1/2024", "2/3/2024"]), date_format(["x", "y"])
    ('iso', '%d/%m/%Y', None)
    """
    if is_numeric(raw):
        return None
    there = [cell for cell in raw if not is_missing(cell)]
    if not there or not all(DATE.match(cell) for cell in there[:20]):
        return None
    formats = ["iso", *(day + time for time in TIMES for day in FORMATS)]
    return next((form for form in formats if all(math.isfinite(_seconds(cell, form)) for cell in there[:1000])), None)


def seconds(raw: Raw, form: str) -> np.ndarray:
    """Dates as seconds since 1970, [N] float64; NaN where a cell is missing or is not written in this way."""
    if is_numeric(raw):
        return np.full(len(raw), math.nan)
    return np.array([_seconds(cell, form) for cell in raw], dtype=np.float64)


def _seconds(cell: str, form: str) -> float:
    try:
        found = datetime.fromisoformat(cell) if form == "iso" else datetime.strptime(cell, form)
    except ValueError:
        return math.nan
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def words(raw: Raw) -> list[str]:
    """A column as text, in small letters; "" where a cell is missing. 1, 1.0 and 01 are one word.

    >>> words(["Rome", "rome", "1.0", "NA"])
    ['rome', 'rome', '1', '']
    """
    cells = [str(cell) for cell in raw.tolist()] if is_numeric(raw) else raw
    return ["" if is_missing(cell) else class_name(cell).casefold() for cell in cells]
