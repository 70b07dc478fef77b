"""Tensors in one safetensors file with a JSON header: written whole or not at all, checked when read, and never a pickle.

`lock_folder` lets one run at a time into a folder, and errors of the disk say what to do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dubito.tensors import tree

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows: two processes on one folder go unnoticed there)
    fcntl = None

FORMAT = 1
SCRATCH = ".dubito-writing-"  # prefix of the folders in which files are written
OLD_SCRATCH = (".*.safetensors.*", ".draws.json.*", ".tmp??????")  # of version 0.1; the last are safetensors' own


class FileError(ValueError):
    """A file that cannot be used, with the reason and what to do in one sentence."""


def checksum(tensors: dict[str, Tensor], header: str = "") -> str:
    """A digest of names, shapes, dtypes and contents; it finds damage, it does not keep out a forger."""
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = contiguous(tensors[name])
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def contiguous(tensor: Tensor) -> Tensor:
    """The same numbers on the CPU, one after another: a copy only where they are not so yet."""
    tensor = tensor.detach().cpu()
    # `contiguous` leaves a tensor of one element the strides it has, through which bytes cannot be read
    return tensor if tensor.is_contiguous() and tensor.numel() > 1 else tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """A scratch file to write, which takes the place of `path` once it is whole: after a crash there is the old file or the new.

    A symbolic link stays one: the file that it names is replaced. What a killed process has left in the folder is removed.
    """
    path = Path(os.path.realpath(path) if os.path.islink(path) else path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder(path) as folder:
        scratch = folder / path.name
        yield scratch
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)  # whatever the rights of files in a scratch folder are
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    # The rename itself must survive a power cut; some file systems and platforms cannot sync a folder, which is no error.
    with suppress(OSError):
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, locked while it is in use."""
    remove_scratch(path.parent)
    for last in (False, False, True):  # another process may remove a folder before it is locked; the last one does without a lock
        try:
            folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=SCRATCH))
        except OSError as error:  # which names a folder that nobody asked for
            raise OSError(error.errno, error.strerror, str(path)) from error
        handle = _lock_scratch(folder)
        if last or (handle is not None and folder.exists()):
            break
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def remove_scratch(folder: Path) -> None:
    """Remove the scratch folders that killed processes have left there."""
    for scratch in folder.glob(f"{SCRATCH}????????"):
        if (handle := _lock_scratch(scratch)) is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(handle)


def _lock_scratch(folder: Path) -> int | None:
    """The handle of a folder, whose lock ends with the process; None if it is in use, or the system has no such locks."""
    if fcntl is None:
        return None
    with ExitStack() as stack, suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.pop_all()
        return handle
    return None


def write(path: str | os.PathLike, tensors: dict[str, Tensor], meta: dict) -> None:
    """Write tensors and JSON-able `meta` to one safetensors file, atomically: a crash leaves the old file or the new one."""
    # Aliases (tied or expanded tensors) and strides are not part of a value: every tensor is stored on its own.
    plain, seen = {name: contiguous(tensor) for name, tensor in tensors.items()}, set()
    for name, tensor in plain.items():
        memory = tensor.untyped_storage()
        alone = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in seen
        plain[name] = tensor if alone else tensor.clone()
        seen.add(memory.data_ptr())
    header = json.dumps({"format": FORMAT, **meta}, sort_keys=True)
    metadata = {"dubito": header, "checksum": checksum(plain, header)}
    with atomic_write(path) as scratch:
        try:
            save_file(plain, scratch, metadata)
        except SafetensorError as error:  # what the system said is only in its words
            number = re.search(r"os error (\d+)", str(error))
            code = int(number.group(1)) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error


def read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict]:
    """Read what `write` wrote; anything else is a `FileError` that says what is wrong with the file."""
    mapped, header, expected = open_mapped(path)
    tensors = tree.clone(mapped)  # what happens to the file from now on is no matter; and memory of our own is aligned
    if checksum(tensors, header) != expected:
        raise damaged(path)
    return tensors, json.loads(header)


def damaged(path: str | os.PathLike) -> FileError:
    """The error for contents that do not match their checksum."""
    return FileError(f"{path}: the contents do not match their checksum; the file was changed or damaged after writing")


def open_mapped(path: str | os.PathLike, prefix: str | None = "") -> tuple[dict[str, Tensor], str, str]:
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
    _check_format(path, metadata)
    return tensors, metadata["dubito"], metadata["checksum"]


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse files of others, of newer versions, and those whose header is damaged."""
    if "dubito" not in metadata or "checksum" not in metadata:
        raise FileError(f"{path}: a safetensors file, but not one written by dubito")
    try:
        written = json.loads(metadata["dubito"]).get("format", 0)
    except (ValueError, AttributeError):
        raise damaged(path) from None
    if not isinstance(written, int):
        raise damaged(path)
    if written > FORMAT:
        raise FileError(f"{path}: written by a newer dubito (file format {written}); upgrade dubito to read it")


class WriteError(OSError):
    """A run that could not be written, because the disk is full or for another reason, with what to do about it."""


RESUME = "What was written before is whole: make room, and go on with resume=True"


@contextmanager
def describing_write_errors(path: str | os.PathLike | None, advice: str = RESUME, *, subject: str = "the run ") -> Iterator[None]:
    """Errors of the disk, in words that name the path and say what to do."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, f"{path}: {subject}could not be written ({error.strerror or error}). {advice}") from error


_HELD: set[Path] = set()  # folders that this very process is writing to


@contextmanager
def lock_folder(folder: str | os.PathLike | None) -> Iterator[None]:
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
        remove_scratch(folder)
        for pattern in OLD_SCRATCH:
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
