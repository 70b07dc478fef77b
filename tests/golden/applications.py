"""What the applications and the command line keep on disk: how each is made and read, with public names only."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import dubito
from dubito import MAP, Categorical, Gaussian, MCDropout, Model, NeuralLinear, priors, recalibrate
from dubito.apps import bandits
from dubito.apps.active import ActiveLearning
from dubito.apps.exploration import EpsilonGreedy, Maze, QLearning, Thompson
from dubito.apps.optimize import Optimization
from golden.cases import CLASSES, UNLABELED, X, dropping, fill, lattice, mlp

# Maps that make predictives calibrated: name -> (settings, the posterior whose predictions they are fitted to)
MAPS: dict[str, tuple[Any, str]] = {
    "temperature": (recalibrate.Temperature(), "point/categorical"),
    "vector scaling": (recalibrate.VectorScaling(0.125), "point/categorical"),
    "matrix scaling": (recalibrate.MatrixScaling(0.125), "point/categorical"),
    "isotonic": (recalibrate.Isotonic(), "point/categorical"),
    "histogram": (recalibrate.Histogram(3), "point/categorical"),
    "conformal sets": (recalibrate.ConformalSets("lac", by_class=True), "point/categorical"),
    "conformal sets, raps": (recalibrate.ConformalSets("raps"), "point/categorical"),
    "variance": (recalibrate.Variance(), "samples/sgld"),
    "quantiles": (recalibrate.Quantiles(), "samples/sgld"),
    "conformal intervals": (recalibrate.ConformalIntervals(), "samples/sgld"),
}


def applied(fitted: Any, predictive: Any) -> list[float]:
    """The numbers of a recalibrated predictive, of sets of classes, or of intervals."""
    if isinstance(fitted, recalibrate.SetRule):
        found = fitted(predictive, generator=torch.Generator().manual_seed(0))
    else:
        found = fitted(predictive)
    if not isinstance(found, tuple | torch.Tensor):
        found = found.mean
    leaves = found if isinstance(found, tuple) else (found,)
    return [value for leaf in leaves for value in leaf.double().flatten().tolist()]


# Agents on bandits, stopped after 17 of 24 rounds
CONTEXTS = lattice(24, 3, seed=8)
BANDIT = bandits.Bandit(CONTEXTS, (CONTEXTS + lattice(24, 3, seed=9) / 8).double(), name="golden")


def values(network: Callable[..., nn.Module] = mlp) -> Model:
    """A model from three numbers to the values of three arms or actions."""
    return Model(network(3), Gaussian(scale=0.25), priors.Normal(scale=1.0))


AGENTS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: bandits.Uniform(3, seed=5),
    "linear": lambda: bandits.Linear(3, 3, seed=5),
    "neural linear": lambda: bandits.NeuralLinear(values(), MAP(epochs=3), 3, every=8, seed=5),
    "dropout": lambda: bandits.Thompson(values(dropping), MCDropout(epochs=3), 3, every=8, seed=5),
    "members": lambda: bandits.Thompson(values(), MAP(epochs=3), 3, every=8, members=2, seed=5),
}

# Q-learning, stopped after 30 of 50 steps
LEARNERS: dict[str, tuple[Any, Any]] = {
    "map": (MAP(learning_rate=0.01), EpsilonGreedy(1.0, 0.25, steps=40)),
    "dropout": (MCDropout(learning_rate=0.01), Thompson()),
    "variational": (dubito.Variational(learning_rate=0.01), Thompson(hold=3)),
    "ivon": (dubito.IVON(learning_rate=0.01, hessian_momentum=0.99), Thompson(hold=1)),
}


def learner(name: str) -> QLearning:
    """An agent for a maze of five fields."""
    method, explore = LEARNERS[name]
    network = fill(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.125), nn.Linear(4, 4)))
    model = Model(network, Gaussian(scale=0.125), priors.Normal(scale=1.0))
    return QLearning(model, method, 4, explore=explore, initial=20, sync=7, every=2, capacity=40, batch_size=8, seed=3)


def maze() -> Maze:
    """The maze of the agents."""
    return Maze("S.\n#.\n.G", limit=15)


def search() -> Optimization:
    """A search for the largest value on a line."""
    network = fill(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
    model = Model(network, Gaussian(), priors.Normal(scale=1.0))
    method = [MAP(epochs=5, learning_rate=0.02), NeuralLinear()]
    return Optimization(model, method, [(-1.0, 1.0)], acquisition="thompson", initial=3, candidates=20, refine=2)


def active(folder: Path, *, new: bool = False) -> ActiveLearning:
    """A session of active learning: a new one, or the one that is in the folder."""
    model, method = Model(dropping(3), Categorical(), priors.Normal()), MCDropout(epochs=5, draws=6, learning_rate=0.05)
    options: dict[str, Any] = {"acquisition": "bald", "held_out": (X, CLASSES), "start": "last"}
    if new:
        return ActiveLearning(model, method, X, **options, folder=folder, seed=7)
    return ActiveLearning.load(folder, model, method, X, **options)


def wide() -> nn.Module:
    """A network with units that can be cut out."""
    network = fill(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)))
    with torch.no_grad():
        network[0].weight[::2] = 0.0  # pyright: ignore
        network[0].bias[::2] = 0.0  # pyright: ignore
    return network


EDGES = UNLABELED[:6]  # inputs of the compressed networks

# The command line. Commands run in a copy of the folder `tables`.
QUICK = ["--hidden", "4", "--batch-size", "8"]
NUMBERS = ["numbers.csv", "--target", "price", "--ignore", "cost", *QUICK]
BOTH = ["numbers.csv", "--target", "price", "--target", "cost", *QUICK]
SPECIES = ["classes.csv", "--target", "species", *QUICK]
DRAWS = ["--chains", "2", "--draws", "3", "--burn-in", "2"]
FITS: dict[str, list[str]] = {
    "map": ["map", *NUMBERS, "--epochs", "5", "--patience", "2"],
    "mc_dropout": ["mc_dropout", *SPECIES, "--epochs", "5", "--dropout", "0.25"],
    "ensemble": ["ensemble", *BOTH, "--epochs", "5", "--size", "2"],
    "laplace": ["laplace", *SPECIES, "--epochs", "5", "--no-check"],
    "neural_linear": ["neural_linear", *BOTH, "--epochs", "5"],
    "variational": ["variational", *NUMBERS, "--epochs", "5", "--family", "layerwise"],
    "swag": ["swag", *SPECIES, "--epochs", "5", "--rank", "3"],
    "ivon": ["ivon", *NUMBERS, "--epochs", "5"],
    "sghmc": ["sghmc", *NUMBERS, "--draws", "3", "--burn-in", "2"],
    "hmc": ["hmc", *SPECIES, "--held-out", "0", *DRAWS, "--step-size", "0.01", "--path-length", "0.1"],
    "own network": ["map", "classes.csv", "--target", "species", "--epochs", "5", "--network", "own:build"],
}
TABLES = {name: next(word for word in words if word.endswith(".csv")) for name, words in FITS.items()}
INTERRUPTED: dict[str, tuple[str, int]] = {
    "map": ("map", 7),
    "laplace": ("laplace", 13),
    "laplace, second stage": ("laplace", 23),
    "hmc": ("hmc", 4),
}
COMPARED = [
    "compare", "--data", "classes.csv", "--target", "species", "--hidden", "4", "--epochs", "3", "--batch-size", "8",
    "--methods", "map", "mc_dropout,rate=0.25", "ensemble,size=2", "laplace", "--seeds", "2",
]  # fmt: skip


def command(*words: object) -> None:
    """`python -m dubito ...`, in this process; anything but success is an error."""
    with patch.object(sys, "argv", ["dubito", *map(str, words)]):
        try:
            runpy.run_module("dubito", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"dubito {' '.join(map(str, words))} ended with {end.code}") from None
