r"""Units that nothing needs, taken out of the tensors.

A unit is needed if the output shows it, or if a needed row of some layer reads it with a weight that is not zero. What a layer
reads only as a constant (all weights into that unit are zero, so that it is :math:`g(b)` for every input) goes into the layer's
bias,

.. math:: b_o \leftarrow b_o + \sum_{i \text{ gone}} c_i \sum_k W_{oik},

where every position sees the same sum: not through a convolution that puts zeros around its input, unless the constant is zero.
Needs are followed back from the output until nothing is added, so that chains of units without a use go all together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dubito.apps.compression.flows import Flows, Site, filled, run
from dubito.apps.compression.rules import RULES
from dubito.apps.compression.writing import Compressed, Plan, write
from dubito.network.examples import Inputs, pick_output
from dubito.network.weights import with_weights
from dubito.posteriors.predict.streamlined.operations import PROBE, Trace, leaves_of
from dubito.posteriors.predict.streamlined.trace import trace
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Buffers, Params


def call(network: nn.Module, x: Inputs) -> Any:
    """The network at x: a tensor, a tuple of arguments or a dict of them."""
    args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, list | tuple) else (x,), {})
    return network(*args, **kwargs)


@dataclass(frozen=True)
class _Plain:
    """A network without a likelihood, as the trace wants it."""

    network: nn.Module
    output: Callable[[Any], Tensor]

    def call(self, params: Params, x: Inputs, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """The output at x with these weights, and the buffers."""
        weights = {**buffers, **params}
        with with_weights(self.network, weights):
            return self.output(call(self.network, x)), {name: weights[name] for name in buffers}


def cut(
    network: nn.Module,
    x: Inputs,
    *,
    params: Params | None = None,
    buffers: Buffers | None = None,
    outputs: Mapping[str, Tensor] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] = pick_output,
) -> Compressed:
    """The network without the units that its zero weights make useless: the same function, to rounding.

    x is an example input; `params` and `buffers` stand in the places of the network's own. `outputs` and `inputs` are masks by
    layer, True for what is to be dropped: all weights of an output, its bias with them, or all weights of an input are set to
    zero first. `output` picks the tensor from what the network returns. The network is as it was afterwards, and shares nothing
    with the result.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> small = cut(net, torch.zeros(1, 4), outputs={"0": torch.tensor([True, False, False])})
    >>> {name: tuple(p.shape) for name, p in small.named_parameters()}
    {'0.weight': (2, 4), '0.bias': (2,), '2.weight': (2, 2), '2.bias': (2,)}
    """
    own: Params = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    given = {name: leaf for name, leaf in {**(buffers or {}), **(params or {})}.items() if ":" not in name}
    for name, leaf in given.items():
        fits = name in own and own[name].shape == leaf.shape
        require(fits, f"the network has no parameter or buffer {name} of shape {list(leaf.shape)}")
    weights = {name: given.get(name, leaf).detach() for name, leaf in own.items()}
    weights |= drop(network, weights, outputs or {}, rows=True)
    weights |= drop(network, weights, inputs or {}, rows=False)
    with torch.no_grad(), fork_rng():  # dropout that is always on would draw
        flows = follow(network, weights, x, output)
        return write(network, flows, plan(flows, x))


def drop(network: nn.Module, weights: Params, masks: Mapping[str, Tensor], *, rows: bool) -> Params:
    """The weights of some layers with those of the outputs (or inputs) named by the masks set to zero."""
    changed: Params = {}
    modules = dict(network.named_modules())
    for name, mask in masks.items():
        layer = modules.get(name)
        prefix = f"{name}." if name else ""
        if layer is None or f"{prefix}weight" not in weights:
            known = [other for other in modules if f"{other}.weight" in weights]
            raise ValueError(f"no layer {name!r} with a weight; the network has {known[:8]}{'...' if known[8:] else ''}")
        weight = weights[f"{prefix}weight"]
        axis = int(rows == isinstance(layer, nn.modules.conv._ConvTransposeNd))  # of a transposed convolution, inputs come first
        _check_mask(name, mask, weight.shape[axis], grouped=not rows and getattr(layer, "groups", 1) > 1)
        gone = mask.to(weight.device).nonzero().squeeze(1)
        changed[f"{prefix}weight"] = weight.index_fill(axis, gone, 0)
        if rows and f"{prefix}bias" in weights:
            changed[f"{prefix}bias"] = weights[f"{prefix}bias"].index_fill(0, gone, 0)
    return changed


def _check_mask(name: str, mask: Tensor, size: int, *, grouped: bool) -> None:
    require(not grouped, f"inputs of {name!r} cannot be dropped, since it has groups: drop outputs of the layer before it")
    fits = mask.dtype == torch.bool and mask.shape == (size,)
    require(fits, f"the mask of {name!r} must be a bool tensor of shape [{size}]; got {mask.dtype} {list(mask.shape)}")


def follow(network: nn.Module, weights: Params, x: Inputs, output: Callable[[Any], Tensor]) -> Flows:
    """The flows of the network with these weights."""
    plain: Any = _Plain(network, output)
    names = [name for name, _ in network.named_parameters()]
    params = {name: weights[name] for name in names}
    made = trace(plain, params, x, {name: leaf for name, leaf in weights.items() if name not in params})
    require(made.dynamic, "the network depends on the batch size: it computes something else for another number of examples")
    return Flows(made, weights, RULES, _shapes(made, weights, x))


def _shapes(trace: Trace, weights: Params, x: Inputs) -> dict[int, tuple[int, ...]]:
    """Of all tensors, in a run with fewer examples than the trace has."""
    n, values = PROBE[1], {slot: weights[name] for slot, name in trace.weights.items()} | trace.constants
    for slot, leaf, batched in zip(trace.inputs, tree.leaves(x), trace.batched, strict=True):
        some = leaf[torch.arange(n, device=leaf.device) % max(1, len(leaf))] if batched and len(leaf) else leaf
        values[slot] = leaf.new_zeros(n, *leaf.shape[1:]) if batched and not len(leaf) else some.clone()
    for step in trace.steps:
        args, kwargs = filled((step.args, step.kwargs), values.__getitem__, n)
        if step.name == "setitem":
            result = args[0].clone()
            result[args[1]] = args[2]
        else:
            result = run(step.func, step.name, args, kwargs)
        values |= dict(zip(step.outputs, leaves_of(result, Tensor), strict=True))
    return {slot: tuple(value.shape) for slot, value in values.items()}


def plan(flows: Flows, x: Inputs) -> Plan:
    """What stays."""
    roots = flows.units.roots(np.arange(len(flows.units.parent)))
    live = flows.units.pinned
    columns: list[np.ndarray] = [np.zeros(len(site.cols), dtype=bool) for site in flows.sites]
    while True:
        before = int(live.sum())
        for k in range(len(flows.sites) - 1, -1, -1):
            columns[k] = _columns(flows.sites[k], live, roots)
        for some, others in flows.anchors:
            if live[roots[some]].any() and not live[roots[others]].any():
                live[roots[others[0]]] = True
        if int(live.sum()) == before:
            break
    biases = tuple(_has_bias(site, kept, live[roots[site.rows]]) for site, kept in zip(flows.sites, columns, strict=True))
    return Plan(live[roots], tuple(columns), biases, _like(flows.trace, x))


def _has_bias(site: Site, kept: np.ndarray, rows: np.ndarray) -> bool:
    """Whether a layer has a bias in the end: its own, or one that takes up constants."""
    folded = site.reads[torch.from_numpy(rows)] & (site.const != 0) & torch.from_numpy(~kept)
    return site.bias is not None or (site.alone and bool(folded.any()))


def _like(trace: Trace, x: Inputs) -> Any:
    """The shapes of x, with a few examples: a number that is not the first size of what has no axis of examples."""
    others = {leaf.shape[0] for leaf, batched in zip(tree.leaves(x), trace.batched, strict=True) if not batched and leaf.ndim}
    n, which = next(n for n in range(2, 99) if n not in others), iter(trace.batched)
    return tree.apply_leaves(
        lambda leaf: torch.empty((n, *leaf.shape[1:]) if next(which) else leaf.shape, dtype=leaf.dtype, device="meta"), x
    )


def _columns(site: Site, live: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """Which inputs a layer reads, which are then live."""
    rows, cols = roots[site.rows], roots[site.cols]
    reading = torch.from_numpy(live[rows])
    if not bool(reading.any()):
        return np.zeros(len(cols), dtype=bool)
    needed = (site.reads[reading].any(0) & ~site.absorbs).numpy()
    if site.groups > 1:
        needed = _even(site, needed, live, rows, cols)
    elif not needed.any():  # a layer reads at least one number
        needed[int(np.argmax(live[cols]))] = True
    live[cols[needed]] = True
    return needed if site.alone else live[cols]


def _even(site: Site, needed: np.ndarray, live: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Groups must be alike: where one keeps more units, the others keep some that they could do without."""
    made, read = rows.reshape(site.groups, -1), needed.reshape(site.groups, -1).copy()
    used = live[made].any(1)
    most = max(1, int(read[used].sum(1).max()))
    for group in np.flatnonzero(used):
        spare = np.flatnonzero(~read[group])
        spare = spare[np.argsort(~live[cols.reshape(site.groups, -1)[group][spare]], kind="stable")]
        read[group, spare[: most - int(read[group].sum())]] = True
    read[~used] = False
    while True:  # making a unit live may make one in another group live, too
        kept = live[made].sum(1)
        short = [group for group in np.flatnonzero(used) if kept[group] < kept.max()]
        if not short:
            return read.reshape(-1)
        live[made[short[0]][np.flatnonzero(~live[made[short[0]]])[0]]] = True
