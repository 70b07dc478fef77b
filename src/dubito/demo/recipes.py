"""How the demo runs each registered method, and what its two problems share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from dubito import randomness
from dubito.fit import Method
from dubito.methods import MAP, Ensemble, MCDropout
from dubito.registry import METHODS


class Training(NamedTuple):
    """What suits a problem, whichever method it is given to."""

    epochs: int
    learning_rate: float
    batch_size: int
    prior_scale: float
    dropout: float
    clip: float | None = None

    @property
    def descent(self) -> dict[str, Any]:
        """What every method that descends takes."""
        return {"epochs": self.epochs, "learning_rate": self.learning_rate, "clip": self.clip}


@dataclass(frozen=True)
class Recipe:
    label: str
    method: Callable[[Training], Method]


def _map(t: Training) -> MAP:
    return MAP(**t.descent)


def _mc_dropout(t: Training) -> MCDropout:
    return MCDropout(at="hidden|output", rate=t.dropout, draws=100, **t.descent)


RECIPES: dict[str, Recipe] = {
    "map": Recipe("MAP", _map),
    "mc_dropout": Recipe("MC dropout", _mc_dropout),
    "ensemble": Recipe("Ensemble of 10", lambda t: Ensemble(_map(t), 10)),
}


def recipe(name: str) -> Recipe:
    """A registered method's recipe; a method without one joins as it comes.

    >>> recipe("map").label
    'MAP'
    """
    return RECIPES.get(name) or Recipe(METHODS[name].__name__, lambda _: METHODS[name]())


def method(name: str, training: Training, *, effort: float) -> Method:
    return recipe(name).method(training._replace(epochs=max(1, round(effort * training.epochs))))


class Perceptron(nn.Sequential):
    """Two hidden layers, after anything else; `spread` sets the weights' start.

    Weights start from N(0, spread^2 / inputs) and biases from N(0, 1), or from torch's own narrower ranges. On one input the latter
    are nearly the same line in every member of an ensemble.
    """

    def __init__(
        self, sizes: tuple[int, int, int], activation: type[nn.Module], *before: nn.Module, seed: int, spread: float | None = None
    ):
        inputs, width, outputs = sizes
        with randomness.forked(randomness.derive(seed, "network")):
            layers = {
                **{f"before{i}": layer for i, layer in enumerate(before)},
                "input": nn.Linear(inputs, width),
                "activation1": activation(),
                "hidden": nn.Linear(width, width),
                "activation2": activation(),
                "output": nn.Linear(width, outputs),
            }
            super().__init__(OrderedDict(layers))
            self.spread = spread
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """As an ensemble calls it: after the layers have reset themselves."""
        for layer in self:
            if self.spread is not None and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0.0, self.spread * layer.in_features**-0.5)
                nn.init.normal_(layer.bias, 0.0, 1.0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small are faster on one thread, and far faster where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
