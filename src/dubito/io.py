"""Posteriors on disk: one safetensors file with a JSON header. A file names no code; `load` needs the model it belongs to."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from torch import Tensor

from dubito import store, tree
from dubito.curvature.evidence import Evidence
from dubito.linalg import STRUCTURES, Blocks, Covariance
from dubito.model import Model
from dubito.posteriors import Conjugate, Gaussian, Mixture, Point, Posterior, Samples, Stochastic
from dubito.predict.dropout import Dropout

FORMS: dict[str, type[Posterior]] = {
    "point": Point,
    "samples": Samples,
    "stochastic": Stochastic,
    "mixture": Mixture,
    "conjugate": Conjugate,
    "gaussian": Gaussian,
}
NAMES = {form: name for name, form in FORMS.items()}


def save(posterior: Posterior, path: str | os.PathLike) -> None:
    """Write a posterior to one file, whole or not at all. It holds all weights, also those that are not Bayesian.

    >>> import dubito, tempfile, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> posterior = dubito.posteriors.Point(model, model.parameters(), model.buffers())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(posterior, f"{folder}/posterior.safetensors")
    ...     same = load(f"{folder}/posterior.safetensors", model)
    >>> bool(same.params["weight"] == posterior.params["weight"])
    True
    """
    tensors: dict[str, Tensor] = {}
    meta = {"kind": "posterior", "model": _describe(posterior.model), "posterior": _pack(posterior, tensors, "")}
    store.write(path, tensors, meta)


def load(path: str | os.PathLike, model: Model) -> Posterior:
    """Read a posterior of this model; a file that is damaged, foreign, or of another model is an error that says so."""
    tensors, meta = store.read(path)
    if meta.get("kind") != "posterior":
        raise store.FileError(f"{path}: written by dubito, but not a posterior (a checkpoint is continued with fit(resume=True))")
    was, now = meta["model"], _describe(model)
    for what, known in now.items():
        if was.get(what) != known:
            raise store.FileError(f"{path}: the posterior of another model; its {what} is {_short(was.get(what), known)}")
    return _unpack(meta["posterior"], tree.move(tensors, model.device), model, str(path))


def _describe(model: Model) -> dict[str, Any]:
    return {
        "parameters": {name: list(p.shape) for name, p in model.network.named_parameters()},
        "likelihood": repr(model.likelihood),
        "only": model.only,
    }


def _short(was: Any, now: Any) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return ", ".join(f"{n} {was.get(n, 'absent')} in the file and {now.get(n, 'absent')} here" for n in names[:3])
    return f"{was!r} in the file and {now!r} here"


def _pack(posterior: Posterior, tensors: dict[str, Tensor], path: str) -> dict:
    if type(posterior) not in NAMES:
        raise TypeError(f"there is no file format for a {type(posterior).__name__} posterior")
    content: dict[str, Any] = {"form": NAMES[type(posterior)]}
    for item in fields(posterior):
        value = getattr(posterior, item.name)
        if item.name == "members":
            content["members"] = [_pack(member, tensors, f"{path}{i}/") for i, member in enumerate(value)]
        elif item.name != "model":
            content[item.name] = _pack_value(value, tensors, f"{path}{item.name}")
    return content


def _pack_value(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """As `store.pack`, with the covariances, whose structure has a name, and the evidence, which may hold one."""
    if isinstance(value, Covariance):
        inner = {item.name: getattr(value, item.name) for item in fields(value)}  # pyright: ignore[reportArgumentType]
        if isinstance(value, Blocks):
            parts = [_pack_value(block, tensors, f"{path}/{i}") for i, block in enumerate(value.blocks)]
            return {"structure": "blocks", "blocks": parts}
        name = next(name for name, kind in STRUCTURES.items() if kind is type(value))
        return {"structure": name, "fields": {key: store.pack(v, tensors, f"{path}/{key}") for key, v in inner.items()}}
    if isinstance(value, Evidence):
        inner = {item.name: getattr(value, item.name) for item in fields(value)}
        return {"evidence": {key: _pack_value(v, tensors, f"{path}/{key}") for key, v in inner.items()}}
    return store.pack(value, tensors, path)


def _unpack_value(value: Any, tensors: dict[str, Tensor], template: Any) -> Any:
    if "structure" in value:
        if value["structure"] == "blocks":
            return Blocks(tuple(_unpack_value(block, tensors, None) for block in value["blocks"]))
        kind = STRUCTURES[value["structure"]]
        return kind(**{key: store.unpack(v, tensors) for key, v in value["fields"].items()})
    if "evidence" in value:
        return Evidence(**{key: _unpack_value(v, tensors, None) for key, v in value["evidence"].items()})
    return store.unpack(value, tensors, template)


def _unpack(content: dict, tensors: dict[str, Tensor], model: Model, path: str) -> Posterior:
    form = FORMS.get(content.get("form", ""))
    if form is None:
        raise store.FileError(f"{path}: holds a posterior of an unknown form, {content.get('form')!r}; upgrade dubito to read it")
    values: dict[str, Any] = {"model": model}
    for name, value in content.items():
        if name == "members":
            values[name] = tuple(_unpack(member, tensors, model, path) for member in value)
        elif name != "form":
            values[name] = _unpack_value(value, tensors, Dropout() if name == "dropout" else None)
    if isinstance(values.get("weights"), list):
        values["weights"] = tuple(values["weights"])
    return form(**values)
