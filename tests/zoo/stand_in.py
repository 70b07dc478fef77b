"""A stand-in for torchvision, which timm and segmentation-models-pytorch import and whose functions no network here calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class Name(type):
    """A class with every attribute, each of them such a class: `InterpolationMode.BILINEAR`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Name(name, (), {})
        setattr(cls, name, made)
        return made


class Module(ModuleType):
    """A module with every name."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Name(name, (), {})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all that is said to be in it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """A module of any name inside torchvision."""
        if fullname.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """An empty one."""
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let `import torchvision` work where it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(Finder())
