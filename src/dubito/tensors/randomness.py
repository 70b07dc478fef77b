"""Global random number generators, borrowed and given back; Gaussian noise faster than torch draws it on a CPU; and numbers that
depend on an example alone.

Our own code draws from explicit `torch.Generator`s. Where torch or a user's data set insists on the global generators (dropout,
DataLoader, NumPy augmentations), `fork_rng` lends them out: seeded by us inside, exactly as they were afterwards, also on error.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito._moved import renamed

PIECE = 2**16  # numbers that several passes work on at a time, so that they stay in the cache
FEW = 20_000  # normals that torch has drawn by the time a generator of ours is seeded
UNIT = torch.tensor((1 - 2**-24) / 2**31)  # from 32-bit integers to floats strictly between -1 and 1


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any number of parts, so that (seed, epoch) and (seed, draw) never collide by simple addition.

    >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device | str = "cpu", *parts: int | str) -> torch.Generator:
    """A torch generator seeded from parts."""
    return torch.Generator(device=device).manual_seed(derive_seed(*parts))


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by the operating system, for those who give none; the global one is left alone."""
    made = torch.Generator(device=device)
    made.seed()
    return made


def seed_global(seed: int) -> None:
    """Seed torch (all devices in use), NumPy and Python. Only to be called inside `fork_rng`."""
    # torch.manual_seed would also leave seeds behind for devices that are not in use yet, where nobody could take them back
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (users' data sets draw from the legacy generator)
    random.seed(seed)


def global_state() -> dict:
    """The state of all global generators as tensors and plain values, ready for the store."""
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "rest": [int(position), int(has_gauss), float(cached)],
        },
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
    }


def positions(*, cuda: bool = True) -> tuple[object, ...]:
    """Where the global generators stand: equal before and after a call that has drawn nothing from them."""
    name, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    gpus = torch.cuda.get_rng_state_all() if cuda and torch.cuda.is_initialized() else []
    states = [bytes(state.numpy()) for state in (torch.get_rng_state(), *gpus)]
    return *states, name, bytes(np.asarray(keys)), position, random.getstate()


def set_global_state(state: dict) -> None:
    """The inverse of `global_state`."""
    torch.set_rng_state(state["torch"].cpu())
    for device, cuda in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(cuda.cpu(), device)
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, *numpy["rest"]))  # noqa: NPY002
    python = state["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))


@contextmanager
def fork_rng(seed: int | None = None) -> Iterator[None]:
    """Give the global generators back exactly as they were; seed them first if a seed is given."""
    cpu, numpy, python = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        if seed is not None:
            seed_global(seed)
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)


def hash_rows(leaves: list[Tensor]) -> Tensor:
    """A 64-bit hash of the values of each row, [B], over all leaves of a batch: an example is known by it wherever it comes.

    >>> keys = hash_rows([torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])])
    >>> bool(keys[0] == keys[2]), bool(keys[0] == keys[1])
    (True, False)
    """
    keys = torch.zeros(len(leaves[0]), dtype=torch.int64, device=leaves[0].device)
    for leaf in leaves:
        rows = leaf.detach().reshape(len(leaf), -1)
        bits = rows.double().view(torch.int64) if rows.is_floating_point() else rows.long()
        # each number is scrambled at its place before they are added up, or small integers would make the same sum in many ways
        place = torch.arange(1, bits.shape[1] + 1, device=bits.device) * -7046029254386353131
        keys = _scrambled(keys) + _scrambled(bits + place).sum(1)
    return keys


def uniforms_from(keys: Tensor) -> Tensor:
    """64-bit integers to numbers in [0, 1), in float64, that look independent and uniform.

    >>> abs(float(uniforms_from(torch.arange(10_000)).mean()) - 0.5) < 0.01
    True
    """
    return ((_scrambled(keys) >> 11) & (2**53 - 1)).double() * 2.0**-53


def _scrambled(keys: Tensor) -> Tensor:
    """64-bit integers one to one to others (the last steps of splitmix64); shifts bring in zeros, as for unsigned numbers."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        keys = (keys ^ ((keys >> shift) & (2 ** (64 - shift) - 1))) * factor
    return keys ^ ((keys >> 31) & (2**33 - 1))


@contextmanager
def borrowed_generators(data: Any) -> Iterator[list[torch.Generator]]:
    """The generators of a DataLoader that are its owner's: lent to be seeded, given back as they were."""
    owners = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    owners.append(getattr(owners[2], "sampler", None))
    found = {id(g): g for g in (getattr(o, "generator", None) for o in owners) if isinstance(g, torch.Generator)}
    before = [(g, g.get_state()) for g in found.values()]
    try:
        yield list(found.values())
    finally:
        for generator, state in before:
            generator.set_state(state)


class Normals:
    r"""Normals in single precision on a CPU, faster than torch draws them, which spends most of its time on one random number after
    another: :math:`\sqrt 2\, \mathrm{erf}^{-1}(u)` of 32-bit integers u from NumPy's SFC64, which one draw of a generator seeds.

    They reach as far as 5.4. What a call gives may be used until the next, which writes into the same memory.

    >>> Normals(torch.Generator().manual_seed(0), scale=2.0)(3).shape
    torch.Size([3])
    """

    def __init__(self, generator: torch.Generator, scale: float = 1.0):
        self.source = np.random.SFC64(int(torch.randint(2**62, (1,), generator=generator)))
        self.factor, self.memory = torch.tensor(math.sqrt(2) * scale), torch.empty(0)

    @staticmethod
    def pay(leaves: list[Tensor]) -> bool:
        """Whether so many tensors are better filled by these: it is MKL that inverts the error function fast."""
        if not torch.backends.mkl.is_available() or sum(map(Tensor.numel, leaves)) < FEW:
            return False
        return all(leaf.device.type == "cpu" and leaf.dtype == torch.float32 for leaf in leaves)

    def __call__(self, n: int) -> Tensor:
        if n > len(self.memory):
            self.memory = torch.empty(n)
        bits = torch.from_numpy(self.source.random_raw((n + 1) // 2).view(np.int32))
        return self.memory[:n].copy_(bits[:n]).mul_(UNIT).erfinv_().mul_(self.factor)


def draw_normals(leaves: list[Tensor], generator: torch.Generator, scale: float = 1.0) -> list[Tensor]:
    """Normals in the shapes of some tensors, drawn at once where they are of one type.

    >>> [leaf.shape for leaf in draw_normals([torch.zeros(2, 3), torch.zeros(4)], torch.Generator())]
    [torch.Size([2, 3]), torch.Size([4])]
    """
    if len({leaf.dtype for leaf in leaves}) != 1:
        return [torch.empty_like(leaf, requires_grad=False).normal_(0.0, scale, generator=generator) for leaf in leaves]
    sizes = [leaf.numel() for leaf in leaves]
    if Normals.pay(leaves):
        flat = Normals(generator, scale)(sum(sizes))
    else:
        flat = torch.empty(sum(sizes), dtype=leaves[0].dtype, device=leaves[0].device).normal_(0.0, scale, generator=generator)
    return [share.view(leaf.shape) for share, leaf in zip(flat.split(sizes), leaves, strict=True)]


__getattr__ = renamed(
    __name__, {"derive": "derive_seed", "forked": "fork_rng", "fresh": "fresh_generator", "lent": "borrowed_generators"}
)
