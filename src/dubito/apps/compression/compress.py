r"""From a posterior to a smaller network: which weights are pruned, and a report of what was saved and what it cost.

Independent weights are pruned where their signal-to-noise ratio :math:`|\mu| / \sigma` is small: zero is as likely as the mean, or
nearly so (Graves 2011; Blundell et al. 2015). Whole units are pruned where the posterior has a random factor for every unit (Louizos,
Ullrich & Welling 2017). What is pruned is known to be zero: its mean *and* its standard deviation are. `thresholds` finds by held-out
data how far each tensor can be pruned.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dubito.apps.compression import coding
from dubito.apps.compression.cutting import Compressed, cut
from dubito.apps.compression.storage import packed
from dubito.apps.network import call, gathered
from dubito.evaluation import metrics
from dubito.inference.batches import Data
from dubito.model import Model
from dubito.model.likelihoods import Likelihood
from dubito.network.examples import Inputs
from dubito.network.weights import in_mode
from dubito.posteriors import Drawn, Gaussian, Point, Posterior
from dubito.tensors import tree
from dubito.tensors.checks import at_least, between, require
from dubito.tensors.covariances import Diagonal
from dubito.tensors.randomness import fork_rng
from dubito.tensors.text import TextTable, rich_text
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True)
class Report:
    """A network before and after compression; pairs are (before, after).

    Rates are against all numbers of the original, parameters and running statistics, in 32 bits each.
    """

    parameters: tuple[int, int]
    nonzero: tuple[int, int]
    numbers: tuple[int, int]  # parameters and running statistics
    bits: int  # of what is left, in the bits of each tensor, zeros included
    coded: int  # bits of the file
    operations: tuple[int, int]  # multiply-adds for one input
    seconds: tuple[float, float]  # for the example input, the median of runs in turn
    score: tuple[float, float] | None = None  # on the data that were given
    measure: str = ""  # what the score is: accuracy or RMSE

    @property
    def rate_pruned(self) -> float:
        """Numbers of the original for each that is not zero."""
        return self.numbers[0] / max(1, self.nonzero[1])

    @property
    def rate_cut(self) -> float:
        """Numbers of the original for each that is left in a tensor, zero or not."""
        return self.numbers[0] / max(1, self.numbers[1])

    @property
    def rate_bits(self) -> float:
        """The same, with as many bits for each as the posterior allows."""
        return 32 * self.numbers[0] / max(1, self.bits)

    @property
    def rate_coded(self) -> float:
        """The file against 32 bits a number."""
        return 32 * self.numbers[0] / self.coded

    @property
    def speedup(self) -> float:
        """Seconds of the original for each of the smaller network."""
        return self.seconds[0] / self.seconds[1]

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """What a table shows: name, before, after, ratio."""

        def _ratio(pair: tuple[float, float]) -> str:
            return f"{pair[0] / pair[1]:.3g} x" if pair[1] else ""

        dense = 32 * self.numbers[0]
        rows = [
            ("parameters", f"{self.parameters[0]:,}", f"{self.parameters[1]:,}", _ratio(self.parameters)),
            ("not zero (statistics included)", f"{self.nonzero[0]:,}", f"{self.nonzero[1]:,}", f"{self.rate_pruned:.3g} x"),
            ("size, 32 bits a number", _bytes(dense), _bytes(32 * self.numbers[1]), f"{self.rate_cut:.3g} x"),
            ("size, bits as the posterior allows", _bytes(dense), _bytes(self.bits), f"{self.rate_bits:.3g} x"),
            ("size, coded in a file", _bytes(dense), _bytes(self.coded), f"{self.rate_coded:.3g} x"),
            ("multiply-adds an input", f"{self.operations[0]:,}", f"{self.operations[1]:,}", _ratio(self.operations)),
            ("time", *(f"{1e3 * seconds:.3g} ms" for seconds in self.seconds), f"{self.speedup:.3g} x"),
        ]
        if self.score is not None:
            rows.append((self.measure, *(f"{value:.4g}" for value in self.score), ""))
        return rows

    def __str__(self) -> str:
        table = TextTable(self.rows, ("", "before", "after", "ratio"), right=(1, 2, 3), overflow="ellipsis")
        return rich_text(table, width=100).strip("\n")


def _bytes(n: float) -> str:
    n = n / 8
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def operations(network: nn.Module, x: Inputs) -> int:
    """Multiply-adds of layers, products and attention, for all of x."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), in_mode(network, False), FlopCounterMode(display=False) as counter:
        call(network, x)
    return counter.get_total_flops() // 2


def interleaved(first: Callable[[], object], second: Callable[[], object], *, repeats: int) -> tuple[float, float]:
    """Seconds of two functions, the median of runs in turn, so that what disturbs the machine disturbs both."""
    times: tuple[list[float], list[float]] = ([], [])
    for k in range(repeats + 2):  # two to warm up
        for run, seconds in zip((first, second), times, strict=True):
            begin = time.perf_counter()
            run()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if k >= 2:
                seconds.append(time.perf_counter() - begin)
    return median(times[0]), median(times[1])


def compare(
    model: Model, params: Params, buffers: Buffers, small: Compressed, x: Inputs, *, data: Data = None, repeats: int = 15
) -> Report:
    """The network with these weights beside the compressed one. `data` is (x, y), a batch as the model reads it, or a loader."""
    weights = {name: leaf for name, leaf in params.items() if ":" not in name}
    full = {**buffers, **weights}
    before = [full.get(name, leaf) for name, leaf in model.network.named_parameters()]
    statistics = [full.get(name, leaf) for name, leaf in model.network.named_buffers() if leaf.is_floating_point()]
    after, state = list(small.parameters()), small.stored
    after_all = [leaf for leaf in state.values() if leaf.is_floating_point()]
    count = len(next(iter(tree.leaves(x))))

    with torch.no_grad(), in_mode(model.network, False):
        seconds = interleaved(lambda: call(model.network, x), lambda: call(small, x), repeats=repeats)
    score, measure = (None, "") if data is None else _scores(model, params, buffers, small, data)
    return Report(
        parameters=(_count(before), _count(after)),
        nonzero=(_nonzero([*before, *statistics]), _nonzero(after_all)),
        numbers=(_count([*before, *statistics]), _count(after_all)),
        bits=sum(leaf.numel() * coding.width(leaf, small.steps.get(name)) for name, leaf in state.items()),
        coded=8 * len(packed(small)),
        operations=(operations(model.network, x) // count, operations(small, x) // count),
        seconds=seconds,
        score=score,
        measure=measure,
    )


def _count(leaves: list) -> int:
    return sum(leaf.numel() for leaf in leaves)


def _nonzero(leaves: list) -> int:
    return sum(int(torch.count_nonzero(leaf)) for leaf in leaves)


def _scores(model: Model, params: Params, buffers: Buffers, small: Compressed, data: Data) -> tuple[tuple[float, float], str]:
    x, y = gathered(model, data)
    likelihood: Likelihood = model.likelihood
    learned = {name: leaf for name, leaf in params.items() if ":" in name}
    other = Model(small, likelihood, model.prior)
    first = Point(model, params, buffers).predict(x)
    second = Point(other, {**dict(small.named_parameters()), **learned}, dict(small.named_buffers())).predict(x)
    discrete = bool(likelihood.discrete)
    score = metrics.accuracy if discrete else metrics.rmse
    values = (float(score(first, y)), float(score(second, y)))
    require(all(map(math.isfinite, values)), f"the score must be finite; got {values}: check the data and the network's output")
    return values, "accuracy" if discrete else "RMSE"


def compress(
    posterior: Posterior,
    x: Any,
    *,
    threshold: Threshold | None = None,
    share: float | None = None,
    step: float | None = 0.5,
    data: Any = None,
    repeats: int = 15,
) -> Compressed:
    r"""A smaller network in the place of the posterior's mean: an `nn.Module` that runs wherever torch does.

    Weights that the posterior can do without are set to zero (`threshold`, `share`: as in `apps.compression.prune`), units that
    nothing needs are cut out of the tensors, and the weights that are left are rounded to multiples of a power of two, at most
    `step` posterior standard deviations (None: not rounded). x is an example input; the module takes any number of inputs of its
    shape.

    `module.report` says what was saved: parameters, bits, multiply-adds, time for x (the median of `repeats` runs), and, with
    `data`, (x, y) or a loader, accuracy or RMSE before and after. `apps.compression.save` writes it to a file, entropy-coded.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1))
    >>> mean = {name: torch.ones_like(leaf) for name, leaf in model.parameters().items()}
    >>> mean["0.weight"][0] = mean["0.bias"][0] = 0.001                             # a unit that is lost in its noise
    >>> variance = {name: torch.full_like(leaf, 1e-4) for name, leaf in mean.items()}
    >>> small = compress(dubito.posteriors.Gaussian.diagonal(model, mean, variance), torch.zeros(1, 2))
    >>> small.report.parameters
    (13, 9)
    """
    x = tree.apply_leaves(torch.clone, tree.move(x, posterior.model.device))  # which the network may change in place
    model, buffers = posterior.model, getattr(posterior, "buffers", None) or posterior.model.buffers()
    with torch.no_grad(), fork_rng():
        mean, variance = moments(posterior)
        full = {**model.parameters(), **mean}
        units, gone = scores(posterior), masks(posterior, threshold=threshold, share=share)
        pruned = {
            name: leaf.detach().masked_fill(gone[name], 0) if name in gone else leaf.detach() for name, leaf in full.items()
        }
        steps = {} if step is None else coding.exponents(pruned, variance, step=step)
        pruned |= {name: coding.rounded(pruned[name], t) for name, t in steps.items()}
        small = cut(model.network, x, params=pruned, buffers=buffers, output=model.output)
        if units is not None and (silent := _silent(small, pruned, gone, list(units)[:-1])):
            small = cut(model.network, x, params={**pruned, **silent}, buffers=buffers, output=model.output)
        _round(small, steps)
        small.meta["report"] = compare(model, full, buffers, small, x, data=data, repeats=repeats)
    return small


def _silent(small: Compressed, pruned: Params, gone: Params, names: list[str]) -> Params:
    """Biases without those of filters that were pruned, and are there all the same since padding keeps their bias from going into the
    next layer. `names` are the weights whose units go as a whole; not that of the last layer, whose biases are part of the answer."""
    biases = {}
    for name, rows in small.meta["rows"].items():
        bias = name.removesuffix("weight") + "bias"
        if name not in names or bias not in pruned or not name.endswith("weight") or pruned[name].ndim < 3:
            continue
        whole = gone[name].flatten(1).all(1) & torch.from_numpy(rows).to(gone[name].device)
        if bool((whole & (pruned[bias] != 0)).any()):
            biases[bias] = pruned[bias].masked_fill(whole, 0)
    return biases


def _round(small: Compressed, steps: dict[str, int]) -> None:
    """Round the biases again, which have taken up constants; new biases have the step of their weight."""
    exponents = {}
    for name, leaf in small.named_parameters():
        t = steps.get(name, steps.get(name.removesuffix("bias") + "weight"))
        if t is not None:
            leaf.copy_(coding.rounded(leaf, t))
            exponents[name] = t
    small.meta["steps"] = exponents


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
        family = f"{type(posterior.family).__name__} " if isinstance(posterior, Drawn) else ""
        raise TypeError(
            f"a {family}{type(posterior).__name__} posterior has no mean and variance of each weight: use a Gaussian one, such as that "
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
    gone = _below({name: -leaf for name, leaf in units.items()}, threshold, share, sign=-1)
    return {name: over_weights(mask, mean[name].shape) for name, mask in gone.items()}


def _spread(leaf: Tensor) -> str:
    quantiles = torch.quantile(leaf.detach().double().flatten(), torch.linspace(0, 1, 5, dtype=torch.float64, device=leaf.device))
    return " ".join(f"{float(q):.3g}" for q in quantiles)


def _below(needed: Params, threshold: Threshold | None, share: float | None, *, sign: int = 1) -> Params:
    """What is needed less than a threshold (times a sign), or the share that is needed least."""
    if share is not None:
        flat = torch.cat([leaf.detach().flatten() for leaf in needed.values()])
        gone = torch.zeros_like(flat, dtype=torch.bool)
        gone[flat.argsort(stable=True)[: round(share * len(flat))]] = True
        pieces = gone.split([leaf.numel() for leaf in needed.values()])
        return {name: piece.reshape(leaf.shape) for (name, leaf), piece in zip(needed.items(), pieces, strict=True)}
    if not isinstance(threshold, Mapping):
        return {name: leaf < sign * float(threshold or 0) for name, leaf in needed.items()}
    lost = [pattern for pattern in threshold if not any(re.search(pattern, name) for name in needed)]
    require(not lost, f"the patterns {lost} match none of {list(needed)[:8]}")
    limits = {name: next((sign * v for p, v in threshold.items() if re.search(p, name)), -torch.inf) for name in needed}
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
    """Nearly the largest number for which `works` is true, by bisection from `low`, for which it is."""
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
