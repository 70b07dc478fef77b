"""A trace turned into a program of rules: a torch.fx GraphModule, whose code can be read, compiled and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from dubito.posteriors.predict.streamlined import rules as _rules  # noqa: F401 (registers them)
from dubito.posteriors.predict.streamlined.graph import GraphWriter
from dubito.posteriors.predict.streamlined.moments import Weight
from dubito.posteriors.predict.streamlined.operations import Nested, Step, Trace, slot_of
from dubito.posteriors.predict.streamlined.origin import find_origin
from dubito.posteriors.predict.streamlined.registry import KEYWORDS, RULES
from dubito.posteriors.predict.streamlined.rules.head import head
from dubito.posteriors.predict.streamlined.rules.sampled import Sampled

NOISE = {"dropout", "dropout1d", "dropout2d", "dropout3d"}
WIDE = 100  # outputs above which their covariances are left out
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
Node = fx.Node | None  # a value of the graph; None where there is none


class NoRule(ValueError):
    """An operation on random numbers that has no rule."""

    def __init__(self, step: Step):
        where = f" in {step.where}" if step.where else ""
        super().__init__(
            f"there is no rule for the mean and variance of {step.name}(){where}. Either write one (`@rule({step.name!r})` of "
            "dubito.posteriors.predict.streamlined, five lines, see docs/streamlined.md); or make the weights before it certain by "
            "`only=`; or draw this operation alone, by `predict(..., draws=64)`; or predict with how='linearized' or 'sampled'"
        )


def lower(
    trace: Trace,
    random: Iterable[str],
    *,
    adjoint: bool = False,
    rank: int = 0,
    noisy: bool = False,
    fallback: int = 0,
    taylor: bool = False,
    fixed: Mapping[str, Tensor | Weight] | None = None,
) -> fx.GraphModule:
    """The program: takes the inputs, then the weights in the order of `trace.weights`, and gives the moments of f.

    `random` names the weights that have a variance; `noisy` inputs have one too. Operations on what is certain stay as they are, and
    what f does not need is left out. Operations without a rule are drawn `fallback` times, if that is not 0. `fixed` holds the weights:
    squares of those that are certain are then formed once.
    """
    lowering = _Lowering(trace, set(random), noisy, fallback, fixed)
    lowering.modes = {"adjoint": adjoint, "rank": rank, "taylor": taylor}
    for step in _fuse_lerp(trace.steps):
        lowering.add(step)
    lowering.graph.output(lowering.nodes[trace.output])
    return fx.GraphModule(lowering.root, lowering.graph)


class _Lowering(GraphWriter):
    """The program while it is written; slots in `uncertain` are random."""

    modes: Mapping[str, int]  # adjoint, rank, taylor

    def __init__(self, trace: Trace, random: set[str], noisy: bool, fallback: int, fixed: Mapping[str, Tensor | Weight] | None):
        super().__init__(trace)
        self.noisy, self.fallback, self.fixed = noisy, fallback, fixed
        self.root, self.makers = nn.Module(), trace.makers
        self.nodes |= {slot: self.graph.placeholder(f"x{i}") for i, slot in enumerate(trace.inputs)}
        self.nodes |= {slot: self.graph.placeholder(f"w_{_identifier(name)}") for slot, name in trace.weights.items()}
        for i, (slot, tensor) in enumerate(trace.constants.items()):
            if slot in self.needed:
                self.nodes[slot] = self._buffer(f"constant{i}", tensor)
        self.uncertain = {slot for slot, name in trace.weights.items() if name in random}
        self.uncertain |= set(trace.inputs[:1]) if noisy else set()

    def examples(self, place: int) -> fx.Node:
        """The input at that place, as a tensor: its mean, where it is random."""
        first = super().examples(place)
        return self.graph.call_function(getattr, (first, "mean")) if self.noisy and place == 0 else first

    def add(self, step: Step) -> None:
        """The operation: its rule where something random goes in, itself elsewhere."""
        if self.needed.isdisjoint(step.outputs):
            return
        args, kwargs = self.fill((step.args, step.kwargs))
        if _makes_noise(step) or self.uncertain.intersection(step.inputs):
            node = self._rule(step, args, kwargs)
            self.uncertain.update(step.outputs)
        else:
            node = self.call(step, args, kwargs)
        self.assign(step.out, node)

    def _buffer(self, name: str, tensor: Tensor) -> fx.Node:
        if not hasattr(self.root, name):
            self.root.register_buffer(name, tensor, persistent=False)
        return self.graph.get_attr(name)

    def _rule(self, step: Step, args: tuple, kwargs: dict) -> fx.Node:
        if self._is_head(step):
            return self.graph.call_function(head, args, kwargs)
        if step.name in RULES:
            keywords = {key: self._keyword(key, step) for key in KEYWORDS[step.name]}
            given = {key: value for key, value in keywords.items() if value is not None}
            return self.graph.call_function(RULES[step.name], args, {**kwargs, **given})
        if not self.fallback:
            raise NoRule(step)
        name = f"sampled{sum(1 for _ in self.root.children())}"
        self.root.add_module(name, Sampled(step.func, self.fallback, bool(self.modes["adjoint"])))
        return self.graph.call_module(name, args, kwargs)

    def _is_head(self, step: Step) -> bool:
        """Whether it is an output layer, not too wide for covariances of all outputs."""
        last = step.result == self.trace.output and step.name == "linear"
        return last and not self.modes["adjoint"] and self.trace.shapes[self.trace.output][-1] <= WIDE

    # -- keywords of rules, see `registry`; None where there is nothing to say

    def _keyword(self, name: str, step: Step) -> Nested:
        return self.modes[name] or None if name in self.modes else self._KEYWORDS[name](self, step)

    def _axis(self, step: Step) -> int | None:
        return self.trace.axes.get(step.out.slot) if self.modes["adjoint"] and step.result is not None else None

    def _square(self, step: Step) -> Node:
        """The square of a weight that is certain, where it meets something that is not."""
        slot = slot_of(step.argument(1, "weight"))
        if self.fixed is None or slot is None or slot in self.uncertain or slot not in self.trace.weights:
            return None
        weight = self.fixed[self.trace.weights[slot]]
        assert isinstance(weight, Tensor)
        return self._buffer(f"square_{_identifier(self.trace.weights[slot])}", weight.detach().square())

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
        channels = self._buffer(
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

    def _node(self, value: object) -> Node:
        slot = slot_of(value)
        return None if slot is None else self.nodes[slot]

    _KEYWORDS: ClassVar[dict[str, Callable[[_Lowering, Step], object]]] = {
        "axis": _axis, "square": _square, "origin": _origin, "kernel": _kernel,
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
