"""A labelling session: a person answers while the model is fitted in the background and asks for more."""

from __future__ import annotations

import csv
import json
import math
import random
import threading
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.apps.active import ActiveLearning
from dubito.apps.active.labels import FILE
from dubito.evaluation.data.cells import spreadsheet_cell
from dubito.inference.methods import MCDropout
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.model.priors import Normal
from dubito.network.weights import copy_network
from dubito.posteriors.predict.dropout import drops
from dubito.tensors import randomness, store
from dubito.tensors.checks import at_least, between, require
from dubito.web.labelling.journal import Answer, Journal
from dubito.web.labelling.task import Task

ANSWERS, ABOUT, LABELS, MODEL = "answers.jsonl", "task.json", "labels.csv", "model"
STEPS = 300  # training steps of a fit, however few labels there are
SCALE = 3.0  # of the prior: under a narrower one, a handful of labels would not move the weights from zero
RECENT = 8  # answers on the page that can be taken back
STOPPED = "the session is stopped: start it again to continue"
AHEAD = 3  # inputs after the current one that the page may preload


@dataclass(eq=False, repr=False)
class Session:
    """The state behind the page, for one task in one folder.

    `queue` holds the inputs to ask next. Every answer is on disk when `answer` returns. A background thread fits the model and asks for
    inputs: when half of the `batch` is answered, it fits the model to all labels and fills the queue again, while the person answers
    the other half. A session in a folder that has one continues it.

    Args:
        network: replaces the network of the task; every fit then starts from its weights.
        rate: dropout rate.
        acquisition, draws, most, seed: as in `ActiveLearning`.

    >>> import tempfile
    >>> from dubito.web.labelling import task
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     session = Session(task("digits", pool=50, test=20), folder, batch=4)
    ...     session.start()
    ...     session.wait(session.version, 60)
    ...     while not session.queue:
    ...         session.wait(session.version, 1)
    ...     session.answer(session.queue[0], 7)
    ...     session.close()
    ...     Path(folder, "labels.csv").read_text().splitlines()[1].endswith(",7")
    True
    """

    task: Task
    folder: str | Path
    _: KW_ONLY
    acquisition: str = "bald"
    batch: int = 20
    draws: int = 30
    most: int | None = 5000
    rate: float = 0.25
    network: nn.Module | None = None
    device: torch.device | str = "cpu"
    seed: int = 0

    def __post_init__(self):
        at_least(2, batch=self.batch)
        between(0, 1, rate=self.rate)
        self._path = Path(self.folder)
        self._lock = ExitStack()
        self._lock.enter_context(store.lock_folder(self._path))  # or another process could answer here, too
        try:
            for name in (ANSWERS, ABOUT, LABELS):
                for scratch in self._path.glob(f".{name}.*"):  # unfinished files of a process that was killed
                    scratch.unlink(missing_ok=True)
            self._check_about()
            self.journal = Journal(self._path / ANSWERS)
            self.learning = self._make_learning()
            self._restore()
        except BaseException:
            self._lock.close()
            raise

    def _make_learning(self) -> ActiveLearning:
        training, at, network = self.task.training, self.task.at, self.network
        if network is None:
            with randomness.fork_rng(self.seed):
                network = self.task.build()
        else:  # the user's network has its own dropout, or gets some before every layer
            network, at = copy_network(network), None if any(map(drops, network.modules())) else ""

        def method(n: int) -> MCDropout:
            """MC dropout for n labels."""
            epochs = math.ceil(STEPS / math.ceil(n / training.batch_size))
            return MCDropout(
                epochs=epochs, learning_rate=training.learning_rate, clip=1.0, at=at, rate=self.rate, draws=self.draws
            )

        model = Model(network.to(self.device), Categorical(), Normal(scale=SCALE))
        options: dict[str, Any] = {
            "acquisition": self.acquisition, "held_out": self.task.held_out, "start": "anew" if self.network is None else "network",
            "most": self.most, "batch_size": training.batch_size, "progress": False,
        }  # fmt: skip
        place = self._path / MODEL
        if (place / FILE).exists():
            return ActiveLearning.load(place, model, method, self.task.pool, **options)
        return ActiveLearning(model, method, self.task.pool, **options, seed=self.seed, folder=place)

    def _restore(self) -> None:
        answers = self.journal.standing
        if wrong := [
            i for i, label in answers.items() if not 0 <= i < len(self.task.pool) or not _is_class(label, self.task.classes)
        ]:
            raise store.FileError(f"{self.journal.path}: input {wrong[0]} or its answer does not belong to this task")
        if lost := self._saved() - {answer.index for answer in self.journal.answers}:
            raise store.FileError(
                f"{self.journal.path}: the answers of {len(lost)} inputs are lost, which {LABELS} or {MODEL} still have, such as that "
                f"of input {min(lost)}: put back a copy of the file, or give another folder"
            )
        self.queue: list[int] = [i for i in self.learning.pending.tolist() if i not in answers]
        self.guesses: dict[int, list[float]] = {}  # class probabilities of the inputs that were asked
        self.scores: dict[int, float] = {}
        self.busy: str | None = None
        self.error: str | None = None
        self.version = 0
        self._rounds: list[dict[str, Any]] = self._history()
        self._left = len(self.task.pool) - len(answers)  # neither labelled nor skipped
        self._tried = -1  # number of answers when a round failed: it is tried again when there are more
        self._fitted = -1  # number of answers in the last round
        self._stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._write_labels()  # a process that was killed may not have written them

    # -- what the person does

    def start(self) -> None:
        """Start to fit and ask in the background."""
        self._thread = threading.Thread(target=self._work, name="labelling", daemon=True)
        self._thread.start()

    def answer(self, index: int, label: int | None) -> None:
        """Save the class of an input that was asked, or None to skip it."""
        with self._changed:
            require(not self._stopping, STOPPED)
            require(index in self.queue, f"input {index} is not in the queue: it may have been answered in another window")
            known = _is_class(label, self.task.classes)
            require(known, f"label must be a whole number from 0 to {len(self.task.classes) - 1}; got {label!r}")
            probabilities = self.guesses.get(index)
            guess = None if probabilities is None else max(range(len(probabilities)), key=probabilities.__getitem__)
            self.journal.add(Answer(index, label, guess=guess))
            self.queue.remove(index)
            self._left -= 1
            self._after_answer()

    def undo(self, index: int | None = None) -> None:
        """Take back an answer, by default the last one; its input is asked again next."""
        with self._changed:
            require(not self._stopping, STOPPED)
            answers = self.journal.standing
            require(answers, "there is no answer to take back")
            index = list(answers)[-1] if index is None else index
            require(index in answers, f"input {index} has no answer to take back")
            self.journal.add(Answer(index, undone=True))
            self.queue.insert(0, index)
            self._left += 1
            self._after_answer()

    def _after_answer(self) -> None:
        """After a decision was saved. If the labels cannot be written now, the next fit reports it."""
        with suppress(store.WriteError):
            self._write_labels()
        self._notify()

    def _notify(self) -> None:
        self.version += 1
        self._changed.notify_all()

    def close(self, patience: float | None = None) -> None:
        """Stop asking, wait at most `patience` seconds for a running fit, and write all labels."""
        with self._changed:
            self._stopping = True
            self._notify()
        with suppress(store.WriteError):  # reported below
            self._write_labels()  # now, for those who do not wait for the fit
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                return  # the answers are on disk; the model learns them next time
            self._thread = None
        try:
            self._sync_labels(dict(self.journal.standing))
        finally:
            self._lock.close()

    # -- what the page shows

    def state(self) -> dict[str, Any]:
        """Everything that the page shows, as JSON."""
        with self._changed:
            answers = self.journal.standing
            labels = [label for label in answers.values() if label is not None]
            right, of = self.journal.agreement()
            return {
                "version": self.version,
                "task": self.task.name,
                "pool": len(self.task.pool),
                "labelled": len(labels),
                "skipped": len(answers) - len(labels),
                "counts": [labels.count(c) for c in range(len(self.task.classes))],
                "asked": [self._content(index) for index in self.queue[: 1 + AHEAD]],
                "queue": len(self.queue),
                "recent": [self._content(index) | {"label": answers[index]} for index in reversed(list(answers)[-RECENT:])],
                "undoable": bool(answers),
                "busy": self.busy,
                "done": self._left == 0,
                "rounds": self._rounds,
                "held_out": 0 if self.task.held_out is None else len(self.task.held_out[1]),
                "agreement": [right, of],
                "acquisition": self.acquisition,
                "error": self.error,
            }

    def _content(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            **self.task.shown.content(index),
            "guess": self.guesses.get(index),
            "score": self.scores.get(index),
        }

    def wait(self, version: int, seconds: float) -> None:
        """Wait until something has changed since `version`, for at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, seconds)

    # -- what goes on in the background

    def _due(self) -> bool:
        answers = len(self.journal.answers)
        if answers == self._tried:
            return False
        if answers == self._fitted:  # no new answers: only if the queue is empty
            return not self.queue and self._left > 0
        return len(self.queue) <= self.batch // 2 or (self._fitted < 0 and bool(self.journal.standing))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._due())
                if self._stopping:
                    return
                said, answers = dict(self.journal.standing), len(self.journal.answers)
            try:
                self._round(said)
            except Exception as error:  # the person can go on, and sees the error
                with self._changed:
                    self.error, self._tried = f"{type(error).__name__}: {error}", answers
                    if not self.queue:
                        self.queue = self._random()
            else:
                with self._changed:
                    self.error, self._fitted = None, answers
            with self._changed:
                self.busy = None
                self._notify()

    def _round(self, answers: dict[int, int | None]) -> None:
        """Fit the model to the labels, if there are any, and fill the queue."""
        learning = self.learning
        self._sync_labels(answers)
        trained = any(label is not None for label in answers.values())
        if trained:
            self._set_busy("fitting")
            learning.refit()
            with self._changed:
                self._rounds = self._history()  # the scores are shown before the model has asked
                if self._stopping:
                    return
        self._set_busy("asking")
        with self._changed:
            wanted = self.batch - len(self.queue)
        wanted = min(wanted, len(learning.candidates))
        asked = learning.ask(wanted).tolist() if wanted > 0 else []
        pending = learning.pending
        means = learning.predict(pending).mean.tolist() if trained and len(pending) else []
        scores = dict(zip(learning.history[-1].asked, learning.history[-1].scores, strict=False)) if learning.history else {}
        with self._changed:
            known = self.journal.standing
            # the current input stays; new questions come before those of an earlier model
            first, rest = self.queue[:1], self.queue[1:]
            new = [index for index in asked if index not in known and index not in self.queue]
            older = [i for i in pending.tolist() if i not in known and i not in new and i not in self.queue]
            self.queue = [*first, *new, *rest, *older]
            self.guesses = dict(zip(pending.tolist(), means, strict=True)) if means else {}
            self.scores |= scores
            self._rounds = self._history()

    def _random(self) -> list[int]:
        """Random inputs without an answer, for when the model cannot ask."""
        answers = self.journal.standing
        left = [index for index in range(len(self.task.pool)) if index not in answers]
        return random.Random(len(self.journal.answers)).sample(left, min(self.batch, len(left)))

    def _set_busy(self, busy: str) -> None:
        with self._changed:
            self.busy = busy
            self._notify()

    def _sync_labels(self, answers: dict[int, int | None]) -> None:
        """Give the active learner all labels and skips of the journal."""
        learning = self.learning
        known: dict[int, int | None] = dict.fromkeys(learning.skipped.tolist())
        if learning.targets is not None:
            known |= dict(zip(learning.labelled.tolist(), learning.targets.tolist(), strict=True))
        # a changed label is forgotten as well, so that labels are in the order of the last answers
        if gone := [index for index, label in known.items() if index not in answers or answers[index] != label]:
            learning.forget(gone)
        fresh = {index: label for index, label in answers.items() if known.get(index, -1) != label}
        if labels := {index: label for index, label in fresh.items() if label is not None}:
            learning.tell(list(labels), list(labels.values()))
        if skipped := [index for index, label in fresh.items() if label is None]:
            learning.skip(skipped)
        self._write_labels()

    def _write_labels(self) -> None:
        """Write `labels.csv`: the row number of each labelled input in the source, from 0, and its class."""
        path, numbers = self._path / LABELS, self.task.rows or range(len(self.task.pool))
        classes, advice = (
            tuple(map(spreadsheet_cell, self.task.classes)),
            f"All answers are in {ANSWERS}: free space, and start again",
        )
        with (
            self._changed,
            store.describing_write_errors(path, advice, subject=""),
            store.atomic_write(path) as scratch,
            scratch.open("w", newline="", encoding="utf-8") as file,
        ):
            labels = {index: label for index, label in self.journal.standing.items() if label is not None}
            csv.writer(file).writerows([("row", "class"), *((numbers[index], classes[label]) for index, label in labels.items())])

    def _saved(self) -> set[int]:
        """The inputs whose answers are in `labels.csv` or in the model's folder, which are written after the journal."""
        saved = {*self.learning.labelled.tolist(), *self.learning.skipped.tolist()}
        numbers = {str(number): index for index, number in enumerate(self.task.rows or range(len(self.task.pool)))}
        with suppress(FileNotFoundError), (self._path / LABELS).open(newline="", encoding="utf-8", errors="replace") as file:
            saved |= {numbers[row[0]] for row in csv.reader(file) if row and row[0] in numbers}
        return saved

    def _history(self) -> list[dict[str, Any]]:
        return [{"labels": r.labels, "held_out": r.held_out, "pool": r.pool} for r in self.learning.history]

    def _check_about(self) -> None:
        """Check that the task is the one with which the session in this folder began."""
        about = {"task": self.task.name, "classes": list(self.task.classes), "pool": len(self.task.pool)}
        path = self._path / ABOUT
        if not path.exists():
            with store.atomic_write(path) as scratch:
                scratch.write_text(json.dumps(about) + "\n")
            return
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise store.FileError(f"{path}: damaged: it should describe the labelling task of this folder") from error
        for name, now in about.items():
            if before.get(name) != now:
                raise ValueError(
                    f"{self.folder} belongs to another session: {name} was {before.get(name)} and is now {now}; give another folder"
                )


def _is_class(label: object, classes: tuple[str, ...]) -> bool:
    """Whether a label is None (skipped) or the index of a class."""
    return label is None or (type(label) is int and 0 <= label < len(classes))
