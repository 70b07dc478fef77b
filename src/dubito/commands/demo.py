"""`dubito demo`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from dubito.commands.flags import arguments_of, parse
from dubito.commands.refusal import refusing


def demo(args: Sequence[str]) -> None:
    """Train on real digits by every method, compare them in a table, and write a report to look at."""
    from dubito.demo import demo as run  # matplotlib and scikit-learn take a while to load

    arguments = arguments_of(inspect.signature(run, eval_str=True), run.__doc__)
    options = parse(arguments, args, prog="dubito demo", about=demo.__doc__ or "")
    with refusing(ValueError):
        run(**options)
