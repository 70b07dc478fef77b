"""Ensembles of any method: deep ensembles (Lakshminarayanan et al. 2017), of modes, anchored, and of whole posteriors."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dubito.inference.chains import batching_pays, own_buffers, starts
from dubito.inference.members import bag, draw_anchors, for_each, held_out, noisy_targets, perturb, warn_if_trained
from dubito.inference.method import Info, Method, Stacking, Start, Traits, least_memory, traits_of, unfinished, with_budget
from dubito.inference.methods.map import MAP
from dubito.inference.start import make_start
from dubito.model import Target
from dubito.model.priors import Centered
from dubito.network.examples import Batch
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Mixture, Point, Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, positive, require
from dubito.tensors.randomness import derive_seed, fork_rng
from dubito.tensors.tree import Params

DEFAULT = MAP()  # the method of `Ensemble(5)`
HELD_OUT, LOOKS = 0.2, 100  # share of the rows that stop a member of it early, and how many times that is looked at
NEW = {"before": None}  # fields that version 0.1 did not have


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
    period: int = 1  # steps in a pass over the data
    anchors: Params = field(default_factory=dict)  # where each member's prior is centered, [S, ...]
    best: Params = field(default_factory=dict)  # scores of held-out rows, [S], and the weights that had the best, [S, ...]
    targets: dict[int | None, Target] = field(default_factory=dict, repr=False, compare=False, metadata={"transient": True})


@dataclass(frozen=True)
class Ensemble:
    r"""Several members of any method, each from its own random start; the posterior is their mixture.

    Three kinds have names of their own:

    - `Ensemble(5)` is a deep ensemble: five networks trained as by `MAP()`, each stopped early where it predicts its own held-out fifth
      of the rows best (`hold_out=0.2`). Together the members see all rows.
    - `Ensemble(MAP(), 5)` is an ensemble of modes: each member is trained to the end on all rows.
    - `Ensemble(MAP(), 5, anchored=True)` draws each member's prior mean from the prior, and adds noise of the likelihood's own size to
      its targets. With a linear model, Gaussian noise and a Gaussian prior its members are exact draws of the posterior.

    Members are initialized anew by the `reset_parameters` of their layers, the `_init_weights` of the network, or `initialize`,
    called on a copy of the network. Parameters whose names match the pattern `keep` stay as they are in the network: a pretrained
    encoder. With `fit(start=...)` of several settings (draws, or a list) each member begins at one of its own; with one setting
    `keep` refers to it. `perturb` adds noise to weights that are not new, as a share of the root mean square of their tensor. A
    warning is given where a network seems to be trained and is not kept.

    Members see the same batches. Where that is faster they are trained in one batched pass: `vectorize` forces or forbids it.

    `start`, a method that ends at a single setting of the weights, trains each member first, and `method` goes on from there:
    `Ensemble(Laplace(), 5, start=MAP(epochs=50))`. Methods that expect a trained network (`post_hoc` is true of them) have
    `start=MAP()` by default, since nothing else would train members that are initialized anew. Where `fit` is given `validation`,
    the state that scores best counts, of either stage.

    `bagging` weighs the examples of each member as a bootstrap would: how often an example counts is Poisson, and depends on the
    example and the member alone, not on the order of the data. Examples that are augmented at random are not recognized.
    `adversarial`, a share of each input's range such as 0.01, adds the fast gradient sign neighbor of each example to the loss.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> posterior = dubito.fit(model, Ensemble(dubito.MAP(epochs=5), 3), (torch.randn(16, 1), torch.randn(16, 1)))
    >>> posterior.sample(4)["weight"].shape
    torch.Size([4, 1, 1])
    """

    method: Method = DEFAULT
    size: int = 5  # members
    start: Method | None = field(default=None, kw_only=True)  # trains the members first; MAP() where `method` does not train
    bagging: bool = field(default=False, kw_only=True)  # weigh the examples of each member as a bootstrap would
    adversarial: float | None = field(default=None, kw_only=True)  # step of adversarial training, a share of the inputs' range
    vectorize: bool | None = field(default=None, kw_only=True)  # train all members in one batched pass, or never; None decides
    keep: str | None = field(default=None, kw_only=True, metadata=NEW)  # pattern of parameters that are not initialized anew
    perturb: float | None = field(
        default=None, kw_only=True, metadata=NEW
    )  # noise on weights that are not new, as a share of theirs
    anchored: bool = field(default=False, kw_only=True, metadata={"before": False})  # center each member's prior at a draw of it
    hold_out: float | None = field(default=None, kw_only=True, metadata=NEW)  # share of the rows that stop each member early
    initialize: Callable[[nn.Module], object] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self):
        if isinstance(self.method, int):  # Ensemble(5)
            object.__setattr__(self, "size", self.method)
            object.__setattr__(self, "method", DEFAULT)
        if isinstance(self.method, type) or not hasattr(self.method, "step"):
            raise TypeError(
                f"Ensemble takes a number of members or a method, such as Ensemble(5) or Ensemble(MAP(), 5); got {self.method!r}"
            )
        if self.method is DEFAULT and self.hold_out is None and not (self.anchored or self.start):
            object.__setattr__(self, "hold_out", HELD_OUT)
        at_least(1, size=self.size)
        positive(adversarial=self.adversarial, perturb=self.perturb)
        between(0, 0.5, include="high", hold_out=self.hold_out)
        names = [type(method).__name__ for method in self.methods]
        require(
            traits_of(self.method).takes_example_weights
            or not (self.bagging or self.adversarial or self.hold_out or self.anchored),
            f"{names[-1]} takes all examples as they are: leave out bagging, adversarial, hold_out and anchored",
        )
        require(
            not self.hold_out or (len(names) == 1 and traits_of(self.method).stacks),
            f"hold_out stops the training of single settings of the weights early, such as that of MAP; got {' and '.join(names)}",
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
        """Members start anew; the traits that concern the network and its weights are those of the method inside."""
        inner = traits_of(self.method)
        alone = f"its members ({self.size}) run one or more on each process, and all of them need the same data"
        return Traits(
            starts_anew=True, many_starts=True, keeps_dropout=inner.keeps_dropout, draws_weights=inner.draws_weights, alone=alone
        )

    @property
    def parts(self) -> int:
        """Members, which know nothing of each other, may be trained by processes of their own."""
        return self.size

    @property
    def numbers(self) -> range:
        """The numbers of the members: their weights at the start, their anchors and the examples they see follow from these."""
        return range(self.size)

    @property
    def of(self) -> int:
        """How many members there are, of which these may be some."""
        return self.size

    def some(self, numbers: range) -> Members:
        """The ensemble of some of the members."""
        known = {own.name: getattr(self, own.name) for own in fields(self)}
        return Members(**{**known, "size": len(numbers)}, numbers=numbers, of=self.size)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that train each member, in turn: the start, if there is one, and the method."""
        if self.start is None and not traits_of(self.method).post_hoc:
            return (self.method,)
        return (self.start or MAP(), self.method)

    @property
    def data(self) -> Literal["batches", "full"]:
        """Batches or all data at once, as the method inside has it."""
        return self.method.data

    def with_budget(self, n_batches: int) -> Ensemble:
        """The ensemble with epochs that follow the data, for those of its methods to which none are given."""
        stages = [with_budget(method, n_batches) for method in self.methods]
        return replace(self, method=stages[-1], start=stages[0] if stages[1:] else None)

    def steps(self, n_batches: int) -> int:
        """The steps of all stages."""
        return sum(method.steps(n_batches) for method in self.methods)

    def memory(self, weights: int) -> int:
        """Bytes for all members, which are held at once."""
        return self.size * (weights + max(least_memory(method, weights) for method in self.methods))

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> EnsembleState:
        """Members with newly initialized weights, in one batched state where that is faster."""
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        starts = self._starts(target, start, seed)
        pays = any(self._vectorized(target, stage) for stage in range(len(self.methods)))
        batched = pays and self._works(target, _together(target, starts), batch)
        # The number of batches in a pass is not given, but follows from the number of steps, which grows with it in every stage.
        n_batches = bisect_left(range(2**40), steps, key=self.steps)
        first = self.methods[0].steps(n_batches) if len(self.methods) > 1 else steps
        state = EnsembleState([], 0, 0, first, steps, batched, None, None, n_batches)
        if self.anchored:
            state.anchors = draw_anchors(target, start, self.numbers, generator)
        self._part_from(generator)
        state.stages.append(self._stage(0, target, state, starts, batch, generator))
        if len(self.methods) > 1:
            # It is made again once the first stage is over. Making it here finds errors early, and lets a checkpoint of either stage
            # be read into the state.
            self._follow(target, state, batch, generator)
            state.stage = int(steps == 0)
        if self.adversarial is not None:
            x = target.model.split(batch)[0]
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise ValueError("adversarial training perturbs one tensor of real numbers; this model takes other inputs")
            state.low, state.high = x.amin(0), x.amax(0)
        return state

    def _part_from(self, generator: torch.Generator) -> None:
        """Let members on other processes draw other numbers; here there are none."""

    def step(
        self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[EnsembleState, Info]:
        """A step of every member, on the same batches."""
        if self.bagging or self.anchored or self.hold_out or self.adversarial is not None:
            data = list(data)
        if state.step == state.first:
            self._advance(target, state, data, generator)
        state, info = self._step(target, state, data, generator)
        state.step += 1
        if state.step == state.steps:  # a second method without steps, such as MCDropout(epochs=0), still counts
            self._advance(target, state, data, generator)
        return state, info

    def _step(
        self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[EnsembleState, Info]:
        """A step of the current stage."""
        method, stage = self.methods[state.stage], state.stages[state.stage]
        if self.adversarial is not None:
            assert state.low is not None
            assert state.high is not None
            x = torch.cat([target.model.split(batch)[0] for batch in data])
            state.low, state.high = torch.minimum(state.low, x.amin(0)), torch.maximum(state.high, x.amax(0))
            target = replace(target, adversary=self.adversarial * (state.high - state.low))
        held = [held_out(target, batch, self.numbers, self.hold_out) for batch in data] if self.hold_out else []  # [S, B] each
        weights = self._weights(target, data, held)
        targets = [noisy_targets(target, batch, self.numbers) for batch in data] if self.anchored else [None]
        if stage.stacked:
            own = replace(self._of(target, state), weights=for_each(weights), targets=for_each(targets))
            members = [method.step(own, stage.members[0], data, generator)]
        else:
            members = []
            for i, member in enumerate(stage.members):
                own = replace(self._of(target, state, i), weights=for_each(weights, i), targets=for_each(targets, i))
                members.append(method.step(own, member, data, generator))
        stage.members = [member for member, _ in members]
        if held:
            self._stop_early(target, state, list(data), held)
        infos = [info for _, info in members]
        return state, {key: torch.stack([torch.as_tensor(info[key]) for info in infos]) for key in infos[0]}

    def _advance(self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator) -> None:
        """Go on to the next stage, if there is one."""
        if state.stage + 1 < len(self.methods):
            self._follow(target, state, next(iter(data)), generator)
            state.stage += 1

    def _follow(self, target: Target, state: EnsembleState, batch: Batch, generator: torch.Generator) -> None:
        """Begin the second stage at the weights with which the first ended."""
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
            return Stage([method.init(self._of(target, state), _together(target, starts), batch, generator, steps=steps)], True)
        seen = [self._of(target, state, i) for i in range(self.size)]
        return Stage([method.init(seen[i], own, batch, generator, steps=steps) for i, own in enumerate(starts)], False)

    def draw(self, state: EnsembleState) -> Params | None:
        """The members' draws side by side, leaves [size, ...]; a start's are not kept."""
        if state.stage + 1 < len(self.methods):
            return None
        drawn = [draw for member in state.stages[state.stage].members if (draw := self.method.draw(member)) is not None]
        return tree.stack(drawn) if drawn else None

    def _posteriors(self, stage: int, target: Target, state: EnsembleState, draws: store.Draws) -> list[Posterior]:
        """The posterior of every member after a stage."""
        method, states = self.methods[stage], self._best(state) if state.best else state.stages[stage].members
        if state.stages[stage].stacked:
            states = cast(Stacking, method).unstack(self._of(target, state), states[0])
        seen = [self._of(target, state, i) for i in range(self.size)]
        ended = [method.posterior(seen[i], own, draws.column(i)) for i, own in enumerate(states)]
        return [replace(posterior, model=target.model) for posterior in ended] if state.anchors else ended

    def rise(self, target: Target, state: EnsembleState) -> float:
        """The largest rise of any member; zero where they stop early."""
        if self.hold_out:
            return 0.0
        method, stage = self.methods[state.stage], state.stages[state.stage]
        share = self.size if stage.stacked else 1
        return max(unfinished(method, target, member) for member in stage.members) / share

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

    def _of(self, target: Target, state: EnsembleState, member: int | None = None) -> Target:
        """The target of one member, or of all of them in one batched pass, with the priors at their anchors."""
        if member not in state.targets:
            model = target.model
            if state.anchors:
                anchors = state.anchors if member is None else tree.select(state.anchors, member)
                model = replace(model, prior=Centered(anchors, model.prior))
            state.targets[member] = replace(target, model=model, members=self.size if member is None else None)
        return replace(state.targets[member], adversary=target.adversary)

    def _vectorized(self, target: Target, stage: int = -1) -> bool:
        """Whether a stage trains all members in one batched pass."""
        if self.vectorize is False or not traits_of(self.methods[stage]).stacks:
            return False
        return bool(self.vectorize) or batching_pays(target.model)

    def _works(self, target: Target, start: Start, batch: Batch) -> bool:
        """Whether the network can run batched: not if it asks for values, or writes into tensors of its own."""
        try:
            replace(target, members=self.size).gradient(start.params, [batch], tree.clone(start.buffers), train=True)
        except RuntimeError as error:
            if self.vectorize:
                raise RuntimeError(f"this network cannot run its members in one pass; use vectorize=False ({error})") from error
            return False
        return True

    def _starts(self, target: Target, start: Start, seed: int) -> list[Start]:
        """Every member's own start."""
        if start.draws is not None:
            settings, own = starts(target, start, self.of, torch.Generator()), own_buffers(start, self.of)
            given = [Start(tree.select(settings, i), {**start.buffers, **tree.select(own, i)}) for i in self.numbers]
            return [
                perturb(member, set(), derive_seed(seed, i), self.perturb) for i, member in zip(self.numbers, given, strict=True)
            ]
        names = [name for name in start.params if ":" not in name]
        kept = {name for name in names if self.keep is not None and re.search(self.keep, name)}
        require(kept or self.keep is None, f"keep={self.keep!r} matches none of the weights, which are {names[:8]}")
        require(
            not start.given or kept,
            "start is one setting of the weights, and members are initialized anew: give keep='pattern' for what they take from it "
            "(keep='' for all, with perturb or bagging so that they differ), or a start of several settings",
        )
        new = {name: leaf for name, leaf in start.params.items() if name not in kept}
        members = []
        for i in self.numbers:
            own = derive_seed(seed, i)
            fresh = reinitialize(target.model.network, new, own, self.initialize)
            params = {name: fresh[name] if name in fresh else leaf.clone() for name, leaf in start.params.items()}
            members.append(perturb(Start(params, tree.clone(start.buffers)), set(new), own, self.perturb))
        if self.initialize is None:
            warn_if_trained(start, [member.params for member in members], set(new) & set(names))
        return members

    def _weights(self, target: Target, data: Iterable[Batch], held: list[Tensor]) -> list[Tensor | None]:
        """How often each example of each batch counts for each member, [S, B]; what a member holds out does not count."""
        bags = [bag(target, batch, self.numbers) for batch in data] if self.bagging else [torch.ones(()) for _ in held]
        return [bag.to(out.device) * ~out for bag, out in zip(bags, held, strict=True)] if held else list(bags) or [None]

    def _stop_early(self, target: Target, state: EnsembleState, data: list[Batch], held: list[Tensor]) -> None:
        """Score what each member holds out in some of the passes, and keep the weights of the pass with the best score."""
        epoch, last = state.step // state.period, state.steps // state.period - 1
        if (last - epoch) % max(1, last // LOOKS):
            return
        stage = state.stages[0]
        best = state.best = tree.move(state.best, target.model.device)  # what a checkpoint held is on the CPU
        leaves = [{"params": member.params, "buffers": member.buffers} for member in stage.members]
        scores = []
        with torch.no_grad():
            for batch, out in zip(data, held, strict=True):
                for i, member in enumerate(leaves):
                    own = replace(self._of(target, state, None if stage.stacked else i), adversary=None)
                    own = replace(own, weights=for_each([out.to(target.model.dtype)], None if stage.stacked else i))
                    value, _ = own.sum_scores(member["params"], 0, batch, tree.clone(member["buffers"]), train=False)
                    scores.append(value.reshape(-1))
        score = torch.cat(scores).reshape(len(data), self.size).sum(0)
        count = torch.stack([out.sum(1) for out in held]).sum(0)
        best["score"] = best.get("score", torch.zeros_like(score)) + score
        best["count"] = best.get("count", torch.zeros_like(count)) + count
        if (state.step + 1) % state.period:
            return
        mean = best.pop("score") / best["count"]
        better = ~(
            mean <= best.get("mean", mean.new_full(mean.shape, -torch.inf))
        )  # without rows to hold out the last pass counts
        best["mean"] = torch.where(better, mean, best.get("mean", mean))
        del best["count"]
        flat = [{f"{kind}/{name}": leaf for kind, part in member.items() for name, leaf in part.items()} for member in leaves]
        now = flat[0] if stage.stacked else tree.stack(flat)
        for name, leaf in now.items():
            if stage.stacked and leaf.shape[:1] != (self.size,):  # a weight that is not Bayesian: the same for all
                continue
            chosen = better.reshape(-1, *[1] * (leaf.ndim - 1))
            best[name] = torch.where(chosen, leaf, best[name]) if name in best else leaf.detach().clone()

    def _best(self, state: EnsembleState) -> list[Any]:
        """The members' states with the weights that had the best score."""

        def put(own: Any, leaves: Params) -> Any:
            """A state with other weights and buffers."""
            return replace(
                own,
                params={name: leaves.get(f"params/{name}", leaf) for name, leaf in own.params.items()},
                buffers={name: leaves.get(f"buffers/{name}", leaf) for name, leaf in own.buffers.items()},
            )

        stage = state.stages[0]
        leaves = {name: leaf for name, leaf in state.best.items() if "/" in name}
        if stage.stacked:
            return [put(stage.members[0], leaves)]
        return [put(member, tree.select(leaves, i)) for i, member in enumerate(stage.members)]


@dataclass(frozen=True)
class Members(Ensemble):
    """Some of the members of an ensemble, whose others are trained by other processes. Each begins where it would begin among all, and
    sees the same examples; what is random in training is independent of the others."""

    numbers: range = field(default=range(0), kw_only=True)  # pyright: ignore[reportIncompatibleMethodOverride]
    of: int = field(default=0, kw_only=True)  # pyright: ignore[reportIncompatibleMethodOverride]

    def _part_from(self, generator: torch.Generator) -> None:
        if first := self.numbers[0]:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
            generator.manual_seed(derive_seed(seed, first))

    def step(
        self, target: Target, state: EnsembleState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[EnsembleState, Info]:
        """A step of these members."""
        with fork_rng(derive_seed("members", self.numbers[0], state.step)) if self.numbers[0] else nullcontext():
            return super().step(target, state, data, generator)


def _together(target: Target, starts: list[Start]) -> Start:
    """All members' starts, stacked; parameters that are not Bayesian are the same for all and stay single."""
    fixed = {name for name, _ in target.model.network.named_parameters()}
    first = starts[0].buffers
    buffers = {name: leaf if name in fixed else torch.stack([s.buffers[name] for s in starts]) for name, leaf in first.items()}
    return Start(tree.stack([s.params for s in starts]), buffers)
