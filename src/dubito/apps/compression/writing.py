"""The network that is left, written anew: a graph of the operations of the old one, on fewer units."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito.apps.compression.flows import Flows, Site, layer_arguments, matrix
from dubito.posteriors.predict.streamlined.operations import Arguments, Size, Step
from dubito.posteriors.predict.streamlined.program import GraphWriter, add_tensor
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
    """Of which a file says whether they are there: one unit of each set, and the columns of layers whose units are."""
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

    def hold(self, name: str, tensor: Tensor, kind: str) -> fx.Node:
        """A tensor of the module: a "parameter", "buffer" or "constant"."""
        self.held[name] = (tensor.to(self.device), kind)
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
        kind = "parameter" if learned else "constant" if constant else "buffer"
        return f"{'constant' if constant else 'derived'}.{slot}", value, kind

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
        for name, (tensor, kind) in self.held.items():
            if name in used:
                old = self.parameters.get(name)
                learned = kind == "parameter"
                tensor = tensor.requires_grad_(learned and (old is None or old.requires_grad)) if learned else tensor
                add_tensor(root, name, tensor, parameter=learned, persistent=kind == "buffer")
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
        (part,), slot = given["parts"], step.out.slot
        sizes = self.fill(part["sizes"])
        sizes[part["axis"]] = self.count(slot)
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
        for slot, part in zip(step.outputs, given["parts"], strict=True):
            index = places[part["index"][self.mask(slot)]]
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
        there = np.ones(len(site.cols), dtype=bool)
        if flow is not None and flow.axis == given["axis"]:
            there = self.plan.live[flow.units]
        x = self.take(self.node(slot), given["axis"], (np.cumsum(there) - 1)[kept], int(there.sum()))
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
        parts = [self.node(part.slot) for part in step.args[0] if self.count(part.slot) != 0]
        self.nodes[step.out.slot] = parts[0] if len(parts) == 1 else self.graph.call_function(torch.cat, (parts, given["dim"]))

    def _pad(self, step: Step, given: Arguments) -> None:
        pad, place = list(given["pad"]), given["place"]
        pad[place : place + 2] = [int(self.plan.live[side].sum()) for side in given["new"]]
        args = (self.node(step.args[0].slot), pad, "constant", given["value"])
        self.nodes[step.out.slot] = self.graph.call_function(F.pad, args)
