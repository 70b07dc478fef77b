"""What every posterior can do, whatever its form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dubito.model import Model
from dubito.network.examples import LABELS, split_batch
from dubito.posteriors.predictive import Predictive, concatenate
from dubito.tensors import tree
from dubito.tensors.randomness import forked, global_state, lent, set_global_state
from dubito.tensors.tree import Params


@dataclass(frozen=True, repr=False)
class Posterior(ABC):
    """A distribution over the weights of `model` (or over the functions it computes) given data."""

    model: Model

    def __repr__(self) -> str:
        """In a line: all weights of a network would fill the screen."""
        members = getattr(self, "members", None)
        many = f"{len(self):,} draws, " if isinstance(self, Sized) else ""
        held = f"{len(members)} members, " if isinstance(members, tuple) else many
        weights = sum(parameter.numel() for parameter in self.model.network.parameters())
        return (
            f"{type(self).__name__}({held}{weights:,} weights of {type(self.model.network).__name__}, {self.model.likelihood!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy holds: not what is made again at need, some of which (programs of torch.fx) no pickle gives back."""
        return {
            name: value for name, value in vars(self).items() if not isinstance(getattr(type(self), name, None), cached_property)
        }

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of the weights, leaves [n, *shape]."""

    @abstractmethod
    def predict(
        self, x: Any, how: str | None = None, *, draws: int | None = None, memory: float = 1.0, seed: int = 0
    ) -> Predictive:
        """The predictive at x (what the network takes: a tensor, a tuple or a dict).

        `draws` is how many functions are averaged (None: the form's own choice), `memory` how many gigabytes they may take at a time;
        the same `seed` gives the same functions for every x.
        """

    def predict_batches(
        self,
        loader: Iterable[Any],
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float = 1.0,
        seed: int = 0,
    ) -> Iterator[tuple[Predictive, Any]]:
        """Stream over a loader: the predictive and the targets (None if it has none) of every batch. `how`: as `predict` does."""
        for batch in _given(loader):
            x, y = inputs_of(self.model, batch)
            yield self.predict(x, how, draws=draws, memory=memory, seed=seed), tree.move(y, self.model.device)

    def predict_loader(
        self,
        loader: Iterable[Any],
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float = 1.0,
        seed: int = 0,
    ) -> tuple[Predictive, Any]:
        """One predictive and the targets of all that a loader gives; every batch is seen by the same functions.

        It holds S x N x C numbers in the computer's memory; where that is too much, use `predict_batches`.
        """
        if isinstance(loader, tuple | Dataset):
            raise TypeError("predict_loader takes a DataLoader or a list of batches; for inputs in memory use predict(x)")
        predictives, targets = [], []
        with lent(loader), forked():  # a DataLoader draws from the global generator, even unshuffled
            for p, y in self.predict_batches(loader, how, draws=draws, memory=memory, seed=seed):
                predictives.append(p.to("cpu"))
                targets.append(tree.move(y, "cpu"))
        if not predictives:
            raise ValueError("there is no data: the loader gave no batch")
        shapes = {p.means.shape[2:] for p in predictives}
        if len(shapes) > 1:
            raise ValueError(f"the batches give outputs of different shapes, {sorted(map(list, shapes))}: use predict_batches")
        return concatenate(predictives), _joined(targets)

    def _only(self, how: str | None, *known: str) -> None:
        if how is not None and how not in known:
            raise ValueError(f"a {type(self).__name__} posterior predicts how={' or '.join(map(repr, known))}; got {how!r}")


def _given(loader: Iterable[Any]) -> Iterator[Any]:
    """What a loader gives, drawing as it would alone; between two batches the generators are the caller's, as they were.

    A DataLoader draws from the global generator even unshuffled, and data sets that augment draw for every batch.
    """
    iterator: Iterator[Any] | None = None
    states: list[Tensor] = []
    inside: dict = {}
    while True:
        with lent(loader) as generators, forked():
            if iterator is None:
                iterator = iter(loader)
            else:
                set_global_state(inside)
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            inside, states = global_state(), [generator.get_state() for generator in generators]
        yield batch


def _joined(targets: list[Any]) -> Any:
    if any(y is None for y in targets):
        return None
    if isinstance(targets[0], dict):
        return {key: torch.cat([y[key] for y in targets]) for key in targets[0]}
    return torch.cat(targets)


def inputs_of(model: Model, batch: Any) -> tuple[Any, Any]:
    """(x, y) of a batch, y None where a batch holds inputs only."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch, None
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return batch[0], None
    if model.split is split_batch and hasattr(batch, "keys") and not any(name in batch for name in LABELS):
        return {key: batch[key] for key in batch}, None
    return model.split(batch)
