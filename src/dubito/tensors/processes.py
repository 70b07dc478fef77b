"""Several processes on one fit: PyTorch's process group as a value, which does nothing where there is one process.

Everything that processes tell each other goes through `Processes`: sums in flat buckets, one all-reduce for each dtype; small objects;
and what must be the same everywhere. Sums are counted. Where one process fails, the others end with one sentence that names it.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dubito.tensors.checks import require, type_of
from dubito.tensors.randomness import derive_seed

TIMEOUT = timedelta(minutes=30)  # of one exchange, in which the others may wait for a checkpoint to be written
JOINING = timedelta(minutes=5)  # until all processes have come to a fit
PAUSE = 2.0  # seconds between looks whether another process has failed
REASON = 2.0  # seconds in which the reason of a process that fails is waited for
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # which torchrun sets

DIMENSIONS = ("chains", "data")  # of a mesh

Distributed = Literal["auto", False] | ProcessGroup | DeviceMesh
Result = TypeVar("Result")


class ProcessError(RuntimeError):
    """Another process has failed, or does not answer."""


@dataclass(eq=False)
class Processes:
    """The processes of a fit. All of them must make the same calls in the same order.

    With one process every call does nothing.

    >>> alone = Processes()
    >>> alone.rank, alone.size, alone.gather("a")
    (0, 1, ['a'])
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = field(default=None, repr=False)
    exchange: torch.dtype | None = field(default=None, repr=False)  # in which gradients travel; None is their own
    collectives: int = field(default=0, repr=False)  # sums, broadcasts and gathers so far
    bytes: int = field(default=0, repr=False)  # that this process has given to sums
    flags: tuple[float, ...] = field(default=(), repr=False)  # travel with the next sum
    sum_of_flags: Tensor | None = field(default=None, repr=False)  # as the last sum has brought them
    mesh: DeviceMesh | None = field(default=None, repr=False)  # as the user has laid them out
    name: str = field(default="", repr=False)  # under which one that fails leaves its words
    looked: float = field(default=0.0, repr=False)  # when it was last looked whether another has

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def grid(self, parts: int, *, alike: bool) -> tuple[Processes, Processes]:
        """Those over which `parts`, chains or members, are spread, and those that divide the data: the dimensions "chains" and "data"
        of a mesh. Without one all are the first where there is a part for each process and their data are `alike`, and else the second.

        >>> Processes().grid(4, alike=True)
        (Processes(rank=0, size=1), Processes(rank=0, size=1))
        """
        if not {*DIMENSIONS} & {*_names(self.mesh)}:
            return (self, ALONE) if alike and parts >= self.size else (ALONE, self)
        spread, divided = (self._along(name) for name in DIMENSIONS)
        require(
            parts >= spread.size,
            f"the dimension 'chains' of the mesh has {spread.size} processes, and there are {parts} chains or members to spread over "
            "them: give more of these, or in a method without any a mesh over the data, such as mesh['data']",
        )
        return spread, divided

    def _along(self, name: str) -> Processes:
        """Those in the row of this process along a dimension of the mesh."""
        if self.mesh is None or name not in _names(self.mesh) or self.mesh[name].size() == 1:
            return ALONE
        group = self.mesh.get_group(name)
        return (
            self
            if self.mesh.ndim == 1
            else Processes(self.mesh.get_local_rank(name), self.mesh[name].size(), group, name=self.name)
        )

    def sum_(self, tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> None:
        """Sum tensors over the processes, in place, in one all-reduce for each of their dtypes; or all in one `dtype`, such as float64
        for what decides on acceptance."""
        if self.size == 1:
            return
        buckets: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            buckets.setdefault(dtype or tensor.dtype, []).append(tensor)
        device = tensors[0].device if tensors else self._device()
        for kind, leaves in (buckets or {torch.float32: []}).items():
            flags = torch.tensor(self.flags, dtype=kind, device=device)
            flat = torch.cat([*(leaf.detach().reshape(-1).to(kind) for leaf in leaves), flags])
            self._together(lambda group, flat=flat: distributed.all_reduce(flat, group=group))
            self.bytes += flat.nbytes
            *sums, self.sum_of_flags = flat.split([*(leaf.numel() for leaf in leaves), len(flags)])
            with torch.no_grad():
                for leaf, total in zip(leaves, sums, strict=True):
                    leaf.copy_(total.view(leaf.shape))

    def sum_gradient_(self, gradient: Iterable[Tensor], *numbers: Tensor) -> None:
        """Sum a gradient, in `exchange` where that is set, and numbers that go with it."""
        if self.exchange is None:
            self.sum_([*gradient, *numbers])
        else:
            self.sum_([*gradient], dtype=self.exchange)
            self.sum_(numbers)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the tensors of the first, in place, as bytes in one message."""
        if self.size == 1 or not tensors:
            return
        shares = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        flat = torch.cat(shares)
        self._together(lambda group: distributed.broadcast(flat, group=group, group_src=0))
        with torch.no_grad():
            for tensor, share in zip(tensors, flat.split([len(share) for share in shares]), strict=True):
                tensor.copy_(share.clone().view(tensor.dtype).view(tensor.shape))

    def gather(self, value: Result) -> list[Result]:
        """The values of all processes, in the order of their ranks; small objects, which are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._together(lambda group: distributed.all_gather_object(values, value, group=group))
        return values

    def own_generator(self, generator: torch.Generator) -> torch.Generator:
        """A generator for numbers that differ from process to process, seeded by one that is the same on all."""
        if self.size == 1:
            return generator
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return torch.Generator(generator.device).manual_seed(derive_seed(seed, "process", self.rank))

    def barrier(self) -> None:
        """Wait until all processes have come here."""
        self.gather(None)

    def check_others(self) -> None:
        """Raise where another process has failed; what does not cost a message is to be called at every step."""
        if self.size == 1 or time.monotonic() < self.looked + PAUSE:
            return
        self.looked, store = time.monotonic(), distributed.distributed_c10d._get_default_store()
        if store.check([self._key]):
            raise ProcessError(store.get(self._key).decode())

    def wait_for_others(self) -> None:
        """Wait until all have come here, unless one has failed: as long as that takes, where a barrier has its timeout."""
        if self.size == 1:
            return
        store = distributed.distributed_c10d._get_default_store()
        _CALLS[self._key] += 1
        key, pause = f"{self._key}/{_CALLS[self._key]}", 0.01
        store.add(key, 1)
        while store.add(key, 0) < self.size:
            self.check_others()
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)

    def agree(self, **values: object) -> None:
        """Raise on all processes unless every value is the same on all of them; they are compared by `repr`.

        >>> Processes().agree(seed=0)
        """
        apart = self.gather({name: repr(value) for name, value in values.items()})
        for name, value in apart[0].items():
            for rank, other in enumerate(apart):
                if other[name] != value:
                    raise ValueError(
                        f"the processes differ in {name.replace('_', ' ')}: process 0 has {_short(value)} and process {rank} "
                        f"{_short(other[name])}; give all of them the same"
                    )

    def _device(self) -> torch.device:
        """Where the group's own messages live."""
        nccl = distributed.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _together(self, exchange: Callable[[ProcessGroup], object]) -> None:
        """One exchange; where it fails, one sentence that says which process was the reason."""
        assert self.group is not None
        self.collectives += 1
        try:
            exchange(self.group)
        except RuntimeError as error:  # torch's DistError is one
            raise ProcessError(self._reason(error)) from error

    @property
    def _key(self) -> str:
        return f"dubito/{self.name}/failure"

    def _reason(self, error: RuntimeError) -> str:
        """Why an exchange has failed: in the words of the process that has failed, if it has left some."""
        end = time.monotonic() + REASON
        with suppress(Exception):  # the store has gone with its process
            store = distributed.distributed_c10d._get_default_store()
            while time.monotonic() < end:
                if store.check([self._key]):
                    return store.get(self._key).decode()
                time.sleep(0.05)
        first = str(error).strip().splitlines()[0]
        return (
            f"another of the {self.size} processes has ended or does not answer, and process {self.rank} cannot go on without it; with "
            f"checkpoint= and resume=True a new start goes on from the last checkpoint ({first})"
        )

    def fail(self, error: BaseException) -> None:
        """Say why this process cannot go on, for the others, and leave the group, on which they wait."""
        if self.group is None:
            return
        if not isinstance(error, ProcessError):
            with suppress(Exception):
                words = f"process {self.rank} of {self.size} has failed: {type(error).__name__}: {error}"
                distributed.distributed_c10d._get_default_store().set(self._key, words)
        if self.group in _OURS:
            with suppress(Exception):  # it may be broken already
                distributed.destroy_process_group(self.group)
            _OURS.clear()
        self.group = None  # the last reference, which closes the connections


class Rehearsal(Processes):
    """As many processes as one likes, of which only this one is there: what it gives to sums is counted, and goes nowhere."""

    def gather(self, value: Result) -> list[Result]:
        """As if all had the same value."""
        return [value] * self.size

    def _together(self, exchange: Callable[[ProcessGroup], object]) -> None:
        self.collectives += 1


ALONE, CPU = Processes(), torch.device("cpu")


@contextmanager
def join_processes(wanted: Distributed = "auto", device: torch.device = CPU) -> Iterator[Processes]:
    """The processes to work with, on a group of our own: `fit(distributed=...)`.

    "auto" takes the process group that there is, or makes one under torchrun; False takes this process alone. An error that leaves the
    block ends the others too.

    >>> with join_processes() as processes:
    ...     processes.size
    1
    """
    with torch.cuda.device(own_device(device)) if device.type == "cuda" else nullcontext():  # where NCCL puts messages of its own
        yield from _join(_parent(wanted, device), wanted if isinstance(wanted, DeviceMesh) else None)


def own_device(device: torch.device) -> torch.device:
    """The device of this process: of "cuda", under torchrun, the GPU of its number.

    >>> own_device(torch.device("cpu")), own_device(torch.device("cuda:1"))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    number = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(number)) if device == torch.device("cuda") and number is not None else device


def _join(parent: ProcessGroup | None, mesh: DeviceMesh | None) -> Iterator[Processes]:
    if parent is None or distributed.get_world_size(parent) == 1:
        yield ALONE
        return
    _wait_for_all(parent)
    group = _own_group(parent)
    processes = Processes(
        distributed.get_rank(parent), distributed.get_world_size(parent), group, mesh=mesh, name=group.group_name
    )
    try:
        yield processes
        processes.barrier()
    except BaseException as error:
        processes.fail(error)
        raise


_CALLS: Counter[str] = Counter()  # of groups, by their names


def _wait_for_all(parent: ProcessGroup) -> None:
    """Raise where only some of the processes have come here after a while."""
    store, size = distributed.distributed_c10d._get_default_store(), distributed.get_world_size(parent)
    _CALLS[parent.group_name] += 1
    key = f"dubito/{parent.group_name}/{_CALLS[parent.group_name]}"
    if store.add(key, 1) == size:
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], JOINING)
    except RuntimeError as error:
        raise ProcessError(
            f"only {store.add(key, 0)} of {size} processes have begun this fit after {JOINING}: call fit on all of them, or give "
            "distributed=False"
        ) from error


_OURS: list[ProcessGroup] = []  # over all processes, at most one


def _own_group(parent: ProcessGroup) -> ProcessGroup:
    """A group of our own over all processes, with our timeout, which can be closed where one of them fails. A group of some of them
    stays the user's: torch cannot make another without the rest."""
    if parent is not distributed.group.WORLD:
        return parent
    with suppress(KeyError):  # it has gone with the group before
        if _OURS and distributed.get_process_group_ranks(_OURS[0]):
            return _OURS[0]
    group = distributed.new_group(timeout=TIMEOUT, backend=distributed.get_backend(parent))
    assert isinstance(group, ProcessGroup)
    distributed.barrier(parent)  # all are connected: one that fails from now on is told by its words
    _OURS[:] = [group]
    return group


def _parent(wanted: Distributed, device: torch.device) -> ProcessGroup | None:
    """The user's group; None for one process."""
    if wanted is False:
        return None
    if isinstance(wanted, DeviceMesh):
        if wanted.ndim == 1:
            return wanted.get_group()
        require(
            {*_names(wanted)} == {*DIMENSIONS} and wanted.size() == distributed.get_world_size(),
            f"distributed is a DeviceMesh of {wanted.size()} processes with {wanted.ndim} dimensions, {_names(wanted)}: give one "
            "over the data, such as mesh['data'], or, for several chains or members, one of all processes with the dimensions "
            "'chains' and 'data'",
        )
        return distributed.group.WORLD
    if isinstance(wanted, ProcessGroup):
        return wanted
    if wanted != "auto":
        raise TypeError(f"distributed must be 'auto', False, a process group or a DeviceMesh; got {type_of(wanted)}")
    if not distributed.is_initialized():
        if not all(name in os.environ for name in VARIABLES) or int(os.environ["WORLD_SIZE"]) == 1:
            return None
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=JOINING)
        atexit.register(_end)
    return distributed.group.WORLD


def _names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """The names of the dimensions of a mesh."""
    return () if mesh is None else mesh.mesh_dim_names or ()


def _end() -> None:
    """Close the group that was made here."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
