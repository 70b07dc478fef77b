"""Data on several processes: each has its part of every batch, and all go through a pass in step.

Data that are whole on every process (arrays, a Dataset) are divided here: `batch_size` is that of all processes together, and the
batches are those of one process. A loader or a list of batches is each process's own part; how large its batches are, the processes
tell each other before every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from dubito.inference.batches import Batches, Evenly, Group, evenly
from dubito.model import Model
from dubito.network.division import digest, distributed_sampler
from dubito.network.examples import Batch, batch_size
from dubito.tensors.checks import require
from dubito.tensors.processes import Processes
from dubito.tensors.randomness import fork_rng
from dubito.tensors.shares import Share


@dataclass
class Shards(Batches):
    """The part of the data that this process has."""

    processes: Processes = field(kw_only=True)
    model: Model = field(kw_only=True)
    shares: tuple[Share, ...] | None = field(default=None, kw_only=True)  # of the batches of a pass, where they are known before
    last: Batch = field(default=None, kw_only=True)  # what stands in where this process has no batch and others do
    full: bool = field(default=False, kw_only=True)  # a step takes all batches at once, and no example stands in

    def __iter__(self) -> Iterator[Batch]:
        if not self.full or self.shares is None:
            yield from super().__iter__()
            return
        for batch, share in zip(super().__iter__(), self.shares, strict=True):
            if not share.idle:
                yield batch

    def groups(self, size: int, epoch: int) -> Iterator[Group]:
        """The batches of a pass, `size` a step, with this process's share of each."""
        if (sampler := distributed_sampler(self.source)) is not None:
            sampler.set_epoch(epoch)
        iterator = iter(self)
        if self.shares is not None:
            known = iter(self.shares)
            while group := list(islice(iterator, size)):
                yield Group(group, tuple(islice(known, size)))
            return
        while True:
            group = list(islice(iterator, size))
            shares = self._tell(group, size)
            if not shares:
                return
            if group:
                self.last = group[-1]
            yield Group([*group, *[self.last] * (len(shares) - len(group))], shares)

    def _tell(self, group: list[Batch], size: int) -> tuple[Share, ...]:
        """The shares of batches whose sizes all processes tell each other; none when all have come to their ends."""
        rank, table = self.processes.rank, torch.zeros(size, self.processes.size, dtype=torch.int64)
        for i, batch in enumerate(group):
            table[i, rank] = self._count(batch)
        table = table.to(self.device)
        self.processes.sum_([table])
        waiting = self._count(group[-1] if group else self.last)
        return tuple(
            Share((range(sum(row[:rank]), sum(row[: rank + 1])),), sum(row))
            if row[rank]
            else Share((range(1),) * waiting, sum(row), idle=waiting)
            for row in table.tolist()
            if sum(row)
        )

    def _count(self, batch: Batch) -> int:
        return batch_size(self.model.split(batch)[1])


def lay_out(parts: int, source: Batches, first: Batch, processes: Processes) -> tuple[Processes, Processes]:
    """The processes over which the chains of a method are spread, which must have the same data, and those that divide the data."""
    if processes.size == 1:
        return processes, processes
    arrays, batches = source.arrays, source.source
    held = (arrays.x, arrays.y) if arrays is not None else batches if isinstance(batches, list) else first
    known = (source.n_data, digest(held))
    spread, divided = processes.grid(parts, alike=len(set(processes.gather(known))) == 1)
    require(
        len(set(spread.gather(known))) == 1,
        f"chains on processes of their own need the same data, and those of these {spread.size} processes differ: give all of them the "
        "same",
    )
    return spread, divided


def divide(model: Model, source: Batches, first: Batch, processes: Processes, *, full: bool = False) -> Batches:
    """The part of the data that this process works on; `first` is their first batch."""
    if processes.size == 1:
        return source
    part, sampler = (processes.rank, processes.size), getattr(source.source, "batch_sampler", None)
    n = batch_size(source.arrays.y) if source.arrays else len(sampler.sampler) if isinstance(sampler, Evenly) else None
    processes.agree(kind_of_data="a loader or batches" if n is None else "whole")
    digests = processes.gather(digest(first))
    if n is None:
        return _own_part(model, source, first, processes, digests)
    processes.agree(number_of_examples=(n, source.n_data))
    require(
        len(set(digests)) == 1,
        "the processes are given different data: give all of them the same (x, y) or Dataset, which are divided here, or each a "
        "list of batches or a DataLoader of its own part",
    )
    if source.arrays is not None:
        size, data = source.arrays.size, replace(source.arrays, part=part)
    else:
        assert isinstance(sampler, Evenly)
        assert isinstance(source.source, DataLoader)
        size, data = sampler.size, DataLoader(source.source.dataset, batch_sampler=Evenly(sampler.sampler, sampler.size, part))
    shares = tuple(Share.of(batch.stop - batch.start, *part) for batch in evenly(n, size))
    return Shards(
        data,
        source.n_data,
        source.n_batches,
        source.device,
        source.counted,
        processes=processes,
        model=model,
        shares=shares,
        full=full,
    )


def _own_part(model: Model, source: Batches, first: Batch, processes: Processes, digests: list[str]) -> Batches:
    """Batches that each process was given for itself."""
    twins = next(((i, digests.index(one)) for i, one in enumerate(digests) if digests.index(one) < i), None)
    if twins is not None:
        raise ValueError(
            f"processes {twins[1]} and {twins[0]} are given the same first batch, so its examples would count twice: give the "
            "Dataset or (x, y) itself, which are divided here, or a DataLoader with a DistributedSampler"
            + ("; rows that are coupled cannot be divided: give distributed=False" if model.coupled else "")
        )
    sizes, n, counted = processes.gather((source.n_data, source.n_batches)), source.n_data, source.counted
    if (sampler := distributed_sampler(source.source)) is not None:
        n, counted = _check_sampler(sampler, source, processes), False
    elif counted:
        n = sum(examples for examples, _ in sizes)
        if len(set(sizes)) > 1:
            listed = ", ".join(str(examples) for examples, _ in sizes)
            warnings.warn(
                f"The processes have {listed} examples: all {n} count once, and those that come to their end first wait.",
                stacklevel=5,  # the call of fit
            )
    else:
        processes.agree(n_data=n)
    most = max(batches for _, batches in sizes)
    return Shards(source.source, n, most, source.device, counted, processes=processes, model=model, last=first)


def _check_sampler(sampler: DistributedSampler, source: Batches, processes: Processes) -> int:
    """The number of examples that a DistributedSampler divides, of which it may leave out or repeat some."""
    ranks = processes.gather((sampler.num_replicas, sampler.rank))
    require(
        sorted(ranks) == [(processes.size, rank) for rank in range(processes.size)],
        f"the DistributedSamplers do not divide the data over these {processes.size} processes: (num_replicas, rank) are {ranks}",
    )
    n, given = len(sampler.dataset), sampler.total_size  # pyright: ignore[reportArgumentType]
    if n != given:
        warnings.warn(
            f"The DistributedSampler {'leaves out' if given < n else 'repeats'} {abs(n - given)} of the {n} examples in every pass, so "
            "that all processes have as many. Give the Dataset itself: fit divides it, and each example counts once.",
            stacklevel=6,  # the call of fit
        )
    return n if source.counted else source.n_data


def agree_on_first(processes: Processes, source: Batches, what: str) -> None:
    """Raise unless all processes are given the same data, by their first batch."""
    if processes.size > 1:
        with fork_rng():
            digests = processes.gather(digest(next(iter(source), ())))
        require(len(set(digests)) == 1, f"the processes are given different {what}: give all of them the same")


@contextmanager
def borrowed_epoch(data: Any) -> Iterator[None]:
    """The epoch of a DistributedSampler is its owner's: it is as before in the end."""
    sampler = distributed_sampler(data)
    epoch = None if sampler is None else sampler.epoch
    try:
        yield
    finally:
        if sampler is not None and epoch is not None:
            sampler.set_epoch(epoch)
