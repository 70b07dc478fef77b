"""The answers of a person: one line of a file per decision, written before the decision is applied."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dubito.tensors import store


@dataclass(frozen=True)
class Answer:
    """A decision: the class of an input, or None if the person skipped it; `undone` takes an earlier answer back.

    `guess` is the class that the model predicted when the person was asked, if it had been fitted by then.
    """

    index: int
    label: int | None = None
    undone: bool = False
    guess: int | None = None
    time: str = ""


class Journal:
    """All decisions in their order, and the answers that stand.

    Lines are only appended to the file, each with a checksum. A crash loses at most the line that was being written, which was not yet
    acknowledged. A file that is damaged otherwise is an error, and stays as it is. Only one process may use a journal at a time.

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
        self.standing: dict[int, int | None] = {}  # answered inputs -> class, or None for skipped
        self._size = -1  # known size of the file in bytes; another size means that it has changed
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        *lines, rest = content.split(b"\n")
        if not UNFINISHED.fullmatch(rest):
            lines.append(rest)  # an editor has removed the last newline
        for number, line in enumerate(lines, 1):
            try:
                self._take(_answer(line))
            except (ValueError, TypeError) as error:
                raise store.FileError(
                    f"{self.path}, line {number}: not an answer of a labelling session, or damaged; put back a copy of the file, or "
                    "remove the line to go on without its answer"
                ) from error
        self._size = len(content) - len(rest)

    def add(self, answer: Answer) -> None:
        """Write a decision, and then apply it; one that cannot be written is not applied."""
        answer = answer if answer.time else replace(answer, time=datetime.now(UTC).isoformat(timespec="seconds"))
        line = _line(answer)
        with store.describing_write_errors(self.path, "The answer was not taken: make room, and answer again", subject=""):
            if not self.path.exists() or self.path.stat().st_size != self._size:
                # new, deleted, or with half a line that could not be removed: write everything again
                with store.atomic_write(self.path) as scratch:
                    scratch.write_bytes(b"".join(map(_line, self.answers)))
                self._size = self.path.stat().st_size
            try:
                with self.path.open("ab") as file:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # half a line would damage the next; if it stays, the size shows it
                    os.truncate(self.path, self._size)
                raise
        self._size += len(line)
        self._take(answer)

    def _take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.standing.pop(answer.index, None)
        if not answer.undone:
            self.standing[answer.index] = answer.label

    def agreement(self, last: int = 50) -> tuple[int, int]:
        """Among the last labels for which the model had a guess: how many guesses were right, and how many there are."""
        answers = [a for a in self.answers if not a.undone and a.label is not None and a.guess is not None][-last:]
        return sum(a.label == a.guess for a in answers), len(answers)


UNFINISHED = re.compile(rb"(\{[ -|]*)?")  # a line that was never acknowledged: text without its closing brace, or nothing


def _line(answer: Answer) -> bytes:
    fields = asdict(answer)
    return json.dumps({**fields, "check": _checksum(fields)}).encode() + b"\n"


def _checksum(fields: dict[str, Any]) -> str:
    return store.checksum({}, json.dumps(fields, sort_keys=True))[:16]


def _answer(line: bytes) -> Answer:
    """Parse a line of the journal. Lines of version 0.1 have no checksum, and no index if it is 0."""
    fields = json.loads(line)
    check = fields.pop("check", None) if isinstance(fields, dict) else None
    if check is None and "time" in fields:
        fields = {"index": 0, **fields}
    elif check is not None and check != _checksum(fields):
        raise ValueError("the line does not match its checksum")
    answer = Answer(**fields)
    for value in (answer.index, *(number for number in (answer.label, answer.guess) if number is not None)):
        if type(value) is not int:
            raise TypeError(f"inputs and classes must be whole numbers; got {value!r}")
    return answer
