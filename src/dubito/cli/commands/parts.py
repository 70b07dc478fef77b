"""Tables in parts: a folder of files, each of which is predicted by itself, by several processes if there are."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from dubito.cli.commands.errors import UsageError, error_text
from dubito.cli.commands.recipe import open_atomically
from dubito.cli.process import in_processes
from dubito.evaluation.data.csv_table import is_table

T = TypeVar("T")
LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))  # which process this is, and of how many
WAIT = 60  # seconds for the first process
MADE_BY = "predictions.json"  # beside the predictions: what made them


def parts(folder: Path) -> list[Path]:
    """The tables in a folder, in order of their names; those that begin with a dot are left out."""
    found = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file() and readable(path))
    if not found:
        raise UsageError(f"{folder}: there is no .csv, .tsv, .parquet or .npz file in this folder")
    return found


def readable(path: Path) -> bool:
    """Whether the name of a file ends as one that can be predicted."""
    return is_table(path) or path.suffix.lower() == ".npz"


def outputs(found: list[Path], out: Path) -> dict[Path, Path]:
    """The file that the predictions of each part go to."""
    names = {path: path.name[: path.name.index(".")] + ".csv" for path in found}
    for path, name in names.items():
        same = [other.name for other in found if names[other] == name]
        if len(same) > 1:
            raise UsageError(f"{path.parent}: the predictions of {' and '.join(same)} would both be {name}: rename one of them")
    return {path: out / name for path, name in names.items()}


def share() -> tuple[int, int]:
    """Which process this is, and of how many, under torchrun or Slurm; else the only one."""
    for rank, size in LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def claim(out: Path, made_by: dict[str, object], first: bool) -> None:
    """Make the folder of predictions, or refuse one whose predictions something else has made. The first process makes it."""
    out.mkdir(parents=True, exist_ok=True)
    note, text = out / MADE_BY, json.dumps(made_by, indent=2) + "\n"
    end = time.monotonic() + WAIT
    while not note.exists() and not first:
        if time.monotonic() > end:
            raise UsageError(
                f"{out}: the first process has not begun after {WAIT} seconds: do all processes see the same folder?"
            )
        time.sleep(0.1)
    if not note.exists():
        if any(out.iterdir()):
            raise UsageError(f"{out}: the folder is not empty, and holds no predictions of a folder: give another --out")
        with open_atomically(note) as file:
            file.write(text)
    if note.read_text() != text:
        raise UsageError(f"{out}: its predictions were made by another model, or with other flags: give another --out")


def is_done(path: Path, output: Path) -> bool:
    """Whether a part is predicted, since it was last changed."""
    return output.exists() and output.stat().st_mtime >= path.stat().st_mtime


def checksum(path: Path) -> str:
    """Of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def each(work: Callable[[Path], T], found: Iterable[Path], jobs: int) -> Iterator[tuple[Path, T | UsageError]]:
    """What `work` makes of each part, or why it cannot, in order. It is pickled where there are several jobs."""
    found = list(found)
    if jobs == 1 or len(found) < 2:
        yield from ((path, attempt(work, path)) for path in found)
        return
    with lost_processes():
        yield from zip(found, in_processes(partial(attempt, work), found, jobs), strict=True)


@contextmanager
def lost_processes() -> Iterator[None]:
    """Say so where one of several processes is killed."""
    try:
        yield
    except BrokenProcessPool:
        raise UsageError(
            "a process ended at once: perhaps there is not enough memory for so many --jobs. What is written stays; the same command "
            "goes on"
        ) from None


def attempt(work: Callable[[Path], T], path: Path) -> T | UsageError:
    """What `work` makes of a part, or why it cannot."""
    try:
        return work(path)
    except UsageError as error:
        return error
    except OSError as error:
        return UsageError(error_text(error))
