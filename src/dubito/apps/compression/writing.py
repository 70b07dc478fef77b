"""The network that is left, written anew: a graph of the operations of the old one, on fewer units."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito.apps.compression.flows import CONVOLUTION, TRANSPOSED, Flows, Site, arguments, matrix
from dubito.posteriors.predict.streamlined.operations import Ref, Size, Step, refs, resolve
from dubito.tensors import tree


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
            derived = (
                slot not in self.found.weights and slot in self.flows.learned and self.flows.values[slot].is_floating_point()
            )
            kind = "parameter" if name in self.parameters or derived else "constant" if slot in self.found.constants else "buffer"
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
        return resolve(value, self.node, self.size)

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
