"""A set of draws of the weights that stays on disk."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.model import Model
from dubito.network.examples import Batch, Inputs
from dubito.posteriors.diagnostics import Summary, energy_error_per_dimension, summarize
from dubito.posteriors.functions import Functions, Setting, on_cpu, spaced
from dubito.posteriors.identity import belonging, differences
from dubito.posteriors.posterior import Posterior, inputs_of
from dubito.posteriors.predict.sampled import room, sampled
from dubito.posteriors.predictive import LatentMixture
from dubito.posteriors.samples import Samples
from dubito.tensors import store, tree
from dubito.tensors.randomness import fresh_generator
from dubito.tensors.tree import Buffers, Params

TRACE, BUFFER = "trace:", "buffer:"


@dataclass(frozen=True, repr=False)
class Stored(Posterior):
    """The draws of a sampler in a folder, which may be larger than memory: they are read as they are needed, and not kept.

    It is to `Samples` what a file is to its contents: the same draws in the same order, chain after chain, and the same predictions.
    `load()` reads all of them into a `Samples`.

    >>> import dubito, tempfile
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with store.Draws(folder) as draws:
    ...         for value in range(3):  # three draws of two chains
    ...             draws.append({"weight": torch.full((2, 1, 1), float(value)), "trace:energy": torch.ones(2)})
    ...         draws.flush()
    ...     posterior = Stored.open(folder, model)
    ...     print(len(posterior), posterior.chains, posterior.predict(torch.ones(1, 1)).means.flatten())
    6 2 tensor([0., 1., 2., 0., 1., 2.])
    """

    archive: store.Archive
    buffers: Buffers
    sampler: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def open(folder: str | os.PathLike, model: Model, *, skip_damaged: bool = False) -> Stored:
        """What a run has left in its checkpoint folder, or goes on writing there, whether or not it has come to an end.

        A shard that is missing or damaged is an error; `skip_damaged=True` goes without its draws.
        """
        archive = store.Archive.open(folder, skip_damaged=skip_damaged)
        buffers, about = archive.shared()
        for what, how in differences(about, belonging(model)):
            raise store.FileError(f"{folder}: draws of another model; its {what} {'are' if what.endswith('s') else 'is'} {how}")
        departures = tuple(about.get("departures", ()))
        return Stored(model, archive, tree.move(buffers, model.device), about.get("sampler", {}), departures=departures)

    @staticmethod
    def of(model: Model, draws: store.Draws, buffers: Buffers | None = None, sampler: dict[str, Any] | None = None) -> Stored:
        """Of a run that has just been made; `buffers` and `sampler` where they are other than the folder says."""
        archive = draws.archive
        known, about = archive.shared()
        return Stored(
            model,
            archive,
            tree.move(known, model.device) if buffers is None else buffers,
            about.get("sampler", {}) if sampler is None else sampler,
            departures=tuple(about.get("departures", ())),
        )

    def __post_init__(self):
        shapes = {name: tuple(leaf.shape) for name, leaf in self.model.parameters().items() if ":" not in name}
        there = {name: leaf.shape for name, leaf in self.archive.leaves.items() if ":" not in name}
        wrong = [name for name in {**shapes, **there} if name not in shapes or name not in there]
        wrong = wrong or [name for name, shape in there.items() if shape != (*self._axes, *shapes[name])]
        if wrong:
            raise store.FileError(
                f"{self.folder}: draws of another model; {wrong[0]} is {there.get(wrong[0], 'absent')} there "
                f"and {shapes.get(wrong[0], 'absent')} here"
            )

    @property
    def folder(self) -> Path:
        """Where the draws are."""
        return self.archive.folder

    @cached_property
    def _axes(self) -> tuple[int, ...]:
        """What stands before the shape of the weights: the chains, or nothing."""
        for name, leaf in self.model.parameters().items():
            if ":" not in name and name in self.archive.leaves:
                shape = self.archive.leaves[name].shape
                return shape[: max(0, len(shape) - leaf.ndim)]
        return ()

    @cached_property
    def chains(self) -> int:
        """How many ran side by side."""
        return int(torch.Size(self._axes).numel())

    def __len__(self) -> int:
        return len(self.archive) * self.chains

    @cached_property
    def trace(self) -> Params:
        """What the sampler noted at every draw, [S] each."""
        found = self._gathered(TRACE)
        return {name.removeprefix(TRACE): leaf for name, leaf in found.items()}

    @cached_property
    def _bytes(self) -> int:
        """What one draw takes in memory."""
        leaves = (leaf for name, leaf in self.archive.leaves.items() if not name.startswith(TRACE))
        return sum(torch.Size(leaf.shape).numel() * leaf.dtype.itemsize for leaf in leaves) // self.chains

    def load(self) -> Samples:
        """All draws in memory."""
        found = self._gathered("")
        trace = {name.removeprefix(TRACE): leaf for name, leaf in found.items() if name.startswith(TRACE)}
        own = {name.removeprefix(BUFFER): leaf for name, leaf in found.items() if name.startswith(BUFFER)}
        params = {name: leaf for name, leaf in found.items() if self._is_weight(name)}
        return Samples(
            self.model, params, self._shared, own, chains=self.chains, trace=trace, sampler=self.sampler,
            departures=self.departures,
        )  # fmt: skip

    def in_memory(self) -> Samples:
        """`load()`: all draws in memory."""
        return self.load()

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        return self.load()._functions(how, draws, seed)

    def function(self, source: torch.Generator) -> Functions:
        """One of the draws, which is read alone: they are on disk since all of them are too many."""
        which = torch.randint(len(self), (1,), generator=on_cpu(source))
        own = {name.removeprefix(BUFFER): leaf for name, leaf in tree.select(self.select(which), 0).items()}
        return Functions(self.model, {**self.buffers, **own}, {})

    def settings(self, draws: int = 10) -> list[Setting]:
        """Some of the draws, which are read alone."""
        leaves = self.select(spaced(len(self), draws))
        chosen = [tree.select(leaves, i) for i in range(tree.count(leaves))]
        return [self._setting(one, 1 / len(chosen)) for one in chosen]

    def _setting(self, leaves: Params, share: float) -> Setting:
        own = {name.removeprefix(BUFFER): leaf for name, leaf in leaves.items() if name.startswith(BUFFER)}
        params = {name: leaf for name, leaf in leaves.items() if not name.startswith(BUFFER)}
        return Setting(params, {**self.buffers, **own}, share)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n of the draws, at random with replacement."""
        device = self.model.device
        which = torch.multinomial(torch.ones(len(self), device=device), n, True, generator=generator or fresh_generator(device))
        return {name: leaf for name, leaf in self.select(which.cpu()).items() if self._is_weight(name)}

    def select(self, which: Tensor) -> Params:
        """Some draws by their numbers, [K]: leaves [K, ...] of the weights and of the buffers that differ between draws."""
        leaves = {name: leaf for name, leaf in self.archive.leaves.items() if not name.startswith(TRACE)}
        rows, chain = which % len(self.archive), which // len(self.archive)
        lead = len(self._axes)
        out = {name: torch.empty((len(which), *leaf.shape[lead:]), dtype=leaf.kept) for name, leaf in leaves.items()}
        first = 0
        for shard in self.archive.shards:
            here = ((rows >= first) & (rows < first + shard.draws)).nonzero().squeeze(1)
            if len(here):
                part = self.archive.read(shard)
                for name, leaf in leaves.items():
                    flat = part[name].reshape(shard.draws * self.chains, *leaf.shape[lead:])
                    out[name][here] = flat[(rows[here] - first) * self.chains + chain[here]]
            first += shard.draws
        # moved first, in the dtype they are kept in: half the way for bfloat16
        return {name: leaf.to(self.model.device).to(leaves[name].dtype) for name, leaf in out.items()}

    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float | None = None, seed: int = 0
    ) -> LatentMixture:
        """All draws by default; `draws` takes that many, evenly spaced. Their outputs are kept, [S, B, ...], and no weights."""
        return self._predict([x], how, draws, room(memory, self.model.device))[0]

    def _predict_all(
        self, loader: Iterable[Batch], how: str | None, *, draws: int | None, memory: float | None, seed: int
    ) -> Sequence[tuple[LatentMixture, Any]]:
        """The inputs are kept in memory, so that the draws are read once, and not for every batch."""
        batches = [tree.move(inputs_of(self.model, batch), "cpu") for batch in loader]
        predictives = (
            self._predict([x for x, _ in batches], how, draws, room(memory, self.model.device), torch.device("cpu"))
            if batches
            else []
        )
        return [(p, y) for p, (_, y) in zip(predictives, batches, strict=True)]

    def _predict(
        self, inputs: list[Inputs], how: str | None, draws: int | None, memory: float, device: torch.device | None = None
    ) -> list[LatentMixture]:
        """The predictive of every input, group after group of draws."""
        self._only(how, "sampled", draws=draws)
        count = len(self) if draws is None else min(draws, len(self))
        which = torch.linspace(0, len(self) - 1, count).round().long() if count < len(self) else torch.arange(count)
        done: list[LatentMixture | None] = [None] * len(inputs)
        for group, budget in self._groups(which, memory):
            stacked = {name.removeprefix(BUFFER): leaf for name, leaf in self.select(which[group]).items()}
            for i, x in enumerate(inputs):
                part = sampled(self.model, x, shared=self._shared, stacked=stacked, memory=budget)
                done[i] = _placed(done[i], part if device is None else part.to(device), group, count)
        return [p for p in done if p is not None]

    def _groups(self, which: Tensor, memory: float) -> Iterator[tuple[Tensor, float]]:
        """Which of the wanted draws to have in memory at a time, and the gigabytes that running them may take."""
        size = int(memory * store.GIGABYTE / self._bytes)
        if size >= len(which):  # all at once, and exactly as `Samples` does it
            yield torch.arange(len(which)), memory
            return
        # in the order in which they lie on disk; half of the memory is for the weights
        yield from ((group, memory / 2) for group in (which % len(self.archive)).argsort(stable=True).split(max(1, size // 2)))

    def summary(self, x: Inputs = None, *, memory: float | None = None) -> Summary:
        """Whether the chains can be trusted: as `Samples.summary`, but of some weights only where all exceed `memory` gigabytes."""
        memory = room(memory, self.model.device)
        predictions = None if x is None else self.predict(x, memory=memory).probs
        sizes = [torch.Size(leaf.shape).numel() for name, leaf in self.archive.leaves.items() if self._is_weight(name)]
        size = sum(sizes) // self.chains
        every = max(1, math.ceil(len(self) * size * 8 / (memory * store.GIGABYTE)))  # bytes in float64, as they are compared
        weights = {name: leaf for name, leaf in self._gathered("", every).items() if self._is_weight(name)}
        found = summarize(weights, chains=self.chains, trace=self.trace, sampler=self.sampler, predictions=predictions)
        if every > 1 and "energy_error" in self.trace:
            errors = self.trace["energy_error"].double().view(self.chains, -1)
            found = replace(found, energy_error=tuple(energy_error_per_dimension(errors, size).tolist()))
        return found

    def to_arviz(self, x: Inputs = None) -> Any:
        """As `Samples.to_arviz`, which reads all draws into memory: ArviZ wants them there."""
        return self.load().to_arviz(x)

    @staticmethod
    def _is_weight(name: str) -> bool:
        return not name.startswith((TRACE, BUFFER))

    @cached_property
    def _shared(self) -> Buffers:
        return {name: leaf for name, leaf in self.buffers.items() if BUFFER + name not in self.archive.leaves}

    def _gathered(self, prefix: str, every: int = 1) -> Params:
        """What is stored under names with a prefix, chain after chain, leaves [S, ...]; or only every k-th number of them, [S, k]."""
        n, lead, device = len(self.archive), len(self._axes), self.model.device
        shapes = {name: leaf.shape[lead:] for name, leaf in self.archive.leaves.items() if name.startswith(prefix)}
        if every > 1:
            shapes = {name: (math.ceil(torch.Size(shape).numel() / every),) for name, shape in shapes.items()}
        out = {
            name: torch.empty((self.chains, n, *shape), dtype=self.archive.leaves[name].dtype, device=device)
            for name, shape in shapes.items()
        }
        for rows, part in self.archive.parts(prefix) if shapes else ():
            for name, leaf in part.items():
                chosen = leaf.reshape(len(leaf), self.chains, -1)[..., ::every]
                out[name][:, rows] = chosen.reshape(len(leaf), self.chains, *shapes[name]).transpose(0, 1).to(device)
        return {name: leaf.flatten(0, 1) for name, leaf in out.items()}


def _placed(whole: LatentMixture | None, part: LatentMixture, rows: Tensor, count: int) -> LatentMixture:
    """A predictive of `count` draws, some rows of which are known now: shard after shard is not chain after chain."""
    if len(rows) == count:
        return part
    rows, learned = rows.to(part.means.device), part.params or {}
    if whole is None:
        params = {name: leaf.new_empty(count, *leaf.shape[1:]) if leaf.ndim == 2 else leaf for name, leaf in learned.items()}
        whole = replace(part, means=part.means.new_empty(count, *part.means.shape[1:]), params=params)
    whole.means[rows] = part.means
    for name, leaf in learned.items():
        if leaf.ndim == 2:
            assert whole.params is not None
            whole.params[name][rows] = leaf
    return whole
