"""NPZ files with the inputs in the array x and the targets in another."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.cells import encode, first_line, refuse_number, require_name, usable
from dubito.tensors.checks import require


@dataclass(frozen=True)
class NpzFile:
    """Arrays of a file by name."""

    path: Path
    arrays: dict[str, np.ndarray]

    @staticmethod
    def read(path: Path, names: Sequence[str]) -> NpzFile:
        """Read the arrays of these names, which must be there. Pickled objects are refused."""
        require(zipfile.is_zipfile(path), f"{path}: not an NPZ file")
        try:
            with np.load(path, allow_pickle=False) as file:
                there = list(file.files)
                arrays = {name: file[name] for name in names if name in there}
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read as arrays of numbers or text: {first_line(error)}") from error
        for name in names:
            require_name(path, name, there, "array")
        return NpzFile(path, arrays)

    def numbers(self, name: str, dtype: torch.dtype) -> Tensor:
        """An array of finite numbers as a tensor."""
        array = self.arrays[name]
        require(array.dtype.kind in "biuf", f"{self.path}: {name} holds {array.dtype}, not numbers")
        for index in np.argwhere(~usable(array))[:1].tolist():
            refuse_number(f"{self.path}, {name}[{', '.join(map(str, index))}]", str(array[tuple(index)]))
        return torch.from_numpy(array.astype(np.float64 if dtype == torch.float64 else np.float32)).to(dtype)

    def inputs(self, features: Sequence[str] | None, dtype: torch.dtype) -> tuple[Tensor, tuple[str, ...]]:
        """x, and the names of its columns: `features`, or x0, x1, ...; none where x is not a matrix."""
        shape = self.arrays["x"].shape
        something = len(shape) >= 2 and self.arrays["x"].size
        require(something, f"{self.path}: x must be [N, F] or [N, ...] with something in it, its shape is {shape}")
        x = self.numbers("x", dtype)
        names = tuple(f"x{i}" for i in range(x.shape[1])) if x.ndim == 2 else ()
        if features is None:
            return x, names
        require(
            len(features) == len(names), f"{self.path}: x has the shape {tuple(x.shape)}, where [N, {len(features)}] is needed"
        )
        return x, tuple(features)

    def targets(self, name: str, dtype: torch.dtype) -> Tensor:
        """Targets of a regression, [N, C]; one number a row is [N, 1]."""
        self._check_rows(name)
        values = self.numbers(name, dtype)
        return values.unsqueeze(1) if values.ndim == 1 else values

    def encode(self, name: str, known: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
        """An array as classes: positions [N] in the class names, and these."""
        self._check_rows(name)
        y = self.arrays[name]
        require(y.ndim == 1, f"{self.path}: the classes in {name} must be [N], their shape is {y.shape}")
        labels = [str(label).strip() for label in y.tolist()]
        return encode(f"{self.path}, {name}", labels, lambda row: f"row {row + 1}", known)

    def _check_rows(self, name: str) -> None:
        x, y = self.arrays["x"], self.arrays[name]
        require(y.shape[:1] == x.shape[:1], f"{self.path}: x has {len(x)} rows, but {name} has the shape {y.shape}")
