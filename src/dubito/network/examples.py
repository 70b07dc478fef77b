"""How a batch is read as (inputs, targets), and the output of a network as one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dubito.tensors import tree

Data = Any  # what the user gives: a tuple (x, y), a Dataset, a DataLoader, or a re-iterable of batches
Batch = Any  # what the user's data give: tensors in tuples, lists or dicts, which `Model.split` reads as (inputs, targets)
Inputs = Any  # what a network takes: a tensor, a tuple of arguments, or a dict of keyword arguments
Targets = Any  # what a likelihood takes: a tensor, or a dict of them with one entry a task

LABELS = ("labels", "label", "targets", "target", "y")


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The default reading of a batch as (inputs, targets).

    A pair is (x, y). A longer list or tuple is several inputs, then the targets. A dict, as Hugging Face collators make, has its
    targets under "labels" (or label, targets, target, y), and the rest are the network's keyword arguments.

    >>> split_batch({"input_ids": 1, "attention_mask": 2, "labels": 3})
    ({'input_ids': 1, 'attention_mask': 2}, 3)
    """
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        for name in LABELS:
            if name in batch:
                return {key: batch[key] for key in batch if key != name}, batch[name]
        raise ValueError(f"a batch with the keys {list(batch)} has none of {LABELS}: give Model(split=...) that returns (x, y)")
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    raise ValueError(f"a batch is (inputs, targets) or a dict with labels; got a {type(batch).__name__}: give Model(split=...)")


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


def batch_size(y: Any) -> int:
    """Examples in a batch, from its targets."""
    return next(iter(tree.leaves(y))).shape[0]


def outputs_last(f: Tensor, dim: int) -> Tensor:
    """What a network gives, with its outputs along `dim`, as [B, *D, C]."""
    if f.ndim == 0:
        raise ValueError("the network gives one number for a whole batch, of one example perhaps: use squeeze(-1), not squeeze()")
    if f.ndim == 1:
        return f.unsqueeze(-1)
    return f if dim == -1 else f.movedim(dim, -1)


def is_one_example(x: Any, n: int) -> bool:
    """Whether inputs are of one example rather than of n: by the first axis of all, or, of sequences with time first, the second."""
    leaves = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.ndim]
    later = any(leaf.ndim > 1 and leaf.shape[1] == n and (leaf.ndim > 2 or not leaf.is_floating_point()) for leaf in leaves)
    return any(leaf.ndim > 1 for leaf in leaves) and all(len(leaf) == 1 for leaf in leaves) and not later
