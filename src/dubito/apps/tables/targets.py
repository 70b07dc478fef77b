"""The columns to predict, as numbers or as classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dubito.apps.tables.cells import Raw, is_numeric, missing, mostly, numbers
from dubito.evaluation.data.cells import class_name, is_missing, listed
from dubito.evaluation.data.table import FEW
from dubito.tensors.checks import require

Kind = Literal["regression", "classification"]


def detect(raw: Raw) -> tuple[Kind, str]:
    """What a target looks like, and why: text and a few whole numbers are classes, other numbers are numbers.

    >>> detect(["yes", "no"]), detect(np.array([0.5, 1.5]))
    (('classification', 'text'), ('regression', 'numbers with fractions'))
    """
    values, gone = numbers(raw), missing(raw)
    there = values[np.isfinite(values)]
    if not mostly(values, gone):
        return "classification", "text"
    if not (there == np.round(there)).all():
        return "regression", "numbers with fractions"
    different = len(np.unique(there))
    few = different <= min(FEW, len(there) / 2)
    return "classification" if few else "regression", f"whole numbers, {different} different ones"


def labels(raw: Raw) -> list[str]:
    """A column as names of classes; "" where the cell is missing."""
    if is_numeric(raw):
        return ["" if not np.isfinite(value) else class_name(f"{value:.17g}") for value in raw.tolist()]
    return ["" if is_missing(cell) else class_name(cell) for cell in raw]


def class_names(raw: Raw, name: str) -> tuple[str, ...]:
    """The classes of a column in order: numbers by size, then words."""
    found = Counter(label for label in labels(raw) if label)
    require(len(found) > 1, f"every row of {name} is of the one class {listed(list(found)) or '(none)'}; at least two are needed")
    most = max(2, sum(found.values()) // 2)
    require(
        len(found) <= most,
        f"{name} holds {len(found)} different values in {sum(found.values())} rows, such as {next(iter(found))!r}, too many for "
        "classes: write it as numbers (a date as days), or in fewer words",
    )
    return tuple(sorted(found, key=_order))


def _order(label: str) -> tuple[bool, float, str]:
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label


def class_positions(raw: Raw, classes: Sequence[str]) -> Tensor:
    """A column as positions [N] in the classes; -1 where a cell is missing or of no known class."""
    position = {name: i for i, name in enumerate(classes)}
    return torch.tensor([position.get(label, -1) for label in labels(raw)])


def target_numbers(columns: Mapping[str, Raw], names: Sequence[str]) -> Tensor:
    """Columns as numbers [N, T] float64; NaN where a cell is missing."""
    for name in names:
        texts = [] if is_numeric(columns[name]) or mostly(numbers(columns[name]), missing(columns[name])) else columns[name]
        text = next((cell for cell in texts if not is_missing(cell)), None)
        require(
            text is None,
            f"the target {name} holds text, such as {text!r}, where numbers are needed; classes are one target alone",
        )
    return torch.from_numpy(np.stack([numbers(columns[name]) for name in names], 1))
