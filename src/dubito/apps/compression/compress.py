"""From a posterior to a smaller network, and a report of what was saved and what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from dubito.apps.compression import coding
from dubito.apps.compression.cutting import call, cut
from dubito.apps.compression.pruning import Threshold, masks, moments, scores
from dubito.apps.compression.storage import packed
from dubito.apps.compression.writing import Compressed
from dubito.apps.network import gathered
from dubito.evaluation import metrics
from dubito.inference.batches import Data
from dubito.model import Model
from dubito.model.likelihoods import Likelihood
from dubito.network.examples import Inputs
from dubito.network.weights import in_mode
from dubito.posteriors import Point, Posterior
from dubito.tensors import tree
from dubito.tensors.checks import require
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
    found = {}
    for name, rows in small.meta["rows"].items():
        bias = name.removesuffix("weight") + "bias"
        if name not in names or bias not in pruned or not name.endswith("weight") or pruned[name].ndim < 3:
            continue
        whole = gone[name].flatten(1).all(1) & torch.from_numpy(rows).to(gone[name].device)
        if bool((whole & (pruned[bias] != 0)).any()):
            found[bias] = pruned[bias].masked_fill(whole, 0)
    return found


def _round(small: Compressed, steps: dict[str, int]) -> None:
    """Biases again, into which constants went; those that are new have the step of their weight."""
    own = {}
    for name, leaf in small.named_parameters():
        t = steps.get(name, steps.get(name.removesuffix("bias") + "weight"))
        if t is not None:
            leaf.copy_(coding.rounded(leaf, t))
            own[name] = t
    small.meta["steps"] = own
