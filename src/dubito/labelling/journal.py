"""What a person said, one line of a file for every decision, written before it counts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dubito import store


@dataclass(frozen=True)
class Answer:
    """A decision: the class of an input by number, or None where the person could not tell; or, `undone`, that it was taken back.

    `guess` is the class that the model thought it was when the person was asked, if it thought anything.
    """

    index: int
    label: int | None = None
    undone: bool = False
    guess: int | None = None
    time: str = ""


class Journal:
    """All decisions in the order in which they were made, and what stands of them.

    A file is only added to. What is lost when a machine dies is at most the line that was being written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder, "answers.jsonl"))
    ...     for answer in (Answer(7, 1), Answer(3), Answer(7, undone=True), Answer(9, 0)):
    ...         journal.add(answer)
    ...     Journal(journal.path).standing
    {3: None, 9: 0}
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.answers: list[Answer] = []
        self.standing: dict[int, int | None] = {}  # of every input that was answered: its class, or None for skipped
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode().splitlines(), 1):
            try:
                self._take(Answer(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise store.FileError(f"{self.path}, line {number}: this is no answer of a labelling session") from error
        if len(whole) < len(content):  # a line that was never finished was never answered for, either
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def add(self, answer: Answer) -> None:
        """Write a decision, and then take it; where it cannot be written it is not taken."""
        if not answer.time:
            answer = Answer(
                answer.index, answer.label, answer.undone, answer.guess, datetime.now(UTC).isoformat(timespec="seconds")
            )
        line = json.dumps(
            {name: value for name, value in asdict(answer).items() if value not in (None, False) or name == "label"}
        )
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, before)  # half a line would spoil the next
            raise store.WriteError(
                error.errno, f"{self.path}: could not be written ({error.strerror or error}): make room"
            ) from error
        self._take(answer)

    def _take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.standing.pop(answer.index, None)
        if not answer.undone:
            self.standing[answer.index] = answer.label

    def agreement(self, last: int = 50) -> tuple[int, int]:
        """Of the last so many labels that the model had a guess for: how many it had right, and how many these are."""
        known = [one for one in self.answers if not one.undone and one.label is not None and one.guess is not None][-last:]
        return sum(one.label == one.guess for one in known), len(known)
