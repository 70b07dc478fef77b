r"""How units flow through a network: what each operation makes of the channels that go in.

Every tensor on the way from the input to the output has, where it can be told, an axis of units (features or channels), for each
place on it the unit that stands there, and the value it has if it is the same for all inputs and positions. A layer makes new
units; an activation hands them on; a sum joins those of its terms; a concatenation puts them side by side; a flattening repeats
each as often as there are positions. Where an operation treats the places of the axis neither alike nor apart (a softmax, a layer
norm, attention), its units are pinned: they stay, and what comes out is taken to be something new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.apps.compression.units import Units
from dubito.posteriors.predict.streamlined.operations import Step, Trace, follows_batch, refs, resolve

DROPOUT = {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"}
RANDOM = {"bernoulli", "normal", "multinomial", "uniform", "poisson"}
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


class Flow(NamedTuple):
    """The units of a tensor."""

    axis: int  # counted from the end
    units: np.ndarray  # [n]
    const: Tensor  # [n], float64; NaN where the value depends on the input or on the position


@dataclass
class Site:
    """A layer that mixes units: its rows make new ones of those that its columns read."""

    step: int
    weight: int  # slot
    bias: Any  # slot or None
    row: int  # the axis of the weight that its rows are on; columns are on the other of 0 and 1
    rows: np.ndarray  # [O]
    cols: np.ndarray  # [I]
    reads: Tensor  # [O, I]: which weights are not zero
    absorbs: Tensor  # [I]: a constant that may go into the bias
    const: Tensor  # [I], 0 where it may not
    alone: bool  # no other layer has the same weight
    groups: int = 1


@dataclass
class Edit:
    """How an operation is written for fewer units."""

    kind: str
    given: dict[str, Any] = field(default_factory=dict)


def arguments(step: Step, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments by name."""
    return {**dict(zip(names, step.args, strict=False)), **step.kwargs}


def nothing(n: int) -> Tensor:
    """No constants."""
    return torch.full((n,), math.nan, dtype=torch.float64)


def matrix(weight: Tensor, row: int, groups: int = 1) -> Tensor:
    """A layer's weight as [O, I, positions of the kernel]; of one with groups, with the zeros between them."""
    weight = weight.detach() if row == 0 else weight.detach().transpose(0, 1)
    weight = weight.flatten(2) if weight.ndim > 2 else weight.unsqueeze(-1)
    if groups == 1:
        return weight
    block = torch.block_diag(*torch.ones(groups, len(weight) // groups, weight.shape[1])).to(weight)
    return weight.repeat(1, groups, 1) * block.unsqueeze(-1)


def run(func: Callable, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, with nothing changed in place."""
    out_of_place = getattr(Tensor, name, None)
    if getattr(func, "__name__", "").rstrip("_") == name != getattr(func, "__name__", "") and out_of_place is not None:
        func = out_of_place
    if kwargs.get("inplace"):
        kwargs = {**kwargs, "inplace": False}
    return func(*args, **kwargs)


def filled(value: Any, tensors: Callable[[int], Any], batch: Any) -> Any:
    """With tensors in the places of slots, and sizes that follow the batch as numbers."""
    return resolve(value, tensors, lambda size: size.value(batch))


Found = list[Flow] | None  # None: no way through
Rule = Callable[["Flows", int, Step], Found]


class Flows:
    """All flows of a trace."""

    def __init__(
        self,
        found: Trace,
        weights: dict[str, Tensor],
        rules: Mapping[str, Rule],
        needed: set[int],
        shapes: dict[int, tuple[int, ...]],
    ):
        self.rules, self.found, self.needed = rules, found, needed
        self.second = shapes  # those of a second run, with fewer examples
        self.units = Units()
        self.flows: dict[int, Flow] = {}
        # what is found out about weights is found out on the CPU, wherever the network is
        self.values: dict[int, Tensor] = {slot: weights[name].detach().cpu() for slot, name in found.weights.items()}
        self.values |= {slot: tensor.cpu() for slot, tensor in found.constants.items()}
        self.learned = set(found.weights)  # weights, and what is computed of them alone
        self.sites: list[Site] = []
        self.edits: dict[int, Edit] = {}
        self.axes: dict[tuple[int, int], np.ndarray] = {}  # units along the axes of weights
        self.frozen: set[int] = set()  # weights that are read as a whole
        self.opaque: dict[str, str] = {}  # operations that were not cut through, and where they are
        self.anchors: list[tuple[np.ndarray, np.ndarray]] = []  # where one of the first stays, so must one of the second
        self.uses: dict[int, int] = {}
        dependent = set(found.inputs)
        self.steps: list[int] = []
        for i, step in enumerate(found.steps):
            outs = {ref.slot for ref in refs(step.out)}
            if not outs & needed:
                continue
            inside = {ref.slot for ref in refs((step.args, step.kwargs))}
            again = step.name.startswith("rand") or step.name in RANDOM | DROPOUT | {"setitem"}  # to be done each time
            if not inside & dependent and not follows_batch((step.args, step.kwargs)) and not again:
                self._evaluate(step)
                continue
            dependent |= outs
            self.steps.append(i)
            for ref in refs((step.args, step.kwargs)):
                self.uses[ref.slot] = self.uses.get(ref.slot, 0) + 1
        for i in self.steps:
            self._follow(i, found.steps[i])
        if found.output in self.flows:
            self.units.pin(self.flows[found.output].units)
        for slot, axis in self.axes:
            if slot in self.frozen:
                self.units.pin(self.axes[slot, axis])

    def _evaluate(self, step: Step) -> None:
        """What no input has a part in is computed once."""
        args, kwargs = (filled(part, lambda slot: self.values[slot].clone(), 0) for part in (step.args, step.kwargs))
        with torch.no_grad():
            result = run(step.func, step.name, args, kwargs)
        for ref, leaf in zip(refs(step.out), result if isinstance(result, tuple | list) else (result,), strict=True):
            self.values[ref.slot] = leaf.cpu()
            if any(one.slot in self.learned for one in refs((step.args, step.kwargs))):
                self.learned.add(ref.slot)

    def _follow(self, i: int, step: Step) -> None:
        rule = self.rules.get(step.name)
        found = None if rule is None else rule(self, i, step)
        if found is None:
            slots = {ref.slot for ref in refs((step.args, step.kwargs))}
            for slot in slots & set(self.flows):
                self.units.pin(self.flows[slot].units)
                self.opaque.setdefault(step.name, step.where)
            self.frozen |= slots & set(self.values)
            self.edits[i] = Edit("same")
            return
        for ref, flow in zip(refs(step.out), found, strict=True):
            self.flows[ref.slot] = flow

    def shape(self, slot: int) -> tuple[int, ...]:
        return self.found.shapes[slot]

    def tie(self, slot: int, axis: int, units: np.ndarray) -> None:
        """An axis of a weight goes with these units, and so do all others that it goes with."""
        if (slot, axis) in self.axes:
            self.units.join(self.axes[slot, axis], units)
        else:
            self.axes[slot, axis] = units

    def entering(self, ref: Any, axis: int, n: int) -> Flow:
        """The units that a layer reads; those of which nothing is known stay in their tensor, but the layer may leave them."""
        flow = self.flows.get(ref.slot)
        if flow is not None and flow.axis == axis and len(flow.units) == n:
            return flow
        if flow is not None:
            self.units.pin(flow.units)
        units = self.units.fresh(n)
        self.units.pin(units)
        return Flow(axis, units, nothing(n))
