"""Eigenvalues of symmetric matrices, also where a solver gives up."""

from __future__ import annotations

import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., n], the smallest first, and eigenvectors [..., n, n] of symmetric matrices.

    Some matrices that are nearly singular defeat the solvers of a GPU, or single precision: these are tried again in double precision,
    and then on the CPU.

    >>> eigh(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))[0]
    tensor([1., 2.])
    """
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        double = matrix.double()
        try:
            values, vectors = torch.linalg.eigh(double)
        except torch.linalg.LinAlgError:
            values, vectors = torch.linalg.eigh(double.cpu())
        return values.to(matrix), vectors.to(matrix)
