"""The page on which a person labels: one file, which loads only inputs and the state of the session."""

from __future__ import annotations

import json
from html import escape
from string import ascii_lowercase

from dubito.report.html import style
from dubito.report.templates import fill, read_asset
from dubito.web.labelling.task import Task


def keys(classes: tuple[str, ...]) -> tuple[str, ...]:
    """The key of every class: its name if all are single letters or digits, else 1 to 9 and 0, then letters; "" when these run out.

    >>> keys(("0", "1", "2")), keys(("cat", "dog"))
    (('0', '1', '2'), ('1', '2'))
    """
    if all(len(name) == 1 and name.isalnum() for name in classes) and len({name.lower() for name in classes}) == len(classes):
        return tuple(name.lower() for name in classes)
    known = [*"1234567890", *ascii_lowercase]
    return tuple(known[i] if i < len(known) else "" for i in range(len(classes)))


def page(task: Task) -> str:
    """The HTML of the page for a task."""
    settings = json.dumps({"classes": task.classes, "keys": keys(task.classes)}).replace("<", "\\u003c")
    package = "dubito.web.labelling"
    return fill(
        read_asset(package, "labelling.html"),
        name=escape(task.name),
        style=f"{style()}\n{read_asset(package, 'labelling.css').strip()}",
        settings=settings,
        script=read_asset(package, "labelling.js").strip(),
    )
