"""The norm of a linear operation, by Krylov iteration on the operation itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-6
VECTORS, NUMBERS, ROUNDS = 50, 2**27, 40  # vectors that are kept, numbers they may hold, and how often it begins anew


def operator_norm(apply: Callable[[Tensor], Tensor], like: Tensor, *, tolerance: float = TOLERANCE, seed: int = 0) -> float:
    r"""The largest singular value of an affine function x -> A x + b of tensors like `like`,

    .. math:: \max_v \lVert A v \rVert / \lVert v \rVert.

    A need not be had as a matrix: vectors go through the function, and back by its gradient, and the best of all they span is kept
    (Lanczos; power iteration with a memory). It comes from below, to the relative `tolerance`. Of a convolution this is the norm of
    what it does to an image of that size; the norm of its kernel, reshaped to a matrix, is another number.

    >>> round(operator_norm(lambda x: x @ torch.diag(torch.tensor([1.0, 3.0])) + 5, torch.zeros(1, 2)), 6)
    3.0
    """
    source = torch.Generator().manual_seed(seed)
    v = torch.randn(like.shape, generator=source, dtype=torch.float64).to(like.device, like.dtype).flatten()
    with torch.enable_grad():
        x = torch.zeros_like(like).requires_grad_()
        y = apply(x)
        if not y.requires_grad:
            return 0.0
        u = torch.zeros_like(y).requires_grad_()
        (back,) = torch.autograd.grad(y, x, u, create_graph=True)  # A^T u, of which the gradient by u along v is A v

    def _twice(v: Tensor) -> Tensor:
        (ahead,) = torch.autograd.grad(back, u, v.view(like.shape), retain_graph=True)
        (again,) = torch.autograd.grad(y, x, ahead, retain_graph=True)
        return again.flatten()

    most = max(2, min(VECTORS, v.numel(), NUMBERS // v.numel()))
    square = 0.0
    for _ in range(ROUNDS):
        square, v, rest = _lanczos(_twice, v, most)
        if rest <= tolerance * square or most >= like.numel():
            break
    return max(square, 0.0) ** 0.5


def _lanczos(twice: Callable[[Tensor], Tensor], v: Tensor, most: int) -> tuple[float, Tensor, float]:
    """The largest eigenvalue of A^T A seen from v within so many products, its vector, and how far it is from being one."""
    basis = v.new_empty(most, v.numel())
    basis[0] = v / v.norm().clamp_min(torch.finfo(v.dtype).tiny)
    diagonal: list[float] = []
    beside: list[float] = []
    for k in range(1, most + 1):
        w = twice(basis[k - 1])
        diagonal.append(float(w @ basis[k - 1]))
        for _ in range(2):  # what rounding brings back of the earlier ones is taken out
            w = w - basis[:k].mT @ (basis[:k] @ w)
        length = float(w.norm())
        beside.append(length)
        if length <= 1e-12 * max(max(diagonal), torch.finfo(v.dtype).tiny) or k == most:
            break
        basis[k] = w / length
    k = len(diagonal)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i in range(k - 1):
        matrix[i, i + 1] = matrix[i + 1, i] = beside[i]
    values, vectors = torch.linalg.eigh(matrix)
    best = vectors[:, -1]
    return float(values[-1]), basis[:k].mT @ best.to(v), beside[-1] * abs(float(best[-1]))
