"""The network of a fit: an MLP described by flags, or the user's own network, given as `package.module:factory`."""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn
from tyro.conf import arg

from dubito.cli.commands.errors import UsageError
from dubito.evaluation.problems import ACTIVATIONS, perceptron
from dubito.tensors.checks import one_of, require

OWN = (
    "Your own network instead of the MLP: package.module:factory, in the current folder or on the Python path, is called as "
    "factory(inputs, outputs) and returns an nn.Module. `inputs` is the number of columns (or the shape of an input of an NPZ file), "
    "`outputs` the number of classes or targets."
)


@dataclass(frozen=True)
class Network:
    """An MLP, or your own network."""

    hidden: Annotated[tuple[int, ...], arg(metavar="WIDTH ...")] = (64, 64)
    """Widths of the hidden layers; none for a linear model."""
    activation: Literal["relu", "tanh", "silu", "gelu"] = "relu"
    """Activation function between the layers."""
    dropout: float = 0.0
    """Dropout rate after each hidden layer."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help=OWN, help_behavior_hint="")] = None

    def __post_init__(self):
        widths = " ".join(map(str, self.hidden))
        require(all(width >= 1 for width in self.hidden), f"--hidden must be positive widths; got {widths}")
        require(0 <= self.dropout < 1, f"--dropout must be at least 0 and below 1; got {self.dropout}")
        one_of(ACTIVATIONS, activation=self.activation)
        default = (self.hidden, self.activation, self.dropout) == ((64, 64), "relu", 0.0)
        require(self.network is None or default, "--network replaces the MLP: leave out --hidden, --activation and --dropout")

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A network for inputs of this shape, initialized by the global generator."""
        if self.network is not None:
            return call(self.network, shape, outputs)
        mlp = perceptron(self.hidden, activation=self.activation, dropout=self.dropout, head="head")
        return mlp(shape, outputs)

    def describe(self, shape: tuple[int, ...], outputs: int) -> str:
        """The network in one line."""
        if self.network is not None:
            return self.network
        widths = "-".join(map(str, (math.prod(shape), *self.hidden, outputs)))
        return f"MLP {widths}, {self.activation}" + (f", dropout {self.dropout:g}" if self.dropout else "")


def call(name: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The network that a factory makes. The name must come from the user and never from a file, since importing it runs code."""
    factory = _imported(name)
    inputs = shape[0] if len(shape) == 1 else shape
    try:
        network = factory(inputs, outputs)
    except Exception as error:
        raise UsageError(f"--network {name}: calling it with ({inputs}, {outputs}) failed: {reason(error)}") from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"--network {name}: the factory must return a torch.nn.Module; got a {type(network).__name__}")
    if not any(True for _ in network.parameters()):
        raise UsageError(f"--network {name}: the network has no parameters")
    return network


def _imported(name: str) -> Callable[..., Any]:
    module, colon, factory = name.partition(":")
    if not (module and colon and factory):
        raise UsageError(f"--network {name}: must have the form package.module:factory")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a console script has its own folder there
    try:
        value = getattr(importlib.import_module(module), factory, None)
    except Exception as error:
        raise UsageError(f"--network {name}: cannot import {module}: {reason(error)}") from error
    if not callable(value):
        problem = "has no function" if value is None else f"has a {type(value).__name__}, not a function, called"
        raise UsageError(f"--network {name}: the module {module} {problem} {factory}")
    return value


def reason(error: Exception) -> str:
    """An error of the user's code in one line, with the line of code that raised it."""
    ours = ("<", os.path.dirname(importlib.__file__), os.path.dirname(torch.__file__))
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith(ours)]
    place = f" ({os.path.basename(theirs[-1].filename)}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{place}"
