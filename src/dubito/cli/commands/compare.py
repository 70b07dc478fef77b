"""`dubito compare`."""

from __future__ import annotations

import hashlib
import inspect
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from dubito.cli.commands.errors import UsageError, print_warnings, usage_errors
from dubito.cli.commands.fitted import find_device
from dubito.cli.commands.flags import combine, parse
from dubito.cli.commands.network import Network
from dubito.cli.commands.parts import lost_processes
from dubito.cli.commands.tables import Data, read_table
from dubito.evaluation.data import table, uci
from dubito.tensors import randomness
from dubito.tensors.checks import require

if TYPE_CHECKING:
    from dubito.cli.compare import Grid, Outcome
    from dubito.evaluation.problems import Problem
    from dubito.report import Report

METHODS = ("map", "mc_dropout", "ensemble", "laplace", "swag", "ivon")
PAGE = "report.html"
FILES = (".csv", ".npz")


@dataclass(frozen=True)
class CompareOptions:
    """The data, the methods and the scores."""

    data: Annotated[str, arg(metavar="NAME|FILE")] = "digits"
    """digits (bundled); mnist, fashion-mnist, cifar10, uci:yacht and the like (in the folder DUBITO_DATA); or your own file."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD ...")] = METHODS
    """Registered names, with options after commas: mc_dropout,rate=0.2,epochs=30. ensemble:laplace is an ensemble of laplace.
    map+temperature adds a temperature (or a factor of the noise) tuned on held-out training rows. table is `dubito fit TABLE`."""
    seeds: int = 3
    """Number of seeds; for data with published splits, number of splits."""
    unfamiliar: Annotated[tuple[str, ...], arg(metavar="NAME|FILE ...", help_behavior_hint="")] = ()
    """Inputs unlike the training data, to be detected: image sets (kmnist, notmnist, ...; resized), or files with such inputs."""
    corruptions: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Corruptions of the test images under which to score, such as gaussian_noise fog; common is all fifteen."""
    severities: Annotated[tuple[int, ...], arg(metavar="1-5 ...")] = (1, 3, 5)
    """Severities of the corruptions."""
    detectors: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Detectors of unfamiliar inputs, fitted on the training data: energy, odin, mahalanobis, neighbours, ..."""
    confidence: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Further scores that rank errors: entropy, mutual_information, variation_ratio, confidnet (which is trained), ..."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: reports/compare-NAME)")] = None
    """The folder to write; results in it that were made with the same settings are reused."""
    jobs: Annotated[int, arg(metavar="K")] = 1
    """Processes of this machine that share the fits; the seconds in the table then hold while all are busy."""

    def __post_init__(self):
        require(self.jobs >= 1, f"--jobs must be at least 1; got {self.jobs}")
        require(self.seeds >= 1, f"--seeds must be at least 1; got {self.seeds}")
        require(bool(self.methods), "--methods needs at least one method, as in --methods map ensemble")
        allowed = bool(self.severities) and all(1 <= severity <= 5 for severity in self.severities)
        require(allowed, f"--severities must lie between 1 and 5; got {' '.join(map(str, self.severities)) or 'none'}")
        require(not self.detectors or bool(self.unfamiliar), "--detectors needs --unfamiliar NAME or FILE")

    @property
    def folder(self) -> Path:
        """The folder to write."""
        return self.out or Path("reports", f"compare-{re.sub(r'[^A-Za-z0-9]+', '-', self.data).strip('-')}")


@dataclass(frozen=True)
class TableOptions:
    """For your own CSV or NPZ file."""

    target: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(repeatable)")] = ()
    """The column to predict, or the array of an NPZ file."""
    kind: Literal["auto", "regression", "classification"] = "auto"
    """Detected by default, as in `dubito fit`."""
    held_out: Annotated[float, arg(metavar="SHARE")] = 0.2
    """Share of the rows that is held out for testing; each seed holds out other rows."""


@dataclass(frozen=True)
class TrainingOptions:
    """The network and its training; defaults depend on the data. Options of a method override these."""

    hidden: Annotated[tuple[int, ...] | None, arg(metavar="WIDTH ...", help_behavior_hint="")] = None
    """Widths of the hidden layers of an MLP."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """Your own network, called as factory(inputs, outputs), as in `dubito fit`."""
    epochs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Passes over the data, for methods that use gradient descent."""
    learning_rate: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Highest learning rate of the schedule."""
    batch_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Examples per training step."""
    prior_scale: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Standard deviation of a Normal prior, the same for all weights; by default it is scaled by the inputs of a layer."""
    train: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Largest number of training examples; they are drawn by the seed."""
    test: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Largest number of test examples."""
    device: str = "cpu"
    """Device to run on: cpu, cuda, cuda:1 ..."""
    quiet: Annotated[bool, FlagCreatePairsOff] = False
    """Print only where the report is."""

    def __post_init__(self):
        for name in ("epochs", "batch_size", "train", "test", "learning_rate", "prior_scale"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name.replace('_', '-')} must be positive; got {value}")


def compare(args: Sequence[str]) -> None:
    """Run several methods on a data set with several seeds; write a table and a web page.

      Each result (a method with a seed) is saved as soon as it is done. The same
      command continues an interrupted run, and repeats nothing.

    Example: dubito compare --methods map mc_dropout,rate=0.2 ensemble --seeds 5
    """
    groups = {"comparison": CompareOptions, "table": TableOptions, "training": TrainingOptions}
    parts = parse(combine(groups), args, prog="dubito compare", about=compare.__doc__ or "")
    options, training = parts["comparison"], parts["training"]
    from dubito.cli.compare import page  # matplotlib and scikit-learn take a while to load
    from dubito.report import check_writable

    with usage_errors(ValueError, FileNotFoundError):
        grid = make_grid(options, parts["table"], training)
    if grid.folder.exists() and not grid.folder.is_dir():
        raise UsageError(f"{grid.folder} is a file, not a folder: give another name for --out")
    console = Console()
    path = check_writable(grid.folder / PAGE)

    def say(text: str) -> None:
        """Print a line where there is no progress bar, which lines would break."""
        if not training.quiet and not sys.stderr.isatty():
            console.print(Text(text, style="dim"))

    again = partial(make_grid, options, parts["table"], replace(training, quiet=True))
    with usage_errors(FileExistsError), lost_processes(), print_warnings():
        outcome = grid.run(say=say, jobs=options.jobs, remake=again)
    if not outcome.results:
        raise KeyboardInterrupt
    report = page(grid, outcome, command=lambda spec: command_line(parts, spec))
    report.write(path)
    if not training.quiet:
        print_main_table(report, console)
    console.print(Text(f"Report: {path} (numbers: {path.with_suffix('.json')}; results: {grid.folder / 'cells'})"))
    check_outcome(outcome)


def make_grid(options: CompareOptions, own: TableOptions, training: TrainingOptions) -> Grid:
    """The grid of methods and seeds that was asked for."""
    from dubito.cli.compare import Grid, parse_spec

    device = find_device(training.device)
    problem = make_problem(options, own, training)
    return Grid(
        problem,
        tuple(parse_spec(text, problem) for text in options.methods),
        tuple(range(options.seeds)),
        options.folder,
        corruptions=_corruptions(options, problem),
        severities=tuple(sorted(set(options.severities))),
        detectors=tuple(dict.fromkeys(name.replace("-", "_") for name in options.detectors)),
        confidence=tuple(dict.fromkeys(name.replace("-", "_") for name in options.confidence)),
        device=None if device.type == "cpu" else device,
        code=_source_hash(training.network),
    )


def print_main_table(report: Report, console: Console) -> None:
    """Print the main table and the failures; the page has everything."""
    first = report.sections[0]
    tables = tuple(found for found in first.tables if found.title != "More scores")
    replace(report, sections=(replace(first, tables=tables),)).print(console)


def check_outcome(outcome: Outcome) -> None:
    """Exit accordingly if the run was interrupted, or if nothing succeeded."""
    if outcome.interrupted:
        raise KeyboardInterrupt
    failed = [result for result in outcome.results if result.error is not None]
    if len(failed) == len(outcome.results):
        first = failed[0]
        raise UsageError(f"every fit failed; {first.key.label}, seed {first.key.seed}: {first.error}")


def make_problem(options: CompareOptions, own: TableOptions, training: TrainingOptions) -> Problem:
    """The data set with the network and training that were asked for."""
    stems = [Path(name).stem for name in options.unfamiliar]
    twice = [stem for stem in stems if stems.count(stem) > 1]
    if twice:
        raise UsageError(f"--unfamiliar has two sets called {twice[0]}: rename one file, or leave it out")
    if Path(options.data).suffix.lower() in FILES:
        problem = _own_table(options, own, training)
    elif Path(options.data).exists():
        raise UsageError(f"{options.data}: only .csv and .npz files can be read")
    elif own != TableOptions():
        raise UsageError("--target, --kind and --held-out are for CSV and NPZ files: leave them out, or give --data FILE")
    else:
        problem = _named_problem(options)
    names = ("epochs", "learning_rate", "batch_size", "prior_scale")
    changes = {name: value for name in names if (value := getattr(training, name))}
    problem = replace(problem, training=problem.training._replace(**changes)).limited(training.train, training.test)
    return _with_network(problem, training)


def _own_table(options: CompareOptions, own: TableOptions, training: TrainingOptions) -> Problem:
    from dubito.apps.tables.frames import as_frame
    from dubito.cli.compare.recipe import joined
    from dubito.evaluation.problems import Columns, of_table

    path = Path(options.data)
    with redirect_stdout(None) if training.quiet else nullcontext():
        read, _, _ = read_table(Data(path, own.target, Path(), kind=own.kind, held_out=own.held_out))
    unfamiliar = {
        Path(name).stem: table(name, (), features=read.features or None, fill=read.fill, dtype=read.x.dtype).x
        for name in options.unfamiliar
    }
    _check_shapes(unfamiliar, tuple(read.x.shape[1:]))

    @lru_cache(maxsize=1)
    def columns() -> Columns:
        """The table as it is in the file, and below it the unfamiliar ones."""
        first = as_frame(options.data)
        return Columns(joined([first, *(as_frame(name, first.commas) for name in options.unfamiliar)]), own.target)

    more = {"batch_size": training.batch_size or 32, "columns": columns}
    return of_table(path.name, read, held_out=own.held_out, unfamiliar=unfamiliar, **more)


def _named_problem(options: CompareOptions) -> Problem:
    """A data set by its name, with unfamiliar inputs of other data sets and of NPZ files."""
    from dubito.evaluation.problems import problem, standardized

    files = [name for name in options.unfamiliar if Path(name).suffix.lower() == ".npz"]
    named = problem(options.data, unfamiliar=tuple(name for name in options.unfamiliar if name not in files))
    if not files:
        return named
    unfamiliar = {Path(name).stem: table(name, ()).x for name in files}
    _check_shapes(unfamiliar, tuple(named.split(0).x_test.shape[1:]))
    inner = named.split
    if named.name.startswith("uci:"):  # whose inputs are standardized, so these must be as well
        raw = named.name.removeprefix("uci:")
        return replace(named, split=lru_cache(maxsize=32)(lambda seed: standardized(uci(raw, seed), unfamiliar)))
    return replace(named, split=lambda seed: (split := inner(seed))._replace(unfamiliar={**split.unfamiliar, **unfamiliar}))


def _check_shapes(unfamiliar: Mapping[str, Tensor], shape: tuple[int, ...]) -> None:
    for name, x in unfamiliar.items():
        if tuple(x.shape[1:]) != shape:
            raise UsageError(f"{name}: inputs must have the shape {list(shape)}; got {list(x.shape[1:])}")


def _with_network(problem: Problem, training: TrainingOptions) -> Problem:
    """The problem with the user's network, or an MLP with these widths."""
    if training.network is None and training.hidden is None:
        return problem
    if training.network is not None and training.hidden is not None:
        raise UsageError("--network replaces the MLP: leave out --hidden")
    network = Network(network=training.network) if training.network else Network(hidden=training.hidden or ())
    problem = replace(problem, build=network.build, hidden=training.hidden)
    with randomness.fork_rng(0):  # also imports the user's module, so that its source can be hashed
        _check_network(problem, training.network or "")
    return problem


def _check_network(problem: Problem, name: str) -> None:
    """Report early a network that cannot be built, or does not run on these inputs."""
    x, outputs = problem.split(0).x_train[:2], len(problem.outputs)
    network = problem.build(tuple(x.shape[1:]), outputs).eval()
    try:
        with torch.no_grad():
            f = network(x)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UsageError(
            f"--network {name}: the network fails on {list(x.shape)} inputs: {type(error).__name__}: {text}"
        ) from error
    if not isinstance(f, Tensor) or tuple(f.shape) != (len(x), outputs):
        shape = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise UsageError(f"--network {name}: the output for {list(x.shape)} inputs is {shape}; needed {[len(x), outputs]}")


def _corruptions(options: CompareOptions, problem: Problem) -> tuple[str, ...]:
    """The names of the corruptions, checked against the images."""
    if not options.corruptions:
        return ()
    from dubito.evaluation.shift import COMMON
    from dubito.evaluation.shift.corruptions import check

    names = dict.fromkeys(n for name in options.corruptions for n in (COMMON if name in ("common", "all") else (name,)))
    x = problem.split(0).x_test
    if problem.kind != "classification" or x.ndim != 4:
        raise UsageError("--corruptions needs a classification of images: leave it out")
    for name in names:
        check(x[:1], name, 1)
    return tuple(names)


def _source_hash(network: str | None) -> str:
    """A hash of the source of the user's network, once it is imported: when the source changes, results are made again."""
    module = None if network is None else sys.modules.get(network.partition(":")[0])
    try:
        return "" if module is None else hashlib.blake2b(inspect.getsource(module).encode(), digest_size=8).hexdigest()
    except (OSError, TypeError):
        return ""


def command_line(parts: Mapping[str, Any], spec: str) -> str:
    """The command line of one row: all flags that are not at their defaults, and this method alone."""
    words = ["dubito", "compare"]
    for part in parts.values():
        for item in fields(part):
            value = getattr(part, item.name)
            default = value == item.default and item.name not in ("data", "seeds")
            if item.name not in ("methods", "out", "jobs", "quiet") and not default:
                words += _flag(item.name, value)
    return shlex.join([*words, "--methods", spec])


def _flag(name: str, value: Any) -> list[str]:
    """A flag with its values; --target is repeated for each."""
    flag, values = f"--{name.replace('_', '-')}", [str(one) for one in (value if isinstance(value, tuple) else (value,))]
    return [word for one in values for word in (flag, one)] if name == "target" else [flag, *values]
