"""Rules, one for each operation: from the moments of what goes in to the moments of what comes out.

A rule is called as the operation is, with `Moments` (or `Weight`, where a random weight is given directly) in the place of those
tensors that are random, and returns `Moments`. It may take more keywords, which it is given where it names them: `adjoint` (variances
then carry no gradient; the mean must), `axis` (in the adjoint: that of the examples in what comes out), `rank` (whether directions are
carried: 0 none, -1 all, else how many), `taylor` (first order), `square` (of a weight that is certain, formed once) and `origin`
(the layer that made the values of an attention, see `origin.py`).

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
from collections.abc import Callable
from typing import Any

from dubito.posteriors.predict.streamlined.trace import canonical

RULES: dict[str, Callable[..., Any]] = {}
KEYWORDS: dict[str, frozenset[str]] = {}  # of TOLD, those that a rule takes
TOLD = {"adjoint", "axis", "origin", "rank", "shared", "square", "taylor"}


def rule(*operations: Callable | str) -> Callable[[Callable], Callable]:
    """Register a rule for operations, given as functions or by name; `torch.relu`, `F.relu`, `x.relu()` and `x.relu_()` are one."""

    def register(function: Callable) -> Callable:
        for operation in operations:
            name = operation if isinstance(operation, str) else canonical(operation)
            RULES[name] = function
            KEYWORDS[name] = frozenset(inspect.signature(function).parameters) & TOLD
        return function

    return register
