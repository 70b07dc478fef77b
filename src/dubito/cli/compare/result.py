"""One method with one seed: what was asked, what came of it, and the files that keep it.

A cell is known by a hash of its settings, its data and its seed. Its numbers are a JSON file; what pictures are drawn from, the
predictions themselves, are tensors beside it, written first: a cell whose JSON is there is whole.
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


@dataclass(frozen=True)
class Key:
    """What makes a cell the one it is."""

    label: str
    seed: int
    settings: Mapping[str, Any]  # of the method, the model, the data and how it is judged, in plain types

    @property
    def digest(self) -> str:
        """
        >>> Key("a", 0, {"x": 1}).digest == Key("a", 0, {"x": 2}).digest
        False
        """
        content = json.dumps({"format": FORMAT, "seed": self.seed, "settings": self.settings}, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def path(self, folder: Path) -> Path:
        slug = re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")[:48] or "method"
        return folder / FOLDER / f"{slug}-seed{self.seed}-{self.digest}.json"


@dataclass(frozen=True)
class Cell:
    """What came of a key: scores, or the reason why there are none."""

    key: Key
    scores: Mapping[str, float] = field(default_factory=dict)
    seconds: float = math.nan
    error: str | None = field(default=None, kw_only=True)
    choice: Mapping[str, float] = field(default_factory=dict, kw_only=True)  # what was chosen from a grid
    shift: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # corruption -> severity -> scores
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    arrays: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True, repr=False)

    def write(self, folder: Path) -> None:
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
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @staticmethod
    def read(folder: Path, key: Key) -> Cell | None:
        """The cell, if it is there and whole; one that failed is not, since it is to be tried again."""
        path = key.path(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["cell"] != key.digest or content["error"] is not None:
                return None
            arrays, meta = store.read(path.with_suffix(".safetensors"))
            if meta.get("cell") != key.digest:
                return None
            scores = {name: math.nan if value is None else float(value) for name, value in content["scores"].items()}
            seconds = math.nan if content["seconds"] is None else float(content["seconds"])
            more = {name: content[name] for name in ("choice", "shift", "versions")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or not whole: it is made again
            return None
        return Cell(key, scores, seconds, arrays=arrays, **more)


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in ("dubito", "torch", "numpy", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
