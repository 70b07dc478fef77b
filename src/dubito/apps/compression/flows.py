r"""How units flow through a network: what each operation makes of the channels that go in.

Every tensor on the way from the input to the output has, where it can be told, an axis of units (features or channels), for each
place on it the unit that stands there, and the value it has if it is the same for all inputs and positions. A layer makes new
units; an activation hands them on; a sum joins those of its terms; a concatenation puts them side by side; a flattening repeats
each as often as there are positions. Where an operation treats the places of the axis neither alike nor apart (a softmax, a layer
norm, attention), its units are pinned: they stay, and what comes out is taken to be something new.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.posteriors.predict.streamlined.operations import Arguments, Ref, Step, Trace, follows_batch, leaves_of, resolve


class Units:
    """Sets of units that have been joined (union-find).

    >>> units = Units()
    >>> a, b = units.fresh(3), units.fresh(3)
    >>> units.join(a, b)
    >>> bool((units.roots(a) == units.roots(b)).all())
    True
    """

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.pins: list[np.ndarray] = []

    def fresh(self, n: int) -> np.ndarray:
        """n new units, each for itself."""
        start = len(self.parent)
        self.parent.extend(range(start, start + n))
        return np.arange(start, start + n)

    def root(self, unit: int) -> int:
        """The unit that stands for all of its set."""
        parent = self.parent
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    def roots(self, units: np.ndarray) -> np.ndarray:
        """The root of every unit."""
        return np.array([self.root(int(unit)) for unit in units], dtype=np.int64)

    def join(self, a: np.ndarray, b: np.ndarray) -> None:
        """From now on a[i] and b[i] go together."""
        for unit, other in zip(a.tolist(), b.tolist(), strict=True):
            p, q = self.root(unit), self.root(other)
            if p != q:
                self.parent[max(p, q)] = min(p, q)

    def pin(self, units: np.ndarray) -> None:
        """These stay, whatever the weights."""
        self.pins.append(units)

    @property
    def pinned(self) -> np.ndarray:
        """The roots of all that stay, [U]."""
        pinned = np.zeros(len(self.parent), dtype=bool)
        for units in self.pins:
            pinned[self.roots(units)] = True
        return pinned


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
    bias: int | None  # slot
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
    given: Arguments = field(default_factory=dict)


def layer_arguments(step: Step) -> Arguments:
    """The arguments of a layer by name."""
    if step.name.startswith("conv_transpose"):
        return step.arguments(*TRANSPOSED)
    return step.arguments(*(CONVOLUTION if step.name.startswith("conv") else CONVOLUTION[:3]))


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


def run(func: Callable, name: str, args: Any, kwargs: Arguments) -> Any:
    """The operation, with nothing changed in place."""
    out_of_place = getattr(Tensor, name, None)
    if getattr(func, "__name__", "").rstrip("_") == name != getattr(func, "__name__", "") and out_of_place is not None:
        func = out_of_place
    if kwargs.get("inplace"):
        kwargs = {**kwargs, "inplace": False}
    return func(*args, **kwargs)


def filled(value: Any, tensors: Callable[[int], Any], batch: int) -> Any:
    """A nested value with `tensors(slot)` in the place of every `Ref`, and sizes for `batch` examples."""
    return resolve(value, tensors, lambda size: size.value(batch))


Result = list[Flow] | None  # None: no way through
Rule = Callable[["Flows", int, Step], Result]


class Flows:
    """All flows of a trace."""

    def __init__(
        self,
        trace: Trace,
        weights: dict[str, Tensor],
        rules: Mapping[str, Rule],
        shapes: dict[int, tuple[int, ...]],
    ):
        self.rules, self.trace = rules, trace
        self.second = shapes  # those of a second run, with fewer examples
        self.units = Units()
        self.flows: dict[int, Flow] = {}
        # what is found out about weights is found out on the CPU, wherever the network is
        self.values: dict[int, Tensor] = {slot: weights[name].detach().cpu() for slot, name in trace.weights.items()}
        self.values |= {slot: tensor.cpu() for slot, tensor in trace.constants.items()}
        self.learned = set(trace.weights)  # weights, and what is computed of them alone
        self.sites: list[Site] = []
        self.edits: dict[int, Edit] = {}
        self.axes: dict[tuple[int, int], np.ndarray] = {}  # units along the axes of weights
        self.frozen: set[int] = set()  # weights that are read as a whole
        self.opaque: dict[str, str] = {}  # operations that were not cut through, and where they are
        self.anchors: list[tuple[np.ndarray, np.ndarray]] = []  # where one of the first stays, so must one of the second
        self.steps = self._dependent_steps()
        self.uses = Counter(slot for i in self.steps for slot in trace.steps[i].inputs)
        for i in self.steps:
            self._follow(i, trace.steps[i])
        if trace.output in self.flows:
            self.units.pin(self.flows[trace.output].units)
        for slot, axis in self.axes:
            if slot in self.frozen:
                self.units.pin(self.axes[slot, axis])

    def _dependent_steps(self) -> list[int]:
        """The operations that the output needs and that depend on the input; what no input has a part in is computed once."""
        dependent, needed, steps = set(self.trace.inputs), self.trace.needed, []
        for i, step in enumerate(self.trace.steps):
            if needed.isdisjoint(step.outputs):
                continue
            again = step.name.startswith("rand") or step.name in RANDOM | DROPOUT | {"setitem"}  # to be done each time
            if again or dependent.intersection(step.inputs) or follows_batch((step.args, step.kwargs)):
                dependent.update(step.outputs)
                steps.append(i)
            else:
                self._evaluate(step)
        return steps

    def _evaluate(self, step: Step) -> None:
        args, kwargs = filled((step.args, step.kwargs), lambda slot: self.values[slot].clone(), 0)
        with torch.no_grad():
            result = run(step.func, step.name, args, kwargs)
        self.values |= {slot: leaf.cpu() for slot, leaf in zip(step.outputs, leaves_of(result, Tensor), strict=True)}
        if self.learned.intersection(step.inputs):
            self.learned.update(step.outputs)

    def _follow(self, i: int, step: Step) -> None:
        rule = self.rules.get(step.name)
        flows = None if rule is None else rule(self, i, step)
        if flows is not None:
            self.flows |= dict(zip(step.outputs, flows, strict=True))
            return
        slots = set(step.inputs)
        for slot in slots & set(self.flows):
            self.units.pin(self.flows[slot].units)
            self.opaque.setdefault(step.name, step.where)
        self.frozen |= slots & set(self.values)
        self.edit(i, "same")

    def edit(self, i: int, kind: str, **given: Any) -> None:
        """Say how the operation i is written for fewer units."""
        self.edits[i] = Edit(kind, given)

    def unchanged(self, i: int, flow: Flow) -> Result:
        """The operation i is written as it was, and that flow comes out."""
        self.edit(i, "same")
        return [flow]

    def of(self, value: Any) -> Flow | None:
        """The flow of an argument, where it is known."""
        return self.flows.get(value.slot) if isinstance(value, Ref) else None

    def shape(self, slot: int) -> tuple[int, ...]:
        """The shape of a slot, for three examples."""
        return self.trace.shapes[slot]

    def tie(self, slot: int, axis: int, units: np.ndarray) -> None:
        """An axis of a weight goes with these units, and so do all others that it goes with."""
        if (slot, axis) in self.axes:
            self.units.join(self.axes[slot, axis], units)
        else:
            self.axes[slot, axis] = units

    def entering(self, ref: Ref, axis: int, n: int) -> Flow:
        """The units that a layer reads; those of which nothing is known stay in their tensor, but the layer may leave them."""
        flow = self.flows.get(ref.slot)
        if flow is not None and flow.axis == axis and len(flow.units) == n:
            return flow
        if flow is not None:
            self.units.pin(flow.units)
        units = self.units.fresh(n)
        self.units.pin(units)
        return Flow(axis, units, nothing(n))
