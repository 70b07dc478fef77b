"""What methods that descend share: optimizers, schedules and the step.

The loss is the negative log joint divided by the number of data, so learning rates mean what they mean elsewhere, and the prior is
in its gradient exactly: weight decay theta / (N scale^2) inside the gradient, not decoupled from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Self, TypeVar, cast

import torch
from torch import Tensor

from dubito.inference.method import Info, Start, Traits
from dubito.model import Target
from dubito.model.likelihoods.likelihood import PREFIX
from dubito.network.cuda_graphs import Steps
from dubito.network.examples import Batch
from dubito.posteriors import Posterior
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, one_of, positive
from dubito.tensors.tree import Buffers, Params

PACE, FARTHEST = 10.0, 0.01  # of learned noises: times the learning rate, and no more than this for it
EPOCHS, STEPS = 100, 3000  # of training that is left to follow the data: so many passes, and at least so many steps
RATE, DISTANCE = 1e-3, 20.0  # learning rate of Adam, and how far it must take a weight in all steps at its peak
# a gradient is no noise if its running mean has such a share of its squares, and more where weights or steps are few
STEADY, FLUKE = 0.2, 0.4
REACH = 0.1  # how far weights go on at least, where it is asked whether training has arrived: by 100 steps at the least rate


@dataclass
class DescentState:
    params: Params
    buffers: Buffers
    optimizer: torch.optim.Optimizer
    step: int
    steps: int
    recorded: Steps = field(default_factory=Steps, kw_only=True, repr=False, compare=False, metadata={"transient": True})


Trained = TypeVar("Trained", bound=DescentState)


@dataclass(frozen=True)
class Descent(ABC, Generic[Trained]):
    """Gradient descent on the negative log joint.

    `schedule` is the course of the learning rate after `warmup` (a share of all steps, linear): cosine to zero, or constant. `clip`
    bounds the norm of the gradient (of the loss per example).

    Where `epochs` is not given, the training follows the data: 100 passes over them, or more where that is less than 3,000 steps. The
    learning rate, if it is not given either, is such that Adam can take a weight as far as 20 in all steps, and at least 1e-3. With
    `epochs` given it is 1e-3.

    On a GPU, steps of small networks are played back as CUDA graphs (`recorded.Steps`), since starting their operations takes longer
    than doing them. What a network does in Python then happens a few times only: `record=False` is for networks that count, or change
    their course, as they are called.
    """

    epochs: int | None = field(default=None, kw_only=True)  # passes over the data; None: 100, or more for 3,000 steps
    learning_rate: float | None = field(default=None, kw_only=True)  # at its highest; None: 1e-3, or more in few steps
    optimizer: Literal["adam", "sgd"] = field(default="adam", kw_only=True)  # adam adapts its steps, sgd does not
    momentum: float = field(default=0.9, kw_only=True)  # of sgd
    schedule: Literal["cosine", "constant"] = field(default="cosine", kw_only=True)  # of the learning rate, after the warmup
    warmup: float = field(default=0.0, kw_only=True)  # share of the steps in which the learning rate rises
    clip: float | None = field(default=None, kw_only=True)  # largest norm of the gradient of the loss per example
    record: bool = field(default=True, kw_only=True)  # on a GPU, play steps back where that is faster
    check: bool = field(default=True, kw_only=True, repr=False)  # warn where the training ends on its way, see `rise`

    def __post_init__(self):
        at_least(0, epochs=self.epochs)
        if self.epochs is not None and self.learning_rate is None:
            object.__setattr__(self, "learning_rate", RATE)
        positive(learning_rate=self.learning_rate)
        between(0, 1, momentum=self.momentum, warmup=self.warmup, include="low")
        one_of(("adam", "sgd"), optimizer=self.optimizer)
        one_of(("cosine", "constant"), schedule=self.schedule)

    @property
    def data(self) -> Literal["batches", "full"]:
        """A mini-batch a step."""
        return "batches"

    @property
    def passes_over_data(self) -> int:
        """`epochs`, or their number before the size of the data is known."""
        return EPOCHS if self.epochs is None else self.epochs

    @property
    def peak_rate(self) -> float:
        """`learning_rate`, or what it is where nothing is known of the data."""
        return RATE if self.learning_rate is None else self.learning_rate

    def with_budget(self, n_batches: int) -> Self:
        """The method with the epochs and the learning rate that follow the data, where neither was given."""
        if self.epochs is not None:
            return self
        epochs, rate = default_budget(n_batches)
        return replace(self, epochs=epochs, learning_rate=rate if self.learning_rate is None else self.learning_rate)

    @property
    def traits(self) -> Traits:
        """Members of an ensemble train in one batched pass; a warmup is a share of all steps."""
        return Traits(stacks=True, length_settings=("warmup=0",) if self.warmup else (), alone=None)

    @property
    def pace(self) -> float:
        """The factor by which the steps of learned noises are longer than those of weights. A step of Adam moves their logarithms by
        the learning rate at most, and they have further to go, so they would not arrive in short fits. With SGD it is 1."""
        return max(1.0, min(PACE, FARTHEST / self.peak_rate)) if self.optimizer == "adam" else 1.0

    @abstractmethod
    def posterior(self, target: Target, state: Trained, draws: store.Draws) -> Posterior:
        """What the weights, and whatever else the state holds, stand for."""

    def prepare(self, target: Target) -> Target:
        """The target as this method trains on it."""
        return target

    def adjust(self, target: Target, params: Params, gradient: Params) -> Params:
        """A method's own terms, added to the gradient of the loss: the negative log joint times T / N."""
        return gradient

    def steps(self, n_batches: int) -> int:
        """`epochs` passes over the data."""
        return self.with_budget(n_batches).passes_over_data * n_batches

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> Trained:
        """The weights at their start, and an optimizer for them."""
        # Adam and momentum work element by element, so the leaves of stacked members need no optimizer of their own each.
        leaves = list(start.params.values())
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(leaves, lr=self.peak_rate, fused=all(p.is_floating_point() for p in leaves))
        else:
            optimizer = torch.optim.SGD(leaves, lr=self.peak_rate, momentum=self.momentum, fused=True)
        return cast(Trained, DescentState(start.params, start.buffers, optimizer, 0, steps))

    def step(self, target: Target, state: Trained, data: Iterable[Batch], generator: torch.Generator) -> tuple[Trained, Info]:
        """A step of the optimizer on minus the log joint, times T / N."""
        data = list(data)
        state.optimizer.param_groups[0]["lr"] = self.peak_rate * self._share(state.step, state.steps)
        if self._may_record(target, data) and (kind := self.kind(state)) is not None:
            info = state.recorded(
                state.optimizer, data[0], generator, kind, lambda batch: self.update(target, state, [batch], generator)
            )
        else:
            info = self.update(target, state, data, generator)
        state.step += 1
        return state, info

    def _may_record(self, target: Target, data: list[Batch]) -> bool:
        """On a GPU, and where a batch is all that is new in a step."""
        own = (target.weights, target.adversary, target.targets, target.shares)
        new = len(data) != 1 or any(field is not None for field in own)
        return self.record and target.model.device.type == "cuda" and not new

    def kind(self, state: Trained) -> Hashable | None:
        """What tells steps of one kind from those of another, for which the device does other things; None: each does its own."""
        return ()

    def update(self, target: Target, state: Trained, data: list[Batch], generator: torch.Generator) -> dict[str, Tensor]:
        """What a step does on the device, all in place: weights, buffers and the optimizer, at the learning rate that it has."""
        target = self.prepare(target)
        factor = -target.temperature / target.n_data
        evaluation = target.gradient(state.params, data, state.buffers, train=True, factor=factor)
        slopes = list(self.adjust(target, state.params, evaluation.gradient).values())
        if self.clip is not None:
            clip(slopes, self.clip, stacked=target.members is not None)
        advance(state.optimizer, state.params, slopes, pace=self.pace)
        tree.become(state.buffers, evaluation.buffers)
        return {"log_likelihood": evaluation.log_likelihood}

    def memory(self, weights: int) -> int:
        """Bytes that a fit of so many bytes of weights needs at least beside them: the gradient, and what the optimizer keeps."""
        return weights * (3 if self.optimizer == "adam" else 2)

    def rise(self, target: Target, state: Trained) -> float:
        """By how many nats the objective (the log joint, or the evidence bound) would rise in as many steps again, and at least in
        those that take a weight .1 further, with the gradient that Adam ends with. Zero where this is mostly noise, as at an optimum;
        and with SGD, where nothing tells."""
        if not self.check or self.optimizer != "adam" or not state.step:
            return 0.0
        (first, second), signal, size, fourth, gain = state.optimizer.param_groups[0]["betas"], 0.0, 0.0, 0.0, 0.0
        fresh = first**state.step
        noise = (1 - first) / (1 + first) * (1 + fresh) / (1 - fresh)  # what pure noise leaves of its squares in the running mean
        for moments in state.optimizer.state.values():
            mean = moments["exp_avg"].double() / (1 - first ** float(moments["step"]))
            square = moments["exp_avg_sq"].double() / (1 - second ** float(moments["step"]))
            signal, size = signal + float(mean.square().sum()), size + float(square.sum())
            fourth, gain = (
                fourth + float(square.square().sum()),
                gain + float((mean.square() / square.sqrt().clamp_min(1e-12)).sum()),
            )
        steady = signal > size * max(STEADY, 2 * noise) + FLUKE * fourth**0.5  # size^2 / fourth is how many weights have a say
        return gain * max(self.peak_rate * state.step, REACH) * target.n_data / target.temperature if steady else 0.0

    def draw(self, state: Trained) -> Params | None:
        """None: descent has no draws."""
        return None

    def unstack(self, target: Target, state: Trained) -> list[Trained]:
        """The states of the members of a stacked target, which were trained in one batched pass."""
        assert target.members is not None
        fixed = {name for name, _ in target.model.network.named_parameters()}  # not stacked where they are not Bayesian
        shared = {name: leaf for name, leaf in state.buffers.items() if name in fixed}
        stacked = {name: leaf for name, leaf in state.buffers.items() if name not in fixed}
        return [
            replace(
                state,
                params=tree.clone(tree.select(state.params, i)),
                buffers={**shared, **tree.clone(tree.select(stacked, i))},
                recorded=Steps(),
            )
            for i in range(target.members)
        ]

    def _share(self, step: int, steps: int) -> float:
        """The learning rate at a step, as a share of its peak."""
        return share(step, steps, warmup=self.warmup, schedule=self.schedule)


def default_budget(n_batches: int) -> tuple[int, float]:
    """(epochs, learning rate of Adam) of training that follows the data, if a pass over them has `n_batches` batches.

    >>> default_budget(1), default_budget(1000)
    ((3000, 0.006666666666666667), (100, 0.001))
    """
    epochs = max(EPOCHS, math.ceil(STEPS / max(1, n_batches)))
    return epochs, max(RATE, DISTANCE / (epochs * max(1, n_batches)))


def advance(optimizer: torch.optim.Optimizer, params: Params, slopes: Iterable[Tensor], *, pace: float) -> None:
    """A step of the optimizer, in place; learned noises of the likelihood go `pace` times as far as it takes them.

    >>> params = {"weight": torch.zeros(1), "likelihood:log_scale": torch.zeros(1)}
    >>> advance(torch.optim.Adam(params.values(), lr=0.001), params, [torch.ones(1), torch.ones(1)], pace=10.0)
    >>> params
    {'weight': tensor([-0.0010]), 'likelihood:log_scale': tensor([-0.0100])}
    """
    for leaf, slope in zip(params.values(), slopes, strict=True):
        leaf.grad = slope  # strides as the leaf's, which fused optimizers on a CPU take for granted: autograd sees to that
    noises = [leaf for name, leaf in params.items() if name.startswith(PREFIX)] if pace != 1 else []
    before = [leaf.clone() for leaf in noises]
    optimizer.step()
    for leaf, old in zip(noises, before, strict=True):
        leaf.lerp_(old, 1 - pace)
    for leaf in params.values():
        leaf.grad = None


def share(step: int, steps: int, *, warmup: float, schedule: str) -> float:
    """A learning rate as a share of its peak: linear over the `warmup`, a share of the steps, then cosine to zero or constant.

    >>> share(50, 100, warmup=0.0, schedule="cosine")
    0.5
    """
    first = math.ceil(warmup * steps)
    if step < first:
        return (step + 1) / first
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - first) / max(1, steps - first)))


def clip(slopes: Sequence[Tensor], limit: float, *, stacked: bool) -> None:
    """Scale the gradient (each member's own) down to a norm of at most `limit`."""
    squares = [slope.reshape(*slope.shape[: int(stacked)], -1).pow(2).sum(-1) for slope in slopes]
    norm = torch.stack(squares).sum(0).sqrt()  # [] or [S]
    factor = (limit / norm.clamp_min(1e-12)).clamp(max=1.0)
    for slope in slopes:
        slope.mul_(factor.reshape(-1, *[1] * (slope.ndim - 1)) if stacked else factor)
