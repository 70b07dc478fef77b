"""A user's own data: a CSV file with a header, or an NPZ file with the arrays x and y.

Whatever is wrong with a file is a ValueError of one line that says where, so that the command line can show it as is.
"""

import csv
import difflib
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

MISSING = ("", "nan", "na", "n/a", "null", "none", "?")
FEW = 20  # different whole numbers that still look like classes
MOST = 100  # different texts of an input column, each of which is an input


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
    kind: Literal["regression", "classification"] = "regression",
    ignore: Sequence[str] = (),
    features: Sequence[str] | None = None,
    fill: Mapping[str, float] | None = None,
    classes: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Table:
    """Read a CSV or NPZ file.

    Of a CSV file, an input column of text becomes an input for each of its texts, 1 where it stands and 0 elsewhere. A column
    with missing cells has one more input, which is 1 there; a missing number is the mean of the others.

    Args:
        path: a `.csv` file (commas, a header line) or a `.npz` file (inputs in the array x).
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
    if kind not in ("regression", "classification"):
        raise ValueError(f'kind is "regression" or "classification", not {kind!r}')
    if kind == "classification" and len(targets) > 1:
        raise ValueError(f"classification takes one target, not {len(targets)}: {', '.join(targets)}")
    _check(path)
    readers = {".csv": _read_csv, ".npz": _read_npz}
    known = None if classes is None else tuple(classes)
    if ignore and features is None:
        features, fill = _others(path, targets, ignore)
    return readers[path.suffix.lower()](path, targets, kind == "classification", features, fill or {}, known, dtype)


def detect(path: str | Path, target: str) -> tuple[Literal["regression", "classification"], str]:
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
    if path.suffix.lower() == ".csv":
        columns, _ = _cells(path)
        _require(path, target, columns, "column")
        labels = columns[target]
    else:
        array = _arrays(path, (target,))[target]
        if array.ndim != 1:
            return "regression", f"an array of {array.ndim} axes"
        labels = [str(label) for label in array.tolist()]
    labels = [label for label in labels if label.lower() not in MISSING]  # which the reader refuses with its place
    values = {_number(label) for label in labels}
    if any(math.isnan(value) for value in values):
        return "classification", "text"
    if any(not value.is_integer() for value in values):
        return "regression", "numbers with fractions"
    different = len({_class(label) for label in labels})
    few = different <= min(FEW, len(labels) / 2)
    return "classification" if few else "regression", f"whole numbers, {different} different ones"


def _check(path: Path) -> None:
    if path.suffix.lower() not in (".csv", ".npz"):
        raise ValueError(f"{path}: only .csv and .npz files can be read")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")


def _read_csv(
    path: Path,
    targets: tuple[str, ...],
    classify: bool,
    features: Sequence[str] | None,
    fill: Mapping[str, float],
    known: tuple[str, ...] | None,
    dtype: torch.dtype,
) -> Table:
    columns, lines = _cells(path)
    for name in targets:
        _require(path, name, columns, "column")

    def where(row: int) -> str:
        return f"row {row + 1} (line {lines[row]})"

    def numbers(name: str, other: float | None = None) -> np.ndarray:  # [N] float64; `other` stands for what is missing
        cells = columns[name]
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:  # the slow way, to find the cell
            values = np.array([_number(cell) for cell in cells])
        if other is not None:
            values[[_missing(cell) for cell in cells]] = other
        for row in np.flatnonzero(~_usable(values))[:1]:
            _refuse_number(f"{path}, {where(row)}, column {name!r}", cells[row])
        return values

    def stacked(values: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(values, axis=1)).to(dtype)

    inputs, filled = _inputs(path, targets, columns) if features is None else (tuple(features), dict(fill))
    if not inputs:
        raise ValueError(f"{path}: no column is left for the inputs")
    found = {name: _source(path, name, columns) for name in inputs}
    for column in dict.fromkeys(column for column, text in found.values() if text is not None and column not in inputs):
        levels = [text for of, text in found.values() if of == column]
        _check_texts(f"{path}, column {column!r}", columns[column], where, [text for text in levels if text is not None])
    x = stacked(
        [
            numbers(column, filled.get(column) if f"{column}=?" in inputs else None)
            if text is None
            else np.array([_missing(cell) if text == "?" else cell == text for cell in columns[column]], dtype=np.float64)
            for column, text in found.values()
        ]
    )
    filled = {name: value for name, value in filled.items() if name in inputs}
    if not targets:
        return Table(x, None, inputs, targets, (), filled)
    if not classify:
        return Table(x, stacked([numbers(name) for name in targets]), inputs, targets, (), filled)
    y, names = _encode(f"{path}, column {targets[0]!r}", columns[targets[0]], where, known)
    return Table(x, y, inputs, targets, names, filled)


def _others(path: Path, targets: tuple[str, ...], ignore: Sequence[str]) -> tuple[tuple[str, ...], dict[str, float]]:
    """The inputs of a CSV file without some columns."""
    if path.suffix.lower() != ".csv":
        raise ValueError(f"{path}: an NPZ file has its inputs in one array, of which no columns can be left out by name")
    columns, _ = _cells(path)
    for name in ignore:
        _require(path, name, columns, "column")
    return _inputs(path, (*targets, *ignore), columns)


def _inputs(path: Path, without: tuple[str, ...], columns: dict[str, list[str]]) -> tuple[tuple[str, ...], dict[str, float]]:
    """What the columns become, and what stands for their missing numbers."""
    names = [name for name in columns if name not in without]
    filled = {name: _mean(columns[name]) for name in names if any(map(_missing, columns[name]))}
    return tuple(feature for name in names for feature in _features(path, name, columns[name], columns)), filled


def _features(path: Path, name: str, cells: list[str], columns: dict[str, list[str]]) -> list[str]:
    """The inputs that a column becomes. One in which a text is among numbers counts as numbers, and is refused when it is read."""
    there = [cell for cell in cells if not _missing(cell)]
    if not there:
        raise ValueError(f"{path}: column {name!r} is empty; leave it out (--ignore)")
    levels: list[str] = []
    if all(math.isnan(_number(cell)) for cell in there):
        levels = sorted(set(there))
        if len(levels) > min(MOST, max(2, len(cells) / 2)):  # names, keys, dates: nothing can be learned from each by itself
            raise ValueError(
                f"{path}: column {name!r} holds {len(levels)} different texts in {len(cells)} rows, such as {levels[0]!r}, and each "
                "would be an input of its own; leave the column out (--ignore), or write it as numbers or in fewer words"
            )
    made = [f"{name}={level}" for level in levels] or [name]
    made += [f"{name}=?"] if len(there) < len(cells) else []
    for feature in made:
        if feature != name and feature in columns:
            raise ValueError(
                f"{path}: the column {feature!r} has the name of an input that is made of {name!r}; call it otherwise"
            )
    return made


def _source(path: Path, feature: str, columns: dict[str, list[str]]) -> tuple[str, str | None]:
    """The column of an input, and the text which it looks for there; None where it is the number itself."""
    if feature in columns:
        return feature, None
    for at in (i for i, sign in enumerate(feature) if sign == "="):
        if feature[:at] in columns:
            return feature[:at], feature[at + 1 :]
    _require(path, feature.partition("=")[0], columns, "column")
    raise AssertionError("not reached: no such column is refused")


def _check_texts(place: str, cells: list[str], where: Callable[[int], str], levels: Sequence[str]) -> None:
    for row, cell in enumerate(cells):
        if _missing(cell):
            if "?" not in levels:
                _refuse_number(f"{place}, {where(row)}", cell)
        elif cell not in levels:
            raise ValueError(f"{place}, {where(row)}: {cell!r} is not one of the known texts, {_listed(levels)}")


def _missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _mean(cells: list[str]) -> float:
    """The mean of the cells that are finite numbers; 0 where there is none."""
    values = np.array([_number(cell) for cell in cells])
    return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else 0.0


def _cells(path: Path) -> tuple[dict[str, list[str]], list[int]]:
    """The stripped cells by column name, and the line in the file of each row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a byte order mark
            text = ""  # of the line that was read last: of one column, a missing cell ("") is a row, and a blank line is none

            def seen() -> Iterator[str]:
                nonlocal text
                for line in file:
                    text = line
                    yield line

            reader = csv.reader(seen(), strict=True)
            numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if text.strip()]
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as CSV in UTF-8: {_first_line(error)}") from error
    if not numbered:
        raise ValueError(f"{path}: the file is empty")
    header = numbered[0][1]
    if not any(math.isnan(_number(cell)) for cell in header):
        raise ValueError(f"{path}: the first line holds numbers, but a header with the names of the columns is needed")
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise ValueError(f"{path}: the header is one column, {header[0]!r}: separate the columns by commas")
    for position, name in enumerate(header):
        if not name:  # most often a row number that pandas wrote, which must not become an input
            raise ValueError(f"{path}: column {position + 1} has no name; name it, or write the file without it")
        if name in header[:position]:
            raise ValueError(f"{path}: two columns are called {name!r}")
    if len(numbered) == 1:
        raise ValueError(f"{path}: there is a header but no row")
    for row, (line, cells) in enumerate(numbered[1:]):
        if len(cells) != len(header):
            raise ValueError(f"{path}, row {row + 1} (line {line}): {len(cells)} cells, the header has {len(header)}")
    columns = zip(*(cells for _, cells in numbered[1:]), strict=True)
    return dict(zip(header, map(list, columns), strict=True)), [line for line, _ in numbered[1:]]


def _read_npz(
    path: Path,
    targets: tuple[str, ...],
    classify: bool,
    features: Sequence[str] | None,
    fill: Mapping[str, float],
    known: tuple[str, ...] | None,
    dtype: torch.dtype,
) -> Table:
    if len(targets) > 1:
        raise ValueError(f"{path}: an NPZ file has one target array, of shape [N] or [N, C], not {len(targets)}")
    arrays = _arrays(path, ("x", *targets))

    def numbers(name: str) -> Tensor:
        array = arrays[name]
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{path}: {name} holds {array.dtype}, not numbers")
        for at in np.argwhere(~_usable(array))[:1].tolist():
            _refuse_number(f"{path}, {name}[{', '.join(map(str, at))}]", str(array[tuple(at)]))
        return torch.from_numpy(array.astype(np.float64 if dtype == torch.float64 else np.float32)).to(dtype)

    if arrays["x"].ndim < 2 or not arrays["x"].size:
        raise ValueError(f"{path}: x must be [N, F] or [N, ...] with something in it, its shape is {arrays['x'].shape}")
    x = numbers("x")
    names = tuple(f"x{i}" for i in range(x.shape[1])) if x.ndim == 2 else ()
    if features is not None and len(features) != len(names):
        raise ValueError(f"{path}: x has the shape {tuple(x.shape)}, where [N, {len(features)}] is needed")
    inputs = names if features is None else tuple(features)
    if not targets:
        return Table(x, None, inputs, targets, ())
    y = arrays[targets[0]]
    if y.shape[:1] != x.shape[:1]:
        raise ValueError(f"{path}: x has {len(x)} rows, but {targets[0]} has the shape {y.shape}")
    if not classify:
        values = numbers(targets[0])
        return Table(x, values.unsqueeze(1) if y.ndim == 1 else values, inputs, targets, ())
    if y.ndim != 1:
        raise ValueError(f"{path}: the classes in {targets[0]} must be [N], their shape is {y.shape}")
    labels = [str(label).strip() for label in y.tolist()]
    encoded, found = _encode(f"{path}, {targets[0]}", labels, lambda row: f"row {row + 1}", known)
    return Table(x, encoded, inputs, targets, found)


def _arrays(path: Path, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not an NPZ file")
    try:
        with np.load(path, allow_pickle=False) as file:
            there = list(file.files)
            arrays = {name: file[name] for name in wanted if name in there}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as arrays of numbers or text: {_first_line(error)}") from error
    for name in wanted:
        _require(path, name, there, "array")
    return arrays


def _encode(
    place: str, labels: list[str], where: Callable[[int], str], known: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """The labels as positions [N] in the class names: `known`, or else those found, numbers first."""
    values = [_number(label) for label in labels]
    for row, (label, value) in enumerate(zip(labels, values, strict=True)):
        if not label:
            raise ValueError(f"{place}, {where(row)}: the class is missing")
        if label.lower() in MISSING and label not in (known or ()):
            raise ValueError(f"{place}, {where(row)}: {label} stands for a missing class; fill it in or leave the row out")
        if not math.isnan(value) and not value.is_integer():
            raise ValueError(f"{place}, {where(row)}: {label} is a number, not a class; is this a regression?")
    labels = [_class(label) for label in labels]
    if known is None:
        known = tuple(sorted(set(labels), key=_order))
        if len(known) == 1:
            raise ValueError(f"{place}: every row is of the one class {known[0]!r}; at least two are needed")
    position = {name: i for i, name in enumerate(known)}
    for row, label in enumerate(labels):
        if label not in position:
            raise ValueError(f"{place}, {where(row)}: {label!r} is not one of the known classes, {_listed(known)}")
    return torch.tensor([position[label] for label in labels]), known


def _class(label: str) -> str:
    """1, 1.0 and 01 are one class, whichever way a file writes it; 1e2 and 1_2 are names. Not by way of a float, which knows no more
    than 16 digits."""
    whole = re.fullmatch(r"([+-]?\d+)(\.0*)?", label, re.ASCII)
    return str(int(whole[1])) if whole else label


def _require(path: Path, name: str, there: Sequence[str] | dict[str, list[str]], what: str) -> None:
    if name in there:
        return
    near = difflib.get_close_matches(name, there, n=1)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{path}: no {what} is called {name!r}; {advice}there are {_listed(tuple(there))}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def _number(cell: str) -> float:
    """NaN for what is no number."""
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _order(name: str) -> tuple[bool, float, str]:
    value = _number(name)
    return (True, 0.0, name) if math.isnan(value) else (False, value, name)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _usable(values: np.ndarray) -> np.ndarray:
    """Which are finite, and stay so as float32: what is larger is refused in every dtype, since its square is to be a number too."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.isfinite(values.astype(np.float32))


def _refuse_number(place: str, cell: str) -> NoReturn:
    if not cell:
        raise ValueError(f"{place}: the cell is empty")
    if cell.lower() in MISSING:
        raise ValueError(f"{place}: {cell} stands for a missing value; fill it in or leave the row out")
    if math.isnan(_number(cell)):
        raise ValueError(f"{place}: {cell!r} is not a number")
    raise ValueError(f"{place}: {cell} is too large or infinite")
