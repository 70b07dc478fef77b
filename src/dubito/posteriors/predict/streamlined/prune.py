"""Leave out what the head does not read: if a network takes one token of its last layer, only that token goes through it.

Backwards through the trace every value learns whether all of it is wanted or only one index of one axis. An operation that treats the
indices of that axis alike and apart then runs on the one; where it does not (the keys and values of an attention), all are computed.

`pool_first` moves maximum pooling before functions that only rise: the largest of relu(x) is the relu of the largest x. The network is
the same, and cheaper. The largest of Gaussians is nearer to a Gaussian than that of what a function has made of them, and the pooling
then comes right after the convolution that tells it what its numbers share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from dubito.posteriors.predict.streamlined.operations import Ref, Step, Trace, map_leaves, slot_of

ELEMENTWISE = (
    "relu", "leaky_relu", "gelu", "tanh", "sigmoid", "silu", "softplus", "elu", "selu", "mish", "erf", "exp", "neg", "square",
    "dropout", "contiguous", "clone", "float", "double", "to", "hardswish", "relu6",
)  # fmt: skip


class Index(NamedTuple):
    """One index of one axis, which is all that is wanted of a value."""

    axis: int
    place: int

    def along(self, axis: int) -> Index:
        """The same index of another axis."""
        return Index(axis, self.place)


Wanted = Index | None  # None: all of it
Needs = dict[int, Wanted]  # by slot of the inputs
Shape = tuple[int, ...]


def _normal(axis: int, n: int) -> int:
    return axis + n if axis < 0 else axis


# -- what an operation needs of its first argument to give one index of its result; False if it needs all

SourceRule = Callable[[Step, Index, Shape, Shape], "Index | bool"]


def _same(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    return index


def _linear(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    return index.axis < len(out) - 1 and index


def _norm(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    return index.axis < len(out) - len(step.argument(1, "normalized_shape")) and index


def _transpose(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    a, b = (_normal(axis, len(out)) for axis in step.args[1:3])
    return index.along({a: b, b: a}.get(index.axis, index.axis))


def _permute(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    return index.along(_normal(_sizes(step)[index.axis], len(out)))


def _unflatten(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    axis, extra = _normal(step.args[1], len(source)), len(out) - len(source)
    if index.axis < axis:
        return index
    return index.axis > axis + extra and index.along(index.axis - extra)


def _flatten(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    start, end = step.argument(1, "start_dim", 0), _normal(step.argument(2, "end_dim", -1), len(source))
    if index.axis < start:
        return index
    return index.axis > start and index.along(index.axis + end - start)


def _view(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    same = source[: index.axis + 1] == out[: index.axis + 1]
    return same and isinstance(_sizes(step)[index.axis], int) and index


def _attention(step: Step, index: Index, source: Shape, out: Shape) -> Index | bool:
    mask, causal = step.argument(3, "attn_mask"), step.argument(5, "is_causal", False)
    return index.axis == len(out) - 2 and mask is None and not causal and index


SOURCE_RULES: dict[str, SourceRule] = {
    **dict.fromkeys(ELEMENTWISE, _same),
    "linear": _linear,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "transpose": _transpose,
    "permute": _permute,
    "unflatten": _unflatten,
    "flatten": _flatten,
    "view": _view,
    "reshape": _view,
    "scaled_dot_product_attention": _attention,
}


def _needs(step: Step, index: Index, trace: Trace) -> Needs | None:
    """What an operation needs of its inputs to give that one index; None if it needs all of each."""
    if step.result is None:
        return None
    out = trace.shapes[step.result]
    if step.name in ("add", "sub", "mul", "div"):
        return {slot: _broadcast(index, trace.shapes[slot], len(out)) for slot in step.inputs}
    rule = SOURCE_RULES.get(step.name)
    if rule is None or step.source is None:
        return None
    need = rule(step, index, trace.shapes[step.source], out)
    return {**dict.fromkeys(step.inputs), step.source: need} if isinstance(need, Index) else None


def _broadcast(index: Index, shape: Shape, n: int) -> Wanted:
    axis = index.axis - (n - len(shape))
    return index.along(axis) if axis >= 0 and shape[axis] > 1 else None


def _selected(step: Step, trace: Trace) -> Index | None:
    """The only index of its input that x[:, i] or x.select(axis, i) reads."""
    if step.source is None or step.result is None:
        return None
    shape = trace.shapes[step.source]
    if step.name == "getitem":
        match step.args[1]:
            case (slice(start=None, stop=None, step=None), int(i)) if not isinstance(i, bool) and len(shape) >= 3:
                return Index(1, i % shape[1])
    elif step.name == "select":
        match step.args[1:]:
            case (int(axis), int(i)) if (axis := _normal(axis, len(shape))) > 0:
                return Index(axis, i % shape[axis])
    return None


def _sizes(step: Step) -> list[Any]:
    """Whole numbers that are given one by one or as a sequence."""
    return list(step.args[1]) if isinstance(step.args[1], tuple | list) else list(step.args[1:])


@dataclass
class _Rewriter:
    """The trace, written anew."""

    trace: Trace
    wanted: dict[int, Wanted]
    steps: list[Step] = field(default_factory=list)
    cut: dict[tuple[int, Index], Ref] = field(default_factory=dict)  # slots that hold one index of another's

    def narrowed(self, slot: int, index: Index, where: str) -> Ref:
        """The slot with that index alone."""
        if self.wanted.get(slot) == index and slot not in self.trace.weights:
            return Ref(slot)  # it was computed so
        if (slot, index) not in self.cut:
            new = self.cut[slot, index] = Ref(max(self.trace.shapes) + 1)
            self.trace.shapes[new.slot] = _with_one(self.trace.shapes[slot], index.axis)
            if slot in self.trace.axes:
                self.trace.axes[new.slot] = self.trace.axes[slot]
            self.steps.append(Step(torch.narrow, "narrow", (Ref(slot), *index, 1), {}, new, where))
        return self.cut[slot, index]

    def add(self, step: Step, needs: Needs) -> None:
        """The operation, on the indices of its inputs that it needs."""
        if not any(needs.values()):
            self.steps.append(step)
            return

        def _narrow(leaf: Any) -> Any:
            slot = slot_of(leaf)
            need = None if slot is None else needs.get(slot)
            return leaf if slot is None or need is None else self.narrowed(slot, need, step.where)

        args, kwargs = map_leaves(_narrow, (step.args, step.kwargs))
        assert step.result is not None
        index = self.wanted.get(step.result)
        if index is not None:
            self.trace.shapes[step.result] = _with_one(self.trace.shapes[step.result], index.axis)
            if step.name in ("view", "reshape"):
                args = (args[0], *_with_one(_sizes(step), index.axis))
        elif step.name == "getitem":
            args = (args[0], (slice(None), 0))
        elif step.name == "select":
            args = (args[0], args[1], 0)
        self.steps.append(replace(step, args=args, kwargs=kwargs))


def _with_one(shape: Any, axis: int) -> tuple[Any, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def prune(trace: Trace) -> Trace:
    """The same function, with less to compute."""
    wanted, needs = _plan(trace)
    if not any(any(need.values()) for need in needs.values()):
        return trace
    rewriter = _Rewriter(replace(trace, shapes=dict(trace.shapes), axes=dict(trace.axes)), wanted)
    for i, step in enumerate(trace.steps):
        rewriter.add(step, needs.get(i, {}))
    return replace(rewriter.trace, steps=rewriter.steps)


def _plan(trace: Trace) -> tuple[dict[int, Wanted], dict[int, Needs]]:
    """What is computed of every slot, and by number of the step what it needs of its inputs."""
    wanted: dict[int, Wanted] = {trace.output: None}
    plans: dict[int, Needs] = {}
    for i, step in reversed(list(enumerate(trace.steps))):
        outs = step.outputs
        if wanted.keys().isdisjoint(outs):
            continue
        index = wanted.get(outs[0]) if len(outs) == 1 else None
        if index is not None:
            needs = _needs(step, index, trace)
        else:
            selected = _selected(step, trace)
            needs = None if selected is None or step.source is None else Needs({step.source: selected})
        if needs is not None:
            plans[i] = needs
        for slot in step.inputs:
            need = None if needs is None else needs.get(slot)
            wanted[slot] = need if wanted.get(slot, need) == need else None
    cut = {slot for i in plans for slot in trace.steps[i].outputs}  # all others compute, or are, all of themselves
    return {slot: index if slot in cut else None for slot, index in wanted.items()}, plans


POOLS = {f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)}
RISING = {"relu", "relu6", "tanh", "sigmoid", "elu", "selu", "softplus", "softsign", "logsigmoid", "erf"}


def pool_first(trace: Trace) -> Trace:
    """The same function, with poolings moved up."""
    readers: Counter[int | None] = Counter(slot for step in trace.steps for slot in step.inputs)
    steps, shapes, axes = list(trace.steps), dict(trace.shapes), dict(trace.axes)
    for i, pool in enumerate(steps):
        j = next((j for j in range(i) if steps[j].result == pool.source), None) if _pools(pool) else None
        if j is None or not _rises(steps[j]) or readers[pool.source] > 1 or pool.source == trace.output:
            continue
        function, new = steps[j], Ref(max(shapes) + 1)
        shapes[new.slot] = shapes[pool.out.slot]
        if pool.out.slot in axes:
            axes[new.slot] = axes[pool.out.slot]
        steps[j] = replace(pool, args=(function.args[0], *pool.args[1:]), out=new)
        steps[i] = replace(function, args=(new, *function.args[1:]), out=pool.out)
    return replace(trace, steps=steps, shapes=shapes, axes=axes)


def _pools(step: Step) -> bool:
    return step.name in POOLS and step.result is not None and step.source is not None


def _rises(step: Step) -> bool:
    """With its usual settings; with others it may fall."""
    plain = all(isinstance(value, bool) for value in step.args[1:]) and step.kwargs.keys() <= {"inplace"}
    return step.name in RISING and plain and step.source is not None
