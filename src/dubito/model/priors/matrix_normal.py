"""Matrices of weights with correlated rows and columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dubito.model.priors.prior import Prior, source_for, zero
from dubito.tensors.tree import Params, full_precision


@dataclass(frozen=True, eq=False)
class MatrixNormal(Prior):
    r""":math:`W \sim MN(0, U, V)`: :math:`\mathrm{Cov}(w_{ai}, w_{bj}) = U_{ab} V_{ij}`, for the output units a, b and inputs i, j of a
    layer.

    `rows` is U [O, O] and `columns` V [I, I]; None is the identity, which fits any size. A convolution's filters are rows, its input
    channels and positions the columns, [I k k]. A leaf with one axis is a single column. It is for leaves of one shape:
    `ByName({"^0.weight": MatrixNormal(rows=...), "": Normal()})`.

    >>> prior = MatrixNormal(columns=torch.eye(2) * 4.0)
    >>> prior.log_prob({"w": torch.zeros(3, 2)})  # 6 normals of scale 2
    tensor(-9.6725)
    """

    rows: Tensor | None = None
    columns: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self):
        for name, matrix in (("rows", self.rows), ("columns", self.columns)):
            if matrix is None:
                continue
            square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
            if not square or not torch.allclose(matrix, matrix.mT) or torch.linalg.cholesky_ex(matrix.double())[1]:
                raise ValueError(f"`{name}` is a covariance: a square matrix, symmetric and positive definite")
        _ = self._roots  # now, and not in the middle of a trace

    @cached_property
    def _roots(self) -> tuple[Tensor | None, Tensor | None]:
        """Cholesky factors of both, in float64."""
        up, left = (None if m is None else torch.linalg.cholesky(m.double()) for m in (self.rows, self.columns))
        return up, left

    def _shaped(self, name: str, leaf: Tensor) -> Tensor:
        matrix = leaf.reshape(leaf.shape[0], -1) if leaf.ndim else leaf.reshape(1, 1)
        for side, axis, root in zip(("rows", "columns"), (0, 1), self._roots, strict=True):
            if root is not None and len(root) != matrix.shape[axis]:
                raise ValueError(
                    f"{name} is {list(matrix.shape)} as a matrix, but the prior's {side} are {list(root.shape)}: give this prior to "
                    "leaves of its size alone, as ByName({'^0.weight': MatrixNormal(...), '': Normal()})"
                )
        return matrix

    def _whitened(self, name: str, leaf: Tensor) -> tuple[Tensor, Tensor]:
        """The leaf as standard normals, [O, I], and the log of what the determinant takes."""
        matrix, (up, left) = self._shaped(name, full_precision(leaf)), self._roots
        logs = torch.zeros((), device=leaf.device)
        if up is not None:
            logs = logs + matrix.shape[1] * up.diagonal().log().sum().to(matrix)
            matrix = torch.linalg.solve_triangular(up.to(matrix), matrix, upper=False)
        if left is not None:
            logs = logs + matrix.shape[0] * left.diagonal().log().sum().to(matrix)
            matrix = torch.linalg.solve_triangular(left.mT.to(matrix), matrix, upper=True, left=False)
        return matrix, logs

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the matrix normal distribution."""
        total = zero(params)
        for name, leaf in params.items():
            white, logs = self._whitened(name, leaf)
            total = total - 0.5 * white.square().sum() - logs - 0.5 * leaf.numel() * math.log(2 * math.pi)
        return total

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """For independent weights only the diagonals of both precisions are needed beside the mean."""
        if not independent:
            return None
        total, (up, left) = self.log_prob(mean), self._roots
        for name, leaf in variance.items():
            matrix = self._shaped(name, leaf)
            for axis, root in ((1, up), (0, left)):
                if root is not None:
                    matrix = matrix * torch.cholesky_inverse(root).diagonal().to(matrix).unsqueeze(axis)
            total = total - 0.5 * matrix.sum()
        return total

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """A Z B^T with roots A and B of the two covariances and standard normal Z."""
        source, (up, left) = source_for(like, generator), self._roots
        drawn: Params = {}
        for name, leaf in like.items():
            matrix = self._shaped(name, torch.empty_like(leaf).normal_(generator=source))
            matrix = matrix if up is None else up.to(matrix) @ matrix
            drawn[name] = (matrix if left is None else matrix @ left.mT.to(matrix)).reshape(leaf.shape)
        return drawn

    def units(self, params: Params) -> Params:
        """Standard deviations, from the diagonals of both covariances."""
        found: Params = {}
        for name, leaf in params.items():
            matrix = self._shaped(name, torch.ones_like(leaf))
            for axis, cov in ((1, self.rows), (0, self.columns)):
                if cov is not None:
                    matrix = matrix * cov.diagonal().sqrt().to(matrix).unsqueeze(axis)
            found[name] = matrix.reshape(leaf.shape)
        return found
