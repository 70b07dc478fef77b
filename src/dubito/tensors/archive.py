"""Draws in a folder: `draws-*.safetensors`, the shards, `draws.json`, which lists those that count, and what all draws share."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from dubito.tensors.files import FORMAT, FileError, atomic_write, checksum, damaged, open_mapped, read, write
from dubito.tensors.tree import Params

INDEX, SHARED, SHARDS = "draws.json", "shared.safetensors", f"draws-{'[0-9]' * 8}.safetensors"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One name in every draw: its shape, its dtype as the sampler made it, and that in which it is kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one draw of it, as kept."""
        return math.prod(self.shape) * self.kept.itemsize


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of consecutive draws."""

    file: str
    draws: int
    size: int  # of the file, in bytes


@dataclasses.dataclass(frozen=True)
class Archive:
    """The draws in a folder as they were when it was opened: a draw is read when it is used, and every shard checked once.

    A run may go on in the folder at the same time. It only adds draws, but it puts small shards together: if one is gone, open again.
    """

    folder: Path
    leaves: dict[str, Leaf]
    shards: tuple[Shard, ...]
    checked: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)

    @staticmethod
    def open(folder: str | os.PathLike, *, skip_damaged: bool = False) -> Archive:
        """What `draws.json` lists; if that is lost or cannot be read, what the shards say of themselves.

        A shard that is missing or damaged is an error; `skip_damaged` goes without its draws, and reads all others to be sure of them.
        """
        archive = Archive.find(Path(folder))
        for _ in range(4):
            if archive._problems:
                archive = Archive.find(Path(folder))  # a run that goes on may have put shards together between the two looks
        if skip_damaged:
            for shard in archive.shards:
                with suppress(FileNotFoundError, FileError):
                    archive.read(shard)
            archive = dataclasses.replace(archive, shards=tuple(s for s in archive.shards if s.file in archive.checked))
        elif archive._problems:
            raise FileError(archive._problems[0])
        return archive

    @staticmethod
    def find(folder: Path) -> Archive:
        """What the index lists, or without an index what the shards say."""
        return Archive._listed(folder) or Archive._found(folder)

    @staticmethod
    def _listed(folder: Path) -> Archive | None:
        try:
            content = json.loads((folder / INDEX).read_text())
            if content["checksum"] != checksum({}, json.dumps(content["index"])):
                return None
            index = content["index"]
            written = index["format"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if written > FORMAT:
            raise FileError(f"{folder / INDEX}: written by a newer dubito (file format {written}); upgrade dubito to read it")
        shards = tuple(Shard(*entry) for entry in index["shards"])
        if foreign := [shard.file for shard in shards if not fnmatchcase(shard.file, SHARDS)]:
            raise FileError(
                f"{folder / INDEX} names {foreign[0]!r}, which is no file of draws: delete the index to read the draws without it"
            )
        return Archive(folder, read_leaves(index["leaves"]), shards)

    @staticmethod
    def _found(folder: Path) -> Archive:
        """By the shards alone. Where a run was killed while putting some together, both are there, and the longest counts."""
        starts: dict[int, Shard] = {}
        leaves: dict[str, Leaf] = {}
        for path in sorted(folder.glob(SHARDS)):
            try:
                meta = json.loads(open_mapped(path, None)[1])
            except FileError as error:
                raise FileError(f"{error}; move it away to go without its draws") from None
            if meta["first"] not in starts or starts[meta["first"]].draws < meta["draws"]:
                starts[meta["first"]] = Shard(path.name, meta["draws"], path.stat().st_size)
            leaves = read_leaves(meta["leaves"])
        if not starts:
            raise FileError(f"{folder}: there are no draws here")
        shards: list[Shard] = []
        there = 0
        while there in starts:
            shards.append(starts[there])
            there += shards[-1].draws
        if there < max(starts):
            raise FileError(f"{folder}: the draws from number {there} to {min(s for s in starts if s > there) - 1} are missing")
        return Archive(folder, leaves, tuple(shards))

    def __len__(self) -> int:
        return sum(shard.draws for shard in self.shards)

    def write(self) -> None:
        """`draws.json`, whole or not at all: with this the shards that it lists are those that count."""
        index = {
            "format": FORMAT,
            "draws": len(self),
            "leaves": describe_leaves(self.leaves),
            "shards": [[shard.file, shard.draws, shard.size] for shard in self.shards],
        }
        with atomic_write(self.folder / INDEX) as scratch:
            scratch.write_text(json.dumps({"index": index, "checksum": checksum({}, json.dumps(index))}))

    @property
    def _problems(self) -> list[str]:
        return [problem for shard in self.shards if (problem := self.problem(shard))]

    def problem(self, shard: Shard) -> str | None:
        """What is wrong with the file of a shard, by its size; None if nothing."""
        path = self.folder / shard.file
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return (
                f"{path} is missing, with {shard.draws} draws: put it back (if a run is going on in the folder, "
                "it may have put shards together: open it again)"
            )
        if size != shard.size:
            return f"{path} is truncated or was changed: it has {size} bytes and had {shard.size}, with {shard.draws} draws"
        return None

    def read(self, shard: Shard, prefix: str = "") -> Params:
        """The draws of a shard, leaves [draws, ...] as they are kept, not yet copied from the file; only some names with a prefix."""
        problem = self.problem(shard)
        if problem:
            raise FileError(problem)
        path = self.folder / shard.file
        tensors, header, expected = open_mapped(path, prefix)
        meta = json.loads(header)
        if prefix:
            if prefix == "trace:" and checksum(tensors) != meta["trace"]:
                raise damaged(path)
        elif shard.file not in self.checked:
            if checksum(tensors, header) != expected:
                raise damaged(path)
            self.checked.add(shard.file)
        # a file does not keep the order of its tensors
        return {name: tensors[name] for name in self.leaves if name in tensors}

    def parts(self, prefix: str = "") -> Iterator[tuple[slice, Params]]:
        """Shard after shard: which draws it holds, and `read` of it."""
        first = 0
        for shard in self.shards:
            yield slice(first, first + shard.draws), self.read(shard, prefix)
            first += shard.draws

    def stacked(self, device: torch.device | str = "cpu", column: int | None = None) -> Params:
        """All draws, leaves [n, ...] in the sampler's dtypes; of leaves [size, ...] only one column if wanted."""
        cut = 0 if column is None else 1
        out = {
            name: torch.empty((len(self), *leaf.shape[cut:]), dtype=leaf.dtype, device=device)
            for name, leaf in self.leaves.items()
        }
        for rows, part in self.parts():
            for name, leaf in part.items():
                out[name][rows] = (leaf if column is None else leaf[:, column]).to(device)
        return out

    def shared(self) -> tuple[Params, dict]:
        """What all draws have in common (buffers), and what else is to be known of them."""
        tensors, meta = read(self.folder / SHARED)
        return {name: tensors[name] for name in meta["names"]}, meta["about"]


def describe_leaves(leaves: dict[str, Leaf]) -> list:
    """As JSON; a list, since a header sorts its names."""
    return [
        [name, list(leaf.shape), str(leaf.dtype).removeprefix("torch."), str(leaf.kept).removeprefix("torch.")]
        for name, leaf in leaves.items()
    ]


def read_leaves(described: list) -> dict[str, Leaf]:
    """The inverse of `describe_leaves`."""
    return {name: Leaf(tuple(shape), getattr(torch, dtype), getattr(torch, kept)) for name, shape, dtype, kept in described}


def write_shared(folder: Path, buffers: Params, about: dict) -> None:
    """What all draws of a folder have in common, beside them."""
    write(folder / SHARED, buffers, {"names": list(buffers), "about": about})
