"""Batches that several processes look at, each at a part of them: for what only sums or gathers over examples, and learns nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DistributedSampler

from dubito.network.examples import Batch
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.files import checksum
from dubito.tensors.processes import Processes


def share_batches(data: Iterable[Batch], processes: Processes) -> Iterator[Batch]:
    """The batches for this process: every K-th where all K processes are given the same, and all of them where each has its own part,
    as the first batches tell.

    >>> from dubito.tensors.processes import ALONE
    >>> list(share_batches([1, 2], ALONE))
    [1, 2]
    """
    iterator = iter(data)
    if processes.size == 1:
        return iterator
    if (sampler := distributed_sampler(data)) is not None:
        n, given = len(sampler.dataset), sampler.total_size  # pyright: ignore[reportArgumentType]
        require(
            n == given,
            f"the DistributedSampler {'leaves out' if given < n else 'repeats'} {abs(n - given)} of the {n} examples: give all "
            "processes the loader without it, whose batches are divided here",
        )
    first = list(islice(iterator, 1))
    digests = processes.gather(digest(first) if first else None)
    known = [one for one in digests if one is not None]
    alike = len(set(digests)) == 1
    require(
        alike or len(set(known)) == len(known),
        "some of the processes are given the same first batch, and others another one: give all of them the same data, or each its own "
        "part",
    )
    whole = chain(first, iterator)
    return islice(whole, processes.rank, None, processes.size) if alike else whole


def digest(batch: Batch) -> str:
    """A checksum of the tensors and arrays of a batch, by which processes tell whether they are given the same."""
    leaves = dict(enumerate(tree.leaves(tree.tensors(batch))))
    require(
        leaves, "there is no tensor or array in the first batch, by which processes tell whether they are given the same data"
    )
    return checksum({str(i): leaf for i, leaf in leaves.items()})


def distributed_sampler(data: Any) -> DistributedSampler | None:
    """The DistributedSampler of a DataLoader, if it has one."""
    sampler = getattr(data, "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) else None
