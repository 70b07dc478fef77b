"""Training that learns its prior: the Laplace evidence sets the weight decay after every few epochs (Immer et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.curvature import Setup, Spec
from dubito.curvature.accumulate import Accumulated
from dubito.curvature.cotangents import check_draws
from dubito.curvature.evidence import maximize, shared_precisions
from dubito.curvature.passes import SinglePass
from dubito.inference.descent import Descent, DescentState
from dubito.inference.method import Info, Start, Traits
from dubito.model import Target
from dubito.model.likelihoods import NOISE
from dubito.model.priors import Prior
from dubito.network.examples import Batch
from dubito.posteriors import Gaussian, Point, Posterior
from dubito.tensors import store
from dubito.tensors.checks import at_least, between, one_of, require
from dubito.tensors.tree import Buffers, Params

EVERY = 5  # epochs between evidence steps
LEAP = math.log(10.0)  # the most that the logarithm of a precision changes at a time


@dataclass(frozen=True)
class Precisions(Prior):
    """`Normal` with a precision for each leaf, by its exact name: the search for patterns would be felt in every step."""

    values: Mapping[str, float]

    def log_prob(self, params: Params) -> Tensor:
        """The log density of independent normals."""
        parts = [
            0.5 * (leaf.numel() * math.log(self.values[name] / (2 * math.pi)) - self.values[name] * leaf.pow(2).sum())
            for name, leaf in params.items()
        ]
        return torch.stack(parts).sum()

    def gradient(self, params: Params) -> Params:
        """Minus precision times weight."""
        return {name: -self.values[name] * leaf.detach() for name, leaf in params.items()}

    def add_gradient(self, gradient: Params, params: Params, factor: float = 1.0) -> None:
        """Add `factor` times the gradient, in place."""
        groups: dict[float, list[str]] = {}  # one call, and so one kernel on a GPU, for all leaves that share a precision
        for name in params:
            groups.setdefault(self.values[name], []).append(name)
        for value, names in groups.items():
            leaves = [params[name].detach() for name in names]
            torch._foreach_add_([gradient[name] for name in names], leaves, alpha=-factor * value)

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """Independent normals."""
        return {n: torch.empty_like(p).normal_(0.0, self.values[n] ** -0.5, generator=generator) for n, p in like.items()}


@dataclass
class OnlineLaplaceState(DescentState):
    made: int  # steps of either kind; `step` and `steps` are those of training, which the schedule follows
    period: int  # steps in a pass over the data
    precision: Params  # of every leaf, [] in float64 and on the CPU, where reading them does not make a GPU wait
    noise_set: bool  # whether the noise is the evidence's by now, and descent keeps its hands off it
    log_evidence: float  # at the last evidence step
    curvature: Accumulated


@dataclass(frozen=True)
class OnlineLaplace(Descent[OnlineLaplaceState]):
    r"""MAP training in which the prior precision of every layer, and a learned noise, are set to maximize the Laplace evidence

    .. math:: \log p(D \mid \delta) \approx \log p(D \mid \theta) + \log p(\theta \mid \delta)
              - \tfrac12 \log\det \tfrac{1}{2\pi} \big(H + \mathrm{diag}(\delta)\big).

    This is weight decay for each layer without validation data. The posterior is the Laplace approximation at the end, under the prior
    that the weights were trained with. The model's prior is `Normal()`, or `Normal(scale=...)` where only the noise is to be learned.

    After a share `burn_in` of the `epochs`, and then every `every` epochs, comes one more pass over the data, which trains nothing and
    gathers the curvature. For this curvature the maximum of the evidence is found, and the logarithms of precisions and noise go a
    share `evidence_rate` of the way there, a factor of ten at most. A last such pass, after training, makes the posterior. The
    passes for curvature do not count as `epochs`, and the learning rate does not see them.

    >>> import dubito
    >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
    >>> y = 2 * x + 0.1 * torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian())
    >>> posterior = dubito.fit(model, OnlineLaplace(epochs=400, learning_rate=0.05), (x, y))
    >>> precision, noise = posterior.prior_precision["weight"], posterior.params["likelihood:log_scale"].exp()
    >>> bool(0.2 < precision < 0.3), bool(0.09 < noise < 0.11)                     # about 1 / 2^2, and the noise
    (True, True)
    """

    structure: Literal["kronecker", "diagonal", "dense"] = "kronecker"  # of the covariance
    curvature: Literal["ggn", "fisher", "empirical"] = "ggn"  # exact, Monte Carlo over labels, at the labels
    draws: int | None = field(default=None, kw_only=True)  # labels drawn for each example, as in `Laplace`
    shared: Literal["expand", "reduce"] = field(default="expand", kw_only=True)  # Kronecker, for weights shared over positions
    prior_groups: Literal["layer", "one", "parameter"] = field(default="layer", kw_only=True)  # what shares a learned precision
    optimize_noise: bool | None = field(default=None, kw_only=True)  # by the evidence, not descent; None: unless diagonal
    every: int | None = field(
        default=None, kw_only=True
    )  # epochs between evidence steps; None: 5, or a twentieth of all by default
    burn_in: float = field(default=0.1, kw_only=True)  # share of the epochs before the first
    evidence_rate: float = field(default=0.5, kw_only=True)  # share of the way, in logarithms, that an evidence step goes

    def __post_init__(self):
        super().__post_init__()
        one_of(("kronecker", "diagonal", "dense"), structure=self.structure)
        one_of(("ggn", "fisher", "empirical"), curvature=self.curvature)
        one_of(("expand", "reduce"), shared=self.shared)
        one_of(("layer", "one", "parameter"), prior_groups=self.prior_groups)
        at_least(1, every=self.every)
        check_draws(self.curvature, self.draws)
        between(0, 1, burn_in=self.burn_in, include="low")
        between(0, 1, evidence_rate=self.evidence_rate, include="high")
        require(
            self.passes_over_data > self.first,
            f"epochs={self.epochs} and burn_in={self.burn_in} leave no training after an evidence step: give more epochs (for a "
            "network that is trained already there is Laplace())",
        )

    # -- the order of the passes: training for `first` epochs, curvature, training for `every` epochs, curvature ... curvature

    @property
    def first(self) -> int:
        """Epochs before the first evidence step."""
        return max(1, math.ceil(self.burn_in * self.passes_over_data))

    @property
    def passes(self) -> int:
        """Passes over the data of both kinds."""
        return self.passes_over_data + len(range(self.first, self.passes_over_data, self.interval)) + 1

    @property
    def interval(self) -> int:
        """`every`, or what it is where nothing is known of the data."""
        return EVERY if self.every is None else self.every

    def with_budget(self, n_batches: int) -> OnlineLaplace:
        """As of descent; there are no more evidence steps for more epochs that follow the data."""
        if self.epochs is not None:
            return self
        method = super().with_budget(n_batches)
        return method if self.every is not None else replace(method, every=max(EVERY, method.passes_over_data // 20))

    def _trains(self, which: int) -> bool:
        since = which - self.first
        return since < 0 or (since % (self.interval + 1) != 0 and which < self.passes - 1)

    def steps(self, n_batches: int) -> int:
        """Passes for training and for curvature."""
        return self.with_budget(n_batches).passes * n_batches

    # -- the method

    @property
    def traits(self) -> Traits:
        """Those of descent, one member at a time: curvature is of one network."""
        return replace(super().traits, stacks=False)

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> OnlineLaplaceState:
        """As of descent, with the prior's precisions and empty sums of curvature."""
        prior, period = target.model.prior.normal, steps // self.passes
        if prior is None:
            kind = type(target.model.prior).__name__
            raise ValueError(f"OnlineLaplace learns the precisions of a Normal() prior; with a {kind} use MAP and then Laplace")
        if not prior.learned and not (NOISE in start.params and self._noise):
            raise ValueError(
                "there is nothing to learn from the evidence: the prior's scale is given, and no noise is to be learned. Use Normal() "
                "without a scale, or MAP and then Laplace"
            )
        trained = super().init(target, start, batch, generator, steps=self.passes_over_data * period)
        names = [name for name in start.params if ":" not in name]
        values = {name: prior.scale_of(name) ** -2 for name in names}
        values = shared_precisions(values, self.prior_groups) if prior.learned else values
        precision = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        setup, x = self.setup(target, start.params, start.buffers), target.model.split(batch)[0]
        what = f"structure={self.structure!r}"
        sums = Accumulated.zeros(SinglePass(), setup, x, generator, gradient=False, what=what)
        return OnlineLaplaceState(**vars(trained), made=0, period=period, precision=precision, noise_set=False,
                                  log_evidence=-math.inf, curvature=sums)  # fmt: skip

    def step(
        self, target: Target, state: OnlineLaplaceState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[OnlineLaplaceState, Info]:
        """A step of training or, in a pass for curvature, a batch of it; an evidence step at its end."""
        which, position = divmod(state.made, state.period)
        state.made += 1
        if self._trains(which):
            return self._train(target, state, data, generator)
        if position == 0:
            state.curvature.clear()
        setup = self.setup(target, state.params, state.buffers)
        info = {
            "log_likelihood": state.curvature.add(target, SinglePass(), setup, data, 0, generator, gradient=False),
        }
        if position == state.period - 1:
            self.sum_parts(target, state)
            self._learn(target, state, still=which == self.passes - 1)
            info["log_evidence"] = torch.tensor(state.log_evidence)
        return state, info

    def sum_parts(self, target: Target, state: OnlineLaplaceState) -> OnlineLaplaceState:
        """The sums of all processes."""
        state.curvature.sum_(SinglePass(), target.processes)
        return state

    def kind(self, state: OnlineLaplaceState) -> Hashable | None:
        """Steps under the same precisions are of one kind."""
        return tuple(float(leaf) for leaf in state.precision.values())

    def _train(
        self, target: Target, state: OnlineLaplaceState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[OnlineLaplaceState, Info]:
        values = {name: float(leaf) for name, leaf in state.precision.items()}
        noise = state.params[NOISE].clone() if state.noise_set else None
        trained = super().step(replace(target, model=replace(target.model, prior=Precisions(values))), state, data, generator)
        if noise is not None:  # a zero gradient would not do: the optimizer goes on for a while
            state.params[NOISE].copy_(noise)
        return trained

    @property
    def _noise(self) -> bool:
        """Whether the evidence sets a learned noise. The determinant of a diagonal is too large, and drives the noise far up."""
        return self.structure != "diagonal" if self.optimize_noise is None else self.optimize_noise

    def _learn(self, target: Target, state: OnlineLaplaceState, *, still: bool) -> None:
        """An evidence step. After training (`still`) it changes nothing: the posterior keeps the prior of the training."""
        gaussian = self._gaussian(target, state)
        assert gaussian.fitted is not None
        assert gaussian.scale is not None
        state.log_evidence = float(gaussian.log_evidence())
        noise, prior = self._noise and gaussian.fitted.noisy, target.model.prior.normal
        if still:
            return
        assert prior is not None
        best, scale, _ = maximize(
            gaussian.fitted, gaussian.covariance, gaussian.scale,
            by=self.prior_groups, prior=prior.learned, noise=noise, temperature=target.temperature,
        )  # fmt: skip
        for name, leaf in state.precision.items():
            leaf.mul_(self._towards(leaf, best[name].to(leaf)))
        if noise:
            state.params[NOISE].sub_(0.5 * self._towards(gaussian.scale, scale).log().to(state.params[NOISE]))
            state.noise_set = True

    def _towards(self, now: Tensor, best: Tensor) -> Tensor:
        """The factor by which an evidence step changes a precision."""
        return (self.evidence_rate * (best / now).log()).clamp(-LEAP, LEAP).exp()

    def posterior(self, target: Target, state: OnlineLaplaceState, draws: store.Draws) -> Posterior:
        """The Laplace approximation; a point where there is no curvature of these weights yet."""
        which, position = divmod(state.made, state.period)
        if position or which == 0 or self._trains(which - 1):  # there is no curvature of these weights
            return Point(target.model, state.params, state.buffers)
        return self._gaussian(target, state)

    def _gaussian(self, target: Target, state: OnlineLaplaceState) -> Gaussian:
        """The Laplace approximation from the curvature gathered last."""
        first, sums = next(iter(state.params.values())), state.curvature
        kind = torch.promote_types(first.dtype, torch.float32)
        prior = {name: leaf.to(first.device, kind) for name, leaf in state.precision.items()}
        estimate = sums.estimate(target, state.params, prior)
        covariance = SinglePass().covariance(self.setup(target, state.params, state.buffers), sums.sums, estimate)
        evidence = sums.evidence(target, state.params, list(state.precision), prior)
        return Gaussian(
            target.model, state.params, state.buffers, covariance,
            fitted=evidence, scale=estimate.scale, temperature=target.temperature,
        )  # fmt: skip

    def setup(self, target: Target, params: Params, buffers: Buffers) -> Setup:
        """Which curvature, at which weights."""
        names = tuple(name for name in params if ":" not in name)
        spec = Spec(self.structure, self.curvature, self.draws, self.shared)
        return Setup(target.model, params, buffers, names, spec)
