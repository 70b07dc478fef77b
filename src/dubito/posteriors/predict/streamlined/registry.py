"""The registry of rules, one for each operation: from the moments of what goes in to the moments of what comes out.

A rule is called as the operation is, with `Moments` (or `Weight`, where a random weight is given directly) in the place of those
tensors that are random, and returns `Moments`. It may take more keywords, which it is given where it names them: `adjoint` (variances
then carry no gradient; the mean must), `axis` (in the adjoint: that of the examples in what comes out), `rank` (whether directions are
carried: 0 none, -1 all, else how many), `taylor` (first order), `square` (of a weight that is certain, formed once), `origin`
(the layer that made the values of an attention, see `origin.py`) and `kernel` (the convolution before a pooling, see `Kernel`).

>>> import torch
>>> from dubito.posteriors.predict.streamlined import Moments, rule
>>> from dubito.posteriors.predict.streamlined.rules.activations import by_quadrature
>>> @rule(torch.sinc)
... def sinc(x, *, adjoint=False, axis=None):
...     return by_quadrature(torch.sinc, x, adjoint=adjoint, axis=axis)
>>> sinc(Moments(torch.zeros(1), torch.full((1,), 0.01))).mean          # 1 - pi^2 0.01 / 6 + ...
tensor([0.9838])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dubito.posteriors.predict.streamlined.operations import canonical

Sizes = int | Sequence[int]  # of a kernel, a stride or a padding: one number for all axes, or one for each
Dims = int | Sequence[int] | None  # axes of a reduction; None: all
RULES: dict[str, Callable[..., Any]] = {}
KEYWORDS: dict[str, frozenset[str]] = {}  # of OPTIONAL, those that a rule takes
OPTIONAL = {"adjoint", "axis", "kernel", "origin", "rank", "square", "taylor"}


def rule(*operations: Callable | str) -> Callable[[Callable], Callable]:
    """Register a rule for operations, given as functions or by name; `torch.relu`, `F.relu`, `x.relu()` and `x.relu_()` are one."""

    def _register(function: Callable) -> Callable:
        for operation in operations:
            name = operation if isinstance(operation, str) else canonical(operation)
            RULES[name] = function
            KEYWORDS[name] = frozenset(inspect.signature(function).parameters) & OPTIONAL
        return function

    return _register


def from_end(dim: Dims, ndim: int) -> tuple[int, ...]:
    """Axes counted from the end, so that they hold for directions [R, ...] too."""
    axes = range(ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    return tuple(axis if axis < 0 else axis - ndim for axis in axes)
