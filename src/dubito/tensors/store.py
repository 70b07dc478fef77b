"""Tensors on disk: safetensors with a JSON header, written whole or not at all, checked when read, and never a pickle.

`pack` turns nested states (dataclasses, dicts, lists, numbers, tensors, torch optimisers) into flat tensors and JSON; `unpack`
fills a template of the same kind, so a file never names a class to import. `Draws` is an append-only list of weight draws: in a
folder it is `draws-*.safetensors`, the shards, and `draws.json`, which names those that count; `Archive` reads them.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.tree import Params

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows: two processes on one folder go unnoticed there)
    fcntl = None

FORMAT = 1
GIGABYTE = 2**30
SHARD = 64 * 2**20  # bytes: a shard is closed before it is larger
INDEX, SHARED, SHARDS = "draws.json", "shared.safetensors", f"draws-{'[0-9]' * 8}.safetensors"


class FileError(ValueError):
    """A file that cannot be used, with the reason and what to do in one sentence."""


class WriteError(OSError):
    """A run that could not be written, because the disk is full or for another reason, with what to do about it."""


@contextmanager
def telling(folder: str | os.PathLike | None) -> Iterator[None]:
    """Errors of the disk, in words."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(
            error.errno,
            f"{folder}: the run could not be written ({error.strerror or error}). What was written before is whole: make room, and "
            "go on with resume=True",
        ) from error


def described(value: Any) -> str:
    """A value in its own words, by which another process knows it again: without the address at which it is here, which functions and
    plain objects tell, and with a checksum of every tensor, of which the words would leave out most.

    >>> described(lambda: 0)
    '<function <lambda>>'
    >>> described({"w": torch.zeros(2, 1000)})
    "{'w': tensor(float32, [2, 1000], 3ef4ba222a6ddd8baa069ef77d0fc9e5)}"
    """
    if isinstance(value, Tensor):
        return f"tensor({str(value.dtype).removeprefix('torch.')}, {list(value.shape)}, {checksum({'': value})})"
    if type(value) is dict:
        return f"{{{', '.join(f'{described(key)}: {described(item)}' for key, item in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(described, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(described, value))}{',' if len(value) == 1 else ''})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{f.name}={described(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.repr)
        return f"{type(value).__qualname__}({', '.join(fields)})"
    return unplaced(repr(value))


def unplaced(words: str) -> str:
    """Without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", words)


def checksum(tensors: dict[str, Tensor], header: str = "") -> str:
    """A digest of names, shapes, dtypes and contents; it finds damage, it does not keep out a forger."""
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = _plain(tensors[name])
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain(tensor: Tensor) -> Tensor:
    """The same numbers on the CPU, one after another: a copy only where they are not so yet."""
    tensor = tensor.detach().cpu()
    # `contiguous` leaves a tensor of one element the strides it has, through which bytes cannot be read
    return tensor if tensor.is_contiguous() and tensor.numel() > 1 else tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A scratch file to write, which takes the place of `path` once it is whole: after a crash there is the old file or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # which names a file that nobody asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
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
    plain, seen = {name: _plain(tensor) for name, tensor in tensors.items()}, set()
    for name, tensor in plain.items():
        memory = tensor.untyped_storage()
        alone = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in seen
        plain[name] = tensor if alone else tensor.clone()
        seen.add(memory.data_ptr())
    header = json.dumps({"format": FORMAT, **meta}, sort_keys=True)
    metadata = {"dubito": header, "checksum": checksum(plain, header)}
    with replacing(path) as scratch:
        try:
            save_file(plain, scratch, metadata)
        except SafetensorError as error:  # what the system said is only in its words
            number = re.search(r"os error (\d+)", str(error))
            code = int(number.group(1)) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error


def read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict]:
    """Read what `write` wrote; anything else is a `FileError` that says what is wrong with the file."""
    mapped, header, expected = _open(path)
    tensors = tree.clone(mapped)  # what happens to the file from now on is no matter; and memory of our own is aligned
    if checksum(tensors, header) != expected:
        raise _damaged(path)
    return tensors, json.loads(header)


def _damaged(path: str | os.PathLike) -> FileError:
    return FileError(f"{path}: the contents do not match their checksum; the file was changed or damaged after writing")


def _open(path: str | os.PathLike, prefix: str | None = "") -> tuple[dict[str, Tensor], str, str]:
    """The tensors whose names begin with a prefix (None: none of them), the header and the checksum.

    The file is mapped into memory: nothing is read of a tensor before it is used, and nothing is checked yet.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = [] if prefix is None else [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{path}: not a readable safetensors file; it is truncated or of another kind ({error})") from None
    if "dubito" not in metadata or "checksum" not in metadata:
        raise FileError(f"{path}: a safetensors file, but not one written by dubito")
    try:
        written = json.loads(metadata["dubito"]).get("format", 0)
    except (ValueError, AttributeError):
        raise _damaged(path) from None
    if not isinstance(written, int):
        raise _damaged(path)
    if written > FORMAT:
        raise FileError(f"{path}: written by a newer dubito (file format {written}); upgrade dubito to read it")
    return tensors, metadata["dubito"], metadata["checksum"]


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A JSON-able description of a nested value; its tensors go into `tensors` under their paths.

    Fields of a dataclass with `metadata={"transient": True}` (what is made again at need, such as compiled code) are left out.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.Generator):
        return {"generator": pack(value.get_state(), tensors, path)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if not f.metadata.get("transient")]
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
        transient = {f.name: getattr(template, f.name) for f in dataclasses.fields(template) if f.metadata.get("transient")}
        return type(template)(**filled, **transient)
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


_HELD: set[Path] = set()  # folders that this very process is writing to


@contextmanager
def locked(folder: str | os.PathLike | None) -> Iterator[None]:
    """One run at a time in a folder: another process, or another run in this one, is refused in words.

    `lock.json` says who holds the folder. The lock itself is the system's, and ends with its process however that ends: the file
    that a killed run has left means nothing. What such a run was just writing is swept away. (Where a system has no such locks, nobody
    is refused.)
    """
    if folder is None:
        yield
        return
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _HELD:
        raise FileExistsError(f"{folder} is in use by another run in this process: give another folder")
    _HELD.add(folder)
    path, handle = folder / "lock.json", None
    try:
        handle = _lock(path)
        for pattern in (".*.safetensors.*", f".{INDEX}.*", ".tmp??????"):  # the last are safetensors' own
            for scratch in folder.glob(pattern):
                scratch.unlink(missing_ok=True)
        yield
    finally:
        _HELD.discard(folder)
        if handle is not None:
            path.unlink(missing_ok=True)  # while it is held: who opens it from now on makes a new file
            os.close(handle)


def _lock(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                # not flock, whose locks live on in the worker processes of a DataLoader when their parent is killed
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = "another process"
                with suppress(ValueError, KeyError, TypeError):
                    known = json.loads(os.read(handle, 4096))
                    holder = f"process {known['pid']} on {known['host']}"
                os.close(handle)
                raise FileExistsError(
                    f"{path.parent} is in use by {holder}, and two runs in one folder would mix their draws: wait for it, or give "
                    "another folder"
                ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                os.ftruncate(handle, 0)
                os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                return handle
        os.close(handle)  # whoever held it has taken the file away in this very moment: a new one


class TooLarge(ValueError):
    """Draws that would take more memory than they may: they are on disk, and are read from there as they are needed."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One name in every draw: its shape, its dtype as the sampler made it, and that in which it is kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.kept.itemsize


def _kept(name: str, dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Weights may be kept in a smaller dtype; a trace, buffers and learned scales, whose names have a colon, stay as they are."""
    return dtype if wanted is None or ":" in name or not dtype.is_floating_point or dtype.itemsize <= wanted.itemsize else wanted


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
    _sound: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)

    @staticmethod
    def open(folder: str | os.PathLike, *, skip_damaged: bool = False) -> Archive:
        """What `draws.json` lists; if that is lost or cannot be read, what the shards say of themselves.

        A shard that is missing or damaged is an error; `skip_damaged` goes without its draws, and reads all others to be sure of them.
        """
        archive = Archive._here(Path(folder))
        for _ in range(4):
            if archive._problems:
                archive = Archive._here(Path(folder))  # a run that goes on may have put shards together between the two looks
        if skip_damaged:
            for shard in archive.shards:
                with suppress(FileNotFoundError, FileError):
                    archive.read(shard)
            archive = dataclasses.replace(archive, shards=tuple(s for s in archive.shards if s.file in archive._sound))
        elif archive._problems:
            raise FileError(archive._problems[0])
        return archive

    @staticmethod
    def _here(folder: Path) -> Archive:
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
        return Archive(folder, _leaves(index["leaves"]), tuple(Shard(*entry) for entry in index["shards"]))

    @staticmethod
    def _found(folder: Path) -> Archive:
        """By the shards alone. Where a run was killed while putting some together, both are there, and the longest counts."""
        starts: dict[int, Shard] = {}
        leaves: dict[str, Leaf] = {}
        for path in sorted(folder.glob(SHARDS)):
            try:
                meta = json.loads(_open(path, None)[1])
            except FileError as error:
                raise FileError(f"{error}; move it away to go without its draws") from None
            if meta["first"] not in starts or starts[meta["first"]].draws < meta["draws"]:
                starts[meta["first"]] = Shard(path.name, meta["draws"], path.stat().st_size)
            leaves = _leaves(meta["leaves"])
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
            "leaves": _described(self.leaves),
            "shards": [[shard.file, shard.draws, shard.size] for shard in self.shards],
        }
        with replacing(self.folder / INDEX) as scratch:
            scratch.write_text(json.dumps({"index": index, "checksum": checksum({}, json.dumps(index))}))

    @property
    def _problems(self) -> list[str]:
        return [problem for shard in self.shards if (problem := self._problem(shard))]

    def _problem(self, shard: Shard) -> str | None:
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
        problem = self._problem(shard)
        if problem:
            raise FileError(problem)
        path = self.folder / shard.file
        tensors, header, expected = _open(path, prefix)
        meta = json.loads(header)
        if prefix:
            if prefix == "trace:" and checksum(tensors) != meta["trace"]:
                raise _damaged(path)
        elif shard.file not in self._sound:
            if checksum(tensors, header) != expected:
                raise _damaged(path)
            self._sound.add(shard.file)
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


def _described(leaves: dict[str, Leaf]) -> list:
    """As JSON; a list, since a header sorts its names."""
    return [
        [name, list(leaf.shape), str(leaf.dtype).removeprefix("torch."), str(leaf.kept).removeprefix("torch.")]
        for name, leaf in leaves.items()
    ]


def _leaves(described: list) -> dict[str, Leaf]:
    return {name: Leaf(tuple(shape), getattr(torch, dtype), getattr(torch, kept)) for name, shape, dtype, kept in described}


def write_shared(folder: Path, buffers: Params, about: dict) -> None:
    """What all draws of a folder have in common, beside them."""
    write(folder / SHARED, buffers, {"names": list(buffers), "about": about})


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
        rows, values = zip(*((block[self.used], draw[name]) for name, block in self.leaves.items()), strict=True)
        with torch.no_grad():
            torch._foreach_copy_(rows, values)
        self.used += 1

    def filled(self) -> Params:
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
        if not self._leaves:
            self._leaves = {
                name: Leaf(tuple(leaf.shape), leaf.dtype, _kept(name, leaf.dtype, self.dtype)) for name, leaf in draw.items()
            }
        if len(draw) != len(self._leaves) or any(
            name not in draw or draw[name].shape != leaf.shape for name, leaf in self._leaves.items()
        ):
            raise ValueError(
                f"a draw has the same names and shapes as the first one, {_described(self._leaves)}; "
                f"got { {name: list(leaf.shape) for name, leaf in draw.items()} }"
            )
        if not self._blocks or self._blocks[-1].used == self._blocks[-1].room:
            self._blocks.append(_Block(self._leaves, draw))
        block = self._blocks[-1]
        block.add(draw)
        self.device = next(iter(draw.values())).device
        self._count += 1
        if self.folder is not None and block.used == block.room:
            self._close()

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
        with telling(self.folder):
            self._pending.result()
        self._pending = None  # not after an error: what could not be written is not there for anything that follows

    def _write(self, rows: Params, copied: Any) -> None:
        """One more shard, into which those before it go that are no larger: every draw is written log n times at most.

        `copied` is the event after which the rows have come from the GPU.
        """
        assert self.folder is not None
        if copied is not None:
            copied.synchronize()
        old = self._archive
        if old is None:
            if (self.folder / INDEX).exists() or list(self.folder.glob(SHARDS)):
                raise FileExistsError(errno.EEXIST, "it holds draws of another run")
            write_shared(self.folder, *self._shared)
            self._shared = {}, {}
            old = Archive(self.folder, self._leaves, ())
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
        new._sound.add(shards[-1].file)
        self._archive = new
        for shard in merged:
            (self.folder / shard.file).unlink(missing_ok=True)

    def _shard(self, rows: Params, first: int) -> Shard:
        assert self.folder is not None
        name = f"draws-{self._serial:08d}.safetensors"
        self._serial += 1
        trace = {name: leaf for name, leaf in rows.items() if name.startswith("trace:")}
        meta = {"draws": tree.count(rows), "first": first, "leaves": _described(self._leaves), "trace": checksum(trace)}
        write(self.folder / name, rows, meta)
        return Shard(name, meta["draws"], (self.folder / name).stat().st_size)

    def keep(self, n: int, device: torch.device | str = "cpu") -> None:
        """Go on after the first n draws in the folder: what was written past them is deleted."""
        assert self.folder is not None
        paths = list(self.folder.glob(SHARDS))
        self._serial = 1 + max((int(path.stem.removeprefix("draws-")) for path in paths), default=-1)
        self._blocks, self._count, self.device, self._archive, self._leaves = [], n, torch.device(device), None, {}
        shards: list[Shard] = []
        if n:
            old = Archive._here(self.folder) if paths else Archive(self.folder, {}, ())
            if len(old) < n:
                raise FileError(f"{self.folder}: the checkpoint counts {n} draws but the folder holds {len(old)}")
            self._leaves, first = old.leaves, 0
            for shard in old.shards:
                if first < n:
                    if problem := old._problem(shard):
                        raise FileError(problem)
                    # a shard that goes past the checkpoint is written anew: no file holds a draw that does not count
                    whole = first + shard.draws <= n
                    shards.append(shard if whole else self._shard(tree.select(old.read(shard), slice(0, n - first)), first))
                first += shard.draws
            self._archive = dataclasses.replace(old, shards=tuple(shards))
            self._archive.write()
        else:
            (self.folder / INDEX).unlink(missing_ok=True)
        kept = {shard.file for shard in shards}
        for path in paths:
            if path.name not in kept:
                path.unlink(missing_ok=True)


class _Column(Draws):
    """The draws of one member: nothing of its own."""

    def __init__(self, whole: Draws, member: int):
        super().__init__()
        self.whole, self.member = whole, member

    def __len__(self) -> int:
        return len(self.whole)

    def append(self, draw: Params) -> None:
        raise TypeError("draws are added to the whole, not to a column of it")

    def _stacked(self, column: int | None) -> Params:
        stacked = self.whole._stacked(self.member)
        return stacked if column is None else tree.select(stacked, (slice(None), column))  # pyright: ignore[reportArgumentType]
