"""Stochastic weight averaging, Gaussian (Maddox et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dubito.inference.descent import Descent, DescentState
from dubito.inference.method import Info, Start
from dubito.model import Model, Target
from dubito.network.examples import Batch
from dubito.network.inspect import layers_of
from dubito.network.weights import in_mode
from dubito.posteriors import Gaussian, Point, Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, positive, require
from dubito.tensors.covariances import Diagonal, LowRank
from dubito.tensors.randomness import derive_seed
from dubito.tensors.tree import Buffers, Params

TRACKED = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class SWAGState(DescentState):
    """Of a stacked target every leaf has the members first, also before the axis of columns or draws."""

    period: int  # steps in a pass over the data
    begin: int  # steps before collecting
    collected: int
    mean: Params
    squares: Params  # sums of squared deviations from the mean
    columns: Params  # [rank, ...]: the last deviations, each from the mean of its time
    seed: int  # of the draws that get BatchNorm statistics of their own
    statistics: Buffers  # [draws, ...]: these statistics, summed over batches, and the number of batches
    objective: Tensor = field(
        default_factory=lambda: torch.empty(0), kw_only=True
    )  # [epochs] of collecting, float64: the log joint


@dataclass(frozen=True)
class SWAG(Descent[SWAGState]):
    r"""Train by SGD, go on at a constant learning rate, and take the weights at the ends of epochs for draws of a Gaussian,

    .. math:: N\Big(\bar\theta,\; \tfrac12 \mathrm{diag}(\overline{\theta^2} - \bar\theta^2) + \tfrac{1}{2 (K - 1)} D D^T\Big).

    Its mean is the average of all weights collected; the columns of D are the last K = `rank` of them, less the average up to
    each. `rank=0` leaves out D and takes the whole diagonal. Collecting begins after a share `collect_after` of the epochs; until
    then the learning rate falls from `learning_rate` to `collecting_rate`.

    Running statistics of BatchNorm belong to particular weights. In networks that have some, the last of the `epochs` is not for
    training: it finds the statistics of `draws` draws, and the posterior is these.

    With `validation`, `fit` scores the present weights until there is a Gaussian (or are draws); they are the posterior if nothing
    later scores better.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, SWAG(epochs=10), (torch.randn(64, 1), torch.randn(64, 1)), batch_size=8)
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 1])
    """

    learning_rate: float = field(default=0.05, kw_only=True)  # at its highest
    optimizer: Literal["adam", "sgd"] = field(default="sgd", kw_only=True)  # the theory is about sgd, which wanders about a mode
    clip: float | None = field(default=1.0, kw_only=True)  # largest norm of the gradient; without, a small noise drives sgd away
    collecting_rate: float | None = field(default=None, kw_only=True)  # constant, while collecting; None is half of learning_rate
    collect_after: float = field(default=0.5, kw_only=True)  # share of the epochs before collecting begins
    rank: int = field(default=20, kw_only=True)  # columns of D, the last weights collected; 0 for a diagonal covariance
    draws: int = field(default=30, kw_only=True)  # functions to average when predicting

    def __post_init__(self):
        super().__post_init__()
        positive(collecting_rate=self.collecting_rate)
        between(0, 1, collect_after=self.collect_after, include="low")
        at_least(1, draws=self.draws)
        require(
            self.rank == 0 or self.rank >= 2, f"rank must be at least 2 columns, or 0 for a diagonal covariance; got {self.rank}"
        )

    def memory(self, weights: int) -> int:
        """At the end, columns are scaled, whitened and made orthonormal while the state is there."""
        return weights * (7 + 4 * self.rank)

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> SWAGState:
        """As of descent, with empty moments."""
        norms = batch_norms(target.model.network)
        period = steps // max(1, self.passes_over_data)
        passes = self.passes_over_data - bool(norms)
        before = int(self.collect_after * passes)
        last = ", the last of which is for BatchNorm," if norms else ""
        require(
            passes - before >= 2,
            f"SWAG takes the weights at the ends of two epochs at least; epochs={self.passes_over_data}{last} and "
            f"collect_after={self.collect_after} leave {max(0, passes - before)}: give more epochs",
        )
        trained = super().init(target, start, batch, generator, steps=passes * period)
        # sums are kept in single precision at least
        zero = {
            name: torch.zeros_like(leaf, dtype=leaf.dtype if leaf.dtype.itemsize > 2 else torch.float32)
            for name, leaf in start.params.items()
        }
        members = () if target.members is None else (target.members,)
        columns = {name: leaf.new_zeros(*members, self.rank, *leaf.shape[len(members) :]) for name, leaf in zero.items()}
        tracked = {name: start.buffers[name] for prefix in norms for name in statistic_names(prefix)}
        return SWAGState(
            **vars(trained),
            period=period,
            begin=before * period,
            collected=0,
            mean=tree.clone(zero),
            squares=zero,
            columns=columns,
            seed=int(torch.randint(2**62, (1,), generator=generator, device=generator.device)),
            statistics={
                name: torch.zeros(*members, self.draws, *leaf.shape[len(members) :], dtype=torch.float64, device=leaf.device)
                for name, leaf in tracked.items()
            },
            objective=torch.zeros(passes - before, *members, dtype=torch.float64, device=target.model.device),
        )

    def step(self, target: Target, state: SWAGState, data: Iterable[Batch], generator: torch.Generator) -> tuple[SWAGState, Info]:
        """A step of descent, after which moments may be updated; in the last epoch of networks with BatchNorm, statistics of draws."""
        if state.step >= state.steps:
            self._measure(target, state, data)
            state.step += 1
            return state, {}
        _, info = super().step(target, state, data, generator)
        if state.step > state.begin:
            ended = state.step % state.period == 0
            if len(state.objective):  # not in a fit that version 0.1 began
                log_joint = target.n_data / state.period * info["log_likelihood"] + (
                    target.log_prior(state.params) if ended else 0.0
                )
                state.objective[state.collected] += log_joint / target.temperature
            if ended:
                self._collect(target, state)
        return state, info

    def rise(self, target: Target, state: SWAGState) -> float:
        """By how many nats the log joint rose from the first half of the epochs of collecting to the second, less twice the standard
        error of this; the sum of stacked members."""
        half = state.collected // 2
        if not self.check or not half or state.collected > len(state.objective):
            return 0.0
        halves = state.objective[:half], state.objective[state.collected - half : state.collected]
        error = sum(scores.var(0, correction=min(1, half - 1)) / half for scores in halves) ** 0.5
        return float((halves[1].mean(0) - halves[0].mean(0) - 2 * error).sum())

    def _share(self, step: int, steps: int) -> float:
        until = int(self.collect_after * steps)
        low = 0.5 if self.collecting_rate is None else self.collecting_rate / self.learning_rate
        return max(low, super()._share(step, until)) if step < until else low

    def _collect(self, target: Target, state: SWAGState) -> None:
        """Update the moments. Sums of deviations keep the digits that a difference of large squares would lose."""
        slot, axis = state.collected % max(1, self.rank), 0 if target.members is None else 1
        state.collected += 1
        for name, mean in state.mean.items():
            weights = state.params[name].to(mean)
            before = weights - mean
            mean += before / state.collected
            after = weights - mean
            state.squares[name] += before * after
            if self.rank:
                state.columns[name].select(axis, slot).copy_(after)

    def _measure(self, target: Target, state: SWAGState, data: Iterable[Batch]) -> None:
        """Add up the statistics of the batches, draw by draw."""
        model, norms = target.model, batch_norms(target.model.network)
        inputs = [model.split(batch)[0] for batch in data]
        for own in self._members(target, state):
            for i in range(self.draws):
                params = self._draw(own, i)
                for index, x in enumerate(inputs):
                    with target.as_shared(index):
                        statistics = _statistics(model, norms, params, x, own.buffers)
                    for name, value in statistics.items():
                        own.statistics[name][i] += value

    def _draw(self, state: SWAGState, i: int) -> Params:
        """The i-th draw, always the same: made again when it is needed, since all of them may be too much to hold while training."""
        generator = torch.Generator(next(iter(state.mean.values())).device).manual_seed(derive_seed(state.seed, i))
        diagonal, columns = self._parts(state)

        def noise(shape: Iterable[int], like: Tensor) -> Tensor:
            """Standard normals of a shape."""
            return torch.randn(*shape, generator=generator, dtype=like.dtype, device=like.device)

        first = next(iter(columns.values()))
        along = noise(first.shape[:1], first)  # one for all leaves, which vary together
        drawn = {}
        for name, mean in state.mean.items():
            leaf = mean + diagonal[name].sqrt() * noise(mean.shape, mean)
            drawn[name] = (leaf + torch.tensordot(along.to(leaf), columns[name], 1)).to(state.params[name].dtype)
        return drawn

    def _parts(self, state: SWAGState) -> tuple[Params, Params]:
        """(d, C) of the covariance diag(d) + C C^T."""
        held = min(state.collected, self.rank)
        diagonal = {name: leaf * ((0.5 if self.rank else 1.0) / state.collected) for name, leaf in state.squares.items()}
        return diagonal, {name: leaf[:held] * max(1, 2 * (held - 1)) ** -0.5 for name, leaf in state.columns.items()}

    def _members(self, target: Target, state: SWAGState) -> list[SWAGState]:
        """Of a stacked state, views of the members' own."""
        if target.members is None:
            return [state]
        fixed = {name for name, _ in target.model.network.named_parameters()}  # among the buffers, these are not stacked
        return [
            replace(
                state,
                params=tree.select(state.params, i),
                buffers={name: leaf if name in fixed else leaf[i] for name, leaf in state.buffers.items()},
                mean=tree.select(state.mean, i),
                squares=tree.select(state.squares, i),
                columns=tree.select(state.columns, i),
                statistics=tree.select(state.statistics, i),
                seed=derive_seed(state.seed, "member", i),
            )
            for i in range(target.members)
        ]

    def unstack(self, target: Target, state: SWAGState) -> list[SWAGState]:
        """Views of the members' states."""
        return [*self._members(target, state)]

    def posterior(self, target: Target, state: SWAGState, draws: store.Draws) -> Posterior:
        """The Gaussian of the moments, or draws of it where BatchNorm has statistics; a point before there are any."""
        model, last = target.model, state.steps + (state.period if state.statistics else 0)
        if state.collected < 2 or (state.statistics and state.step < last):
            return Point(model, state.params, state.buffers)
        if not state.statistics:
            diagonal, columns = self._parts(state)
            mean = {name: leaf.to(state.params[name].dtype) for name, leaf in state.mean.items()}
            covariance = LowRank.of(diagonal, columns) if self.rank else Diagonal.of(diagonal)
            return Gaussian(model, mean, state.buffers, covariance, how="sampled", draws=self.draws)
        own = {}
        for prefix in batch_norms(model.network):
            *moments, count = statistic_names(prefix)
            for name in moments:
                seen = state.statistics[count].reshape(-1, *[1] * (state.statistics[name].ndim - 1))
                kept = state.buffers[name].expand_as(state.statistics[name])  # a layer that was never reached
                own[name] = torch.where(seen > 0, state.statistics[name] / seen, kept).to(kept.dtype)
        shared = {name: leaf for name, leaf in state.buffers.items() if name not in own}
        return Samples(model, tree.stack([self._draw(state, i) for i in range(self.draws)]), shared, own)


def batch_norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """The layers whose running statistics follow the data in training, by name."""
    with in_mode(network, True):  # some networks keep theirs frozen
        return {
            name: module
            for name, module in layers_of(network, _BatchNorm).items()
            if module.track_running_stats and module.training and module.momentum != 0
        }


def statistic_names(prefix: str) -> list[str]:
    """The names of a layer's mean, variance and number of batches."""
    return [f"{prefix}.{key}".lstrip(".") for key in TRACKED]


@torch.no_grad()
def _statistics(model: Model, norms: dict[str, _BatchNorm], params: Params, x: Any, buffers: Buffers) -> Buffers:
    """Mean and variance of what reaches each layer in a batch, and whether (1 or 0) anything did. Dropout is off."""
    fresh = {name: torch.zeros_like(buffers[name]) for prefix in norms for name in statistic_names(prefix)}
    with in_mode(model.network, False):
        try:
            for module in norms.values():
                module.training = True
            _, after = model.call(params, x, {**buffers, **fresh})
        finally:
            for module in norms.values():
                module.training = False
    statistics: Buffers = {}
    for prefix, module in norms.items():
        *moments, count = statistic_names(prefix)
        calls = after[count].double()
        # from zero, a layer with momentum m arrives at 1 - (1 - m)^calls of what it sees; one without at their average
        share = torch.ones_like(calls) if module.momentum is None else 1 - (1 - module.momentum) ** calls
        statistics |= {name: torch.where(calls > 0, after[name] / share, 0.0) for name in moments}
        statistics[count] = (calls > 0).double()
    return statistics
