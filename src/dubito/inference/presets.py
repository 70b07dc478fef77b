"""How the demo runs each registered method, and what its two problems share."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.inference.augment import Noise
from dubito.inference.fit import Method, fit
from dubito.inference.methods import (
    IVON,
    MAP,
    SGHMC,
    SWAG,
    Ensemble,
    Laplace,
    MCDropout,
    MeanTeacher,
    OnlineLaplace,
    PiModel,
    TemporalEnsembling,
    Variational,
)
from dubito.inference.registry import METHODS
from dubito.model import Model
from dubito.model.likelihoods import Gaussian, Likelihood
from dubito.model.priors import Normal
from dubito.posteriors import Posterior
from dubito.tensors import randomness


class Training(NamedTuple):
    """What suits a problem, whichever method it is given to."""

    epochs: int
    learning_rate: float
    batch_size: int
    prior_scale: float
    dropout: float
    damping: float  # of Laplace: a precision on top of the prior's
    walk: float  # learning rate at which SWAG walks about
    clip: float | None = None

    @property
    def descent(self) -> dict[str, Any]:
        """What every method that descends takes."""
        return {"epochs": self.epochs, "learning_rate": self.learning_rate, "clip": self.clip}


@dataclass(frozen=True)
class Recipe:
    """How a method is run. `likelihoods` are those it is for; () is any. What is not `shown` takes longer than a demo
    may, or is for unlabelled examples, of which it has none."""

    label: str
    method: Callable[[Training], Method]
    after_map: bool = field(default=False, kw_only=True)  # it goes on from a network that MAP has trained
    learns_prior: bool = field(default=False, kw_only=True)  # in the place of the problem's
    likelihoods: tuple[type[Likelihood], ...] = field(default=(), kw_only=True)
    shown: bool = field(default=True, kw_only=True)


def _map(t: Training) -> MAP:
    return MAP(**t.descent)


def _mc_dropout(t: Training) -> MCDropout:
    return MCDropout(at="hidden|output", rate=t.dropout, draws=100, **t.descent)


def _laplace(t: Training) -> Laplace:
    # So few data leave most of the weights as free as the prior does, and under the one of the training (or one set by the evidence)
    # hardly a prediction would be sure. Under the damped one the weights are not at an optimum, which is no news.
    return Laplace(damping=t.damping, check=False)


def _online_laplace(t: Training) -> OnlineLaplace:
    # it needs some training after its first look at the evidence
    return OnlineLaplace(every=max(1, t.epochs // 10), **{**t.descent, "epochs": max(3, t.epochs)})


def _swag(t: Training) -> SWAG:
    return SWAG(epochs=max(2, t.epochs // 2), learning_rate=t.walk, collecting_rate=t.walk, collect_after=0.0, clip=1.0)


def _sghmc(t: Training) -> SGHMC:
    # from the trained network; the metric takes the place of a learning rate for each problem
    draws = max(2, min(30, t.epochs))
    return SGHMC(
        burn_in=max(1, t.epochs // 4), draws=draws, thin=max(1, t.epochs // 60), preconditioner="rmsprop", learning_rate=1e-4
    )


def _variational(t: Training) -> Variational:
    # from the trained network, so that most of the training goes into the spread
    return Variational(**{**t.descent, "epochs": max(2, t.epochs)})


def _ivon(t: Training) -> IVON:
    # So few data leave most weights as free as this prior does. From the trained network, sure of itself, the spread grows towards that
    # and is not given the time to arrive.
    return IVON(epochs=max(2, t.epochs), learning_rate=0.005, initial_hessian=20.0, hessian_momentum=0.999)


RECIPES: dict[str, Recipe] = {
    "map": Recipe("MAP", _map),
    "mc_dropout": Recipe("MC dropout", _mc_dropout),
    "ensemble": Recipe("Ensemble of 10", lambda t: Ensemble(_map(t), 10)),
    "laplace": Recipe("Laplace", _laplace, after_map=True),
    "online_laplace": Recipe("Online Laplace", _online_laplace, learns_prior=True),
    "neural_linear": Recipe("Neural linear", lambda _: METHODS["neural_linear"](), after_map=True, likelihoods=(Gaussian,)),
    "swag": Recipe("SWAG", _swag, after_map=True),
    "sghmc": Recipe("SGHMC", _sghmc, after_map=True),
    "ivon": Recipe("IVON", _ivon, after_map=True),
    "variational": Recipe("Mean field", _variational, after_map=True),
    "pi_model": Recipe("Pi-model", lambda t: PiModel(_map(t), augment=Noise(0.1)), shown=False),
    "temporal_ensembling": Recipe("Temporal ensembling", lambda t: TemporalEnsembling(_map(t), augment=Noise(0.1)), shown=False),
    "mean_teacher": Recipe("Mean teacher", lambda t: MeanTeacher(_map(t), augment=Noise(0.1)), shown=False),
}
LONG = ("sgld", "metropolis", "ula", "mala", "hmc", "nuts", "mclmc", "mams")  # thousands of gradients over all data, or epochs


def recipe(name: str) -> Recipe:
    """A registered method's recipe; a method without one joins as it comes.

    >>> recipe("map").label
    'MAP'
    """
    known = METHODS[name]
    plain = Recipe(known.__name__, lambda _: known(), after_map=getattr(known, "post_hoc", False), shown=name not in LONG)
    return RECIPES.get(name) or plain


def suiting(names: Iterable[str], likelihood: type[Likelihood]) -> list[str]:
    """The methods that are for a likelihood, of those that are shown.

    >>> from dubito import Categorical
    >>> suiting(["map", "neural_linear"], Categorical)
    ['map']
    """
    shown = {name: recipe(name) for name in names}
    return [name for name, way in shown.items() if way.shown and issubclass(likelihood, way.likelihoods or Likelihood)]


class Fits:
    """Fits of one model by several methods, of which those that need a trained network share one."""

    def __init__(self, model: Model, data: tuple[Tensor, Tensor], training: Training, *, seed: int, effort: float):
        self.model, self.data, self.seed = model, data, seed
        self.training = training._replace(epochs=max(1, round(effort * training.epochs)))
        self.made: dict[str, tuple[Posterior, float]] = {}

    def __call__(self, name: str) -> tuple[Posterior, float]:
        """The posterior, and the seconds it took with all that it needed."""
        if name not in self.made:
            way = recipe(name)
            start, before = self("map") if way.after_map else (None, 0.0)
            begin, method = time.monotonic(), way.method(self.training)
            model = replace(self.model, prior=Normal()) if way.learns_prior else self.model
            posterior = fit(model, method, self.data, start=start, batch_size=self.training.batch_size, seed=self.seed)
            self.made[name] = posterior, before + time.monotonic() - begin
        return self.made[name]


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
