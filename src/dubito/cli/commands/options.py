"""The flags of `dubito fit`: one group for the data, one for each method, one for the network and one for the run.

A flag that is not given has the value of the method's preset (`dubito.inference.presets`), which depends on the number of rows. So
the command line is parsed twice: first to find the data, then with the presets for these data as defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from tyro.conf import FlagCreatePairsOff, arg

from dubito.cli.commands.errors import usage_errors
from dubito.cli.commands.flags import combine, parse
from dubito.cli.commands.network import Network
from dubito.cli.commands.tables import Data
from dubito.inference.method import Method, traits_of
from dubito.inference.methods import MAP
from dubito.inference.presets import Training, assemble, chain, dropout_places, preset, table_training
from dubito.inference.registry import METHODS
from dubito.tensors import randomness
from dubito.tensors.checks import require

MANY = 10**6  # rows of an imaginary table, whose preset gives the defaults in the help texts


@dataclass(frozen=True)
class RunOptions:
    """Prior, batches, early stopping and checkpoints."""

    prior_scale: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: scaled by the inputs of a layer)")
    ] = None
    """Standard deviation of a Normal prior, the same for all weights; a smaller one gives smoother functions."""
    batch_size: int = 32
    """Rows per training step."""
    patience: Annotated[int | None, arg(metavar="EPOCHS", help_behavior_hint="(default: run to the end)")] = None
    """Stop after this many epochs without a better score on the held-out rows, and keep the best weights."""
    seed: int = 0
    """Seed of everything random; the same seed gives the same result."""
    device: str = "cpu"
    """Device to run on: cpu, cuda, cuda:1 ..."""
    checkpoint_every: Annotated[float, arg(metavar="SECONDS")] = 60.0
    """Seconds between checkpoints."""
    resume: Annotated[bool, FlagCreatePairsOff] = False
    """Resume an interrupted run: repeat the same command with this flag."""

    def __post_init__(self):
        require(self.batch_size >= 1, f"--batch-size must be at least 1; got {self.batch_size}")
        require(self.prior_scale is None or self.prior_scale > 0, f"--prior-scale must be positive; got {self.prior_scale}")
        require(self.patience is None or self.patience >= 1, f"--patience must be at least 1; got {self.patience}")


@dataclass(frozen=True)
class StartFlags(MAP):
    """MAP trains the network first, and the method starts from there."""

    @property
    def map(self) -> MAP:
        """The training as a plain MAP."""
        return MAP(**{item.name: getattr(self, item.name) for item in fields(self)})


@dataclass(frozen=True)
class PlainStartFlags(StartFlags):
    """MAP trains the network first, and the method starts from there."""

    # renamed, since the method may have flags --clip and --check
    clip: Annotated[float | None, arg(name="clip-gradient")] = field(default=None, kw_only=True)
    """Largest norm of the gradient of the loss per example."""
    check: Annotated[bool, arg(name="check-training")] = field(default=True, kw_only=True, repr=False)
    """Warn where the training of the start ends on its way."""


class FitOptions(NamedTuple):
    """All that a command line says."""

    data: Data
    methods: tuple[Method, ...]  # outermost first; each wraps the next
    start: MAP | None
    network: Network
    run: RunOptions

    @property
    def configuration(self) -> tuple[Method, Method | None]:
        """The method to fit, and the method that trains the network before it, if any."""
        return assemble(self.methods, self.start)

    @property
    def flags(self) -> set[str]:
        """Names of the fields of all methods."""
        return {item.name for method in (*self.methods, self.start) if method for item in fields(method)}  # pyright: ignore

    def training(self, rows: int, shape: tuple[int, ...], outputs: int) -> Training:
        """The training of the presets for this many rows and inputs of this shape."""
        with randomness.fork_rng(0):
            network = self.network.build(shape, outputs)
        training = table_training(rows, batch_size=self.run.batch_size, prior_scale=self.run.prior_scale)
        return training._replace(dropout_at=dropout_places(network))


def parse_options(
    name: str, args: Sequence[str], *, about: str, training: Training | None = None, command: str = "fit"
) -> FitOptions:
    """Read the command line of `dubito fit NAME`. Flags that are not given have the values of the presets for this training."""
    training = training or table_training(MANY)
    with usage_errors(ValueError):
        methods = chain(name, training)
    start = start_flags(name, training)
    groups: dict[str, Any] = {"data": Data, **methods}
    groups |= {} if start is None else {"start": start}
    values = parse(
        combine({**groups, "network": Network, "run": RunOptions}, prefixed=("start",) if type(start) is StartFlags else ()),
        args,
        prog=f"dubito {command} {name}",
        about=about,
    )
    trained = values.get("start")
    return FitOptions(
        values["data"],
        tuple(values[part] for part in methods),
        None if trained is None else trained.map,
        values["network"],
        values["run"],
    )


def start_flags(name: str, training: Training) -> StartFlags | None:
    """The training that comes before a method: with flags --epochs ... where the method does not train, else --start.epochs ..."""
    innermost = name.split(":")[-1]
    if not preset(innermost).after_map:
        return None
    kind = PlainStartFlags if traits_of(METHODS[innermost]).post_hoc else StartFlags
    return kind(**training.descent)
