"""Trace a network: run it, and list the operations that it calls.

The network runs on two small batches, of three examples and of two, while every torch function it calls is recorded. Python stays
Python: control flow, functional calls, nested modules, `isinstance` checks and several inputs need no care, which symbolic tracing
(torch.fx) does not manage for attention and recurrent layers, and torch.export only in seconds. Whole numbers that differ between the
two runs are sizes that follow the batch, so that the list holds for batches of any size.

Where the network asks for a number (`if mask.all()`, `.item()`) that nothing random has a part in, the list holds for inputs with that
number, and a `Guard` says so. The small batches are answered as the whole batch would be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dubito.curvature.capture import attention_forward, example_count
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.recurrent import PLAIN, RECURRENT
from dubito.network.weights import Watch, in_mode
from dubito.posteriors.predict.dropout import ALPHA, CHANNELS, ELEMENTS, WEIGHTED, Dropout
from dubito.posteriors.predict.streamlined.operations import (
    PROBE,
    Arguments,
    Guard,
    Nested,
    Ref,
    Size,
    Step,
    Trace,
    canonical,
    leaves_of,
    map_leaves,
    refs,
)
from dubito.posteriors.predict.streamlined.program import OtherWay, lower_guards
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.tree import Buffers, Params

_INPUTS = ("weight", "weight_ih_l0")  # of a layer: what multiplies its input
# what turns data into numbers that Python may decide by
TRUTHS = {"__bool__", "is_nonzero"}
NUMBERS = {"item", "__int__", "__float__", "__complex__", "__index__", "tolist", "numpy", "__array__"}
COMPARISONS: dict[str, Callable[..., bool]] = {
    "__contains__": lambda x, value: bool((x == value).any()),
    "equal": lambda a, b: a.shape == b.shape and bool((a == b).all()),
    "allclose": lambda a, b, *args, **kwargs: bool(torch.isclose(a, b, *args, **kwargs).all()),
}
# what gives as many numbers as the data say: which of the arguments says so
COUNTED = {"nonzero": 0, "argwhere": 0, "unique": 0, "unique_consecutive": 0, "bincount": 0, "masked_select": 1,
           "repeat_interleave": 1, "getitem": 1}  # fmt: skip
DECIDES = (
    "{} decides by the values of its data, in which something random has a part: a pass of means and variances cannot follow it. "
    "Predict with how='sampled' or 'linearized'"
)
TRIES = 64  # decisions of a network that turn out otherwise for the whole batch than for a few of its examples
VIEWS = {"get_T", "get_mT", "get_H", "get_data", "get_real"}  # attributes that are tensors; the others are sizes and types
Call = tuple[tuple, Arguments]  # args and kwargs
Axes = tuple[int, ...] | None


class Recorder(Watch):
    """Records the operations that are called inside of it as `Step`s."""

    def __init__(
        self,
        weights: Params,
        where: list[str],
        dropout: Dropout | None = None,
        random: Collection[str] | None = None,
        answers: Sequence[Guard] = (),
    ):
        super().__init__(weights)
        self.dropout, self.answers = dropout, answers
        self.guards: list[Guard] = []
        self.guarded = random is not None
        names = {f"{site}.{name}".lstrip("."): site for site in (dropout.sites if dropout else ()) for name in _INPUTS}
        self.sites = {id(weights[name]): site for name, site in names.items() if name in weights}
        self.where = where
        self.steps: list[Step] = []
        self.kept: list[Tensor] = [*weights.values()]  # so that no id is used again
        self.slots: dict[int, int] = {}  # of tensors, by id
        self.constants: dict[int, Tensor] = {}
        self.weights: dict[int, str] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.stale: set[int] = set()
        self.dependent: set[int] = set()  # slots that depend on the inputs
        self.random: set[int] = set()  # slots that depend on random weights, or on dropout
        self.undecided = {id(weights[name]) for name in random or () if name in weights}

    def new_slot(self, tensor: Tensor) -> int:
        """A slot for a tensor that is an input or the result of an operation."""
        slot = self.slots[id(tensor)] = len(self.shapes)
        self.kept.append(tensor)
        self.shapes[slot] = tuple(tensor.shape)
        return slot

    def slot(self, tensor: Tensor) -> int:
        """The slot of a tensor; one that no operation made is a weight or a constant."""
        if id(tensor) not in self.slots:
            slot = self.new_slot(tensor)
            name = self.name(tensor)
            if name is None:
                self.constants[slot] = tensor
            else:
                self.weights[slot] = name
            if id(tensor) in self.undecided:
                self.random.add(slot)
        return self.slots[id(tensor)]

    def _refer(self, value: Nested) -> Nested:
        """Arguments, with a `Ref` in the place of every tensor."""

        def _ref(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            ref = Ref(self.slot(leaf))
            if ref.slot in self.stale:
                raise ValueError(
                    f"{self.where[-1] or 'the network'} changes a tensor in place and reads it later through a view, which a pass of "
                    "means and variances cannot follow. Copy the tensor first: x = x.clone()"
                )
            return ref

        return map_leaves(_ref, value)

    def _results(self, value: Nested) -> Nested:
        return map_leaves(lambda leaf: Ref(self.new_slot(leaf)) if isinstance(leaf, Tensor) else None, value)

    def call(self, func: Callable, args: tuple, kwargs: Arguments) -> Nested:
        """The result of an operation, which is recorded; those that torch fuses are recorded step by step."""
        if self.dropout is not None:
            if func in ELEMENTS or func in CHANNELS:
                return self._dropped(func, *args, **kwargs)
            args, kwargs = self._with_dropout(self.dropout, func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return attention_forward(*args, **kwargs)
        if func in PLAIN:  # recurrent layers, and the packing of sequences
            with self:
                return PLAIN[func](*args)
        return self._single(func, args, kwargs)

    def _single(self, func: Callable, args: tuple, kwargs: Arguments) -> Nested:
        """Run one operation, and record it unless it leaves its input as it is (`contiguous`, dropout in eval mode)."""
        name, given = canonical(func), leaves_of((args, kwargs), Tensor)
        if any(leaf.is_inference() for leaf in given):
            raise ValueError(
                "tensors made in inference mode cannot be traced: prepare the inputs outside of torch.inference_mode()"
            )
        plain = getattr(func, "__name__", "")
        if plain in COMPARISONS:
            with self:
                return COMPARISONS[plain](*args, **kwargs)
        if plain in TRUTHS or plain in NUMBERS:
            return func(self._decided(args[0], plain in TRUTHS), *args[1:], **kwargs)
        versions = {id(leaf): leaf._version for leaf in given}
        result = func(*self._counted(name, args, kwargs), **kwargs)
        if name == "setitem":
            self._changed(args[0], self._refer((args, kwargs)), func, name)
            return result
        tensors = leaves_of(result, Tensor)
        if not tensors or (name.startswith("get_") and name not in VIEWS):
            return result
        before, leaf = self._refer((args, kwargs)), tensors[0]
        if len(tensors) > 1 or id(leaf) not in versions:
            self._add(func, name, before, self._results(result))
        elif leaf._version != versions[id(leaf)]:
            self._changed(leaf, before, func, name)
        return result

    def _counted(self, name: str, args: tuple, kwargs: Arguments) -> tuple:
        """The arguments, of which those that say how many numbers come out are decisions."""
        place = COUNTED.get(name, 0 if name == "where" and len(args) == 1 else None)
        if place is None or len(args) <= place or "output_size" in kwargs:
            return args

        def _decide(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or (name == "getitem" and leaf.dtype not in (torch.bool, torch.uint8)):
                return leaf
            return self._decided(leaf, False)

        return (*args[:place], map_leaves(_decide, args[place]), *args[place + 1 :])

    def _decided(self, tensor: Tensor, truth: bool) -> Tensor:
        """The tensor that the network decides by: in a small run that of the whole batch. That it depends on the inputs is a guard."""
        slot = self._refer(tensor).slot
        if slot in self.random or (slot in self.dependent and not self.guarded):
            raise ValueError(DECIDES.format(self.where[-1] or "the network"))
        if slot not in self.dependent:
            return tensor
        if len(self.guards) < len(self.answers):
            answer = self.answers[len(self.guards)].value
            require(answer.shape == tensor.shape, "what the network decides by has a number for every example")
            tensor = answer
        self.guards.append(Guard(slot, tensor.detach().clone(), truth, self.where[-1]))
        return tensor

    def _dropped(
        self, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, shared: Axes = None
    ) -> Tensor:
        """Dropout that is kept on: recorded, while the values stay as they are."""
        assert self.dropout is not None
        require(func not in ALPHA, "alpha dropout has no rule for one pass: predict with how='sampled'")
        if p == 0:
            return input
        if shared is None and func is F.dropout:  # in recurrent nets the time axis shares a mask
            first = self.dropout.batch_first
            shared = () if first is None or input.ndim != 3 else (-2,) if first else (-3,)
        before = self._refer(((input, p, True), {} if shared is None else {"shared": shared}))
        result = input.clone()
        self._add(func, canonical(func), before, self._results(result))
        self.random.update(self.steps[-1].outputs)
        return result

    def _with_dropout(self, dropout: Dropout, func: Callable, args: tuple, kwargs: Arguments) -> Call:
        """The same call, with dropout on the input of a layer that was named, and on inside of attention."""
        if func in RECURRENT:
            self._refuse_recurrent(args)
        site = self.sites.get(id(args[1])) if args[1:] else None
        if func is F.embedding and site in dropout.words:
            raise ValueError("dropout of words has no rule for one pass: predict with how='sampled'")
        if func in WEIGHTED and site is not None:  # of features, or channels: one mask for all positions
            ndim = args[0].ndim
            shared = tuple(range(1 - ndim, -1)) if func is F.linear else tuple(range(2 - ndim, 0))
            return (self._dropped(F.dropout, args[0], dropout.sites[site], shared=shared), *args[1:]), kwargs
        if func is F.multi_head_attention_forward and len(args) > 10 and args[10] > 0:
            return args, {**kwargs, "training": True, "need_weights": True}
        return args, kwargs

    def _refuse_recurrent(self, args: tuple) -> None:
        if any(rate > 0 for rate in leaves_of(args, float)) or any(id(leaf) in self.sites for leaf in leaves_of(args, Tensor)):
            raise ValueError("dropout in a recurrent layer has no rule for one pass: predict with how='sampled'")

    def _add(self, func: Callable, name: str, before: Call, out: Nested) -> None:
        step = Step(func, name, before[0], before[1], out, self.where[-1])
        self.steps.append(step)
        for known, read in ((self.dependent, step.inputs), (self.random, step.values)):
            if known.intersection(read):
                known.update(step.outputs)

    def _changed(self, tensor: Tensor, before: Call, func: Callable, name: str) -> None:
        """In place: the tensor is another value from here on, and its views are no longer what they were."""
        storage = tensor.untyped_storage().data_ptr()
        others = [other for other in self.kept if id(other) in self.slots and other.untyped_storage().data_ptr() == storage]
        self.stale |= {self.slots[id(other)] for other in (tensor, *others)}
        self._add(func, name, before, Ref(self.new_slot(tensor)))


@contextmanager
def _paths(network: nn.Module) -> Iterator[list[str]]:
    """The path of the module that is running, last in the list."""
    names = {id(module): name or type(module).__name__ for name, module in network.named_modules()}
    stack = [""]

    def _enter(module: nn.Module, _: object) -> None:
        stack.append(names.get(id(module), stack[-1]))

    def _leave(module: nn.Module, *_: object) -> None:
        stack.pop()

    hooks = [register_module_forward_pre_hook(_enter), register_module_forward_hook(_leave, always_call=True)]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def trace(
    model: Model,
    params: Params,
    x: Inputs,
    buffers: Buffers,
    dropout: Dropout | None = None,
    random: Collection[str] | None = None,
    exported: bool = False,
) -> Trace:
    """The operations of the network for inputs like x. With `dropout`, the network's and that which is added are operations too.

    `random` names the weights that are random: the network may then decide by what does not depend on them, in the way it does for all
    of x. Without it, the network may not decide by its data at all. `exported`: the network is told that it is being exported, and may
    leave out shortcuts for some inputs (a mask that hides nothing)."""
    record = partial(_record, model, params, x, buffers, dropout=dropout, random=random, exported=exported)
    if model.coupled:  # one whole: all that follows from it may carry noise, and no axis is that of examples
        whole = record(example_count(x))
        return _checked(replace(whole, dynamic=False, batch=example_count(x), axes=dict.fromkeys(whole.shapes, 0)))
    try:
        return _settled(record, [*tree.leaves(x)], {**buffers, **params})
    except (ValueError, RuntimeError, IndexError):  # it takes another way for another number of examples: for that number alone
        count = example_count(x)
        alone = record(count)
        return _checked(replace(alone, dynamic=False, batch=count, axes=_axes_alone(alone, count)))


def _settled(record: Callable[..., Trace], leaves: list[Tensor], weights: Params) -> Trace:
    """The trace of the two small runs, which decide as the network would for all of x: run again, until they do."""
    answers: list[Guard] = []
    for _ in range(TRIES):
        first = record(PROBE[0], answers=answers)
        made = _checked(_merge(first, record(PROBE[1], answers=first.guards)))
        try:
            if made.checks is not None:
                with torch.no_grad():
                    made.checks(*leaves, *(weights[name] for name in made.weights.values()))
        except OtherWay as way:
            guards = made.guards[: way.number + 1]
            answers = [*guards[:-1], replace(guards[-1], value=way.value)]
        else:
            return made
    raise ValueError(f"the network decides differently for all examples than for a few, {TRIES} times in a row")


def _checked(made: Trace) -> Trace:
    return replace(made, checks=lower_guards(made)) if made.guards else made


def _merge(first: Trace, second: Trace) -> Trace:
    """The trace for any number of examples, of those for three and for two; ValueError where they differ in more than sizes."""
    steps = [_merge_steps(a, b) for a, b in zip(first.steps, second.steps, strict=True)]
    same = all(_same(leaf, second.constants.get(slot)) for slot, leaf in first.constants.items())
    same = same and [guard.slot for guard in first.guards] == [guard.slot for guard in second.guards]
    require(same and first.output == second.output, "constants differ between the runs")
    return replace(first, steps=steps, axes=_axes(first.shapes, second.shapes))


def _axes(first: dict[int, tuple[int, ...]], second: dict[int, tuple[int, ...]]) -> dict[int, int]:
    """The axis of the examples: the only one whose size differs between the runs."""
    axes = {}
    for slot, shape in first.items():
        changed = [i for i, (a, b) in enumerate(zip(shape, second.get(slot, ()), strict=False)) if a != b]
        if len(changed) == 1 and shape[changed[0]] == PROBE[0]:
            axes[slot] = changed[0]
    return axes


def _axes_alone(made: Trace, count: int) -> dict[int, int]:
    """The axis of the examples in a single run: the first of that size, of what depends on the inputs."""
    dependent = set(made.inputs)
    for step in made.steps:
        if dependent.intersection(step.inputs):
            dependent.update(step.outputs)
    return {slot: made.shapes[slot].index(count) for slot in dependent if count in made.shapes[slot]}


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and torch.equal(a, b)


def _record(
    model: Model, params: Params, x: Inputs, buffers: Buffers, n: int, *,
    dropout: Dropout | None, random: Collection[str] | None, exported: bool, answers: Sequence[Guard] = (),
) -> Trace:  # fmt: skip
    """One run of the network on n examples, those of x over and over; its first decisions are given by `answers`."""
    count = example_count(x)

    def _resized(leaf: Tensor) -> Tensor:
        if leaf.shape[:1] != (count,):
            return leaf.clone()
        if count == 0:
            return leaf.new_zeros(n, *leaf.shape[1:])
        return leaf[torch.arange(n, device=leaf.device) % count]

    some = tree.apply_leaves(_resized, x)
    batched = [leaf.shape[:1] == (count,) for leaf in tree.leaves(x)]
    weights = {**buffers, **{name: leaf for name, leaf in params.items() if ":" not in name}}
    weights = {name: leaf.detach() for name, leaf in weights.items()}
    with torch.no_grad(), in_mode(model.network, False), _paths(model.network) as where:
        recorder = Recorder(weights, where, dropout, random, answers)
        inputs = [recorder.new_slot(leaf) for leaf in tree.leaves(some)]
        recorder.dependent = set(inputs)
        with recorder, _as_exported() if exported else nullcontext():
            f = model.call({name: weights[name] for name in params if ":" not in name}, some, {n: weights[n] for n in buffers})[0]
    output = recorder.slot(f)
    return Trace(
        recorder.steps,
        inputs,
        batched,
        recorder.weights,
        recorder.constants,
        output,
        recorder.shapes,
        batch=n,
        guards=recorder.guards,
    )


@contextmanager
def _as_exported() -> Iterator[None]:
    """With `torch.compiler.is_compiling()`, by which networks ask whether one program is to serve all inputs."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _merge_steps(a: Step, b: Step) -> Step:
    others = leaves_of((b.args, b.kwargs), object)
    same = (a.func is b.func or a.name == b.name) and len(leaves_of((a.args, a.kwargs), object)) == len(others)
    require(same and a.kwargs.keys() == b.kwargs.keys(), "the two runs took different ways")
    following = iter(others)
    args, kwargs = map_leaves(lambda leaf: _merge_leaves(leaf, next(following)), (a.args, a.kwargs))
    return replace(a, args=args, kwargs=kwargs)


def _merge_leaves(a: object, b: object) -> object:
    """An argument of both runs; a whole number that differs is a function of the number of examples."""
    if isinstance(a, bool) or not isinstance(a, Ref | int | float) or a == b:
        return a
    if not isinstance(a, int) or not isinstance(b, int):
        raise ValueError("the two runs took different ways")
    return Size.between(a, b)


__all__ = ["PROBE", "Recorder", "Ref", "Size", "Step", "Trace", "canonical", "refs", "trace"]
