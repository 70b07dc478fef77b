"""A fitted folder: a recipe and a posterior, which together predict in the original units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from tyro.conf import Positional, arg

from dubito.apps.tables import TableModel
from dubito.cli.commands.errors import UsageError, usage_errors
from dubito.cli.commands.notes import RELY, calibration_note
from dubito.cli.commands.recipe import NAME, Recipe
from dubito.evaluation.data import Table, table
from dubito.evaluation.data.cells import require_name
from dubito.posteriors import Posterior, io
from dubito.posteriors.predictive import Predictive, concatenate
from dubito.tensors.checks import require
from dubito.tensors.processes import own_device

POSTERIOR = "posterior.safetensors"
TABLE = "table.safetensors"  # of a fit without a method
CHECKPOINT = "checkpoint"
ROWS = 1024  # rows predicted at a time


@dataclass(frozen=True)
class Reading:
    """The fitted folder, and the data to predict."""

    folder: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """A folder that `dubito fit` wrote."""
    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """A CSV file with the same input columns, in any order (others are ignored), or an NPZ file with x."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """The factory of your own network, if it was fitted with one. It is not read from the folder: files must not choose code to run."""
    draws: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: set by the method)")] = None
    """Number of posterior draws to average."""
    device: str = "cpu"
    """Device to run on: cpu, cuda, cuda:1 ..."""

    def __post_init__(self):
        require(self.draws is None or self.draws >= 1, f"--draws must be at least 1; got {self.draws}")

    def open(self) -> Fitted | FittedTable:
        """Read the folder."""
        path = self.folder / NAME
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: there is no such folder")
        if (self.folder / TABLE).is_file():
            return self._open_table()
        if not path.is_file():
            if (self.folder / CHECKPOINT).is_dir():
                raise UsageError(f"{self.folder}: this fit is not finished; continue it with `dubito fit ... --resume`")
            raise UsageError(f"{self.folder}: not a folder that `dubito fit` wrote: it has no {NAME}")
        recipe = Recipe.read(path)
        model = recipe.model(self.network)
        model.network.to(find_device(self.device))
        with usage_errors(ValueError, FileNotFoundError):
            posterior = io.load(self.folder / POSTERIOR, model)
        return Fitted(recipe, posterior, self.draws)

    def _open_table(self) -> FittedTable:
        given = {"--network": self.network, "--draws": self.draws, "--device": None if self.device == "cpu" else self.device}
        for flag, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{flag} {value}: {self.folder} was fitted without a method, and all its networks are used on the CPU"
                )
        with usage_errors(ValueError):
            return FittedTable(TableModel.load(self.folder / TABLE))


@dataclass(frozen=True)
class Fitted:
    """A posterior fitted to standardized data, which predicts in the original units."""

    recipe: Recipe
    posterior: Posterior
    draws: int | None = None

    def read(self, path: Path, *, targets: bool) -> Table:
        """Read data with the same columns; they are not standardized yet."""
        r, wide = self.recipe, torch.float64
        with usage_errors(ValueError):
            if targets:
                classes = r.outputs if r.kind == "classification" else None
                found = table(path, r.targets, kind=r.kind, features=r.features or None, fill=r.fill, classes=classes, dtype=wide)
            else:
                found = table(path, (), features=r.features or None, fill=r.fill, dtype=wide)
        if found.x.shape[1:] != r.shape:
            raise UsageError(f"{path}: inputs must have the shape {list(r.shape)}; got {list(found.x.shape[1:])}")
        if r.kind == "regression" and found.y is not None and found.y.shape[1:] != (len(r.outputs),):
            raise UsageError(f"{path}: targets must have the shape [N, {len(r.outputs)}]; got {list(found.y.shape)}")
        return found

    @property
    def kind(self) -> str:
        """Regression or classification."""
        return self.recipe.kind

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the classes, or of the targets."""
        return self.recipe.outputs

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.recipe.method.partition("(")[0]

    def remarks(self) -> Iterator[str]:
        """What to know before the predictions are used."""
        yield from calibration_note(self.recipe.metrics, self.recipe.training.get("held_out_rows", 0))

    def answers(self, path: Path) -> Iterator[tuple[Predictive, list[str]]]:
        """Predictives of consecutive blocks of rows, and no notes."""
        return ((p, []) for p in self.predictives(self.read(path, targets=False).x))

    def judged(self, path: Path) -> tuple[Predictive, Tensor]:
        """The predictive of all rows, and the targets."""
        found = self.read(path, targets=True)
        assert found.y is not None
        return self.predict(found.x), found.y

    def predictives(self, x: Tensor) -> Iterator[Predictive]:
        """Predictives of consecutive blocks of rows, on the CPU."""
        for rows in x.split(ROWS):
            yield self._original(self.posterior.predict(self.recipe.x.apply(rows), draws=self.draws).to("cpu"))

    def predict(self, x: Tensor) -> Predictive:
        """The predictive of all rows."""
        return concatenate(list(self.predictives(x)))

    def _original(self, p: Predictive) -> Predictive:
        return p if self.recipe.y is None else self.recipe.y.undo(p)


@dataclass(frozen=True)
class FittedTable:
    """A table that was fitted without a method."""

    model: TableModel
    method: str = "tables"

    @property
    def kind(self) -> str:
        """Regression or classification."""
        return self.model.kind

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the classes, or of the targets."""
        return self.model.outputs

    @property
    def posterior(self) -> Posterior:
        """What Bayes gave."""
        return self.model.posterior

    def remarks(self) -> Iterator[str]:
        """What to know before the predictions are used."""
        yield from calibration_note(self.model.scores, len(self.model.out_of_fold.y), "out-of-fold", RELY)

    def answers(self, path: Path) -> Iterator[tuple[Predictive, list[str]]]:
        """The predictive of all rows, and a note on each."""
        with usage_errors(ValueError, about=str(path)):
            yield self.model.answer(path)

    def judged(self, path: Path) -> tuple[Predictive, Tensor]:
        """The predictive of all rows, and the targets."""
        with usage_errors(ValueError):
            frame = self.model.read(path)
            for name in self.model.targets:
                require_name(path, name, frame, "column")
            y = self.model.encode_targets(frame)
        unknown = (y < 0) if self.model.classes else ~y.isfinite().all(1)
        if bool(unknown.any()):
            row = int(unknown.nonzero()[0])
            raise UsageError(f"{path}, row {row + 1}: the target is missing, or is not one that the training had")
        with usage_errors(ValueError, about=str(path)):
            return self.model.predict(frame), y


def find_device(device: str) -> torch.device:
    """The device of this name; a UsageError if it cannot be used."""
    try:
        found = own_device(torch.device(device))
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {device}: this device cannot be used: {str(error).splitlines()[0]}") from None
    return found
