"""What a person said, one line of a file for every decision, written before it counts."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dubito.tensors import store


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

    A file is only added to. What is lost when a machine dies is at most the line that was being written, and nobody was told that it
    was taken. One process has a journal at a time.

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
        self._size = -1  # bytes that the file is known to have: of another size, it is not as it was left
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        *lines, rest = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                self._take(_answer(line))
            except (ValueError, TypeError) as error:
                raise store.FileError(f"{self.path}, line {number}: this is no answer of a labelling session") from error
        self._size = len(content) - len(rest)
        with suppress(ValueError, TypeError):  # a line that was never finished was never answered for, either
            self._take(_answer(rest))  # but an editor may have left out the end of the last line

    def add(self, answer: Answer) -> None:
        """Write a decision, and then take it; where it cannot be written it is not taken."""
        answer = answer if answer.time else replace(answer, time=datetime.now(UTC).isoformat(timespec="seconds"))
        line = _line(answer)
        try:
            if not self.path.exists() or self.path.stat().st_size != self._size:
                # new, deleted, or with half a line that could not be taken back: all that was said is written again
                with store.replacing(self.path) as scratch:
                    scratch.write_bytes(b"".join(map(_line, self.answers)))
                self._size = self.path.stat().st_size
            try:
                with self.path.open("ab") as file:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # half a line would spoil the next; if it stays, the size tells
                    os.truncate(self.path, self._size)
                raise
        except OSError as error:
            raise store.WriteError(
                error.errno, f"{self.path}: could not be written ({error.strerror or error}): make room"
            ) from error
        self._size += len(line)
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


def _line(answer: Answer) -> bytes:
    known = {name: value for name, value in asdict(answer).items() if value not in (None, False) or name == "label"}
    return json.dumps(known).encode() + b"\n"


def _answer(line: bytes) -> Answer:
    found = Answer(**json.loads(line))
    for value in (found.index, *(one for one in (found.label, found.guess) if one is not None)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"inputs and classes are whole numbers; got {value!r}")
    return found
