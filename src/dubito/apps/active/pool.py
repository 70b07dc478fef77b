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
from dubito.inference.batches import Data
from dubito.model import Model
from dubito.network.examples import Batch, Inputs
from dubito.posteriors.posterior import inputs_of
from dubito.tensors import store, tree
from dubito.tensors.checks import require
from dubito.tensors.randomness import borrowed_generators, derive_seed, fork_rng, generator


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

    def __init__(self, data: Data):
        self.source = _source(data)
        self.length = self.source.length
        require(self.length, "the pool is empty: there is nothing to label")

    def __len__(self) -> int:
        return self.length

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """Inputs of the given numbers, in rising order, `size` at a time (or as a loader cuts them)."""
        kind = _dtype(model)
        for x in self.source.batches(model, indices.cpu(), size):
            yield tree.tensors(x, kind)

    def take(self, model: Model, indices: Tensor | Sequence[int]) -> Any:
        """The inputs of some numbers as one batch, in the order that they are asked for."""
        return self.source.take(model, torch.as_tensor(indices, dtype=torch.long).reshape(-1))

    def fingerprint(self, model: Model) -> str:
        """What the pool is known by: how many inputs, and the contents of the first, the middle and the last."""
        few = self.take(model, [0, len(self) // 2, len(self) - 1])
        return f"{len(self)} inputs, {store.checksum({str(i): leaf for i, leaf in enumerate(tree.leaves(few))})}"


def _dtype(model: Model) -> torch.dtype:
    return next(model.network.parameters()).dtype


def _rows_of(x: Inputs, rows: Tensor) -> Any:
    return tree.apply_leaves(lambda leaf: leaf[rows.to(leaf.device)], x)


class _Arrays:
    """All inputs, in memory."""

    def __init__(self, data: Data):
        self.arrays = tree.tensors(data)
        given = data.values() if isinstance(data, dict) else [data]
        self.recast = any(isinstance(leaf, np.ndarray) for leaf in given)  # NumPy has float64 alone, which no network means
        counts = {len(leaf) for leaf in tree.leaves(self.arrays)}
        require(len(counts) == 1, f"all inputs of a pool must have the same number of rows; got {sorted(counts)}")
        self.length = counts.pop()

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """Rows of the arrays, `size` at a time."""
        for rows in indices.split(size):
            first, last = int(rows[0]), int(rows[-1])
            whole = len(rows) > 1 and last - first == len(rows) - 1  # neighbors: no copy is needed
            piece = slice(first, last + 1)
            x = tree.apply_leaves(lambda leaf: leaf[piece], self.arrays) if whole else _rows_of(self.arrays, rows)  # noqa: B023
            yield self._cast(model, x)

    def take(self, model: Model, which: Tensor) -> Any:
        """Those rows, in that order."""
        return self._cast(model, _rows_of(self.arrays, which))

    def _cast(self, model: Model, x: Inputs) -> Any:
        if not self.recast:
            return x
        return tree.apply_leaves(lambda leaf: leaf.to(_dtype(model)) if leaf.is_floating_point() else leaf, x)


class _Items:
    """A data set with `len` and `[i]`."""

    def __init__(self, items: Any, collate: Callable[[list], Any] = default_collate, workers: int = 0):
        self.items, self.collate, self.workers, self.length = items, collate, workers, len(items)

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """Items, `size` at a time."""
        some = Subset(self.items, indices.tolist())
        for batch in _fetched(DataLoader(some, batch_size=size, collate_fn=self.collate, num_workers=self.workers)):
            yield inputs_of(model, batch)[0]

    def take(self, model: Model, which: Tensor) -> Any:
        """Those items, in that order."""
        with fork_rng(0):
            return tree.tensors(inputs_of(model, self.collate([self.items[i] for i in which.tolist()]))[0], _dtype(model))


class _Stream:
    """Batches, to be gone through for every choice."""

    def __init__(self, stream: Iterable[Any]):
        self.stream = stream
        self.length = sum(_rows(_inputs_only(batch)) for batch in _fetched(stream))

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """What is wanted of every batch."""
        wanted, before = torch.zeros(self.length, dtype=torch.bool), 0
        wanted[indices] = True
        for batch in _fetched(self.stream):
            x = inputs_of(model, batch)[0]
            rows = wanted[before : before + _rows(x)].nonzero().squeeze(1)
            before += _rows(x)
            if len(rows):
                yield _rows_of(tree.tensors(x, _dtype(model)), rows)
        require(before == self.length, f"the pool must give the same inputs every time; it had {self.length}, and now {before}")

    def take(self, model: Model, which: Tensor) -> Any:
        """Those inputs, in that order."""
        ordered, back = which.unique(return_inverse=True)
        with fork_rng(0):
            x = joined(list(self.batches(model, ordered, len(ordered))))
            return tree.tensors(_rows_of(x, back), _dtype(model))


def _source(data: Data) -> _Arrays | _Items | _Stream:
    if isinstance(data, tuple):
        raise TypeError("a pool holds inputs without labels, but a tuple means (x, y): pass x alone; several inputs as a dict")
    if isinstance(data, Tensor | np.ndarray | dict):
        return _Arrays(data)
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        ordered = isinstance(data.sampler, SequentialSampler) and type(data.batch_sampler).__name__ == "BatchSampler"
        require(ordered, "inputs of a pool are known by their position, but this loader shuffles them: pass shuffle=False")
        return _Items(data.dataset, data.collate_fn, data.num_workers)
    if isinstance(data, Iterator):
        raise TypeError("an iterator can be gone through only once: pass a data set, a loader or a list of batches")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list):
        return _Items(data)
    if isinstance(data, Iterable):
        return _Stream(data)
    raise TypeError(f"a pool must be a tensor, an array, a dict of these, a data set or a loader; got a {type(data).__name__}")


def _fetched(source: Iterable[Any]) -> Iterator[Inputs]:
    """The batches of a loader. It may draw from the global generators, which are given back before anybody sees a batch."""
    with borrowed_generators(source), fork_rng(0):
        iterator = iter(source)
    for i in count():
        with borrowed_generators(source), fork_rng(derive_seed("pool", i)):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def _inputs_only(batch: Batch) -> Any:
    return batch[0] if isinstance(batch, list | tuple) else batch


def _rows(x: Inputs) -> int:
    leaf = next(iter(tree.leaves(tree.tensors(x))), None)
    if leaf is None or not leaf.ndim:
        way_out = "pass all inputs as one tensor or array, or a data set with `len` and `[i]`"
        raise TypeError(f"a list must hold batches of inputs, tensors [B, ...]; got a {type(x).__name__} without rows: {way_out}")
    return len(leaf)


def balanced(labels: Tensor, n: int, *, seed: int = 0) -> Tensor:
    """The positions of n random examples with all classes alike, as simulations of active learning begin with: [n].

    >>> y = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> y[balanced(y, 3)].sort().values
    tensor([0, 1, 2])
    """
    labels = labels.cpu()
    classes = labels.unique()
    require(n % len(classes) == 0, f"n must be a multiple of {len(classes)}, the number of classes; got {n}")
    each, source = n // len(classes), generator("cpu", seed, "balanced")
    parts = []
    for label in classes:
        rows = (labels == label).nonzero().squeeze(1)
        require(len(rows) >= each, f"class {int(label)} has {len(rows)} examples, fewer than the {each} that are needed of it")
        parts.append(rows[torch.randperm(len(rows), generator=source)[:each]])
    chosen = torch.cat(parts)
    return chosen[torch.randperm(len(chosen), generator=source)]
