"""An append-only list of weight draws, in memory or in a folder."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from dubito.tensors import tree
from dubito.tensors.archive import INDEX, SHARDS, Archive, Leaf, Shard, describe_leaves, write_shared
from dubito.tensors.files import FileError, checksum, describing_write_errors, write
from dubito.tensors.tree import Params

GIGABYTE = 2**30
SHARD = 64 * 2**20  # bytes: a shard is closed before it is larger


class TooLarge(ValueError):
    """Draws that would take more memory than they may: they are on disk, and are read from there as they are needed."""


def _kept(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Weights may be kept in a smaller dtype; a trace, buffers and learned scales, whose names have a colon, stay as they are."""
    return dtype if wanted is None or ":" in name or not dtype.is_floating_point or dtype.itemsize <= wanted.itemsize else wanted


class _Block:
    """Room for some draws, leaves [room, ...], which is filled row by row."""

    def __init__(self, leaves: dict[str, Leaf], draw: Params):
        # memory that nothing is written to is not taken yet
        self.room = max(1, min(2**16, SHARD // max(1, sum(leaf.bytes for leaf in leaves.values()))))
        self.leaves = {
            name: torch.empty((self.room, *leaf.shape), dtype=leaf.kept, device=draw[name].device)
            for name, leaf in leaves.items()
        }
        self.used = 0

    def add(self, draw: Params) -> None:
        # one call for all leaves: on a GPU one kernel, and nobody waits for it
        """Fill the next row."""
        rows, values = zip(*((block[self.used], draw[name]) for name, block in self.leaves.items()), strict=True)
        with torch.no_grad():
            torch._foreach_copy_(rows, values)
        self.used += 1

    def filled(self) -> Params:
        """The rows that are filled."""
        return {name: leaf[: self.used] for name, leaf in self.leaves.items()}


class Draws:
    """An append-only list of draws: in memory, or, where a folder is given, in shards on disk as soon as there are enough for one.

    A draw is a dict of tensors: the weights, and whatever else the sampler notes ("trace:energy", "buffer:0.running_mean").

    With a folder, memory holds only what is not on disk yet. A shard is closed when it is full, and written in the background while the
    next one fills; `flush` closes the last one too, and returns when all draws are safe. Small shards are put together as they
    come, so that n draws make about log n files, however often they are flushed. `keep(n)` forgets all but the first n draws:
    after a crash the shards may be ahead of the last checkpoint, and the draws past it will be made again.

    `dtype` (bfloat16) is for the weights; they come back in their own. `memory` is how many gigabytes `stacked` may take.

    >>> draws = Draws()
    >>> draws.append({"w": torch.zeros(2)}); draws.append({"w": torch.ones(2)})
    >>> len(draws), draws.stacked()["w"].shape
    (2, torch.Size([2, 2]))
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        *,
        dtype: torch.dtype | None = None,
        memory: float = math.inf,
        buffers: Params | None = None,
        about: dict | None = None,
    ):
        self.folder = Path(folder) if folder is not None else None
        self.dtype, self.memory, self.device = dtype, memory, None
        self._shared = {}, about or {}
        if folder is not None:  # a copy: a method may change what it starts from
            self._shared = {name: leaf.detach().to("cpu", copy=True) for name, leaf in (buffers or {}).items()}, about or {}
        self._leaves: dict[str, Leaf] = {}
        self._blocks: list[_Block] = []  # in memory: the last one is being filled, the others are full
        self._archive: Archive | None = None  # on disk
        self._count = self._serial = 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future | None = None

    def __enter__(self) -> Draws:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for what is being written; what is in memory only is not written any more."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """What `stacked` takes."""
        return self._count * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self._leaves.values())

    @property
    def fits(self) -> bool:
        """Whether all draws may be in memory at once; without a folder they are."""
        return self.folder is None or self.bytes <= self.memory * GIGABYTE

    @property
    def archive(self) -> Archive:
        """The draws on disk, all of them."""
        self.flush()
        if self._archive is None:
            raise ValueError("there are no draws yet: the run was too short for its burn-in and thinning")
        return self._archive

    def append(self, draw: Params) -> None:
        """Add a draw, with the names and shapes of the first one."""
        self._check(draw)
        if not self._blocks or self._blocks[-1].used == self._blocks[-1].room:
            self._blocks.append(_Block(self._leaves, draw))
        block = self._blocks[-1]
        block.add(draw)
        self.device = next(iter(draw.values())).device
        self._count += 1
        if self.folder is not None and block.used == block.room:
            self._close()

    def _check(self, draw: Params) -> None:
        if not self._leaves:
            self._leaves = {
                name: Leaf(tuple(leaf.shape), leaf.dtype, _kept(name, leaf.dtype, self.dtype)) for name, leaf in draw.items()
            }
        if len(draw) != len(self._leaves) or any(
            name not in draw or draw[name].shape != leaf.shape for name, leaf in self._leaves.items()
        ):
            raise ValueError(
                f"a draw has the same names and shapes as the first one, {describe_leaves(self._leaves)}; "
                f"got { {name: list(leaf.shape) for name, leaf in draw.items()} }"
            )

    def stacked(self) -> Params:
        """All draws, leaves [n, ...], on the device where they were made."""
        return self._stacked(None)

    def _stacked(self, column: int | None) -> Params:
        if not self._count:
            raise ValueError("there are no draws yet: the run was too short for its burn-in and thinning")
        if not self.fits:
            raise TooLarge(f"{self._count} draws take {self.bytes / GIGABYTE:.3g} GB, more than memory={self.memory:g}")
        if self.folder is not None:
            return self.archive.stacked(self.device or "cpu", column)
        parts = [block.filled() for block in self._blocks]
        if column is not None:
            parts = [tree.select(part, (slice(None), column)) for part in parts]  # pyright: ignore[reportArgumentType]
        return {name: leaf.to(self._leaves[name].dtype) for name, leaf in tree.concatenate(parts).items()}

    def column(self, i: int) -> Draws:
        """Of draws whose leaves are stacked [size, ...], the draws of member i."""
        return _Column(self, i)

    def flush(self) -> None:
        """Write what is in memory; when this returns, all draws are on disk."""
        if self.folder is not None:
            self._close()
            self._wait()

    def _close(self) -> None:
        """Hand what is in memory to the writer, which is at most one shard behind."""
        self._wait()
        if not self._blocks:
            return
        (block,) = self._blocks
        self._blocks = []
        rows, copied = {}, None
        for name, leaf in block.filled().items():
            if leaf.is_cuda:  # into pinned memory, which a copy needs to run while the next draws are made
                rows[name] = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf, non_blocking=True)
                copied = torch.cuda.current_stream(leaf.device).record_event()
            else:
                rows[name] = leaf.cpu()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "draws")
        self._pending = self._thread.submit(self._write, rows, copied)

    def _wait(self) -> None:
        if self._pending is None:
            return
        with describing_write_errors(self.folder):
            self._pending.result()
        self._pending = None  # not after an error: what could not be written is not there for anything that follows

    def _write(self, rows: Params, copied: torch.Event | None) -> None:
        """One more shard, into which those before it go that are no larger: every draw is written log n times at most.

        `copied` is the event after which the rows have come from the GPU.
        """
        assert self.folder is not None
        if copied is not None:
            copied.synchronize()
        old = self._begin(self.folder) if self._archive is None else self._archive
        shards, merged, size = list(old.shards), [], sum(leaf.nbytes for leaf in rows.values())
        each = size // tree.count(rows)
        while shards and (last := shards[-1].draws * each) <= size and last + size <= SHARD:
            merged.append(shards.pop())
            size += last
        if merged:
            rows = tree.concatenate([*(old.read(shard) for shard in reversed(merged)), rows])
        shards.append(self._shard(rows, sum(shard.draws for shard in shards)))
        new = dataclasses.replace(old, shards=tuple(shards))
        new.write()
        new.checked.add(shards[-1].file)
        self._archive = new
        for shard in merged:
            (self.folder / shard.file).unlink(missing_ok=True)

    def _begin(self, folder: Path) -> Archive:
        """An archive without shards, with what all draws share, in a folder that holds no draws yet."""
        if (folder / INDEX).exists() or list(folder.glob(SHARDS)):
            raise FileExistsError(errno.EEXIST, "it holds draws of another run")
        write_shared(folder, *self._shared)
        self._shared = {}, {}
        return Archive(folder, self._leaves, ())

    def _shard(self, rows: Params, first: int) -> Shard:
        assert self.folder is not None
        name = f"draws-{self._serial:08d}.safetensors"
        self._serial += 1
        trace = {name: leaf for name, leaf in rows.items() if name.startswith("trace:")}
        meta = {"draws": tree.count(rows), "first": first, "leaves": describe_leaves(self._leaves), "trace": checksum(trace)}
        write(self.folder / name, rows, meta)
        return Shard(name, meta["draws"], (self.folder / name).stat().st_size)

    def keep(self, n: int, device: torch.device | str = "cpu") -> None:
        """Go on after the first n draws in the folder: what was written past them is deleted."""
        assert self.folder is not None
        paths = list(self.folder.glob(SHARDS))
        self._serial = 1 + max((int(path.stem.removeprefix("draws-")) for path in paths), default=-1)
        self._blocks, self._count, self.device, self._archive, self._leaves = [], n, torch.device(device), None, {}
        if n:
            old = Archive.find(self.folder) if paths else Archive(self.folder, {}, ())
            if len(old) < n:
                raise FileError(f"{self.folder}: the checkpoint counts {n} draws but the folder holds {len(old)}")
            self._leaves = old.leaves
            self._archive = dataclasses.replace(old, shards=tuple(self._first(n, old)))
            self._archive.write()
        else:
            (self.folder / INDEX).unlink(missing_ok=True)
        kept = {shard.file for shard in self._archive.shards} if self._archive is not None else set()
        for path in paths:
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _first(self, n: int, old: Archive) -> Iterator[Shard]:
        """The shards of the first n draws. One that goes past them is written anew: no file holds a draw that does not count."""
        first = 0
        for shard in old.shards:
            if first >= n:
                return
            if problem := old.problem(shard):
                raise FileError(problem)
            whole = first + shard.draws <= n
            yield shard if whole else self._shard(tree.select(old.read(shard), slice(0, n - first)), first)
            first += shard.draws


class _Column(Draws):
    """The draws of one member: nothing of its own."""

    def __init__(self, whole: Draws, member: int):
        super().__init__()
        self.whole, self.member = whole, member

    def __len__(self) -> int:
        return len(self.whole)

    def append(self, draw: Params) -> None:
        """Refused: draws are added to the whole."""
        raise TypeError("draws are added to the whole, not to a column of it")

    def _stacked(self, column: int | None) -> Params:
        stacked = self.whole._stacked(self.member)
        return stacked if column is None else tree.select(stacked, (slice(None), column))  # pyright: ignore[reportArgumentType]


class Followed(Draws):
    """The draws that another process writes to a folder: this one counts those that it would write, and reads them there."""

    def append(self, draw: Params) -> None:
        """Count a draw."""
        self._check(draw)
        self.device = next(iter(draw.values())).device
        self._count += 1

    def flush(self) -> None:
        """Look at what is there."""
        assert self.folder is not None
        self._archive = Archive.find(self.folder) if self._count else None

    def keep(self, n: int, device: torch.device | str = "cpu") -> None:
        """Go on after the first n draws, which is all that the other process has left."""
        assert self.folder is not None
        self._count, self.device = n, torch.device(device)
        self._leaves = Archive.find(self.folder).leaves if n else {}
