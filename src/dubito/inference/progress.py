"""A progress bar for what takes longer than a moment, on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

PATIENCE = 1.0  # seconds before a bar appears: what is quick stays quiet
PERIOD = 0.1  # seconds between two updates


class Progress:
    """`show=None` shows a bar where standard error is a terminal. Cheap to call at every step."""

    def __init__(self, label: str, total: int, *, show: bool | None = None):
        self.label, self.total, self.bar = label, total, None
        self.show = sys.stderr.isatty() if show is None else show
        self.due = time.monotonic() + PATIENCE

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, info: Mapping[str, Any]) -> bool:
        """Show how far things are; True when it was time to look, False otherwise."""
        now = time.monotonic()
        if now < self.due:
            return False
        self.due = now + PERIOD
        if self.show:
            words = "  ".join(f"{key.replace('_', ' ')} {_number(value)}" for key, value in info.items())
            if self.bar is None:
                self._start()
            assert self.bar is not None
            self.bar.update(self.task, completed=done, words=words)
        return True

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = ["{task.description}", BarColumn(), "{task.percentage:>3.0f}%", TimeRemainingColumn()]
        self.bar = RichProgress(*columns, TextColumn("{task.fields[words]}"), console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task(self.label, total=self.total, words="")
        self.bar.start()


def _number(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.float().mean().item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
