"""Tensors on disk: safetensors with a JSON header, written whole or not at all, checked when read, and never a pickle.

`pack` turns nested states (dataclasses, dicts, lists, numbers, tensors, torch optimisers) into flat tensors and JSON; `unpack`
fills a template of the same kind, so a file never names a class to import. `Draws` is an append-only list of weight draws.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dubito import tree
from dubito.tree import Params

FORMAT = 1


class FileError(ValueError):
    """A file that cannot be used, with the reason and what to do in one sentence."""


def checksum(tensors: dict[str, Tensor], header: str = "") -> str:
    """A digest of names, shapes, dtypes and contents; it finds damage, it does not keep out a forger."""
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        # a copy, since `contiguous` leaves a tensor of one element the strides it has, through which bytes cannot be read
        tensor = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A scratch file to write, which takes the place of `path` once it is whole: after a crash there is the old file or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)  # mkstemp's files are for the owner only, whatever the user wants
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    # The rename itself must survive a power cut; some file systems and platforms cannot sync a folder, which is no error.
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write(path: str | os.PathLike, tensors: dict[str, Tensor], meta: dict) -> None:
    """Write tensors and JSON-able `meta` to one safetensors file, atomically: a crash leaves the old file or the new one."""
    # Aliases (tied or expanded tensors) and strides are not part of a value: every tensor is stored on its own.
    tensors = {name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    header = json.dumps({"format": FORMAT, **meta}, sort_keys=True)
    metadata = {"dubito": header, "checksum": checksum(tensors, header)}
    with replacing(path) as scratch:
        save_file(tensors, scratch, metadata)


def read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict]:
    """Read what `write` wrote; anything else is a `FileError` that says what is wrong with the file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path}: not a readable safetensors file; it is truncated or of another kind ({error})") from None
    if "dubito" not in metadata or "checksum" not in metadata:
        raise FileError(f"{path}: a safetensors file, but not one written by dubito")
    if checksum(tensors, metadata["dubito"]) != metadata["checksum"]:
        raise FileError(f"{path}: the contents do not match their checksum; the file was changed or damaged after writing")
    meta = json.loads(metadata["dubito"])
    if meta.get("format", 0) > FORMAT:
        raise FileError(f"{path}: written by a newer dubito (file format {meta['format']}); upgrade dubito to read it")
    return tensors, meta


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A JSON-able description of a nested value; its tensors go into `tensors` under their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.Generator):
        return {"generator": pack(value.get_state(), tensors, path)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {"fields": {name: pack(item, tensors, f"{path}/{name}") for name, item in fields}}
    if isinstance(value, dict):
        return {"dict": [[key, pack(item, tensors, f"{path}/{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]}
    if isinstance(value, torch.optim.Optimizer):
        return {"stateful": pack(value.state_dict(), tensors, path)}
    raise TypeError(
        f"a state may hold tensors, numbers, strings, generators, dataclasses, dicts, lists and optimisers; "
        f"{path or 'the state'} is a {type(value).__name__}"
    )


def unpack(description: Any, tensors: dict[str, Tensor], template: Any = None) -> Any:
    """The inverse of `pack`. Dataclasses, generators and optimisers are rebuilt on `template`, a value of the same shape."""
    (kind, content), *_ = description.items()
    if kind == "tensor":
        tensor = tensors[content]
        if isinstance(template, Tensor) and template.shape == tensor.shape and template.dtype == tensor.dtype:
            with torch.no_grad():
                return template.copy_(tensor)  # in place: an optimiser in the same state refers to this very object
        return tensor
    if kind == "value":
        return content
    if kind == "generator":
        template.set_state(unpack(content, tensors).cpu())
        return template
    if kind == "fields":
        filled = {name: unpack(item, tensors, getattr(template, name)) for name, item in content.items()}
        return type(template)(**filled)
    if kind == "dict":
        inner = template if isinstance(template, dict) else {}
        return {key: unpack(item, tensors, inner.get(key)) for key, item in content}
    if kind == "list":
        inner = list(template) if isinstance(template, list | tuple) else []
        inner += [None] * (len(content) - len(inner))
        items = [unpack(item, tensors, like) for item, like in zip(content, inner, strict=False)]
        return tuple(items) if isinstance(template, tuple) else items
    if kind == "stateful":
        template.load_state_dict(unpack(content, tensors))
        return template
    raise FileError(f"unknown entry {kind!r}; the file was written by another version of dubito")


class Draws:
    """An append-only list of weight draws: in memory, and in shards on disk too where a folder is given.

    `flush` writes what is new as one more shard. `keep(n)` forgets all but the first n draws: after a crash the shards may be
    ahead of the last checkpoint, and the draws past it will be made again.

    >>> draws = Draws()
    >>> draws.append({"w": torch.zeros(2)}); draws.append({"w": torch.ones(2)})
    >>> len(draws), draws.stacked()["w"].shape
    (2, torch.Size([2, 2]))
    """

    def __init__(self, folder: str | os.PathLike | None = None):
        self.folder = Path(folder) if folder is not None else None
        self._draws: list[Params] = []
        self._flushed = 0

    def __len__(self) -> int:
        return len(self._draws)

    def append(self, draw: Params) -> None:
        self._draws.append(tree.clone(draw))

    def stacked(self) -> Params:
        if not self._draws:
            raise ValueError("there are no draws yet: the run was too short for its burn-in and thinning")
        return tree.stack(self._draws)

    def column(self, i: int) -> Draws:
        """Of draws whose leaves are stacked [size, ...], the draws of member i."""
        one = Draws()
        one._draws = [tree.select(draw, i) for draw in self._draws]
        return one

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("draws-*.safetensors")) if self.folder else []

    def flush(self) -> None:
        new = self._draws[self._flushed :]
        if self.folder is None or not new:
            return
        write(self.folder / f"draws-{self._flushed:08d}.safetensors", tree.stack(new), {"draws": len(new), "names": list(new[0])})
        self._flushed = len(self._draws)

    def keep(self, n: int, device: torch.device | str = "cpu") -> None:
        """Read the first n draws back from the folder and delete what was written past them."""
        self._draws, self._flushed = [], 0
        for shard in self._shards():
            if len(self._draws) >= n:
                shard.unlink()
                continue
            stacked, meta = read(shard)
            stacked = {name: stacked[name] for name in meta["names"]}  # a file does not keep the order of its tensors
            self._draws += [tree.move(tree.select(stacked, i), device) for i in range(meta["draws"])]
        if len(self._draws) != n:
            raise FileError(f"{self.folder}: the checkpoint counts {n} draws but the folder holds {len(self._draws)}")
        self._flushed = n
