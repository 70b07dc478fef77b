"""The one loop: every method is a fold over data, `init -> step -> posterior`, and this is where its steps are made.

The loop owns what no method should have to think of: seeds, progress, gradient accumulation, early stopping, draws and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from dubito.inference.batches import Batches, Group, reseed
from dubito.inference.checkpoint import Checkpoint, Run
from dubito.inference.method import Event, Info, Method, sum_parts
from dubito.inference.options import FitOptions
from dubito.inference.progress import Progress
from dubito.model import Target
from dubito.tensors import randomness, store, tree
from dubito.tensors.checks import require
from dubito.tensors.processes import Processes


@dataclass(frozen=True)
class Loop:
    """The steps of one fit; calling it takes a run from where it stands to its end."""

    target: Target
    method: Method
    source: Batches
    held_out: Batches | None
    options: FitOptions
    generators: list[torch.Generator]  # of the user's loader, seeded at the start of every epoch
    checkpoint: Checkpoint
    draws: store.Draws
    steps: int

    @property
    def processes(self) -> Processes:
        """Those that fit together."""
        return self.checkpoint.processes

    def __call__(self, run: Run, bar: Progress) -> Run:
        with self.checkpoint.signals:
            return self._run(run, bar)

    def _run(self, run: Run, bar: Progress) -> Run:
        before, halted, info = (
            run.step,
            False,
            {},
        )  # halted by a callback; unlike early stopping, a resumed run goes on from there
        while run.step < self.steps and not run.stopped and not halted:
            began = run.step
            info, halted = self._epoch(run, bar)
            if began == before:
                self._check_same(run)
        _check_finite(info, run.step)
        _restore_random(run)  # a run that had ended before: its posterior then draws the same numbers again
        # Without data to validate on, a run that ends within an epoch stays there, and can go on from there if it is to be longer.
        if run.step >= self.steps and run.batch and self.held_out is not None:
            self._end_epoch(run, info)
            self._validate(run)
        if run.step > before or not before:
            self._check_same(run)
            self.checkpoint.write(run, self.draws)
        return run

    def _check_same(self, run: Run) -> None:
        """Raise unless all processes hold the same state, after the first pass and in the end."""
        if self.processes.size == 1:
            return
        tensors: dict[str, Tensor] = {}
        store.pack(run.state, tensors)
        digests = self.processes.gather({name: store.checksum({name: leaf}) for name, leaf in tensors.items()})
        apart = [name for name in digests[0] if any(other.get(name) != digests[0][name] for other in digests)]
        require(
            not apart,
            f"after {run.step} steps the processes no longer hold the same {apart[:4]}: a buffer that follows the examples of one "
            "process, or a callback that changes the state, cannot be divided; give distributed=False",
        )

    def _epoch(self, run: Run, bar: Progress) -> tuple[Info, bool]:
        """The rest of a pass over the data: what its last step showed, and whether a callback has stopped the run."""
        method, callbacks, info = self.method, self.options.callbacks, {}
        seen, skip = 0, run.batch
        if method.data == "batches" or run.epoch == 0:
            reseed(self.generators, randomness.derive_seed(self.options.seed, run.epoch))
        groups = self._groups(run.epoch)
        for _ in islice(groups, skip):  # a checkpoint fell into this epoch: take up the same order of the data where it was left
            pass
        _restore_random(run)
        for group in groups:
            target = self.target if group.shares is None else replace(self.target, shares=group.shares)
            run.state, info = method.step(target, run.state, group.batches, run.generator)
            run.step, run.batch, seen = run.step + 1, run.batch + 1, seen + self._size(target, group)
            if seen > self.source.n_data:
                self._confirm(seen)
            if (draw := method.draw(run.state)) is not None:
                self.draws.append(draw)
            if bar.update(run.step, info):
                _check_finite(info, run.step)
            self.checkpoint.write_if_due(run, self.draws, self._sum_parts)
            answers = [callback(Event(run.step, self.steps, run.epoch, info, run.state)) for callback in callbacks]
            halted = any(answer is True for answer in answers)
            halted = any(self.processes.gather(halted)) if callbacks else halted
            if run.step >= self.steps or halted:
                self._sum_parts(run)
                return info, halted
        self._sum_parts(run)
        if not skip:
            self._confirm(seen)
        self._end_epoch(run, info)
        return {**info, **self._validate(run)}, False

    def _sum_parts(self, run: Run) -> None:
        """Have all processes hold the same state, where each has added up a part of its own."""
        run.state = sum_parts(self.method, self.target, run.state)

    def _groups(self, epoch: int) -> Iterator[Group]:
        """The batches of every step of an epoch."""
        return iter([Group(self.source)]) if self.method.data == "full" else self.source.groups(self.options.accumulate, epoch)

    def _size(self, target: Target, group: Group) -> int:
        """The number of examples of a step."""
        return self.source.n_data if self.method.data == "full" else target.examples(group.batches)

    def _end_epoch(self, run: Run, info: Info) -> None:
        require(run.batch, "the data gave no batch in this pass: an iterable must give its batches again every time")
        _check_finite(info, run.step)
        run.epoch, run.batch = run.epoch + 1, 0

    def _confirm(self, seen: int) -> None:
        """A whole pass must give as many examples as were counted, or the posterior would be scaled wrongly."""
        if self.source.counted and seen != self.source.n_data:
            raise ValueError(
                f"a pass over the data gave {seen} examples (or more) where {self.source.n_data} were counted, so the posterior "
                "would be scaled wrongly: give n_data=..., the number of examples that the posterior is conditioned on"
            )

    def _validate(self, run: Run) -> Info:
        """Score the held-out data and keep the best state; the run stops when patience has run out."""
        if self.held_out is None:
            return {}
        require(
            not len(self.draws), "early stopping picks one state and would bias a set of draws: samplers take no `validation`"
        )
        seed = None if self.processes.size == 1 else randomness.derive_seed(self.options.seed, "validation", run.epoch)
        with randomness.fork_rng(seed):  # scoring must not move the generators that training draws from
            posterior = self.method.posterior(self.target, run.state, self.draws)
            own = islice(
                self.held_out, self.processes.rank, None, self.processes.size
            )  # every process scores some of the batches
            pairs = (self.target.model.split(batch) for batch in own)
            scores = [posterior.predict(x).log_prob(y).double() for x, y in pairs]
        score = torch.cat([torch.zeros(0, dtype=torch.float64, device=self.source.device), *scores])
        total = torch.stack([score.sum(), score.isnan().sum(), torch.ones_like(score).sum()])
        self.processes.sum_([total])
        lost, examples = int(total[1]), int(total[2])
        require(
            not lost,
            f"the scores of {lost} of {examples} held-out examples are NaN after epoch {run.epoch}: remove examples with NaN or "
            "infinite values from `validation`",
        )
        nll = float(-total[0] / examples)
        if nll < run.best:
            tensors: dict[str, Tensor] = {}
            description = store.pack(run.state, tensors)
            run.best, run.waited = nll, 0
            run.best_state = {"description": description, "tensors": tree.clone(tensors)}
        else:
            run.waited += 1
            run.stopped = self.options.patience is not None and run.waited >= self.options.patience
        return {"validation_nll": nll}


def _restore_random(run: Run) -> None:
    """Put back the global generators as a checkpoint has found them, once."""
    if run.random is not None:
        randomness.set_global_state(run.random)
        run.random = None


def _check_finite(info: Info, step: int) -> None:
    value = info.get("log_likelihood")
    if isinstance(value, Tensor) and not torch.isfinite(value).all():
        raise FloatingPointError(
            f"the log likelihood is not finite after step {step}: the steps are probably too large (lower learning_rate, "
            "or set clip or preconditioner where the method has them), or the inputs hold NaN or infinity (see torch.isfinite)"
        )
