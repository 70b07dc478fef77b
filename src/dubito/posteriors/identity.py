"""How a file knows the model that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dubito.model import Model
from dubito.tensors import store

NEAR = 60  # characters around the place where two long texts begin to differ


def network(module: nn.Module) -> dict[str, Any]:
    """What a network is: its parameters, buffers and layers, whatever their values, mode and device.

    >>> network(nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 1)))["layers"]
    {'itself': 'Sequential', '0': 'Dropout', '1': 'Linear'}
    """
    kept = module.state_dict(
        keep_vars=True
    )  # without buffers that are made again at need, such as masks of the last input's size
    layers = {name or "itself": layer for name, layer in module.named_modules()}
    version = ".".join(torch.__version__.split(".")[:2])
    return {
        "parameters": {name: list(leaf.shape) for name, leaf in module.named_parameters()},
        "dtypes": {name: _kind(leaf) for name, leaf in module.named_parameters()},
        "buffers": {name: f"{_kind(leaf)} {list(leaf.shape)}" for name, leaf in module.named_buffers() if name in kept},
        "layers": {name: type(layer).__name__ for name, layer in layers.items()},
        # another torch may use other words for the same layer: its entry has another name, and the two are not compared
        f"torch {version} layers": {name: _words(layer) for name, layer in layers.items() if _torchs(layer)},
    }


def belonging(model: Model) -> dict[str, Any]:
    """What a file says of the model whose posterior it holds."""
    return {**network(model.network), "likelihood": store.describe(model.likelihood), "only": model.only}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What differs, and how, in a few words. What an older file does not say is not compared.

    >>> differences({"layers": {"1": "Tanh"}}, {"layers": {"1": "ReLU"}, "only": ""})
    [('layers', "1 'Tanh' in the file and 'ReLU' here")]
    """
    return [(what, _apart(was[what], value)) for what, value in now.items() if what in was and was[what] != value]


def _apart(was: Any, now: Any) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(f"{name} {_apart(was.get(name, 'absent'), now.get(name, 'absent'))}" for name in names[:3]) + more
    if isinstance(was, str) and isinstance(now, str):
        at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        was, now = _near(was, at), _near(now, at)
    return f"{_shown(was)} in the file and {_shown(now)} here"


def _near(text: str, at: int) -> str:
    first, last = max(0, at - NEAR), at + NEAR
    return f"{'...' if first else ''}{text[first:last]}{'...' if text[last:] else ''}"


def _shown(value: Any) -> str:
    return "absent" if value == "absent" else repr(value)


def _kind(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _torchs(layer: nn.Module) -> bool:
    """A layer of torch's own: others may tell of what changes with every pass."""
    return type(layer).__module__.startswith("torch.")


def _words(layer: nn.Module) -> str:
    """What a layer tells of itself beside its class, such as p=0.1; but nothing of the values and the device of its tensors."""
    try:
        like = object.__new__(type(layer))
        like.__dict__.update(layer.__dict__, training=True)
        for held in ("_parameters", "_buffers"):
            like.__dict__[held] = {name: _bare(leaf) for name, leaf in layer.__dict__[held].items()}
        return " ".join(store.without_addresses(like.extra_repr()).split())
    except Exception:  # it asks for the values, which are no part of what the network is
        return ""


def _bare(leaf: Tensor | None) -> Tensor | None:
    if leaf is None:
        return None
    bare = torch.empty_like(leaf, device="meta", requires_grad=False)
    return nn.Parameter(bare, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else bare
