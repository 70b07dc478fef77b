"""HTML, CSS and JavaScript, read from the folder `assets` of a package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from string import Template


@cache
def read_asset(package: str, name: str) -> str:
    """The text of the file `assets/name` of a package."""
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")


def fill(template: str, **values: str) -> str:
    """A template with `$name` replaced by the value of that name.

    >>> fill("<h1>$title</h1>", title="Scores")
    '<h1>Scores</h1>'
    """
    return Template(template).substitute(values)
