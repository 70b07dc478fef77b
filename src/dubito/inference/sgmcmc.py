r"""What SGLD and SGHMC share: steps on mini-batches with noise, their schedules, their metric, and their draws.

Steps are measured as everywhere in training: `learning_rate` is that of gradient descent on the loss per example L, the negative log
joint over N. Of the target, (p(D | theta) p(theta))^(1/T), this is a step of

.. math:: h = \text{learning\_rate} \cdot T / N, \qquad h \nabla \log p(\theta)^{1/T} = -\text{learning\_rate}\, \nabla L,

so what is stable does not depend on N or T; the noise does, and follows from h alone.

It does depend on the noise :math:`\sigma` of a regression, whose loss is as steep as the squares of its residuals over
:math:`\sigma^2`. The default rate is that of descent on the squares themselves: with a rate that is not given, weights have the
metric :math:`G = \min(1, \sigma^2)`, where :math:`\sigma` is the least noise of an output, and learned quantities beside them have 1.
Where :math:`\sigma` is learned, this metric depends on it, but the metric of a coordinate never on that coordinate. So the term which a
metric that moves adds to the drift, :math:`\sum_j \partial G_{ij} / \partial \theta_j`, is zero, and the law of the draws is the
posterior still. A rate for the noise at the start would be far too large once it has fallen to a tenth, and the walk would run away.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from dubito.inference.chains import BUFFER, TRACE, batching_pays, check_precision, move_into_support, own_buffers, samples, starts
from dubito.inference.method import Info, Start, Traits
from dubito.model import Model, Target
from dubito.model.likelihoods import likelihood_params as learned
from dubito.network.examples import Batch
from dubito.posteriors import Posterior
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, one_of, positive, require
from dubito.tensors.randomness import PIECE, Normals, draw_normals
from dubito.tensors.tree import Buffers, Params

PLAIN: dict[str, Any] = {"weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
BURN_IN = 50  # epochs of a burn-in, at least
BURN_IN_STEPS, THIN_STEPS = 3000, 200  # of a burn-in and between draws, at least
MEMORY = 0.99  # of RMSprop: how much of the mean square a step keeps


@dataclass
class LangevinState:
    """Leaves are [chains, ...]; parameters that are not Bayesian are among the buffers, and are the same for all chains."""

    params: Params
    buffers: Buffers
    velocity: Params  # of samplers that have one
    squares: Params  # running mean of squared gradients of the loss per example, where there is a preconditioner
    root: Params  # of the metric: 1 / (sqrt(squares) + 1 / N), or the square of a learned noise
    adapted: int  # steps in which the metric was learned
    step: int
    period: int  # steps in a pass over the data
    together: bool  # all chains in one batched pass
    first: Buffers  # as they were at the start, to tell those that move
    moving: list[str] | None  # names of the buffers that do, known at the first draw
    scores: Tensor  # log likelihoods of this pass over the data, summed over its examples, [chains]
    trace: dict[str, Tensor]  # noted at the last draw, [chains] each
    seen: int = 0  # examples in this pass over the data
    whole: int = 0  # and in the one before


class Move(NamedTuple):
    """What a step works on: lists of tensors in the same order."""

    weights: list[Tensor]
    slopes: list[Tensor]  # gradient of the log target times `factor`, in the coordinates in which the metric is the identity
    velocity: list[Tensor]  # in these coordinates too; empty where the sampler has none
    root: list[Tensor]  # of the metric; empty where it is the identity
    generator: torch.Generator | None  # of the noise; None in a step without

    def push(self, velocity: list[Tensor], by: list[Tensor], *, keep: float = 1.0, drift: float) -> None:
        """v <- keep v + by, and with that w <- w + drift root v."""
        kinds = {leaf.dtype for leaf in self.weights}
        if keep > 0 and not self.root and len(kinds) == 1:
            _push(self.weights, velocity, by, keep, drift)
            return
        if keep != 1:
            torch._foreach_mul_(velocity, keep)
        torch._foreach_add_(velocity, by)
        self.drift(velocity, drift)

    def shake(self, velocity: list[Tensor], scale: float, *, keep: float = 1.0, drift: float) -> None:
        """v <- keep v + scale xi, xi from N(0, I) or zero in a step without noise, and with that w <- w + drift root v."""
        if self.generator is None:
            if keep != 1:
                torch._foreach_mul_(velocity, keep)
            self.drift(velocity, drift)
        elif keep == 0 or self.root or not Normals.pay(velocity) or not all(v.is_contiguous() for v in velocity):
            self.push(velocity, draw_normals(velocity, self.generator, scale), keep=keep, drift=drift)
        else:  # in pieces, which are used before they leave the cache
            source = Normals(self.generator, scale)
            for weights, own in zip(self.weights, velocity, strict=True):
                for w, v in zip(weights.view(-1).split(PIECE), own.view(-1).split(PIECE), strict=True):
                    _push([w], [v], [source(len(v))], keep, drift)

    def drift(self, velocity: list[Tensor], factor: float) -> None:
        """w <- w + factor root v."""
        if self.root:
            torch._foreach_addcmul_(self.weights, velocity, self.root, value=factor)
        else:
            torch._foreach_add_(self.weights, velocity, alpha=factor)


def _push(weights: list[Tensor], velocity: list[Tensor], by: list[Tensor], keep: float, drift: float) -> None:
    """v <- keep v + by, w <- w + drift v. This is a step of SGD with momentum, for which torch has a single pass over memory; it leaves
    the velocity alone where there is no momentum."""
    torch._fused_sgd_(weights, by, velocity, momentum=keep, lr=-drift, **PLAIN)


@dataclass(frozen=True)
class Langevin(ABC):
    """A sampler that sees a mini-batch a step, and adds noise.

    The epochs are `burn_in`, and then `thin` for every draw, at the end of which it is made. Where neither is given they follow the
    data: 50 epochs and 1, or as many as make 3,000 steps and 200. Where one of them or `cycles` is given, the others are 50 and 1.

    With `cycles` there are so many of these runs, which share the draws, and in each the step falls from `learning_rate` to zero along
    a cosine. Without, it is constant, or falls after the burn-in with the number of steps t as (t / burn-in)^(-decay).
    """

    draws: int = field(default=30, kw_only=True)  # kept of every chain, over all cycles
    burn_in: int | None = field(
        default=None, kw_only=True
    )  # epochs before the first draw, in every cycle; None: 50, or 3,000 steps
    thin: int | None = field(default=None, kw_only=True)  # epochs from draw to draw; None: 1, or 200 steps
    chains: int = field(default=1, kw_only=True)  # run side by side, on the same batches
    learning_rate: float | None = field(default=None, kw_only=True)  # of the loss per example, at its highest; None: by the noise
    decay: float = field(default=0.0, kw_only=True)  # exponent by which the step falls after the burn-in, such as 1/3
    cycles: int = field(default=0, kw_only=True)  # cosine cycles of the step; 0: none
    exploration: float = field(default=0.5, kw_only=True)  # share of each cycle that comes first and has no noise
    preconditioner: Literal["none", "rmsprop"] = field(default="none", kw_only=True)  # a step size for every weight
    vectorize: bool | None = field(default=None, kw_only=True)  # run all chains in one batched pass, or never; None decides

    rates: ClassVar[dict[str, float]]  # default of the learning rate, for each preconditioner

    def __post_init__(self):
        if self.cycles or (self.burn_in is None) != (self.thin is None):
            object.__setattr__(self, "burn_in", self.burn)
            object.__setattr__(self, "thin", self.interval)
        at_least(1, chains=self.chains, draws=self.draws, thin=self.thin)
        at_least(0, burn_in=self.burn_in, cycles=self.cycles, decay=self.decay)
        one_of(("none", "rmsprop"), preconditioner=self.preconditioner)
        positive(learning_rate=self.learning_rate)
        between(0, 1, exploration=self.exploration, include="low")
        require(
            self.draws % max(1, self.cycles) == 0,
            f"every cycle gives as many draws: draws={self.draws} must be a multiple of cycles={self.cycles}",
        )
        require(
            not self.cycles or self.exploration * self.epochs <= self.burn * self.cycles + 1e-9,
            f"draws are made after the exploration: {self.exploration:g} of {self.epochs // max(1, self.cycles)} epochs is more than "
            f"burn_in={self.burn}; give a longer burn_in, fewer draws or a smaller exploration",
        )
        require(
            not self.decay or (self.burn and not self.cycles),
            "the step decays from the end of the burn-in on, and not in cycles: give burn_in > 0 and cycles=0",
        )
        require(
            self.preconditioner == "none" or self.burn > 0,
            "a preconditioner is learned during the burn-in: give burn_in > 0",
        )

    @property
    def data(self) -> Literal["batches", "full"]:
        """A mini-batch a step."""
        return "batches"

    @property
    def traits(self) -> Traits:
        """Chains that start at many places, without an accept step; without cycles they can be made longer."""
        grows = None if self.cycles else "draws"  # cycles are laid out over all draws
        return Traits(
            many_starts=True, draws_weights=True, adjusted=False, learning_rate=self.rate, length_field=grows, alone=None
        )

    @property
    def rate(self) -> float:
        """The learning rate, or its default: of a loss with a noise of 1, or with RMSprop in units of the weights, as Adam's is."""
        return self.rates[self.preconditioner] if self.learning_rate is None else self.learning_rate

    @property
    def burn(self) -> int:
        """`burn_in`, or what it is where nothing is known of the data."""
        return BURN_IN if self.burn_in is None else self.burn_in

    @property
    def interval(self) -> int:
        """`thin`, or what it is where nothing is known of the data."""
        return 1 if self.thin is None else self.thin

    @property
    def epochs(self) -> int:
        """Passes over the data in all cycles."""
        return max(1, self.cycles) * self.burn + self.draws * self.interval

    def with_budget(self, n_batches: int) -> Self:
        """The method with lengths that follow the data, where they are not given."""
        if self.burn_in is not None:
            return self
        burn_in, thin = (math.ceil(steps / max(1, n_batches)) for steps in (BURN_IN_STEPS, THIN_STEPS))
        return replace(self, burn_in=max(BURN_IN, burn_in), thin=thin)

    @abstractmethod
    def factor(self, h: float) -> float:
        """What the gradient of the log target is to be multiplied by, for a step h."""

    @abstractmethod
    def move(self, move: Move, h: float) -> None:
        """One step of h, in place."""

    def begin(self, params: Params) -> Params:
        """Velocities at the start, if the sampler has any."""
        return {}

    def steps(self, n_batches: int) -> int:
        """`epochs` passes over the data."""
        return self.with_budget(n_batches).epochs * n_batches

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> LangevinState:
        """Chains at their starts, with velocities and a metric where the sampler has them."""
        require(target.members is None, f"{type(self).__name__} runs chains of its own side by side: leave out `vectorize`")
        check_precision(start.params)
        params, (shared, moving) = starts(target, start, self.chains, generator), _apart(target.model, start.buffers)
        if not start.given:
            params = move_into_support(target.model.prior, params, generator)
        own = {name: leaf for name, leaf in own_buffers(start, self.chains).items() if name in moving}
        buffers = {**shared, **tree.repeat(moving, self.chains), **own}
        preconditioned, noise = self.preconditioner != "none", self._noise(target.model, params)
        nothing = torch.zeros(self.chains, dtype=torch.float64, device=target.model.device)
        return LangevinState(
            params,
            buffers,
            self.begin(params),
            tree.apply(torch.zeros_like, params) if preconditioned else {},
            tree.apply(torch.ones_like, params) if preconditioned or isinstance(noise, Tensor) else {},
            adapted=0,
            step=0,
            period=max(1, steps // self.epochs),
            together=self._together(target, params, buffers, batch),
            first=tree.clone(moving),
            moving=None,
            scores=nothing,
            trace={name: nothing.clone() for name in ("log_likelihood", "log_prior", "step_size")},
        )

    def step(
        self, target: Target, state: LangevinState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[LangevinState, Info]:
        """A step of every chain on the same batches."""
        h = self._step_length(target, state)
        noise = None if self.explores(state.step, state.period) else generator
        adapts = self.preconditioner != "none" and self._place(state.step, state.period) < self.burn * state.period
        state.adapted += adapts
        data = list(data)
        size = target.examples(data)
        if state.step % state.period == 0:
            state.scores.zero_()
            state.seen, state.whole = 0, state.seen
        parts = self._parts(self._shared(target, state, size), state)
        scores = [self._step_part(seen, part, data, noise, h, adapts=adapts, n_data=target.n_data) for seen, part in parts]
        score = scores[0].reshape(-1) if len(scores) == 1 else torch.stack(scores)  # [chains]
        state.scores += score * size
        state.seen, state.step = state.seen + size, state.step + 1
        if self._due(state):
            self._note(target, state, h)
        return state, {"log_likelihood": score}

    def _step_length(self, target: Target, state: LangevinState) -> float:
        """h of this step; where the default rate follows a learned noise, the metric is set to it."""
        h = self.learning_rate_at(state.step, state.period) * target.temperature / target.n_data
        noise = self._noise(target.model, state.params)
        if not isinstance(noise, Tensor):
            return h * noise**2
        for name, leaf in state.root.items():
            if ":" not in name:
                leaf.copy_(noise.view(-1, *[1] * (leaf.ndim - 1)).expand_as(leaf))
        return h

    def _step_part(
        self,
        target: Target,
        part: LangevinState,
        data: list[Batch],
        noise: torch.Generator | None,
        h: float,
        *,
        adapts: bool,
        n_data: int,
    ) -> Tensor:
        """A step of one chain or of all, in place; the mean log likelihood of the examples."""
        evaluation = target.gradient(part.params, data, part.buffers, train=True, factor=self.factor(h))
        if adapts:
            self._adapt(n_data, part, evaluation.gradient, target.temperature / n_data / self.factor(h))
        trees = (part.params, evaluation.gradient, part.velocity, part.root)
        weights, slopes, velocity, root = (list(leaves.values()) for leaves in trees)
        if root:
            torch._foreach_mul_(slopes, root)
        self.move(Move(weights, slopes, velocity, root, noise), h)
        for name, leaf in evaluation.buffers.items():
            if leaf.data_ptr() != part.buffers[name].data_ptr():  # mostly they were changed in place
                part.buffers[name].copy_(leaf)
        return evaluation.log_likelihood

    def draw(self, state: LangevinState) -> Params | None:
        """The weights of all chains, and what is noted of them, at the end of every `thin` epochs after the burn-in."""
        if not self._due(state):
            return None
        noted = {TRACE + name: value for name, value in state.trace.items()}
        return {**state.params, **noted, **{BUFFER + name: state.buffers[name] for name in state.moving or ()}}

    def posterior(self, target: Target, state: LangevinState, draws: store.Draws) -> Posterior:
        """The draws; of a run that was stopped before the first, the weights as they stand, and it says so."""
        sampler = {"method": type(self).__name__, "adjusted": False, "learning_rate": self.rate, "burnt_in": len(draws) > 0}
        if not len(draws):
            draws = store.Draws()
            moving = {BUFFER + name: state.buffers[name] for name in state.first}
            draws.append({**state.params, **moving})
        shared = {name: leaf[0] if name in state.first else leaf for name, leaf in state.buffers.items()}
        return samples(target, draws, shared, sampler)

    # ---- schedules: the step counts from 0, and `period` is that of an epoch

    def learning_rate_at(self, step: int, period: int) -> float:
        """Of Zhang et al. (2020), eq. 1, with cycles."""
        if self.cycles:
            return self.rate / 2 * (math.cos(math.pi * self._place(step, period) / self._length(period)) + 1)
        return self.rate * max(1.0, (step + 1) / (self.burn * period)) ** -self.decay if self.decay else self.rate

    def explores(self, step: int, period: int) -> bool:
        """Whether a step goes without noise."""
        return self.cycles > 0 and self._place(step, period) < self.exploration * self._length(period)

    def _noise(self, model: Model, params: Params) -> Tensor | float:
        """In what the default rate is measured: 1, or the least noise of a regression if it is smaller, [chains] if it is learned."""
        if self.learning_rate is not None or self.preconditioner != "none":
            return 1.0
        noise = model.likelihood.least_noise(learned(params))
        return noise.detach().clamp(max=1.0) if isinstance(noise, Tensor) else min(1.0, noise)

    def _length(self, period: int) -> int:
        """Steps of a cycle, or of all."""
        return self.epochs // max(1, self.cycles) * period

    def _place(self, step: int, period: int) -> int:
        """In the cycle."""
        return step % self._length(period)

    def _due(self, state: LangevinState) -> bool:
        """Whether the step just made ends in a draw."""
        if state.step == 0:
            return False
        since = self._place(state.step - 1, state.period) + 1 - self.burn * state.period
        return since > 0 and since % (self.interval * state.period) == 0

    @staticmethod
    def _shared(target: Target, state: LangevinState, size: int) -> Target:
        """The target for a step on `size` examples: each stands for as many others as in all other steps of the pass.

        Taken on its own, a batch that is left over at the end of a pass would be scaled to all data like the others: a single example
        counts N times then, and its noise is what the draws would show.
        """
        if not state.whole or state.whole == size * state.period:  # in the first pass the number of examples is not known yet
            return target
        return replace(target, n_data=max(1, round(target.n_data * size * state.period / state.whole)))

    # ---- chains

    def _together(self, target: Target, params: Params, buffers: Buffers, batch: Batch) -> bool:
        """Whether to run all chains in one batched pass: where launching many small operations costs more than doing them, and
        the network can run so: not if it asks for values, or writes into tensors of its own."""
        if self.vectorize is False or self.chains == 1 or not (self.vectorize or batching_pays(target.model)):
            return False
        try:
            replace(target, members=self.chains).gradient(params, [batch], tree.clone(buffers), train=True)
        except RuntimeError as error:
            if self.vectorize:
                raise RuntimeError(f"this network cannot run its chains in one pass; use vectorize=False ({error})") from error
            return False
        return True

    def _parts(self, target: Target, state: LangevinState) -> Iterator[tuple[Target, LangevinState]]:
        """The state as it is stepped, with the target for it: all chains at once, or views of one after another."""
        if state.together:
            yield replace(target, members=self.chains), state
            return
        for i in range(self.chains):
            yield (
                target,
                replace(
                    state,
                    params=tree.select(state.params, i),
                    buffers={name: leaf[i] if name in state.first else leaf for name, leaf in state.buffers.items()},
                    velocity=tree.select(state.velocity, i),
                    squares=tree.select(state.squares, i),
                    root=tree.select(state.root, i),
                ),
            )

    def _adapt(self, n_data: int, part: LangevinState, gradient: Params, unit: float) -> None:
        """Follow the mean square of the gradient of the loss per example, which is `unit` times `gradient`.

        To its root 1 / N is added, the pull of a standard normal prior: the data may say nothing of a weight for a while.
        """
        squares, root, slopes = (list(leaves.values()) for leaves in (part.squares, part.root, gradient))
        torch._foreach_mul_(squares, MEMORY)
        torch._foreach_addcmul_(squares, slopes, slopes, value=(1 - MEMORY) * unit**2)
        torch._foreach_copy_(root, squares)
        torch._foreach_div_(root, 1 - MEMORY**part.adapted)  # they began at zero
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, 1 / n_data)
        torch._foreach_sqrt_(root)
        torch._foreach_reciprocal_(root)

    def _note(self, target: Target, state: LangevinState, h: float) -> None:
        """What is noted of a draw. Its log likelihood is the sum over the batches of the last epoch, in which the weights changed."""
        if state.moving is None:
            same = {
                name: torch.equal(state.buffers[name], tree.repeat({"": leaf}, self.chains)[""])
                for name, leaf in state.first.items()
            }
            state.moving = [name for name in same if not same[name]]
        priors = [target.log_prior(tree.select(state.params, i)) for i in range(self.chains)]
        state.trace["log_likelihood"].copy_(state.scores * (target.n_data / state.seen))
        state.trace["log_prior"].copy_(torch.stack(priors))
        state.trace["step_size"].fill_(h)


def _apart(model: Model, buffers: Buffers) -> tuple[Buffers, Buffers]:
    """Buffers that all chains share (parameters that are not Bayesian), and those that each has for itself."""
    fixed = {name for name, _ in model.network.named_parameters()}
    return {n: b for n, b in buffers.items() if n in fixed}, {n: b for n, b in buffers.items() if n not in fixed}
