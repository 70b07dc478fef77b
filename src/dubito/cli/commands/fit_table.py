"""`dubito fit TABLE`: the default recipe for tables."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from dubito.apps import tables
from dubito.apps.tables import TableModel
from dubito.apps.tables.frames import as_frame
from dubito.cli.commands.errors import UsageError, usage_errors
from dubito.cli.commands.fitted import TABLE
from dubito.cli.commands.flags import parse
from dubito.cli.commands.notes import RELY, calibration_note
from dubito.cli.commands.scores import show
from dubito.cli.commands.tables import target_note
from dubito.evaluation.data.cells import require_name
from dubito.evaluation.data.csv_table import SUFFIXES
from dubito.tensors import store

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class TableOptions:
    """The table, and the folder to write."""

    data: Annotated[Path, Positional, arg(metavar="TABLE")]
    """A .csv or .tsv file (also .gz; any usual separator, decimal commas), a .parquet file, or an .npz file with x."""
    target: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(required, repeatable)")]
    """The column to predict; repeat it for several regression targets. Other columns are inputs."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: the name of the table)")] = None
    """The folder to write; it must not exist yet."""
    kind: Literal["auto", "regression", "classification"] = "auto"
    """Detected by default: a target of text, or of few different whole numbers, is a class; other numbers are a regression."""
    ignore: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(repeatable)")] = ()
    """A column to leave out."""
    budget: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="(default: by the size of the table)")] = None
    """Time that the fit may take, such as 30s or 5m."""
    seed: int = 0
    """Seed of everything random; the same seed gives the same result, unless --budget ends the training."""


def fit_table(args: Sequence[str]) -> None:
    """Fit a table with the default recipe; predictions are calibrated, and no setting is needed.

      Ten small networks hold out different fifths of the rows. Each is stopped
      where its own fifth is predicted best, and with these out-of-fold predictions
      the uncertainty is calibrated. So all rows are used, and none twice.
      Text, dates, empty cells and most ways to write a number are understood.

    `dubito predict` and `dubito evaluate` read the folder. To choose a method yourself: `dubito fit METHOD TABLE`.
    """
    options: TableOptions = parse(TableOptions, args, prog="dubito fit", about=fit_table.__doc__ or "")
    out = options.out or Path(stem(options.data))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists: give another folder for --out")
    model = fit_model(options)
    shown = f"Out of fold, {len(model.out_of_fold.y)} rows"
    show(model.scores, model.errors, shown)
    for note in remarks(model):
        print(f"Note: {note}")
    with store.describing_write_errors(out):
        created = not out.exists()
        try:
            out.mkdir(parents=True, exist_ok=True)
            model.save(out / TABLE)
        except (OSError, store.WriteError) as error:
            if created:
                shutil.rmtree(out, ignore_errors=True)
            raise UsageError(str(error)) from error
    print(f"Wrote {out}. Predict with: dubito predict {out} TABLE")


def fit_model(options: TableOptions) -> TableModel:
    """Read the table, say what it holds, and fit."""
    path, names = options.data, options.target
    if not names:
        raise UsageError("name the column to predict: --target COLUMN")
    with usage_errors(ValueError):
        frame = as_frame(path)
        for name in (*names, *options.ignore):
            require_name(path, name, frame, "column")
        duplicates = [name for name in names if names.count(name) > 1]
        if duplicates:
            raise UsageError(f"duplicate --target {duplicates[0]}: name each target once")
        rows = len(frame[names[0]])
        print(f"{path}: {rows} rows, {len(frame) - len(names)} columns beside the target")
        kind, why = target_note(frame[names[0]], len(names), options.kind)
        print(f"{', '.join(names)}: {kind} ({why})", flush=True)
        limit = seconds(options.budget)
        return tables.fit_table(frame, names, kind=kind, ignore=options.ignore, budget=limit, seed=options.seed)


def remarks(model: TableModel) -> Iterator[str]:
    """What to know before the predictions are used."""
    yield from model.remarks
    yield from calibration_note(model.scores, len(model.out_of_fold.y), "out-of-fold", RELY)


def seconds(text: str | None) -> float | None:
    """A time such as 90, 30s, 5m or 1h in seconds.

    >>> seconds("5m"), seconds("30s"), seconds(None)
    (300.0, 30.0, None)
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smh]?)", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--budget {text}: give a time such as 30s or 5m")
    return float(found[1]) * UNITS[found[2]]


def stem(path: Path) -> str:
    """The name of a table without its ending.

    >>> stem(Path("data/houses.csv.gz"))
    'houses'
    """
    ending = next((end for end in sorted(SUFFIXES, key=len, reverse=True) if path.name.lower().endswith(end)), path.suffix)
    return path.name[: len(path.name) - len(ending)] if ending else path.name
