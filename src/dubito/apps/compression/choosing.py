"""How far each tensor can be pruned, by held-out data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from dubito.apps.compression.pruning import moments, over_weights, scores, signal_to_noise
from dubito.apps.network import gathered
from dubito.evaluation import metrics
from dubito.inference.batches import Data
from dubito.posteriors import Point, Posterior
from dubito.tensors import tree
from dubito.tensors.checks import at_least
from dubito.tensors.tree import Params

CLOSE = 0.002  # of all that could go: how closely the most that may go is found
FEW = 0.001  # of all weights: tensors with fewer get the threshold that all have in common


def thresholds(posterior: Posterior, data: Data, *, allow: float = 0.001, size: int = 1000) -> dict[str, float]:
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
    >>> chosen = thresholds(posterior, (x, x @ mean.T + 0.1), allow=0.01)
    >>> dubito.apps.compression.prune(posterior, threshold=chosen).params["weight"]
    tensor([[2., 1., 0.]])
    """
    at_least(0, allow=allow)
    units, (mean, variance) = scores(posterior), moments(posterior)
    if units is None:
        needed = {name: leaf.nan_to_num() for name, leaf in signal_to_noise(mean, variance).items()}
    else:
        needed = {name: -leaf for name, leaf in units.items()}
    order = {name: leaf.detach().flatten().sort().values for name, leaf in needed.items()}
    cost = _cost(posterior, mean, needed, data, size)

    def _limits(gone: dict[str, int]) -> dict[str, float]:
        """Between the last one to go and the first one to stay."""
        values = {name: order[name] for name in gone}
        return {name: float(values[name][k - 1] / 2 + values[name][k] / 2) if k else -torch.inf for name, k in gone.items()}

    def _pooled(k: int) -> dict[str, int]:
        """How many go of every tensor, if those below the k-th of all do."""
        return {name: min(int((values < together[k]).sum()), len(values) - 1) for name, values in order.items()}

    together = torch.cat(list(order.values())).sort().values
    first = cost(_limits(dict.fromkeys(order, 0)))
    gone = _pooled(_most(lambda k: cost(_limits(_pooled(k))) <= first + 0.5 * allow, 0, len(together) - 1))
    weights = {name: mean[name].numel() for name in order}
    largest = sorted((name for name, n in weights.items() if n >= FEW * sum(weights.values())), key=lambda name: -weights[name])
    for i, name in enumerate(largest):
        spent = allow * (0.5 + 0.5 * (i + 1) / len(largest))
        gone[name] = _most(
            lambda k, name=name, spent=spent: cost(_limits({**gone, name: k})) <= first + spent, gone[name], len(order[name]) - 1
        )
    sign = 1 if units is None else -1
    return {f"^{re.escape(name)}$": sign * limit for name, limit in _limits(gone).items()}


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


def _cost(posterior: Posterior, mean: Params, needed: Params, data: Data, size: int) -> Callable[[dict[str, float]], float]:
    """The cost of thresholds: one minus accuracy, or the logarithm of the RMSE."""
    model = posterior.model
    x, y = gathered(model, data)
    n = len(y)
    buffers = getattr(posterior, "buffers", None) or model.buffers()
    params, discrete = {**model.parameters(), **mean}, bool(model.likelihood.discrete)

    def _of(limits: dict[str, float]) -> float:
        gone = {name: over_weights(leaf < limits[name], params[name].shape) for name, leaf in needed.items()}
        pruned = {name: params[name].masked_fill(mask, 0) for name, mask in gone.items()}
        point, total = Point(model, {**params, **pruned}, buffers), 0.0
        for rows in torch.arange(n, device=model.device).split(size):
            p, truth = point.predict(tree.apply_leaves(lambda leaf, rows=rows: leaf[rows], x)), y[rows]
            loss = 1 - metrics.accuracy(p, truth) if discrete else metrics.rmse(p, truth).square()
            total += float(loss) * len(rows) / n
        return total if discrete else 0.5 * math.log(total) if total > 0 else -math.inf

    return _of
