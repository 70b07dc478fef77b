"""The files of a session of active learning."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.apps.active.labels import Labels, Round
from dubito.tensors import store
from dubito.tensors.tree import Params

FILE, WEIGHTS = "active.safetensors", "weights.safetensors"


@dataclass
class Folder:
    """Where a session is kept. `written` counts its writes, by which another session in the same folder is noticed."""

    path: Path
    written: int = 0

    def write(self, labels: Labels, about: dict[str, Any]) -> None:
        """Write the state, whole or not at all; an error if somebody else has written here since."""
        with store.lock_folder(self.path):
            self._check()
            plain = {
                "indices": torch.tensor(labels.indices, dtype=torch.long),
                "pending": torch.tensor(labels.pending, dtype=torch.long),
                "skipped": torch.tensor(labels.skipped, dtype=torch.long),
            }
            tensors = plain if labels.targets is None else {**plain, "targets": labels.targets}
            history = [asdict(one) for one in labels.history]
            _write(self.path / FILE, tensors, {"kind": "active", "writes": self.written + 1, "history": history, **about})
            self.written += 1

    def write_weights(self, before: Params, after: Params, digest: str) -> None:
        """What the last fit began with and came to, for sessions that go on from there."""
        tensors = {**{f"before:{k}": v for k, v in before.items()}, **{f"after:{k}": v for k, v in after.items()}}
        with store.lock_folder(self.path):
            self._check()
            _write(self.path / WEIGHTS, tensors, {"kind": "active weights", "of": digest})

    def _check(self) -> None:
        file = self.path / FILE
        there = int(store.read(file)[1].get("writes", -1)) if file.exists() else 0
        if there != self.written:
            raise FileExistsError(
                f"{self.path} holds another session, or another process has continued this one: continue it with "
                "ActiveLearning.load(folder, ...), or give another folder"
            )

    def read_weights(self) -> tuple[Params, Params, str]:
        """What `write_weights` was given; empty if it was never called."""
        file = self.path / WEIGHTS
        if not file.exists():
            return {}, {}, ""
        tensors, meta = store.read(file)
        before, after = (
            {name.removeprefix(kind): leaf for name, leaf in tensors.items() if name.startswith(kind)}
            for kind in ("before:", "after:")
        )
        return before, after, meta["of"]


def read(folder: str | os.PathLike) -> tuple[Folder, Labels, dict[str, Any]]:
    """A session as it was left."""
    path = Path(folder)
    if not (path / FILE).is_file():
        raise FileNotFoundError(
            f"{path} holds no session of active learning: begin one with ActiveLearning(..., folder={str(path)!r})"
        )
    tensors, meta = store.read(path / FILE)
    if meta.get("kind") != "active":
        raise store.FileError(f"{path / FILE}: written by dubito, but not by a session of active learning")
    history = tuple(Round(**{**one, "asked": tuple(one["asked"]), "scores": tuple(one["scores"])}) for one in meta["history"])
    numbers = {name: tuple(tensors[name].tolist()) for name in ("indices", "pending", "skipped")}
    return Folder(path, meta["writes"]), Labels(**numbers, targets=tensors.get("targets"), history=history), meta


def _write(file: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    try:
        store.write(file, tensors, meta)
    except OSError as error:
        raise store.WriteError(
            error.errno,
            f"{file}: could not be written ({error.strerror or error}). All labels before are safe, and this one was not taken: free "
            "some space and repeat the call",
        ) from error
