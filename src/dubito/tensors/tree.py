"""Arithmetic on `Params`, the dictionaries of tensors that everything else passes around.

A tree maps names to tensors: `{"0.weight": [50, 13], "0.bias": [50], "likelihood:log_scale": [1]}`. A *stacked* tree holds S
trees at once, every leaf with a leading axis `[S, ...]`. This is the only place that flattens one to a vector.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Params = dict[str, Tensor]
Buffers = dict[str, Tensor]


def apply(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Leaf by leaf: `{name: function(a[name], b[name], ...)}`.

    >>> apply(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return {name: function(leaf, *(other[name] for other in trees[1:])) for name, leaf in trees[0].items()}


def as_tuple(value: Any) -> tuple:
    """A tuple or list as a tuple, and anything else as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_graph(value: object) -> bool:
    """Whether a value is a graph of PyTorch Geometric, or a batch of them, by what it offers: its tensors are leaves too."""
    return all(hasattr(value, name) for name in ("edge_index", "to_dict", "apply"))


def symbolic(size: object) -> bool:
    """Whether a size is being traced for any number of examples, so that nothing may depend on its value."""
    return isinstance(size, torch.SymInt)


def clone(tree: Params) -> Params:
    """A copy that shares no memory and no gradient history with the original."""
    return {name: leaf.detach().clone() for name, leaf in tree.items()}


def become(tree: Params, other: Params) -> None:
    """Write the leaves of another tree into the memory of this one, where they fit; most of them may be there already.

    >>> held = torch.zeros(2)
    >>> become({"a": held}, {"a": torch.ones(2)})
    >>> held
    tensor([1., 1.])
    """
    for name, leaf in other.items():
        held = tree.get(name)
        if held is None or held.shape != leaf.shape or held.dtype != leaf.dtype:
            tree[name] = leaf
        elif held.data_ptr() != leaf.data_ptr():
            held.copy_(leaf)


def size(tree: Params) -> int:
    """Number of scalars P in an unstacked tree."""
    return sum(leaf.numel() for leaf in tree.values())


def under(leaves: Params, prefix: str) -> Params:
    """The leaves whose names begin with a prefix, without it.

    >>> under({"a.x": torch.ones(()), "b.x": torch.zeros(())}, "a.")
    {'x': tensor(1.)}
    """
    return {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}


def stack(trees: Sequence[Params]) -> Params:
    """S trees as one stacked tree.

    >>> stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])["w"].shape
    torch.Size([2, 3])
    """
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def concatenate(trees: Sequence[Params]) -> Params:
    """Stacked trees one after another: leaves `[S1 + S2 + ..., *shape]`."""
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}


def select(tree: Params, index: int | slice | Tensor) -> Params:
    """Some of a stacked tree: an integer gives an unstacked tree, a slice or an index tensor a stacked one."""
    return {name: leaf[index] for name, leaf in tree.items()}


def repeat(tree: Params, n: int) -> Params:
    """The same tree n times, as a stacked tree with memory of its own."""
    return {name: leaf.detach().expand(n, *leaf.shape).clone() for name, leaf in tree.items()}


def count(tree: Params) -> int:
    """S of a stacked tree."""
    return next(iter(tree.values())).shape[0]


def flatten(tree: Params, *, stacked: bool = False) -> Tensor:
    """All leaves in one vector [P], or [S, P] for a stacked tree, in the order of the names.

    >>> flatten({"a": torch.zeros(2, 2), "b": torch.ones(1)})
    tensor([0., 0., 0., 0., 1.])
    """
    start = 1 if stacked else 0
    return torch.cat([leaf.reshape(*leaf.shape[:start], math.prod(leaf.shape[start:])) for leaf in tree.values()], dim=-1)


def unflatten(vector: Tensor, like: Params) -> Params:
    """The inverse of `flatten`: a vector [P] or [S, P] in the shapes of the (unstacked) tree `like`.

    >>> unflatten(torch.arange(3.0), {"a": torch.zeros(2), "b": torch.zeros(1)})
    {'a': tensor([0., 1.]), 'b': tensor([2.])}
    """
    pieces = vector.split([leaf.numel() for leaf in like.values()], dim=-1)
    return {
        name: piece.reshape((*vector.shape[:-1], *leaf.shape)) for (name, leaf), piece in zip(like.items(), pieces, strict=True)
    }


def full_precision(leaf: Tensor) -> Tensor:
    """Half precision as float32, in which sums can be formed; others as they are."""
    return leaf.float() if leaf.dtype.itemsize < 4 else leaf


def move(value: Any, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
    """Tensors anywhere inside nested dicts, lists and tuples to a device; floating ones to a dtype. The rest is kept."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    if is_graph(value):  # its own `to` would move the user's
        return apply_leaves(lambda leaf: leaf.to(device), value)
    if callable(getattr(value, "to", None)):  # tokenizers' batches and packed sequences know best what to move
        return value if device is None else value.to(device)
    if isinstance(value, dict):
        return type(value)({key: move(item, device, dtype) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device, dtype) for item in value)
    return value


def apply_leaves(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A function of every tensor inside nested dicts, lists and tuples; the rest is kept."""
    if isinstance(value, Tensor):
        return function(value)
    if is_graph(value):
        return copy.copy(value).apply(function)
    if type(value) is dict:
        return {key: apply_leaves(function, item) for key, item in value.items()}
    return type(value)(apply_leaves(function, item) for item in value) if type(value) in (list, tuple) else value


def tensors(value: Any, dtype: torch.dtype | None = None) -> Any:
    """NumPy arrays anywhere inside nested dicts, lists and tuples as tensors, real ones in a dtype (NumPy is float64 by default)."""
    if isinstance(value, np.ndarray):
        tensor = _from_array(value)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    if type(value) is dict:
        return {key: tensors(item, dtype) for key, item in value.items()}
    return type(value)(tensors(item, dtype) for item in value) if type(value) in (list, tuple) else value


def _from_array(array: np.ndarray) -> Tensor:
    """An array as a tensor, in the memory of the array where torch can read that; what a mask hides is NaN."""
    if array.dtype.kind not in "fiubc":
        raise TypeError(
            f"an array of {array.dtype} holds text, dates or objects, not numbers: of class names give their positions, as "
            "classes, y = np.unique(names, return_inverse=True), of numbers x.astype(np.float32), and of dates their days"
        )
    if isinstance(array, np.ma.MaskedArray):
        array = np.ma.filled(array.astype(np.float64), np.nan) if np.ma.is_masked(array) else array.data
    plain = np.dtype(np.float64) if array.dtype.itemsize > 8 and array.dtype.kind == "f" else array.dtype.newbyteorder("=")
    readable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array.astype(plain, copy=not readable))


def leaves(value: Any) -> Iterable[Tensor]:
    """Every tensor inside nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif is_graph(value):
        yield from leaves(value.to_dict())
