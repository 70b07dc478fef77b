r"""Units that nothing needs, taken out of the tensors.

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
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito import tree
from dubito.apps.compression.flows import CONVOLUTION, TRANSPOSED, Flows, Site, arguments, filled, matrix, run
from dubito.model import pick_output, swapped
from dubito.predict.streamlined.program import _needed
from dubito.predict.streamlined.trace import PROBE, Ref, Size, Step, Trace, refs, trace
from dubito.randomness import forked
from dubito.tree import Buffers, Params


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


def call(network: nn.Module, x: Any) -> Any:
    """The network at x: a tensor, a tuple of arguments or a dict of them."""
    args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, list | tuple) else (x,), {})
    return network(*args, **kwargs)


@dataclass(frozen=True)
class _Plain:
    """A network without a likelihood, as the trace wants it."""

    network: nn.Module
    output: Callable[[Any], Tensor]

    def call(self, params: Params, x: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        weights = {**buffers, **params}
        with swapped(self.network, weights):
            return self.output(call(self.network, x)), {name: weights[name] for name in buffers}


def cut(
    network: nn.Module,
    x: Any,
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
        if name not in own or own[name].shape != leaf.shape:
            raise ValueError(f"{name} {list(leaf.shape)} is no parameter or buffer of the network in that shape")
    weights = {name: given.get(name, leaf).detach() for name, leaf in own.items()}
    weights |= dropped(network, weights, outputs or {}, rows=True)
    weights |= dropped(network, weights, inputs or {}, rows=False)
    with torch.no_grad(), forked():  # dropout that is always on would draw
        flows = follow(network, weights, x, output)
        return write(network, flows, plan(flows, x))


def dropped(network: nn.Module, weights: Params, masks: Mapping[str, Tensor], *, rows: bool) -> Params:
    """The weights of some layers with those of the outputs (or inputs) named by the masks set to zero."""
    found: Params = {}
    modules = dict(network.named_modules())
    for name, mask in masks.items():
        layer = modules.get(name)
        prefix = f"{name}." if name else ""
        if layer is None or f"{prefix}weight" not in weights:
            known = [one for one in modules if f"{one}.weight" in weights]
            raise ValueError(f"{name!r} is no layer with a weight; the network has {known[:8]}{'...' if known[8:] else ''}")
        weight, turned = weights[f"{prefix}weight"], isinstance(layer, nn.modules.conv._ConvTransposeNd)
        axis = int(rows == turned)  # of a transposed convolution, inputs come first
        if not rows and getattr(layer, "groups", 1) > 1:
            raise ValueError(
                f"{name!r} has groups, in which an input has weights of its own group only: drop outputs of the layer before"
            )
        if mask.dtype != torch.bool or mask.shape != weight.shape[axis : axis + 1]:
            raise ValueError(
                f"a mask of {name!r} is a bool tensor of shape [{weight.shape[axis]}], True for what is dropped; "
                f"got {mask.dtype} {list(mask.shape)}"
            )
        gone = mask.to(weight.device).nonzero().squeeze(1)
        found[f"{prefix}weight"] = weight.index_fill(axis, gone, 0)
        if rows and f"{prefix}bias" in weights:
            found[f"{prefix}bias"] = weights[f"{prefix}bias"].index_fill(0, gone, 0)
    return found


def follow(network: nn.Module, weights: Params, x: Any, output: Callable[[Any], Tensor]) -> Flows:
    """The flows of the network with these weights."""
    plain: Any = _Plain(network, output)
    names = [name for name, _ in network.named_parameters()]
    params = {name: weights[name] for name in names}
    found = trace(plain, params, x, {name: leaf for name, leaf in weights.items() if name not in params})
    if not found.dynamic:
        raise ValueError(
            "the network takes another way for another number of examples, so there is no module of it for any number"
        )
    return Flows(found, weights, _needed(found), _shapes(found, weights, x))


def _shapes(found: Trace, weights: Params, x: Any) -> dict[int, tuple[int, ...]]:
    """Of all tensors, in a run with fewer examples than the trace has."""
    n, values = PROBE[1], {slot: weights[name] for slot, name in found.weights.items()} | found.constants
    for slot, leaf, batched in zip(found.inputs, tree.leaves(x), found.batched, strict=True):
        some = leaf[torch.arange(n, device=leaf.device) % max(1, len(leaf))] if batched and len(leaf) else leaf
        values[slot] = leaf.new_zeros(n, *leaf.shape[1:]) if batched and not len(leaf) else some.clone()
    for step in found.steps:
        args, kwargs = (filled(part, values.__getitem__, n) for part in (step.args, step.kwargs))
        if step.name == "setitem":
            result = args[0].clone()
            result[args[1]] = args[2]
        else:
            result = run(step.func, step.name, args, kwargs)
        _keep(step.out, result, values)
    return {slot: tuple(value.shape) for slot, value in values.items()}


def _keep(out: Any, result: Any, values: dict[int, Any]) -> None:
    if isinstance(out, Ref):
        values[out.slot] = result
    elif isinstance(out, tuple):
        for part, item in zip(out, result, strict=True):
            _keep(part, item, values)


def plan(flows: Flows, x: Any) -> Plan:
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
    biases = []
    for site, kept in zip(flows.sites, columns, strict=True):
        rows = torch.from_numpy(live[roots[site.rows]])
        folded = site.reads[rows] & (site.const != 0) & torch.from_numpy(~kept)
        biases.append(site.bias is not None or (site.alone and bool(folded.any())))
    return Plan(live[roots], tuple(columns), tuple(biases), _like(flows.found, x))


def _like(found: Trace, x: Any) -> Any:
    """The shapes of x, with a few examples: a number that is not the first size of what has no axis of examples."""
    others = {leaf.shape[0] for leaf, batched in zip(tree.leaves(x), found.batched, strict=True) if not batched and leaf.ndim}
    n, which = next(n for n in range(2, 99) if n not in others), iter(found.batched)
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


def architecture(network: nn.Module) -> bytes:
    """A digest of the names and shapes of a network's weights."""
    shapes = [(name, list(leaf.shape)) for name, leaf in [*network.named_parameters(), *network.named_buffers()]]
    return hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).digest()


def signature(flows: Flows) -> int:
    """A digest of the operations and of which units go together: what a plan is about."""
    names = [flows.found.steps[i].name for i in flows.steps]
    about = json.dumps([names, sorted((slot, shape) for slot, shape in flows.second.items())]).encode()
    roots = flows.units.roots(np.arange(len(flows.units.parent)))
    cols = [site.cols.astype("<i8").tobytes() for site in flows.sites]
    return int.from_bytes(
        hashlib.blake2b(b"".join([about, roots.astype("<i8").tobytes(), *cols]), digest_size=4).digest(), "little"
    )


def choices(flows: Flows, live: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of which a file says whether they are there: one unit of each set, and the columns of layers whose units are."""
    roots = flows.units.roots(np.arange(len(flows.units.parent)))
    units = np.flatnonzero(roots == np.arange(len(roots)))
    return units, [live[site.cols] for site in flows.sites]


# -- the network, written anew


def write(network: nn.Module, flows: Flows, planned: Plan) -> Compressed:
    """The network as a graph of what stays."""
    return _Writer(network, flows, planned).module()


def where(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask))


class _Writer:
    def __init__(self, network: nn.Module, flows: Flows, planned: Plan):
        self.network, self.flows, self.plan, self.found = network, flows, planned, flows.found
        self.parameters = dict(network.named_parameters())
        self.device = next(iter(tree.leaves({**self.parameters, **dict(network.named_buffers())}))).device
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.held: dict[str, tuple[Tensor, str]] = {}  # tensors of the module, and what they are there
        self.weights: dict[int, fx.Node] = {}
        self.batch: fx.Node | None = None
        self.sites = {site.step: k for k, site in enumerate(flows.sites)}
        self.layers = {site.weight: k for k, site in enumerate(flows.sites) if site.alone}
        self.biased = {site.bias: k for k, site in enumerate(flows.sites) if site.alone and site.bias is not None}

    def mask(self, slot: int) -> np.ndarray | None:
        """Which places stay along the axis of units."""
        flow = self.flows.flows.get(slot)
        return None if flow is None else self.plan.live[flow.units]

    def count(self, slot: int) -> int:
        mask = self.mask(slot)
        return -1 if mask is None else int(mask.sum())

    def hold(self, name: str, tensor: Tensor, kind: str) -> fx.Node:
        self.held[name] = (tensor.to(self.device), kind)
        return self.graph.create_node("get_attr", name)

    def node(self, slot: int) -> fx.Node:
        """What a slot holds now."""
        if slot in self.nodes:
            return self.nodes[slot]
        if slot not in self.weights:
            name = self.found.weights.get(slot, f"derived.{slot}" if slot not in self.found.constants else f"constant.{slot}")
            kind = "parameter" if name in self.parameters else "constant" if slot in self.found.constants else "buffer"
            self.weights[slot] = self.hold(name, self.weight(slot).clone(), kind)
        return self.weights[slot]

    def weight(self, slot: int) -> Tensor:
        """A weight without the rows and columns that are gone."""
        value = self.flows.values[slot].detach()
        if slot in self.biased:
            site = self.flows.sites[self.biased[slot]]
            value = (value.double() + self.folded(self.biased[slot])).to(value.dtype)
            return value[torch.from_numpy(self.plan.live[site.rows])]
        for axis in range(value.ndim):
            units = self.flows.axes.get((slot, axis))
            if slot in self.layers and axis < 2:
                site, kept = self.flows.sites[self.layers[slot]], self.plan.columns[self.layers[slot]]
                if axis == 1 - site.row:
                    if site.groups > 1:
                        value = self.grouped(site, kept, value)
                        continue
                    value = value.index_select(axis, where(kept))
                    continue
            if units is not None:
                value = value.index_select(axis, where(self.plan.live[units]))
        return value

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

    def size(self, size: Any) -> Any:
        if not isinstance(size, Size):
            return size
        if self.batch is None:
            first = self.nodes[self.found.inputs[self.found.batched.index(True)]]
            self.batch = self.graph.call_function(operator.getitem, (self.graph.call_function(getattr, (first, "shape")), 0))
        scaled = self.batch if size.slope == 1 else self.graph.call_function(operator.mul, (self.batch, size.slope))
        return scaled if size.constant == 0 else self.graph.call_function(operator.add, (scaled, size.constant))

    def fill(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.node(value.slot)
        if isinstance(value, Size):
            return self.size(value)
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.fill(value.start), self.fill(value.stop), self.fill(value.step))
        if isinstance(value, tuple | list):
            return type(value)(self.fill(item) for item in value)
        return value

    def module(self) -> Compressed:
        names = list(self.plan.like) if isinstance(self.plan.like, dict) else None
        count = len(self.found.inputs)
        for i, slot in enumerate(self.found.inputs):
            self.nodes[slot] = self.graph.placeholder(names[i] if names else "x" if count == 1 else f"x{i}")
        self.size(Size(0, 1)) if True in self.found.batched else None
        for i in self.flows.steps:
            step = self.found.steps[i]
            if all(self.count(ref.slot) == 0 for ref in refs(step.out)):
                continue  # nothing of it is left
            self.step(i, step)
        self.graph.output(self.node(self.found.output))
        self.graph.eliminate_dead_code()
        return self.built()

    def built(self) -> Compressed:
        root, used = nn.Module(), {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        for name, (tensor, kind) in self.held.items():
            if name not in used:
                continue
            *path, leaf = name.split(".")
            place = root
            for part in path:
                if part not in place._modules:
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            if kind == "parameter":
                old = self.parameters.get(name)
                place.register_parameter(leaf, nn.Parameter(tensor, requires_grad=old is None or old.requires_grad))
            else:
                place.register_buffer(leaf, tensor, persistent=kind == "buffer")
        module = Compressed(root, self.graph, "Compressed")
        module.meta["fixed"] = {name for name in used if self.held[name][1] == "constant"}
        for name in module.meta["fixed"]:  # which a GraphModule forgets
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._non_persistent_buffers_set.add(leaf)
        module.meta.update(plan=self.plan, kept=self.flows.opaque)
        module.meta.update(
            architecture=architecture(self.network), origin=choices(self.flows, self.plan.live), trace=signature(self.flows)
        )
        named = [(self.found.weights.get(site.weight, ""), site) for site in self.flows.sites if site.row == 0]
        module.meta["rows"] = {name: self.plan.live[site.rows] for name, site in named if name}  # outputs that are left
        return module.eval()

    # -- operations

    def step(self, i: int, step: Step) -> None:
        edit = self.flows.edits[i]
        write = getattr(self, f"_{edit.kind}")
        write(step, edit.given)

    def call(self, step: Step, args: Any, kwargs: dict[str, Any]) -> fx.Node:
        """The operation itself, nothing in place: what it reads may be read by others."""
        name = getattr(step.func, "__name__", "")
        if step.name == "setitem":
            return self.graph.call_function(_set, args, kwargs)
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], step.name[4:]))
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        if getattr(Tensor, name, None) is step.func and args and isinstance(args[0], fx.Node):
            plain = name[:-1] if name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name[:-1]) else name
            plain = f"__{step.name}__" if name.startswith("__i") and hasattr(Tensor, f"__{step.name}__") else plain
            return self.graph.call_method(plain, args, kwargs)
        return self.graph.call_function(step.func, args, kwargs)

    def put(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, Ref):
            self.nodes[out.slot] = node
        elif isinstance(out, tuple):
            for i, part in enumerate(out):
                if part is not None:
                    self.put(part, self.graph.call_function(operator.getitem, (node, i)))

    def _same(self, step: Step, given: dict[str, Any]) -> None:
        self.put(step.out, self.call(step, self.fill(step.args), self.fill(step.kwargs)))

    def _sized(self, step: Step, given: dict[str, Any]) -> tuple[fx.Node, list[Any]]:
        (part,), slot = given["parts"], step.out.slot
        sizes = [self.size(size) for size in part["sizes"]]
        sizes[part["axis"]] = self.count(slot)
        return self.node(step.args[0].slot), sizes

    def _reshape(self, step: Step, given: dict[str, Any]) -> None:
        x, sizes = self._sized(step, given)
        self.nodes[step.out.slot] = self.graph.call_method("reshape", (x, *sizes))

    def _expand(self, step: Step, given: dict[str, Any]) -> None:
        x, sizes = self._sized(step, given)
        self.nodes[step.out.slot] = self.graph.call_method("expand", (x, *sizes))

    def _select(self, step: Step, given: dict[str, Any]) -> None:
        source = step.args[0].slot
        kept = self.mask(source)
        assert kept is not None
        places = np.cumsum(kept) - 1
        for ref, part in zip(refs(step.out), given["parts"], strict=True):
            mask = self.mask(ref.slot)
            index = places[part["index"][mask]]
            if len(index):
                self.nodes[ref.slot] = self.taken(self.node(source), self.flows.flows[source].axis, index, int(kept.sum()))

    def taken(self, x: fx.Node, axis: int, index: np.ndarray, n: int) -> fx.Node:
        """Some of the places of an axis."""
        if len(index) == n and (index == np.arange(n)).all():
            return x
        if (np.diff(index) == 1).all():
            return self.graph.call_method("narrow", (x, axis, int(index[0]), len(index)))
        name = f"select.{sum(key.startswith('select.') for key in self.held)}"
        return self.graph.call_method("index_select", (x, axis, self.hold(name, torch.from_numpy(index.copy()), "constant")))

    def _mix(self, step: Step, given: dict[str, Any]) -> None:
        k = given["site"]
        site, kept = self.flows.sites[k], self.plan.columns[k]
        names = (
            TRANSPOSED
            if step.name.startswith("conv_transpose")
            else CONVOLUTION
            if step.name.startswith("conv")
            else CONVOLUTION[:3]
        )
        known = arguments(step, names)
        slot = known["input"].slot
        own = self.flows.flows.get(slot)
        # the places of the input that are still there, and those of them that this layer reads
        there = (
            self.plan.live[own.units] if own is not None and own.axis == given["axis"] else np.ones(len(site.cols), dtype=bool)
        )
        x = self.taken(self.node(slot), given["axis"], (np.cumsum(there) - 1)[kept], int(there.sum()))
        weight, bias = self.node(site.weight), None
        if site.bias is not None:
            bias = self.node(site.bias)
        elif self.plan.biases[k]:
            value = self.folded(k)[torch.from_numpy(self.plan.live[site.rows])].to(self.flows.values[site.weight])
            name = self.found.weights.get(site.weight, f"derived.{site.weight}")
            bias = self.hold(
                name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}_bias", value, "parameter"
            )
        if not given["biased"]:
            self.nodes[step.out.slot] = self.graph.call_method("matmul", (x, weight))
            return
        rest = {name: self.fill(value) for name, value in known.items() if name not in ("input", "weight", "bias")}
        if site.groups > 1:
            rest["groups"] = int(self.plan.live[site.rows].reshape(site.groups, -1).any(1).sum())
        func = F.linear if step.name == "linear" else step.func
        self.nodes[step.out.slot] = self.graph.call_function(func, (x, weight, bias), rest)

    def _depthwise(self, step: Step, given: dict[str, Any]) -> None:
        known = arguments(step, CONVOLUTION)
        rest = {name: self.fill(value) for name, value in known.items() if name not in ("input", "weight", "bias", "groups")}
        groups = self.count(given["input"])
        rest["groups"] = known["groups"] if groups < 0 else groups
        args = tuple(self.fill(known.get(name)) for name in CONVOLUTION[:3])
        self.nodes[step.out.slot] = self.graph.call_function(step.func, args, rest)

    def _cat(self, step: Step, given: dict[str, Any]) -> None:
        parts = [self.node(part.slot) for part in step.args[0] if self.count(part.slot) != 0]
        self.nodes[step.out.slot] = parts[0] if len(parts) == 1 else self.graph.call_function(torch.cat, (parts, given["dim"]))

    def _pad(self, step: Step, given: dict[str, Any]) -> None:
        pad, place = list(given["pad"]), given["place"]
        pad[place : place + 2] = [int(self.plan.live[side].sum()) for side in given["new"]]
        args = (self.node(step.args[0].slot), pad, "constant", given["value"])
        self.nodes[step.out.slot] = self.graph.call_function(F.pad, args)


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x
