r"""Which weights a posterior can do without.

With independent weights, those of small signal-to-noise ratio :math:`|\mu| / \sigma`: zero is as likely as the mean, or nearly so
(Graves 2011; Blundell et al. 2015). With a random factor for every unit, whole units (Louizos, Ullrich & Welling 2017). What is
pruned is known to be zero: its mean *and* its standard deviation are.

`thresholds` finds by held-out data how far each tensor can be pruned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dubito.apps.network import gathered
from dubito.evaluation import metrics
from dubito.inference.batches import Data
from dubito.posteriors import Drawn, Gaussian, Point, Posterior
from dubito.tensors import tree
from dubito.tensors.checks import at_least, between, require
from dubito.tensors.covariances import Diagonal
from dubito.tensors.tree import Params

THRESHOLD = 1.0  # a mean that is within a standard deviation of zero

Threshold = float | Mapping[str, float]


def moments(posterior: Posterior) -> tuple[Params, Params]:
    """Mean and variance of every weight that has one; means only of the others."""
    if isinstance(posterior, Gaussian):
        variance = posterior.covariance.variance()
        return dict(posterior.params), {name: leaf for name, leaf in variance.items() if ":" not in name}
    other: Any = posterior
    known = None
    if isinstance(posterior, Drawn):
        known = posterior.family.weight_moments(posterior.leaves)
    elif hasattr(other, "moments"):  # a posterior of your own
        known = other.moments()
    if known is None:
        kind = f"{type(posterior.family).__name__} " if isinstance(posterior, Drawn) else ""
        raise TypeError(
            f"a {kind}{type(posterior).__name__} posterior has no mean and variance of each weight: use a Gaussian one, such as that "
            "of Laplace or Variational, or cut the network by masks with `apps.compression.cut`"
        )
    return {**getattr(other, "points", {}), **known[0]}, known[1]


def scores(posterior: Posterior) -> Params | None:
    """Of posteriors with a factor for every unit: by weight, how little each unit is needed. None for others."""
    other: Any = posterior
    if isinstance(posterior, Drawn):
        units = posterior.family.units(posterior.leaves)
    else:
        units = other.units() if hasattr(other, "units") else None
    if units is None:
        return None
    mean = moments(posterior)[0]
    return {name if name in mean else f"{name}.weight".lstrip("."): leaf for name, leaf in units.items()}


def signal_to_noise(mean: Params, variance: Params) -> Params:
    r""":math:`|\mu| / \sigma` of every weight; 0 of one that is pruned already."""
    ratios = {name: mean[name].abs() / leaf.clamp_min(0).sqrt() for name, leaf in variance.items()}
    return {name: torch.where(leaf.isnan(), 0.0, leaf) for name, leaf in ratios.items()}


def over_weights(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask of units, broadcast over their weights: the inputs of a matrix, the filters of a convolution."""
    if mask.shape == shape:
        return mask
    axis = 1 if len(shape) == 2 else 0
    return mask.reshape([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)


def masks(posterior: Posterior, *, threshold: Threshold | None = None, share: float | None = None) -> Params:
    """By weight, in its shape: True for what is pruned."""
    require(threshold is None or share is None, "weights are pruned by threshold or by share: give one of the two")
    between(0, 1, include="low", share=share)
    units, (mean, variance) = scores(posterior), moments(posterior)
    nothing = threshold is None and share is None
    if units is None:
        return _below(signal_to_noise(mean, variance), THRESHOLD if nothing else threshold, share)
    if nothing:
        quartiles = "; ".join(f"{name} {_spread(leaf)}" for name, leaf in list(units.items())[:8])
        raise ValueError(
            "units whose score is above a threshold are pruned: give threshold=..., one or {pattern: threshold}, best in a gap of the "
            "scores, or as apps.compression.thresholds(posterior, held_out) finds them; or share=... The quartiles of the scores, from "
            f"the smallest to the largest, are: {quartiles}"
        )
    gone = _below({name: -leaf for name, leaf in units.items()}, _negative(threshold), share)
    return {name: over_weights(mask, mean[name].shape) for name, mask in gone.items()}


def _negative(threshold: Threshold | None) -> Threshold | None:
    if threshold is None:
        return None
    return {k: -v for k, v in threshold.items()} if isinstance(threshold, Mapping) else -threshold


def _spread(leaf: Tensor) -> str:
    quantiles = torch.quantile(leaf.detach().double().flatten(), torch.linspace(0, 1, 5, dtype=torch.float64, device=leaf.device))
    return " ".join(f"{float(q):.3g}" for q in quantiles)


def _below(needed: Params, threshold: Threshold | None, share: float | None) -> Params:
    """What is needed less than a threshold, or the share that is needed least."""
    if share is not None:
        flat = torch.cat([leaf.detach().flatten() for leaf in needed.values()])
        gone = torch.zeros_like(flat, dtype=torch.bool)
        gone[flat.argsort(stable=True)[: round(share * len(flat))]] = True
        pieces = gone.split([leaf.numel() for leaf in needed.values()])
        return {name: piece.reshape(leaf.shape) for (name, leaf), piece in zip(needed.items(), pieces, strict=True)}
    if not isinstance(threshold, Mapping):
        return {name: leaf < float(threshold or 0) for name, leaf in needed.items()}
    lost = [pattern for pattern in threshold if not any(re.search(pattern, name) for name in needed)]
    require(not lost, f"the patterns {lost} match none of {list(needed)[:8]}")
    limits = {name: next((v for p, v in threshold.items() if re.search(p, name)), -torch.inf) for name in needed}
    return {name: leaf < limits[name] for name, leaf in needed.items()}


def prune(posterior: Posterior, *, threshold: Threshold | None = None, share: float | None = None) -> Gaussian:
    r"""The posterior with the weights that it can do without at zero, for certain: their means and their variances are.

    Weights go whose signal-to-noise ratio :math:`|\mu| / \sigma` is below `threshold` (1 if nothing is given; {pattern:
    threshold} sets them by name), or the `share` with the smallest. For posteriors with a factor for every unit
    (`families.Grouped`), units go whose score is above `threshold`. The result has independent weights: correlations, if there
    were any, are left out.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 1, bias=False), dubito.Gaussian(scale=0.1))
    >>> posterior = Gaussian.diagonal(model, {"weight": torch.tensor([[2.0, 0.1]])}, {"weight": torch.ones(1, 2)})
    >>> pruned = prune(posterior)
    >>> pruned.params["weight"], pruned.covariance.variance()["weight"]
    (tensor([[2., 0.]]), tensor([[1., 0.]]))
    """
    gone = masks(posterior, threshold=threshold, share=share)
    mean, variance = moments(posterior)
    params = {name: leaf.masked_fill(gone[name], 0) if name in gone else leaf for name, leaf in mean.items()}
    variance = {name: leaf.masked_fill(gone[name], 0) if name in gone else leaf for name, leaf in variance.items()}
    wide = {name: leaf.detach().float() if leaf.dtype.itemsize < 4 else leaf.detach() for name, leaf in variance.items()}
    covariance = Diagonal.of(wide)
    if isinstance(posterior, Gaussian):
        return replace(posterior, params=params, covariance=covariance, fitted=None, scale=None, temperature=1.0)
    other: Any = posterior
    known = posterior.model.parameters()
    return Gaussian(posterior.model, {**known, **params}, other.buffers, covariance, how="sampled")


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
