"""How far each tensor can be pruned, by held-out data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dubito.apps.compression.pruning import moments, scores
from dubito.apps.network import gathered
from dubito.evaluation import metrics
from dubito.posteriors import Point, Posterior
from dubito.tensors import tree
from dubito.tensors.tree import Params

CLOSE = 0.002  # of all that could go: how closely the most that may go is found
FEW = 0.001  # of all weights: tensors with fewer get the threshold that all have in common


def thresholds(posterior: Posterior, data: Any, *, allow: float = 0.001, size: int = 1000) -> dict[str, float]:
    """A threshold for every tensor, for `compress` and `prune`: they prune as much as costs `allow` of the score on held-out `data`.

    The score is that of the mean weights: accuracy, which may fall by `allow`, or for regression RMSE, which may grow by that share.
    Half of it is spent on a threshold for all tensors, found by bisection, the other half on going on with one tensor after another,
    those with the most weights first. At least one unit of a tensor stays. `size` is the number of examples in a pass.

    `data`, (x, y) or a loader, must be neither those that were trained on, which would allow too much, nor those that the result is
    judged by.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(3, 1, bias=False), dubito.Gaussian(scale=0.1))
    >>> mean, variance = torch.tensor([[2.0, 1.0, 0.001]]), torch.ones(1, 3)
    >>> posterior = dubito.posteriors.Gaussian.diagonal(model, {"weight": mean}, {"weight": variance})
    >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> found = thresholds(posterior, (x, x @ mean.T + 0.1), allow=0.01)
    >>> dubito.apps.compression.prune(posterior, threshold=found).params["weight"]
    tensor([[2., 1., 0.]])
    """
    if not allow >= 0:
        raise ValueError(f"allow is a share of the score that pruning may cost, such as 0.001; got {allow}")
    units = scores(posterior)
    mean, variance = moments(posterior)
    if units is None:
        needed = {name: (mean[name].abs() / variance[name].clamp_min(0).sqrt()).nan_to_num(0.0) for name in variance}
    else:
        needed = {name: -leaf for name, leaf in units.items()}
    order = {name: leaf.detach().flatten().sort().values for name, leaf in needed.items()}
    score = _score(posterior, mean, needed, data, size)

    def limits(gone: dict[str, int]) -> dict[str, float]:
        """Between the last one to go and the first one to stay."""
        found = {}
        for name, k in gone.items():
            values = order[name]
            found[name] = float(values[k - 1] / 2 + values[k] / 2) if k else -torch.inf
        return found

    def pooled(k: int) -> dict[str, int]:
        limit = together[k]
        return {name: min(int((values < limit).sum()), len(values) - 1) for name, values in order.items()}

    together = torch.cat(list(order.values())).sort().values
    first = score(limits(dict.fromkeys(order, 0)))
    k = _most(lambda k: score(limits(pooled(k))) <= first + 0.5 * allow, 0, len(together) - 1)
    gone = pooled(k)
    weights = {name: mean[name].numel() for name in order}
    largest = sorted((name for name, n in weights.items() if n >= FEW * sum(weights.values())), key=lambda name: -weights[name])
    for i, name in enumerate(largest):
        spent = allow * (0.5 + 0.5 * (i + 1) / len(largest))
        gone[name] = _most(
            lambda k, name=name, spent=spent: score(limits({**gone, name: k})) <= first + spent, gone[name], len(order[name]) - 1
        )
    sign = 1 if units is None else -1
    return {f"^{re.escape(name)}$": sign * limit for name, limit in limits(gone).items()}


def _most(works: Callable[[int], bool], low: int, high: int) -> int:
    """Nearly the largest number from `low` on, which works, that does; as if all did up to some number."""
    slack = int(CLOSE * high)
    while high - low > slack:
        middle = (low + high + 1) // 2
        if works(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _score(posterior: Posterior, mean: Params, needed: Params, data: Any, size: int) -> Callable[[dict[str, float]], float]:
    """The cost of thresholds: one minus accuracy, or the logarithm of the RMSE."""
    model = posterior.model
    x, y = gathered(model, data)
    n = len(y)
    buffers = getattr(posterior, "buffers", None) or model.buffers()
    params, discrete = {**model.parameters(), **mean}, bool(model.likelihood.discrete)

    def shaped(name: str, gone: Tensor) -> Tensor:
        leaf = params[name]
        if gone.shape == leaf.shape:
            return gone
        axis = 1 if leaf.ndim == 2 else 0  # inputs of a matrix, filters of a convolution
        return gone.reshape([-1 if d == axis else 1 for d in range(leaf.ndim)])

    def score(limits: dict[str, float]) -> float:
        pruned = {name: params[name].masked_fill(shaped(name, leaf < limits[name]), 0) for name, leaf in needed.items()}
        point, total = Point(model, {**params, **pruned}, buffers), 0.0
        for rows in torch.arange(n, device=model.device).split(size):
            p, truth = point.predict(tree.apply_leaves(lambda leaf, rows=rows: leaf[rows], x)), y[rows]
            one = 1 - metrics.accuracy(p, truth) if discrete else metrics.rmse(p, truth).square()
            total += float(one) * len(rows) / n
        return total if discrete else 0.5 * math.log(total) if total > 0 else -math.inf

    return score
