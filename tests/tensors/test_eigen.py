"""Eigenvalues where a solver gives up."""

from __future__ import annotations

import pytest
import torch

from dubito.tensors.eigen import eigh


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_solver_that_gives_up_is_asked_again_in_double_precision(monkeypatch, dtype):
    solve, asked = torch.linalg.eigh, []

    def stubborn(matrix):
        asked.append(matrix.dtype)
        if len(asked) == 1:
            raise torch.linalg.LinAlgError("did not converge")
        return solve(matrix)

    matrix = torch.randn(3, 4, 4, dtype=dtype)
    matrix = matrix @ matrix.mT
    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    values, vectors = eigh(matrix)
    assert asked == [dtype, torch.float64]
    assert values.dtype == vectors.dtype == dtype
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mT, matrix, rtol=1e-4, atol=1e-4)
