"""Cells of a table as numbers and as classes, and what is wrong with them in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from dubito.tensors.checks import require, suggestion

MISSING = ("", "nan", "na", "n/a", "null", "none", "?")


def is_missing(cell: str) -> bool:
    """Whether a cell stands for a missing value: empty, NaN, NA, null, none or a question mark."""
    return cell.lower() in MISSING


def number(cell: str) -> float:
    """The cell as a number; NaN for what is not one."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def spreadsheet_cell(text: str) -> str:
    """The text as a cell of a CSV file that a person may open in a spreadsheet: an apostrophe keeps it from being taken for a formula.

    >>> spreadsheet_cell("=A1+1"), spreadsheet_cell("-1.5"), spreadsheet_cell("cat")
    ("'=A1+1", '-1.5', 'cat')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) and math.isnan(number(text)) else text


def usable(values: np.ndarray) -> np.ndarray:
    """Which are finite, and stay so as float32: what is larger is refused in every dtype, since its square is to be a number too."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(values.astype(np.float32))


def refuse_number(place: str, cell: str) -> NoReturn:
    """Raise a ValueError that says why a cell is not a usable number."""
    require(cell, f"{place}: the cell is empty")
    require(not is_missing(cell), f"{place}: {cell} stands for a missing value; fill it in or leave the row out")
    require(not math.isnan(number(cell)), f"{place}: {cell!r} is not a number")
    raise ValueError(f"{place}: {cell} is too large or infinite")


def require_name(path: object, name: str, there: Collection[str], what: str) -> None:
    """Raise a ValueError if no column or array has that name; it suggests the nearest one."""
    if name not in there:  # not `require`: the suggestion takes a while where there are many columns
        raise ValueError(f"{path}: no {what} is called {name!r}; {suggestion(name, there)}")


def listed(names: Sequence[str]) -> str:
    """The names, separated by commas, and how many more there are than 20."""
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def class_name(label: str) -> str:
    """The class that a label names: 1, 1.0 and 01 are one class; 1e2 and 1_2 are names. Not by way of a float, which has 16 digits."""
    whole = re.fullmatch(r"([+-]?\d+)(\.0*)?", label, re.ASCII)
    return str(int(whole[1])) if whole else label


def encode(
    place: str, labels: list[str], where: Callable[[int], str], known: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """The labels as positions [N] in the class names: `known`, or else those that occur, numbers first."""
    for row, label in enumerate(labels):
        if error := _label_error(label, known or ()):
            raise ValueError(f"{place}, {where(row)}: {error}")
    labels = [class_name(label) for label in labels]
    if known is None:
        known = tuple(sorted(set(labels), key=_order))
        require(len(known) > 1, f"{place}: every row is of the one class {known[0]!r}; at least two are needed")
    position = {name: i for i, name in enumerate(known)}
    for row, label in enumerate(labels):
        if label not in position:
            raise ValueError(f"{place}, {where(row)}: {label!r} is not one of the known classes, {listed(known)}")
    return torch.tensor([position[label] for label in labels]), known


def _label_error(label: str, known: tuple[str, ...]) -> str:
    """Why a label cannot be a class; empty if it can."""
    if not label:
        return "the class is missing"
    if is_missing(label) and label not in known:
        return f"{label} stands for a missing class; fill it in or leave the row out"
    value = number(label)
    return "" if math.isnan(value) or value.is_integer() else f"{label} is a number, not a class; is this a regression?"


def _order(name: str) -> tuple[bool, float, str]:
    value = number(name)
    return (True, 0.0, name) if math.isnan(value) else (False, value, name)
