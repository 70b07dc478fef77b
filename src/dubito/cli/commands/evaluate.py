"""`dubito evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from dubito.cli.commands.fitted import Reading
from dubito.cli.commands.flags import parse
from dubito.cli.commands.scores import finite, scores, show


@dataclass(frozen=True)
class Evaluate(Reading):
    """Score predictions on a table whose targets are known."""

    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def evaluate(args: Sequence[str]) -> None:
    """Score predictions on a table whose targets are known.

    Example: dubito evaluate houses test.csv
    """
    options: Evaluate = parse(Evaluate, args, prog="dubito evaluate", about=evaluate.__doc__ or "")
    fitted = options.open()
    found = fitted.read(options.data, targets=True)
    assert found.y is not None
    values = scores(fitted.predict(found.x), found.y)
    if options.json:
        print(json.dumps({"rows": len(found.x), **finite(values)}, indent=2))
    else:
        show(values, f"{options.data}: {len(found.x)} rows")
