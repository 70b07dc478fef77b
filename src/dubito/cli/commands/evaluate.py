"""`dubito evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from dubito.cli.commands.fitted import Reading
from dubito.cli.commands.flags import parse
from dubito.cli.commands.scores import show
from dubito.evaluation.judge import finite, score, standard_errors


@dataclass(frozen=True)
class Evaluate(Reading):
    """The fitted folder, and a table with targets."""

    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def evaluate(args: Sequence[str]) -> None:
    """Score predictions on a table with targets.

    Example: dubito evaluate houses test.csv
    """
    options: Evaluate = parse(Evaluate, args, prog="dubito evaluate", about=evaluate.__doc__ or "")
    fitted = options.open()
    p, y = fitted.judged(options.data)
    values = score(p, y)
    errors = standard_errors(p, y, list(values))
    if options.json:
        print(json.dumps({"rows": len(y), **finite(values), "standard_errors": finite(errors)}, indent=2))
    else:
        show(values, errors, f"{options.data}: {len(y)} rows", departure=fitted.posterior.label)
