"""Ranks in the place of values: what is found with them holds for any distribution, also one without a variance."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def normal_scores(x: Tensor) -> Tensor:
    r""":math:`\Phi^{-1}\big((r - \tfrac38) / (N + \tfrac14)\big)` for the rank r of an entry among the N of its row, [P, ...].

    Equal entries share the mean of their ranks: a rejected proposal repeats a draw, so that there are many of them.

    >>> normal_scores(torch.tensor([[3.0, -1.0, 3.0, 100.0]], dtype=torch.float64))
    tensor([[ 0.0000, -1.0491,  0.0000,  1.0491]], dtype=torch.float64)
    """
    return scored(x)[0]


def scored(x: Tensor) -> tuple[Tensor, Tensor]:
    """(the normal scores, the median of every row)."""
    rows = x.flatten(1)
    count = rows.shape[1]
    order = _argsort(rows)
    values = rows.gather(1, order)
    differ = values[:, 1:] != values[:, :-1]
    table = _scores(count).to(x.device)  # of the doubled ranks, which are whole
    if bool(differ.all()):
        scores = table[::2].expand_as(rows)
    else:
        first = torch.cat([differ.new_ones(len(rows), 1), differ], 1).flatten().nonzero().squeeze(1)  # of every group of equals
        size = torch.diff(first, append=first.new_tensor([rows.numel()]))
        scores = table[2 * (first % count) + size - 1].repeat_interleave(size, output_size=rows.numel()).view_as(rows)
    median = (values[:, (count - 1) // 2] + values[:, count // 2]) / 2
    return torch.empty_like(rows).scatter_(1, order, scores).view_as(x), median


def sort(rows: Tensor) -> Tensor:
    """Every row in order."""
    if rows.device.type != "cpu":
        return rows.sort(-1).values
    return _by_numpy(np.sort, rows)


def _argsort(rows: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return rows.argsort(-1)
    return _by_numpy(np.argsort, rows)


def _by_numpy(function: Callable[..., np.ndarray], rows: Tensor) -> Tensor:
    """On a CPU numpy sorts short rows eight times faster than torch does, in one thread, but others may run meanwhile."""
    values, threads = rows.numpy(), min(torch.get_num_threads(), len(rows))
    if threads < 2:
        return torch.from_numpy(function(values, -1))
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda part: function(part, -1), np.array_split(values, threads))
        return torch.from_numpy(np.concatenate(list(parts)))


@lru_cache(maxsize=8)
def _scores(count: int) -> Tensor:
    """Of the ranks 1, 1.5, 2, ... count."""
    rank = torch.arange(2, 2 * count + 1, dtype=torch.float64) / 2
    return torch.special.ndtri((rank - 0.375) / (count + 0.25))
