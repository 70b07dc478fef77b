r"""From a posterior to a smaller network."""

from __future__ import annotations

from typing import Any

import torch

from dubito.apps.compression import bits
from dubito.apps.compression.cutting import cut
from dubito.apps.compression.pruning import Threshold, masks, moments, scores
from dubito.apps.compression.report import compare
from dubito.apps.compression.writing import Compressed
from dubito.posteriors import Posterior
from dubito.tensors import tree
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Params


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
        steps = {} if step is None else bits.exponents(pruned, variance, step=step)
        pruned |= {name: bits.rounded(pruned[name], t) for name, t in steps.items()}
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
            leaf.copy_(bits.rounded(leaf, t))
            own[name] = t
    small.meta["steps"] = own
