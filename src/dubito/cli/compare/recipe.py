"""The default recipe for tables as a row: what `dubito fit TABLE` fits, by the same code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.apps import tables
from dubito.apps.tables.cells import is_numeric
from dubito.apps.tables.frames import as_frame
from dubito.evaluation.judge.stream import Predictor
from dubito.evaluation.problems import Columns, Problem, Rows, Split
from dubito.tensors import store
from dubito.tensors.checks import positive, require


@dataclass(frozen=True)
class TableRecipe:
    """`dubito.fit_table`: networks and other experts, calibrated by out-of-fold predictions. It chooses all else by itself."""

    budget: float | None = None  # seconds; None: as many as the size of the table suggests

    def __post_init__(self):
        positive(budget=self.budget)

    def fit(self, problem: Problem, split: Split, *, seed: int) -> tuple[Predictor, Split]:
        """Predictions, and the split on which to judge them: numbers of rows take the place of the inputs."""
        columns, rows = columns_of(problem, split)
        model = tables.fit_table(
            take(columns.cells, rows.train), columns.targets, kind=problem.kind, budget=self.budget, seed=seed, show=False
        )
        unseen = [name for name in problem.outputs if name not in model.outputs]
        require(problem.kind == "regression" or not unseen, f"no training row has the class {', '.join(unseen)}")

        def predict(which: Tensor) -> Any:
            """The predictive of these rows, in the units of the target."""
            return model.predict(take(columns.cells, which))

        judged = {"x_train": rows.train, "x_test": rows.test, "unfamiliar": rows.unfamiliar}
        return predict, split._replace(**judged, shift=None, scale=None)


def cells_checksum(columns: Columns) -> str:
    """A hash of all cells."""
    lists = {name: texts(raw) for name, raw in columns.cells.items()}
    return store.checksum({}, json.dumps([lists, columns.targets]))


def columns_of(problem: Problem, split: Split) -> tuple[Columns, Rows]:
    """The columns of a table, and which rows are which. Where there is no file, the inputs of the network are the columns."""
    if problem.columns is not None and split.rows is not None:
        return problem.columns(), split.rows
    parts = [split.x_train, split.x_test, *split.unfamiliar.values()]
    require(
        split.x_train.ndim == 2, f"table: the recipe is for tables; {problem.name} has inputs {list(split.x_train.shape[1:])}"
    )
    x, y = torch.cat(parts), split.y_train
    train, test, *far = torch.arange(len(x)).split([len(part) for part in parts])
    rest = len(x) - len(train)  # whose targets the recipe does not see
    if problem.kind == "classification":
        targets: dict[str, Any] = {"y": [problem.outputs[k] for k in y.tolist()] + [""] * rest}
    else:
        assert split.shift is not None
        assert split.scale is not None
        values = torch.cat(
            [split.shift + split.scale * y.double(), torch.full((rest, y.shape[1]), math.nan, dtype=torch.float64)]
        )
        targets = {f"y{i}": column.numpy() for i, column in enumerate(values.unbind(1))}
    return Columns({**as_frame(x), **targets}, tuple(targets)), Rows(train, test, dict(zip(split.unfamiliar, far, strict=True)))


def take(cells: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some rows of all columns.

    >>> take({"a": ["x", "y", "z"], "b": np.arange(3)}, torch.tensor([2, 0]))
    {'a': ['z', 'x'], 'b': array([2, 0])}
    """
    which = rows.tolist()
    return {name: raw[which] if is_numeric(raw) else [raw[i] for i in which] for name, raw in cells.items()}


def joined(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of the first table, with the rows of the others below; a column with text in any of them is text.

    >>> joined([{"a": np.array([1.0]), "y": ["no"]}, {"a": np.array([2.0])}])
    {'a': array([1., 2.]), 'y': ['no', '']}
    """
    below: dict[str, Any] = {}
    for name in frames[0]:
        parts = [frame[name] if name in frame else missing(frames[0][name], frame) for frame in frames]
        numeric = all(map(is_numeric, parts))
        below[name] = np.concatenate(parts) if numeric else [cell for part in parts for cell in texts(part)]
    return below


def missing(like: Any, frame: Mapping[str, Any]) -> Any:
    """A column of empty cells for a table."""
    rows = len(next(iter(frame.values())))
    return np.full(rows, np.nan) if is_numeric(like) else [""] * rows


def texts(raw: Any) -> list[str]:
    """A column as cells of text."""
    return ["" if math.isnan(value) else f"{value:.17g}" for value in raw.tolist()] if is_numeric(raw) else list(raw)
