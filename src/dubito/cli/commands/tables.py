"""The user's table: which column is predicted, how it is read, and which rows are held out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from tyro.conf import Positional, UseAppendAction, arg

from dubito.apps.tables.cells import Raw
from dubito.apps.tables.targets import detect as detect_column
from dubito.cli.commands.errors import UsageError, usage_errors
from dubito.evaluation.data import Table, detect, table
from dubito.tensors import randomness

Kind = Literal["regression", "classification"]
LISTED = 20  # generated columns that are named on screen


@dataclass(frozen=True)
class Data:
    """The table, and the folder to write."""

    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """A CSV file with a header (numbers or text; cells may be empty), or an NPZ file with the inputs in the array x."""
    target: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(required, repeatable)")]
    """The column to predict, or the array of an NPZ file; repeat it for several regression targets. Other columns are inputs."""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """The folder to write; it must not exist yet."""
    kind: Literal["auto", "regression", "classification"] = "auto"
    """Detected by default: a target of text, or of few different whole numbers, is a class; other numbers are a regression."""
    ignore: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(repeatable)")] = ()
    """A column of a CSV file to leave out, such as a key."""
    held_out: Annotated[float, arg(metavar="SHARE")] = 0.2
    """Share of the rows, drawn at random, that is held out to score the predictions; 0 holds out none."""


class Rows(NamedTuple):
    """Indices of the training rows and of the held-out rows."""

    train: Tensor
    held_out: Tensor


def read_table(data: Data) -> tuple[Table, Tensor, Kind]:
    """The table, its targets, and the kind of problem; prints a summary."""
    if not data.target:
        raise UsageError("name the column to predict: --target COLUMN")
    duplicates = [name for name in data.target if data.target.count(name) > 1]
    if duplicates:
        raise UsageError(f"duplicate --target {duplicates[0]}: name each target once")
    with usage_errors(ValueError):
        kind, why = _kind(data)
        found = table(data.data, data.target, kind=kind, ignore=data.ignore, dtype=torch.float64)
    y, names = found.y, ", ".join(data.target)
    assert y is not None
    if kind == "regression" and y.ndim != 2:
        raise UsageError(f"{data.data}: {names} must have the shape [N] or [N, C]; got {list(y.shape)}")
    if kind == "regression" and (y == y[0]).all(0).any():
        raise UsageError(f"{data.data}: all rows have the same value of {names}, so there is nothing to learn")
    size = "x".join(map(str, found.x.shape[1:]))
    print(f"{data.data}: {len(y)} rows, {size} input{'s' if size != '1' else ''}")
    made = [name for name in found.features if "=" in name]
    if made:
        more = f" and {len(made) - LISTED} more" if len(made) > LISTED else ""
        print(f"columns made from text and from missing cells: {', '.join(made[:LISTED])}{more}")
    classes = f" with {len(found.classes)} classes" if kind == "classification" else ""
    print(f"{names}: {kind}{classes} ({why})")
    return found, y, kind


def _kind(data: Data) -> tuple[Kind, str]:
    """The kind of problem, and why."""
    if data.kind != "auto":
        return data.kind, "as given by --kind"
    target, *others = data.target
    if others:
        return "regression", "several targets"
    kind, why = detect(data.data, target)
    return kind, f"{why}; otherwise give --kind {'regression' if kind == 'classification' else 'classification'}"


def target_note(raw: Raw, targets: int, kind: str) -> tuple[Kind, str]:
    """The kind of problem that the first of some targets makes, and why."""
    if kind != "auto":
        return ("regression" if kind == "regression" else "classification"), "as given by --kind"
    found, why = ("regression", "several targets") if targets > 1 else detect_column(raw)
    return found, f"{why}; otherwise give --kind {'regression' if found == 'classification' else 'classification'}"


def output_names(found: Table, y: Tensor) -> tuple[str, ...]:
    """A name for each output of the network: classes, or targets. One array of an NPZ file may hold several targets."""
    if found.classes or len(found.targets) == y.shape[1]:
        return found.classes or found.targets
    return tuple(f"{found.targets[0]}{i}" for i in range(y.shape[1]))


def split(rows: int, share: float, *, seed: int) -> Rows:
    """Training rows, and a random share of held-out rows.

    >>> [len(part) for part in split(10, 0.2, seed=0)]
    [8, 2]
    """
    held = round(share * rows)
    if not 0 <= share < 1 or (share > 0 and not 0 < held < rows):
        raise UsageError(
            f"--held-out {share:g} of {rows} rows must leave both training and held-out rows; give another share, or 0"
        )
    order = torch.randperm(rows, generator=randomness.generator("cpu", seed, "held out"))
    return Rows(order[held:].sort().values, order[:held].sort().values)
