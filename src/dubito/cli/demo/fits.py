"""The fits of the demo, and the network of its two problems."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace

from torch import Tensor, nn

from dubito.inference.fit import fit
from dubito.inference.method import inexact_settings
from dubito.inference.presets import Training, configure, dropout_places, label
from dubito.model import Model
from dubito.model.priors import Normal
from dubito.posteriors import Posterior
from dubito.posteriors.posterior import departure_label
from dubito.tensors import randomness


class Fits:
    """Fits of one model by several methods. Methods that start from a trained network share one."""

    def __init__(self, model: Model, data: tuple[Tensor, Tensor], training: Training, *, seed: int, effort: float):
        self.model, self.data, self.seed = model, data, seed
        epochs = max(1, round(effort * training.epochs))
        self.training = training._replace(epochs=epochs, dropout_at=dropout_places(model.network))
        self.posteriors: dict[str, tuple[Posterior, float]] = {}

    def label(self, name: str) -> str:
        """The name of a method in the tables, which says if it is tempered or generalized."""
        method = configure(name, self.training).method
        word = departure_label(inexact_settings(method)).partition(" ")[0]
        return label(name, method) + (f" [{word}]" if word else "")

    def __call__(self, name: str) -> tuple[Posterior, float]:
        """The posterior of a registered method, and the seconds that the fit took, including the training it started from."""
        if name not in self.posteriors:
            configuration = configure(name, self.training)
            start, before = (None, 0.0) if configuration.start is None else self("map")
            begin = time.monotonic()
            model = replace(self.model, prior=Normal()) if configuration.learns_prior else self.model
            size = self.training.batch_size
            posterior = fit(model, configuration.method, self.data, start=start, batch_size=size, seed=self.seed)
            self.posteriors[name] = posterior, before + time.monotonic() - begin
        return self.posteriors[name]


class Perceptron(nn.Sequential):
    """An MLP with two hidden layers, after any layers `before`.

    Weights start from N(0, spread^2 / inputs) and biases from N(0, 1) if `spread` is given, else from PyTorch's narrower
    distributions. On one input the latter start as nearly the same line in every member of an ensemble.
    """

    def __init__(
        self, sizes: tuple[int, int, int], activation: type[nn.Module], *before: nn.Module, seed: int, spread: float | None = None
    ):
        inputs, width, outputs = sizes
        with randomness.fork_rng(randomness.derive_seed(seed, "network")):
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
        """Draw new weights; an ensemble calls this after it has reset the layers."""
        for layer in self:
            if self.spread is not None and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0.0, self.spread * layer.in_features**-0.5)
                nn.init.normal_(layer.bias, 0.0, 1.0)
