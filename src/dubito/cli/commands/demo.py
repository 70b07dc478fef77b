"""`dubito demo`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from dubito.cli.commands.errors import usage_errors
from dubito.cli.commands.flags import arguments_of, parse


def demo(args: Sequence[str]) -> None:
    """Train on real digits by every method, compare them in a table, and write a report to look at."""
    from dubito.cli.demo import demo as run  # matplotlib and scikit-learn take a while to load

    arguments = arguments_of(inspect.signature(run, eval_str=True), run.__doc__)
    options = parse(arguments, args, prog="dubito demo", about=demo.__doc__ or "")
    with usage_errors(ValueError):
        run(**options)
