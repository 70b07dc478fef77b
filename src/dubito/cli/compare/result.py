"""One method with one seed: its settings, its scores, and the files that keep them.

A result is identified by a hash of its settings, its data and its seed. Its numbers are a JSON file; the predictions, from which
pictures are drawn, are tensors beside it. The tensors are written first, so a result with a JSON file is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from dubito.report.report import write_text
from dubito.tensors import store

FORMAT = 1
FOLDER = "cells"
KEYS = {
    "format", "cell", "method", "seed", "scores", "seconds", "error", "choice", "shift", "settings", "versions"
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    """The identity of a result."""

    label: str
    seed: int
    settings: Mapping[str, Any]  # of the method, the model, the data and the scores, in plain types

    @property
    def digest(self) -> str:
        """A hash of seed and settings; the label does not count.

        >>> Key("a", 0, {"x": 1}).digest == Key("a", 0, {"x": 2}).digest
        False
        """
        content = json.dumps({"format": FORMAT, "seed": self.seed, "settings": self.settings}, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def path(self, folder: Path) -> Path:
        """The JSON file of the result in the folder of a comparison."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")[:48] or "method"
        return folder / FOLDER / f"{slug}-seed{self.seed}-{self.digest}.json"


@dataclass(frozen=True)
class Result:
    """The scores of one method with one seed, or the reason why there are none."""

    key: Key
    scores: Mapping[str, float] = field(default_factory=dict)
    seconds: float = math.nan
    error: str | None = field(default=None, kw_only=True)
    choice: Mapping[str, float] = field(default_factory=dict, kw_only=True)  # the chosen point of a grid
    shift: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # corruption -> severity -> scores
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    arrays: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True, repr=False)

    def write(self, folder: Path) -> None:
        """Write the files of the result."""
        path = self.key.path(folder)
        if self.arrays:
            store.write(path.with_suffix(".safetensors"), dict(self.arrays), {"cell": self.key.digest})
        content = {
            "format": FORMAT,
            "cell": self.key.digest,
            "method": self.key.label,
            "seed": self.key.seed,
            "scores": {name: value if math.isfinite(value) else None for name, value in self.scores.items()},
            "seconds": self.seconds if math.isfinite(self.seconds) else None,
            "error": self.error,
            "choice": dict(self.choice),
            "shift": self.shift,
            "settings": self.key.settings,
            "versions": self.versions,
        }
        content["checksum"] = _checksum(content)
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @staticmethod
    def read(folder: Path, key: Key) -> Result | None:
        """The result with this key; None if it is missing, damaged, or failed, since then it is to be made again."""
        path = key.path(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            checksum = content.pop("checksum", None)  # files of version 0.1 have none
            if content.keys() != KEYS or checksum not in (None, _checksum(content)):
                return None
            arrays, meta = store.read(path.with_suffix(".safetensors"))
            if content["error"] is not None or {content["cell"], meta.get("cell")} != {key.digest}:
                return None
            scores = {name: math.nan if value is None else float(value) for name, value in content["scores"].items()}
            seconds = math.nan if content["seconds"] is None else float(content["seconds"])
            more = {name: content[name] for name in ("choice", "shift", "versions")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Result(key, scores, seconds, arrays=arrays, **more)


def _checksum(content: Mapping[str, Any]) -> str:
    return store.checksum({}, json.dumps(content))


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that the numbers depend on."""
    numbers = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("dubito", "torch", "numpy", "scikit-learn"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers
