"""A labelling session: a person answers, and in the background the model is fitted and asks for more."""

from __future__ import annotations

import csv
import json
import math
import random
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.apps.active import ActiveLearning
from dubito.apps.active.record import FILE
from dubito.inference.methods import MCDropout
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.model.priors import Normal
from dubito.network.weights import copied
from dubito.posteriors.predict.dropout import drops
from dubito.tensors import randomness, store
from dubito.web.labelling.journal import Answer, Journal
from dubito.web.labelling.task import Task

ANSWERS, ABOUT, LABELS, MODEL = "answers.jsonl", "task.json", "labels.csv", "model"
STEPS = 300  # of a fit, however few labels there are
SCALE = 3.0  # of the prior: with a narrow one, a handful of labels would not move the weights from zero
RECENT = 8  # answers that can be looked at again
AHEAD = 3  # inputs after the current one that a page may load already


class Session:
    """What a page shows and does, for one task in one folder.

    The queue is what the person is asked. Every answer is on disk when `answer` returns, whatever the model is doing. Fits and asks
    are made by a thread of their own, which takes in the answers in between: a network is never run by two at a time. When half of the
    `batch` is answered, it fits the model to all labels and asks for as many again, while the person goes on with the other half. A
    session in a folder that has one goes on with it.

    `network` takes the place of the task's own, and every fit then begins at its weights. `rate` is that of the dropout, `acquisition`,
    `draws`, `most` and `seed` are those of `ActiveLearning`.

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

    def __init__(
        self,
        task: Task,
        folder: str | Path,
        *,
        acquisition: str = "bald",
        batch: int = 20,
        draws: int = 30,
        most: int | None = 5000,
        rate: float = 0.25,
        network: nn.Module | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        if batch < 2:
            raise ValueError(f"at least two inputs are asked at a time, so that one is there while the model thinks; got {batch}")
        if not 0 < rate < 1:
            raise ValueError(f"the rate of the dropout lies between 0 and 1; got {rate:g}")
        self.task, self.folder, self.batch, self.acquisition = task, Path(folder), batch, acquisition
        self._held = ExitStack()
        self._held.enter_context(store.locked(self.folder))  # or another process would answer here, too
        try:
            for name in (ANSWERS, ABOUT, LABELS):
                for scratch in self.folder.glob(f".{name}.*"):  # what a process that was killed was just writing
                    scratch.unlink(missing_ok=True)
            self._check_about()
            self.journal = Journal(self.folder / ANSWERS)
            self.learning = self._learning(acquisition, draws, most, rate, network, device, seed)
            self._begin()
        except BaseException:
            self._held.close()
            raise

    def _learning(
        self, acquisition: str, draws: int, most: int | None, rate: float, network: nn.Module | None, device: Any, seed: int
    ) -> ActiveLearning:
        with randomness.forked(seed):
            own = self.task.build() if network is None else copied(network)
        training = self.task.training
        own_dropout = network is not None and any(map(drops, network.modules()))
        # a network of the user's own has its own dropout, or gets some before every layer
        at = self.task.at if network is None else None if own_dropout else ""

        def method(n: int) -> MCDropout:
            epochs = math.ceil(STEPS / math.ceil(n / training.batch_size))
            return MCDropout(epochs=epochs, learning_rate=training.learning_rate, clip=1.0, at=at, rate=rate, draws=draws)

        model = Model(own.to(device), Categorical(), Normal(scale=SCALE))
        options: dict[str, Any] = {
            "acquisition": acquisition, "held_out": self.task.held_out, "start": "anew" if network is None else "network",
            "most": most, "batch_size": training.batch_size, "progress": False,
        }  # fmt: skip
        place = self.folder / MODEL
        if (place / FILE).exists():
            return ActiveLearning.load(place, model, method, self.task.pool, **options)
        return ActiveLearning(model, method, self.task.pool, **options, seed=seed, folder=place)

    def _begin(self) -> None:
        said = self.journal.standing
        if wrong := [
            i for i, label in said.items() if not 0 <= i < len(self.task.pool) or not _possible(label, self.task.classes)
        ]:
            raise store.FileError(f"{self.journal.path}: input {wrong[0]} and its answer are not of this task")
        self.queue: list[int] = [i for i in self.learning.pending.tolist() if i not in said]
        self.guesses: dict[int, list[float]] = {}  # class probabilities of what was asked
        self.scores: dict[int, float] = {}
        self.busy: str | None = None
        self.error: str | None = None
        self.version = 0
        self._rounds: list[dict[str, Any]] = self._history()
        self._left = len(self.task.pool) - len(said)  # neither labelled nor skipped
        self._tried = -1  # answers there were when a round failed: it is tried again when there are more
        self._fitted = -1  # answers the last round knew
        self._stopping = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._write_labels()  # a process that was killed may not have come to it

    # -- what a person does

    def start(self) -> None:
        """Fit and ask in the background from now on."""
        self._thread = threading.Thread(target=self._work, name="labelling", daemon=True)
        self._thread.start()

    def answer(self, index: int, label: int | None) -> None:
        """Take the class of an input that was asked, or None for one that nobody can tell."""
        with self._changed:
            if self._stopping:
                raise ValueError("the session has been stopped: start it again to go on")
            if index not in self.queue:
                raise ValueError(f"input {index} is not being asked: it may have been answered in another window")
            if not _possible(label, self.task.classes):
                raise ValueError(f"a class is a number from 0 to {len(self.task.classes) - 1}; got {label!r}")
            probabilities = self.guesses.get(index)
            guess = None if probabilities is None else max(range(len(probabilities)), key=probabilities.__getitem__)
            self.journal.add(Answer(index, label, guess=guess))
            self.queue.remove(index)
            self._left -= 1
            self._taken()

    def undo(self, index: int | None = None) -> None:
        """Take back an answer, by default the last that stands; its input is asked again, at once."""
        with self._changed:
            if self._stopping:
                raise ValueError("the session has been stopped: start it again to go on")
            said = self.journal.standing
            if index is None:
                if not said:
                    raise ValueError("there is no answer to take back")
                index = list(said)[-1]
            if index not in said:
                raise ValueError(f"input {index} has no answer to take back")
            self.journal.add(Answer(index, undone=True))
            self.queue.insert(0, index)
            self._left += 1
            self._taken()

    def _taken(self) -> None:
        """A decision is in the journal: it stands, even if there is no room for the file made from it; that is told by the next fit."""
        with suppress(store.WriteError):
            self._write_labels()
        self._note()

    def _note(self) -> None:
        self.version += 1
        self._changed.notify_all()

    def close(self, patience: float | None = None) -> None:
        """Stop asking, wait (`patience` seconds at most) until a fit that is under way has ended, and write all that was said."""
        with self._changed:
            self._stopping = True
            self._note()
        with suppress(store.WriteError):  # it is told below
            self._write_labels()  # now: who does not want to wait for the fit has them, too
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                return  # the answers are on disk; the model takes them next time
            self._thread = None
        try:
            self._told(dict(self.journal.standing))
        finally:
            self._held.close()

    # -- what a page shows

    def state(self) -> dict[str, Any]:
        """All that a page shows, as JSON."""
        with self._changed:
            said = self.journal.standing
            labels = [label for label in said.values() if label is not None]
            right, of = self.journal.agreement()
            return {
                "version": self.version,
                "task": self.task.name,
                "pool": len(self.task.pool),
                "labelled": len(labels),
                "skipped": len(said) - len(labels),
                "counts": [labels.count(c) for c in range(len(self.task.classes))],
                "asked": [self._shown(index) for index in self.queue[: 1 + AHEAD]],
                "queue": len(self.queue),
                "recent": [self._shown(index) | {"label": said[index]} for index in reversed(list(said)[-RECENT:])],
                "undoable": bool(said),
                "busy": self.busy,
                "done": self._left == 0,
                "rounds": self._rounds,
                "held_out": 0 if self.task.held_out is None else len(self.task.held_out[1]),
                "agreement": [right, of],
                "acquisition": self.acquisition,
                "error": self.error,
            }

    def _shown(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            **self.task.shown.content(index),
            "guess": self.guesses.get(index),
            "score": self.scores.get(index),
        }

    def wait(self, version: int, seconds: float) -> None:
        """Until something has changed since `version`, but not longer than so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, seconds)

    # -- what goes on behind it

    def _due(self) -> bool:
        answers = len(self.journal.answers)
        if answers == self._tried:
            return False
        if answers == self._fitted:  # nothing new was said: only if nothing is asked
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
            except Exception as error:  # a person goes on whatever happens to the model, and is told
                with self._changed:
                    self.error, self._tried = f"{type(error).__name__}: {error}", answers
                    if not self.queue:
                        self.queue = self._random()
            else:
                with self._changed:
                    self.error, self._fitted = None, answers
            with self._changed:
                self.busy = None
                self._note()

    def _round(self, said: dict[int, int | None]) -> None:
        """Fit the model to what was said, if there is a label, and fill the queue."""
        learning = self.learning
        self._told(said)
        trained = any(label is not None for label in said.values())
        if trained:
            self._say("fitting")
            learning.refit()
            with self._changed:
                self._rounds = self._history()  # how good it is can be seen before it has asked
                if self._stopping:
                    return
        self._say("asking")
        with self._changed:
            wanted = self.batch - len(self.queue)
        wanted = min(wanted, len(learning.candidates))
        asked = learning.ask(wanted).tolist() if wanted > 0 else []
        pending = learning.pending
        means = learning.predict(pending).mean.tolist() if trained and len(pending) else []
        scores = dict(zip(learning.history[-1].asked, learning.history[-1].scores, strict=False)) if learning.history else {}
        with self._changed:
            known = self.journal.standing
            # what is being looked at stays; what the model asks now comes before what it asked when it knew less
            first, rest = self.queue[:1], self.queue[1:]
            new = [index for index in asked if index not in known and index not in self.queue]
            older = [i for i in pending.tolist() if i not in known and i not in new and i not in self.queue]
            self.queue = [*first, *new, *rest, *older]
            self.guesses = dict(zip(pending.tolist(), means, strict=True)) if means else {}
            self.scores |= scores
            self._rounds = self._history()

    def _random(self) -> list[int]:
        """Some inputs that have no answer: what a person can go on with although the model cannot ask."""
        said = self.journal.standing
        left = [index for index in range(len(self.task.pool)) if index not in said]
        return random.Random(len(self.journal.answers)).sample(left, min(self.batch, len(left)))

    def _say(self, busy: str) -> None:
        with self._changed:
            self.busy = busy
            self._note()

    def _told(self, said: dict[int, int | None]) -> None:
        """Bring the labels of the learning to what was said."""
        learning = self.learning
        known: dict[int, int | None] = dict.fromkeys(learning.skipped.tolist())
        if learning.targets is not None:
            known |= dict(zip(learning.labelled.tolist(), learning.targets.tolist(), strict=True))
        # a label that became another one is forgotten as well, so that labels stand in the order in which they were last said
        if gone := [index for index, label in known.items() if index not in said or said[index] != label]:
            learning.forget(gone)
        fresh = {index: label for index, label in said.items() if known.get(index, -1) != label}
        if told := {index: label for index, label in fresh.items() if label is not None}:
            learning.tell(list(told), list(told.values()))
        if skipped := [index for index, label in fresh.items() if label is None]:
            learning.skip(skipped)
        self._write_labels()

    def _write_labels(self) -> None:
        """`labels.csv`, for whatever comes after: the number of an input in what was given, from 0, and its class."""
        path, numbers = self.folder / LABELS, self.task.rows
        try:
            with self._changed, store.replacing(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(["row", "class"])
                for index, label in self.journal.standing.items():
                    if label is not None:
                        rows.writerow([index if numbers is None else numbers[index], self.task.classes[label]])
        except OSError as error:
            raise store.WriteError(
                error.errno,
                f"{path}: could not be written ({error.strerror or error}). All answers are in {ANSWERS}: make room, and start again",
            ) from error

    def _history(self) -> list[dict[str, Any]]:
        return [{"labels": one.labels, "held_out": one.held_out, "pool": one.pool} for one in self.learning.history]

    def _check_about(self) -> None:
        """The task is the same as when the session began; its answers would mean something else in another."""
        about = {"task": self.task.name, "classes": list(self.task.classes), "pool": len(self.task.pool)}
        path = self.folder / ABOUT
        if not path.exists():
            with store.replacing(path) as scratch:
                scratch.write_text(json.dumps(about) + "\n")
            return
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise store.FileError(f"{path}: damaged; it should say what is being labelled here") from error
        for name, now in about.items():
            if before.get(name) != now:
                raise ValueError(
                    f"{self.folder} belongs to another session: its {name} was {before.get(name)} and is {now}; give another folder"
                )


def _possible(label: Any, classes: tuple[str, ...]) -> bool:
    return label is None or (isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(classes))
