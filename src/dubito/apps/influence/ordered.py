"""Data in its order: influences are told by the position of an example, so every pass must see the same example there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dubito.inference.batches import Data, batches
from dubito.model import Model
from dubito.network.examples import Batch, batch_size
from dubito.tensors import tree
from dubito.tensors.randomness import borrowed_generators, derive_seed, fork_rng

RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
END = object()


@dataclass(frozen=True)
class Ordered:
    """Batches of what `fit` takes as data, on the model's device and in the order of the data, as often as one likes."""

    model: Model
    data: Data
    size: int = 128  # examples at a time, where nobody has cut the data into batches

    def __post_init__(self):
        if isinstance(self.data, DataLoader) and _shuffles(self.data):
            raise ValueError(
                "the loader shuffles, so it is unknown which example an influence belongs to: give a loader with shuffle=False, or the "
                "data set itself"
            )

    def __iter__(self) -> Iterator[Batch]:
        return self._pass(shuffle=False, seed=0)

    def count(self) -> int:
        """N, the examples in a pass."""
        return batches(self.model, self.data, size=self.size, shuffle=False).n_data

    def endless(self, seed: int) -> Iterator[Batch]:
        """Pass after pass, each in another order; a loader and a list of batches keep their own."""
        while True:
            yield from self._pass(shuffle=True, seed=seed)
            seed += 1

    def picked(self, index: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """Some of the examples, by position: (places in `index`, a batch of these)."""
        if isinstance(self.data, Dataset) and not isinstance(self.data, IterableDataset):  # only these are read
            start = 0
            for batch in Ordered(self.model, Subset(self.data, index.tolist()), self.size):
                stop = start + batch_size(self.model.split(batch)[1])
                yield torch.arange(start, stop), batch
                start = stop
            return
        start = 0
        for batch in self:
            size = batch_size(self.model.split(batch)[1])
            places = ((index >= start) & (index < start + size)).nonzero().squeeze(1)
            if len(places):
                yield places, rows(batch, size, index[places] - start)
            start += size

    def _pass(self, *, shuffle: bool, seed: int) -> Iterator[Batch]:
        kind, source, i = next(self.model.network.parameters()).dtype, None, 0
        while True:
            # A DataLoader draws from the global generator, even unshuffled. It is lent out for one batch at a time: a pass over test
            # data stands still while one over the training data runs.
            with borrowed_generators(self.data), fork_rng(derive_seed(seed, i)):
                if source is None:
                    source = iter(batches(self.model, self.data, n_data=1, size=self.size, shuffle=shuffle))
                batch = next(source, END)
            if batch is END:
                return
            yield tree.tensors(batch, kind)
            i += 1


def _shuffles(loader: DataLoader) -> bool:
    """Whether its order is a random one, as far as can be seen. With a `batch_sampler` of one's own `sampler` says nothing."""
    known = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, RANDOM) or getattr(sampler, "shuffle", False) is True for sampler in known)


def rows(batch: Batch, size: int, which: slice | Tensor) -> Any:
    """Some examples of a batch of so many; what is the same for all of them stays."""

    def _some(leaf: Tensor) -> Tensor:
        if leaf.shape[:1] != (size,):
            return leaf
        return leaf[which if isinstance(which, slice) else which.to(leaf.device)]

    return tree.apply_leaves(_some, batch)


def cut(model: Model, data: Ordered, size: int) -> Iterator[Batch]:
    """The same in batches of at most `size`."""
    for batch in data:
        n = batch_size(model.split(batch)[1])
        if n <= size:
            yield batch
            continue
        for start in range(0, n, size):
            yield rows(batch, n, slice(start, start + size))
