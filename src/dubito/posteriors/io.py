"""Posteriors on disk: one safetensors file with a JSON header. A file names no code; `load` needs the model it belongs to.

Draws that are on disk already, `posteriors.Stored`, stay a folder of such files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dubito.curvature.evidence import Evidence
from dubito.model import Model
from dubito.posteriors import Conjugate, Drawn, Gaussian, Mixture, Point, Posterior, Samples, Stochastic, Stored
from dubito.posteriors.families import FAMILIES, Family
from dubito.posteriors.identity import belonging, differences
from dubito.posteriors.predict.dropout import Dropout
from dubito.tensors import store, tree
from dubito.tensors.checks import require
from dubito.tensors.covariances import STRUCTURES, Blocks, Covariance

TUPLES = ("weights", "departures")
FORMS: dict[str, type[Posterior]] = {  # a form of your own is saved and loaded once it has a name here
    "point": Point,
    "samples": Samples,
    "stochastic": Stochastic,
    "mixture": Mixture,
    "conjugate": Conjugate,
    "gaussian": Gaussian,
    "drawn": Drawn,
}


def save(posterior: Posterior, path: str | os.PathLike, *, base: bool = True) -> None:
    """Write a posterior to one file, whole or not at all. It holds all weights, also those that are not Bayesian.

    `base=False` leaves out the parameters that are not Bayesian, such as the frozen network below LoRA adapters: `load` then takes
    them from the network that it is given, which must have the same ones.

    A `Stored` posterior becomes a new folder of that name, free of the run that made it: its files are linked there where the disk
    can do that, and copied where it cannot. (`save(posterior.load(), path)` puts its draws into one file.)

    >>> import dubito, tempfile, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> posterior = dubito.posteriors.Point(model, model.parameters(), model.buffers())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(posterior, f"{folder}/posterior.safetensors")
    ...     same = load(f"{folder}/posterior.safetensors", model)
    >>> bool(same.params["weight"] == posterior.params["weight"])
    True
    """
    if isinstance(posterior, Stored):
        require(base, "base=False: a folder of draws holds the base network once; save its load() without")
        _save_folder(posterior, Path(path))
        return
    tensors: dict[str, Tensor] = {}
    left_out = set() if base else {name for name, _ in posterior.model.network.named_parameters()}
    meta = {"kind": "posterior", "model": belonging(posterior.model), "posterior": _pack(posterior, tensors, "", left_out)}
    if posterior.label:
        meta["label"] = posterior.label
    store.write(path, tensors, meta)


def load(path: str | os.PathLike, model: Model) -> Posterior:
    """Read a posterior of this model; a file that is damaged, foreign, or of another model is an error that says so.

    The network is one of the same class, layers and precision, with any weights, in any mode and on any device.

    A folder of draws, saved or left by a run (its `checkpoint`, finished or not), is opened where it is, as a `posteriors.Stored`.
    """
    if Path(path).is_dir():
        return Stored.open(path, model)
    tensors, meta = store.read(path)
    if meta.get("kind") != "posterior":
        raise store.FileError(f"{path}: written by dubito, but not a posterior (a checkpoint is continued with fit(resume=True))")
    for what, how in differences(meta["model"], belonging(model)):
        raise store.FileError(f"{path}: the posterior of another model; its {what} {'are' if what.endswith('s') else 'is'} {how}")
    return _unpack(meta["posterior"], tree.move(tensors, model.device), model, str(path))


def _save_folder(posterior: Stored, path: Path) -> None:
    about = {**belonging(posterior.model), "sampler": posterior.sampler}
    if posterior.departures:
        about["departures"] = list(posterior.departures)
    if path.exists() and path.samefile(posterior.folder):
        store.write_shared(path, posterior.buffers, about)
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists: draws on disk are saved as a folder of their own, which must be a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        for shard in posterior.archive.shards:
            try:
                os.link(posterior.folder / shard.file, scratch / shard.file)  # shards are never written again
            except OSError:
                shutil.copyfile(posterior.folder / shard.file, scratch / shard.file)
        store.write_shared(scratch, posterior.buffers, about)
        replace(posterior.archive, folder=scratch).write()
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o777 & ~mask)  # mkdtemp's folders are for the owner only
        os.replace(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _pack(posterior: Posterior, tensors: dict[str, Tensor], path: str, left_out: Collection[str]) -> dict:
    """A description of a posterior; its tensors go into `tensors`. Of buffers that are left out, it has the checksums."""
    form = next((name for name, kind in FORMS.items() if kind is type(posterior)), None)
    if form is None:
        hint = ", which is a folder already: save its load()" if isinstance(posterior, Stored) else ""
        raise TypeError(f"there is no file format for a {type(posterior).__name__} posterior{hint}")
    content: dict[str, Any] = {"form": form}
    for item in fields(posterior):
        value = getattr(posterior, item.name)
        if item.name == "members":
            content["members"] = [_pack(member, tensors, f"{path}{i}/", left_out) for i, member in enumerate(value)]
        elif item.name == "buffers":
            content["buffers"] = store.pack({k: v for k, v in value.items() if k not in left_out}, tensors, f"{path}buffers")
            base = {name: store.checksum({name: leaf}) for name, leaf in value.items() if name in left_out}
            content |= {"base": base} if base else {}
        elif item.name != "model" and (item.name != "departures" or value):
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
    if isinstance(value, Family):
        name = next((name for name, kind in FAMILIES.items() if kind is type(value)), None)
        if name is None:
            raise TypeError(
                f"files name no code, and {type(value).__name__} is a family of your own: save draws of it, as Samples"
            )
        return {"family": name, "fields": {item.name: getattr(value, item.name) for item in fields(value)}}  # pyright: ignore[reportArgumentType]
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
    if "family" in value:
        return FAMILIES[value["family"]](**value["fields"])
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
        elif name not in ("form", "base"):
            values[name] = _unpack_value(value, tensors, Dropout() if name == "dropout" else None)
    if "base" in content:
        values["buffers"] |= _base(content["base"], model, path)
    values |= {name: tuple(value) for name, value in values.items() if name in TUPLES and isinstance(value, list)}
    return form(**values)


def _base(checksums: dict[str, str], model: Model, path: str) -> dict[str, Tensor]:
    """The parameters that a file leaves out, from the network."""
    buffers = model.buffers()
    for name, checksum in checksums.items():
        if name not in buffers or store.checksum({name: buffers[name]}) != checksum:
            raise store.FileError(
                f"{path}: was saved without its base network, and {name} differs from that: load it with the same base weights"
            )
    return {name: buffers[name] for name in checksums}
