"""Maps as files: plain tensors and numbers, and the name of their kind."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch import Tensor

from dubito.evaluation.recalibrate.conformal import ConformalIntervals, ConformalSets, IntervalRule, SetRule
from dubito.evaluation.recalibrate.frequencies import Frequencies
from dubito.evaluation.recalibrate.regression import QuantileMap, Stretched
from dubito.evaluation.recalibrate.scaling import Affine, Tempered
from dubito.tensors import store

Map = Tempered | Affine | Frequencies | QuantileMap | Stretched | SetRule | IntervalRule
KINDS: dict[str, type] = {
    "temperature": Tempered,
    "affine": Affine,
    "frequencies": Frequencies,
    "quantiles": QuantileMap,
    "variance": Stretched,
    "conformal sets": SetRule,
    "conformal intervals": IntervalRule,
}
SETTINGS: dict[str, type] = {"conformal sets": ConformalSets, "conformal intervals": ConformalIntervals}

RENAMED = {"randomised": "randomized"}  # fields of settings that version 0.1 called otherwise


def save(fitted: Map, path: str | os.PathLike) -> None:
    """Write a fitted map to one file, whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Tempered(1.5, 1000), f"{folder}/map.safetensors")
    ...     load(f"{folder}/map.safetensors")
    Tempered(temperature=1.5, n=1000)
    """
    kind = next((name for name, known in KINDS.items() if isinstance(fitted, known)), None)
    if kind is None:
        raise TypeError(f"save takes a fitted map, such as Temperature().fit(...); got a {type(fitted).__name__}")
    values = {field.name: getattr(fitted, field.name) for field in dataclasses.fields(fitted)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    plain: dict[str, Any] = {name: value for name, value in values.items() if name not in tensors}
    if kind in SETTINGS:
        plain["settings"] = dataclasses.asdict(plain["settings"])
    store.write(path, tensors, {"kind": "recalibration", "map": kind, "fields": plain})


def load(path: str | os.PathLike) -> Map:
    """Read what `save` wrote."""
    tensors, meta = store.read(path)
    if meta.get("kind") != "recalibration" or meta.get("map") not in KINDS:
        raise store.FileError(f"{path}: written by dubito, but not a map that this version of dubito.recalibrate knows")
    fields = dict(meta["fields"])
    if meta["map"] in SETTINGS:
        settings: dict[str, Any] = dict(fields["settings"])
        for old in RENAMED.keys() & settings.keys():
            settings[RENAMED[old]] = settings.pop(old)
        fields["settings"] = SETTINGS[meta["map"]](**settings)
    return KINDS[meta["map"]](**tensors, **fields)
