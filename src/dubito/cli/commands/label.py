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


@dataclass(frozen=True)
class What:
    """What to label."""

    data: Annotated[str, arg(metavar="NAME|FILE")] = "digits"
    """digits (comes along); mnist, fashion-mnist, cifar10, polarity (in the folder DUBITO_DATA); or your own NPZ, CSV or TXT file."""
    classes: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """The names of the classes, for a file of your own; those of the held-out part by default."""
    held_out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Labelled inputs of the same kind, to see how good the model is; an NPZ file may hold them itself, as x_test and y_test."""
    target: Annotated[str, arg(metavar="COLUMN")] = "y"
    """The column or array of the held-out file that has the classes; in a TXT file they come first in each line."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: labels/NAME)")] = None
    """Where the answers are kept; a session that is there goes on."""


@dataclass(frozen=True)
class Asking:
    """How the model learns, and what it asks for."""

    acquisition: str = "bald"
    """What to ask by: bald, entropy, margin, variation_ratio, batchbald, epig, random, ..."""
    batch: int = 20
    """Inputs asked for at a time: the model learns again when half of them are answered."""
    draws: int = 30
    """Functions of the posterior, by dropout, that are asked what they think."""
    rate: float = 0.25
    """Of that dropout."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """Your own network, called as factory(inputs, outputs), as in `dubito fit`; every fit begins at its weights."""
    pool: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """At most so many inputs to be labelled."""
    test: int = 2000
    """At most so many held-out inputs."""
    most: int = 5000
    """At most so many random candidates are looked at for each batch of questions."""
    seed: int = 0
    """Of the first, random questions and of all fits."""
    device: str = "cpu"
    """Where to fit: cpu, cuda, cuda:1 ..."""

    def __post_init__(self):
        for name in ("pool", "test", "most", "draws"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is positive; got {value}")


@dataclass(frozen=True)
class Page:
    """The page."""

    port: Annotated[int, arg(metavar="INT", help_behavior_hint="(default: any that is free)")] = 0
    """On 127.0.0.1, and nowhere else."""
    no_browser: Annotated[bool, FlagCreatePairsOff] = False
    """Only print the address, and open no browser."""

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ValueError(f"a port is a number from 0 to 65535; got --port {self.port}")


def label(args: Sequence[str]) -> None:
    """Label what the model asks for, on a page in your browser, and watch it learn.
      One key an answer. Every answer is on disk at once; the same command goes
      on where you left. The labels are in labels.csv of the folder.

    Example: dubito label --data photos.npz --classes cat dog
    """
    parts = parse(combine({"what": What, "asking": Asking, "page": Page}), args, prog="dubito label", about=label.__doc__ or "")
    what, asking, page = parts["what"], parts["asking"], parts["page"]
    from dubito.tensors import randomness, store
    from dubito.web.labelling import Server, Session, task
    from dubito.web.labelling.session import LABELS

    device = find_device(asking.device)
    with usage_errors(ValueError, FileNotFoundError):
        given = task(
            what.data, classes=what.classes, held_out=what.held_out, target=what.target, pool=asking.pool, test=asking.test
        )
        own: Any = None
        if asking.network is not None:
            with randomness.forked(asking.seed):
                own = Network(network=asking.network).build(tuple(given.pool.shape[1:]), len(given.classes))
        folder = what.out or Path("labels", re.sub(r"[^A-Za-z0-9]+", "-", Path(what.data).name).strip("-"))
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, not a folder: give another name for --out")
        check_not_overwritten(folder / LABELS, Path(what.data), what.held_out)
    with usage_errors(ValueError, OSError):  # the folder is another's, in use, or cannot be written
        session = Session(
            given, folder, acquisition=asking.acquisition, batch=asking.batch, draws=asking.draws, most=asking.most,
            rate=asking.rate, network=own, device=device, seed=asking.seed,
        )  # fmt: skip
    try:
        server = Server(session, port=page.port)
    except OSError as error:
        session.close()
        raise UsageError(f"--port {page.port}: {error.strerror}; leave it out to take any that is free") from None
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"Label at {server.address}"))
    console.print(Text(f"Answers are kept in {folder}. To stop, press Esc there, or Ctrl+C here.", style="dim"))
    console.file.flush()  # also into a pipe: the address is needed now
    if not page.no_browser:
        # in a thread: a browser in the terminal returns only when it is closed, and nobody would serve it before
        threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
    with usage_errors(store.WriteError):
        serve(server, session, console)
    labels = len([one for one in session.journal.standing.values() if one is not None])
    console.print(Text(f"{labels} label{'s' * (labels != 1)}: {folder / 'labels.csv'}. The same command goes on."))


def serve(server: Any, session: Any, console: Console) -> None:
    """Until somebody stops it, here or on the page; then wait for a fit that is under way."""
    with print_warnings():
        session.start()
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass
        finally:
            server.server_close()
            if session.busy:
                console.print(
                    Text("The model finishes what it was doing; all answers are on disk. Ctrl+C leaves at once.", style="dim")
                )
            session.close()
