"""Improved variational online Newton (Shen et al. 2024): a mean-field Gaussian at about the cost of Adam."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.inference.chains import check_precision
from dubito.inference.descent import default_budget, share
from dubito.inference.method import Info, Start, Traits
from dubito.model import Target
from dubito.model.priors import Prior
from dubito.network.examples import Batch
from dubito.posteriors import Gaussian, Posterior
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, one_of, positive
from dubito.tensors.covariances import Diagonal
from dubito.tensors.randomness import PIECE, Normals, draw_normals
from dubito.tensors.tree import Buffers, Params

LIFETIMES = 10  # of what is remembered of the Hessian, in a run: at its end the first guess counts exp(-10)
QUICKEST = 0.1  # share of the Hessian that a step replaces at most, in a run of few steps


@dataclass
class IVONState:
    """Of a stacked target every leaf has the members first."""

    params: Params  # m, the means
    buffers: Buffers
    spread: Params  # 1 / (h + delta): the variances times N / T
    momentum: Params  # running mean of the gradient of the loss per example, from zero
    drawn: Params  # weights from q, for the next step
    step: int
    steps: int


@dataclass(frozen=True)
class IVON:
    r"""The mean-field Gaussian that maximizes the ELBO, found by natural gradients:

    .. math:: q(\theta) = N\big(m,\; \mathrm{diag}(1 / (\lambda (h + \delta)))\big), \qquad \lambda = N / T, \quad \delta = 1 / (N s^2)

    under a prior N(0, s^2), at temperature T. A step draws :math:`\theta` from q and takes the gradient g of the loss per example. Its
    product with the draw estimates the diagonal of the Hessian, its running mean :math:`\bar g` moves m:

    .. math:: \hat h = g\, (\theta - m)\, \lambda (h + \delta), \qquad
        h \leftarrow h + \rho\, (\hat h - h) + \tfrac12 \rho^2 (\hat h - h)^2 / (h + \delta), \qquad
        m \leftarrow m - \alpha\, (h_0 + \delta)\, (\bar g + \delta m) / (h + \delta),

    with :math:`\rho` = 1 - `hessian_momentum`. The last term for h keeps h + delta positive. While h is still h_0, `initial_hessian`, m
    moves as by SGD with `learning_rate`; from then on every weight has a step of its own size.

    Under a prior other than `Normal`, and for what the likelihood learns (a noise) or the prior (a scale), delta is zero, and gradient
    and Hessian of the log prior are estimated with those of the loss. The learned quantities are Gaussian as the weights are.

    Several `samples` a step come in pairs, m + e and m - e: what they have in common, the noise of the batch, cancels in the Hessian.
    On several processes all have the same draws, and the numbers are those of one; with `draws_per_rank` each has draws of its own
    for its part of a batch, so that a step averages over more of them.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, IVON(epochs=10), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 1])
    """

    epochs: int | None = field(default=None, kw_only=True)  # passes over the data; None: 100, or more for 3,000 steps
    learning_rate: float = field(default=0.1, kw_only=True)  # at its highest
    momentum: float = field(default=0.9, kw_only=True)  # share of the mean gradient that a step keeps
    hessian_momentum: float | None = field(default=None, kw_only=True)  # the same of the Hessian; None is 1 - 10 / steps
    initial_hessian: float = field(default=0.5, kw_only=True)  # of the loss per example: the larger, the surer at the start
    samples: int = field(default=1, kw_only=True)  # draws a step
    schedule: Literal["cosine", "constant"] = field(default="cosine", kw_only=True)  # of the learning rate, after the warmup
    warmup: float = field(default=0.0, kw_only=True)  # share of the steps in which the learning rate rises
    clip: float | None = field(default=1.0, kw_only=True)  # a gradient moves a weight by at most clip * learning_rate
    draws: int = field(default=30, kw_only=True)  # functions to average when predicting
    draws_per_rank: bool = field(default=False, kw_only=True, metadata={"before": False})  # on each process draws of its own
    check: bool = field(default=True, kw_only=True, repr=False)  # warn where the training ends on its way, see `rise`

    def __post_init__(self):
        at_least(0, epochs=self.epochs)
        at_least(1, samples=self.samples, draws=self.draws)
        positive(learning_rate=self.learning_rate, initial_hessian=self.initial_hessian, clip=self.clip)
        between(0, 1, momentum=self.momentum, hessian_momentum=self.hessian_momentum, warmup=self.warmup, include="low")
        one_of(("cosine", "constant"), schedule=self.schedule)

    @property
    def data(self) -> Literal["batches", "full"]:
        """A mini-batch a step."""
        return "batches"

    @property
    def traits(self) -> Traits:
        """Members train in one batched pass; a warmup, and a Hessian momentum that is not given, depend on the number of steps."""
        settings = {"warmup=0": self.warmup > 0, "hessian_momentum=0.999": self.hessian_momentum is None}
        length = tuple(value for value, used in settings.items() if used)
        return Traits(draws_weights=True, stacks=True, length_settings=length, alone=None)

    def steps(self, n_batches: int) -> int:
        """`epochs` passes over the data."""
        return (self.with_budget(n_batches).epochs or 0) * n_batches

    def with_budget(self, n_batches: int) -> IVON:
        """The method with epochs that follow the data, where they are not given."""
        return self if self.epochs is not None else replace(self, epochs=default_budget(n_batches)[0])

    def memory(self, weights: int) -> int:
        """Bytes for the variances, the momentum, a draw and the gradient."""
        return 4 * weights

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> IVONState:
        """q around the start, as wide as `initial_hessian` says, and a first draw of it."""
        check_precision(start.params)
        deltas = zip(start.params.items(), _deltas(target, start.params), strict=True)
        spread = {name: torch.full_like(leaf, 1 / (self.initial_hessian + delta)) for (name, leaf), delta in deltas}
        momentum, drawn = tree.apply(torch.zeros_like, start.params), tree.apply(torch.empty_like, start.params)
        state = IVONState(start.params, start.buffers, spread, momentum, drawn, 0, steps)
        self._draw(target, state, drawn, generator)
        return state

    @torch.no_grad()
    def step(self, target: Target, state: IVONState, data: Iterable[Batch], generator: torch.Generator) -> tuple[IVONState, Info]:
        """A step. The state changes after all gradients are computed, so that an error on the way leaves it as it was."""
        data, loss, factor = list(data), _loss(target), -target.temperature / target.n_data / self.samples
        fixed = {name for name, _ in target.model.network.named_parameters()}  # among the buffers, these do not move
        buffers = {name: leaf if name in fixed else leaf.clone() for name, leaf in state.buffers.items()}
        apart, scores, gradient = self.draws_per_rank and target.processes.size > 1, [], {}
        more: tuple[Params, ...] = ()
        own = target.processes.own_generator(generator) if apart else generator
        for i, drawn in enumerate(self._draws(target, state, own, fresh=apart)):
            slopes, buffers, score = loss.gradient(drawn, data, buffers, train=True, factor=factor, apart=apart)
            scores.append(score)
            if i or apart:
                product = tree.apply(lambda leaf, mean, slope: (leaf - mean).mul_(slope), drawn, state.params, slopes)
                more = _added(more, slopes, product)
            else:
                gradient = slopes
        if apart:  # the draw that all processes have is not used
            gradient = tree.apply(torch.zeros_like, state.params)
            target.processes.sum_gradient_((leaf for sums in more for leaf in sums.values()), *scores)
        self._update(target, state, gradient, more, generator)
        state.buffers = buffers
        return state, {"log_likelihood": scores[0] if self.samples == 1 else torch.stack(scores).mean(0)}

    def _draws(self, target: Target, state: IVONState, generator: torch.Generator, *, fresh: bool) -> Iterator[Params]:
        """The draws of a step, in pairs; the first was made at the end of the step before, unless a fresh one is wanted."""
        drawn = tree.apply(torch.empty_like, state.drawn) if fresh else state.drawn
        for i in range(self.samples):
            if i % 2:
                drawn = tree.apply(lambda mean, leaf: 2 * mean - leaf, state.params, drawn)
            elif i or fresh:
                self._draw(target, state, drawn, generator)
            yield drawn

    def _draw(self, target: Target, state: IVONState, places: Params, generator: torch.Generator) -> None:
        """Fill `places` with weights from q."""
        noise = _Noise(target, state.params, generator)
        for _, means, spreads, drawn in _groups(_deltas(target, state.params), state.params, state.spread, places):
            noise.add(drawn, means, spreads)

    def _update(
        self, target: Target, state: IVONState, gradient: Params, more: tuple[Params, ...], generator: torch.Generator
    ) -> None:
        """Move h and m, and draw for the next step, in place. `more` are sums over further draws: of g, and of g (theta - m)."""
        rate, rho, size = self.learning_rate * self._share(state), self._replaced(state), target.n_data / target.temperature
        state.step += 1
        begun = 1 - self.momentum**state.step  # the running mean of gradients began at zero
        noise, memory = _Noise(target, state.params, generator), (_Memory(), _Memory())
        trees = (state.params, state.spread, state.momentum, state.drawn, gradient, *more)
        for deltas, means, spreads, momenta, drawn, slopes, *sums in _groups(_deltas(target, state.params), *trees):
            steps = [rate * (self.initial_hessian + delta) for delta in deltas]
            rule = _Rule(
                fresh=1 - self.momentum,
                keep=math.sqrt(0.5) * (1 - rho),
                product=math.sqrt(0.5) * rho * size,
                prior=[math.sqrt(0.5) * rho * delta for delta in deltas],
                decay=[-step * delta for step, delta in zip(steps, deltas, strict=True)],
                step=[-step / begun for step in steps],
                most=None if self.clip is None else [self.clip * begun / (self.initial_hessian + delta) for delta in deltas],
            )
            scratch = [held(means) for held in memory]
            if len(means) == 1 and not sums:
                rule.one(means[0], spreads[0], momenta[0], drawn[0], slopes[0], scratch[0][0], scratch[1][0])
            else:
                rule.many(means, spreads, momenta, drawn, slopes, sums, *scratch)
            noise.add(drawn, means, spreads)

    def rise(self, target: Target, state: IVONState) -> float:
        """How many nats a Newton step would add to the evidence bound, less ten times the part that is noise of the gradient."""
        if not self.check or not state.step:
            return 0.0
        size, gain, noise = target.n_data / target.temperature, 0.0, 0.0
        batches = max(1.0, state.steps / max(1, self.epochs or 1))  # in a pass: the smaller a batch, the more noise there is
        for (name, mean), delta in zip(state.params.items(), _deltas(target, state.params), strict=True):
            slope = state.momentum[name] / (1 - self.momentum**state.step) + delta * mean
            gain += 0.5 * size * float((slope.double().square() * state.spread[name]).sum())
            noise += 0.5 * (1 - self.momentum) / (1 + self.momentum) * batches * mean.numel()
        return gain - 10 * noise

    def draw(self, state: IVONState) -> Params | None:
        """None: the posterior is a Gaussian."""
        return None

    def unstack(self, target: Target, state: IVONState) -> list[IVONState]:
        """The states of the members of a stacked target, which were trained in one batched pass."""
        assert target.members is not None
        fixed = {name for name, _ in target.model.network.named_parameters()}  # not stacked where they are not Bayesian
        return [
            replace(
                state,
                params=tree.clone(tree.select(state.params, i)),
                buffers={name: leaf if name in fixed else leaf[i].clone() for name, leaf in state.buffers.items()},
                spread=tree.clone(tree.select(state.spread, i)),
                momentum=tree.clone(tree.select(state.momentum, i)),
                drawn=tree.clone(tree.select(state.drawn, i)),
            )
            for i in range(target.members)
        ]

    def posterior(self, target: Target, state: IVONState, draws: store.Draws) -> Posterior:
        """The Gaussian q with independent weights."""
        curvature, prior, n = {}, {}, target.n_data
        for (name, spread), delta in zip(state.spread.items(), _deltas(target, state.params), strict=True):
            curvature[name] = spread.reciprocal().sub_(delta).mul_(n).unsqueeze(0)
            prior[name] = spread.new_tensor(n * delta)
        one = torch.ones(1).to(next(iter(prior.values())))
        covariance = Diagonal(curvature, prior, one, target.temperature)
        return Gaussian(
            target.model, state.params, state.buffers, covariance, how="sampled", draws=self.draws, temperature=target.temperature
        )

    def _share(self, state: IVONState) -> float:
        """The learning rate, as a share of its peak."""
        return share(state.step, state.steps, warmup=self.warmup, schedule=self.schedule)

    def _replaced(self, state: IVONState) -> float:
        """The share of the Hessian that a step replaces, rho."""
        if self.hessian_momentum is not None:
            return 1 - self.hessian_momentum
        return min(QUICKEST, LIFETIMES / max(1, state.steps))


class _Flat(Prior):
    """A flat prior: that of the model has a closed form under q, which is added where it belongs."""

    @property
    def stacks(self) -> bool:
        """Members may be stacked."""
        return True

    def log_prob(self, params: Params) -> Tensor:
        """Zero."""
        return torch.zeros(())

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """Not possible."""
        raise ValueError("a flat prior has no draws")

    def add_gradient(self, gradient: Params, params: Params, factor: float = 1.0) -> None:
        """Nothing to add."""


def _loss(target: Target) -> Target:
    """The target without its prior, where gradient and Hessian of the log prior are known under q."""
    if target.model.prior.normal is None:
        return target
    return replace(target, model=replace(target.model, prior=_Flat()))


def _deltas(target: Target, params: Params) -> list[float]:
    """The prior's part of the Hessian of the loss per example, one number a leaf; zero where it is estimated with the rest."""
    prior = target.model.prior.normal
    if prior is None:
        return [0.0] * len(params)
    return [0.0 if ":" in name else prior.scale_of(name) ** -2 / target.n_data for name in params]


def _added(sums: tuple[Params, ...], *terms: Params) -> tuple[Params, ...]:
    for total, term in zip(sums, terms, strict=False):
        torch._foreach_add_(list(term.values()), list(total.values()))
    return terms


class _Rule(NamedTuple):
    r"""How h and m move, by numbers for all leaves or one for each.

    With :math:`x = \rho (\hat h - h) / (h + \delta)`, h + delta is multiplied by 1 + x + x^2 / 2 = ((1 + x)^2 + 1) / 2, and
    :math:`\hat h / (h + \delta) = \lambda g (\theta - m)`.
    """

    fresh: float  # share of the new gradient in the running mean
    keep: float  # (1 + x) / sqrt(2) is this
    product: float  # plus so many times g (theta - m)
    prior: list[float]  # plus so many times 1 / (h + delta)
    decay: list[float]  # what the prior pulls
    step: list[float]  # times the running mean of gradients over h + delta
    most: list[float] | None  # of which no entry counts for more than this

    def one(
        self, mean: Tensor, spread: Tensor, momentum: Tensor, drawn: Tensor, slope: Tensor, away: Tensor, growth: Tensor
    ) -> None:
        """Of one leaf, or a piece of it, in as few passes as torch allows; the last two are scratch memory."""
        torch.sub(drawn, mean, out=away)
        torch.mul(spread, self.prior[0], out=growth)
        growth.addcmul_(away, slope, value=self.product).add_(self.keep)
        spread.div_(growth.mul_(growth).add_(0.5))
        momentum.lerp_(slope, self.fresh)
        mean.addcmul_(mean, spread, value=self.decay[0])
        if self.most is None:
            mean.addcmul_(momentum, spread, value=self.step[0])
        else:
            torch.mul(momentum, spread, out=away).clamp_(-self.most[0], self.most[0])
            mean.add_(away, alpha=self.step[0])

    def many(
        self,
        means: list[Tensor],
        spreads: list[Tensor],
        momenta: list[Tensor],
        drawn: list[Tensor],
        slopes: list[Tensor],
        sums: list[list[Tensor]],
        away: list[Tensor],
        growth: list[Tensor],
    ) -> None:
        """Of many leaves, each operation at once for all."""
        torch._foreach_copy_(away, drawn)
        torch._foreach_sub_(away, means)
        torch._foreach_copy_(growth, spreads)
        torch._foreach_mul_(growth, self.prior)
        torch._foreach_addcmul_(growth, away, slopes, value=self.product)
        torch._foreach_lerp_(momenta, slopes, self.fresh)
        if sums:
            torch._foreach_add_(growth, sums[1], alpha=self.product)
            torch._foreach_add_(momenta, sums[0], alpha=self.fresh)
        torch._foreach_add_(growth, self.keep)
        torch._foreach_mul_(growth, growth)
        torch._foreach_add_(growth, 0.5)
        torch._foreach_div_(spreads, growth)
        torch._foreach_addcmul_(means, means, spreads, self.decay)
        if self.most is None:
            torch._foreach_addcmul_(means, momenta, spreads, self.step)
            return
        torch._foreach_copy_(away, momenta)
        torch._foreach_mul_(away, spreads)
        torch._foreach_clamp_min_(away, [-most for most in self.most])
        torch._foreach_clamp_max_(away, self.most)
        torch._foreach_mul_(away, self.step)
        torch._foreach_add_(means, away)


class _Noise:
    """Turns means into draws, by adding the noise of q."""

    def __init__(self, target: Target, params: Params, generator: torch.Generator):
        self.generator, self.scale = generator, math.sqrt(target.temperature / target.n_data)
        self.normals = Normals(generator, self.scale) if Normals.pay(list(params.values())) else None

    def add(self, drawn: list[Tensor], means: list[Tensor], spreads: list[Tensor]) -> None:
        """drawn <- means + scale sqrt(spreads) xi."""
        if self.normals is None:
            noise = draw_normals(means, self.generator, self.scale)
        else:
            noise = _shares(self.normals(sum(map(Tensor.numel, means))), means)
        if len(means) == 1:
            torch.sqrt(spreads[0], out=drawn[0])
            torch.addcmul(means[0], drawn[0], noise[0], out=drawn[0])
            return
        torch._foreach_copy_(drawn, spreads)
        torch._foreach_sqrt_(drawn)
        torch._foreach_mul_(drawn, noise)
        torch._foreach_add_(drawn, means)


class _Memory:
    """Scratch memory that every call uses again, because allocating is slow on a CPU."""

    def __init__(self):
        self.held = torch.empty(0)

    def __call__(self, like: list[Tensor]) -> list[Tensor]:
        if len({leaf.dtype for leaf in like}) > 1:
            return [torch.empty_like(leaf) for leaf in like]
        n = sum(map(Tensor.numel, like))
        if len(self.held) < n or self.held.dtype != like[0].dtype:
            self.held = like[0].new_empty(n)
        return _shares(self.held[:n], like)


def _shares(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """A vector, cut into these shapes."""
    if len(like) == 1:
        return [flat.view(like[0].shape)]
    return [share.view_as(leaf) for share, leaf in zip(flat.split([leaf.numel() for leaf in like]), like, strict=True)]


def _groups(numbers: list[float], *trees: Params) -> Iterator[tuple[Any, ...]]:
    """A number for each leaf, and the leaves of all trees, as lists, a part at a time. On a CPU a part is what stays in the cache from
    one pass over it to the next. Elsewhere it is large; scratch memory for it is still small beside a large network."""
    columns = [list(leaves.values()) for leaves in trees]
    most = PIECE if columns[0][0].device.type == "cpu" else 256 * PIECE
    group, held = [], 0
    for number, *leaves in zip(numbers, *columns, strict=True):
        whole = leaves[0].numel() <= most or not all(leaf.is_contiguous() for leaf in leaves)
        for row in [leaves] if whole else zip(*(leaf.view(-1).split(most) for leaf in leaves), strict=True):
            if group and held + row[0].numel() > most:
                yield tuple(map(list, zip(*group, strict=True)))
                group, held = [], 0
            group.append((number, *row))
            held += row[0].numel()
    yield tuple(map(list, zip(*group, strict=True)))
