"""Inputs without labels, by number: tensors, an indexable data set, or a loader that is gone through in a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, default_collate

from dubito.apps.network import joined
from dubito.model import Model
from dubito.posteriors.posterior import inputs_of
from dubito.tensors import store, tree
from dubito.tensors.randomness import derive, forked, lent


class Pool:
    """The inputs that may be labelled. An input's number is its position.

    `data` is a tensor, an array or a dict of these (all inputs, in memory); a data set with `len` and `[i]`; an unshuffled
    DataLoader; or any iterable of batches that can be gone through again, which then happens for every choice. Only what is being
    scored is in memory. Targets that a data set or a loader gives along with its inputs are not looked at.

    >>> import dubito
    >>> pool = Pool(torch.arange(10.0).unsqueeze(1))
    >>> len(pool), pool.take(dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian()), [7, 2])
    (10, tensor([[7.],
            [2.]]))
    """

    def __init__(self, data: Any):
        self.arrays: Any = None
        self.recast = False  # NumPy knows float64 alone, which no network asks for by that
        self.items: Any = None  # what has len and [i]
        self.stream: Any = None  # batches, to be gone through
        self.collate: Callable[[list], Any] = default_collate
        self.workers = 0
        if isinstance(data, tuple):
            raise TypeError(
                "a pool holds inputs and no labels, and a tuple would be (x, y): give x alone, and the labels to `tell` or as an "
                "oracle; several inputs go in as a dict or a data set"
            )
        if isinstance(data, Tensor | np.ndarray | dict):
            self.arrays = tree.tensors(data)
            given = data.values() if isinstance(data, dict) else [data]
            self.recast = any(isinstance(leaf, np.ndarray) for leaf in given)
            counts = {len(leaf) for leaf in tree.leaves(self.arrays)}
            if len(counts) != 1:
                raise ValueError(f"all inputs of a pool have the same number of rows; got {sorted(counts)}")
            self.length = counts.pop()
        elif isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
            if not isinstance(data.sampler, SequentialSampler) or type(data.batch_sampler).__name__ != "BatchSampler":
                raise ValueError("inputs of a pool are known by their position, which this loader shuffles: give shuffle=False")
            self.items, self.collate, self.workers = data.dataset, data.collate_fn, data.num_workers
            self.length = len(self.items)
        elif isinstance(data, Iterator):
            raise TypeError(
                "the pool is an iterator that can be gone through only once: give a data set, a loader or a list of batches"
            )
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list):
            self.items, self.length = data, len(data)
        elif isinstance(data, Iterable):
            self.stream = data
            self.length = sum(_rows(_inputs_only(batch)) for batch in _fetched(data))
        else:
            raise TypeError(f"a pool is a tensor, a data set or a loader; got a {type(data).__name__}")
        if not self.length:
            raise ValueError("the pool is empty: there is nothing to label")

    def __len__(self) -> int:
        return self.length

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Any]:
        """Inputs of the given numbers, in rising order, `size` at a time (or as a loader cuts them)."""
        kind = next(model.network.parameters()).dtype
        for x in self._batches(model, indices.cpu(), size):
            yield tree.tensors(x, kind)

    def _batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Any]:
        if self.arrays is not None:
            for rows in indices.split(size):
                yield self._cast(model, self._picked(rows))
        elif self.items is not None:
            part = Subset(self.items, indices.tolist())
            for batch in _fetched(DataLoader(part, batch_size=size, collate_fn=self.collate, num_workers=self.workers)):
                yield inputs_of(model, batch)[0]
        else:
            wanted, before = torch.zeros(len(self), dtype=torch.bool), 0
            wanted[indices] = True
            for batch in _fetched(self.stream):
                x = inputs_of(model, batch)[0]
                rows = wanted[before : before + _rows(x)].nonzero().squeeze(1)
                before += _rows(x)
                if len(rows):
                    kind = next(model.network.parameters()).dtype
                    yield tree.apply_leaves(lambda leaf, rows=rows: leaf[rows.to(leaf.device)], tree.tensors(x, kind))
            if before != len(self):
                raise ValueError(f"the pool gave {len(self)} inputs at first and {before} now: it must be the same every time")

    def _picked(self, rows: Tensor) -> Any:
        whole = len(rows) > 1 and int(rows[-1]) - int(rows[0]) == len(rows) - 1  # neighbours: no copy is needed
        return tree.apply_leaves(
            lambda leaf: leaf[int(rows[0]) : int(rows[-1]) + 1] if whole else leaf[rows.to(leaf.device)], self.arrays
        )

    def _cast(self, model: Model, x: Any) -> Any:
        if not self.recast:
            return x
        kind = next(model.network.parameters()).dtype
        return tree.apply_leaves(lambda leaf: leaf.to(kind) if leaf.is_floating_point() else leaf, x)

    def take(self, model: Model, indices: Tensor | Sequence[int]) -> Any:
        """The inputs of some numbers as one batch, in the order that they are asked for."""
        which = torch.as_tensor(indices, dtype=torch.long).reshape(-1)
        kind = next(model.network.parameters()).dtype
        if self.arrays is not None:
            return self._cast(model, tree.apply_leaves(lambda leaf: leaf[which.to(leaf.device)], self.arrays))
        with forked(0):
            if self.items is not None:
                return tree.tensors(inputs_of(model, self.collate([self.items[i] for i in which.tolist()]))[0], kind)
            ordered, back = which.unique(return_inverse=True)
            found = joined(list(self._batches(model, ordered, len(ordered))))
            return tree.tensors(tree.apply_leaves(lambda leaf: leaf[back.to(leaf.device)], found), kind)

    def fingerprint(self, model: Model) -> str:
        """What the pool is known by: how many inputs, and the contents of the first, the middle and the last."""
        few = self.take(model, [0, len(self) // 2, len(self) - 1])
        return f"{len(self)} inputs, {store.checksum({str(i): leaf for i, leaf in enumerate(tree.leaves(few))})}"


def _fetched(source: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader. It may draw from the global generators, which are given back before anybody sees a batch."""
    with lent(source), forked(0):
        iterator = iter(source)
    for i in count():
        with lent(source), forked(derive("pool", i)):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _inputs_only(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list | tuple) else batch


def _rows(x: Any) -> int:
    leaf = next(iter(tree.leaves(tree.tensors(x))), None)
    if leaf is None or not leaf.ndim:
        raise TypeError(
            f"a list is taken for batches of inputs, tensors [B, ...], and this one holds a {type(x).__name__} with no rows: give all "
            "inputs as one tensor or array, or a data set with `len` and `[i]`"
        )
    return len(leaf)
