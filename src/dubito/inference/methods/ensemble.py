"""Deep ensembles (Lakshminarayanan et al. 2017), of any method."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from dubito.inference.chains import batching_pays
from dubito.inference.method import Info, Method, Stacking, Start, Traits, traits_of, with_budget
from dubito.inference.methods.map import MAP
from dubito.inference.start import make_start
from dubito.model import Target
from dubito.network.examples import Batch
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Mixture, Point, Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, positive, require
from dubito.tensors.randomness import derive_seed, hash_rows, uniforms_from
from dubito.tensors.tree import Params


@dataclass
class Stage:
    members: list[Batch]  # one state each, or a single stacked one
    stacked: bool


@dataclass
class EnsembleState:
    stages: list[Stage]  # of `start`, if there is one, and of the method
    stage: int  # the one the last step belongs to
    step: int
    first: int  # steps of the first stage
    steps: int  # of all
    batched: bool  # whether the network can run all members in one pass
    low: Tensor | None  # smallest and largest input seen, element by element, for adversarial steps
    high: Tensor | None


@dataclass(frozen=True)
class Ensemble:
    """Several members of any method, each from its own random start; the posterior is their mixture.

    Members are re-initialized by the `reset_parameters` of their layers (or by `initialize`, called on a copy of the network), and see
    the same batches. Where that is faster they are trained in one batched pass: `vectorize` forces or forbids it.

    `start`, a method that ends at a single setting of the weights, trains each member first, and `method` goes on from there:
    `Ensemble(Laplace(), 5, start=MAP(epochs=50))`. Methods that expect a trained network (`post_hoc` is true of them) have
    `start=MAP()` by default, since nothing else would train members that are initialized anew. Where `fit` is given `validation`,
    the state that scores best counts, be it of the start or of what follows.

    `bagging` weighs the examples of each member as a bootstrap would (how often an example counts is Poisson, and depends on nothing
    but the example and the member, whatever the order of the data; examples that are augmented at random are not recognized).
    `adversarial`, a share of each input's range such as 0.01, adds the fast gradient sign neighbor of each example to the loss.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> posterior = dubito.fit(model, Ensemble(dubito.MAP(epochs=5), 3), (torch.randn(16, 1), torch.randn(16, 1)))
    >>> posterior.sample(4)["weight"].shape
    torch.Size([4, 1, 1])
    """

    method: Method
    size: int = 5  # members
    start: Method | None = field(default=None, kw_only=True)  # trains the members first; MAP() where `method` does not train
    bagging: bool = field(default=False, kw_only=True)  # weigh the examples of each member as a bootstrap would
    adversarial: float | None = field(default=None, kw_only=True)  # step of adversarial training, a share of the inputs' range
    vectorize: bool | None = field(default=None, kw_only=True)  # train all members in one batched pass, or never; None decides
    initialize: Callable[[nn.Module], object] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self):
        at_least(1, size=self.size)
        positive(adversarial=self.adversarial)
        names = [type(method).__name__ for method in self.methods]
        require(
            traits_of(self.method).takes_example_weights or (not self.bagging and self.adversarial is None),
            f"{names[-1]} takes all examples as they are: leave out bagging and adversarial",
        )
        require(
            not self.vectorize or any(traits_of(method).stacks for method in self.methods),
            f"{' and '.join(names)} cannot run members in one pass: leave out `vectorize`",
        )
        first = self.methods[0].data
        require(
            first == self.data,
            f"{names[0]} takes its data as {first!r} and {names[-1]} as {self.data!r}, and one run cannot give "
            f"both: choose a start that takes them as {self.data!r}",
        )

    @property
    def traits(self) -> Traits:
        """Members start anew; what concerns the network and its weights is as of the method inside."""
        inner = traits_of(self.method)
        return Traits(starts_anew=True, keeps_dropout=inner.keeps_dropout, draws_weights=inner.draws_weights)

    @property
    def methods(self) -> tuple[Method, ...]:
        """What each member goes through: the start, if there is one, and the method."""
        if self.start is None and not traits_of(self.method).post_hoc:
            return (self.method,)
        return (self.start or MAP(), self.method)

    @property
    def data(self) -> Literal["batches", "full"]:
        """As of the method inside."""
        return self.method.data

    def with_budget(self, n_batches: int) -> Ensemble:
        """The ensemble whose methods have a length of training that follows the data, where they leave it open."""
        stages = [with_budget(method, n_batches) for method in self.methods]
        return replace(self, method=stages[-1], start=stages[0] if stages[1:] else None)

    def steps(self, n_batches: int) -> int:
        """Those of all stages."""
        return sum(method.steps(n_batches) for method in self.methods)

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> EnsembleState:
        """Members with newly initialized weights, in one batched state where that is faster."""
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        starts = [self._reset(target, start, derive_seed(seed, i)) for i in range(self.size)]
        pays = any(self._vectorized(target, stage) for stage in range(len(self.methods)))
        batched = pays and self._works(target, _together(target, starts), batch)
        # How many batches a pass has is not told, but the sum of all steps tells it: the steps of every stage grow with them.
        n_batches = bisect_left(range(2**40), steps, key=self.steps)
        first = self.methods[0].steps(n_batches) if len(self.methods) > 1 else steps
        state = EnsembleState([], 0, 0, first, steps, batched, None, None)
        state.stages.append(self._stage(0, target, state, starts, batch, generator))
        if len(self.methods) > 1:
            # Made anew once the first stage is over. Here it finds out early what cannot work, and a state holds all stages at all
            # times, so that a checkpoint of any can be read into it.
            self._follow(target, state, batch, generator)
            state.stage = int(steps == 0)
        if self.adversarial is not None:
            x = target.model.split(batch)[0]
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise ValueError("adversarial training perturbs one tensor of real numbers; this model takes other inputs")
            state.low, state.high = x.amin(0), x.amax(0)
        return state

    def step(
        self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[EnsembleState, Info]:
        """A step of every member, on the same batches."""
        if self.bagging or self.adversarial is not None:
            data = list(data)
        if state.step == state.first:
            self._advance(target, state, data, generator)
        state, info = self._step(target, state, data, generator)
        state.step += 1
        if state.step == state.steps:  # a method of no steps, such as MCDropout(epochs=0), still comes last
            self._advance(target, state, data, generator)
        return state, info

    def _step(
        self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[EnsembleState, Info]:
        """A step of the stage that is under way."""
        method, stage = self.methods[state.stage], state.stages[state.stage]
        if self.adversarial is not None:
            assert state.low is not None
            assert state.high is not None
            x = torch.cat([target.model.split(batch)[0] for batch in data])
            state.low, state.high = torch.minimum(state.low, x.amin(0)), torch.maximum(state.high, x.amax(0))
            target = replace(target, adversary=self.adversarial * (state.high - state.low))
        bags = [self._bag(target, batch) for batch in data] if self.bagging else None  # [S, B] each
        if stage.stacked:
            weights = None if bags is None else tuple(bags)
            members = [method.step(replace(self._stack(target), weights=weights), stage.members[0], data, generator)]
        else:
            members = []
            for i, member in enumerate(stage.members):
                weights = None if bags is None else tuple(bag[i] for bag in bags)
                members.append(method.step(replace(target, weights=weights), member, data, generator))
        stage.members = [member for member, _ in members]
        infos = [info for _, info in members]
        return state, {key: torch.stack([torch.as_tensor(info[key]) for info in infos]) for key in infos[0]}

    def _advance(self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator) -> None:
        """Go on to the next stage, if there is one."""
        if state.stage + 1 < len(self.methods):
            self._follow(target, state, next(iter(data)), generator)
            state.stage += 1

    def _follow(self, target: Target, state: EnsembleState, batch: Batch, generator: torch.Generator) -> None:
        """Begin the second stage where the first has come to."""
        del state.stages[1:]
        y, name = target.model.split(batch)[1], type(self.methods[0]).__name__
        try:
            starts = [make_start(target.model, ended, y) for ended in self._posteriors(0, target, state, store.Draws())]
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be a start, which ends at a single setting of the weights as MAP does ({error})"
            ) from error
        state.stages.append(self._stage(1, target, state, starts, batch, generator))

    def _stage(
        self, stage: int, target: Target, state: EnsembleState, starts: list[Start], batch: Batch, generator: torch.Generator
    ) -> Stage:
        method, steps = self.methods[stage], state.first if stage == 0 else state.steps - state.first
        if state.batched and self._vectorized(target, stage):
            return Stage([method.init(self._stack(target), _together(target, starts), batch, generator, steps=steps)], True)
        return Stage([method.init(target, own, batch, generator, steps=steps) for own in starts], False)

    def draw(self, state: EnsembleState) -> Params | None:
        """The members' draws side by side, leaves [size, ...]; a start's are not kept."""
        if state.stage + 1 < len(self.methods):
            return None
        drawn = [draw for member in state.stages[state.stage].members if (draw := self.method.draw(member)) is not None]
        return tree.stack(drawn) if drawn else None

    def _posteriors(self, stage: int, target: Target, state: EnsembleState, draws: store.Draws) -> list[Posterior]:
        """What every member has come to in a stage."""
        method, states = self.methods[stage], state.stages[stage].members
        if state.stages[stage].stacked:
            states = cast(Stacking, method).unstack(self._stack(target), states[0])
        return [method.posterior(target, own, draws.column(i)) for i, own in enumerate(states)]

    def posterior(self, target: Target, state: EnsembleState, draws: store.Draws) -> Posterior:
        """The equal mixture of the members' posteriors."""
        members = self._posteriors(state.stage, target, state, draws)
        points = [member for member in members if isinstance(member, Point)]
        if len(points) < len(members):
            return Mixture.equal(members)
        # an equal mixture of points is a set of samples
        fixed = {name for name, _ in target.model.network.named_parameters()}
        shared = {name: leaf for name, leaf in points[0].buffers.items() if name in fixed}
        apart = [{name: leaf for name, leaf in p.buffers.items() if name not in fixed} for p in points]
        return Samples(target.model, tree.stack([p.params for p in points]), shared, tree.stack(apart) if apart[0] else {})

    def _stack(self, target: Target) -> Target:
        return replace(target, members=self.size)

    def _vectorized(self, target: Target, stage: int = -1) -> bool:
        """Whether a stage trains all members in one batched pass."""
        if self.vectorize is False or not traits_of(self.methods[stage]).stacks:
            return False
        return bool(self.vectorize) or batching_pays(target.model)

    def _works(self, target: Target, start: Start, batch: Batch) -> bool:
        """Whether the network can run batched: not if it asks for values, or writes into tensors of its own."""
        try:
            self._stack(target).gradient(start.params, [batch], tree.clone(start.buffers), train=True)
        except RuntimeError as error:
            if self.vectorize:
                raise RuntimeError(f"this network cannot run its members in one pass; use vectorize=False ({error})") from error
            return False
        return True

    def _reset(self, target: Target, start: Start, seed: int) -> Start:
        """A member's own start: a copy of the network with all layers initialized anew."""
        params = reinitialize(target.model.network, start.params, seed, self.initialize)
        return Start(params, tree.clone(start.buffers))

    def _bag(self, target: Target, batch: Batch) -> Tensor:
        """How often each example counts for each member, [S, B]: Poisson(1), from a hash of the example's own bytes."""
        x, y = target.model.split(batch)
        keys = hash_rows([*tree.leaves(x), *tree.leaves(y)])
        salts = torch.tensor([derive_seed("bag", i) for i in range(self.size)], device=keys.device)
        uniform = uniforms_from(keys ^ salts.unsqueeze(1))
        counts = torch.zeros_like(uniform)
        cumulative = term = 0.36787944117144233  # e^-1
        for k in range(1, 12):
            counts += uniform >= cumulative
            term /= k
            cumulative += term
        return counts.float()


def _together(target: Target, starts: list[Start]) -> Start:
    """All members' starts, stacked; parameters that are not Bayesian are the same for all and stay single."""
    fixed = {name for name, _ in target.model.network.named_parameters()}
    first = starts[0].buffers
    buffers = {name: leaf if name in fixed else torch.stack([s.buffers[name] for s in starts]) for name, leaf in first.items()}
    return Start(tree.stack([s.params for s in starts]), buffers)
