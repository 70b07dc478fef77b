"""The grid: every method with every seed. Each result is made once and saved at once, so that an interrupted run can continue."""

from __future__ import annotations

import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from dubito.cli.compare.recipe import TableRecipe, cells_checksum, columns_of
from dubito.cli.compare.result import Key, Result, versions
from dubito.cli.compare.scoring import SEVERITIES, check_names, evaluate
from dubito.cli.compare.spec import Spec
from dubito.cli.compare.stacked import Chosen, fit_splits, inner_split, is_stackable
from dubito.cli.process import in_processes, one_thread
from dubito.evaluation.problems import Problem, Split
from dubito.inference.fit import Event, Method, fit
from dubito.inference.methods import MAP
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.model.priors import Normal
from dubito.posteriors import Posterior
from dubito.tensors import randomness, store
from dubito.tensors.checks import require

SMALL = 100_000  # weights up to which one thread is faster than several
UNIT = 1000  # steps of the progress bar per result
DIVERGED = "FloatingPointError: the weights are no longer finite: lower learning_rate, or set clip"

T = TypeVar("T")
Place = tuple[int, int]  # (index of a spec, seed)


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

    def run(
        self,
        *,
        say: Callable[[str], object] = str,
        progress: bool | None = None,
        jobs: int = 1,
        remake: Callable[[], Grid] | None = None,
    ) -> Outcome:
        """Make the results that are missing; with several `jobs` in as many processes, for which `remake` makes this grid again."""
        require(
            jobs == 1 or remake is not None, "several jobs need `remake`, a function that can be pickled and makes the grid again"
        )
        split = lru_cache(maxsize=1)(self.problem.split)  # one seed's data at a time: those of all seeds may not fit into memory
        keys = self._keys(split)
        results = {place: result for place, key in keys.items() if (result := Result.read(self.folder, key)) is not None}
        if results:
            say(f"{len(results)} of {len(keys)} results are already there")
        missing = [place for place in keys if place not in results]
        interrupted = False
        if missing:
            self._warm_up(split(self.seeds[0]))
        with store.lock_folder(self.folder), Progress("compare", UNIT * len(missing), show=progress) as bar:
            try:
                made = self._make(missing, keys, split, bar)
                if remake is not None and jobs > 1:
                    made = self._make_apart(missing, keys, split, bar, jobs=jobs, remake=remake)
                for place, result in made:
                    results[place] = result
                    bar.update(UNIT * sum(place in results for place in missing), {})
                    text = f"{result.seconds:.1f} s" if result.error is None else f"failed: {result.error}"
                    say(f"{result.key.label}, seed {result.key.seed}: {text}")
            except KeyboardInterrupt:
                interrupted = True
        if jobs > 1:  # what a process has written before an interrupt
            left = {place: Result.read(self.folder, keys[place]) for place in missing if place not in results}
            results |= {place: result for place, result in left.items() if result is not None}
        return Outcome(tuple(results[place] for place in keys if place in results), interrupted)

    def _warm_up(self, split: Split) -> None:
        """torch loads parts of itself at the first step; no method should pay for that. Errors appear again where they are saved."""
        with suppress(Exception), randomness.fork_rng(0):
            model = self.specs[0].model(self.problem, tuple(split.x_train.shape[1:]))
            fit(model, MAP(epochs=1), (split.x_train[:8], split.y_train[:8]), device=self.device, progress=False)

    def _keys(self, split: Callable[[int], Split]) -> dict[Place, Key]:
        """The key of every place, method by method."""
        keys, last, checksum = {}, None, ""
        for seed in self.seeds:
            now = split(seed)
            if now is not last:  # image sets have one split for all seeds
                last, checksum = now, now.checksum
            keys |= {(i, seed): self._key(spec, seed, now, checksum) for i, spec in enumerate(self.specs)}
        return {(i, seed): keys[i, seed] for i in range(len(self.specs)) for seed in self.seeds}

    def _key(self, spec: Spec, seed: int, split: Split, checksum: str) -> Key:
        with randomness.fork_rng(0):
            model = spec.model(self.problem, tuple(split.x_train.shape[1:]))
        network, given = model.network, Normal(scale=self.problem.training.prior_scale)
        shapes = {name: list(p.shape) for name, p in network.named_parameters()}
        settings = {
            "problem": self.problem.name,
            "data": checksum,
            "rows": [len(split.x_train), len(split.x_test)],
            **spec.settings,
            "network": {"layers": " ".join(str(network).split()), "weights": shapes, "code": self.code},
            "batch_size": self.problem.training.batch_size,
            "prior_scale": self.problem.training.prior_scale,
            "unfamiliar": list(split.unfamiliar),
            "corruptions": list(self.corruptions),
            "severities": list(self.severities) if self.corruptions else [],
        }
        optional = {  # what results of version 0.1 did not have
            "prior": "" if model.prior == given else repr(model.prior),
            "columns": cells_checksum(columns_of(self.problem, split)[0]) if isinstance(spec.method, TableRecipe) else "",
            "people": self.problem.people is not None,
            "detectors": list(self.detectors),
            "confidence": list(self.confidence),
        }
        return Key(spec.label, seed, settings | {name: value for name, value in optional.items() if value})

    def _make(
        self, missing: Sequence[Place], keys: Mapping[Place, Key], split: Callable[[int], Split], bar: Progress
    ) -> Iterator[tuple[Place, Result]]:
        """The missing results: first those that are fitted together, then seed by seed, so that a run that is cut short has all
        methods on some seeds."""
        done, total = 0, 0  # results that are made, and those that are being made

        def tell(share: float, text: str) -> None:
            """Show the share of these results that is done."""
            bar.update(round(UNIT * (done + share * total)), {"": text})

        stacked = [i for i, spec in enumerate(self.specs) if is_stackable(spec, self.problem)]
        for i in stacked:
            seeds, spec = [seed for other, seed in missing if other == i], self.specs[i]
            total = len(seeds)
            text = f"{spec.label}, {total} splits at once"
            fitted, error = self._fit_stack(spec, {seed: split(seed) for seed in seeds}, partial(tell, text=text))
            for seed in seeds:  # where one split fails, others may have succeeded
                yield (i, seed), self._write(self._score(keys[i, seed], split(seed), fitted.get(seed), error or DIVERGED))
            done += total
        total = 1
        for seed in self.seeds:
            fits = Fits(self.problem, seed, device=self.device)
            for i, spec in enumerate(self.specs):
                if i not in stacked and (i, seed) in missing:
                    text = f"{spec.label}, seed {seed}"
                    made, error = _attempt(partial(fits, spec, split(seed), partial(tell, text=text)))
                    yield (i, seed), self._write(self._score(keys[i, seed], split(seed), made, error))
                    done += 1

    def _write(self, result: Result) -> Result:
        result.write(self.folder)
        return result

    def _make_apart(
        self,
        missing: Sequence[Place],
        keys: Mapping[Place, Key],
        split: Callable[[int], Split],
        bar: Progress,
        *,
        jobs: int,
        remake: Callable[[], Grid],
    ) -> Iterator[tuple[Place, Result]]:
        """The missing results from several processes; those that are fitted together are made here. Methods that start from the same
        trained network stay in one process."""
        stacked = {i for i, spec in enumerate(self.specs) if is_stackable(spec, self.problem)}
        yield from self._make([place for place in missing if place[0] in stacked], keys, split, bar)
        units: dict[tuple[int, str], list[int]] = {}
        for i, seed in sorted(missing, key=lambda place: self.seeds.index(place[1])):
            if i not in stacked:
                start = self.specs[i].start
                units.setdefault((seed, str(i) if start is None else repr(start)), []).append(i)
        work = partial(_make_unit, pickle.dumps(remake))
        for results, warned in in_processes(work, [(seed, specs) for (seed, _), specs in units.items()], jobs) if units else ():
            for text in warned:
                warnings.warn(text, stacklevel=2)
            yield from results

    def _fit_stack(
        self, spec: Spec, splits: Mapping[int, Split], tell: Callable[[float], object]
    ) -> tuple[Mapping[int, Chosen], str | None]:
        with one_thread():
            fitted, error = _attempt(
                lambda: fit_splits(spec, self.problem, splits, device=self.device, tell=tell) if splits else {}
            )
        return fitted or {}, error

    def _score(self, key: Key, split: Split, fitted: Chosen | None, error: str | None) -> Result:
        if fitted is None:
            return Result(key, error=error, versions=versions())
        names = ("corruptions", "severities", "detectors", "confidence")
        options: Any = {"fix": fitted.fix, **{name: getattr(self, name) for name in names}}
        judged = fitted.split or split
        found, error = _attempt(lambda: evaluate(fitted.posterior, self.problem, judged, seed=key.seed, **options))
        if found is None:
            return Result(key, seconds=fitted.seconds, error=error, versions=versions())
        more = {"choice": fitted.choice, "shift": found.shift, "arrays": found.arrays, "versions": versions()}
        return Result(key, found.scores, fitted.seconds, **more)


class Fits:
    """Fits to a problem with one seed. Methods that start from a trained network share one, trained under the problem's prior."""

    def __init__(self, problem: Problem, seed: int, *, device: torch.device | str | None = None):
        self.problem, self.seed, self.device = problem, seed, device
        self.trained: dict[str, tuple[Posterior, float]] = {}

    def __call__(self, spec: Spec, split: Split, tell: Callable[[float], object] = float) -> Chosen:
        """The posterior of a method, and the seconds that it took, with the training that it starts from."""
        if isinstance(spec.method, TableRecipe):
            begin = time.monotonic()
            predict, judged = spec.method.fit(self.problem, split, seed=self.seed)
            return Chosen(predict, {}, time.monotonic() - begin, split=judged)
        if spec.recalibrated:
            plain, held = replace(spec, recalibrated=False), inner_split(split, self.seed)
            first = Fits(self.problem, self.seed, device=self.device)(plain, held, lambda share: tell(0.5 * share))
            made = self(plain, split, lambda share: tell(0.5 + 0.5 * share))
            made = made._replace(seconds=first.seconds + made.seconds)
            return made.recalibrated(first.posterior, held, seed=self.seed)
        with randomness.fork_rng(randomness.derive_seed(self.seed, "network")):
            model = spec.model(self.problem, tuple(split.x_train.shape[1:]))
        small = sum(p.numel() for p in model.network.parameters()) <= SMALL
        with one_thread() if small else nullcontext():
            start, before = None, 0.0
            if spec.start is not None:
                name = repr((spec.start, model.likelihood))
                if name not in self.trained:
                    plain = self.problem.training.model(model.network, model.likelihood)
                    self.trained[name] = self._fit(plain, spec.start, split, None, tell)
                start, before = self.trained[name]
                model = replace(start.model, prior=model.prior)
            posterior, seconds = self._fit(model, spec.method, split, start, tell)
        return Chosen(posterior, {}, before + seconds)

    def _fit(
        self, model: Model, method: Method, split: Split, start: Posterior | None, tell: Callable[[float], object]
    ) -> tuple[Posterior, float]:
        def event(event: Event) -> None:
            """Tell the share that is done."""
            tell(event.step / max(1, event.steps))

        data, size = (split.x_train, split.y_train), self.problem.training.batch_size
        options: Any = {"start": start, "device": self.device, "seed": self.seed, "batch_size": size}
        begin = time.monotonic()
        posterior = fit(model, method, data, progress=False, callbacks=[event], **options)
        return posterior, time.monotonic() - begin


@lru_cache(maxsize=1)
def _remade(remake: bytes) -> Grid:
    """The grid, made once in a process."""
    return pickle.loads(remake)()


def _make_unit(remake: bytes, unit: tuple[int, list[int]]) -> tuple[list[tuple[Place, Result]], list[str]]:
    """Make and write the results of some methods with one seed, in a process that shares the work; and what was warned of."""
    seed, specs = unit
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        grid = replace(_remade(remake), seeds=(seed,))
        split = lru_cache(maxsize=1)(grid.problem.split)
        grid._warm_up(split(seed))
        with Progress("compare", UNIT, show=False) as bar:
            results = list(grid._make([(i, seed) for i in specs], grid._keys(split), split, bar))
    return results, [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def _attempt(act: Callable[[], T]) -> tuple[T | None, str | None]:
    """(result, None), or (None, the reason of the failure). A warning is not a failure."""
    try:
        return act(), None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or "no reason given"
        return None, f"{type(error).__name__}: {text} ({Path(place.filename).name}, line {place.lineno})"
