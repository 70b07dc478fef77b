"""`dubito label`."""

from __future__ import annotations

import re
import threading
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, arg

from dubito.cli.commands.errors import UsageError, check_not_overwritten, print_warnings, usage_errors
from dubito.cli.commands.fitted import find_device
from dubito.cli.commands.flags import combine, parse
from dubito.cli.commands.network import Network
from dubito.tensors.checks import require


@dataclass(frozen=True)
class LabelOptions:
    """The inputs to label, and the classes."""

    data: Annotated[str, arg(metavar="NAME|FILE")] = "digits"
    """digits (bundled); mnist, fashion-mnist, cifar10, polarity (in the folder DUBITO_DATA); or your own NPZ, CSV or TXT file."""
    classes: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Names of the classes, for your own file; by default those of the held-out part."""
    held_out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Labelled inputs of the same kind, to score the model; an NPZ file may contain them as x_test and y_test."""
    target: Annotated[str, arg(metavar="COLUMN")] = "y"
    """Column or array of the classes in the held-out file; in a TXT file, the class is the first word of a line."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: labels/NAME)")] = None
    """The folder of the answers; a session in it is continued."""


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how it chooses inputs."""

    acquisition: str = "bald"
    """How inputs are chosen: bald, entropy, margin, variation_ratio, batchbald, epig, random, ..."""
    batch: int = 20
    """Inputs chosen at a time; the model is fitted again when half of them are answered."""
    draws: int = 30
    """Posterior draws (dropout masks) used to choose inputs."""
    rate: float = 0.25
    """Dropout rate."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """Your own network, called as factory(inputs, outputs), as in `dubito fit`; every fit starts from its weights."""
    pool: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """Largest number of inputs to label."""
    test: int = 2000
    """Largest number of held-out inputs."""
    most: int = 5000
    """Largest number of random candidates that are considered for each batch."""
    seed: int = 0
    """Seed of the first, random inputs and of all fits."""
    device: str = "cpu"
    """Device to run on: cpu, cuda, cuda:1 ..."""

    def __post_init__(self):
        for name in ("pool", "test", "most", "draws"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name} must be at least 1; got {value}")


@dataclass(frozen=True)
class PageOptions:
    """The page in the browser."""

    port: Annotated[int, arg(metavar="INT", help_behavior_hint="(default: a free port)")] = 0
    """Port on 127.0.0.1; the page cannot be reached from other machines."""
    no_browser: Annotated[bool, FlagCreatePairsOff] = False
    """Print the address, and do not open a browser."""

    def __post_init__(self):
        require(0 <= self.port <= 65535, f"--port must lie between 0 and 65535; got {self.port}")


def label(args: Sequence[str]) -> None:
    """Label the inputs that the model chooses, on a web page, while it is fitted again and again.

      Each answer takes one key and is saved at once. The same command continues
      an earlier session. The labels are in labels.csv in the folder.

    Example: dubito label --data photos.npz --classes cat dog
    """
    parts = parse(
        combine({"inputs": LabelOptions, "model": ModelOptions, "page": PageOptions}),
        args,
        prog="dubito label",
        about=label.__doc__ or "",
    )
    options, model, page = parts["inputs"], parts["model"], parts["page"]
    from dubito.tensors import randomness, store
    from dubito.web.labelling import Server, Session, task
    from dubito.web.labelling.session import LABELS

    device = find_device(model.device)
    with usage_errors(ValueError, FileNotFoundError):
        given = task(
            options.data,
            classes=options.classes,
            held_out=options.held_out,
            target=options.target,
            pool=model.pool,
            test=model.test,
        )
        own: Any = None
        if model.network is not None:
            with randomness.fork_rng(model.seed):
                own = Network(network=model.network).build(tuple(given.pool.shape[1:]), len(given.classes))
        folder = options.out or Path("labels", re.sub(r"[^A-Za-z0-9]+", "-", Path(options.data).name).strip("-"))
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, not a folder: give another name for --out")
        check_not_overwritten(folder / LABELS, Path(options.data), options.held_out)
    with usage_errors(ValueError, OSError):  # the folder belongs to another session, is in use, or cannot be written
        session = Session(
            given, folder, acquisition=model.acquisition, batch=model.batch, draws=model.draws, most=model.most,
            rate=model.rate, network=own, device=device, seed=model.seed,
        )  # fmt: skip
    try:
        server = Server(session, port=page.port)
    except OSError as error:
        session.close()
        raise UsageError(f"--port {page.port}: {error.strerror}; leave it out to use a free port") from None
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"Label at {server.address}"))
    console.print(Text(f"Answers are saved in {folder}. To stop, press Esc on the page, or Ctrl+C here.", style="dim"))
    console.file.flush()  # also into a pipe
    if not page.no_browser:
        # in a thread, since a browser in the terminal returns only when it is closed
        threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
    with usage_errors(store.WriteError):
        serve(server, session, console)
    labels = sum(label is not None for label in session.journal.standing.values())
    console.print(Text(f"{labels} label{'s' * (labels != 1)}: {folder / 'labels.csv'}. The same command continues."))


def serve(server: Any, session: Any, console: Console) -> None:
    """Serve the page until it is stopped, here or there; then wait for a running fit."""
    with print_warnings():
        session.start()
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()
            if session.busy:
                console.print(Text("Waiting for the running fit; all answers are saved. Ctrl+C quits at once.", style="dim"))
            session.close()
