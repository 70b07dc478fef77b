"""What the head does not read is not computed: if a network takes one token of its last layer, only that token goes through it.

Backwards through the trace every value learns whether all of it is wanted or only one index of one axis. An operation that treats the
indices of that axis alike and apart then runs on the one; where it does not (the keys and values of an attention), all are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dubito.posteriors.predict.streamlined.trace import Ref, Size, Step, Trace, refs

APART = {
    "relu", "leaky_relu", "gelu", "tanh", "sigmoid", "silu", "softplus", "elu", "selu", "mish", "erf", "exp", "neg", "square",
    "dropout", "contiguous", "clone", "float", "double", "to", "hardswish", "relu6",
}  # fmt: skip
PAIRS = {"add", "sub", "mul", "div"}


class One(NamedTuple):
    """Only this index of this axis is wanted."""

    axis: int
    at: int


Wanted = One | None  # None: all of it
Passed = dict[int, One | None]  # by slot of the inputs


def _normal(axis: int, n: int) -> int:
    return axis + n if axis < 0 else axis


def _asked(step: Step, found: Trace) -> One | None:
    """What of its input x[:, i] or x.select(axis, i) asks for."""
    source = step.args[0] if step.args else None
    if not isinstance(source, Ref) or not isinstance(step.out, Ref):
        return None
    n = len(found.shapes[source.slot])
    if step.name == "getitem" and isinstance(step.args[1], tuple):
        index: Any = step.args[1]
        if (
            len(index) == 2
            and index[0] == slice(None)
            and isinstance(index[1], int)
            and not isinstance(index[1], bool)
            and n >= 3
        ):
            return One(1, index[1] % found.shapes[source.slot][1])
    if step.name == "select" and len(step.args) == 3 and all(isinstance(a, int) for a in step.args[1:]):
        given: list[Any] = list(step.args[1:])
        axis = _normal(given[0], n)
        return One(axis, given[1] % found.shapes[source.slot][axis]) if axis > 0 else None
    return None


def _through(step: Step, one: One, found: Trace) -> Passed | None:
    """What an operation needs of its inputs to give that one index; None if it needs all."""
    if not isinstance(step.out, Ref):
        return None
    shapes, n = found.shapes, len(found.shapes[step.out.slot])
    first = step.args[0] if step.args and isinstance(step.args[0], Ref) else None
    others = {ref.slot: None for ref in refs((step.args[1:], step.kwargs))}
    if step.name in PAIRS:
        passed: Passed = {}
        for ref in refs((step.args, step.kwargs)):
            shape = shapes[ref.slot]
            axis = one.axis - (n - len(shape))
            passed[ref.slot] = One(axis, one.at) if axis >= 0 and shape[axis] > 1 else None
        return passed
    if first is None:
        return None
    source = shapes[first.slot]
    if step.name in APART:
        return {**others, first.slot: one}
    if step.name == "linear" and one.axis < n - 1:
        return {**others, first.slot: one}
    if step.name in ("layer_norm", "rms_norm") and one.axis < n - len(_given(step, 1, "normalized_shape")):
        return {**others, first.slot: one}
    if step.name == "transpose":
        a, b = (_normal(axis, n) for axis in step.args[1:3])
        return {first.slot: One({a: b, b: a}.get(one.axis, one.axis), one.at)}
    if step.name == "permute":
        order = step.args[1] if isinstance(step.args[1], tuple | list) else step.args[1:]
        return {first.slot: One(_normal(order[one.axis], n), one.at)}
    if step.name == "unflatten":
        axis, extra = _normal(step.args[1], len(source)), n - len(source)
        if one.axis < axis:
            return {first.slot: one}
        return {first.slot: One(one.axis - extra, one.at)} if one.axis > axis + extra else None
    if step.name == "flatten":
        start, end = _given(step, 1, "start_dim", 0), _normal(_given(step, 2, "end_dim", -1), len(source))
        if one.axis < start:
            return {first.slot: one}
        return {first.slot: One(one.axis + end - start, one.at)} if one.axis > start else None
    if step.name in ("view", "reshape") and source[: one.axis + 1] == shapes[step.out.slot][: one.axis + 1]:
        return {first.slot: one} if isinstance(_sizes(step)[one.axis], int) else None
    if step.name == "scaled_dot_product_attention" and one.axis == n - 2:
        mask, causal = _given(step, 3, "attn_mask", None), _given(step, 5, "is_causal", False)
        return {**others, first.slot: one} if mask is None and not causal else None
    return None


def _given(step: Step, place: int, name: str, default: Any = None) -> Any:
    return step.args[place] if len(step.args) > place else step.kwargs.get(name, default)


def _sizes(step: Step) -> list[Any]:
    return (
        list(step.args[1])
        if isinstance(step.args[1], tuple | list) and not isinstance(step.args[1], Size)
        else list(step.args[1:])
    )


@dataclass
class Rewriter:
    """The trace, written anew."""

    found: Trace
    wanted: dict[int, Wanted]
    steps: list[Step] = field(default_factory=list)
    cut: dict[tuple[int, One], int] = field(default_factory=dict)  # slots that hold one index of another's

    def one_of(self, slot: int, one: One, where: str) -> Ref:
        """The slot with that index alone."""
        if self.wanted.get(slot) == one and slot not in self.found.weights:
            return Ref(slot)  # it was computed so
        if (slot, one) not in self.cut:
            new = max(self.found.shapes) + 1
            shape = list(self.found.shapes[slot])
            shape[one.axis] = 1
            self.found.shapes[new] = tuple(shape)
            if slot in self.found.axes:
                self.found.axes[new] = self.found.axes[slot]
            self.steps.append(Step(torch.narrow, "narrow", (Ref(slot), one.axis, one.at, 1), {}, Ref(new), where))
            self.cut[slot, one] = new
        return Ref(self.cut[slot, one])


def pruned(found: Trace) -> Trace:
    """The same function, with less to compute."""
    wanted: dict[int, Wanted] = {found.output: None}
    plans: dict[int, Passed] = {}  # by step: inputs of which it needs one index
    for i in range(len(found.steps) - 1, -1, -1):
        step = found.steps[i]
        outs = [ref.slot for ref in refs(step.out)]
        if not any(slot in wanted for slot in outs):
            continue
        passed: Passed | None = None
        one = wanted[outs[0]] if len(outs) == 1 and outs[0] in wanted else None
        asked = _asked(step, found) if one is None else None
        if one is not None:
            passed = _through(step, one, found)
        elif asked is not None:
            passed = {step.args[0].slot: asked}
        if passed is not None:
            plans[i] = passed
        for ref in refs((step.args, step.kwargs)):
            need = passed.get(ref.slot) if passed is not None else None
            wanted[ref.slot] = need if ref.slot not in wanted or wanted[ref.slot] == need else None
    sources = {*found.inputs, *found.weights, *found.constants}
    for slot in sources & set(wanted):  # these are there in full
        wanted[slot] = None
    if not any(any(plan.values()) for plan in plans.values()):
        return found
    found = replace(found, shapes=dict(found.shapes), axes=dict(found.axes))
    rewriter = Rewriter(found, wanted)
    makers = {ref.slot: i for i, step in enumerate(found.steps) for ref in refs(step.out)}
    for slot, one in list(wanted.items()):  # what computes all of itself holds all, whatever was wanted
        if one is not None and makers.get(slot) not in plans:
            wanted[slot] = None
    for i, step in enumerate(found.steps):
        plan = plans.get(i)
        if plan is None or not any(plan.values()):
            rewriter.steps.append(step)
            continue
        rewriter.steps.append(_rewritten(step, plan, rewriter, wanted.get(step.out.slot)))
    return replace(found, steps=rewriter.steps)


def _rewritten(step: Step, plan: Passed, rewriter: Rewriter, one: Wanted) -> Step:
    def swap(value: Any) -> Any:
        if isinstance(value, Ref):
            need = plan.get(value.slot)
            return value if need is None else rewriter.one_of(value.slot, need, step.where)
        if isinstance(value, Size):
            return value
        if isinstance(value, tuple | list):
            return type(value)(swap(item) for item in value)
        return {key: swap(item) for key, item in value.items()} if isinstance(value, dict) else value

    args, kwargs = swap(step.args), swap(step.kwargs)
    if step.name == "getitem" and one is None:
        args = (args[0], (slice(None), 0))
    elif step.name == "select" and one is None:
        args = (args[0], args[1], 0)
    elif step.name in ("view", "reshape") and one is not None:
        sizes = _sizes(step)
        sizes[one.axis] = 1
        args = (args[0], *sizes)
    if one is not None:
        shape = list(rewriter.found.shapes[step.out.slot])
        shape[one.axis] = 1
        rewriter.found.shapes[step.out.slot] = tuple(shape)
    return replace(step, args=args, kwargs=kwargs)
