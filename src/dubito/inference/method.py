"""What an inference method is: the `Method` protocol, its `Traits`, and the values that pass between a method and the loop.

Read this file before any method. `dubito.inference.loop` calls the functions of the protocol; everything else (devices, seeds, batches,
progress, checkpoints and draws) belongs to the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from dubito.model import Target
from dubito.network.examples import Batch
from dubito.posteriors import Posterior
from dubito.tensors import store
from dubito.tensors.tree import Buffers, Params

State = TypeVar("State")
ATTRIBUTES = {  # class attributes of methods of version 0.1, and their traits
    "post_hoc": "post_hoc",
    "may_grow": "length_field",
    "starts_anew": "starts_anew",
    "many_starts": "many_starts",
    "weighs": "takes_example_weights",
}
Info = Mapping[str, Any]  # what a step reports, for progress and callbacks; tensors may stay on their device


class Start(NamedTuple):
    """Where a method begins: the Bayesian parameters, and all the rest of the network."""

    params: Params
    buffers: Buffers
    unset: tuple[str, ...] = ()  # learned quantities beside the weights that the user has not given: they are a first guess
    given: bool = False  # whether the user named a start; otherwise it is the network as it stands
    draws: Params | None = None  # several settings, leaves [K, ...], for methods that begin at many
    own: Buffers | None = None  # buffers that each of these has for itself, such as BatchNorm statistics, [K, ...]


class Method(Protocol[State]):
    """An inference method: a frozen dataclass of hyperparameters with these few functions.

    A state is a dataclass of tensors, numbers, dicts, lists and optimizers; `step` consumes it and may change it in place. It holds
    what the next step needs and never grows: draws are returned by `draw` and kept by the loop.

    A method may also have an attribute or property `traits`, see `Traits`, and `parts`, see `parts_of`.
    """

    @property
    def data(self) -> Literal["batches", "full"]:
        """The data of a step: one mini-batch, or all of them."""
        ...

    def steps(self, n_batches: int) -> int:
        """The number of steps of a fit, if a pass over the data has `n_batches` batches."""
        ...

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> State:
        """The state before the first of `steps` steps; `batch` is an example of the data, from which to read shapes."""
        ...

    def step(self, target: Target, state: State, data: Iterable[Batch], generator: torch.Generator) -> tuple[State, Info]:
        """One step on `data`, an iterable of batches (of one, unless gradients are accumulated or the method is full-batch)."""
        ...

    def draw(self, state: State) -> Params | None:
        """A draw to keep, after a step, or None."""
        ...

    def posterior(self, target: Target, state: State, draws: store.Draws) -> Posterior:
        """The posterior that the state and the draws kept so far stand for."""
        ...


class Stacking(Method[State], Protocol[State]):
    """A method with the trait `stacks`: it trains all members of an ensemble in one batched pass."""

    def unstack(self, target: Target, state: State) -> list[State]:
        """The states of the members of a stacked target."""
        ...


@dataclass(frozen=True)
class Traits:
    """What the loop, combinators and applications need to know about a method beside what it does.

    A method gives them as an attribute or property `traits`; one without it has the defaults. A combinator such as `Ensemble` combines
    its own with those of the method inside.

    | trait | read by | meaning |
    |---|---|---|
    | `post_hoc` | `Ensemble`, presets, command line, Q-learning | expects a trained network: fit MAP first |
    | `starts_anew` | `fit`, active learning, bandits, Q-learning | initializes its members itself and ignores `start` |
    | `many_starts` | `fit` | `start` may be a set of draws, one for each chain |
    | `keeps_dropout` | `fit` | leaves dropout on when predicting: a network that is random in eval mode is no mistake |
    | `draws_weights` | `fit` | draws weights, also those of the padding rows of embeddings |
    | `takes_example_weights` | `Ensemble` | `Target.weights` and `Target.adversary` reach its gradient: bagging works |
    | `stacks` | `Ensemble` | steps a stacked target (`Target.members`) and has `unstack`, see `Stacking` |
    | `adjusted` | files of draws | whether an accept step makes the draws asymptotically exact; None: it is no sampler |
    | `learning_rate` | files of draws | the learning rate of a sampler on mini-batches |
    | `length_field` | checkpoints | the field with the number of draws: a run can be resumed with a larger one |
    | `length_settings` | Q-learning | settings in use that depend on the number of steps, each as the value that does not |
    | `alone` | `fit` | why it runs in one process only; None: a step gives the same numbers on any number of processes |
    | `exact_settings` | `fit` | settings with the one value that aims at the posterior of Bayes' rule, see `Posterior.label` |

    >>> import dubito
    >>> traits_of(dubito.Laplace()).post_hoc, traits_of(dubito.MAP(warmup=0.1)).length_settings
    (True, ('warmup=0',))
    """

    post_hoc: bool = False
    starts_anew: bool = False
    many_starts: bool = False
    keeps_dropout: bool = False
    draws_weights: bool = False
    takes_example_weights: bool = True
    stacks: bool = False
    adjusted: bool | None = None
    learning_rate: float | None = None
    length_field: str | None = None
    length_settings: tuple[str, ...] = ()
    exact_settings: tuple[tuple[str, float], ...] = ()
    alone: str | None = "what each process computes is not added up over all of them"


def parts_of(method: object) -> int:
    """How many parts of a method, chains or members, may run on processes of their own; 1 of a method that is one whole.

    Where they do, on the processes `Target.spread`, a method that is not `spread.Divisible` puts their states together after a step.

    >>> import dubito
    >>> parts_of(dubito.HMC(chains=4)), parts_of(dubito.MAP())
    (4, 1)
    """
    return getattr(method, "parts", 1)


def with_budget(method: Method, n_batches: int) -> Method:
    """The method with the length of training that follows the data, where the user has left it open.

    >>> import dubito
    >>> with_budget(dubito.MAP(), 30).epochs, with_budget(dubito.MAP(epochs=7), 30).epochs
    (100, 7)
    """
    follow = getattr(method, "with_budget", None)
    return method if follow is None else follow(n_batches)


def unfinished(method: object, target: Target, state: Any) -> float:
    """By how many nats the objective of a method still rises in as many steps again; zero of one that does not tell."""
    rise = getattr(method, "rise", None)
    return 0.0 if rise is None else rise(target, state)


def sum_parts(method: object, target: Target, state: Any) -> Any:
    """The state with the sums of all processes, of a method of which each process has added up its own part."""
    whole = getattr(method, "sum_parts", None)
    return state if whole is None else whole(target, state)


def least_memory(method: object, weights: int) -> int:
    """Bytes that a fit of so many bytes of weights needs at least beside them; zero of a method that does not tell.

    >>> import dubito
    >>> least_memory(dubito.MAP(), 1000), least_memory(dubito.SWAG(rank=20), 1000)
    (3000, 87000)
    """
    memory = getattr(method, "memory", None)
    return 0 if memory is None else memory(weights)


def departures(target: Target, method: object) -> tuple[str, ...]:
    """In what a fit departs from the posterior of Bayes' rule: the temperature, and settings of likelihood and method."""
    tempered = (f"T = {target.temperature:g}",) if target.temperature != 1 else ()
    return (*tempered, *target.model.likelihood.departures, *inexact_settings(method))


def inexact_settings(method: object) -> list[str]:
    """Settings of a method, or of the one inside it, that depart from Bayes' rule."""
    values = [(name, getattr(method, name), exact) for name, exact in traits_of(method).exact_settings]
    inner = getattr(method, "method", None)
    return [f"{name} = {value:g}" for name, value, exact in values if value != exact] + (
        [] if inner is None else inexact_settings(inner)
    )


def traits_of(method: object) -> Traits:
    """The traits of a method, or of a class of methods if they do not depend on its settings; otherwise the defaults."""
    traits = getattr(method, "traits", None)
    attributes = {new: getattr(method, old) for old, new in ATTRIBUTES.items() if hasattr(method, old)}
    return traits if isinstance(traits, Traits) else Traits(**attributes)


@dataclass(frozen=True)
class Event:
    """What a callback is given after every step."""

    step: int  # steps made
    steps: int  # of the whole fit
    epoch: int
    info: Info
    state: Any
