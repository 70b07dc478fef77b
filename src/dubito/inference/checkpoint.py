"""Checkpoints: how far a run has come, in one file beside the shards of its draws.

The file is written whole or not at all. It holds a fingerprint of everything that the result depends on, so that a run is not resumed
with other data, another network or other settings.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.inference.batches import Batches
from dubito.inference.method import Method, Start, departures, traits_of
from dubito.inference.options import FitOptions
from dubito.model import Target
from dubito.network.examples import Batch
from dubito.posteriors.identity import belonging, differences
from dubito.tensors import randomness, store, tree
from dubito.tensors.checks import require
from dubito.tensors.processes import ALONE, Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK = 10  # steps on a GPU from one look at what the other processes have received to the next: it must wait for the GPU


@dataclasses.dataclass
class Run:
    """How far a run has come: what a checkpoint holds. The names of the fields are in its file."""

    state: Any
    generator: torch.Generator
    step: int = 0
    epoch: int = 0
    batch: int = 0  # steps made in this epoch
    draws: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: bool = False
    best_state: Any = None
    random: Any = None  # the global generators' states; set in a run that was just read, until they are put back


class Checkpoint:
    """The checkpoint of a run in `options.checkpoint`; without a folder nothing is ever written.

    Of several processes all read it, and the first writes it.
    """

    def __init__(self, options: FitOptions, processes: Processes = ALONE):
        self.processes, self.collectives = processes, 0
        self.folder = None if options.checkpoint is None else Path(options.checkpoint)
        self.every, self.fingerprint = options.checkpoint_every, {}
        self.due = time.monotonic() + self.every
        self.signals = Signals(() if self.folder is None else SIGNALS)

    @property
    def path(self) -> Path:
        """The file, in a folder that must have been given."""
        assert self.folder is not None
        return self.folder / "checkpoint.safetensors"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder for this run alone; a folder that only some of the processes see is refused."""
        with store.lock_folder(self.folder if self.processes.first else None):
            self.processes.barrier()
            seen = self.processes.gather(self.folder is None or (self.folder / "lock.json").exists())
            blind = [rank for rank, sees in enumerate(seen) if not sees]
            require(
                not blind,
                f"processes {blind} do not see {self.folder} as process 0 has it: give a folder that all processes share",
            )
            yield

    def open(self, run: Run, draws: store.Draws, *, resume: bool, device: torch.device, steps: int) -> Run:
        """The run that the folder holds, or `run` itself where it holds none."""
        if self.folder is None:
            return run
        if not self.processes.first:
            self.processes.barrier()  # the first one is done with it
            return self._open(run, draws, resume=resume, device=device, steps=steps)
        run = self._open(run, draws, resume=resume, device=device, steps=steps)
        self.processes.barrier()
        return run

    def _open(self, run: Run, draws: store.Draws, *, resume: bool, device: torch.device, steps: int) -> Run:
        assert self.folder is not None
        if not self.path.exists():
            self._check_without_file(resume)
            draws.keep(0)  # killed before its first checkpoint: what it left is made again
            return run
        if not resume:
            raise FileExistsError(f"{self.folder} holds a run already: pass resume=True to go on with it, or another folder")
        tensors, meta = store.read(self.path)
        fields = meta["run"]["fields"]
        self._check_same(meta.get("fingerprint", {}), fields["step"]["value"], steps)
        best, random = fields.pop("best_state"), fields.pop("random")
        filled = {name: store.unpack(item, tensors, getattr(run, name)) for name, item in fields.items()}
        run = Run(**filled, random=store.unpack(random, tensors))
        if "value" not in best:  # a nested description of its own: {"description": ..., "tensors": ...}
            kept = {name[5:]: tensor for name, tensor in tensors.items() if name.startswith("best:")}
            run.best_state = {"description": meta["best"], "tensors": tree.move(kept, device)}
        draws.keep(run.draws, device)
        return run

    def _check_without_file(self, resume: bool) -> None:
        """Raise where draws lie in the folder without a checkpoint from which their run could go on."""
        assert self.folder is not None
        shards = list(self.folder.glob(store.SHARDS))
        if shards and not resume:
            raise FileExistsError(f"{self.folder} holds draws of another run: give an empty folder")
        if shards and len(store.Archive.open(self.folder)) > 1:  # the first draw is followed by a checkpoint at once
            raise store.FileError(
                f"{self.folder} holds draws but no checkpoint from which a run could go on: read them with "
                "dubito.load(folder, model), or give an empty folder"
            )

    def _check_same(self, fingerprint: dict[str, Any], made: int, steps: int) -> None:
        """Raise where the file belongs to another run, or to a longer one."""
        changed = "; ".join(f"{name} ({how})" for name, how in differences(fingerprint, self.fingerprint))
        require(not changed, f"{self.folder} belongs to another run; different: {changed}")
        require(made <= steps, f"{self.folder} holds {made} steps of this run already, more than the {steps} that are asked for")

    def write_if_due(self, run: Run, draws: store.Draws, prepare: Callable[[Run], None]) -> None:
        """Write when it is due, at a signal, and at the first draw, so that there are no draws without a state from which to go on.
        Before that all processes `prepare` the run together."""
        if self.folder is None:
            return
        first, (due, signal) = len(draws) and not run.draws, self._messages(run.step)
        if due or signal or first:
            prepare(run)
            self.write(run, draws)
        if signal:
            self.processes.barrier()  # the others' ends would be the first one's end too
            self.signals.pending = signal
            self.signals.deliver()

    def _messages(self, step: int) -> tuple[bool, int | None]:
        """Whether a checkpoint is due by the first process's clock, and the signal that a process has received; on several, all of them
        know of it one step later."""
        late = time.monotonic() > self.due
        if self.processes.size == 1:
            return late, self.signals.pending
        if self.processes.collectives == self.collectives:  # nothing has travelled in this step
            self.processes.sum_([])
        flags, self.collectives = self.processes.sum_of_flags, self.processes.collectives
        unseen = flags is None or not len(flags) or (flags.is_cuda and step % LOOK > 0)
        due, *received = [0.0] * (1 + len(SIGNALS)) if flags is None or unseen else flags.tolist()
        late = late and self.processes.first and not due
        self.processes.flags = (float(late), *(float(self.signals.pending == number) for number in SIGNALS))
        return bool(due), next((number for number, flag in zip(SIGNALS, received, strict=True) if flag), None)

    def write(self, run: Run, draws: store.Draws) -> None:
        """Write the draws made so far, and then the checkpoint that counts them."""
        if self.folder is None:
            return
        if not self.processes.first:
            run.draws = len(draws)
            return
        with store.describing_write_errors(self.folder):
            draws.flush()
            run.draws = len(draws)
            tensors: dict[str, Tensor] = {}
            best, run.best_state = run.best_state, None
            run.random = randomness.global_state()
            description = store.pack(run, tensors)
            run.random, run.best_state = None, best
            meta = {"fingerprint": self.fingerprint, "run": description}
            if best is not None:
                description["fields"]["best_state"] = {"dict": []}
                meta["best"] = best["description"]
                tensors |= {f"best:{name}": tensor for name, tensor in best["tensors"].items()}
            store.write(self.path, tensors, meta)
            self.due = time.monotonic() + self.every


class Signals:
    """In a `with` block, SIGINT (Ctrl-C) and SIGTERM wait until `deliver` is called, so that a checkpoint can be written before.

    A second signal does not wait. Outside the main thread, which alone receives signals, nothing happens. The handlers from before are
    put back and decide what a signal does: as a rule, raise KeyboardInterrupt or end the process.
    """

    def __init__(self, numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)):
        self.pending: int | None = None
        self._numbers, self._process = numbers, os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler that Python cannot put back
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        pending, self.pending = self.pending, None
        if pending is not None:
            signal.raise_signal(pending)

    def deliver(self) -> None:
        """Do what a pending signal would have done; if the program goes on after that, so does the block."""
        if self.pending is not None:
            self.__exit__()
            self.__enter__()

    def _receive(self, number: int, frame: object) -> None:
        worker = os.getpid() != self._process  # of a DataLoader: it has these handlers from its parent, which ends it
        if worker and number == signal.SIGINT:
            return
        at_once, self.pending = worker or self.pending is not None, number
        if at_once:
            self.deliver()


def fingerprint(
    target: Target,
    method: Method,
    options: FitOptions,
    source: Batches,
    held_out: Batches | None,
    first: Batch,
    start: Start,
    steps: int,
) -> dict[str, Any]:
    """What must be the same for a run to go on.

    Data in memory are known by all of them; others by their first batch, whose order the seed has fixed, and others to validate on by
    their being there. The weights to start from count where they are given, or where the method only looks at them; a network that
    another process has initialized afresh does not keep a run from going on.
    """
    given = start.given or traits_of(method).post_hoc
    return {
        "method": _described(method),
        "prior": store.describe(target.model.prior),
        **belonging(target.model),
        "n_data": target.n_data,
        "temperature": target.temperature,
        "precision": str(target.precision),
        "batches": source.n_batches,
        "data": _checksum(first),
        "start": _weights(start) if given else None,
        "all data": _held(source),
        "validation": None if held_out is None else _held(held_out),
        "seed": options.seed,
        "accumulate": options.accumulate,
        "store_dtype": options.store_dtype,
        **({} if traits_of(method).length_field else {"steps": steps}),
    }


def about(target: Target, method: Method) -> dict[str, Any]:
    """What draws on disk must say of themselves, so that they can be read without the run that made them."""
    traits = traits_of(method)
    known = {"adjusted": traits.adjusted, "learning_rate": traits.learning_rate}
    sampler = {"method": type(method).__name__, **{name: value for name, value in known.items() if value is not None}}
    departed = departures(target, method)
    return {**belonging(target.model), "sampler": sampler, **({"departures": list(departed)} if departed else {})}


def _weights(start: Start) -> str:
    """The checksum of a start, without what nobody has given."""
    leaves = {**start.params, **start.buffers, **{f"draws/{name}": leaf for name, leaf in (start.draws or {}).items()}}
    return store.checksum({name: leaf for name, leaf in leaves.items() if name not in start.unset})


def _held(data: Batches) -> str:
    return "batches" if data.arrays is None else _checksum((data.arrays.x, data.arrays.y))


def _checksum(data: Any) -> str:
    return store.checksum({str(i): leaf for i, leaf in enumerate(tree.leaves(data))})


def _described(method: Method) -> str:
    """The method, without the field that only says how long a run is to be (`Traits.length_field`), where it has one."""
    length = traits_of(method).length_field
    if length is None:
        return store.describe(method)
    fields = [f.name for f in dataclasses.fields(method) if f.name != length]  # pyright: ignore[reportArgumentType]
    return f"{type(method).__name__}({', '.join(f'{name}={store.describe(getattr(method, name))}' for name in fields)})"
