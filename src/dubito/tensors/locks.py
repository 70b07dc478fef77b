"""One run at a time in a folder, and errors of the disk that say what to do."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows: two processes on one folder go unnoticed there)
    fcntl = None

SCRATCH = (".*.safetensors.*", ".draws.json.*", ".tmp??????")  # what a killed run may leave; the last are safetensors' own


class WriteError(OSError):
    """A run that could not be written, because the disk is full or for another reason, with what to do about it."""


@contextmanager
def describing_write_errors(folder: str | os.PathLike | None) -> Iterator[None]:
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
        for pattern in SCRATCH:
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
