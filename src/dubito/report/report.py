"""A report: its content, printed on a terminal or written as one HTML file and as JSON."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dubito.report.content import Content
from dubito.report.html import page
from dubito.tensors.store import atomic_write

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Report(Content):
    """A report, to be printed on a terminal (`print`), or written as one self-contained HTML file (`html`) and as `json`."""

    def html(self) -> str:
        """The report as one HTML page that loads nothing."""
        return page(self)

    def print(self, console: Console | None = None) -> None:
        """Print the tables on a terminal."""
        from dubito.report.terminal import show  # rich takes a while to load

        show(self, console)

    def write(self, path: str | os.PathLike) -> Path:
        """Write the HTML file, and beside it the same name with `.json`. Creates folders. Returns the path of the HTML file."""
        path = check_writable(path)
        write_text(path, self.html())
        write_text(path.with_suffix(".json"), self.json())
        return path


def check_writable(path: str | os.PathLike) -> Path:
    """Raise an OSError if a report cannot be written there; call it before a long computation. Creates folders."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise OSError(22, "a report is an HTML file: give a name that ends in .html", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _refused(path, error) from error
    if path.is_dir():
        raise OSError(21, "the report cannot be written there: it is a folder", str(path))
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    try:
        with atomic_write(path) as scratch:
            scratch.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, f"the report cannot be written there: {(error.strerror or str(error)).lower()}", str(path))
