"""The grid: every method with every seed, each cell made once, kept as it is made, and taken up where a run was left."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dubito.cli.compare import stacked
from dubito.cli.compare.judging import SEVERITIES, check, judged
from dubito.cli.compare.result import Cell, Key, versions
from dubito.cli.compare.spec import Entry
from dubito.cli.threads import one_thread
from dubito.evaluation.problems import Part, Problem
from dubito.inference.fit import fit
from dubito.inference.method import Event, Method
from dubito.inference.methods import MAP
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.tensors import randomness, store

SMALL = 100_000  # weights up to which one thread is faster than several
UNIT = 1000  # steps of the bar in a cell
RAN_AWAY = "FloatingPointError: the weights are no longer finite: lower learning_rate, or set clip"


@dataclass(frozen=True)
class Outcome:
    """All cells that there are, method by method, and whether the grid was interrupted before it was full."""

    cells: tuple[Cell, ...]
    interrupted: bool = False


@dataclass(frozen=True)
class Grid:
    """Methods on a problem, with several seeds, kept in a folder.

    A cell that is in the folder with the same settings, data and seed is taken from there. A method that fails with a seed is noted
    with the reason, and the others go on; it is tried again the next time. After an interrupt (Ctrl-C) all that was done counts.
    """

    problem: Problem
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    folder: Path
    corruptions: tuple[str, ...] = field(default=(), kw_only=True)
    severities: tuple[int, ...] = field(default=SEVERITIES, kw_only=True)
    detectors: tuple[str, ...] = field(default=(), kw_only=True)  # of `dubito.apps.ood`, beside the kinds of uncertainty
    confidence: tuple[str, ...] = field(default=(), kw_only=True)  # of `dubito.apps.failure`, and "confidnet"
    device: torch.device | str | None = field(default=None, kw_only=True)
    code: str = field(default="", kw_only=True)  # a hash of the user's own network's source: when that changes, so do the cells

    def __post_init__(self):
        labels = [entry.label for entry in self.entries]
        if not labels or not self.seeds:
            raise ValueError("there is nothing to compare: name a method, and have at least one seed")
        twice = {label for label in labels if labels.count(label) > 1}
        if twice:
            raise ValueError(f"{sorted(twice)[0]} is named twice: give the two other options, or leave one out")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"a seed counts once, and some are there twice: {self.seeds}")
        check(self.detectors, self.confidence, classes=self.problem.kind == "classification")
        splits = self.problem.splits
        if splits is not None and max(self.seeds) >= splits:
            raise ValueError(
                f"{self.problem.name} has {splits} splits, and a seed is the number of one: give at most {splits} seeds"
            )

    def run(self, *, say: Callable[[str], object] = str, progress: bool | None = None) -> Outcome:
        """Make what is missing."""
        part = lru_cache(maxsize=1)(self.problem.part)  # one seed's data at a time: those of all seeds may not fit into memory
        found_keys: dict[tuple[int, int], Key] = {}
        last: tuple[Part, str] | None = None
        for s in self.seeds:
            if last is None or last[0] is not part(s):  # image sets have one part for all seeds
                last = part(s), part(s).checksum
            found_keys |= {(e, s): self._key(entry, s, *last) for e, entry in enumerate(self.entries)}
        del last
        keys = {(e, s): found_keys[e, s] for e in range(len(self.entries)) for s in self.seeds}
        found = {place: cell for place, key in keys.items() if (cell := Cell.read(self.folder, key)) is not None}
        if found:
            say(f"{len(found)} of {len(keys)} cells are there already")
        missing = [place for place in keys if place not in found]
        interrupted = False
        if missing:
            self._warm_up(part(self.seeds[0]))
        with store.locked(self.folder), Progress("compare", UNIT * len(missing), show=progress) as bar:
            try:
                for place, cell in self._cells(missing, keys, part, bar):
                    cell.write(self.folder)
                    found[place] = cell
                    bar.update(UNIT * sum(place in found for place in missing), {})
                    words = f"{cell.seconds:.1f} s" if cell.error is None else f"failed: {cell.error}"
                    say(f"{cell.key.label}, seed {cell.key.seed}: {words}")
            except KeyboardInterrupt:
                interrupted = True
        return Outcome(tuple(found[place] for place in keys if place in found), interrupted)

    def _warm_up(self, part: Part) -> None:
        """torch loads itself in part at the first step, which is no method's time. What fails here fails again where it is noted."""
        with suppress(Exception), randomness.forked(0):
            model = self.entries[0].model(self.problem, tuple(part.x_train.shape[1:]))
            fit(model, MAP(epochs=1), (part.x_train[:8], part.y_train[:8]), device=self.device, progress=False)

    def _key(self, entry: Entry, seed: int, part: Part, checksum: str) -> Key:
        with randomness.forked(0):
            network = entry.model(self.problem, tuple(part.x_train.shape[1:])).network
        shapes = {name: list(p.shape) for name, p in network.named_parameters()}
        training = self.problem.training
        settings = {
            "problem": self.problem.name,
            "data": checksum,
            "rows": [len(part.x_train), len(part.x_test)],
            **entry.settings,
            "network": {"layers": " ".join(str(network).split()), "weights": shapes, "code": self.code},
            "batch_size": training.batch_size,
            "prior_scale": training.prior_scale,
            "unfamiliar": list(part.unfamiliar),
            "corruptions": list(self.corruptions),
            "severities": list(self.severities) if self.corruptions else [],
        }
        if self.problem.people is not None:
            settings["people"] = True
        if self.detectors:
            settings["detectors"] = list(self.detectors)
        if self.confidence:
            settings["confidence"] = list(self.confidence)
        return Key(entry.label, seed, settings)

    def _cells(
        self, missing: Sequence[tuple[int, int]], keys: dict[tuple[int, int], Key], part: Callable[[int], Part], bar: Progress
    ) -> Iterator[tuple[tuple[int, int], Cell]]:
        """The missing cells as they are made: first those that are made together, then seed by seed, so that a run that is cut short
        has all methods on some seeds."""
        together = [e for e, entry in enumerate(self.entries) if stacked.suits(entry, self.problem)]
        done = 0
        for e in together:
            seeds = [s for other, s in missing if other == e]
            if seeds:
                for seed, cell in self._together(self.entries[e], seeds, {s: keys[e, s] for s in seeds}, part, bar, done):
                    yield (e, seed), cell
                done += len(seeds)
        for seed in self.seeds:
            trained: dict[str, tuple[Posterior, float]] = {}  # networks that several methods go on from
            for e, entry in enumerate(self.entries):
                if e not in together and (e, seed) in missing:
                    yield (e, seed), self._one(entry, keys[e, seed], part(seed), trained, bar, done)
                    done += 1

    def _together(
        self, entry: Entry, seeds: Sequence[int], keys: dict[int, Key], part: Callable[[int], Part], bar: Progress, done: int
    ) -> Iterable[tuple[int, Cell]]:
        def tell(share: float) -> None:
            bar.update(round(UNIT * (done + share * len(seeds))), {"": f"{entry.label}, {len(seeds)} splits at once"})

        def attempt() -> dict[int, stacked.Chosen]:
            with one_thread():
                return stacked.fits(entry, self.problem, {seed: part(seed) for seed in seeds}, device=self.device, tell=tell)

        made, error = _attempt(attempt)
        for seed in seeds:
            if made is None or seed not in made:  # the others may have come through
                yield seed, Cell(keys[seed], error=error or RAN_AWAY, versions=versions())
            else:
                yield seed, self._judged(keys[seed], part(seed), *made[seed])

    def _one(
        self, entry: Entry, key: Key, part: Part, trained: dict[str, tuple[Posterior, float]], bar: Progress, done: int
    ) -> Cell:
        def event(told: Event) -> None:
            bar.update(round(UNIT * (done + told.step / max(1, told.steps))), {"": f"{entry.label}, seed {key.seed}"})

        def attempt() -> tuple[Posterior, float]:
            with randomness.forked(randomness.derive(key.seed, "network")):
                model = entry.model(self.problem, tuple(part.x_train.shape[1:]))
            small = sum(p.numel() for p in model.network.parameters()) <= SMALL
            with one_thread() if small else nullcontext():
                start, before = None, 0.0
                if entry.start is not None:
                    known = repr((entry.start, model.prior, model.likelihood))
                    if known not in trained:
                        trained[known] = self._fit(model, entry.start, part, key.seed, None, event)
                    start, before = trained[known]
                    model = replace(start.model, prior=model.prior)
                posterior, seconds = self._fit(model, entry.method, part, key.seed, start, event)
            return posterior, before + seconds

        made, error = _attempt(attempt)
        if made is None:
            return Cell(key, error=error, versions=versions())
        return self._judged(key, part, made[0], {}, made[1])

    def _fit(
        self, model: Model, method: Method, part: Part, seed: int, start: Posterior | None, event: Callable[[Event], object]
    ) -> tuple[Posterior, float]:
        begin = time.monotonic()
        posterior = fit(
            model,
            method,
            (part.x_train, part.y_train),
            start=start,
            device=self.device,
            seed=seed,
            batch_size=self.problem.training.batch_size,
            progress=False,
            callbacks=[event],
        )
        return posterior, time.monotonic() - begin

    def _judged(self, key: Key, part: Part, posterior: Posterior, choice: Any, seconds: float) -> Cell:
        asked: dict[str, Any] = {"seed": key.seed, "corruptions": self.corruptions, "severities": self.severities}
        asked |= {"detectors": self.detectors, "confidence": self.confidence}
        found, error = _attempt(lambda: judged(posterior, self.problem, part, **asked))
        if found is None:
            return Cell(key, seconds=seconds, error=error, versions=versions())
        more = {"choice": choice, "shift": found.shift, "arrays": found.arrays, "versions": versions()}
        return Cell(key, found.scores, seconds, **more)


def _attempt(act: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, the reason why there is none). A warning that a method gives is not a failure."""
    try:
        return act(), None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(str(error).split()) or "no reason given"
        return None, f"{type(error).__name__}: {words} ({Path(place.filename).name}, line {place.lineno})"
