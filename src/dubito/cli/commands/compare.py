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
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from dubito.cli.commands.errors import UsageError, print_warnings, usage_errors
from dubito.cli.commands.fitted import find_device
from dubito.cli.commands.flags import combine, parse
from dubito.cli.commands.network import Network
from dubito.cli.commands.tables import Data, read_table
from dubito.evaluation.data import table, uci
from dubito.tensors import randomness

METHODS = ("map", "mc_dropout", "ensemble", "laplace", "swag", "ivon")
PAGE = "report.html"


@dataclass(frozen=True)
class What:
    """What to compare, and on what."""

    data: Annotated[str, arg(metavar="NAME|FILE")] = "digits"
    """digits (comes along); mnist, fashion-mnist, cifar10, uci:yacht and its siblings (in the folder DUBITO_DATA); or your own file."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD ...")] = METHODS
    """Registered names, with options after commas: mc_dropout,rate=0.2,epochs=30; ensemble:laplace wraps laplace."""
    seeds: int = 3
    """How many seeds; of published splits, how many of them."""
    unfamiliar: Annotated[tuple[str, ...], arg(metavar="NAME|FILE ...", help_behavior_hint="")] = ()
    """What no method is to be shown: image sets (kmnist, notmnist, ...; resized), or files with the same inputs."""
    corruptions: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Corruptions of test images under which scores are followed, such as gaussian_noise fog; common is all fifteen."""
    severities: Annotated[tuple[int, ...], arg(metavar="1-5 ...")] = (1, 3, 5)
    """How severe these are."""
    detectors: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Further scores of the unfamiliar, fitted on the training data: energy, odin, mahalanobis, neighbours, ..."""
    confidence: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Further scores to find errors by: entropy, mutual_information, variation_ratio, confidnet (which is trained), ..."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: reports/compare-NAME)")] = None
    """The folder of cells and of the report; what is in it with the same settings is not done again."""

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"there is at least one seed; got --seeds {self.seeds}")
        if not self.methods:
            raise ValueError("name at least one method: --methods map ensemble")
        if any(not 1 <= severity <= 5 for severity in self.severities) or not self.severities:
            raise ValueError(f"severities go from 1 to 5; got --severities {' '.join(map(str, self.severities))}")
        if self.detectors and not self.unfamiliar:
            raise ValueError("--detectors tell the unfamiliar: name some with --unfamiliar")


@dataclass(frozen=True)
class Table:
    """Of a CSV or NPZ file of your own."""

    target: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(repeatable)")] = ()
    """The column to predict, or the array of an NPZ file."""
    kind: Literal["auto", "regression", "classification"] = "auto"
    """Detected by default, as by `dubito fit`."""
    held_out: Annotated[float, arg(metavar="SHARE")] = 0.2
    """The share of the rows that is kept for testing; which they are differs with the seed."""


@dataclass(frozen=True)
class Training:
    """The network and its training: the data's own defaults, unless given. Options of a method come before these."""

    hidden: Annotated[tuple[int, ...] | None, arg(metavar="WIDTH ...", help_behavior_hint="")] = None
    """Widths of the hidden layers of an MLP."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """Your own network, called as factory(inputs, outputs), as in `dubito fit`."""
    epochs: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Passes over the data, of methods that descend."""
    learning_rate: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """At its highest."""
    batch_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Examples a step."""
    prior_scale: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Standard deviation of the Normal prior of every weight."""
    train: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """At most so many training examples, drawn by the seed."""
    test: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """At most so many test examples."""
    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1 ..."""
    quiet: Annotated[bool, FlagCreatePairsOff] = False
    """Say nothing but where the report is."""

    def __post_init__(self):
        for name in ("epochs", "batch_size", "train", "test", "learning_rate", "prior_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is positive; got {value}")


def compare(args: Sequence[str]) -> None:
    """Run several methods on a data set with several seeds; write a table, and a page to look at.
      Every cell (a method with a seed) is kept as soon as it is done. The same
      command goes on where a run was left, and does nothing twice.

    Example: dubito compare --methods map mc_dropout,rate=0.2 ensemble --seeds 5
    """
    groups = {"what": What, "table": Table, "training": Training}
    parts = parse(combine(groups), args, prog="dubito compare", about=compare.__doc__ or "")
    what, own, training = parts["what"], parts["table"], parts["training"]
    from dubito.cli.compare import Grid, entry, page  # matplotlib and scikit-learn take a while to load
    from dubito.report import check_writable

    device = find_device(training.device)
    with usage_errors(ValueError, FileNotFoundError):
        problem = _problem(what, own, training)
        entries = tuple(entry(spec, problem) for spec in what.methods)
        folder = what.out or Path("reports", f"compare-{re.sub(r'[^A-Za-z0-9]+', '-', what.data).strip('-')}")
        corruptions = _corruptions(what, problem)
        grid = Grid(
            problem,
            entries,
            tuple(range(what.seeds)),
            folder,
            corruptions=corruptions,
            severities=tuple(sorted(set(what.severities))),
            detectors=tuple(dict.fromkeys(name.replace("-", "_") for name in what.detectors)),
            confidence=tuple(dict.fromkeys(name.replace("-", "_") for name in what.confidence)),
            device=None if device.type == "cpu" else device,
            code=_code(training.network),
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder: give another name for --out")
    console = Console()
    path = check_writable(folder / PAGE)

    def say(words: str) -> None:
        # a bar on the terminal says as much, and lines would break it
        if not training.quiet and not sys.stderr.isatty():
            console.print(Text(words, style="dim"))

    with usage_errors(FileExistsError), print_warnings():
        outcome = grid.run(say=say)
    if not outcome.cells:
        raise KeyboardInterrupt
    report = page(grid, outcome, command=lambda spec: _command(parts, spec))
    report.write(path)
    if not training.quiet:  # the main table and what failed; the page has all
        first = report.sections[0]
        shown = tuple(found for found in first.tables if found.title != "More scores")
        replace(report, sections=(replace(first, tables=shown),)).print(console)
    console.print(Text(f"The report: {path} (its numbers: {path.with_suffix('.json')}; the cells: {folder / 'cells'})"))
    if outcome.interrupted:
        raise KeyboardInterrupt
    failed = [cell for cell in outcome.cells if cell.error is not None]
    if len(failed) == len(outcome.cells):
        raise UsageError(f"every cell failed; {failed[0].key.label}, seed {failed[0].key.seed}: {failed[0].error}")


def _problem(what: What, own: Table, training: Training) -> Any:
    """The data set with the network and training that were asked for."""
    from dubito.evaluation.problems import of_table, problem

    path = Path(what.data)
    stems = [Path(name).stem for name in what.unfamiliar]
    twice = [stem for stem in stems if stems.count(stem) > 1]
    if twice:
        raise UsageError(f"--unfamiliar has two sets called {twice[0]}: give one file another name, or leave it out")
    if path.suffix.lower() in (".csv", ".npz"):
        with redirect_stdout(None) if training.quiet else nullcontext():  # it says on screen what it found
            found, _, _ = read_table(Data(path, own.target, Path(), kind=own.kind, held_out=own.held_out))
        strange: dict[str, Tensor] = {
            Path(name).stem: table(name, (), features=found.features or None, fill=found.fill, dtype=found.x.dtype).x
            for name in what.unfamiliar
        }
        wrong = [name for name, x in strange.items() if x.shape[1:] != found.x.shape[1:]]
        if wrong:
            raise UsageError(f"{wrong[0]}: its inputs have another shape than those of {path}")
        given = of_table(path.name, found, held_out=own.held_out, unfamiliar=strange)
    elif own != Table():
        raise UsageError("--target, --kind and --held-out are for CSV and NPZ files: leave them out, or give --data FILE")
    else:
        files = [name for name in what.unfamiliar if Path(name).suffix.lower() == ".npz"]
        given = problem(what.data, unfamiliar=tuple(name for name in what.unfamiliar if name not in files))
        if files:
            given = _with_files(given, files)
    changed = {
        name: value for name in ("epochs", "learning_rate", "batch_size", "prior_scale") if (value := getattr(training, name))
    }
    given = replace(given, training=given.training._replace(**changed)).limited(training.train, training.test)
    if training.network is not None or training.hidden is not None:
        if training.network is not None and training.hidden is not None:
            raise UsageError("--network takes the place of the MLP: leave out --hidden")
        network = Network(network=training.network) if training.network else Network(hidden=training.hidden or ())
        given = replace(given, build=network.build, hidden=training.hidden)
        with randomness.forked(0):  # which refuses early what cannot be built, and imports it, so that its source can be read
            _try(network.build, given, training.network or "")
    return given


def _try(build: Any, given: Any, name: str) -> None:
    """Refuse early a network that cannot be built, or does not run on these inputs."""
    x, outputs = given.part(0).x_train[:2], len(given.outputs)
    network = build(tuple(x.shape[1:]), outputs).eval()
    with torch.no_grad():
        try:
            found = network(x)
        except Exception as error:
            words = " ".join(str(error).split())
            raise UsageError(
                f"--network {name}: running it on {list(x.shape)} inputs failed: {type(error).__name__}: {words}"
            ) from error
    if not isinstance(found, Tensor) or tuple(found.shape) != (len(x), outputs):
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"--network {name}: of {list(x.shape)} inputs it makes {shape}, where {[len(x), outputs]} is needed")


def _with_files(given: Any, files: Sequence[str]) -> Any:
    """The same problem with further unfamiliar inputs, of NPZ files."""
    from dubito.evaluation.problems import standardized

    strange = {Path(name).stem: table(name, ()).x for name in files}
    shape = tuple(given.part(0).x_test.shape[1:])
    for name, x in strange.items():
        if tuple(x.shape[1:]) != shape:
            raise UsageError(f"{name}: an input has the shape {list(x.shape[1:])}, where {list(shape)} is needed")
    inner = given.part
    if given.name.startswith("uci:"):  # whose inputs are standardised, so these must be as well
        raw = given.name.removeprefix("uci:")
        return replace(given, part=lru_cache(maxsize=32)(lambda seed: standardized(uci(raw, seed), strange)))
    return replace(given, part=lambda seed: (part := inner(seed))._replace(unfamiliar={**part.unfamiliar, **strange}))


def _corruptions(what: What, problem: Any) -> tuple[str, ...]:
    if not what.corruptions:
        return ()
    from dubito.evaluation.shift import COMMON
    from dubito.evaluation.shift.corruptions import check

    names = tuple(dict.fromkeys(n for name in what.corruptions for n in (COMMON if name in ("common", "all") else (name,))))
    x = problem.part(0).x_test
    if problem.kind != "classification" or x.ndim != 4:
        raise UsageError("--corruptions are for images: leave it out")
    for name in names:
        check(x[:1], name, 1)
    return names


def _code(network: str | None) -> str:
    """A hash of the source of the user's own network, once it was imported: what changes in it makes new cells."""
    module = None if network is None else sys.modules.get(network.partition(":")[0])
    try:
        return "" if module is None else hashlib.blake2b(inspect.getsource(module).encode(), digest_size=8).hexdigest()
    except (OSError, TypeError):
        return ""


def _command(parts: Mapping[str, Any], spec: str) -> str:
    """The command line of one row: all flags that are not at their defaults, and this method alone."""
    words = ["dubito", "compare"]
    for part in (parts["what"], parts["table"], parts["training"]):
        for item in fields(part):
            value, flag = getattr(part, item.name), f"--{item.name.replace('_', '-')}"
            if item.name in ("methods", "out", "quiet") or (value == item.default and item.name not in ("data", "seeds")):
                continue
            many = list(value) if isinstance(value, tuple) else [value]
            if item.name == "target":  # given once for each
                words += [word for one in many for word in (flag, str(one))]
            else:
                words += [flag, *map(str, many)]
    return shlex.join([*words, "--methods", spec])
