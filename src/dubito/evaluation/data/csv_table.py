"""Tables in files, as cells of text: CSV with any usual separator, compressed or not, and Parquet. Text is one-hot encoded."""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.cells import encode, first_line, is_missing, listed, number, refuse_number, require_name, usable
from dubito.evaluation.data.commas import decimal_commas, with_points
from dubito.tensors.checks import require

MOST = 100  # different texts of a column, each of which is an input
TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
PARQUET = (".parquet", ".pq")
SUFFIXES = (*TEXT, *PARQUET)
SEPARATORS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class CsvFile:
    """The stripped cells of a file by column, and the line of each row in the file."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]
    commas: Mapping[str, bool] = field(default_factory=dict)  # of columns with commas in their numbers: whether decimals follow

    @staticmethod
    def read(path: Path, *, unnamed: bool = False, commas: Mapping[str, bool] | None = None) -> CsvFile:
        """Read and check a file: a header with different names, and rows of as many cells. `unnamed` gives names to columns without;
        `commas` says what commas in the numbers of some columns are, which the file else tells."""
        if path.suffix.lower() in PARQUET:
            return _read_parquet(path)
        numbered, separator = _rows(path)
        require(numbered, f"{path}: the file is empty")
        header = numbered[0][1]
        if unnamed:
            header = [name or f"unnamed {position + 1}" for position, name in enumerate(header)]
        _check_header(path, header)
        require(len(numbered) > 1, f"{path}: there is a header but no row")
        for row, (line, cells) in enumerate(numbered[1:]):
            if len(cells) != len(header):
                raise ValueError(f"{path}, row {row + 1} (line {line}): {len(cells)} cells, the header has {len(header)}")
        columns = dict(zip(header, map(list, zip(*(cells for _, cells in numbered[1:]), strict=True)), strict=True))
        found = decimal_commas(columns, likely=separator == ";") | dict(commas or {})
        columns = {name: with_points(cells) if found.get(name) else cells for name, cells in columns.items()}
        return CsvFile(path, columns, [line for line, _ in numbered[1:]], found)

    def where(self, row: int) -> str:
        """A row in words, as it is named in error messages."""
        return f"row {row + 1} (line {self.lines[row]})"

    def require(self, *names: str) -> None:
        """Every name must be that of a column."""
        for name in names:
            require_name(self.path, name, self.columns, "column")

    def inputs(self, without: Sequence[str]) -> tuple[tuple[str, ...], dict[str, float]]:
        """The inputs that the other columns become, and what stands for missing numbers: the mean of their column."""
        names = [name for name in self.columns if name not in without]
        fill = {name: _mean(self.columns[name]) for name in names if any(map(is_missing, self.columns[name]))}
        return tuple(feature for name in names for feature in self._features(name)), fill

    def _features(self, name: str) -> list[str]:
        """The inputs that a column becomes. One in which a text is among numbers counts as numbers, and is refused when it is read."""
        cells = self.columns[name]
        there = [cell for cell in cells if not is_missing(cell)]
        require(there, f"{self.path}: column {name!r} is empty; leave it out (--ignore)")
        levels = sorted(set(there)) if all(math.isnan(number(cell)) for cell in there) else []
        if len(levels) > min(MOST, max(2, len(cells) / 2)):  # names, keys, dates: nothing can be learned from each by itself
            raise ValueError(
                f"{self.path}: column {name!r} holds {len(levels)} different texts in {len(cells)} rows, such as {levels[0]!r}, and "
                "each would be an input of its own; leave the column out (--ignore), or write it as numbers or in fewer words"
            )
        made = [f"{name}={level}" for level in levels] or [name]
        made += [f"{name}=?"] if len(there) < len(cells) else []
        for feature in made:
            free = feature == name or feature not in self.columns
            require(
                free, f"{self.path}: the column {feature!r} has the name of an input that is made of {name!r}; call it otherwise"
            )
        return made

    def numbers(self, name: str, fill: float | None = None) -> np.ndarray:
        """A column as numbers, [N] float64, with `fill` in the place of missing cells."""
        cells = self.columns[name]
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:  # the slow way, to find the cell
            values = np.array([number(cell) for cell in cells])
        if fill is not None:
            values[[is_missing(cell) for cell in cells]] = fill
        for row in np.flatnonzero(~usable(values))[:1]:
            refuse_number(f"{self.path}, {self.where(row)}, column {name!r}", cells[row])
        return values

    def encode(self, name: str, known: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
        """A column as classes: positions [N] in the class names, and these."""
        return encode(f"{self.path}, column {name!r}", self.columns[name], self.where, known)

    def features(self, names: Sequence[str], fill: Mapping[str, float]) -> list[np.ndarray]:
        """The inputs of these names, [N] each: a column's numbers, or 1 where a text stands in it."""
        sources = [self._source(name) for name in names]
        known, levels = set(names), dict[str, set[str]]()
        for column, text in sources:
            if text is not None and column not in known:
                levels.setdefault(column, set()).add(text)
        for column, texts in levels.items():
            self._check_texts(column, texts)
        return [
            self.numbers(column, fill.get(column) if f"{column}=?" in known else None)
            if text is None
            else np.array([is_missing(cell) if text == "?" else cell == text for cell in self.columns[column]], dtype=np.float64)
            for column, text in sources
        ]

    def _source(self, feature: str) -> tuple[str, str | None]:
        """The column of an input, and the text which it looks for there; None where it is the number itself."""
        if feature in self.columns:
            return feature, None
        for end in (i for i, sign in enumerate(feature) if sign == "="):
            if feature[:end] in self.columns:
                return feature[:end], feature[end + 1 :]
        self.require(feature.partition("=")[0])
        raise AssertionError("not reached: no such column is refused")

    def _check_texts(self, column: str, levels: set[str]) -> None:
        for row, cell in enumerate(self.columns[column]):
            if ("?" if is_missing(cell) else cell) in levels:
                continue
            place = f"{self.path}, column {column!r}, {self.where(row)}"
            if is_missing(cell):
                refuse_number(place, cell)
            raise ValueError(f"{place}: {cell!r} is not one of the known texts, {listed(sorted(levels - {'?'}))}")


def stacked(columns: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Columns [N] as a matrix [N, F]."""
    return torch.from_numpy(np.stack(columns, axis=1)).to(dtype)


def is_table(path: Path) -> bool:
    """Whether the name of a file ends as one that `CsvFile.read` reads."""
    return path.name.lower().endswith(SUFFIXES)


def _rows(path: Path) -> tuple[list[tuple[int, list[str]]], str]:
    """(line, cells) of every line that is not blank, and the separator; of a single column, a missing cell ("") is a row."""
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", newline="", encoding="utf-8-sig") as file:
            separator = (
                "\t" if ".tsv" in path.suffixes else _separator(file.readline())
            )  # -sig: spreadsheets write a byte order mark
            file.seek(0)
            text = ""  # of the line that was read last

            def lines() -> Iterator[str]:
                """The lines of the file; the last one is remembered."""
                nonlocal text
                for line in file:
                    text = line
                    yield line

            reader = csv.reader(lines(), strict=True, delimiter=separator)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if text.strip()], separator
    except (csv.Error, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read as CSV in UTF-8: {first_line(error)}") from error


def _separator(header: str) -> str:
    """What separates the columns: the sign that is most frequent in the header, outside quotes.

    >>> _separator("width;height;\\"a,b,c,d\\"")
    ';'
    """
    plain = re.sub(r'"[^"]*"', "", header)
    return max(SEPARATORS, key=plain.count)


def _read_parquet(path: Path) -> CsvFile:
    """A Parquet file, by polars or pandas."""
    try:
        import polars  # pyright: ignore[reportMissingImports]

        frame = polars.read_parquet(path)
        columns = {name: frame[name].to_list() for name in frame.columns}
    except ModuleNotFoundError:
        try:
            import pandas  # pyright: ignore[reportMissingImports]

            frame = pandas.read_parquet(path)
        except ImportError:
            raise ValueError(f"{path}: Parquet needs polars or pandas with pyarrow: pip install 'dubito[tables]'") from None
        columns = {str(name): frame[name].tolist() for name in frame.columns}
    cells = {name: [as_cell(value) for value in values] for name, values in columns.items()}
    rows = len(next(iter(cells.values()), []))
    require(rows, f"{path}: there is no row")
    return CsvFile(path, cells, list(range(1, rows + 1)))


def as_cell(value: object) -> str:
    """A value of a data frame as the text that a CSV file would have; missing values are empty.

    >>> import datetime
    >>> as_cell(None), as_cell(float("nan")), as_cell(2.0), as_cell(datetime.date(2024, 5, 1))
    ('', '', '2.0', '2024-05-01')
    """
    text = "" if value is None else str(value).strip()
    return "" if text in ("nan", "NaT", "<NA>", "NaN") else text


def _check_header(path: Path, header: list[str]) -> None:
    named = any(math.isnan(number(cell)) for cell in header)
    require(named, f"{path}: the first line holds numbers, but a header with the names of the columns is needed")
    before = set()
    for position, name in enumerate(header):  # one without a name is most often a row number that pandas wrote
        require(name, f"{path}: column {position + 1} has no name; name it, or write the file without it")
        require(name not in before, f"{path}: two columns are called {name!r}")
        before.add(name)


def _mean(cells: list[str]) -> float:
    """The mean of the cells that are finite numbers; 0 where there is none."""
    values = np.array([number(cell) for cell in cells])
    return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else 0.0
