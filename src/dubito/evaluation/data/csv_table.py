"""CSV files with a header: columns of numbers, and columns of text, which are one-hot encoded."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.cells import encode, first_line, is_missing, listed, number, refuse_number, require_name, usable
from dubito.tensors.checks import require

MOST = 100  # different texts of a column, each of which is an input


@dataclass(frozen=True)
class CsvFile:
    """The stripped cells of a file by column, and the line of each row in the file."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]

    @staticmethod
    def read(path: Path) -> CsvFile:
        """Read and check a file: a header with different names, and rows of as many cells."""
        numbered = _rows(path)
        require(numbered, f"{path}: the file is empty")
        header = numbered[0][1]
        _check_header(path, header)
        require(len(numbered) > 1, f"{path}: there is a header but no row")
        for row, (line, cells) in enumerate(numbered[1:]):
            if len(cells) != len(header):
                raise ValueError(f"{path}, row {row + 1} (line {line}): {len(cells)} cells, the header has {len(header)}")
        columns = zip(*(cells for _, cells in numbered[1:]), strict=True)
        return CsvFile(path, dict(zip(header, map(list, columns), strict=True)), [line for line, _ in numbered[1:]])

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
        for column in dict.fromkeys(column for column, text in sources if text is not None and column not in names):
            self._check_texts(column, [text for other, text in sources if other == column and text is not None])
        return [
            self.numbers(column, fill.get(column) if f"{column}=?" in names else None)
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

    def _check_texts(self, column: str, levels: Sequence[str]) -> None:
        for row, cell in enumerate(self.columns[column]):
            if ("?" if is_missing(cell) else cell) in levels:
                continue
            place = f"{self.path}, column {column!r}, {self.where(row)}"
            if is_missing(cell):
                refuse_number(place, cell)
            raise ValueError(f"{place}: {cell!r} is not one of the known texts, {listed(levels)}")


def stacked(columns: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Columns [N] as a matrix [N, F]."""
    return torch.from_numpy(np.stack(columns, axis=1)).to(dtype)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """(line, cells) of every line that is not blank; of a single column, a missing cell ("") is a row, and a blank line is not."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a byte order mark
            text = ""  # of the line that was read last

            def lines() -> Iterator[str]:
                """The lines of the file; the last one is remembered."""
                nonlocal text
                for line in file:
                    text = line
                    yield line

            reader = csv.reader(lines(), strict=True)
            return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if text.strip()]
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as CSV in UTF-8: {first_line(error)}") from error


def _check_header(path: Path, header: list[str]) -> None:
    named = any(math.isnan(number(cell)) for cell in header)
    require(named, f"{path}: the first line holds numbers, but a header with the names of the columns is needed")
    single = len(header) == 1 and (";" in header[0] or "\t" in header[0])
    require(not single, f"{path}: the header is one column, {header[0]!r}: separate the columns by commas")
    for position, name in enumerate(header):  # one without a name is most often a row number that pandas wrote
        require(name, f"{path}: column {position + 1} has no name; name it, or write the file without it")
        require(name not in header[:position], f"{path}: two columns are called {name!r}")


def _mean(cells: list[str]) -> float:
    """The mean of the cells that are finite numbers; 0 where there is none."""
    values = np.array([number(cell) for cell in cells])
    return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else 0.0
