"""How much memory a structure takes, known from the layout alone: what cannot fit is told before any data are gone through."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dubito.curvature.collect import Collector
from dubito.curvature.gather import OVERSAMPLING, Corrected, Gather, Hessian, Main, Plain, Subnetwork, last_layer
from dubito.curvature.layout import Layout

GROUP = Path("/sys/fs/cgroup")  # the limits of a container
ENDLESS = 1 << 60  # what a container without a limit says is larger
DOUBLE = 8
NOTHING = "name fewer weights with Model(only=...), or use a machine with more memory"


@dataclass(frozen=True)
class Need:
    """Bytes of one structure; single numbers, such as a layer's precision, are not counted."""

    sums: int  # while data are gone through
    covariance: int  # in the posterior
    evidence: int  # for a while, when the prior is fitted at the end

    @property
    def least(self) -> int:
        """What there must be in any case: the covariance is made while the sums are there."""
        return self.sums + self.covariance


def need(gather: Gather, at: Collector, x: Any, *, by: str = "layer") -> Need:
    """What a way of gathering needs for inputs like x, if prior precisions are fitted "layer" by layer, by "parameter" or as "one"."""
    found, item, one = at.layout(x), at.dtype.itemsize, by == "one"
    g, size = at.groups(found), sum(shape.numel() for shape in at.shapes.values())
    if isinstance(gather, Main):
        k = min(gather.rank + OVERSAMPLING, size)
        rank = min(gather.rank, k)
        return Need(2 * k * size * item, (size + rank * size + rank) * item, 6 * rank * size * DOUBLE)
    if isinstance(gather, Subnetwork):
        k, one_by_one = gather.size, g * size * item if gather.by == "variance" else 0
        square = g * k * k * item
        return Need(square + one_by_one + k * 8, square + k * 8, _matrices(k, g, one) * DOUBLE)
    if isinstance(gather, Hessian):
        square = size * size * item
        held = square if at.spec.structure == "dense" else size * item
        return Need(square, held, max(_matrices(size, 1, one) * DOUBLE, square))
    sums = [math.prod(shape) for shape in at._shapes(found, g).values()]
    if at.spec.structure == "dense":
        square = g * size * size * item
        return Need(sum(sums) * item, square, _matrices(size, g, one) * DOUBLE)
    if at.spec.structure == "diagonal":
        return Need(sum(sums) * item, g * size * item, 4 * size * DOUBLE)
    total, held = sum(sums), _held(at, found, g, apart=by == "parameter")
    if isinstance(gather, Corrected):  # both bases and the values in them
        sides = [_sides(at, part.weight, part.bias) for part in found.parts if part.kind == "affine" and part.weight is not None]
        total += sum(o * o + i * i + o * i for o, i in sides)
        held += sum(o * i for o, i in sides)
    return Need(total * item, held * item, 3 * size * DOUBLE)


def _matrices(size: int, groups: int, one: bool) -> int:
    """Numbers in the matrices of the evidence and its gradient; for one precision and one noise the eigenvalues are enough."""
    return (2 if one and groups == 1 else 6) * size * size


def _sides(at: Collector, weight: str, bias: str | None) -> tuple[int, int]:
    shape = at.shapes[weight]
    return shape[0], shape.numel() // shape[0] + (bias is not None)


def _held(at: Collector, found: Layout, groups: int, *, apart: bool) -> int:
    """Numbers in a Kronecker structure: eigenvectors and eigenvalues of both sides, and small blocks beside."""
    total = sum(math.prod(shape) for key, shape in at._shapes(found, groups).items() if not key.endswith(("|A", "|B")))
    for part in found.parts:
        if part.kind == "affine" and part.weight is not None:
            o, i = _sides(at, part.weight, part.bias)
            total += o * o + o + i * i + i + (groups * o * o if groups > 1 else 0)
            total += i if apart and part.bias is not None else 0  # the inputs are scaled where weight and bias differ
    return total


def available(device: torch.device) -> int | None:
    """Bytes that are free where the weights are; None where nothing tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what torch itself keeps free
    if device.type != "cpu":
        return None
    free = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        limit = int((GROUP / "memory.max").read_text())  # "max" is no number, and no limit
        files = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        used = int((GROUP / "memory.current").read_text()) - int(files.get("inactive_file", 0))
        free += [limit - used] if limit < ENDLESS else []
    except (OSError, ValueError):
        if not free and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(0, min(free)) if free else None


def alternatives(at: Collector, x: Any) -> dict[str, int]:
    """Bytes that other structures need at the least, by what one would write."""
    spec = replace(at.spec, kind="ggn" if at.spec.kind == "hessian" else at.spec.kind)
    found = {
        f"structure='{name}'": need(Plain(), replace(at, spec=replace(spec, structure=name), index=None), x).least
        for name in ("kronecker", "diagonal")
    }
    found["structure='lowrank'"] = need(Main(20), at, x).least
    try:
        last = replace(at, spec=replace(spec, structure="kronecker"), index=None)
        last = replace(last, names=last_layer(at.model, at.params, x, at.buffers, at.names))
        found["subset='last_layer'"] = need(Plain(), last, x).least
    except ValueError:  # it has none
        pass
    return found


def refusal(what: str, needed: int, free: int, others: dict[str, int], *, otherwise: str = NOTHING) -> str:
    """The sentence for what does not fit, with those of `others` that would."""
    fitting = {name: size for name, size in others.items() if size <= free and size < needed}
    listed = ", ".join(f"{name} {written(size)}" for name, size in sorted(fitting.items(), key=lambda pair: -pair[1]))
    way = f"there would be room for {listed}" if listed else otherwise
    return f"{what} needs {written(needed)} and {written(free)} are free, {written(needed - free)} too little: {way}"


def check(gather: Gather, at: Collector, x: Any, what: str) -> None:
    """Raise `MemoryError` where a structure alone cannot fit."""
    free = available(at.model.device)
    wanted = need(gather, at, x).least
    if free is not None and wanted > free:
        raise MemoryError(refusal(f"{what} over {_count(at):,} weights", wanted, free, alternatives(at, x)))


def _count(at: Collector) -> int:
    return sum(shape.numel() for shape in at.shapes.values())


def written(size: float, units: Iterable[str] = ("bytes", "kB", "MB", "GB", "TB", "PB")) -> str:
    """A number of bytes, to be read.

    >>> written(102_400_000), written(17)
    ('102 MB', '17 bytes')
    """
    *smaller, largest = units
    for unit in smaller:
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} {largest}" if size < 1000 else f"{size:,.0f} {largest}"
