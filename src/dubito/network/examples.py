"""How a batch is read as (inputs, targets), and the output of a network as one tensor."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dubito.tensors import tree

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Data = Any  # what the user gives: a tuple (x, y), a Dataset, a DataLoader, or a re-iterable of batches
Batch = Any  # what the user's data give: tensors in tuples, lists or dicts, which `Model.split` reads as (inputs, targets)
Inputs = Any  # what a network takes: a tensor, a tuple of arguments, or a dict of keyword arguments
Targets = Any  # what a likelihood takes: a tensor, or a dict of them with one entry a task

LABELS = ("labels", "label", "targets", "target", "y")


def split_batch(batch: Batch) -> tuple[Inputs, Targets]:
    """The default reading of a batch as (inputs, targets).

    A pair is (x, y). A longer list or tuple is several inputs, then the targets. A dict, as Hugging Face collators make, has its
    targets under "labels" (or label, targets, target, y), and the rest are the network's keyword arguments. A graph of PyTorch
    Geometric has its targets in `y`, and is the network's one argument.

    >>> split_batch({"input_ids": 1, "attention_mask": 2, "labels": 3})
    ({'input_ids': 1, 'attention_mask': 2}, 3)
    """
    if tree.is_graph(batch):
        if getattr(batch, "y", None) is None:
            raise ValueError("a graph without targets y: set data.y, or give Model(split=...) that returns (x, y)")
        return batch, batch.y
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        for name in LABELS:
            if name in batch:
                return {key: batch[key] for key in batch if key != name}, batch[name]
        raise ValueError(f"a batch with the keys {list(batch)} has none of {LABELS}: give Model(split=...) that returns (x, y)")
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    raise ValueError(
        f"a batch is (inputs, targets) or a dict with labels; got a {type(batch).__name__}. Data are a tuple (x, y), or a list or "
        "loader of such batches; for batches of another kind give Model(split=...)"
    )


def arguments(x: Inputs) -> tuple[tuple, dict[str, Any]]:
    """Inputs as a network is called with them: a dict by name, a tuple or list by position, and anything else as the only one. Of a
    graph, into which networks may write, it is a copy with the same tensors.

    >>> arguments({"input_ids": 1}), arguments((1, 2)), arguments(3)
    (((), {'input_ids': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(x, dict):
        return (), x
    return tuple(copy.copy(item) if tree.is_graph(item) else item for item in tree.as_tuple(x)), {}


def is_array(value: object) -> TypeIs[Tensor | np.ndarray]:
    """Whether a value is a tensor or an array."""
    return isinstance(value, Tensor | np.ndarray)


def is_pair(data: object) -> TypeIs[tuple[Any, Any]]:
    """Whether data are a tuple of two, (x, y)."""
    return isinstance(data, tuple) and len(data) == 2


def is_indexed(data: object) -> TypeIs[Dataset]:
    """Whether data are a `Dataset` whose examples can be read by their position."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def pick_output(out: Any) -> Tensor:
    """The default reading of what a network returns: a tensor, or `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(out, Tensor):
        return out
    if hasattr(out, "logits"):
        return out.logits
    if isinstance(out, dict) and "logits" in out:
        return out["logits"]
    if isinstance(out, list | tuple) and out and isinstance(out[0], Tensor):
        return out[0]
    raise ValueError(f"the network returns a {type(out).__name__}: give Model(output=...) that picks the tensor of outputs")


def as_arrays(value: Any) -> Any:
    """DataFrames, Series and nested lists of numbers as arrays, also inside dicts and tuples; anything else as it is.

    >>> as_arrays(([[1, 2], [3, 4]], "text"))[0].shape
    (2, 2)
    """
    if hasattr(value, "to_numpy"):
        value = np.array(value.to_numpy())  # a copy: the frame's own memory may be read-only
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _plain(value)
    if isinstance(value, Mapping):
        return {key: as_arrays(value[key]) for key in value}
    if type(value) is tuple:
        return tuple(as_arrays(item) for item in value)
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(value, list) and value and all(isinstance(item, Tensor) and not item.ndim for item in value):
        return torch.stack(value)
    if not isinstance(value, list) or not isinstance(first, str | int | float | np.generic):
        return value
    try:
        return np.array(value)
    except ValueError as error:
        raise ValueError(
            f"a list of numbers holds rows of different lengths ({error}): pad them, or give a list of batches"
        ) from error


def _plain(array: np.ndarray) -> np.ndarray:
    """An array of objects as numbers, if it holds nothing else, as that of a DataFrame whose columns have several types; what is
    missing (None, pandas.NA) is NaN."""
    cells = [np.nan if cell is None or type(cell).__name__ == "NAType" else cell for cell in array.flat]
    if not all(isinstance(cell, int | float | np.number | np.bool_ | Decimal) for cell in cells):
        return array
    whole = all(isinstance(cell, int | np.integer | np.bool_) for cell in cells)
    return np.array(cells, np.int64 if whole else np.float64).reshape(array.shape)


def read_inputs(x: Inputs, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The inputs of a prediction as tensors on a device: arrays, lists of numbers and DataFrames, real ones in a dtype."""
    if isinstance(x, DataLoader | Dataset | Iterator):
        raise TypeError(
            f"predict takes the inputs of some examples; got a {type(x).__name__}. Use posterior.predict_loader(loader), or "
            "posterior.predict_batches(loader), which go through a DataLoader or a list of batches"
        )
    if x is None or isinstance(x, str):
        raise TypeError(f"predict takes the inputs of some examples, such as a tensor, an array or a DataFrame; got {x!r}")
    return tree.move(tree.tensors(as_arrays(x), dtype), device)


def explain(x: Inputs, dtype: torch.dtype, error: RuntimeError | TypeError) -> None:
    """Raise a clearer error where a network has failed on inputs of another kind or shape, or of another dtype than its weights."""
    if isinstance(error, TypeError):
        if "argument" in str(error):
            raise TypeError(
                f"the network does not take these inputs ({error}): a tuple or list is several inputs and a dict has them by name; "
                "leave the targets out, and make one tensor of a list of examples, torch.stack(x)"
            ) from error
        return
    others = [leaf.dtype for leaf in tree.leaves(x) if (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype != dtype]
    if others and re.search(r"d?type", str(error)):
        given, wanted = (str(kind).removeprefix("torch.") for kind in (others[0], dtype))
        raise TypeError(
            f"the inputs are {given} and the network's weights {wanted}, which the network does not take ({error}): pass "
            f"x.to(torch.{wanted}), or make the network network.to(torch.{given})"
        ) from error
    whole = [leaf.dtype for leaf in tree.leaves(x) if not leaf.is_floating_point()]
    if whole and "type" in str(error):  # else they may well be words or classes, which networks look up
        raise TypeError(
            f"the inputs are {str(whole[0]).removeprefix('torch.')}, which the network does not take ({error}): pass floating-point "
            "inputs, x.float(), or x.float() / 255 for images"
        ) from error
    if re.search(r"cannot be multiplied|must match the size|xpected .* channels|normalized_shape", str(error)):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in tree.leaves(x))
        raise ValueError(
            f"the network does not take inputs of shape {shapes} ({error}): their first axis must be the examples, the others what the "
            "network expects of each. A single column x of shape [N] becomes [N, 1] by x[:, None]"
        ) from error


def are_vectors(x: Inputs) -> bool:
    """Whether all inputs are vectors of real numbers."""
    return all(leaf.ndim == 1 and leaf.is_floating_point() for leaf in tree.leaves(x))


def check_outputs(x: Inputs, f: Tensor, *, coupled: bool = False) -> None:
    """Compare inputs with the outputs [S, B, *D, C] of a network: one example without a batch axis is an error, unless rows are
    coupled, and inputs that are NaN where the outputs are too are a warning."""
    leaves = [leaf for leaf in tree.leaves(x) if leaf.ndim]
    if leaves and not coupled and all(f.shape[1] not in leaf.shape[:2] for leaf in leaves):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise ValueError(
            f"the network gives outputs for {f.shape[1]} examples, but the inputs have the shape {shapes}: "
            "their first axis must be the examples. For a single example add that axis, x[None]"
        )
    numbers = [leaf for leaf in leaves if leaf.is_floating_point()]
    # a sum tells of NaN without a mask as large as a quarter of the outputs
    if bool(f.sum().isnan()) and bool(f.isnan().any()) and not all(bool(leaf.isfinite().all()) for leaf in numbers):
        rows = f.isnan().movedim(1, 0).flatten(1).any(1).nonzero().flatten().tolist()
        warnings.warn(
            f"The inputs hold NaN or infinity, and the predictions of {len(rows)} examples are NaN (rows {_listed(rows)}). Fill such "
            "values in as before the fit, or leave those rows out.",
            stacklevel=4,  # the call of predict
        )


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")


def batch_size(y: Targets) -> int:
    """Examples in a batch, from its targets."""
    return next(iter(tree.leaves(y))).shape[0]


def outputs_last(f: Tensor, dim: int) -> Tensor:
    """What a network gives, with its outputs along `dim`, as [B, *D, C]."""
    if f.ndim == 0:
        raise ValueError("the network gives one number for a whole batch, of one example perhaps: use squeeze(-1), not squeeze()")
    if f.ndim == 1:
        return f.unsqueeze(-1)
    return f if dim == -1 else f.movedim(dim, -1)


def is_one_example(x: Inputs, n: int) -> bool:
    """Whether inputs are of one example rather than of n: by the first axis of all, or, of sequences with time first, the second."""
    leaves = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.ndim]
    later = any(leaf.ndim > 1 and leaf.shape[1] == n and (leaf.ndim > 2 or not leaf.is_floating_point()) for leaf in leaves)
    return any(leaf.ndim > 1 for leaf in leaves) and all(len(leaf) == 1 for leaf in leaves) and not later
