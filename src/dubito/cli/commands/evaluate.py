"""`dubito evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from tyro.conf import FlagCreatePairsOff

from dubito.cli.commands import parts
from dubito.cli.commands.errors import UsageError
from dubito.cli.commands.fitted import Reading, opened
from dubito.cli.commands.flags import parse
from dubito.cli.commands.scores import show
from dubito.evaluation.judge import finite, score, standard_errors
from dubito.posteriors.predictive import Predictive, concatenate


@dataclass(frozen=True)
class Evaluate(Reading):
    """The fitted folder, and a table with targets."""

    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def evaluate(args: Sequence[str]) -> None:
    """Score predictions on a table with targets, or on all tables in a folder together.

    Example: dubito evaluate houses test.csv
    """
    options: Evaluate = parse(Evaluate, args, prog="dubito evaluate", about=evaluate.__doc__ or "")
    fitted = options.open()
    p, y = _folder(options) if options.data.is_dir() else fitted.judged(options.data)
    values = score(p, y)
    errors = standard_errors(p, y, list(values))
    if options.json:
        print(json.dumps({"rows": len(y), **finite(values), "standard_errors": finite(errors)}, indent=2))
    else:
        show(values, errors, f"{options.data}: {len(y)} rows", departure=fitted.posterior.label)


def _folder(options: Evaluate) -> tuple[Predictive, Tensor]:
    """The predictive of all rows of all tables, and the targets: scores are of all rows together."""
    found = []
    for _, judged in parts.each(partial(_judged, options), parts.parts(options.data), options.jobs):
        if isinstance(judged, UsageError):
            raise judged
        found.append(judged)
    predictives, targets = zip(*found, strict=True)
    return concatenate(list(predictives)), torch.cat(targets)


def _judged(options: Evaluate, path: Path) -> tuple[Predictive, Tensor]:
    return opened(options).judged(path)
