"""The state of a session of active learning (labels, questions, rounds), checks of what a caller says, and the files of a session."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.tensors import store, tree
from dubito.tensors.checks import require
from dubito.tensors.tree import Params

Indices = int | Sequence[int] | Tensor


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
    """All labels so far, in the order in which they were given, and all questions. Methods give the state after a change."""

    indices: tuple[int, ...] = ()
    targets: Tensor | None = None  # [n, ...]
    pending: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    history: tuple[Round, ...] = ()

    @property
    def digest(self) -> str:
        """Hash of all labels, on which a fit depends; empty before the first."""
        if self.targets is None:
            return ""
        return store.checksum({"indices": torch.tensor(self.indices), "targets": self.targets})

    @property
    def taken(self) -> list[int]:
        """Inputs that are not asked: labelled, pending or skipped."""
        return [*self.indices, *self.pending, *self.skipped]

    def new(self, which: Iterable[int]) -> list[int]:
        """Positions in `which` of the inputs that have no label yet."""
        known = set(self.indices)
        return [i for i, index in enumerate(which) if index not in known]

    def tell(self, which: list[int], y: Tensor, overwrite: bool) -> Labels:
        """With these labels."""
        known, new = {index: i for i, index in enumerate(self.indices)}, self.new(which)
        again = [i for i, index in enumerate(which) if index in known]
        if again and not overwrite:
            raise ValueError(f"{[which[i] for i in again][:5]} already have a label: to change it, pass overwrite=True")
        targets = self.targets
        if targets is not None and again:
            targets = targets.clone()
            targets[[known[which[i]] for i in again]] = y[again]
        if new:
            targets = y[new] if targets is None else torch.cat([targets, y[new]])
        labelled = set(which)
        return replace(
            self,
            indices=(*self.indices, *(which[i] for i in new)),
            targets=targets,
            pending=_without(self.pending, labelled),
            skipped=_without(self.skipped, labelled),
        )

    def skip(self, which: list[int]) -> Labels:
        """With these inputs never asked again."""
        labelled = [index for index in which if index in self.indices]
        require(not labelled, f"{labelled[:5]} cannot be skipped: they have labels. Use forget(indices) first")
        skipped = dict.fromkeys([*self.skipped, *which])
        return replace(self, pending=_without(self.pending, skipped), skipped=tuple(skipped))

    def forget(self, which: list[int]) -> Labels:
        """Without the labels of these inputs, which are pending again."""
        unknown = [index for index in which if index not in {*self.indices, *self.skipped}]
        require(not unknown, f"{unknown[:5]} cannot be forgotten: they have no label and were not skipped")
        kept = [i for i, index in enumerate(self.indices) if index not in which]
        return replace(
            self,
            indices=tuple(self.indices[i] for i in kept),
            targets=self.targets[kept] if self.targets is not None and kept else None,
            pending=(*self.pending, *which),
            skipped=_without(self.skipped, which),
        )

    def ask(self, asked: tuple[int, ...]) -> Labels:
        """With these inputs pending, but for those that were told in the meantime."""
        return replace(self, pending=(*self.pending, *_without(asked, self.taken)))

    def noted(
        self, digest: str, asked: tuple[int, ...], scores: tuple[float, ...], seconds: float, pool: dict[str, float]
    ) -> Labels:
        """With what was asked written into the last round of the labels with that digest."""
        place = max(i for i, made in enumerate(self.history) if made.of == digest)
        last = self.history[place]
        last = replace(
            last,
            asked=(*last.asked, *asked),
            scores=(*last.scores, *scores),
            seconds={**last.seconds, "ask": last.seconds.get("ask", 0.0) + seconds},
            pool=last.pool or pool,
        )
        return replace(self, history=(*self.history[:place], last, *self.history[place + 1 :]))


def _without(indices: Iterable[int], others: Iterable[int]) -> tuple[int, ...]:
    gone = set(others)
    return tuple(index for index in indices if index not in gone)


def pool_indices(indices: Indices, size: int) -> list[int]:
    """The indices as a list; an error if they are not distinct positions in a pool of that size."""
    numbers = torch.as_tensor(indices)
    if not numbers.numel():  # whose dtype says nothing
        return []
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise TypeError(f"indices must be whole numbers, positions in the pool; got {numbers.dtype}")
    which = numbers.reshape(-1).tolist()
    repeated = [index for i, index in enumerate(which) if index in which[:i]] if len(set(which)) < len(which) else []
    require(not repeated, f"duplicate index {repeated[:1]}: name every input once")
    if wrong := [index for index in which if not 0 <= index < size]:
        raise IndexError(f"indices must be from 0 to {size - 1}, positions in the pool; got {wrong[:5]}")
    return which


def check_targets(
    model: Model, x: Inputs, which: list[int], labels: Any, before: Tensor | None, fork: AbstractContextManager
) -> Tensor:
    """The labels of x as targets of the model, like those of `before`; an error where they cannot be.

    The network runs once, inside of `fork`: what it draws is put back there."""
    y, likelihood = torch.as_tensor(labels).detach().cpu(), model.likelihood
    y = y.unsqueeze(0) if y.ndim == 0 else y
    require(len(y) == len(which), f"{len(which)} inputs need {len(which)} labels; got {len(y)}")
    if not likelihood.discrete:
        y = y.to(next(model.network.parameters()).dtype)
    gaps = getattr(likelihood, "missing", False)  # positions that have no target are NaN
    finite = not y.is_floating_point() or bool((y.isfinite() | y.isnan() if gaps else y.isfinite()).all())
    require(finite, "a label is NaN or infinite; no label was taken")
    if before is not None and before.shape[1:] != y.shape[1:]:
        raise ValueError(f"labels must have shape {list(before.shape[1:])} for each input, as before; got {list(y.shape[1:])}")
    with torch.no_grad(), fork:
        f, _ = model.forward(model.parameters(y), tree.move(x, model.device), model.buffers())
    likelihood.check(f, y.to(f.device))
    observed = likelihood.observed(likelihood.target(y.to(f.device), f))
    if observed is not None:
        empty = (~observed.flatten(1).any(1) if observed.ndim > 1 else ~observed).nonzero().flatten().tolist()
        named = [which[i] for i in empty[:5]]
        require(
            not empty, f"the labels of {named} are empty (ignore_index or NaN everywhere): use skip(indices) to leave inputs out"
        )
    return y if before is None else y.to(before.dtype)


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
            history = [asdict(entry) for entry in labels.history]
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
        written = int(store.read(file)[1].get("writes", -1)) if file.exists() else 0
        if written != self.written:
            who = "holds another session, or another process has continued this one"
            raise FileExistsError(f"{self.path} {who}: use ActiveLearning.load(folder, ...), or give another folder")

    def read_weights(self) -> tuple[Params, Params, str]:
        """What `write_weights` was given; empty if it was never called."""
        file = self.path / WEIGHTS
        if not file.exists():
            return {}, {}, ""
        tensors, meta = store.read(file)
        before, after = (
            {name.removeprefix(prefix): leaf for name, leaf in tensors.items() if name.startswith(prefix)}
            for prefix in ("before:", "after:")
        )
        return before, after, meta["of"]


def read(folder: str | os.PathLike) -> tuple[Folder, Labels, dict[str, Any]]:
    """A session as it was left."""
    path = Path(folder)
    if not (path / FILE).is_file():
        raise FileNotFoundError(f"{path} holds no session of active learning: begin one with ActiveLearning(..., folder=...)")
    tensors, meta = store.read(path / FILE)
    if meta.get("kind") != "active":
        raise store.FileError(f"{path / FILE}: written by dubito, but not by a session of active learning")
    history = tuple(
        Round(**{**entry, "asked": tuple(entry["asked"]), "scores": tuple(entry["scores"])}) for entry in meta["history"]
    )
    numbers = {name: tuple(tensors[name].tolist()) for name in ("indices", "pending", "skipped")}
    return Folder(path, meta["writes"]), Labels(**numbers, targets=tensors.get("targets"), history=history), meta


def _write(file: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    advice = "All labels before are safe, and this one was not taken: free some space and repeat the call"
    with store.describing_write_errors(file, advice, subject=""):
        store.write(file, tensors, meta)
