"""A fitted folder: a recipe and a posterior, which together predict in the user's own units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from tyro.conf import Positional, arg

from dubito.cli.commands.errors import UsageError, usage_errors
from dubito.cli.commands.recipe import NAME, Recipe
from dubito.evaluation.data import Table, table
from dubito.posteriors import Posterior, io
from dubito.posteriors.predictive import Predictive, concatenate

POSTERIOR = "posterior.safetensors"
CHECKPOINT = "checkpoint"
ROWS = 1024  # predicted at a time


@dataclass(frozen=True)
class Reading:
    """What to predict, and with what."""

    folder: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """A folder that `dubito fit` wrote."""
    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """A CSV file with the same input columns (in any order, others are not looked at), or an NPZ file with x."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """The factory of your own network, if it was fitted with one: a file must not choose code to run."""
    draws: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: as many as the method chose)")] = None
    """How many draws of the posterior to average."""
    device: str = "cpu"
    """Where to run the network: cpu, cuda, cuda:1 ..."""

    def __post_init__(self):
        if self.draws is not None and self.draws < 1:
            raise ValueError(f"there is at least one draw; got --draws {self.draws}")

    def open(self) -> Fitted:
        """Read the folder."""
        path = self.folder / NAME
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: there is no such folder")
        if not path.is_file():
            unfinished = (self.folder / CHECKPOINT).is_dir()
            raise UsageError(
                f"{self.folder}: "
                + (
                    "this fit is not finished: go on with it by `dubito fit ... --resume`"
                    if unfinished
                    else f"not a folder that `dubito fit` wrote: it has no {NAME}"
                )
            )
        recipe = Recipe.read(path)
        model = recipe.model(self.network)
        model.network.to(find_device(self.device))
        with usage_errors(ValueError, FileNotFoundError):
            posterior = io.load(self.folder / POSTERIOR, model)
        return Fitted(recipe, posterior, self.draws)


@dataclass(frozen=True)
class Fitted:
    """A posterior of standardised data, seen in the units of the original data."""

    recipe: Recipe
    posterior: Posterior
    draws: int | None = None

    def read(self, path: Path, *, targets: bool) -> Table:
        """Data of the same kind, not yet standardised."""
        r, wide = self.recipe, torch.float64
        with usage_errors(ValueError):
            if targets:
                classes = r.outputs if r.kind == "classification" else None
                found = table(path, r.targets, kind=r.kind, features=r.features or None, fill=r.fill, classes=classes, dtype=wide)
            else:
                found = table(path, (), features=r.features or None, fill=r.fill, dtype=wide)
        if found.x.shape[1:] != r.shape:
            raise UsageError(f"{path}: an input has the shape {list(found.x.shape[1:])}, where {list(r.shape)} is needed")
        if r.kind == "regression" and found.y is not None and found.y.shape[1:] != (len(r.outputs),):
            raise UsageError(f"{path}: the targets have the shape {list(found.y.shape)}, where [N, {len(r.outputs)}] is needed")
        return found

    def predictives(self, x: Tensor) -> Iterator[Predictive]:
        """The predictives of some rows at a time, on the CPU."""
        for rows in x.split(ROWS):
            yield self._original(self.posterior.predict(self.recipe.x.apply(rows), draws=self.draws).to("cpu"))

    def predict(self, x: Tensor) -> Predictive:
        """One predictive of all rows."""
        return concatenate(list(self.predictives(x)))

    def _original(self, p: Predictive) -> Predictive:
        return p if self.recipe.y is None else self.recipe.y.undo(p)


def find_device(device: str) -> torch.device:
    """A device that exists here."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {device}: it cannot be used here: {str(error).splitlines()[0]}") from None
    return found
