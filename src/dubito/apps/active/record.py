"""What is known of a round of labelling, and the files that a session leaves."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.tensors import store
from dubito.tensors.tree import Params

FILE, WEIGHTS = "active.safetensors", "weights.safetensors"


@dataclass(frozen=True)
class Round:
    """One fit and what was asked after it.

    `held_out` are figures on held-out data ("accuracy" or "rmse", "nll", and the mean "total", "aleatoric" and "epistemic"
    uncertainty), `pool` the mean "total" and "epistemic" uncertainty of the candidates. Both are empty where nobody looked.
    """

    labels: int
    held_out: dict[str, float] = field(default_factory=dict)
    pool: dict[str, float] = field(default_factory=dict)
    asked: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()  # of what was asked, by the acquisition
    seconds: dict[str, float] = field(default_factory=dict)  # to "fit" and to "ask"
    of: str = field(default="", repr=False)  # a digest of the labels that it is a round of


@dataclass(frozen=True)
class Labels:
    """All that people have said so far, in the order in which they said it; and what they have been asked."""

    indices: tuple[int, ...] = ()
    targets: Tensor | None = None  # [n, ...]
    pending: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    history: tuple[Round, ...] = ()

    @property
    def digest(self) -> str:
        """Of what a fit depends on."""
        if self.targets is None:
            return ""
        return store.checksum({"indices": torch.tensor(self.indices), "targets": self.targets})


@dataclass
class Folder:
    """Where a session is kept. `written` counts its writes, by which another session in the same folder is noticed."""

    path: Path
    written: int = 0

    def write(self, labels: Labels, about: dict[str, Any]) -> None:
        """Whole or not at all; refused if somebody else has written here since."""
        with store.locked(self.path):
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
        with store.locked(self.path):
            self._check()
            _write(self.path / WEIGHTS, tensors, {"kind": "active weights", "of": digest})

    def _check(self) -> None:
        file = self.path / FILE
        there = int(store.read(file)[1].get("writes", -1)) if file.exists() else 0
        if there != self.written:
            raise FileExistsError(
                f"{self.path} holds another session, or another process has gone on with this one: go on with "
                "ActiveLearning.load(folder, ...), or give another folder"
            )

    def read_weights(self) -> tuple[Params, Params, str]:
        file = self.path / WEIGHTS
        if not file.exists():
            return {}, {}, ""
        tensors, meta = store.read(file)
        parts = ({k.partition(":")[2]: v for k, v in tensors.items() if k.startswith(kind)} for kind in ("before:", "after:"))
        before, after = parts
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
            f"{file}: could not be written ({error.strerror or error}). All that was told before is there, and this was not taken: "
            "make room, and do it again",
        ) from error
