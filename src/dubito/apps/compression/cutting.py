r"""Units that nothing needs, taken out of the tensors, and the network that is left as a graph of the old operations on fewer units.

A unit is needed if the output shows it, or if a needed row of some layer reads it with a weight that is not zero. What a layer
reads only as a constant (all weights into that unit are zero, so that it is :math:`g(b)` for every input) goes into the layer's
bias,

.. math:: b_o \leftarrow b_o + \sum_{i \text{ gone}} c_i \sum_k W_{oik},

where every position sees the same sum: not through a convolution that puts zeros around its input, unless the constant is zero.
Needs are followed back from the output until nothing is added, so that chains of units without a use go all together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito.apps.compression.flows import Flows, Site, filled, layer_arguments, matrix, run
from dubito.apps.compression.rules import RULES
from dubito.apps.network import call
from dubito.network.examples import Inputs, pick_output
from dubito.network.weights import with_weights
from dubito.posteriors.predict.streamlined.operations import PROBE, Arguments, Size, Step, Trace, leaves_of
from dubito.posteriors.predict.streamlined.program import GraphWriter, add_tensor
from dubito.posteriors.predict.streamlined.trace import trace
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True)
class _Plain:
    """A network without a likelihood, as the trace wants it."""

    network: nn.Module
    output: Callable[[Any], Tensor]
    coupled: bool = False

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
    state: Params = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    replaced = {name: leaf for name, leaf in {**(buffers or {}), **(params or {})}.items() if ":" not in name}
    for name, leaf in replaced.items():
        fits = name in state and state[name].shape == leaf.shape
        require(fits, f"the network has no parameter or buffer {name} of shape {list(leaf.shape)}")
    weights = {name: replaced.get(name, leaf).detach() for name, leaf in state.items()}
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
        axis = int(rows == getattr(layer, "transposed", False))  # of a transposed convolution, inputs come first
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
    """All groups must keep equally many units: where one needs more, the others keep some that they do not need."""
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


@dataclass(frozen=True)
class Plan:
    """What stays: all that is needed to cut a network of the same operations in the same way."""

    live: np.ndarray  # [U]: by unit
    columns: tuple[np.ndarray, ...]  # by layer: which inputs it reads
    biases: tuple[bool, ...]  # by layer: whether it has one in the end
    like: Any  # a few inputs, on no device: shapes and dtypes


class Compressed(fx.GraphModule):
    """A network with fewer units, called as the original is: torch operations (`module.code`), and weights under their old names.

    It takes inputs of the shape it was made for, any number at a time, and computes what the original does in eval mode.
    """

    @property
    def plan(self) -> Plan:
        """What stayed of the original."""
        return self.meta["plan"]

    @property
    def steps(self) -> dict[str, int]:
        """By weight: its numbers are whole multiples of 2^-t. Weights that are not named have not been rounded."""
        return self.meta.get("steps", {})

    @property
    def stored(self) -> dict[str, Tensor]:
        """Weights and statistics. The rest of `state_dict` is what operations read by index, which follows from the plan."""
        return {name: leaf for name, leaf in self.state_dict().items() if name not in self.meta["fixed"]}

    @property
    def report(self) -> Any:
        """What was saved, and what it cost; None for a network that was cut by hand."""
        return self.meta.get("report")

    @property
    def kept(self) -> dict[str, str]:
        """Operations that could not be cut through, so that what they read has its full width, and where the first of each is."""
        return self.meta.get("kept", {})


def architecture(network: nn.Module) -> bytes:
    """A digest of the names and shapes of a network's weights."""
    shapes = [(name, list(leaf.shape)) for name, leaf in [*network.named_parameters(), *network.named_buffers()]]
    return hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).digest()


def signature(flows: Flows) -> int:
    """A digest of the operations and of which units go together: what a plan is about."""
    names = [flows.trace.steps[i].name for i in flows.steps]
    about = json.dumps([names, sorted((slot, shape) for slot, shape in flows.second.items())]).encode()
    roots = flows.units.roots(np.arange(len(flows.units.parent)))
    cols = [site.cols.astype("<i8").tobytes() for site in flows.sites]
    content = b"".join([about, roots.astype("<i8").tobytes(), *cols])
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")


def choices(flows: Flows, live: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a file stores a mask of: one unit of each set, and, for each layer, the columns whose units stay."""
    roots = flows.units.roots(np.arange(len(flows.units.parent)))
    units = np.flatnonzero(roots == np.arange(len(roots)))
    return units, [live[site.cols] for site in flows.sites]


def write(network: nn.Module, flows: Flows, planned: Plan) -> Compressed:
    """The network as a graph of what stays."""
    return _Writer(network, flows, planned).module()


def _places(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask))


class _Writer(GraphWriter):
    """The graph of what stays, while it is written."""

    def __init__(self, network: nn.Module, flows: Flows, planned: Plan):
        super().__init__(flows.trace)
        self.network, self.flows, self.plan = network, flows, planned
        self.parameters = dict(network.named_parameters())
        self.device = next(iter(tree.leaves({**self.parameters, **dict(network.named_buffers())}))).device
        self.held: dict[str, tuple[Tensor, str]] = {}  # tensors of the module, and what they are there
        self.weights: dict[int, fx.Node] = {}
        self.layers = {site.weight: k for k, site in enumerate(flows.sites) if site.alone}
        self.biased = {site.bias: k for k, site in enumerate(flows.sites) if site.alone and site.bias is not None}

    def mask(self, slot: int) -> np.ndarray | None:
        """Which places stay along the axis of units."""
        flow = self.flows.flows.get(slot)
        return None if flow is None else self.plan.live[flow.units]

    def count(self, slot: int) -> int:
        """How many places stay along the axis of units; -1 where there is none."""
        mask = self.mask(slot)
        return -1 if mask is None else int(mask.sum())

    def hold(self, name: str, tensor: Tensor, role: str) -> fx.Node:
        """A tensor of the module: a "parameter", "buffer" or "constant"."""
        self.held[name] = (tensor.to(self.device), role)
        return self.graph.create_node("get_attr", name)

    def node(self, slot: int) -> fx.Node:
        """What a slot holds now."""
        if slot in self.nodes:
            return self.nodes[slot]
        if slot not in self.weights:
            self.weights[slot] = self.hold(*self._described(slot))
        return self.weights[slot]

    def _described(self, slot: int) -> tuple[str, Tensor, str]:
        """Name, value and kind of a weight, a constant, or what is computed of them."""
        value, name = self.weight(slot).clone(), self.trace.weights.get(slot)
        if name is not None:
            return name, value, "parameter" if name in self.parameters else "buffer"
        constant = slot in self.trace.constants
        learned = slot in self.flows.learned and value.is_floating_point()
        role = "parameter" if learned else "constant" if constant else "buffer"
        return f"{'constant' if constant else 'derived'}.{slot}", value, role

    def weight(self, slot: int) -> Tensor:
        """A weight without the rows and columns that are gone."""
        value = self.flows.values[slot].detach()
        if slot in self.biased:
            site = self.flows.sites[self.biased[slot]]
            value = (value.double() + self.folded(self.biased[slot])).to(value.dtype)
            return value[torch.from_numpy(self.plan.live[site.rows])]
        for axis in range(value.ndim):
            value = self._cut(slot, axis, value)
        return value

    def _cut(self, slot: int, axis: int, value: Tensor) -> Tensor:
        """A weight without what is gone along an axis."""
        k, units = self.layers.get(slot), self.flows.axes.get((slot, axis))
        if k is not None and axis == 1 - self.flows.sites[k].row:
            site, kept = self.flows.sites[k], self.plan.columns[k]
            return self.grouped(site, kept, value) if site.groups > 1 else value.index_select(axis, _places(kept))
        return value if units is None else value.index_select(axis, _places(self.plan.live[units]))

    def grouped(self, site: Site, kept: np.ndarray, value: Tensor) -> Tensor:
        """Each row with the columns of its own group; rows are gone already."""
        rows = np.flatnonzero(self.plan.live[site.rows]) // (len(site.rows) // site.groups)
        inside = [np.flatnonzero(group) for group in kept.reshape(site.groups, -1)]
        return torch.stack([value[j, inside[group].tolist()] for j, group in enumerate(rows)])

    def folded(self, k: int) -> Tensor:
        """What constants add to the bias of a layer, [O]."""
        site = self.flows.sites[k]
        gone = torch.where(torch.from_numpy(~self.plan.columns[k]), site.const, 0.0)
        return matrix(self.flows.values[site.weight], site.row, site.groups).double().sum(-1) @ gone

    def module(self) -> Compressed:
        """All operations of which something is left, as a module."""
        count = len(self.trace.inputs)
        names = (
            list(self.plan.like) if isinstance(self.plan.like, dict) else ["x"] if count == 1 else [f"x{i}" for i in range(count)]
        )
        self.nodes |= {slot: self.graph.placeholder(name) for slot, name in zip(self.trace.inputs, names, strict=True)}
        if True in self.trace.batched:
            self.size(Size(0, 1))
        for i in self.flows.steps:
            step, edit = self.trace.steps[i], self.flows.edits[i]
            if any(self.count(slot) != 0 for slot in step.outputs):
                getattr(self, f"_{edit.kind}")(step, edit.given)
        self.graph.output(self.node(self.trace.output))
        self.graph.eliminate_dead_code()
        return self._build()

    def _build(self) -> Compressed:
        root, used = nn.Module(), {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for name, (tensor, role) in self.held.items():
            if name in used:
                old = self.parameters.get(name)
                learned = role == "parameter"
                tensor = tensor.requires_grad_(learned and (old is None or old.requires_grad)) if learned else tensor
                add_tensor(root, name, tensor, parameter=learned, persistent=role == "buffer")
        module = Compressed(root, self.graph, "Compressed")
        fixed = {name for name in used if self.held[name][1] == "constant"}
        for name in fixed:  # which a GraphModule forgets
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._non_persistent_buffers_set.add(leaf)
        named = [(self.trace.weights.get(site.weight), site) for site in self.flows.sites if site.row == 0]
        module.meta.update(
            fixed=fixed,
            plan=self.plan,
            kept=self.flows.opaque,
            architecture=architecture(self.network),
            origin=choices(self.flows, self.plan.live),
            trace=signature(self.flows),
            rows={name: self.plan.live[site.rows] for name, site in named if name},  # outputs that are left
        )
        return module.eval()

    # -- operations, by the kind of their `Edit`

    def _same(self, step: Step, given: Arguments) -> None:
        self.assign(step.out, self.call(step, *self.fill((step.args, step.kwargs))))

    def _resized(self, method: str, step: Step, given: Arguments) -> None:
        (target,), slot = given["parts"], step.out.slot
        sizes = self.fill(target["sizes"])
        sizes[target["axis"]] = self.count(slot)
        self.nodes[slot] = self.graph.call_method(method, (self.node(step.args[0].slot), *sizes))

    def _reshape(self, step: Step, given: Arguments) -> None:
        self._resized("reshape", step, given)

    def _expand(self, step: Step, given: Arguments) -> None:
        self._resized("expand", step, given)

    def _select(self, step: Step, given: Arguments) -> None:
        source = step.args[0].slot
        kept = self.mask(source)
        assert kept is not None
        places = np.cumsum(kept) - 1
        for slot, flow in zip(step.outputs, given["parts"], strict=True):
            index = places[flow["index"][self.mask(slot)]]
            if len(index):
                self.nodes[slot] = self.take(self.node(source), self.flows.flows[source].axis, index, int(kept.sum()))

    def take(self, x: fx.Node, axis: int, index: np.ndarray, n: int) -> fx.Node:
        """Some of the n places of an axis."""
        if len(index) == n and (index == np.arange(n)).all():
            return x
        if (np.diff(index) == 1).all():
            return self.graph.call_method("narrow", (x, axis, int(index[0]), len(index)))
        name = f"select.{sum(key.startswith('select.') for key in self.held)}"
        return self.graph.call_method("index_select", (x, axis, self.hold(name, torch.from_numpy(index.copy()), "constant")))

    def _mix(self, step: Step, given: Arguments) -> None:
        k = given["site"]
        site, kept = self.flows.sites[k], self.plan.columns[k]
        known = layer_arguments(step)
        slot = known["input"].slot
        flow = self.flows.flows.get(slot)
        # the places of the input that are still there, and those of them that this layer reads
        live = np.ones(len(site.cols), dtype=bool)
        if flow is not None and flow.axis == given["axis"]:
            live = self.plan.live[flow.units]
        x = self.take(self.node(slot), given["axis"], (np.cumsum(live) - 1)[kept], int(live.sum()))
        weight, bias = self.node(site.weight), self._bias(k)
        if not given["biased"]:
            self.nodes[step.out.slot] = self.graph.call_method("matmul", (x, weight))
            return
        rest = {name: self.fill(value) for name, value in known.items() if name not in ("input", "weight", "bias")}
        if site.groups > 1:
            rest["groups"] = int(self.plan.live[site.rows].reshape(site.groups, -1).any(1).sum())
        func = F.linear if step.name == "linear" else step.func
        self.nodes[step.out.slot] = self.graph.call_function(func, (x, weight, bias), rest)

    def _bias(self, k: int) -> fx.Node | None:
        """The bias of a layer: its own, or a new one for the constants that it takes up."""
        site = self.flows.sites[k]
        if site.bias is not None:
            return self.node(site.bias)
        if not self.plan.biases[k]:
            return None
        value = self.folded(k)[torch.from_numpy(self.plan.live[site.rows])].to(self.flows.values[site.weight])
        name = self.trace.weights.get(site.weight, f"derived.{site.weight}")
        return self.hold(f"{name.removesuffix('weight')}bias" if name.endswith("weight") else f"{name}_bias", value, "parameter")

    def _depthwise(self, step: Step, given: Arguments) -> None:
        known = layer_arguments(step)
        rest = {name: self.fill(value) for name, value in known.items() if name not in ("input", "weight", "bias", "groups")}
        groups = self.count(given["input"])
        rest["groups"] = known["groups"] if groups < 0 else groups
        args = tuple(self.fill(known.get(name)) for name in ("input", "weight", "bias"))
        self.nodes[step.out.slot] = self.graph.call_function(step.func, args, rest)

    def _cat(self, step: Step, given: Arguments) -> None:
        parts = [self.node(term.slot) for term in step.args[0] if self.count(term.slot) != 0]
        self.nodes[step.out.slot] = parts[0] if len(parts) == 1 else self.graph.call_function(torch.cat, (parts, given["dim"]))

    def _pad(self, step: Step, given: Arguments) -> None:
        pad, place = list(given["pad"]), given["place"]
        pad[place : place + 2] = [int(self.plan.live[side].sum()) for side in given["new"]]
        args = (self.node(step.args[0].slot), pad, "constant", given["value"])
        self.nodes[step.out.slot] = self.graph.call_function(F.pad, args)
