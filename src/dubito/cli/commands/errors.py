"""Input that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Refusal(Exception):
    """What is wrong with the input, in one line: the command line prints it and exits with 2. Anything else is a bug of ours."""


@contextmanager
def refusing(*kinds: type[Exception], about: str = "") -> Iterator[None]:
    """These errors become refusals: put it only around what raises them for the user's input."""
    try:
        yield
    except kinds as error:
        raise Refusal(f"{about}: {told(error)}" if about else told(error)) from error


def not_over(out: Path, *read: Path | None) -> None:
    """Refuse to write a file in the place of one that is read, which would be lost."""
    for source in read:
        if source is not None and source.exists() and out.exists() and out.samefile(source):
            raise Refusal(f"{source}: it is read here, and would be written over; give another name for --out")


def told(error: Exception) -> str:
    """What an error says; of the system's errors only the words, without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = error.filename2 or error.filename
    return f"{place}: {error.strerror}" if place is not None else error.strerror
