"""The operations of a network as a list: `Trace`, its `Step`s, and the values that stand in their arguments.

Tensors are numbered; `Ref(slot)` stands for one of them, and `Size` for a whole number that follows the number of examples. Arguments
are nested tuples, lists, dicts and slices, as the network gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, fx

PROBE = (3, 2)  # examples in the two runs of a trace
Nested: TypeAlias = Any  # tuples, lists, dicts and slices of any leaves, as arguments of a torch function are
Arguments: TypeAlias = dict[str, Any]  # by name
Leaf = TypeVar("Leaf")


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor that is an input, a weight, a constant or the result of an earlier operation."""

    slot: int


@dataclass(frozen=True, slots=True)
class Size:
    """A whole number that follows the number of examples B: constant + slope * B."""

    constant: int
    slope: int

    def value(self, batch: int) -> int:
        """The number for `batch` examples."""
        return self.constant + self.slope * batch

    @staticmethod
    def between(first: int, second: int) -> int | Size:
        """The number that is `first` and `second` in the two runs of a trace (`PROBE`)."""
        if first == second:
            return first
        slope, rest = divmod(first - second, PROBE[0] - PROBE[1])
        if rest:
            raise ValueError(f"{first} and {second} are not linear in the number of examples")
        return Size(first - slope * PROBE[0], slope)


def map_leaves(function: Callable[[Nested], Nested], value: Nested) -> Nested:
    """`function` of every leaf of nested tuples, lists, dicts and slices; named tuples and `torch.Size` become tuples."""
    if isinstance(value, tuple | list):
        items = [map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(function, item) for item in (value.start, value.stop, value.step)))
    return function(value)


def leaves_of(value: Nested, kind: type[Leaf]) -> list[Leaf]:
    """The leaves of that type in a nested value, in order."""
    leaves: list[Leaf] = []
    map_leaves(lambda leaf: leaves.append(leaf) if isinstance(leaf, kind) else None, value)
    return leaves


def refs(value: Nested) -> Iterator[Ref]:
    """All references in a nested value."""
    return iter(leaves_of(value, Ref))


def follows_batch(value: Nested) -> bool:
    """Whether a nested value holds a number that follows the number of examples."""
    return bool(leaves_of(value, Size))


def resolve(value: Nested, tensor: Callable[[int], object], size: Callable[[Size], object]) -> Nested:
    """A nested value with `tensor(slot)` in the place of every `Ref`, and `size(it)` in that of every `Size`."""
    replace = {Ref: lambda ref: tensor(ref.slot), Size: size}
    return map_leaves(lambda leaf: replace[type(leaf)](leaf) if type(leaf) in replace else leaf, value)


@dataclass
class Step:
    """One operation: a call `func(*args, **kwargs)` with `Ref`s in the place of tensors."""

    func: Callable
    name: str  # see `canonical`
    args: tuple
    kwargs: Arguments
    out: Nested  # of Refs
    where: str  # path of the module that called it

    @property
    def inputs(self) -> list[int]:
        """Slots that it reads, in order; one that is read twice stands there twice."""
        return [ref.slot for ref in refs((self.args, self.kwargs))]

    @property
    def values(self) -> list[int]:
        """Slots of which it reads more than the shape and the type."""
        return [] if self.name in OF_SHAPE else [ref.slot for ref in refs(self.args[:1])] if self.name in LIKE else self.inputs

    @property
    def outputs(self) -> list[int]:
        """Slots that it writes."""
        return [ref.slot for ref in refs(self.out)]

    @property
    def source(self) -> int | None:
        """Slot of its first argument; None if that is not a tensor."""
        return slot_of(self.args[0]) if self.args else None

    @property
    def result(self) -> int | None:
        """Slot of its result; None if it gives several tensors."""
        return slot_of(self.out)

    def argument(self, place: int, name: str, default: object = None) -> Nested:
        """The argument that is given at that place or by that name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def arguments(self, *names: str) -> Arguments:
        """The arguments by name; `names` are those that may be given by place."""
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


def slot_of(value: object) -> int | None:
    """The slot of a `Ref`; None of anything else."""
    return value.slot if isinstance(value, Ref) else None


@dataclass(frozen=True)
class Guard:
    """A decision: the network asked for the numbers in a slot, which were `value`."""

    slot: int
    value: Tensor
    truth: bool  # whether it asked only which of them are zero
    where: str  # path of the module that asked


@dataclass(eq=False)  # a key of programs
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
    guards: list[Guard] = field(default_factory=list)  # decisions by certain values, for which alone it holds
    checks: fx.GraphModule | None = None  # of the inputs and the weights: raises `OtherWay` where a guard is broken

    @property
    def makers(self) -> dict[int | None, Step]:
        """The operation that wrote each slot."""
        return {slot: step for step in self.steps for slot in step.outputs}

    def weight_name(self, value: object) -> str | None:
        """The name of the weight that a `Ref` stands for; None of anything else."""
        return self.weights.get(value.slot) if isinstance(value, Ref) else None

    @property
    def needed(self) -> set[int]:
        """Slots that the output depends on."""
        return self.behind({self.output})

    def behind(self, slots: set[int]) -> set[int]:
        """Those slots, and all that they depend on."""
        needed = set(slots)
        for step in reversed(self.steps):
            if needed.intersection(step.outputs):
                needed.update(step.inputs)
        return needed


def canonical(func: Callable) -> str:
    """The name of an operation, whatever way it was called: torch.relu, F.relu, x.relu() and x.relu_() are all "relu"."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return "get_" + getattr(func.__self__, "__name__", "")  # pyright: ignore[reportFunctionMemberAccess]
    if name.startswith("__") and name.endswith("__"):
        return _OPERATORS.get(name[2:-2], name[2:-2])
    return _SPELLINGS.get(name.removesuffix("_"), name.removesuffix("_"))


OF_SHAPE = {
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_tensor",
}  # certain
LIKE = {"expand_as", "view_as", "reshape_as", "type_as"}  # of the second tensor only the shape or the type
_OPERATORS = {
    **{f"i{name}": name for name in ("add", "sub", "mul", "matmul", "pow")},  # x += y
    "radd": "add", "rmul": "mul", "truediv": "div", "itruediv": "div", "rtruediv": "rdiv",
}  # fmt: skip
_SPELLINGS = {"log_sigmoid": "logsigmoid", "_threshold": "threshold"}  # of torch, for what it is called by elsewhere
