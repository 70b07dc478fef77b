"""Errors in the user's input, as the command line prints them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dubito.cli.process import print_warnings as print_warnings


class UsageError(Exception):
    """Input that cannot be used, described in one line. The command line prints it and exits with 2; any other error is a bug."""


@contextmanager
def usage_errors(*kinds: type[Exception], about: str = "") -> Iterator[None]:
    """Turn these errors into `UsageError`. Use it only around code that raises them for the user's input."""
    try:
        yield
    except kinds as error:
        raise UsageError(f"{about}: {error_text(error)}" if about else error_text(error)) from error


def check_not_overwritten(out: Path, *sources: Path | None) -> None:
    """Refuse to write the output over a file that is read."""
    for source in sources:
        if source is not None and source.exists() and out.exists() and out.samefile(source):
            raise UsageError(f"{source}: the output would overwrite this input; give another name for --out")


def error_text(error: Exception) -> str:
    """The message of an error; for errors of the system without their number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = error.filename2 or error.filename
    return f"{place}: {error.strerror}" if place is not None else error.strerror
