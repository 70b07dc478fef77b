"""Presets: how each method is configured for ordinary problems.

`dubito fit`, `dubito compare` and `dubito demo` all configure a method by `configure`, so that the same method on the same problem is
fitted alike wherever it is run. The rule:

1. A problem has one `Training`: epochs, learning rate, batch size, prior scale and the few settings that only some methods need.
2. `PRESETS` maps the name of a method to a `Preset`, a function of that `Training`. A setting that the preset does not mention has the
   default of the method's class.
3. A preset with `after_map` starts from a network that MAP has trained with the same `Training`. Members of an ensemble are
   initialized anew, so each of them is trained inside the ensemble.
4. Options that the user gives come last and replace single fields.

A registered method without a preset runs with the defaults of its class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypedDict, get_type_hints

from torch import nn

from dubito._moved import renamed
from dubito.inference.augment import Noise
from dubito.inference.descent import default_budget
from dubito.inference.method import Method, traits_of
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
from dubito.network.inspect import layers_of
from dubito.posteriors.predict.dropout import DROPOUTS, places

__getattr__ = renamed(__name__, {"Recipe": "Preset", "recipe": "preset", "RECIPES": "PRESETS"})


class DescentSettings(TypedDict):
    """The settings that every method trained by gradient descent takes."""

    epochs: int
    learning_rate: float
    clip: float | None


class Training(NamedTuple):
    """The settings of a problem, whichever method is fitted to it."""

    epochs: int
    learning_rate: float
    batch_size: int
    prior_scale: float | None  # standard deviation of the Normal prior on all weights; None: the default prior of `Model`
    dropout: float
    walk: float  # SWAG: constant learning rate while weights are collected
    clip: float | None = None
    members: int = 5  # of an ensemble
    laplace_subset: str = "all"  # weights that Laplace covers; "last_layer" where there are few examples for many weights
    sghmc_rate: float | None = 1e-4  # SGHMC: learning rate with RMSprop's metric; None: plain, at its own default
    dropout_at: str | None = (
        None  # MC dropout: pattern of the layers whose inputs are dropped; None: the network's dropout layers
    )

    @property
    def descent(self) -> DescentSettings:
        """The settings of gradient descent, as keyword arguments of MAP and its relatives."""
        return {"epochs": self.epochs, "learning_rate": self.learning_rate, "clip": self.clip}

    def model(self, network: nn.Module, likelihood: Likelihood) -> Model:
        """The model with the prior of the problem."""
        return with_prior(network, likelihood, self.prior_scale)


def with_prior(network: nn.Module, likelihood: Likelihood, prior_scale: float | None) -> Model:
    """A model whose weights have N(0, prior_scale^2), or where that is None the default prior of `Model`.

    >>> from dubito import Categorical
    >>> with_prior(nn.Linear(4, 2), Categorical(), None).prior, with_prior(nn.Linear(4, 2), Categorical(), 0.5).prior
    (Normal.fan_in(scale=3, bias=1, learned=True), Normal(scale=0.5))
    """
    return Model(network, likelihood) if prior_scale is None else Model(network, likelihood, Normal(scale=prior_scale))


def table_training(rows: int, *, batch_size: int = 32, prior_scale: float | None = None) -> Training:
    """The training of `dubito fit`, which follows the data as that of MAP() does, on standardized inputs and targets.

    >>> table_training(100, batch_size=50).epochs, table_training(10**6).epochs
    (1500, 100)
    """
    epochs, rate = default_budget(math.ceil(rows / batch_size))
    return Training(epochs, rate, batch_size, prior_scale, dropout=0.1, walk=3e-3)


@dataclass(frozen=True)
class Preset:
    """How one method is configured.

    Args:
        label: its name in tables.
        method: makes it for a problem's training.
        after_map: it starts from a network that MAP has trained.
        learns_prior: the prior's scale is learned, so the problem's is not used.
        likelihoods: those that it supports; () is all.
        shown: whether the demo runs it. It leaves out what takes too long, and what needs unlabelled examples.
    """

    label: str
    method: Callable[[Training], Method]
    after_map: bool = field(default=False, kw_only=True)
    learns_prior: bool = field(default=False, kw_only=True)
    likelihoods: tuple[type[Likelihood], ...] = field(default=(), kw_only=True)
    shown: bool = field(default=True, kw_only=True)


def _map(t: Training) -> MAP:
    return MAP(**t.descent)


def _mc_dropout(t: Training) -> MCDropout:
    return MCDropout(at=t.dropout_at, rate=t.dropout, draws=100, **t.descent)


def _laplace(t: Training) -> Laplace:
    # of all weights with few examples, hardly any prediction would be confident: the data determine only a few directions
    return Laplace(subset=t.laplace_subset)


def _online_laplace(t: Training) -> OnlineLaplace:
    # at least three epochs, so that training continues after the first evidence step
    return OnlineLaplace(every=max(1, t.epochs // 10), **{**t.descent, "epochs": max(3, t.epochs)})


def _swag(t: Training) -> SWAG:
    return SWAG(epochs=max(2, t.epochs // 2), learning_rate=t.walk, collecting_rate=t.walk, collect_after=0.0, clip=1.0)


def _sghmc(t: Training) -> SGHMC:
    # where the noise is learned, a metric replaces a learning rate that would have to be chosen for each problem
    plain = SGHMC(burn_in=max(1, t.epochs // 4), draws=max(2, min(30, t.epochs)), thin=max(1, t.epochs // 60))
    return plain if t.sghmc_rate is None else replace(plain, preconditioner="rmsprop", learning_rate=t.sghmc_rate)


def _variational(t: Training) -> Variational:
    # from a trained network, so that most steps go into the variances
    return Variational(**{**t.descent, "epochs": max(2, t.epochs)})


def _ivon(t: Training) -> IVON:
    # From a confident start the variances grow towards the prior's, and the training ends before they arrive there.
    return IVON(epochs=max(2, t.epochs), learning_rate=0.005, initial_hessian=20.0, hessian_momentum=0.999)


def _class_defaults(name: str) -> Callable[[Training], Method]:
    return lambda _: METHODS[name]()


PRESETS: dict[str, Preset] = {
    "map": Preset("MAP", _map),
    "mc_dropout": Preset("MC dropout", _mc_dropout),
    "ensemble": Preset("Ensemble", lambda t: Ensemble(_map(t), t.members)),
    "laplace": Preset("Laplace", _laplace, after_map=True, learns_prior=True),
    "online_laplace": Preset("Online Laplace", _online_laplace, learns_prior=True),
    "neural_linear": Preset("Neural linear", _class_defaults("neural_linear"), after_map=True, likelihoods=(Gaussian,)),
    "swag": Preset("SWAG", _swag, after_map=True),
    "sghmc": Preset("SGHMC", _sghmc, after_map=True),
    "ivon": Preset("IVON", _ivon, after_map=True),
    "variational": Preset("Mean field", _variational, after_map=True),
    "pi_model": Preset("Pi-model", lambda t: PiModel(_map(t), augment=Noise(0.1)), shown=False),
    "temporal_ensembling": Preset("Temporal ensembling", lambda t: TemporalEnsembling(_map(t), augment=Noise(0.1)), shown=False),
    "mean_teacher": Preset("Mean teacher", lambda t: MeanTeacher(_map(t), augment=Noise(0.1)), shown=False),
    # thousands of gradients over all data, or thousands of epochs: too long for the demo, and their classes have good defaults
    "sgld": Preset("SGLD", _class_defaults("sgld"), shown=False),
    "metropolis": Preset("Metropolis", _class_defaults("metropolis"), shown=False),
    "ula": Preset("ULA", _class_defaults("ula"), shown=False),
    "mala": Preset("MALA", _class_defaults("mala"), shown=False),
    "hmc": Preset("HMC", _class_defaults("hmc"), shown=False),
    "nuts": Preset("NUTS", _class_defaults("nuts"), shown=False),
    "mclmc": Preset("MCLMC", _class_defaults("mclmc"), shown=False),
    "mams": Preset("MAMS", _class_defaults("mams"), shown=False),
}


def preset(name: str) -> Preset:
    """The preset of a registered method, or the defaults of its class where there is none.

    >>> preset("map").label
    'MAP'
    """
    return PRESETS.get(name) or Preset(METHODS[name].__name__, _class_defaults(name), after_map=traits_of(METHODS[name]).post_hoc)


def label(name: str, method: Method) -> str:
    """The name of a configured method, or chain, in tables.

    >>> label("ensemble:laplace", configure("ensemble:laplace", table_training(100)).method)
    'Ensemble of 5 Laplace'
    """
    inner = preset(name.split(":")[-1]).label
    if not isinstance(method, Ensemble):
        return inner
    return f"Ensemble of {method.size}" + ("" if isinstance(method.method, MAP) else f" {inner}")


def suiting(names: Iterable[str], likelihood: type[Likelihood]) -> list[str]:
    """The methods that the demo shows for a likelihood.

    >>> from dubito import Categorical
    >>> suiting(["map", "neural_linear"], Categorical)
    ['map']
    """
    return [name for name in names if preset(name).shown and issubclass(likelihood, preset(name).likelihoods or Likelihood)]


class Configuration(NamedTuple):
    """A method ready to be fitted."""

    method: Method
    start: Method | None  # trains the network first
    learns_prior: bool  # the prior is the default of `Model`, whose scale is learned, and not the problem's


def configure(name: str, training: Training) -> Configuration:
    """A method, or a chain such as "ensemble:laplace", as it is fitted to a problem with this training.

    >>> from dubito.evaluation.problems import DIGITS
    >>> method, start, _ = configure("laplace", DIGITS)
    >>> method.subset, start.epochs
    ('last_layer', 60)
    """
    innermost = preset(name.split(":")[-1])
    start = _map(training) if innermost.after_map else None
    return Configuration(*assemble(list(chain(name, training).values()), start), innermost.learns_prior)


def chain(name: str, training: Training) -> dict[str, Method]:
    """The methods of a chain by their names, outermost first. A wrapper without an explicit inner method wraps MAP.

    >>> list(chain("ensemble", table_training(100)))
    ['ensemble', 'map']
    """
    names = name.split(":")
    if len(set(names)) < len(names):
        raise ValueError(f"{name}: a method cannot wrap itself")
    for outer in names[:-1]:
        if wrapped_field(METHODS[outer]) is None:
            raise ValueError(f"{name}: {outer} does not wrap another method")
    if wrapped_field(METHODS[names[-1]]) is not None:
        names.append("map")
    return {part: preset(part).method(training) for part in names}


def assemble(methods: Sequence[Method], start: Method | None = None) -> tuple[Method, Method | None]:
    """Put each method into the one before it, which wraps it. Returns the outermost, and what is to be run before it.

    An ensemble takes `start` inside, since its members are initialized anew.
    """
    *wrappers, method = methods
    for wrapper in reversed(wrappers):
        changes = {str(wrapped_field(type(wrapper))): method}
        if start is not None and "start" in {item.name for item in fields(wrapper)}:  # pyright: ignore[reportArgumentType]
            changes["start"], start = start, None
        method = replace(wrapper, **changes)  # pyright: ignore[reportArgumentType]
    return method, start


def wrapped_field(method: Callable[..., Method]) -> str | None:
    """The field of a wrapper, such as Ensemble, that holds another method; None for other methods."""
    return next((name for name, hint in get_type_hints(method).items() if hint is Method), None)


def dropout_places(network: nn.Module, *, inputs: bool = False) -> str | None:
    """Where MC dropout drops in a network: None, its own dropout layers, if it has some; else a pattern of all layers but the first.

    `inputs=True` includes the first layer, and with it the inputs of the network.

    >>> dropout_places(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)))
    '^(2)$'
    """
    if layers_of(network, DROPOUTS):
        return None
    layers = list(places(network))
    chosen = layers if inputs or len(layers) == 1 else layers[1:]
    return f"^({'|'.join(re.escape(name) for name in chosen)})$" if chosen else None
