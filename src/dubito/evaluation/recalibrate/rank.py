"""The quantile of conformal prediction, and what to say where there is none."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from dubito.evaluation.recalibrate.forecasts import refuse
from dubito.tensors.checks import between


def conformal_quantile(scores: Tensor, level: float) -> Tensor:
    r"""The :math:`\lceil (n + 1)\, \mathrm{level} \rceil`-th smallest of n scores along the first axis; infinite if there are fewer.

    >>> conformal_quantile(torch.arange(1.0, 10.0), 0.8), conformal_quantile(torch.arange(1.0, 10.0), 0.95)
    (tensor(8.), tensor(inf))
    """
    if len(scores):
        refuse("a conformal rule", int(scores.isnan().reshape(len(scores), -1).any(-1).sum()), len(scores))
    rank = place(len(scores), level)
    if rank > len(scores):
        return torch.full_like(scores.sum(0), torch.inf)
    return scores.kthvalue(rank, 0).values


def place(n: int, level: float) -> int:
    """The rank of the conformal quantile among n scores, from 1; more than n if there is none."""
    return math.ceil((n + 1) * level - 1e-9)  # less the rounding, by which 10 * 0.9 might be more than 9


def check_level(level: float) -> None:
    """The level must be a probability."""
    between(0, 1, level=level)


def tell(groups: list[tuple[int, str]], level: float, instead: str) -> None:
    """Warn of groups, (examples, name), that are too small for any promise but an empty one."""
    small = [(n, name) for n, name in groups if place(n, level) > n]
    if not small:
        return
    least = math.ceil(level / (1 - level) - 1e-9)
    named = ", ".join(f"{name} ({n})" if name else str(n) for n, name in small[:5]) + (", ..." if len(small) > 5 else "")
    warnings.warn(
        f"too few held-out examples: {named}. A level of {level:g} takes at least {least}; until then the quantile is infinite, and "
        f"what is given is {instead}",
        stacklevel=3,
    )
