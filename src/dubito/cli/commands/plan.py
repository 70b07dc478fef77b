"""`dubito plan`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from dubito.cli.commands.errors import UsageError, usage_errors
from dubito.cli.commands.fit import Fitting, prepare
from dubito.cli.commands.fitted import find_device
from dubito.cli.commands.options import parse_options
from dubito.inference.plan import plan as plan_fit
from dubito.inference.registry import METHODS
from dubito.tensors.checks import require, suggestion

UNUSED = ["--out", "unused"]


class _Parser(ArgumentParser):
    """Refuses as the other commands do."""

    def error(self, message: str) -> NoReturn:
        """In one line."""
        raise UsageError(message)


def plan(args: Sequence[str]) -> None:
    """Say what `dubito fit` would need: memory, time, and bytes to exchange.

      Write the command of the fit with plan in the place of fit. A step is
      made and timed, and nothing is written. --processes K: what each of K
      processes needs that share the fit, under torchrun.

    Example: dubito plan ivon houses.csv --target price --processes 4
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1)
    found, rest = parser.parse_known_args(list(args))
    name = rest[0].replace("-", "_") if rest else ""
    unknown = [part for part in name.split(":") if part not in METHODS]
    if unknown and rest[:1] not in (["-h"], ["--help"]):
        raise UsageError(
            f"dubito plan METHOD TABLE --target COLUMN: no method is called {unknown[0]!r}; {suggestion(name, METHODS)}"
        )
    if unknown:
        name, rest = "map", ["map", "--help"]
    rest = [*rest[1:], *([] if any(part.startswith("--out") for part in rest) else UNUSED)]
    options = parse_options(name, rest, about=plan.__doc__ or "", command="plan")
    device = find_device(options.run.device)
    made = prepare(name, rest, options, command="plan")
    made.model.network.to(device)
    fitting = Fitting(made, device)
    size = min(made.options.run.batch_size, len(made.rows.train))
    batch = tuple(part[:size].to(device) for part in fitting.train)
    method, first = made.options.configuration
    with usage_errors(ValueError):
        require(found.processes >= 1, f"--processes must be at least 1; got {found.processes}")
        for stage in (method,) if first is None else (first, method):
            print(plan_fit(made.model, stage, batch, n_data=len(made.rows.train), processes=found.processes))
