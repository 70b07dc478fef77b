"""`dubito predict`."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import arg

from dubito.cli.commands import parts
from dubito.cli.commands.errors import UsageError, check_not_overwritten
from dubito.cli.commands.fitted import POSTERIOR, Fitted, FittedTable, Reading, opened
from dubito.cli.commands.flags import parse
from dubito.cli.commands.recipe import NAME, open_atomically
from dubito.evaluation.data.cells import spreadsheet_cell
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import require


@dataclass(frozen=True)
class Predict(Reading):
    """Predict every row of a table, or of all tables in a folder."""

    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: standard output)")] = None
    """The CSV file to write; for a folder of tables, the folder of CSV files."""
    level: float = 0.9
    """Probability of the interval from lower to upper, for a regression."""

    def __post_init__(self):
        Reading.__post_init__(self)
        require(0 < self.level < 1, f"--level must lie between 0 and 1; got {self.level}")


def predict(args: Sequence[str]) -> None:
    """Predict every row of a table; write one CSV line per row, in the same order.

    DATA may be a folder: --out is then a folder too, with a CSV file for each
    of its tables. --jobs processes share them, or those of torchrun or Slurm.
    What is there already is not predicted again, so a run that was stopped
    goes on.

      regression      mean, lower and upper (an interval), and the variances
                      total = aleatoric (noise) + epistemic (model uncertainty);
                      with several targets, the columns of each: price_mean ...
      classification  class (the most probable one), p_NAME for each class,
                      and the entropies total = aleatoric + epistemic, in nats
      dubito_note     what is odd about a row, if the table was fitted without a
                      method: an empty cell, a new word, a number far outside

    Example: dubito predict houses new.csv --out predictions.csv
    """
    options: Predict = parse(Predict, args, prog="dubito predict", about=predict.__doc__ or "")
    if options.data.is_dir():
        predict_folder(options)
        return
    if parts.share()[0] > 0:  # one table is predicted by the first process
        return
    if options.out is not None and options.out.is_dir():
        raise UsageError(f"--out {options.out} is a folder; give the name of a file")
    if options.out is not None:
        check_not_overwritten(options.out, options.data, options.folder / NAME, options.folder / POSTERIOR)
    fitted = options.open()
    tell(fitted)
    count = predict_table(fitted, options.data, options.out, options.level)
    if options.out is not None:
        print(f"Wrote {count} predictions to {options.out}", file=sys.stderr)


def tell(fitted: Fitted | FittedTable) -> None:
    """What to know before the predictions are used."""
    for note in fitted.remarks():
        print(f"Note: {note}", file=sys.stderr)


def predict_table(fitted: Fitted | FittedTable, data: Path, out: Path | None, level: float) -> int:
    """Write the predictions of a table to a file, or to standard output; how many they are."""
    count, answers = 0, fitted.answers(data)
    first = next(answers)  # what cannot be read is told before a file is begun
    with nullcontext(sys.stdout) if out is None else open_atomically(out) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*map(spreadsheet_cell, header(fitted)), *(["dubito_note"] if first[1] else [])])
        for p, notes in chain([first], answers):
            table = lines(fitted, p, level)
            writer.writerows([[*row, spreadsheet_cell(note)] for row, note in zip(table, notes, strict=True)] if notes else table)
            count += len(table)
    return count


def predict_folder(options: Predict) -> None:
    """Predict the tables of a folder that are not predicted yet, or the share of this process."""
    data, out = options.data, options.out
    if out is None or out.is_file():
        raise UsageError(f"{data} is a folder of tables: give a folder for their predictions, --out FOLDER")
    if out.exists() and out.samefile(data):
        raise UsageError(f"--out {out} is the folder of the tables: give another one")
    found = parts.parts(data)
    places, (rank, size) = parts.outputs(found, out), parts.share()
    fitted = options.open()
    if rank == 0:
        tell(fitted)
    made_by = {path.name: parts.checksum(path) for path in sorted(options.folder.iterdir()) if path.is_file()}
    parts.claim(out, {"level": options.level, "draws": options.draws, "fitted": made_by}, first=rank == 0)
    left = [path for path in found[rank::size] if not parts.is_done(path, places[path])]
    refused: list[str] = []
    for path, count in parts.each(partial(_predict_part, options, places), left, options.jobs):
        if isinstance(count, UsageError):
            refused.append(str(count))
        else:
            print(f"Wrote {count} predictions to {places[path]}", file=sys.stderr)
    if refused:
        raise UsageError(f"{len(refused)} of {len(left)} tables cannot be predicted, the others are: {'; '.join(refused)}")
    if not left:
        print(f"All {len(found[rank::size])} tables are predicted already, in {out}", file=sys.stderr)


def _predict_part(options: Predict, places: dict[Path, Path], path: Path) -> int:
    return predict_table(opened(options), path, places[path], options.level)


def header(fitted: Fitted | FittedTable) -> list[str]:
    """The names of the columns."""
    if fitted.kind == "classification":
        return ["class", *(f"p_{name}" for name in fitted.outputs), "total", "aleatoric", "epistemic"]
    columns = ("mean", "lower", "upper", "total", "aleatoric", "epistemic")
    if len(fitted.outputs) == 1:
        return list(columns)
    return [f"{name}_{column}" for name in fitted.outputs for column in columns]


def lines(fitted: Fitted | FittedTable, p: Predictive, level: float) -> list[list[str]]:
    """The rows of the output file."""
    u = p.uncertainty
    if fitted.kind == "classification":
        names = [fitted.outputs[i] for i in p.mean.argmax(-1).tolist()]
        values = torch.cat([p.mean, torch.stack([u.total, u.aleatoric, u.epistemic], -1)], -1)  # [B, C + 3]
        return [
            [spreadsheet_cell(name), *(f"{value:.7g}" for value in row)] for name, row in zip(names, values.tolist(), strict=True)
        ]
    values = torch.stack([p.mean, *p.interval(level), u.total, u.aleatoric, u.epistemic], -1)  # [B, C, 6]
    return [[text for output in row for text in _text(*output)] for row in values.tolist()]


def _text(mean: float, lower: float, upper: float, *variances: float) -> list[str]:
    """Seven digits, plus as many as mean, lower and upper have in common, as Unix times have."""
    width, largest = upper - lower, max(abs(mean), abs(lower), abs(upper))
    common = math.floor(math.log10(largest / width)) if 0 < width < largest < math.inf else 0
    digits = min(7 + common, 17)  # all digits of a float64
    return [*(f"{value:.{digits}g}" for value in (mean, lower, upper)), *(f"{value:.7g}" for value in variances)]
