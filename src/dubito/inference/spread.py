"""Members of an ensemble on processes of their own: each process fits some of them by itself, and gets all of them in the end."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dubito.inference.method import Event, Method, Start
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.posteriors import Mixture, Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.checks import require
from dubito.tensors.processes import Processes
from dubito.tensors.shares import Share


@runtime_checkable
class Divisible(Protocol):
    """A method whose members can be fitted apart from each other."""

    @property
    def parts(self) -> int:
        """How many members there are."""
        ...

    def some(self, numbers: range) -> Method:
        """The method for some of the members."""
        ...


def fit_members(
    fit: Callable[[Method, FitOptions], Posterior],
    method: Divisible,
    model: Model,
    start: Start,
    options: FitOptions,
    processes: Processes,
) -> Posterior:
    """Fit this process's members by `fit`, as one process would, and put those of all together."""
    require(
        options.validation is None,
        f"validation scores all {method.parts} members together, and they are on {processes.size} processes: leave it out, or give "
        "distributed=False",
    )
    leaves = {**start.params, **start.buffers, **{f"draws/{name}": leaf for name, leaf in (start.draws or {}).items()}}
    processes.agree(weights_of_the_network=store.checksum(leaves))
    (numbers,) = Share.of(method.parts, processes.rank, processes.size).rows

    def look(event: Event) -> None:
        """End where another process has failed."""
        processes.check_others()

    own = replace(
        options,
        distributed=False,
        checkpoint=_folder(options, processes),
        progress=options.progress if processes.first else False,
        callbacks=(*options.callbacks, look),
    )
    posterior = fit(method.some(numbers), own)
    processes.wait_for_others()
    return _unite([_load(packed, model) for packed in processes.gather(_dump(posterior, model))])


def _folder(options: FitOptions, processes: Processes) -> Path | None:
    """Where this process writes its members' checkpoint, beside those of the others."""
    if options.checkpoint is None:
        return None
    folder = Path(options.checkpoint)
    others = [path.name for path in folder.glob("process-*-of-*") if not path.name.endswith(f"-of-{processes.size}")]
    others += [path.name for path in folder.glob("checkpoint.safetensors")]
    require(
        not others,
        f"{folder} holds a run with another number of processes ({', '.join(others[:1])}), and members stay where they are: go on with "
        "that number, or give another folder",
    )
    return folder / f"process-{processes.rank}-of-{processes.size}"


def _unite(posteriors: list[Posterior]) -> Posterior:
    """The posterior of all members, of those of some."""
    points = [posterior for posterior in posteriors if isinstance(posterior, Samples)]
    if len(points) < len(posteriors):
        mixtures = [posterior for posterior in posteriors if isinstance(posterior, Mixture)]
        united = Mixture.equal([member for mixture in mixtures for member in mixture.members])
        return united.departing(*posteriors[0].departures)
    own = [part.own_buffers for part in points]
    params = tree.concatenate([part.params for part in points])
    return replace(points[0], params=params, own_buffers=tree.concatenate(own) if own[0] else {})


def _dump(posterior: Posterior, model: Model) -> tuple[bytes, list[Tensor]]:
    """A posterior without its model, and its tensors on the CPU."""
    memory, tensors = io.BytesIO(), []

    class Pickler(pickle.Pickler):
        """Leaves out what all processes have, and puts tensors aside."""

        def persistent_id(self, obj: Any) -> Any:
            """What stands for an object."""
            if obj is model:
                return "model"
            if isinstance(obj, Tensor):
                tensors.append(obj.detach().cpu().clone())
                return len(tensors) - 1
            return None

    Pickler(memory).dump(posterior)
    return memory.getvalue(), tensors


def _load(packed: tuple[bytes, list[Tensor]], model: Model) -> Posterior:
    """What `_dump` has written, on the device of the model."""
    written, tensors = packed

    class Unpickler(pickle.Unpickler):
        """Puts the model and the tensors back."""

        def persistent_load(self, pid: Any) -> Any:
            """The object that this stands for."""
            return model if pid == "model" else tensors[pid].to(model.device)

    return Unpickler(io.BytesIO(written)).load()
