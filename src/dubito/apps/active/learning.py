"""The loop of active learning: fit, ask for the labels that are worth most, take them, and again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.apps.active.acquisitions import acquisition as named
from dubito.apps.active.labels import Folder, Indices, Labels, Round, check_targets, pool_indices, read
from dubito.apps.active.pool import Acquisition, Pool, View
from dubito.apps.network import Methods, chain, fit_in_turn, joined, only_network
from dubito.evaluation.judge import judge
from dubito.inference.method import traits_of
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.network.reinitialize import reinitialize
from dubito.network.weights import copy_network
from dubito.posteriors import Point, Posterior
from dubito.posteriors.predictive import Predictive
from dubito.tensors import tree
from dubito.tensors.checks import at_least, one_of, require
from dubito.tensors.randomness import derive_seed, fork_rng, generator
from dubito.tensors.tree import Params

Oracle = Callable[[Tensor], Any]  # indices [k] -> their labels


@dataclass(eq=False, repr=False)
class ActiveLearning:
    """Labels for a model, asked for one batch after another.

    `ask(k)` gives the numbers of k inputs of the pool, `tell(indices, labels)` takes their labels: what lies between (a person, an
    experiment, a simulation) is the caller's. The model is fitted when it is next needed, by `dubito.fit` with any method; a list of
    methods runs one after the other, each from where the one before has come (`[MAP(), Laplace()]`); a function of the number of labels
    may choose it. Until there is a label, what is asked is random.

    `acquisition` is a name from `ACQUISITIONS`, an object such as `BatchBALD()`, or a score `Predictive -> [B]`. `start` says where
    every fit begins: at the weights of the "network" as it stands (pretrained ones stay so), "anew" at random ones, or at those of the
    "last" fit. `bayesian=False` predicts with the one network at the posterior's centre, dropout off, for comparison. `most` scores so
    many random candidates in the place of all. `held_out`, data with labels, gives accuracy and uncertainty of every fit in `history`.

    With a `folder` (or after `save(folder)`) every label is on disk when `tell` returns, and `ActiveLearning.load` goes on: the same
    labels and the same seed make the same fits and the same asks, on the same machine to the bit. `how`, `draws` and `memory` are those
    of `posterior.predict`, `size` inputs are scored at a time; `batch_size`, `validation` and `patience` are those of `dubito.fit`.
    Labels may be told from one thread while another fits or asks.

    >>> import dubito
    >>> x = torch.linspace(-2, 2, 200).unsqueeze(1)
    >>> y = (x.squeeze(1) > 0.3).long()
    >>> model = dubito.Model(torch.nn.Linear(1, 2), dubito.Categorical(), dubito.priors.Normal(scale=10.0))
    >>> learning = ActiveLearning(model, [dubito.MAP(epochs=200, learning_rate=0.1), dubito.Laplace()], x, acquisition="entropy")
    >>> learning.tell([0, 199], y[[0, 199]])
    >>> for _ in range(5):
    ...     indices = learning.ask(1)
    ...     learning.tell(indices, y[indices])
    >>> bool((x[learning.labelled[2:]] - 0.3).abs().min() < 0.1)                       # it looks where the classes meet
    True
    """

    model: Model
    method: Methods
    pool: Any
    _: KW_ONLY
    acquisition: str | Acquisition | Callable[[Predictive], Tensor] = "bald"
    oracle: Oracle | None = None
    held_out: Any = None
    start: Literal["network", "anew", "last"] = "network"
    bayesian: bool = True
    how: str | None = None
    draws: int | None = None
    most: int | None = None
    memory: float = 1.0
    size: int = 500
    batch_size: int = 128
    validation: Any = None
    patience: int | None = None
    seed: int = 0
    folder: InitVar[str | os.PathLike | None] = None
    progress: bool | None = False

    def __post_init__(self, folder: str | os.PathLike | None):
        require(not self.model.likelihood.task_names, "active learning is for one task at a time; got a MultiTask likelihood")
        one_of(("network", "anew", "last"), start=self.start)
        anew = self.start == "last" and any(traits_of(step).starts_anew for step in chain(self.method, 1))
        require(not anew, "this method initializes its members anew and cannot continue from the last fit: use start='network'")
        at_least(1, most=self.most, size=self.size)
        self.pool = self.pool if isinstance(self.pool, Pool) else Pool(self.pool)
        self.acquisition = named(self.acquisition)
        self._lock = threading.RLock()
        # Labels are tried on a network of their own, copied while nobody else has it: during a fit that of the user holds other weights
        self._trial = replace(self.model, network=copy_network(self.model.network))
        self._at_work = 0  # fits and predictions that are going on, in any thread
        self._labels, self._inputs = Labels(), []
        self._fitted: tuple[str, Posterior] | None = None  # of which labels, and what came of them
        self._weights: tuple[Params, Params, str] = (
            {},
            {},
            "",
        )  # for start="last": before and after the last fit, and of which labels
        self._folder: Folder | None = None
        self._known: dict[str, Any] = {}  # what is written beside the labels, once it has been found
        if folder is not None:
            self.save(folder)

    # -- labels

    @property
    def labelled(self) -> Tensor:
        """The numbers of all inputs that have a label, in the order in which they were told, [n]."""
        return torch.tensor(self._labels.indices, dtype=torch.long)

    @property
    def targets(self) -> Tensor | None:
        """Their labels, [n, ...]; None before the first."""
        return self._labels.targets

    @property
    def pending(self) -> Tensor:
        """The numbers of inputs that were asked and have no label yet, in the order in which they were asked."""
        return torch.tensor(self._labels.pending, dtype=torch.long)

    @property
    def skipped(self) -> Tensor:
        """The numbers of inputs that were skipped, and are not asked again."""
        return torch.tensor(self._labels.skipped, dtype=torch.long)

    @property
    def candidates(self) -> Tensor:
        """The numbers of inputs that may be asked next, in rising order."""
        free = torch.ones(len(self.pool), dtype=torch.bool)
        free[torch.tensor(self._labels.taken, dtype=torch.long)] = False
        return free.nonzero().squeeze(1)

    @property
    def history(self) -> tuple[Round, ...]:
        """One entry for every fit."""
        return self._labels.history

    def curve(self, name: str = "accuracy") -> tuple[list[int], list[float]]:
        """A figure on held-out data over the number of labels."""
        rounds = [entry for entry in self.history if name in entry.held_out]
        return [entry.labels for entry in rounds], [entry.held_out[name] for entry in rounds]

    def tell(self, indices: Indices, labels: Any, *, overwrite: bool = False) -> None:
        """Take the labels of some inputs, which need not have been asked. A label that is known is only changed with `overwrite`.

        Labels that cannot be (a class that the network does not have, NaN) raise an error, and then none of them is taken.
        """
        which = self._indices(indices)
        if not which:
            count = torch.as_tensor(labels).numel()
            require(not count, f"0 inputs need 0 labels; got {count}")
            return
        x = self.pool.take(self.model, which)
        with self._lock:
            # a fit in another thread draws from the global generators, and to put them back would make it draw the same once more
            fork = nullcontext() if self._at_work else fork_rng()
            y = check_targets(self._trial, x, which, labels, self._labels.targets, fork)
            new = self._labels.new(which)
            self._keep(self._labels.tell(which, y, overwrite))
            if new:
                self._inputs.append(tree.apply_leaves(lambda leaf: leaf[new], x))

    def skip(self, indices: Indices) -> None:
        """Never ask for these: nobody can label them."""
        which = self._indices(indices)
        with self._lock:
            self._keep(self._labels.skip(which))

    def forget(self, indices: Indices) -> None:
        """Take labels back; their inputs, and inputs that were skipped, are pending again."""
        which = self._indices(indices)
        with self._lock:
            before = self._labels
            kept = [i for i, index in enumerate(before.indices) if index not in which]
            inputs = tree.apply_leaves(lambda leaf: leaf[kept], joined(self._inputs)) if before.indices else None
            self._keep(before.forget(which))
            self._inputs = [inputs] if kept else []

    def _indices(self, indices: Indices) -> list[int]:
        return pool_indices(indices, len(self.pool))

    # -- the model

    @contextmanager
    def _working(self) -> Iterator[None]:
        """While this thread may have borrowed the global generators."""
        with self._lock:
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1

    @property
    def posterior(self) -> Posterior:
        """The posterior given all labels so far; fitted if there are new ones."""
        return self._current()[1]

    def _current(self) -> tuple[str, Posterior]:
        """Of which labels, and the posterior."""
        digest = self._labels.digest
        if not digest:
            raise ValueError("there is no posterior before the first label: call tell(indices, labels)")
        fitted = self._fitted
        return fitted if fitted is not None and fitted[0] == digest else self._fit()

    def refit(self) -> Round:
        """Fit the model to all labels, if that has not been done, and see how good it is: the last of `history`."""
        _ = self.posterior
        return self.history[-1]

    def predict(self, indices: Indices) -> Predictive:
        """What is predicted for inputs of the pool."""
        x = self.pool.take(self.model, self._indices(indices))
        with self._working():
            predicting = self._predicting(self.posterior)
            return predicting.predict(x, self.how, draws=self.draws, memory=self.memory, seed=self.seed)

    def _fit(self) -> tuple[str, Posterior]:
        began = time.perf_counter()
        with self._lock:  # more labels may come in while this goes on
            now, x = self._labels, joined(self._inputs)
            self._inputs = [x]
        digest = now.digest
        seed = derive_seed(self.seed, "fit", digest)
        known = any(made.of == digest for made in now.history)  # made again after a resume
        with self._working():
            start = self._start(seed, digest)
            options = FitOptions(
                start, seed=seed, batch_size=self.batch_size, validation=self.validation, patience=self.patience,
                progress=self.progress,
            )  # fmt: skip
            posterior = fit_in_turn(self.model, self.method, (x, now.targets), options)
            seconds = {"fit": time.perf_counter() - began}
            held_out = {} if self.held_out is None or known else self._judge(posterior)
        with self._lock:
            if self.start == "last":
                self._weights = (start or {}, _weights(posterior), digest)
                if self._folder is not None:
                    self._folder.write_weights(*self._weights)
            if not known:
                made = Round(len(now.indices), held_out, seconds=seconds, of=digest)
                self._keep(replace(self._labels, history=(*self.history, made)))
            self._fitted = digest, posterior
            return self._fitted

    def _start(self, seed: int, digest: str) -> Params | None:
        if self.start == "network":
            return None
        if self.start == "anew":
            weights = {name: leaf for name, leaf in self.model.parameters().items() if ":" not in name}
            return reinitialize(self.model.network, weights, seed)
        before, after, of = self._weights
        weights = before if of == digest else after  # the same labels again: the same fit again
        return tree.move(weights, self.model.device) if weights else None

    def _judge(self, posterior: Posterior) -> dict[str, float]:
        wanted = ["accuracy" if self.model.likelihood.discrete else "rmse", "nll", "uncertainty"]
        judgement = judge(
            self._predicting(posterior), self.held_out, metrics=wanted, how=self.how, draws=self.draws, memory=self.memory,
            seed=self.seed, size=self.size, progress=self.progress,
        )  # fmt: skip
        return {name: float(value) for name, value in judgement.values.items()}

    def _predicting(self, posterior: Posterior) -> Posterior:
        """The posterior that predicts: itself, or the one network at its centre."""
        if self.bayesian:
            return posterior
        network = only_network(posterior, "bayesian=False")
        return Point(posterior.model, network.params, network.buffers)

    # -- asking

    def ask(self, k: int = 1) -> Tensor:
        """The numbers of k inputs that are worth a label most, best first, [k].

        They are pending until they are told or skipped, and are not asked twice.
        """
        candidates = self.candidates
        left = f"{len(candidates)} of {len(self.pool)} inputs have no label and are not pending"
        require(1 <= k <= len(candidates), f"k must be from 1 to {len(candidates)}, since {left}; got {k}")
        source = generator("cpu", self.seed, "ask", self._labels.digest, *self._labels.pending)
        if self.most is not None and self.most < len(candidates):
            rows = torch.randperm(len(candidates), generator=source)[: max(k, self.most)].sort().values
            candidates = candidates[rows]
        if self._labels.digest:
            return self._ask_by_score(candidates, k, source)
        asked = candidates[torch.randperm(len(candidates), generator=source)[:k]]
        with self._lock:
            self._keep(self._labels.ask(tuple(asked.tolist())))
        return asked

    def _ask_by_score(self, candidates: Tensor, k: int, source: torch.Generator) -> Tensor:
        """The k candidates that the acquisition chooses, noted in the round of the fit that it saw."""
        digest, posterior = self._current()
        began = time.perf_counter()
        view = View(
            self._predicting(posterior), self.pool, candidates, self.pending, self.how, self.draws, self.memory, self.size,
            derive_seed(self.seed, "draws", digest),
        )  # fmt: skip
        with torch.no_grad(), self._working():
            choice = named(self.acquisition).choose(view, k, source)
        asked = candidates[choice.positions.cpu()]
        indices, scores = tuple(asked.tolist()), tuple(choice.scores.tolist())
        with self._lock:
            seconds = time.perf_counter() - began
            self._keep(self._labels.noted(digest, indices, scores, seconds, view.uncertainty).ask(indices))
        return asked

    def step(self, k: int = 1) -> Round:
        """Ask for k labels, have the oracle give them, and tell them: one round of a simulation. The round is that of the asking."""
        if self.oracle is None:
            raise ValueError(
                "step() needs an oracle, a function of indices: ActiveLearning(..., oracle=...); or call ask and tell"
            )
        indices = self.pending if len(self.pending) else self.ask(k)  # what was asked before a crash is answered first
        self.tell(indices, self.oracle(indices))
        return self.history[-1] if self.history else Round(0)

    def run(self, labels: int, k: int = 1, *, until: Callable[[ActiveLearning], bool] | None = None) -> ActiveLearning:
        """Steps of k labels until there are so many labels, or until `until` says so; then one last fit."""
        while len(self.labelled) < labels and len(self.candidates) + len(self.pending):
            if len(self.labelled) and until is not None:
                self.refit()
                if until(self):
                    return self
            self.step(min(k, labels - len(self.labelled), max(1, len(self.candidates))))
        self.refit()
        return self

    # -- files

    def save(self, folder: str | os.PathLike) -> None:
        """Write the session, and from now on every label as it is told, into a folder of its own."""
        if self._folder is None or self._folder.path != Path(folder):
            files = Folder(Path(folder))
            files.write(self._labels, self._about())
            self._folder = files  # not before it has been written to: it may be somebody else's
            if self._weights[1]:
                files.write_weights(*self._weights)
        else:
            self._keep(self._labels)

    @classmethod
    def load(cls, folder: str | os.PathLike, model: Model, method: Methods, pool: Any, **options: Any) -> ActiveLearning:
        """Continue a session: the labels, what is pending, the history and the seed are in the folder; the rest is given again.

        `options` are those of `ActiveLearning`, but for `seed` and `folder`. What is pending can be shown at once. The model is fitted
        again when it is first needed, to the same posterior.
        """
        files, labels, meta = read(folder)
        session = cls(model, method, pool, seed=meta["seed"], **options)
        for what, now in session._about().items():
            if what != "seed" and meta.get(what) != now:
                raise ValueError(f"{folder} belongs to another session: its {what} was {meta.get(what)}, and now it is {now}")
        session._labels, session._folder = labels, files
        if labels.indices:
            session._inputs = [session.pool.take(model, labels.indices)]
        if session.start == "last":
            session._weights = files.read_weights()
        return session

    def _about(self) -> dict[str, Any]:
        """What must be the same when the session goes on: labels of other inputs, or for another network, would be wrong."""
        if not self._known:
            shapes = {name: list(p.shape) for name, p in self.model.network.named_parameters()}
            self._known = {
                "seed": self.seed,
                "pool": self.pool.fingerprint(self.model),
                "likelihood": repr(self.model.likelihood),
                "network": f"{len(shapes)} parameters, {derive_seed(repr(shapes)):x}",
            }
        return self._known

    def _keep(self, labels: Labels) -> None:
        """The new state, on disk before it is believed."""
        if self._folder is not None:
            self._folder.write(labels, self._about())
        self._labels = labels


def _weights(posterior: Posterior) -> Params:
    """The setting that a further fit can start from."""
    params, buffers = getattr(posterior, "params", None), getattr(posterior, "buffers", {})
    if not isinstance(params, dict):
        raise ValueError(f"start='last' needs a posterior with weights; got {type(posterior).__name__}. Use start='network'")
    return tree.clone(params if hasattr(posterior, "own_buffers") else {**buffers, **params})
