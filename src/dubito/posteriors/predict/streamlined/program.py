"""A trace turned into a program of rules: a torch.fx GraphModule, whose code can be read, compiled and exported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

from dubito.posteriors.predict.streamlined import rules as _rules  # noqa: F401 (registers them)
from dubito.posteriors.predict.streamlined.moments import KEYWORDS, RULES
from dubito.posteriors.predict.streamlined.operations import (
    Arguments,
    Nested,
    Ref,
    Size,
    Step,
    Trace,
    refs,
    resolve,
    slot_of,
)
from dubito.posteriors.predict.streamlined.rules.activations import load_forward_mode
from dubito.posteriors.predict.streamlined.rules.attention import find_origin
from dubito.posteriors.predict.streamlined.rules.groups import find_groups
from dubito.posteriors.predict.streamlined.rules.linear import head
from dubito.posteriors.predict.streamlined.rules.places import set_item
from dubito.posteriors.predict.streamlined.rules.sampled import Sampled


class GraphWriter:
    """A graph while it is written: `nodes` are its values, by slot of the trace."""

    def __init__(self, trace: Trace, needed: set[int] | None = None):
        self.trace, self.graph, self.needed = trace, fx.Graph(), trace.needed if needed is None else needed
        self.nodes: dict[int, fx.Node] = {}
        self.batch: fx.Node | None = None

    def node(self, slot: int) -> fx.Node:
        """The value of a slot."""
        return self.nodes[slot]

    def examples(self, place: int) -> fx.Node:
        """The input at that place, as a tensor."""
        return self.nodes[self.trace.inputs[place]]

    def size(self, size: Size) -> fx.Node:
        """constant + slope * B, where B is the number of examples."""
        call = self.graph.call_function
        if self.batch is None:
            first = self.examples(self.trace.batched.index(True))
            self.batch = call(operator.getitem, (call(getattr, (first, "shape")), 0))
        product = self.batch if size.slope == 1 else call(operator.mul, (self.batch, size.slope))
        return product if size.constant == 0 else call(operator.add, (product, size.constant))

    def fill(self, value: Nested) -> Nested:
        """A nested value with nodes in the place of every `Ref` and `Size`."""
        return resolve(value, self.node, self.size)

    def call(self, step: Step, args: tuple, kwargs: Arguments) -> fx.Node:
        """The operation itself, nothing in place: what it reads may be read by others."""
        name = _NAMES.get(step.func, getattr(step.func, "__name__", ""))
        if step.name == "setitem":
            return self.graph.call_function(set_item, args, kwargs)
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], step.name[4:]))
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        if getattr(Tensor, name, None) is step.func and args and isinstance(args[0], fx.Node):
            return self.graph.call_method(_out_of_place(name, step.name), args, kwargs)
        return self.graph.call_function(step.func, args, kwargs)

    def assign(self, out: Nested, node: fx.Node) -> None:
        """The node, or its items, become the values of the slots in `out`."""
        if isinstance(out, Ref):
            self.nodes[out.slot] = node
            return
        for i, item in enumerate(out):
            if any(ref.slot in self.needed for ref in refs(item)):
                self.assign(item, self.graph.call_function(operator.getitem, (node, i)))


_NAMES = {Tensor.__pow__: "__pow__", Tensor.__ipow__: "__ipow__"}  # of methods that call themselves otherwise


def _out_of_place(name: str, canonical: str) -> str:
    """The method that does the same and changes nothing: `add` for `add_`, `__add__` for `__iadd__`."""
    plain = f"__{canonical}__" if name.startswith("__i") else name if name.endswith("__") else name.removesuffix("_")
    return plain if hasattr(Tensor, plain) else name


def add_tensor(root: nn.Module, name: str, tensor: Tensor, *, parameter: bool = False, persistent: bool = False) -> None:
    """Register a tensor under a dotted name; its gradient is wanted if it is a parameter."""
    path, _, leaf = name.rpartition(".")
    place = root
    for part in path.split(".") if path else ():
        if part not in place._modules:
            place.add_module(part, nn.Module())
        place = place.get_submodule(part)
    if parameter:
        place.register_parameter(leaf, nn.Parameter(tensor, requires_grad=tensor.requires_grad))
    else:
        place.register_buffer(leaf, tensor, persistent=persistent)


NOISE = {"dropout", "dropout1d", "dropout2d", "dropout3d"}
WIDE = 100  # outputs above which their covariances are left out
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
Node = fx.Node | None  # a value of the graph; None where there is none


CHOICES = {"topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "multinomial", "searchsorted", "bucketize"}


def _is_complex(step: Step) -> bool:
    return step.name.startswith("fft_") or step.name in ("complex", "view_as_complex", "polar", "stft")


class NoRule(ValueError):
    """An operation on random numbers that has no rule."""

    def __init__(self, step: Step):
        name = f"{step.name}() in {step.where}" if step.where else f"{step.name}()"
        if step.name in CHOICES:
            message = (
                f"{name} chooses by random numbers, which a pass of means and variances cannot follow. Either make the weights before "
                "it certain by `only=`; or predict with how='linearized', where the choice is that of the mean weights, or 'sampled'"
            )
        elif _is_complex(step):
            message = (
                f"{name} gives complex numbers, of which a pass of means and variances knows no variance. Either make the weights "
                "before it certain by `only=`; or predict with how='linearized' or 'sampled'"
            )
        else:
            message = (
                f"there is no rule for the mean and variance of {name}. Either write one (`@rule({step.name!r})` of "
                "dubito.posteriors.predict.streamlined, five lines, see docs/streamlined.md); or make the weights before it certain by "
                "`only=`; or draw this operation alone, by `predict(..., draws=64)`; or predict with how='linearized' or 'sampled'"
            )
        super().__init__(message)


def lower(
    trace: Trace,
    random: Iterable[str],
    *,
    adjoint: bool = False,
    rank: int = 0,
    noisy: bool = False,
    fallback: int = 0,
    taylor: bool = False,
    square: Callable[[str], Tensor] | None = None,
) -> fx.GraphModule:
    """The program: takes the inputs, then the weights in the order of `trace.weights`, and gives the moments of f.

    `random` names the weights that have a variance; `noisy` inputs have one too. Operations on what is certain stay as they are, and
    what f does not need is left out. Operations without a rule are drawn `fallback` times, if that is not 0. `square` gives the
    square of a weight that is certain, formed once. To first order (`taylor`) the means are those of the plain network, which the
    adjoint then runs as it is, but for dropout: it takes weights and inputs that are all certain.
    """
    if taylor:
        load_forward_mode()
    plain = adjoint and taylor
    lowering = _Lowering(trace, () if plain else random, noisy=noisy and not plain, fallback=fallback, square=square)
    lowering.modes = {"adjoint": adjoint, "rank": rank, "taylor": taylor}
    for step in _fuse_lerp(trace.steps):
        lowering.add(step)
    lowering.graph.output(lowering.nodes[trace.output])
    return fx.GraphModule(lowering.root, lowering.graph)


def lower_guards(trace: Trace) -> fx.GraphModule:
    """The program that checks the guards: takes the inputs and the weights as `lower`'s, and raises `OtherWay` where one is broken."""
    lowering = _Lowering(trace, (), needed=trace.behind({guard.slot for guard in trace.guards}))
    steps, guards = iter(trace.steps), iter(enumerate(trace.guards))
    for i, guard in guards:  # what the network did after a decision may not be possible after another
        while guard.slot not in lowering.nodes:
            lowering.add(next(steps))
        value = lowering.buffer(f"guard{i}", guard.value)
        lowering.graph.call_function(agree, (lowering.nodes[guard.slot], value, guard.truth, guard.where, i))
    lowering.graph.output(None)
    return fx.GraphModule(lowering.root, lowering.graph)


class OtherWay(ValueError):
    """The network would decide otherwise than it did: by `value`, in the decision of that number."""

    def __init__(self, number: int, value: Tensor, where: str):
        super().__init__(_OTHERWISE.format(where or "the network"))
        self.number, self.value = number, value


_OTHERWISE = (
    "{} decides by the values of its data, and for these inputs otherwise than for the example that this program was made with: make "
    "another by as_module with an example that decides as they do, or use posterior.predict"
)


def agree(value: Tensor, expected: Tensor, truth: bool, where: str, number: int) -> None:
    """Raise where the network would decide otherwise; in what is compiled or exported, as an operation."""
    if value.shape != expected.shape:
        raise OtherWay(number, value, where)
    same = (value != 0) == (expected != 0) if truth else (value == expected) | ((value != value) & (expected != expected))
    if torch.compiler.is_compiling() or isinstance(same, FakeTensor):
        torch._assert_async(same.all(), _OTHERWISE.format(where or "the network"))
    elif not same.all():
        raise OtherWay(number, value, where)


class _Lowering(GraphWriter):
    """The program while it is written; slots in `uncertain` are random."""

    modes: Mapping[str, int]  # adjoint, rank, taylor

    def __init__(
        self, trace: Trace, random: Iterable[str], *, noisy: bool = False, fallback: int = 0,
        square: Callable[[str], Tensor] | None = None, needed: set[int] | None = None,
    ):  # fmt: skip
        super().__init__(trace, needed)
        self.noisy, self.fallback, self.square = noisy, fallback, square
        self.root, self.makers = nn.Module(), trace.makers
        self.nodes |= {slot: self.graph.placeholder(f"x{i}") for i, slot in enumerate(trace.inputs)}
        self.nodes |= {slot: self.graph.placeholder(f"w_{_identifier(name)}") for slot, name in trace.weights.items()}
        for i, (slot, tensor) in enumerate(trace.constants.items()):
            if slot in self.needed:
                self.nodes[slot] = self.buffer(f"constant{i}", tensor)
        names = set(random)
        self.uncertain = {slot for slot, name in trace.weights.items() if name in names}
        self.uncertain |= set(trace.inputs[:1]) if noisy else set()

    def examples(self, place: int) -> fx.Node:
        """The input at that place, as a tensor: its mean, where it is random."""
        first = super().examples(place)
        return self.graph.call_function(getattr, (first, "mean")) if self.noisy and place == 0 else first

    def add(self, step: Step) -> None:
        """The operation: its rule where something random goes in, itself elsewhere."""
        if self.needed.isdisjoint(step.outputs):
            return
        if _makes_noise(step) or (self.uncertain.intersection(step.values) and not self._is_shift(step)):
            node = self._rule(step, *self.fill((step.args, step.kwargs)))
            if self.modes["adjoint"] and self.modes["taylor"]:
                node = self.graph.call_function(getattr, (node, "mean"))
            else:
                self.uncertain.update(step.outputs)
        else:
            node = self.call(step, *resolve((step.args, step.kwargs), self._mean, self.size))
        self.assign(step.out, node)

    def _mean(self, slot: int) -> fx.Node:
        return self.graph.call_function(getattr, (self.nodes[slot], "mean")) if slot in self.uncertain else self.nodes[slot]

    def buffer(self, name: str, tensor: Tensor) -> fx.Node:
        """A tensor of the program's own."""
        if not hasattr(self.root, name):
            self.root.register_buffer(name, tensor, persistent=False)
        return self.graph.get_attr(name)

    def _rule(self, step: Step, args: tuple, kwargs: dict) -> fx.Node:
        if self._is_head(step):
            return self.graph.call_function(head, args, {**kwargs, "taylor": True} if self.modes["taylor"] else kwargs)
        if step.name in RULES:
            keywords = {key: self._keyword(key, step) for key in KEYWORDS[step.name]}
            given = {key: value for key, value in keywords.items() if value is not None}
            return self.graph.call_function(RULES[step.name], args, {**kwargs, **given})
        if not self.fallback or step.name in CHOICES or _is_complex(step):
            raise NoRule(step)
        name = f"sampled{sum(1 for _ in self.root.children())}"
        self.root.add_module(name, Sampled(step.func, self.fallback, bool(self.modes["adjoint"])))
        return self.graph.call_module(name, args, kwargs)

    def _is_head(self, step: Step) -> bool:
        """Whether it is an output layer, not too wide for covariances of all outputs."""
        last = step.result == self.trace.output and step.name == "linear"
        return last and not self.modes["adjoint"] and self.trace.shapes[self.trace.output][-1] <= WIDE

    def _is_shift(self, step: Step) -> bool:
        """Whether it is the largest of each group, without a gradient: what a softmax takes off, by which nothing changes."""
        extreme = step.name == "scatter_reduce" and step.argument(4, "reduce") in ("amax", "amin")
        maker = self.makers.get(slot_of(step.argument(3, "src")))
        return extreme and maker is not None and maker.name == "detach"

    # -- keywords of rules, see `registry`; None where there is nothing to say

    def _keyword(self, name: str, step: Step) -> Nested:
        return self.modes[name] or None if name in self.modes else self._KEYWORDS[name](self, step)

    def _axis(self, step: Step) -> int | None:
        return self.trace.axes.get(step.out.slot) if self.modes["adjoint"] and step.result is not None else None

    def _known_square(self, step: Step) -> Node:
        """The square of a weight that is certain, where it meets something that is not."""
        slot = slot_of(step.argument(1, "weight"))
        if self.square is None or slot is None or slot in self.uncertain or slot not in self.trace.weights:
            return None
        name = self.trace.weights[slot]
        return self.buffer(f"square_{_identifier(name)}", self.square(name))

    def _origin(self, step: Step) -> tuple | None:
        """The layer behind what an attention averages, as `Origin` has it: the third argument, or the second of a product."""
        place = 2 if step.name == "scaled_dot_product_attention" else 1
        known = find_origin(self.trace, slot_of(step.argument(place, "value")), self.uncertain)
        if known is None:
            return None
        layer = map(self._node, (*known.step.args, known.step.kwargs.get("bias"))[:3])
        start, flat = int(known.channels.min()), known.channels.flatten()
        if torch.equal(flat, torch.arange(start, start + len(flat))):
            return (*layer, (start, *known.channels.shape), known.swapped)
        channels = self.buffer(
            f"channels{sum(1 for _ in self.root.buffers())}", known.channels
        )  # on the CPU: any device can index
        return (*layer, channels, known.swapped)

    def _kernel(self, step: Step) -> tuple | None:
        """The convolution behind what is pooled, whose random kernel all positions share, as `Kernel` has it.
        A batch norm between the two scales every channel, which changes no correlation."""
        whole = not self.noisy and not any(_makes_noise(other) for other in self.trace.steps)
        maker = self.makers.get(step.source)
        if whole and maker is not None and maker.name == "batch_norm":
            maker = self.makers.get(maker.source)
        if maker is None or maker.name not in ("conv1d", "conv2d", "conv3d"):
            return None
        given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": None, **maker.arguments(*CONVOLUTION)}
        if given["groups"] != 1 or slot_of(given["weight"]) not in self.uncertain:
            return None
        layer = (self._node(given[name]) for name in ("input", "weight", "bias"))
        return (*layer, given["stride"], given["padding"], given["dilation"], whole)

    def _groups(self, step: Step) -> tuple | None:
        """What `group_softmax` takes, where a division is such a softmax."""
        known = find_groups(self.trace, step)
        return None if known is None else (self.nodes[known[0]], known[1], self.nodes[known[2]], known[3])

    def _node(self, value: object) -> Node:
        slot = slot_of(value)
        return None if slot is None else self.nodes[slot]

    _KEYWORDS: ClassVar[dict[str, Callable[[_Lowering, Step], object]]] = {
        "axis": _axis, "square": _known_square, "origin": _origin, "kernel": _kernel, "groups": _groups,
    }  # fmt: skip


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _fuse_lerp(steps: list[Step]) -> list[Step]:
    """The same, with a + w (b - a), as a GRU has it, as one operation: its terms are not independent, since a is in both."""
    makers: dict[int | None, Step] = {step.result: step for step in steps if step.result is not None}

    def _fused(step: Step) -> Step:
        if step.name != "addcmul" or len(step.args) != 3 or step.kwargs:
            return step
        difference = makers.get(slot_of(step.args[2]))
        if difference is None or difference.name != "sub" or difference.kwargs or difference.args[1] != step.args[0]:
            return step
        return Step(torch.lerp, "lerp", (step.args[0], difference.args[0], step.args[1]), {}, step.out, step.where)

    return [_fused(step) for step in steps]


def _makes_noise(step: Step) -> bool:
    """Whether it makes random what is certain: dropout, which is recorded only where it is on."""
    return step.name in NOISE and bool(step.argument(2, "training", True))
