"""What a network computes, as a list of operations: found by running it.

The network runs on two small batches, of three examples and of two, while every torch function it calls is written down. Python stays
Python: control flow, functional calls, nested modules, `isinstance` checks and several inputs need no care, which symbolic tracing
(torch.fx) does not manage for attention and recurrent layers, and torch.export only in seconds. Whole numbers that differ between the
two runs are sizes that follow the batch, so that the list holds for batches of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from dubito.curvature.capture import _attention, example_count
from dubito.model import Model
from dubito.network.recurrent import RECURRENT, unrolled
from dubito.network.weights import mode
from dubito.posteriors.predict.dropout import ALPHA, CHANNELS, ELEMENTS, WEIGHTED, Dropout
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

_INPUTS = ("weight", "weight_ih_l0")  # of a layer: what multiplies its input
PROBE = (3, 2)  # examples in the two runs
# what turns data into a number that Python may decide by
DECISIONS = {"item", "__bool__", "__int__", "__float__", "__index__", "tolist", "__contains__", "nonzero", "allclose", "equal"}


class Ref(NamedTuple):
    """A tensor that an earlier operation made, or that went in."""

    slot: int


class Size(NamedTuple):
    """A whole number that follows the batch: constant + slope * B."""

    constant: int
    slope: int


@dataclass
class Step:
    """One operation."""

    func: Callable
    name: str
    args: tuple
    kwargs: dict[str, Any]
    out: Any  # nested Refs
    where: str  # path of the module that called it


@dataclass
class Trace:
    """The operations from the inputs and the weights to f."""

    steps: list[Step]
    inputs: list[int]  # slots of the leaves of x
    batched: list[bool]  # which of them have an axis of examples
    weights: dict[int, str]  # slots of parameters and buffers
    constants: dict[int, Tensor]
    output: int
    shapes: dict[int, tuple[int, ...]]  # of every slot, for three examples
    axes: dict[int, int] = field(default_factory=dict)  # which axis of a slot is that of the examples, where it is clear
    dynamic: bool = True  # whether it holds for any number of examples
    batch: int = PROBE[0]


def canonical(func: Callable) -> str:
    """The name of an operation, whatever way it was called: torch.relu, F.relu, x.relu(), x.relu_() are all "relu"."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return "get_" + getattr(func.__self__, "__name__", "")  # pyright: ignore[reportFunctionMemberAccess]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[0] in "ri" and name[1:] in ("add", "sub", "mul", "truediv", "matmul", "pow"):
            name = ("r" if name[0] == "r" and name[1:] in ("sub", "truediv", "matmul", "pow") else "") + name[1:]
        return {"truediv": "div", "rtruediv": "rdiv"}.get(name, name)
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return {"log_sigmoid": "logsigmoid", "_threshold": "threshold"}.get(
        name, name
    )  # which torch calls otherwise than they are called


class Recorder(TorchFunctionMode):
    """Writes down what is called."""

    def __init__(self, weights: Params, where: list[str], dropout: Dropout | None = None):
        super().__init__()
        self.dropout = dropout
        names = {f"{site}.{name}".lstrip("."): site for site in (dropout.sites if dropout else ()) for name in _INPUTS}
        self.sites = {id(weights[name]): site for name, site in names.items() if name in weights}
        self.where, self.steps, self.kept = where, [], []
        self.slots: dict[int, int] = {}
        self.constants: dict[int, Tensor] = {}
        self.weights: dict[int, str] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.stale: set[int] = set()
        self.dependent: set[int] = set()  # slots that depend on the inputs
        self.owners: dict[int, str] = {id(leaf): name for name, leaf in weights.items()}
        self.alive = list(weights.values())

    def slot(self, tensor: Tensor, *, new: bool = False) -> int:
        if new or id(tensor) not in self.slots:
            self.slots[id(tensor)] = len(self.shapes)
            self.kept.append(tensor)  # so that its id is not used again
            slot = len(self.shapes)
            self.shapes[slot] = tuple(tensor.shape)
            if not new:
                if id(tensor) in self.owners:
                    self.weights[slot] = self.owners[id(tensor)]
                else:
                    self.constants[slot] = tensor
        return self.slots[id(tensor)]

    def refer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            slot = self.slot(value)
            if slot in self.stale:
                raise ValueError(
                    f"{self.where[-1] or 'the network'} changes a tensor in place that it reads elsewhere through a view: the "
                    "streamlined pass needs a copy there, such as x = x.clone()"
                )
            return Ref(slot)
        if isinstance(value, tuple | list):
            kind = type(value)
            items = [self.refer(item) for item in value]
            return tuple(items) if kind is torch.Size or hasattr(value, "_fields") else kind(items)
        if isinstance(value, dict):
            return {key: self.refer(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.refer(value.start), self.refer(value.stop), self.refer(value.step))
        return value

    def made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.slot(value, new=True))
        if isinstance(value, tuple | list):
            return tuple(self.made(item) for item in value)
        return None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.dropout is not None:
            if func in ELEMENTS or func in CHANNELS:
                return self._dropped(func, *args, **kwargs)
            args, kwargs = self._noisy(self.dropout, func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _attention(*args, **kwargs)
        if func in RECURRENT:
            with self:
                return unrolled(RECURRENT[func], args)
        versions = [(leaf, leaf._version) for leaf in _tensors((args, kwargs))]
        if any(leaf.is_inference() for leaf, _ in versions):
            raise ValueError("a tensor made in inference mode cannot be traced: convert outside of torch.inference_mode()")
        name = canonical(func)
        if getattr(func, "__name__", "") in DECISIONS and any(self.slots.get(id(leaf)) in self.dependent for leaf, _ in versions):
            raise ValueError(
                f"{self.where[-1] or 'the network'} decides by the values of its data ({name}), which a pass of means and variances "
                "cannot follow"
            )
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        if not made:
            if name == "setitem":
                self._changed(args[0], self.refer((args, kwargs)), func, name)
            return result
        if name.startswith("get_") and name not in ("get_T", "get_mT", "get_H", "get_data", "get_real"):
            return result
        before = self.refer((args, kwargs))
        same = [(leaf, version) for leaf, version in versions if any(leaf is one for one in made)]
        if same and len(made) == 1:
            leaf, version = same[0]
            if leaf._version == version:
                return result  # the same tensor, unchanged: contiguous(), to(), dropout in eval mode
            self._changed(leaf, before, func, name)
            return result
        self._add(func, name, before, self.made(result))
        return result

    def _dropped(
        self, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, shared: Any = None
    ) -> Tensor:
        """Dropout that is kept on: written down, and the values left alone."""
        assert self.dropout is not None
        if func in ALPHA:
            raise ValueError("alpha dropout has no streamlined rule: predict with how='sampled'")
        if p == 0:
            return input
        if shared is None and func is F.dropout:  # in recurrent nets the time axis shares a mask
            first = self.dropout.batch_first
            shared = () if first is None or input.ndim != 3 else (-2,) if first else (-3,)
        before = self.refer(((input, p, True), {} if shared is None else {"shared": shared}))
        result = input.clone()
        self._add(func, canonical(func), before, self.made(result))
        return result

    def _noisy(self, dropout: Dropout, func: Callable, args: tuple[Any, ...], kwargs: dict) -> tuple[tuple[Any, ...], dict]:
        """The same call, with dropout on the input of a layer that was named, and on inside of attention."""
        site = self.sites.get(id(args[1])) if args[1:] else None
        between = func in RECURRENT and any(isinstance(value, float) and value > 0 for value in args)
        if func in RECURRENT and (between or any(id(one) in self.sites for one in _tensors(args))):
            raise ValueError("dropout in a recurrent layer has no streamlined rule: predict with how='sampled'")
        if func is F.embedding and site in dropout.words:
            raise ValueError("dropout of words has no streamlined rule: predict with how='sampled'")
        if func in WEIGHTED and site is not None:  # of features, or channels: one mask for all positions
            ndim = args[0].ndim
            shared = tuple(range(1 - ndim, -1)) if func is F.linear else tuple(range(2 - ndim, 0))
            return (self._dropped(F.dropout, args[0], dropout.sites[site], shared=shared), *args[1:]), kwargs
        if func is F.multi_head_attention_forward and len(args) > 10 and args[10] > 0:
            return args, {**kwargs, "training": True, "need_weights": True}
        return args, kwargs

    def _add(self, func: Callable, name: str, before: Any, out: Any) -> None:
        self.steps.append(Step(func, name, before[0], before[1], out, self.where[-1]))
        if any(ref.slot in self.dependent for ref in refs(before)):
            self.dependent |= {ref.slot for ref in refs(out)}

    def _changed(self, tensor: Tensor, before: Any, func: Callable, name: str) -> None:
        """In place: the tensor is another value from here on, and its views are no longer what they were."""
        storage = tensor.untyped_storage().data_ptr()
        old = self.slots[id(tensor)]
        others = {
            self.slots[id(other)] for other in self.kept if other is not tensor and other.untyped_storage().data_ptr() == storage
        }
        self.stale |= others | {old}
        self._add(func, name, before, Ref(self.slot(tensor, new=True)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def refs(value: Any) -> Iterator[Ref]:
    """All of them in a nested value."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, Size):
        return
    elif isinstance(value, tuple | list):
        for item in value:
            yield from refs(item)
    elif isinstance(value, dict):
        yield from refs(list(value.values()))
    elif isinstance(value, slice):
        yield from refs([value.start, value.stop, value.step])


@contextmanager
def _paths(network: nn.Module) -> Iterator[list[str]]:
    """The path of the module that is running, last in the list."""
    names = {id(module): name or type(module).__name__ for name, module in network.named_modules()}
    stack = [""]

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(names.get(id(module), stack[-1]))

    def leave(module: nn.Module, *_: Any) -> None:
        stack.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def trace(model: Model, params: Params, x: Any, buffers: Buffers, dropout: Dropout | None = None) -> Trace:
    """The operations of the network for inputs like x; with `dropout`, its own and that which is put in are operations too."""
    count = example_count(x)
    first = _record(model, params, x, buffers, count, PROBE[0], dropout)
    try:
        second = _record(model, params, x, buffers, count, PROBE[1], dropout)
        steps = [_merged(a, b) for a, b in zip(first.steps, second.steps, strict=True)]
        constants = all(_same(first.constants[s], second.constants.get(s)) for s in first.constants)
        if not constants or first.output != second.output:
            raise ValueError
        return replace(first, steps=steps, axes=_axes(first.shapes, second.shapes))
    except ValueError:  # it takes another way for another number of examples: this trace is for that number alone
        found = _record(model, params, x, buffers, count, count, dropout)
        return replace(found, dynamic=False, batch=count)


def _axes(first: dict[int, tuple[int, ...]], second: dict[int, tuple[int, ...]]) -> dict[int, int]:
    axes = {}
    for slot, shape in first.items():
        changed = [i for i, (a, b) in enumerate(zip(shape, second.get(slot, ()), strict=False)) if a != b]
        if len(changed) == 1 and shape[changed[0]] == PROBE[0]:
            axes[slot] = changed[0]
    return axes


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and torch.equal(a, b)


def _record(model: Model, params: Params, x: Any, buffers: Buffers, count: int, n: int, dropout: Dropout | None = None) -> Trace:
    def change(leaf: Tensor) -> Tensor:
        if leaf.shape[:1] != (count,):
            return leaf.clone()
        if count == 0:
            return leaf.new_zeros(n, *leaf.shape[1:])
        return leaf[torch.arange(n, device=leaf.device) % count]

    some = tree.apply_leaves(change, x)
    batched = [leaf.shape[:1] == (count,) for leaf in tree.leaves(x)]
    weights = {**buffers, **{name: leaf for name, leaf in params.items() if ":" not in name}}
    weights = {name: leaf.detach() for name, leaf in weights.items()}
    with torch.no_grad(), mode(model.network, False), _paths(model.network) as where:
        recorder = Recorder(weights, where, dropout)
        inputs = [recorder.slot(leaf, new=True) for leaf in tree.leaves(some)]
        recorder.dependent = set(inputs)
        with recorder:
            f = model.call({name: weights[name] for name in params if ":" not in name}, some, {n: weights[n] for n in buffers})[0]
    return Trace(
        recorder.steps, inputs, batched, recorder.weights, recorder.constants, recorder.slot(f), recorder.shapes, batch=n
    )


def _merged(a: Step, b: Step) -> Step:
    if a.func is not b.func and a.name != b.name:
        raise ValueError("the two runs took different ways")
    return Step(a.func, a.name, _symbolic(a.args, b.args), _symbolic(a.kwargs, b.kwargs), a.out, a.where)


def _symbolic(a: Any, b: Any) -> Any:
    """Numbers that differ between the runs, as functions of the number of examples."""
    if isinstance(a, Ref):
        if a != b:
            raise ValueError
        return a
    if isinstance(a, bool) or not isinstance(a, int | tuple | list | dict | slice):
        if isinstance(a, float) and a != b:
            raise ValueError
        return a
    if isinstance(a, int):
        if a == b:
            return a
        slope, rest = divmod(a - b, PROBE[0] - PROBE[1])
        if rest or not isinstance(b, int):
            raise ValueError
        return Size(a - slope * PROBE[0], slope)
    if isinstance(a, slice):
        return slice(_symbolic(a.start, b.start), _symbolic(a.stop, b.stop), _symbolic(a.step, b.step))
    if len(a) != len(b):
        raise ValueError
    if isinstance(a, dict):
        return {key: _symbolic(a[key], b[key]) for key in a}
    return type(a)(_symbolic(p, q) for p, q in zip(a, b, strict=True))
