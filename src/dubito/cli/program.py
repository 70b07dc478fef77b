"""The command line: `dubito demo`, `fit`, `predict`, `evaluate`, `diagnose`, `compare` and `label`.

Input that cannot be used gives one line on standard error and exit code 2. A traceback is a bug.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import dubito
from dubito.cli.commands.compare import compare
from dubito.cli.commands.demo import demo
from dubito.cli.commands.diagnose import diagnose
from dubito.cli.commands.errors import UsageError, error_text
from dubito.cli.commands.evaluate import evaluate
from dubito.cli.commands.fit import fit
from dubito.cli.commands.fit_table import fit_table
from dubito.cli.commands.flags import headline
from dubito.cli.commands.label import label
from dubito.cli.commands.predict import predict
from dubito.evaluation.data.csv_table import is_table
from dubito.inference.registry import METHODS
from dubito.tensors.checks import suggestion
from dubito.tensors.processes import ProcessError

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "fit": fit,
    "predict": predict,
    "evaluate": evaluate,
    "diagnose": diagnose,
    "compare": compare,
    "label": label,
}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk or quota is not a bug

EXAMPLES = """\
dubito fit houses.csv --target price
dubito predict houses new.csv --out predictions.csv
dubito evaluate houses test.csv
dubito compare --data houses.csv --target price --methods map ensemble laplace"""

FIT_EXAMPLES = """\
dubito fit houses.csv --target price
dubito fit map houses.csv --target price --out houses --epochs 200
dubito fit mc_dropout iris.csv --target species --out iris --dropout 0.1
dubito fit laplace houses.csv --target price --out houses --epochs 200
dubito fit ensemble:mc_dropout data.npz --target y --out ours --dropout 0.1
dubito fit map data.npz --target y --out ours --network mynets:make"""

FIT = """\
Fit a table, and save what was fitted in a folder. Without a method, calibrated predictions need no setting: \
dubito fit TABLE --target COLUMN; its flags: \
dubito fit TABLE --help. Or fit a network by one of these methods, each with flags of its own: \
dubito fit map --help. An ensemble has members fitted by map; ensemble:mc_dropout has members fitted by mc_dropout. \
Methods that start from a trained network (laplace, neural_linear, swag, ivon, sghmc, variational) run map first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(args)
        sys.stdout.flush()
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except (UsageError, ProcessError) as refusal:
        return _print_error(str(refusal))
    except BrokenPipeError:  # as in `dubito predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports an error when it flushes at exit
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        return _print_error(error_text(error))
    except KeyboardInterrupt as end:
        print(": ".join(["Interrupted", *map(str, end.args)]), file=sys.stderr)
        return 130
    return 0


def _print_error(message: str) -> int:
    print(f"dubito: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _dispatch(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        about = "Bayesian inference for PyTorch networks: fit, predict with uncertainty, compare methods, and label data."
        _overview("dubito [-h] [--version] COMMAND ...", about, "commands", COMMANDS, EXAMPLES)
    elif args[0] == "--version":
        print(f"dubito {dubito.__version__}")
    elif args[0] not in COMMANDS:
        raise UsageError(f"no command is called {args[0]!r}; {suggestion(args[0], COMMANDS)}")
    elif args[0] == "fit":
        _fit(args[1:])
    elif _in_one_process():
        COMMANDS[args[0]](args[1:])


def _in_one_process() -> bool:
    """Whether this is the process that runs a command which does not divide its work: under torchrun, the first alone."""
    return os.environ.pop("RANK", "0") == "0"  # without it no fit of the command waits for the others


def _fit(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        _overview("dubito fit [METHOD] TABLE --target COLUMN [--out FOLDER] [OPTIONS]", FIT, "methods", METHODS, FIT_EXAMPLES)
        return
    name = args[0].replace("-", "_")
    unknown = [part for part in name.split(":") if part not in METHODS]
    if not unknown:
        fit(name, args[1:])
    elif args[0].startswith("-") or os.path.isfile(args[0]) or is_table(Path(args[0])):
        if _in_one_process():
            fit_table(args)
    else:
        raise UsageError(
            f"no method is called {unknown[0]!r}; {suggestion(unknown[0], METHODS)}; nor is there a file of that name"
        )


def _overview(usage: str, about: str, title: str, parts: Mapping[str, Callable[..., object]], examples: str) -> None:
    """Print a help page that lists commands or methods, in the style of the other pages."""
    rows = Table.grid(padding=(0, 2))
    for name, part in parts.items():
        rows.add_row(Text(name, style="bold"), headline(part))
    Console(highlight=False).print(
        Text(f"usage: {usage}\n"),
        Text(f"{about}\n"),
        Panel(Group(rows), title=title, title_align="left", box=box.ROUNDED, expand=False),
        Panel(Text(examples), title="examples", title_align="left", box=box.ROUNDED, expand=False),
        sep="\n",
    )


if __name__ == "__main__":  # or `python -m dubito.cli` would do nothing
    sys.exit(main())
