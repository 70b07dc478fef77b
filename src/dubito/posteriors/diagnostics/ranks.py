"""Ranks instead of values: diagnostics of ranks are valid for any distribution, also without a finite variance."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def normal_scores(x: Tensor) -> Tensor:
    r""":math:`\Phi^{-1}\big((r - \tfrac38) / (N + \tfrac14)\big)` for the rank r of an entry among the N of its row, [P, ...].

    Equal entries get the mean of their ranks. There are many of them, since a rejected proposal repeats a draw.

    >>> normal_scores(torch.tensor([[3.0, -1.0, 3.0, 100.0]], dtype=torch.float64))
    tensor([[ 0.0000, -1.0491,  0.0000,  1.0491]], dtype=torch.float64)
    """
    return scores_and_median(x)[0]


def scores_and_median(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal scores [P, ...], and the median of every row [P]."""
    rows = x.flatten(1)
    count = rows.shape[1]
    order = _argsort(rows)
    values = rows.gather(1, order)
    differ = values[:, 1:] != values[:, :-1]
    table = _scores(count).to(x.device)  # indexed by doubled ranks, which are integers
    if bool(differ.all()):
        scores = table[::2].expand_as(rows)
    else:
        first = (
            torch.cat([differ.new_ones(len(rows), 1), differ], 1).flatten().nonzero().squeeze(1)
        )  # index of each group of equal entries
        size = torch.diff(first, append=first.new_tensor([rows.numel()]))
        scores = table[2 * (first % count) + size - 1].repeat_interleave(size, output_size=rows.numel()).view_as(rows)
    median = (values[:, (count - 1) // 2] + values[:, count // 2]) / 2
    return torch.empty_like(rows).scatter_(1, order, scores).view_as(x), median


def sort_rows(rows: Tensor) -> Tensor:
    """Every row sorted."""
    return _by_numpy(np.sort, rows) if rows.device.type == "cpu" else rows.sort(-1).values


def _argsort(rows: Tensor) -> Tensor:
    return _by_numpy(np.argsort, rows) if rows.device.type == "cpu" else rows.argsort(-1)


def _by_numpy(function: Callable[..., np.ndarray], rows: Tensor) -> Tensor:
    """Sort on a CPU: numpy sorts short rows eight times faster than torch does, in one thread, so several threads share the rows."""
    values, threads = rows.numpy(), min(torch.get_num_threads(), len(rows))
    if threads < 2:
        return torch.from_numpy(function(values, -1))
    with ThreadPoolExecutor(threads) as pool:
        blocks = pool.map(lambda block: function(block, -1), np.array_split(values, threads))
        return torch.from_numpy(np.concatenate(list(blocks)))


@lru_cache(maxsize=8)
def _scores(count: int) -> Tensor:
    """Normal scores of the ranks 1, 1.5, 2, ... count."""
    rank = torch.arange(2, 2 * count + 1, dtype=torch.float64) / 2
    return torch.special.ndtri((rank - 0.375) / (count + 0.25))
