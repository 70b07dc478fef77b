"""The grid: every method with every seed. Each result is made once and saved at once, so that an interrupted run can continue."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from dubito.cli.compare.result import Key, Result, versions
from dubito.cli.compare.scoring import SEVERITIES, check_names, evaluate
from dubito.cli.compare.spec import Spec
from dubito.cli.compare.stacked import Chosen, fit_splits, is_stackable
from dubito.cli.threads import one_thread
from dubito.evaluation.problems import Part, Problem
from dubito.inference.fit import Event, Method, fit
from dubito.inference.methods import MAP
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.tensors import randomness, store
from dubito.tensors.checks import require

SMALL = 100_000  # weights up to which one thread is faster than several
UNIT = 1000  # steps of the progress bar per result
DIVERGED = "FloatingPointError: the weights are no longer finite: lower learning_rate, or set clip"

T = TypeVar("T")
Place = tuple[int, int]  # (index of a spec, seed)
Trained = dict[str, tuple[Posterior, float]]  # networks that several methods start from, and the seconds of their training


@dataclass(frozen=True)
class Outcome:
    """All results so far, method by method, and whether the run was interrupted."""

    results: tuple[Result, ...]
    interrupted: bool = False


@dataclass(frozen=True)
class Grid:
    """Methods on a problem, with several seeds, saved in a folder.

    A result that is in the folder with the same settings, data and seed is read from there. If a method fails with a seed, the reason
    is saved, the other fits go on, and the next run tries it again. After an interrupt (Ctrl-C) everything done so far counts.
    """

    problem: Problem
    specs: tuple[Spec, ...]
    seeds: tuple[int, ...]
    folder: Path
    corruptions: tuple[str, ...] = field(default=(), kw_only=True)
    severities: tuple[int, ...] = field(default=SEVERITIES, kw_only=True)
    detectors: tuple[str, ...] = field(default=(), kw_only=True)  # of `dubito.apps.ood`, in addition to the uncertainties
    confidence: tuple[str, ...] = field(default=(), kw_only=True)  # of `dubito.apps.failure`, and "confidnet"
    device: torch.device | str | None = field(default=None, kw_only=True)
    code: str = field(default="", kw_only=True)  # a hash of the source of the user's network: new source, new results

    def __post_init__(self):
        labels = [spec.label for spec in self.specs]
        require(bool(labels and self.seeds), "nothing to compare: give at least one method and one seed")
        twice = sorted({label for label in labels if labels.count(label) > 1})
        require(not twice, f"duplicate method {', '.join(twice)}: give other options, or leave one out")
        require(len(set(self.seeds)) == len(self.seeds), f"duplicate seed in {self.seeds}")
        check_names(self.detectors, self.confidence, classes=self.problem.kind == "classification")
        splits = self.problem.splits
        require(
            splits is None or max(self.seeds, default=0) < splits,
            f"{self.problem.name} has {splits} published splits, and a seed is the number of one: give at most {splits} seeds",
        )

    def run(self, *, say: Callable[[str], object] = str, progress: bool | None = None) -> Outcome:
        """Make the results that are missing."""
        part = lru_cache(maxsize=1)(self.problem.part)  # one seed's data at a time: those of all seeds may not fit into memory
        keys = self._keys(part)
        results = {place: result for place, key in keys.items() if (result := Result.read(self.folder, key)) is not None}
        if results:
            say(f"{len(results)} of {len(keys)} results are already there")
        missing = [place for place in keys if place not in results]
        interrupted = False
        if missing:
            self._warm_up(part(self.seeds[0]))
        with store.lock_folder(self.folder), Progress("compare", UNIT * len(missing), show=progress) as bar:
            try:
                for place, result in self._make(missing, keys, part, bar):
                    result.write(self.folder)
                    results[place] = result
                    bar.update(UNIT * sum(place in results for place in missing), {})
                    text = f"{result.seconds:.1f} s" if result.error is None else f"failed: {result.error}"
                    say(f"{result.key.label}, seed {result.key.seed}: {text}")
            except KeyboardInterrupt:
                interrupted = True
        return Outcome(tuple(results[place] for place in keys if place in results), interrupted)

    def _warm_up(self, part: Part) -> None:
        """torch loads parts of itself at the first step; no method should pay for that. Errors appear again where they are saved."""
        with suppress(Exception), randomness.fork_rng(0):
            model = self.specs[0].model(self.problem, tuple(part.x_train.shape[1:]))
            fit(model, MAP(epochs=1), (part.x_train[:8], part.y_train[:8]), device=self.device, progress=False)

    def _keys(self, part: Callable[[int], Part]) -> dict[Place, Key]:
        """The key of every place, method by method."""
        checksums: dict[int, str] = {}
        keys, last = {}, None
        for seed in self.seeds:
            same = last is not None and part(seed) is last  # image sets have one part for all seeds
            checksums[seed] = next(reversed(checksums.values())) if same else part(seed).checksum
            last = part(seed)
            keys |= {(i, seed): self._key(spec, seed, last, checksums[seed]) for i, spec in enumerate(self.specs)}
        return {(i, seed): keys[i, seed] for i in range(len(self.specs)) for seed in self.seeds}

    def _key(self, spec: Spec, seed: int, part: Part, checksum: str) -> Key:
        with randomness.fork_rng(0):
            network = spec.model(self.problem, tuple(part.x_train.shape[1:])).network
        shapes = {name: list(p.shape) for name, p in network.named_parameters()}
        training = self.problem.training
        settings = {
            "problem": self.problem.name,
            "data": checksum,
            "rows": [len(part.x_train), len(part.x_test)],
            **spec.settings,
            "network": {"layers": " ".join(str(network).split()), "weights": shapes, "code": self.code},
            "batch_size": training.batch_size,
            "prior_scale": training.prior_scale,
            "unfamiliar": list(part.unfamiliar),
            "corruptions": list(self.corruptions),
            "severities": list(self.severities) if self.corruptions else [],
        }
        optional = {
            "people": self.problem.people is not None,
            "detectors": list(self.detectors),
            "confidence": list(self.confidence),
        }
        return Key(spec.label, seed, settings | {name: value for name, value in optional.items() if value})

    def _make(
        self, missing: Sequence[Place], keys: Mapping[Place, Key], part: Callable[[int], Part], bar: Progress
    ) -> Iterator[tuple[Place, Result]]:
        """The missing results: first those that are fitted together, then seed by seed, so that a run that is cut short has all
        methods on some seeds."""
        stacked = [i for i, spec in enumerate(self.specs) if is_stackable(spec, self.problem)]
        done = 0
        for i in stacked:
            seeds = [seed for other, seed in missing if other == i]
            if seeds:
                for seed, result in self._make_stacked(self.specs[i], {s: keys[i, s] for s in seeds}, part, bar, done):
                    yield (i, seed), result
                done += len(seeds)
        for seed in self.seeds:
            trained: Trained = {}
            for i, spec in enumerate(self.specs):
                if i not in stacked and (i, seed) in missing:
                    yield (i, seed), self._make_one(spec, keys[i, seed], part(seed), trained, bar, done)
                    done += 1

    def _make_stacked(
        self, spec: Spec, keys: Mapping[int, Key], part: Callable[[int], Part], bar: Progress, done: int
    ) -> Iterator[tuple[int, Result]]:
        def tell(share: float) -> None:
            """Show the share of these fits that is done."""
            bar.update(round(UNIT * (done + share * len(keys))), {"": f"{spec.label}, {len(keys)} splits at once"})

        def attempt() -> dict[int, Chosen]:
            """Fit all splits."""
            with one_thread():
                return fit_splits(spec, self.problem, {seed: part(seed) for seed in keys}, device=self.device, tell=tell)

        fitted, error = _attempt(attempt)
        for seed, key in keys.items():
            if fitted is None or seed not in fitted:  # the other splits may have succeeded
                yield seed, Result(key, error=error or DIVERGED, versions=versions())
            else:
                yield seed, self._score(key, part(seed), fitted[seed])

    def _make_one(self, spec: Spec, key: Key, part: Part, trained: Trained, bar: Progress, done: int) -> Result:
        def event(event: Event) -> None:
            """Show the share of this fit that is done."""
            bar.update(round(UNIT * (done + event.step / max(1, event.steps))), {"": f"{spec.label}, seed {key.seed}"})

        fitted, error = _attempt(lambda: self._fit_spec(spec, key.seed, part, trained, event))
        return Result(key, error=error, versions=versions()) if fitted is None else self._score(key, part, fitted)

    def _fit_spec(self, spec: Spec, seed: int, part: Part, trained: Trained, event: Callable[[Event], object]) -> Chosen:
        """Fit a method, after the training it starts from, which methods of the same seed share."""
        with randomness.fork_rng(randomness.derive_seed(seed, "network")):
            model = spec.model(self.problem, tuple(part.x_train.shape[1:]))
        small = sum(p.numel() for p in model.network.parameters()) <= SMALL
        with one_thread() if small else nullcontext():
            start, before = None, 0.0
            if spec.start is not None:
                name = repr((spec.start, model.prior, model.likelihood))
                if name not in trained:
                    trained[name] = self._fit(model, spec.start, part, seed, None, event)
                start, before = trained[name]
                model = replace(start.model, prior=model.prior)
            posterior, seconds = self._fit(model, spec.method, part, seed, start, event)
        return Chosen(posterior, {}, before + seconds)

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

    def _score(self, key: Key, part: Part, fitted: Chosen) -> Result:
        evaluation, error = _attempt(
            lambda: evaluate(
                fitted.posterior,
                self.problem,
                part,
                seed=key.seed,
                corruptions=self.corruptions,
                severities=self.severities,
                detectors=self.detectors,
                confidence=self.confidence,
            )
        )
        if evaluation is None:
            return Result(key, seconds=fitted.seconds, error=error, versions=versions())
        more = {"choice": fitted.choice, "shift": evaluation.shift, "arrays": evaluation.arrays, "versions": versions()}
        return Result(key, evaluation.scores, fitted.seconds, **more)


def _attempt(act: Callable[[], T]) -> tuple[T | None, str | None]:
    """(result, None), or (None, the reason of the failure). A warning is not a failure."""
    try:
        return act(), None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or "no reason given"
        return None, f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"
