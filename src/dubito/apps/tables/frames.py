"""What users call a table, as columns by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dubito.apps.tables.cells import Raw, is_numeric
from dubito.evaluation.data.cells import require_name
from dubito.evaluation.data.commas import decimal_commas, with_points
from dubito.evaluation.data.csv_table import CsvFile, as_cell, is_table
from dubito.tensors.checks import require

Table = Any  # what the user gives: see ACCEPTED
ACCEPTED = "a DataFrame, a dict of columns, an array or tensor [N, F], or the path of a .csv, .tsv or .parquet file"


class Frame(dict[str, Raw]):
    """The columns of a table by name, with decimal points; `commas` says of columns that had commas whether decimals followed."""

    commas: Mapping[str, bool] = {}


def as_frame(table: Table, commas: Mapping[str, bool] | None = None) -> Frame:
    """The columns of a table. `commas` says what commas in the numbers of some columns are, which the table else tells.

    >>> as_frame({"city": ["Rome", None], "size": [1, 2]})
    {'city': ['Rome', ''], 'size': array([1., 2.])}
    """
    if isinstance(table, Frame):
        return table
    if isinstance(table, str | Path):
        return _read(Path(table), commas)
    if isinstance(table, Mapping):
        _check_cells(table)
        frame = {str(name): as_column(values) for name, values in table.items()}
    elif hasattr(table, "columns"):  # of pandas and of polars
        names = [str(name) for name in table.columns]
        require(len(set(names)) == len(names), f"two columns are called {max(names, key=names.count)!r}: give each its own name")
        frame = {str(name): as_column(table[name]) for name in table.columns}
    elif hasattr(table, "to_frame"):
        raise TypeError(
            f"a {type(table).__name__} is one row or one column: give a table of one row, frame.iloc[[0]], or of one column, "
            "frame[['a']]"
        )
    else:
        frame = _from_matrix(table)
    lengths = {len(column) for column in frame.values()}
    require(
        len(lengths) == 1 and lengths != {0},
        f"the columns of a table have the same, positive number of rows; got {sorted(lengths)}",
    )
    found = decimal_commas({name: raw for name, raw in frame.items() if not is_numeric(raw)}, likely=False) | dict(commas or {})
    return _framed(
        {name: with_points(raw) if found.get(name) and not is_numeric(raw) else raw for name, raw in frame.items()}, found
    )


def _check_cells(table: Mapping[str, Any]) -> None:
    """Raise where a dict holds single cells in the place of columns."""
    for name, values in table.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise TypeError(f"column {name!r} must hold a cell for every row; got {values!r}. For one row give lists of one cell")


def _framed(columns: Mapping[str, Raw], commas: Mapping[str, bool]) -> Frame:
    frame = Frame(columns)
    frame.commas = commas
    return frame


def as_column(values: Any) -> Raw:
    """Numbers as float64 with NaN for what is missing, durations as numbers of seconds; everything else as cells of text.

    >>> as_column([1, None]), as_column([True, None])
    (array([ 1., nan]), ['True', ''])
    """
    array = _array(values.to_numpy() if hasattr(values, "to_numpy") else values)
    if is_numeric(array) and array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if is_numeric(array) and array.dtype.kind == "m":
        return array / np.timedelta64(1, "s")
    cells = [None if as_cell(value) == "" else value for value in (array.tolist() if is_numeric(values) else values)]
    if all(cell is None or (isinstance(cell, int | float | np.number) and not isinstance(cell, bool)) for cell in cells):
        return np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
    return [as_cell(cell) for cell in cells]


def _array(values: Any) -> Any:
    """A tensor as an array, and anything else as it is."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _from_matrix(table: Table) -> dict[str, Raw]:
    array = np.asarray(_array(table))
    array = array[:, None] if array.ndim == 1 else array
    require(array.ndim == 2, f"a table is {ACCEPTED}; got an array of shape {list(array.shape)}")
    return {f"x{i}": as_column(array[:, i]) for i in range(array.shape[1])}


def _read(path: Path, commas: Mapping[str, bool] | None) -> Frame:
    require(is_table(path) or path.suffix.lower() == ".npz", f"{path}: a table is {ACCEPTED}")
    require(path.is_file(), f"{path}: there is no such file")
    if path.suffix.lower() != ".npz":
        file = CsvFile.read(path, unnamed=True, commas=commas)
        return _framed(file.columns, file.commas)
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    require(
        "x" in arrays and arrays["x"].ndim == 2,
        f"{path}: an NPZ table has its inputs in the array x [N, F]; for images and the like choose a method, as in `dubito fit map`",
    )
    others = {name: as_column(array) for name, array in arrays.items() if name != "x" and array.shape == arrays["x"].shape[:1]}
    return Frame({**_from_matrix(arrays["x"]), **others})


def with_targets(frame: dict[str, Raw], target: Any) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """The inputs, and the targets by name: names of columns, or values that stand beside the table."""
    names = (target,) if isinstance(target, str) else target
    if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names) and set(names) <= frame.keys():
        return {name: column for name, column in frame.items() if name not in names}, {name: frame[name] for name in names}
    rows = len(next(iter(frame.values())))
    if isinstance(target, str):
        require_name("the table", target, frame, "column")
    values = as_frame({"y": target}) if getattr(target, "ndim", 1) == 1 else as_frame(target)
    values = {name.replace("x", "y", 1): column for name, column in values.items()} if len(values) > 1 else values
    have = len(next(iter(values.values())))
    require(have == rows, f"the table has {rows} rows and the target {have}")
    return frame, values
