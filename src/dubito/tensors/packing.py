"""Nested values as flat tensors and JSON, and as text by which another process knows them again.

`pack` turns states (dataclasses, dicts, lists, numbers, tensors, torch optimizers) into tensors and JSON; `unpack` fills a template of
the same type, so a file never names a class to import.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from dubito.tensors.files import FileError, checksum


def describe(value: Any) -> str:
    """A value as text that is the same in every process: without the memory addresses that functions and plain objects print, and with
    a checksum of every tensor. A dataclass that was renamed keeps its earlier name as the class attribute `stored_name`. A field that
    is new says in `metadata={"before": value}` what held before there was one, and with that value it is left out.

    >>> describe(lambda: 0)
    '<function <lambda>>'
    >>> describe({"w": torch.zeros(2, 1000)})
    "{'w': tensor(float32, [2, 1000], 3ef4ba222a6ddd8baa069ef77d0fc9e5)}"
    """
    if isinstance(value, Tensor):
        return f"tensor({str(value.dtype).removeprefix('torch.')}, {list(value.shape)}, {checksum({'': value})})"
    if type(value) is dict:
        return f"{{{', '.join(f'{describe(key)}: {describe(item)}' for key, item in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(describe, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(describe, value))}{',' if len(value) == 1 else ''})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {f.name: f.metadata["before"] for f in dataclasses.fields(value) if "before" in f.metadata}
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
        fields = (f"{name}={describe(item)}" for name, item in values.items() if name not in old or item != old[name])
        return f"{getattr(type(value), 'stored_name', type(value).__qualname__)}({', '.join(fields)})"
    return without_addresses(repr(value))


def without_addresses(words: str) -> str:
    """Text without the memory addresses of objects: "<f at 0x7f>" becomes "<f>"."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", words)


@singledispatch
def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> dict:
    """A JSON-able description of a nested value; its tensors go into `tensors` under their paths.

    Fields of a dataclass with `metadata={"transient": True}` (what is made again at need, such as compiled code) are left out.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(
            f"a state may hold tensors, numbers, strings, generators, dataclasses, dicts, lists and optimizers; "
            f"{path or 'the state'} is a {type(value).__name__}"
        )
    kept = [f.name for f in dataclasses.fields(value) if not f.metadata.get("transient")]
    return {"fields": {name: pack(getattr(value, name), tensors, f"{path}/{name}") for name in kept}}


@pack.register
def _(value: Tensor, tensors: dict[str, Tensor], path: str = "") -> dict:
    tensors[path] = value
    return {"tensor": path}


@pack.register
def _(value: int | float | str | None, tensors: dict[str, Tensor], path: str = "") -> dict:
    return {"value": value}


@pack.register
def _(value: torch.Generator, tensors: dict[str, Tensor], path: str = "") -> dict:
    return {"generator": pack(value.get_state(), tensors, path)}


@pack.register
def _(value: dict, tensors: dict[str, Tensor], path: str = "") -> dict:
    return {"dict": [[key, pack(item, tensors, f"{path}/{key}")] for key, item in value.items()]}


@pack.register
def _(value: list | tuple, tensors: dict[str, Tensor], path: str = "") -> dict:
    return {"list": [pack(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]}


@pack.register
def _(value: torch.optim.Optimizer, tensors: dict[str, Tensor], path: str = "") -> dict:
    return {"stateful": pack(value.state_dict(), tensors, path)}


def unpack(description: Any, tensors: dict[str, Tensor], template: Any = None) -> Any:
    """The inverse of `pack`. Dataclasses, generators and optimizers are rebuilt on `template`, a value of the same shape."""
    (kind, content), *_ = description.items()
    if kind not in _UNPACKERS:
        raise FileError(f"unknown entry {kind!r}; the file was written by another version of dubito")
    return _UNPACKERS[kind](content, tensors, template)


def _tensor(content: Any, tensors: dict[str, Tensor], template: Any) -> Tensor:
    tensor = tensors[content]
    if isinstance(template, Tensor) and template.shape == tensor.shape and template.dtype == tensor.dtype:
        with torch.no_grad():
            return template.copy_(tensor)  # in place: an optimizer in the same state refers to this very object
    return tensor


def _generator(content: Any, tensors: dict[str, Tensor], template: Any) -> torch.Generator:
    template.set_state(unpack(content, tensors).cpu())
    return template


def _fields(content: Any, tensors: dict[str, Tensor], template: Any) -> Any:
    filled = {name: unpack(item, tensors, getattr(template, name)) for name, item in content.items()}
    transient = {f.name: getattr(template, f.name) for f in dataclasses.fields(template) if f.metadata.get("transient")}
    return type(template)(**filled, **transient)


def _dict(content: Any, tensors: dict[str, Tensor], template: Any) -> dict:
    inner = template if isinstance(template, dict) else {}
    return {key: unpack(item, tensors, inner.get(key)) for key, item in content}


def _list(content: Any, tensors: dict[str, Tensor], template: Any) -> list | tuple:
    inner = list(template) if isinstance(template, list | tuple) else []
    inner += [None] * (len(content) - len(inner))
    items = [unpack(item, tensors, like) for item, like in zip(content, inner, strict=False)]
    return tuple(items) if isinstance(template, tuple) else items


def _stateful(content: Any, tensors: dict[str, Tensor], template: Any) -> Any:
    template.load_state_dict(unpack(content, tensors))
    return template


_UNPACKERS: dict[str, Callable[[Any, dict[str, Tensor], Any], Any]] = {
    "tensor": _tensor,
    "value": lambda content, tensors, template: content,
    "generator": _generator,
    "fields": _fields,
    "dict": _dict,
    "list": _list,
    "stateful": _stateful,
}
