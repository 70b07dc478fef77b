r"""What stability training shares: unlabelled examples beside the labelled ones, and a price for predictions that are not stable.

The log joint of the N labelled examples gets one more term, the same in every step whatever the sizes of the batches,

.. math:: \log p(D, \theta) - N\, w(t)\, \frac{1}{B C} \sum_b \lVert z_b - \tilde z_b \rVert^2,

with :math:`z_b` the prediction (class probabilities, or the mean of a regression) for a labelled or unlabelled input, seen through one
augmentation, and :math:`\tilde z_b` what it is to agree with. Divided by N it is the published loss: the mean cross-entropy of the
labelled examples, and w(t) times a mean squared difference.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from dubito.inference.augment import Augmentation
from dubito.inference.descent import Descent, DescentState
from dubito.inference.method import Info, Method, Start, Traits, sum_parts, traits_of, with_budget
from dubito.model import Model, Target
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Batch, batch_size, is_array, is_indexed, split_batch
from dubito.network.weights import in_mode
from dubito.posteriors import Posterior
from dubito.posteriors.posterior import inputs_of
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, require
from dubito.tensors.processes import ALONE, Processes
from dubito.tensors.randomness import derive_seed
from dubito.tensors.shares import Share
from dubito.tensors.tree import Buffers, Params

Unlabelled = Any  # inputs without targets: a tensor, an array, a dict of them, or a Dataset of inputs or of (input, anything)


def ramp(step: int, steps: int, share: float) -> float:
    r"""The weight of the consistency at a step as a share of its last, :math:`e^{-5 (1 - t)^2}` with t from 0 to 1 over the first
    `share` of all steps.

    >>> [round(ramp(step, 100, 0.5), 3) for step in (0, 25, 50, 100)]
    [0.007, 0.287, 1.0, 1.0]
    """
    until = share * steps
    return math.exp(-5 * (1 - step / until) ** 2) if step < until else 1.0


class Stream:
    """Unlabelled inputs, batch after batch; every pass is in an order of its own, which a seed fixes."""

    def __init__(self, model: Model, unlabelled: Unlabelled, size: int):
        self.model, self.size = model, size
        self.dataset = unlabelled if is_indexed(unlabelled) else None
        self.held = None if self.dataset is not None else tree.move(tree.tensors(unlabelled, model.dtype), model.device)
        self.n = count(unlabelled)
        self.order: tuple[tuple[int, int], Tensor] | None = None

    def digest(self) -> str:
        """What tells these data from others: all that is held, or of a data set its first and last."""
        shown = self.held if self.dataset is None else [self.dataset[0], self.dataset[self.n - 1]]
        return store.checksum({str(i): leaf for i, leaf in enumerate(tree.leaves(tree.tensors(shown)))}, str(self.n))

    def __call__(self, index: int, seed: int, processes: Processes = ALONE) -> tuple[Any, Tensor, Share]:
        """The inputs of a batch, counted from the first pass on, their rows, and which of its rows a process has of it."""
        k = math.ceil(self.n / self.size)
        turn, i = divmod(index, k)
        if self.order is None or self.order[0] != (seed, turn):
            source = torch.Generator().manual_seed(derive_seed(seed, "unlabelled", turn))
            order = torch.randperm(self.n, generator=source)
            self.order = (seed, turn), order if self.dataset is not None else order.to(self.model.device)
        rows = self.order[1][self.n * i // k : self.n * (i + 1) // k]
        share = Share.of(len(rows), processes.rank, processes.size)
        require(
            len(rows) >= processes.size,
            f"a batch of {len(rows)} unlabelled examples cannot be divided over {processes.size} processes: raise unlabelled_size",
        )
        rows = share.take(rows)
        if self.dataset is None:
            return tree.apply_leaves(lambda leaf: leaf[rows], self.held), rows, share
        items = [self.dataset[row] for row in rows.tolist()]
        if self.model.split is split_batch:  # targets are not looked at: they may be what has no batch, such as None
            x = default_collate([inputs_of(self.model, item)[0] for item in items])
            x = tuple(x) if isinstance(x, list) else x
        else:
            x = inputs_of(self.model, default_collate(items))[0]
        return tree.move(x, self.model.device), rows.to(self.model.device), share


def count(unlabelled: Unlabelled) -> int:
    """Unlabelled examples there are; what cannot be gone through in any order is refused."""
    if not (is_indexed(unlabelled) or is_array(unlabelled) or isinstance(unlabelled, dict)):
        raise TypeError(
            "unlabelled is a tensor or an array of inputs, a dict of them, or a Dataset of inputs or of (input, anything); got a "
            f"{type(unlabelled).__name__}" + (": give its .dataset" if isinstance(unlabelled, DataLoader) else "")
        )
    if is_indexed(unlabelled):
        if not isinstance(unlabelled, Sized):
            raise TypeError(
                f"a {type(unlabelled).__name__} does not tell how many unlabelled examples there are: give it a __len__"
            )
        sizes = {len(unlabelled)}
    else:
        sizes = {len(leaf) for leaf in tree.leaves(tree.tensors(unlabelled))}
    require(len(sizes) == 1, f"the unlabelled inputs have different numbers of rows: {sorted(sizes)}")
    require(sizes != {0}, "there are no unlabelled examples: leave out `unlabelled`, or give some")
    return sizes.pop()


def join_inputs(x: Any, more: Any) -> Any:
    """Labelled inputs and, after them, unlabelled ones."""
    if isinstance(x, Tensor) and isinstance(more, Tensor) and x.shape[1:] == more.shape[1:]:
        return torch.cat([x, more.to(x.dtype)])
    if isinstance(x, dict) and isinstance(more, dict) and x.keys() == more.keys():
        return {key: join_inputs(x[key], more[key]) for key in x}
    if isinstance(x, list | tuple) and isinstance(more, list | tuple) and len(x) == len(more):
        return tuple(join_inputs(a, b) for a, b in zip(x, more, strict=True))
    told = [
        list(one.shape if isinstance(one, Tensor) else one) if isinstance(one, Tensor | dict) else type(one).__name__
        for one in (x, more)
    ]
    raise ValueError(f"labelled and unlabelled inputs must be alike but for their number; got {told[0]} and {told[1]}")


class View(NamedTuple):
    """What a teacher is shown of a step."""

    target: Consistent
    inputs: Any  # labelled, then unlabelled, as they are
    augmented: Callable[[], Any]  # another random view of them
    labelled: int
    rows: Tensor  # of the unlabelled
    params: Params
    buffers: Buffers  # after the student's pass
    z: Tensor  # [B, ...]: what the student predicts
    shares: tuple[Share, Share] | None  # of several processes: which labelled rows, and which of all, these are


@dataclass(frozen=True)
class Consistent(Target):
    """A target that also asks for stable predictions; a method that descends on it does not know."""

    teach: Callable[[View], Tensor] = field(kw_only=True)  # the squared difference of every example, [B]
    batch: Callable[[int], tuple[Any, Tensor, Share]] | None = field(kw_only=True)  # unlabelled inputs, and their rows
    augment: Augmentation | None = field(kw_only=True)
    generator: torch.Generator = field(kw_only=True)
    weight: float = field(kw_only=True)
    noted: list[tuple[int, Tensor]] = field(default_factory=list, kw_only=True)  # size and consistency of the labelled batches

    def predicted(self, params: Params, x: Any, buffers: Buffers) -> tuple[Tensor, Tensor, Buffers]:
        """f, the prediction, and the buffers after the pass."""
        with nullcontext() if self.around is None else self.around({**buffers, **params}):
            f, buffers = self.model.call(params, x, buffers)
        f = f.float() if f.dtype.itemsize < 4 else f
        return f, self.model.likelihood.mean(f, likelihood_params(params)), buffers

    def sum_scores(self, params: Params, index: int, batch: Batch, buffers: Buffers, *, train: bool) -> tuple[Tensor, Buffers]:
        """The sum over the labelled batch of log likelihoods, less its share of N w J: the caller scales both by N / B."""
        x, y = self.model.split(batch)
        n, rows = batch_size(y), torch.empty(0, dtype=torch.long, device=self.model.device)
        own = Share.of(n, 0, 1) if self.shares is None else self.shares[index]
        share = own
        if self.batch is not None:
            more, rows, unlabelled = self.batch(index)
            x, share = join_inputs(x, more), own.followed_by(unlabelled)
        target = self if self.shares is None else replace(self, shares=(*self.shares[:index], share, *self.shares[index + 1 :]))
        common = target.shares is not None

        def view() -> Any:
            """Another random view of the inputs."""
            if self.augment is None:
                return x
            made = self.augment(tree.apply_leaves(share.pad, x) if common else x, self.generator)
            sizes = [share.total if common else batch_size(x), batch_size(made)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"augment must return one input for each; it received {sizes[0]} and returned {sizes[1]}")
            return tree.apply_leaves(share.take, made) if common else made

        kind = self.model.device.type
        autocast = torch.autocast(kind, self.precision) if self.precision else nullcontext()
        with in_mode(self.model.network, train), autocast, target.as_shared(index):
            f, z, after = self.predicted(params, view(), buffers)
            scores = self.model.score(f[:n], y, params)
            apart = self.teach(View(self, x, view, n, rows, params, after, z, (own, share) if common else None))
        apart = apart[own.idle :].sum() / share.total if common else apart.mean()
        self.noted.append((own.total, apart.detach()))
        return scores[own.idle :].sum() - own.total * self.weight * apart, after


def squared(z: Tensor, other: Tensor) -> Tensor:
    """The mean over outputs of the squared difference, [B]."""
    return (z - other).pow(2).flatten(1).mean(1)


@dataclass
class ConsistencyState:
    student: DescentState
    step: int
    steps: int
    drawn: int  # batches of unlabelled examples
    seed: int  # of their order
    digest: str  # of the unlabelled examples that the run began with
    stream: Stream | None = field(default=None, kw_only=True, repr=False, compare=False, metadata={"transient": True})
    given: str = field(default="", kw_only=True, metadata={"transient": True})  # the digest of those that are there now


@dataclass(frozen=True)
class Consistency(ABC):
    """A method that descends, held to predictions that a small change does not move."""

    method: Method
    unlabelled: Unlabelled | None = field(default=None, kw_only=True, repr=False, compare=False)  # inputs without targets
    augment: Augmentation | None = field(default=None, kw_only=True, repr=False)  # (x, generator) -> x, other in every pass
    weight: float = field(default=100.0, kw_only=True)  # of the consistency, beside a mean log likelihood, after the ramp
    ramp_up: float = field(default=0.25, kw_only=True)  # share of the steps in which the weight rises
    unlabelled_size: int = field(default=100, kw_only=True)  # unlabelled examples beside each labelled batch

    def __post_init__(self):
        name, inner = type(self).__name__, type(self.method)
        if not isinstance(self.method, Descent) or type(self.method).update is not Descent.update:
            raise ValueError(
                f"{name} wraps a method that trains one setting of the weights, as {name}(MAP(...)) or {name}(MCDropout(...)); got "
                f"{inner.__name__}" + (f": write Ensemble({name}(...), size)" if inner.__name__ == "Ensemble" else "")
            )
        at_least(0, weight=self.weight)
        at_least(1, unlabelled_size=self.unlabelled_size)
        between(0, 1, ramp_up=self.ramp_up, include="both")
        if self.augment is not None and not callable(self.augment):
            raise TypeError(f"augment is a function of (x, generator), such as dubito.augment.Noise(); got {self.augment!r}")
        if self.unlabelled is not None:
            count(self.unlabelled)

    @property
    def data(self) -> Literal["batches", "full"]:
        """A mini-batch a step."""
        return "batches"

    @property
    def traits(self) -> Traits:
        """Those of the method inside that concern the network; a ramp is a share of all steps."""
        inner = traits_of(self.method)
        ramp_up = ("ramp_up=0",) if self.ramp_up else ()
        # examples count once each: bagging and adversarial neighbors would have to reach the teacher
        length = (*ramp_up, *inner.length_settings)
        return Traits(keeps_dropout=inner.keeps_dropout, takes_example_weights=False, length_settings=length, alone=inner.alone)

    @property
    def _inner(self) -> Descent:
        # each step has a weight and random views of its own, and a teacher to be kept: it cannot be played back
        assert isinstance(self.method, Descent)
        return replace(self.method, record=False)

    @abstractmethod
    def begin(self, target: Target, state: ConsistencyState, x: Any, generator: torch.Generator) -> ConsistencyState:
        """The state with what the teacher needs; x is a batch of inputs, labelled and unlabelled."""

    @abstractmethod
    def teach(self, state: Any, view: View) -> Tensor:
        """How far the student's predictions are from what they are to agree with, [B]: squared differences, means over outputs."""

    def follow(self, state: Any) -> None:
        """What the teacher does after a step of the student."""
        return

    def steps(self, n_batches: int) -> int:
        """An epoch is a pass over the labelled or the unlabelled examples, whichever takes more batches."""
        return self._inner.steps(self._batches(n_batches))

    def with_budget(self, n_batches: int) -> Self:
        """The method inside with a length of training that follows the data, where it leaves it open."""
        return replace(self, method=with_budget(self.method, self._batches(n_batches)))

    def _batches(self, n_batches: int) -> int:
        """In an epoch."""
        if self.unlabelled is None:
            return n_batches
        return max(n_batches, math.ceil(count(self.unlabelled) / self.unlabelled_size))

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> ConsistencyState:
        """The student's state, the unlabelled examples, and what the teacher needs."""
        student = self._inner.init(target, start, batch, generator, steps=steps)
        name = type(self.method).__name__
        if type(student) is not DescentState:
            raise ValueError(
                f"{type(self).__name__} wraps MAP, MCDropout and their like; {name} keeps more than one setting of the weights: "
                f"fit {type(self).__name__}(MAP(...)) first, and {name} with start=posterior"
            )
        x = target.model.split(batch)[0]
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        stream = None if self.unlabelled is None else Stream(target.model, self.unlabelled, self.unlabelled_size)
        digest = "" if stream is None else stream.digest()
        target.processes.agree(unlabelled_examples=digest)
        state = ConsistencyState(student, 0, steps, 0, seed, digest, stream=stream, given=digest)
        if stream is not None:
            x = join_inputs(x, stream(0, seed)[0])  # fails early where they are not alike
        return self.begin(target, state, x, generator)

    def step(self, target: Target, state: Any, data: Iterable[Batch], generator: torch.Generator) -> tuple[Any, Info]:
        """A step of the student on the log joint less the consistency, and then one of the teacher."""
        if state.digest != state.given:
            raise ValueError("the unlabelled examples are others than those this run began with: resume with the same")
        data = list(data)
        stream, first, weight = state.stream, state.drawn, self.weight * ramp(state.step, state.steps, self.ramp_up)
        own = {item.name: getattr(target, item.name) for item in fields(target)}
        stable = Consistent(
            **own,
            teach=lambda view: self.teach(state, view),
            batch=None if stream is None else lambda index: stream(first + index, state.seed, target.processes),
            augment=self.augment,
            generator=generator,
            weight=weight,
        )
        state.student, info = self._inner.step(stable, state.student, data, generator)
        state.step, state.drawn = state.step + 1, first + len(data)
        self.follow(state)
        # what the method has seen as a log likelihood is less by the consistency
        apart = torch.stack([n * difference for n, difference in stable.noted]).sum() / sum(n for n, _ in stable.noted)
        target.processes.sum_([apart])
        info = {**info, "log_likelihood": info["log_likelihood"] + weight * apart, "consistency": apart}
        return state, info

    def draw(self, state: ConsistencyState) -> Params | None:
        """None: the method inside has no draws."""
        return None

    def sum_parts(self, target: Target, state: Any) -> Any:
        """That of the student."""
        state.student = sum_parts(self._inner, target, state.student)
        return state

    def rise(self, target: Target, state: Any) -> float:
        """That of the student."""
        return self._inner.rise(target, state.student)

    def posterior(self, target: Target, state: Any, draws: store.Draws) -> Posterior:
        """That of the method inside, at the student's weights."""
        return self._inner.posterior(target, state.student, draws)
