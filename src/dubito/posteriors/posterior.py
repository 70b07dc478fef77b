"""What every posterior can do, whatever its form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dubito.model import Model
from dubito.network.division import share_batches
from dubito.network.examples import LABELS, Batch, Inputs, as_arrays, is_array, split_batch
from dubito.posteriors.functions import WAYS, Functions, Mixed, Setting
from dubito.posteriors.generate import Generation, Way, write
from dubito.posteriors.predict.sampled import room
from dubito.posteriors.predictive import Predictive, concatenate
from dubito.tensors import tree
from dubito.tensors.checks import at_least, counts, one_of
from dubito.tensors.processes import Distributed, join_processes
from dubito.tensors.randomness import borrowed_generators, fork_rng, generator, global_state, set_global_state
from dubito.tensors.tree import Buffers, Params

DRAWS = 30  # functions of a form that can only be sampled, where nobody says


def departure_label(departures: Sequence[str]) -> str:
    """The label of a posterior with these departures from Bayes' rule, see `Posterior.label`.

    >>> departure_label(["damping = 10"]), departure_label([])
    ('generalized (damping = 10)', '')
    """
    powers = all(one.startswith(("T = ", "kl_weight = ")) for one in departures)
    return f"{'tempered' if powers else 'generalized'} ({', '.join(departures)})" if departures else ""


@dataclass(frozen=True, repr=False)
class Posterior(ABC):
    """A distribution over the weights of `model` (or over the functions it computes) given data.

    `departures` says in what it departs from the posterior of Bayes' rule, ("T = 0.3", "tuned on held-out rows"); see `label`.
    """

    model: Model
    departures: tuple[str, ...] = field(default=(), kw_only=True)

    def __repr__(self) -> str:
        """In a line: all weights of a network would fill the screen."""
        weights = sum(parameter.numel() for parameter in self.model.network.parameters())
        kind, label = type(self.model.network).__name__, f", {self.label}" if self.label else ""
        return f"{type(self).__name__}({self._held()}{weights:,} weights of {kind}, {self.model.likelihood!r}{label})"

    def _held(self) -> str:
        """What it is made of, for the repr: "5 draws, "."""
        return f"{len(self):,} draws, " if isinstance(self, Sized) else ""

    @property
    def label(self) -> str:
        """What it is if not the posterior of Bayes' rule: "tempered (T = 0.3)", where likelihood and prior, or one of the two, have a
        power; else "generalized (...)". Empty for the posterior itself.

        >>> import dubito
        >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
        >>> dubito.posteriors.Point(model, {}, {}, departures=("T = 0.3",)).label
        'tempered (T = 0.3)'
        """
        return departure_label(self._departures())

    def _departures(self) -> tuple[str, ...]:
        return self.departures

    def departing(self, *departures: str) -> Self:
        """The same, with further departures; those that are known already count once."""
        return replace(self, departures=tuple(dict.fromkeys((*self.departures, *departures)))) if departures else self

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy holds: not what is made again at need, some of which (programs of torch.fx) no pickle gives back."""
        return {
            name: value for name, value in vars(self).items() if not isinstance(getattr(type(self), name, None), cached_property)
        }

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of the weights, leaves [n, *shape]."""

    @abstractmethod
    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float | None = None, seed: int = 0
    ) -> Predictive:
        """The predictive at x (what the network takes: a tensor, a tuple or a dict).

        `draws` is how many functions are averaged (None: the form's own choice), `memory` how many gigabytes they may take at a time
        (None: 1, or on a GPU an eighth of its memory); the same `seed` gives the same functions for every x.
        """

    # -- the posterior as functions

    @property
    def center(self) -> tuple[Params, Buffers] | None:
        """The one setting of the weights that stands for the posterior, and the buffers; None where there is none, as of draws."""
        return None

    @property
    def certain(self) -> bool:
        """Whether all mass is on one setting of the weights."""
        return False

    def modes(self) -> tuple[Params, Buffers] | None:
        """Several settings side by side, leaves [K, ...], and the buffers that each has for itself; None where there is only one."""
        return None

    def functions(self, how: str | None = None, *, draws: int | None = None, seed: int = 0) -> Functions | Mixed:
        """What the posterior averages: deterministic functions of x, differentiable in x, with their weights in the mixture.

        They are draws of the weights or masks ("sampled"), linear functions ("linearized", of a Gaussian), or the network at one
        setting of the weights, without dropout ("point"). None is the posterior's own way.

        >>> import dubito
        >>> model = dubito.Model(torch.nn.Linear(2, 1), dubito.Bernoulli())
        >>> f = dubito.posteriors.Point(model, model.parameters(), model.buffers()).functions()
        >>> f(torch.zeros(3, 2, requires_grad=True)).mean.requires_grad
        True
        """
        one_of(WAYS, how=how)
        at_least(1, draws=draws)
        if how == "point" and self.center is not None:
            params, buffers = self.center
            return Functions(self.model, {**buffers, **params}, {})
        return self._functions(how, draws, seed)

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions | Mixed:
        """The functions, of a form that can only be sampled."""
        self._only(how, "sampled")
        return Functions(self.model, self._fixed, self.sample(draws or DRAWS, generator(self.model.device, seed, "weights")))

    def function(self, source: torch.Generator) -> Functions:
        """One function, drawn at random: a member of an ensemble, a dropout mask, weights, or a linear function of a Laplace.

        It is the same function for all inputs that it is then asked for, as often as it is asked, and has a graph back to x.
        """
        seed = int(torch.randint(2**62, (1,), generator=source, device=source.device))
        drawn = self._functions(None, 1, seed)
        assert isinstance(drawn, Functions)
        return drawn.single()

    def generate(
        self,
        x: Inputs,
        n: int,
        way: Way = "tokens",
        *,
        how: str | None = None,
        draws: int | None = None,
        greedy: bool = False,
        stop: int | None = None,
        doubt: float | None = None,
        text_doubt: float | None = None,
        memory: float | None = None,
        seed: int = 0,
    ) -> Generation:
        """Write up to n tokens after each prompt, with a language model that gives logits [B, T, C] for tokens [B, T].

        The prompts x are tokens of one length, or a dict with `input_ids`. Functions of the posterior predict the next token together,
        in one of two ways (Malinin & Gales 2021). "tokens" averages their probabilities anew at every token. "sequences" averages the
        probabilities of whole texts: functions that found the tokens so far improbable count less, as Bayes' rule has it.

        Tokens are drawn at random, or with `greedy` the most probable ones are taken. A text ends with the token `stop`, or before a
        token whose epistemic uncertainty is above `doubt`, or with which that of the text, the sum over its tokens, would be above
        `text_doubt`, both in nats. Doubt about tokens is not doubt about meaning, because one thing can be said in many ways. `how`,
        `draws` and `memory` are those of `predict`; `seed` decides the functions and the tokens.
        """
        counts(n=n)
        one_of(("tokens", "sequences"), way=way)
        x = tree.move(tree.tensors(as_arrays(x)), self.model.device)
        functions, source = self.functions(how, draws=draws, seed=seed), generator("cpu", seed, "tokens")
        return write(
            functions,
            x,
            n,
            way,
            source=source,
            greedy=greedy,
            stop=stop,
            doubt=doubt,
            text_doubt=text_doubt,
            memory=room(memory, self.model.device),
        )

    def settings(self, draws: int = 10) -> list[Setting]:
        """Weights that stand for the posterior, with shares that sum to 1: those at its center, or at most about `draws` of them.

        Draws of a sampler are evenly spaced. Of draws with weights those without any are left out.
        """
        if self.center is not None:
            return [Setting(*self.center)]
        drawn = self.sample(draws, generator(self.model.device, 0, "networks"))
        return [Setting(tree.select(drawn, i), self._fixed, 1 / draws) for i in range(draws)]

    @property
    def _fixed(self) -> Buffers:
        """The buffers that all draws share."""
        return getattr(self, "buffers", None) or self.model.buffers()

    def with_fixed_masks(self) -> Posterior:
        """The posterior with draws that are functions: where dropout masks are drawn, they are the same for all inputs."""
        return self

    def in_memory(self) -> Posterior:
        """The posterior with all its draws in memory."""
        return self

    # -- loaders

    def predict_batches(
        self,
        loader: Iterable[Batch],
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float | None = None,
        seed: int = 0,
        distributed: Distributed = False,
    ) -> Iterator[tuple[Predictive, Any]]:
        """Stream over a loader: the predictive and the targets (None if it has none) of every batch. `how`: as `predict` does.

        With `distributed="auto"` (or a process group or DeviceMesh, as in `fit`) each of several processes has some of the batches: of
        K that are given the same, every K-th.
        """
        with join_processes(distributed, self.model.device) as processes:
            batches = share_batches(_given(loader), processes)
        for batch in batches:
            x, y = inputs_of(self.model, batch)
            yield self.predict(x, how, draws=draws, memory=memory, seed=seed), tree.move(y, self.model.device)

    def predict_loader(
        self,
        loader: Iterable[Batch],
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float | None = None,
        seed: int = 0,
    ) -> tuple[Predictive, Any]:
        """One predictive and the targets of all that a loader gives; every batch is seen by the same functions.

        It holds S x N x C numbers in the computer's memory; where that is too much, use `predict_batches`.
        """
        if isinstance(loader, tuple | Dataset):
            raise TypeError("predict_loader takes a DataLoader or a list of batches; for inputs in memory use predict(x)")
        with borrowed_generators(loader), fork_rng():  # a DataLoader draws from the global generator, even unshuffled
            pairs = self._predict_all(loader, how, draws=draws, memory=memory, seed=seed)
        if not pairs:
            raise ValueError("there is no data: the loader gave no batch")
        shapes = {p.means.shape[2:] for p, _ in pairs}
        if len(shapes) > 1:
            raise ValueError(f"the batches give outputs of different shapes, {sorted(map(list, shapes))}: use predict_batches")
        return concatenate([p for p, _ in pairs]), _joined([y for _, y in pairs])

    def _predict_all(
        self, loader: Iterable[Batch], how: str | None, *, draws: int | None, memory: float | None, seed: int
    ) -> Sequence[tuple[Predictive, Any]]:
        """The predictive and the targets of every batch, on the CPU."""
        batches = self.predict_batches(loader, how, draws=draws, memory=memory, seed=seed)
        return [(p.to("cpu"), tree.move(y, "cpu")) for p, y in batches]

    def _only(self, how: str | None, *known: str, draws: int | None = None) -> None:
        counts(draws=draws)
        if how is not None and how not in known:
            raise ValueError(f"a {type(self).__name__} posterior predicts how={' or '.join(map(repr, known))}; got {how!r}")


def _given(loader: Iterable[Batch]) -> Iterator[Any]:
    """What a loader gives, drawing as it would alone; between two batches the generators are the caller's, as they were.

    A DataLoader draws from the global generator even unshuffled, and data sets that augment draw for every batch.
    """
    iterator: Iterator[Any] | None = None
    states: list[Tensor] = []
    inside: dict = {}
    while True:
        with borrowed_generators(loader) as generators, fork_rng():
            if iterator is None:
                iterator = iter(loader)
            else:
                set_global_state(inside)
                for one, state in zip(generators, states, strict=True):
                    one.set_state(state)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            inside, states = global_state(), [one.get_state() for one in generators]
        yield batch


def _joined(targets: list[Any]) -> Any:
    if any(y is None for y in targets):
        return None
    if isinstance(targets[0], dict):
        return {key: torch.cat([y[key] for y in targets]) for key in targets[0]}
    return torch.cat(targets)


def inputs_of(model: Model, batch: Batch) -> tuple[Any, Any]:
    """(x, y) of a batch, y None where a batch holds inputs only."""
    if is_array(batch):
        return batch, None
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return batch[0], None
    if model.split is split_batch and tree.is_graph(batch) and getattr(batch, "y", None) is None:
        return batch, None
    if model.split is split_batch and hasattr(batch, "keys") and not any(name in batch for name in LABELS):
        return {key: batch[key] for key in batch}, None
    return model.split(batch)
