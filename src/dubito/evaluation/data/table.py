"""A user's own data: a CSV file with a header, a Parquet file, or an NPZ file with the arrays x and y.

Whatever is wrong with a file is a ValueError of one line that says where, so that the command line can show it as is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from dubito.evaluation.data.cells import class_name, is_missing, number
from dubito.evaluation.data.csv_table import CsvFile, is_table, stacked
from dubito.evaluation.data.npz_table import NpzFile
from dubito.tensors.checks import require

Kind = Literal["regression", "classification"]
KINDS = get_args(Kind)
FEW = 20  # different whole numbers that still look like classes


@dataclass(frozen=True)
class Table:
    """What was read. Give `features`, `fill` and `classes` of a training table to `table` to read another file the same way."""

    x: Tensor  # [N, F] float32, or the dtype asked for; from an NPZ file also [N, ...]
    y: Tensor | None  # [N, C] like x, or [N] int64 positions in `classes`; None where no target was asked for
    # names of the F inputs; empty where x is not a table. "city=Rome" is 1 there, "age=?" is 1 where age is missing
    features: tuple[str, ...]
    targets: tuple[str, ...]
    classes: tuple[str, ...]  # empty for regression
    fill: dict[str, float] = field(default_factory=dict)  # what stands for a missing number, by column: the mean of the others


def table(
    path: str | Path,
    target: str | Sequence[str] = "y",
    *,
    kind: Kind = "regression",
    ignore: Sequence[str] = (),
    features: Sequence[str] | None = None,
    fill: Mapping[str, float] | None = None,
    classes: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Table:
    """Read a CSV or NPZ file.

    Text columns of a CSV file are one-hot encoded. A column with missing cells has one more input, which is 1 where a cell is missing;
    a missing number is replaced by the mean of the others.

    Args:
        path: a `.csv` or `.tsv` file (with a header line; also `.gz`), a `.parquet` file, or a `.npz` file (inputs in the array x).
        target: the column(s) to predict, or the array of an NPZ file; `()` reads the inputs alone.
        kind: "classification" takes one target of strings or whole numbers and encodes it.
        ignore: columns of a CSV file that are no inputs, such as keys.
        features: the inputs in order, as an earlier `Table` names them; by default of all columns but the targets.
        fill: what stands for missing numbers in this file, as an earlier `Table` has it.
        classes: the known class names in order; by default those found, sorted, of which there must be at least two.
        dtype: of the inputs, and of targets that are numbers. Columns that differ only after their seventh digit, such as Unix
            times, need torch.float64 until they are standardised.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "fruit.csv")
    ...     _ = path.write_text("weight,width,fruit\\n150,7.1,apple\\n120,6.5,pear\\n160,7.3,apple\\n")
    ...     fruit = table(path, "fruit", kind="classification")
    >>> fruit.features, fruit.classes, fruit.y
    (('weight', 'width'), ('apple', 'pear'), tensor([0, 1, 0]))
    """
    path = Path(path)
    targets = (target,) if isinstance(target, str) else tuple(target)
    require(kind in KINDS, f'kind is "regression" or "classification", not {kind!r}')
    single = kind == "regression" or len(targets) < 2
    require(single, f"classification takes one target, not {len(targets)}: {', '.join(targets)}")
    _check(path)
    known = None if classes is None else tuple(classes)
    if is_table(path):
        return _read_csv(CsvFile.read(path), targets, kind, ignore, features, fill or {}, known, dtype)
    in_one = f"{path}: an NPZ file has its inputs in one array, of which no columns can be left out by name"
    require(not ignore or features is not None, in_one)
    return _read_npz(path, targets, kind, features, known, dtype)


def detect(path: str | Path, target: str) -> tuple[Kind, str]:
    """What kind of target this looks like, and why: text and a few whole numbers are classes, other numbers are numbers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "fruit.csv")
    ...     _ = path.write_text("weight,width,fruit\\n150,7.1,apple\\n120,6.5,pear\\n160,7.3,apple\\n")
    ...     detect(path, "fruit"), detect(path, "width")
    (('classification', 'text'), ('regression', 'numbers with fractions'))
    """
    path = Path(path)
    _check(path)
    if is_table(path):
        file = CsvFile.read(path)
        file.require(target)
        return _detect(file.columns[target])
    array = NpzFile.read(path, [target]).arrays[target]
    return ("regression", f"an array of {array.ndim} axes") if array.ndim != 1 else _detect([str(one) for one in array.tolist()])


def _detect(labels: list[str]) -> tuple[Kind, str]:
    labels = [label for label in labels if not is_missing(label)]  # which the reader refuses with its place
    values = {number(label) for label in labels}
    if any(math.isnan(value) for value in values):
        return "classification", "text"
    if any(not value.is_integer() for value in values):
        return "regression", "numbers with fractions"
    different = len({class_name(label) for label in labels})
    few = different <= min(FEW, len(labels) / 2)
    return "classification" if few else "regression", f"whole numbers, {different} different ones"


def _check(path: Path) -> None:
    readable = is_table(path) or path.suffix.lower() == ".npz"
    require(readable, f"{path}: only .csv, .tsv (also compressed, .gz), .parquet and .npz files can be read")
    require(path.is_file(), f"{path}: there is no such file")


def _read_csv(
    file: CsvFile,
    targets: tuple[str, ...],
    kind: Kind,
    ignore: Sequence[str],
    features: Sequence[str] | None,
    fill: Mapping[str, float],
    known: tuple[str, ...] | None,
    dtype: torch.dtype,
) -> Table:
    if features is None:
        file.require(*ignore)
    file.require(*targets)
    names, fill = file.inputs((*targets, *ignore)) if features is None else (tuple(features), fill)
    require(names, f"{file.path}: no column is left for the inputs")
    x = stacked(file.features(names, fill), dtype)
    y, classes = None, ()
    if targets and kind == "classification":
        y, classes = file.encode(targets[0], known)
    elif targets:
        y = stacked([file.numbers(name) for name in targets], dtype)
    return Table(x, y, names, targets, classes, {name: value for name, value in fill.items() if name in names})


def _read_npz(
    path: Path,
    targets: tuple[str, ...],
    kind: Kind,
    features: Sequence[str] | None,
    known: tuple[str, ...] | None,
    dtype: torch.dtype,
) -> Table:
    require(len(targets) < 2, f"{path}: an NPZ file has one target array, of shape [N] or [N, C], not {len(targets)}")
    file = NpzFile.read(path, ["x", *targets])
    x, names = file.inputs(features, dtype)
    y, classes = None, ()
    if targets and kind == "classification":
        y, classes = file.encode(targets[0], known)
    elif targets:
        y = file.targets(targets[0], dtype)
    return Table(x, y, names, targets, classes)
