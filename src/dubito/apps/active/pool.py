"""Inputs without labels, by number, and what an acquisition function sees of them: a posterior's predictions for some of the inputs.

A `Pool` is made of tensors, an indexable data set, or a loader that is read again at every pass. A `View` streams the predictions of a
posterior, and a `Choice` says which inputs an acquisition function wants to be labelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, default_collate

from dubito.apps.network import fetched, joined
from dubito.inference.batches import Data
from dubito.model import Model
from dubito.model.likelihoods import average
from dubito.network.examples import Inputs, arguments
from dubito.posteriors import Posterior
from dubito.posteriors.posterior import inputs_of
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors import store, tree
from dubito.tensors.checks import require
from dubito.tensors.randomness import fork_rng, generator
from dubito.tensors.tree import as_tuple


class Pool:
    """The inputs that may be labelled. An input's number is its position.

    `data` is a tensor, an array or a dict of these (all inputs, in memory); a data set with `len` and `[i]`; an unshuffled
    DataLoader; or any iterable of batches that can be gone through again, which then happens for every choice. Only what is being
    scored is in memory. Targets that a data set or a loader gives along with its inputs are not looked at.

    >>> import dubito
    >>> pool = Pool(torch.arange(10.0).unsqueeze(1))
    >>> len(pool), pool.take(dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian()), [7, 2])
    (10, tensor([[7.],
            [2.]]))
    """

    def __init__(self, data: Data):
        self.source = _source(data)
        self.length = self.source.length
        require(self.length, "the pool is empty: there is nothing to label")

    def __len__(self) -> int:
        return self.length

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """Inputs of the given numbers, in rising order, `size` at a time (or as a loader cuts them)."""
        require(
            not model.coupled, "a pool is cut into rows, and those of this model are coupled: score posterior.predict(x) yourself"
        )
        dtype = _dtype(model)
        for x in self.source.batches(model, indices.cpu(), size):
            yield tree.tensors(x, dtype)

    def take(self, model: Model, indices: Tensor | Sequence[int]) -> Any:
        """The inputs of some numbers as one batch, in the order that they are asked for."""
        return self.source.take(model, torch.as_tensor(indices, dtype=torch.long).reshape(-1))

    def fingerprint(self, model: Model) -> str:
        """What the pool is known by: how many inputs, and the contents of the first, the middle and the last."""
        few = self.take(model, [0, len(self) // 2, len(self) - 1])
        return f"{len(self)} inputs, {store.checksum({str(i): leaf for i, leaf in enumerate(tree.leaves(few))})}"


def _dtype(model: Model) -> torch.dtype:
    return next(model.network.parameters()).dtype


def _rows_of(x: Inputs, rows: Tensor) -> Any:
    return tree.apply_leaves(lambda leaf: leaf[rows.to(leaf.device)], x)


class _Arrays:
    """All inputs, in memory."""

    def __init__(self, data: Data):
        self.arrays = tree.tensors(data)
        args, kwargs = arguments(data)
        # NumPy has float64 alone, which no network means
        self.recast = any(isinstance(leaf, np.ndarray) for leaf in (*args, *kwargs.values()))
        counts = {len(leaf) for leaf in tree.leaves(self.arrays)}
        require(len(counts) == 1, f"all inputs of a pool must have the same number of rows; got {sorted(counts)}")
        self.length = counts.pop()

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """Rows of the arrays, `size` at a time."""
        for rows in indices.split(size):
            first, last = int(rows[0]), int(rows[-1])
            whole = len(rows) > 1 and last - first == len(rows) - 1  # neighbors: no copy is needed
            piece = slice(first, last + 1)
            x = tree.apply_leaves(lambda leaf: leaf[piece], self.arrays) if whole else _rows_of(self.arrays, rows)  # noqa: B023
            yield self._cast(model, x)

    def take(self, model: Model, which: Tensor) -> Any:
        """Those rows, in that order."""
        return self._cast(model, _rows_of(self.arrays, which))

    def _cast(self, model: Model, x: Inputs) -> Any:
        return tree.move(x, dtype=_dtype(model)) if self.recast else x


class _Items:
    """A data set with `len` and `[i]`."""

    def __init__(self, items: Any, collate: Callable[[list], Any] = default_collate, workers: int = 0):
        self.items, self.collate, self.workers, self.length = items, collate, workers, len(items)

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """Items, `size` at a time."""
        some = Subset(self.items, indices.tolist())
        for batch in fetched(DataLoader(some, batch_size=size, collate_fn=self.collate, num_workers=self.workers)):
            yield inputs_of(model, batch)[0]

    def take(self, model: Model, which: Tensor) -> Any:
        """Those items, in that order."""
        with fork_rng(0):
            return tree.tensors(inputs_of(model, self.collate([self.items[i] for i in which.tolist()]))[0], _dtype(model))


class _Stream:
    """Batches, to be gone through for every choice."""

    def __init__(self, stream: Iterable[Any]):
        self.stream = stream
        self.length = sum(_rows(as_tuple(batch)[0]) for batch in fetched(stream))

    def batches(self, model: Model, indices: Tensor, size: int) -> Iterator[Inputs]:
        """The requested inputs of every batch."""
        wanted, before = torch.zeros(self.length, dtype=torch.bool), 0
        wanted[indices] = True
        for batch in fetched(self.stream):
            x = inputs_of(model, batch)[0]
            rows = wanted[before : before + _rows(x)].nonzero().squeeze(1)
            before += _rows(x)
            if len(rows):
                yield _rows_of(tree.tensors(x, _dtype(model)), rows)
        require(before == self.length, f"the pool must give the same inputs every time; it had {self.length}, and now {before}")

    def take(self, model: Model, which: Tensor) -> Any:
        """Those inputs, in that order."""
        ordered, back = which.unique(return_inverse=True)
        with fork_rng(0):
            x = joined(list(self.batches(model, ordered, len(ordered))))
            return tree.tensors(_rows_of(x, back), _dtype(model))


def _source(data: Data) -> _Arrays | _Items | _Stream:
    if isinstance(data, tuple):
        raise TypeError("a pool holds inputs without labels, but a tuple means (x, y): pass x alone; several inputs as a dict")
    if isinstance(data, Tensor | np.ndarray | dict):
        return _Arrays(data)
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        ordered = isinstance(data.sampler, SequentialSampler) and type(data.batch_sampler).__name__ == "BatchSampler"
        require(ordered, "inputs of a pool are known by their position, but this loader shuffles them: pass shuffle=False")
        return _Items(data.dataset, data.collate_fn, data.num_workers)
    if isinstance(data, Iterator):
        raise TypeError("an iterator can be gone through only once: pass a data set, a loader or a list of batches")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list):
        return _Items(data)
    if isinstance(data, Iterable):
        return _Stream(data)
    raise TypeError(f"a pool must be a tensor, an array, a dict of these, a data set or a loader; got a {type(data).__name__}")


def _rows(x: Inputs) -> int:
    leaf = next(iter(tree.leaves(tree.tensors(x))), None)
    if leaf is None or not leaf.ndim:
        way_out = "pass all inputs as one tensor or array, or a data set with `len` and `[i]`"
        raise TypeError(f"a list must hold batches of inputs, tensors [B, ...]; got a {type(x).__name__} without rows: {way_out}")
    return len(leaf)


def balanced(labels: Tensor, n: int, *, seed: int = 0) -> Tensor:
    """The positions of n random examples with all classes alike, as simulations of active learning begin with: [n].

    >>> y = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> y[balanced(y, 3)].sort().values
    tensor([0, 1, 2])
    """
    labels = labels.cpu()
    classes = labels.unique()
    require(n % len(classes) == 0, f"n must be a multiple of {len(classes)}, the number of classes; got {n}")
    each, source = n // len(classes), generator("cpu", seed, "balanced")
    parts = []
    for label in classes:
        rows = (labels == label).nonzero().squeeze(1)
        require(len(rows) >= each, f"class {int(label)} has {len(rows)} examples, fewer than the {each} that are needed of it")
        parts.append(rows[torch.randperm(len(rows), generator=source)[:each]])
    chosen = torch.cat(parts)
    return chosen[torch.randperm(len(chosen), generator=source)]


DRAWS = 100  # functions of a posterior that has no number of its own


class Functions(NamedTuple):
    """Draws of functions at some inputs: what each of them expects of y, and the noise around it."""

    values: Tensor  # [S, B, C]: class probabilities, or means
    weights: Tensor  # [S], sums to 1
    noise: Tensor | None  # [B, C], variance of y given the function, averaged over the functions; None for classes
    log_noise: Tensor | None = None  # [B, C], the mean of its logarithm; None where the functions have the same noise

    def at(self, rows: Tensor | slice) -> Functions:
        """The same functions at some of the inputs."""
        noise, log_noise = (None if values is None else values[rows] for values in (self.noise, self.log_noise))
        return Functions(self.values[:, rows], self.weights, noise, log_noise)

    @staticmethod
    def join(parts: list[Functions]) -> Functions:
        """The same functions at the inputs of all parts."""
        noises = [functions.noise for functions in parts if functions.noise is not None]
        logs = [functions.log_noise for functions in parts if functions.log_noise is not None]
        noise, log_noise = (torch.cat(each) if each else None for each in (noises, logs))
        return Functions(torch.cat([functions.values for functions in parts], 1), parts[0].weights, noise, log_noise)


@dataclass
class View:
    """A posterior and the candidates of a pool; predictions are streamed, batch by batch, and never held all at once.

    `candidates` are indices into the pool in rising order, `pending` those that have been asked for and have no label yet.
    `uncertainty` is filled in when all candidates have been gone through: their mean "total" and "epistemic" uncertainty.
    """

    posterior: Posterior
    pool: Pool
    candidates: Tensor  # [N]
    pending: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    how: str | None = None
    draws: int | None = None
    memory: float = 1.0  # gigabytes
    size: int = 500  # inputs at a time
    seed: int = 0
    uncertainty: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.posterior.model.device

    def predictions(self) -> Iterator[Predictive]:
        """The predictive of each batch of candidates, in their order."""
        sums = []
        for x in self.pool.batches(self.posterior.model, self.candidates, self.size):
            p = self._predict(self.posterior, x, self.how, self.draws)
            yield p
            sums.append(_sums(p))
        self._note(sums)

    def functions(self, indices: Tensor | None = None, *, x: Inputs = None, least: int = DRAWS) -> Iterator[Functions]:
        """Draws of functions, the same for every batch: at the candidates, at other indices of the pool, or at inputs x.

        Where a posterior predicts without draws, `least` of them are made.
        """
        posterior, way = self.posterior.with_fixed_masks(), None
        which = self.candidates if indices is None else indices
        batches = [x] if x is not None else self.pool.batches(posterior.model, which, self.size)
        sums = []
        for batch in batches:
            way = self._way(posterior, batch, least) if way is None else way
            p = self._predict(posterior, batch, *way)
            yield self._read(p)
            sums.append(_sums(p))
        if indices is None and x is None:
            self._note(sums)

    def _note(self, sums: list[Tensor]) -> None:
        total, epistemic = (torch.stack(sums).sum(0) / len(self)).tolist()
        self.uncertainty = {"total": total, "epistemic": epistemic}

    def _way(self, posterior: Posterior, x: Inputs, least: int) -> tuple[str | None, int | None]:
        """The first way to predict, of those that come closest to what is wanted, that gives draws of functions."""
        first = tree.apply_leaves(lambda leaf: leaf[:1], x)
        ways = [(self.how, self.draws), (self.how, self.draws or least), ("sampled", self.draws or least)]
        for way in ways[:-1]:
            p = self._predict(posterior, first, *way).mixture
            if p is not None and p.certain:
                return way
        return ways[-1]

    def _predict(self, posterior: Posterior, x: Inputs, how: str | None, draws: int | None) -> Predictive:
        return posterior.predict(x, how, draws=draws, memory=self.memory, seed=self.seed)

    def _read(self, p: Predictive) -> Functions:
        assert isinstance(p, LatentMixture)
        discrete, values = p.likelihood.discrete, p.probs
        if discrete and not p.likelihood.indexed:  # yes or no: two classes
            several = f"joint entropies need one answer an input; got {values.shape[-1]}, each yes or no: use 'bald'"
            require(values.shape[-1] == 1, several)
            values = torch.cat([p.likelihood.off(p.points.means, p.points.aligned_params), values], -1)
        require(values.ndim == 3, "joint entropies need one answer an input, but these outputs have positions: use 'bald'")
        noise = (None, None) if discrete else (p.uncertainty.aleatoric, expected_log_noise(p))
        return Functions(values, p.draw_weights.to(values), *noise)


def expected_log_noise(p: LatentMixture) -> Tensor:
    r"""The mean over the weights of the log variance that y has given them, :math:`E_\theta \ln \sigma_\theta^2`, [B, *D, C]."""
    if tasks := {name: p.task(name) for name in p.likelihood.task_names}:
        classes = [name for name, task in tasks.items() if task.likelihood.discrete]
        require(not classes, f"joint entropies are of classes or of numbers, and the tasks {classes} have classes: use 'bald'")
        return torch.cat([expected_log_noise(task) for task in tasks.values()], -1)
    marginal, weights = p.points.marginals  # at points, what is left is noise
    return 2 * average(marginal.stddev.expand(marginal.batch_shape).log(), weights)


def _sums(p: Predictive) -> Tensor:
    """Total and epistemic uncertainty, [2], summed over inputs and the outputs of a regression; positions are averaged."""
    both = torch.stack([p.uncertainty.total, p.uncertainty.epistemic]).double()  # [2, B, *D] or [2, B, *D, C]
    both = both if p.likelihood.discrete else both.sum(-1)
    return both.reshape(2, both.shape[1], -1).mean(-1).sum(1)


class Choice(NamedTuple):
    """Which candidates to label, best first, and what each is worth by the acquisition's own score."""

    positions: Tensor  # [k], among the candidates of the view
    scores: Tensor  # [k]


class Acquisition(Protocol):
    """Settings of an acquisition function."""

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates to label next."""
        ...


class Scored(Acquisition, Protocol):
    """An acquisition function that gives every candidate a score of its own, whatever else is chosen with it."""

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """What each candidate is worth, [N]: larger is labelled first."""
        ...

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores."""
        return best(self.scores(view, generator), k, generator)


def check_finite(scores: Tensor) -> None:
    """An error if scores hold NaN."""
    if bool(scores.isnan().any()):
        raise ValueError("the scores hold NaN, so the model's predictions are not finite: check its training")


def best(scores: Tensor, k: int, generator: torch.Generator) -> Choice:
    """The k largest scores; those that are tied are taken in random order.

    >>> best(torch.tensor([0.1, 0.9, 0.5]), 2, torch.Generator())
    Choice(positions=tensor([1, 2]), scores=tensor([0.9000, 0.5000]))
    """
    check_finite(scores)
    order = torch.randperm(len(scores), generator=generator).to(scores.device)
    top = torch.topk(scores[order], k)
    return Choice(order[top.indices], top.values)
