"""Which weights share something: rows, columns, filters, kernels, gates, tensors, layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

By = Literal["all", "layer", "tensor", "row", "column", "kernel", "gate", "weight"]
RECURRENT = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of which the rows are those of the gates, one after another


@dataclass(frozen=True)
class Groups:
    """A partition of the weights, described once for all priors that share a scale within groups.

    "all" weights together; the leaves of a "layer" (a module: its weight and bias) together; every "tensor", "row" (an output unit, or
    the filter of a convolution), "column" (an input unit or channel), "kernel" (the spatial weights from one channel to another),
    "gate" (of an LSTM, or with `gates=3` of a GRU; leaves that are not of a recurrent layer are one group), or "weight" on its own. Of
    a transposed convolution, whose inputs come first, rows and columns are the other way round.

    >>> import torch
    >>> Groups("column").rows("weight", torch.arange(6.0).reshape(2, 3))
    tensor([[0., 3.],
            [1., 4.],
            [2., 5.]])
    """

    by: By = "tensor"
    gates: int = 4

    def __post_init__(self):
        if self.by not in get_args(By):
            raise ValueError(f"weights are grouped by one of {', '.join(get_args(By))}; got {self.by!r}")

    @staticmethod
    def of(value: str | Groups) -> Groups:
        """A description, or one by its word."""
        return value if isinstance(value, Groups) else Groups(value)  # pyright: ignore[reportArgumentType]

    def key(self, name: str) -> str:
        """What names the groups of a leaf; leaves with the same key share a group."""
        return {"all": "", "layer": name.rpartition(".")[0]}.get(self.by, name)

    def rows(self, name: str, leaf: Tensor) -> Tensor:
        """The weights of a leaf by group, [G, n]."""
        if self.by == "weight" or (self.by == "kernel" and leaf.ndim < 3):
            return leaf.reshape(-1, 1)
        if self.by == "kernel":
            return leaf.reshape(leaf.shape[0] * leaf.shape[1], -1)
        if self.by == "row" and leaf.ndim:
            return leaf.reshape(leaf.shape[0], -1)
        if self.by == "column" and leaf.ndim > 1:
            return leaf.movedim(1, 0).reshape(leaf.shape[1], -1)
        if self.by == "gate" and any(word in name for word in RECURRENT):
            self._check_gates(name, leaf)
            return leaf.reshape(self.gates, -1)
        return leaf.reshape(1, -1)

    def _check_gates(self, name: str, leaf: Tensor) -> None:
        # a state has as many units as each gate has rows, or fewer where it is projected: a GRU's rows may be four parts, too
        short = "weight_hh" in name and leaf.shape[0] < self.gates * leaf.shape[1]
        if leaf.shape[0] % self.gates or short:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, which are not {self.gates} gates: give Groups('gate', gates=...), 3 for a GRU"
            )

    def spread(self, name: str, values: Tensor, leaf: Tensor) -> Tensor:
        """A value for every group, [G], as one for every weight, in the shape of the leaf: the inverse of `rows`."""
        wide = values.unsqueeze(1).expand(len(values), leaf.numel() // len(values))
        if self.by == "column" and leaf.ndim > 1:
            return wide.reshape(leaf.shape[1], leaf.shape[0], *leaf.shape[2:]).movedim(0, 1)
        return wide.reshape(leaf.shape)
