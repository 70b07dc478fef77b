"""How much memory is there, and the words for what does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

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


def evidence_matrices(size: int, groups: int, by: str) -> int:
    """Numbers in the dense matrices of the evidence and its gradient; for one precision and one noise eigenvalues are enough."""
    return (2 if by == "one" and groups == 1 else 6) * size * size


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


def least_room(device: torch.device, needed: int) -> int | None:
    """The bytes that are free, if they are fewer than needed; None if they are enough, or unknown."""
    free = available(device)
    return free if free is not None and needed > free else None


def refusal(what: str, needed: int, free: int, others: dict[str, int], *, otherwise: str = NOTHING) -> str:
    """The sentence for what does not fit, with those of `others` (name to bytes) that would."""
    fitting = {name: size for name, size in others.items() if size <= free and size < needed}
    listed = ", ".join(f"{name} {written(size)}" for name, size in sorted(fitting.items(), key=lambda pair: -pair[1]))
    way = f"there would be room for {listed}" if listed else otherwise
    return f"{what} needs {written(needed)} and {written(free)} are free, {written(needed - free)} too little: {way}"


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
