"""The Laplace approximation: a Gaussian around trained weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from dubito.curvature import Setup, Spec
from dubito.curvature.accumulate import Accumulated
from dubito.curvature.cotangents import check_draws
from dubito.curvature.evidence import Approximation, shared_precisions
from dubito.curvature.passes import EKFAC, Hessian, Passes, SinglePass, Subnetwork, TopEigen
from dubito.curvature.setup import last_layer
from dubito.inference.method import Info, Start, Traits
from dubito.model import Target
from dubito.model.priors import Centered, Prior
from dubito.network.examples import Batch
from dubito.posteriors import Gaussian, Posterior
from dubito.tensors import store
from dubito.tensors.checks import at_least, one_of, require
from dubito.tensors.covariances import Covariance
from dubito.tensors.tree import Buffers, Params


@dataclass
class LaplaceState:
    params: Params
    buffers: Buffers
    names: list[str]  # the weights the covariance is over
    curvature: Accumulated
    guessed: bool  # the noise is learned, and nobody has said what it is: that of the residuals is taken
    step: int
    steps: int


@dataclass(frozen=True)
class Laplace:
    r"""A Gaussian around trained weights, with the curvature of the log joint there as its precision.

    .. math:: \theta \sim N\big(\theta^*, (H + P_0)^{-1}\big), \qquad H = \sum_n J_n^T \Lambda_n J_n \ \text{(GGN)}

    The network should be trained: `fit(model, Laplace(), data)` on a trained network, or `start=` a MAP posterior. One pass over the
    data collects the curvature; then the prior precision of each layer, if the prior is `Normal()`, is set to maximize the evidence.
    So is a learned noise with `optimize_noise`, which a dense or Kronecker structure can judge; a diagonal one overrates it grossly.
    Predictions are linearized.

    The GGN follows every output of an example back, up to 256 (classes times pixels or tokens). Of more, a label is drawn from the
    model for each position, and their one gradient is followed, which is the GGN on average; `draws` says how many times, 0 for every
    output whatever it takes. The last layer alone is exact in any case, and so is the low-rank structure in its main directions.

    `subset` chooses the weights: "all" the Bayesian ones, "last_layer", or a pattern of names; what is left out stays a point. With
    `subnetwork=k` the k weights of largest marginal variance (or magnitude) get a dense covariance.

    >>> import dubito
    >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=0.1))
    >>> trained = dubito.fit(model, dubito.MAP(epochs=200, learning_rate=0.05), (x, 2 * x))
    >>> posterior = dubito.fit(model, Laplace(), (x, 2 * x), start=trained)
    >>> posterior.predict(torch.tensor([[0.0], [3.0]])).uncertainty.epistemic.sqrt().round(decimals=2)
    tensor([[0.0100],
            [0.0700]])
    """

    structure: Literal["kronecker", "diagonal", "lowrank", "dense"] = "kronecker"  # of the covariance
    curvature: Literal["ggn", "fisher", "empirical", "hessian"] = "ggn"  # exact, Monte Carlo over labels, at the labels, full
    optimize_evidence: bool = True  # set prior precisions that are not given to maximize the evidence
    subset: str = field(default="all", kw_only=True)  # all, last_layer, or a pattern of parameter names
    prior_groups: Literal["layer", "one", "parameter"] = field(default="layer", kw_only=True)  # what shares a learned precision
    optimize_noise: bool = field(default=False, kw_only=True)  # the learned noise, too, rather than as it was trained
    # labels drawn for each example in the place of all its outputs; 0: none; None: none, or one of more than 256 outputs
    draws: int | None = field(default=None, kw_only=True)
    shared: Literal["expand", "reduce"] = field(default="expand", kw_only=True)  # Kronecker, for weights shared over positions
    corrected: bool = field(default=False, kw_only=True)  # Kronecker with corrected eigenvalues (EKFAC), in a second pass
    rank: int = field(default=20, kw_only=True)  # directions of a low-rank structure
    subnetwork: int | None = field(default=None, kw_only=True)  # so many weights, of all layers, get a dense covariance
    subnetwork_by: Literal["variance", "magnitude"] = field(default="variance", kw_only=True)  # how they are picked
    damping: float = field(default=0.0, kw_only=True)  # a precision on top of the prior's, which is then not optimized
    clip: bool = field(default=False, kw_only=True)  # set negative eigenvalues of a Hessian to zero
    check: bool = field(default=True, kw_only=True)  # warn where the network is not at an optimum

    traits: ClassVar[Traits] = Traits(post_hoc=True, takes_example_weights=False, exact_settings=(("damping", 0.0),), alone=None)

    def __post_init__(self):
        one_of(("kronecker", "diagonal", "lowrank", "dense"), structure=self.structure)
        one_of(("ggn", "fisher", "empirical", "hessian"), curvature=self.curvature)
        one_of(("layer", "one", "parameter"), prior_groups=self.prior_groups)
        one_of(("expand", "reduce"), shared=self.shared)
        one_of(("variance", "magnitude"), subnetwork_by=self.subnetwork_by)
        hessian, lowrank = self.curvature == "hessian", self.structure == "lowrank"
        require(
            not (hessian and self.structure == "kronecker"),
            "a Hessian has no Kronecker form: use structure='dense' or 'lowrank', or curvature='ggn'",
        )
        require(
            not lowrank or self.curvature in ("ggn", "hessian"),
            "a low-rank structure is of the exact curvature: use curvature='ggn' or 'hessian'",
        )
        require(
            not self.corrected or (self.structure == "kronecker" and self.shared == "expand"),
            "corrected=True corrects the eigenvalues of structure='kronecker' in its expand form",
        )
        require(
            not self.corrected or self.prior_groups != "parameter",
            "corrected=True needs one precision for a layer's weight and bias: use prior_groups='layer' or 'one'",
        )
        require(
            self.subnetwork is None or (self.structure == "dense" and self.subnetwork >= 1 and not hessian),
            "a subnetwork of k >= 1 weights has structure='dense' and is not for curvature='hessian'",
        )
        at_least(0, damping=self.damping)
        at_least(1, rank=self.rank)
        check_draws(self.curvature, self.draws)

    @property
    def data(self) -> Literal["batches", "full"]:
        """Batches, one after another."""
        return "batches"

    @property
    def passes(self) -> Passes:
        """How the curvature is estimated: what each pass over the data adds up."""
        if self.subnetwork is not None:
            return Subnetwork(self.subnetwork, self.subnetwork_by)
        if self.structure == "lowrank":
            return TopEigen(self.rank, self.clip)
        if self.curvature == "hessian":
            return Hessian(self.clip)
        return EKFAC() if self.corrected else SinglePass()

    def steps(self, n_batches: int) -> int:
        """One step for each batch of each pass."""
        return self.passes.count * n_batches

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> LaplaceState:
        """Check the prior and the weights, and begin with empty sums."""
        if _around(target).normal is None and _around(target).joint is None:
            raise ValueError(
                "Laplace adds the prior's precision to the curvature, so the prior is a Normal, alone or in a Centered, or an earlier "
                f"posterior; got a {type(_around(target)).__name__} (Normal(scale={{pattern: number}}) gives parameters their "
                "own scales)"
            )
        names = self.names(target, start, batch)
        if (earlier := target.model.prior.joint) is not None:
            if set(names) != set(earlier.covariance.shapes):
                raise ValueError(
                    "the prior is an earlier posterior over other weights: use the same `only` and `subset` as there"
                )
            if self.corrected:
                raise ValueError(
                    "an earlier posterior cannot be continued with corrected=True, whose eigenbasis is of its own data"
                )
        if target.precision is not None:
            raise ValueError("curvature is not gathered in mixed precision: leave out precision=, or give a network in bfloat16")
        guessed = self._guesses_noise(target, start)
        setup, x = self.setup(target, start.params, start.buffers, names), target.model.split(batch)[0]
        what = f"structure={self.structure!r}"
        sums = Accumulated.zeros(self.passes, setup, x, generator, gradient=self.check, what=what)
        return LaplaceState(start.params, start.buffers, list(names), sums, guessed, 0, steps)

    def step(
        self, target: Target, state: LaplaceState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[LaplaceState, Info]:
        """Add batches to the sums of the current pass."""
        setup = self.setup(target, state.params, state.buffers, tuple(state.names))
        passes, total = self.passes, state.curvature
        period = max(1, state.steps // passes.count)
        which = min(passes.count - 1, state.step // period)
        if which == 1 and state.step == period:
            total.sum_(passes, target.processes)
            passes.between(setup, total.sums, total.estimate(target, state.params, self._prior(target, state)))
        # a gradient costs as much as a cotangent: of many batches, some are enough to tell
        gradient = self.check and which == 0 and (state.step % 8 == 0 or state.steps <= 16)
        score = total.add(target, passes, setup, data, which, generator, gradient=gradient)
        state.step += 1
        return state, {"log_likelihood": score}

    def sum_parts(self, target: Target, state: LaplaceState) -> LaplaceState:
        """The sums of all processes."""
        state.curvature.sum_(self.passes, target.processes)
        return state

    def draw(self, state: LaplaceState) -> Params | None:
        """No draws: the posterior is made at the end."""
        return None

    def posterior(self, target: Target, state: LaplaceState, draws: store.Draws) -> Posterior:
        """The Gaussian of the sums: the noise is that of the residuals where nobody has given one, and the prior's precisions and the
        noise, if they are learned, maximize the evidence."""
        found = self._approximation(target, state)
        evidence, first, stretch = found.evidence, found.scale, 1.0
        if state.guessed:
            noise = (evidence.errors / evidence.counts).sqrt()
            if not bool((noise > 0).all()):
                raise ValueError(
                    "the network fits the targets without any residual, so there is no noise to learn: give Gaussian(scale=...)"
                )
            found = found.with_prior(noise=noise)
            stretch = float(noise[0] ** -2 / first[0])  # of the gradient, which was taken at the guess
        prior = self._learns_prior(target)
        if self.optimize_evidence and evidence.base is None and (prior or (evidence.noisy and self.optimize_noise)):
            found = found.maximized(by=self.prior_groups, prior=prior, noise=self.optimize_noise)
        if self.check and state.curvature.gradient_seen and (len(first) == 1 or not state.guessed):
            self._warn(target, state, found, stretch)
        return Gaussian(
            target.model, found.params, state.buffers, found.covariance,
            fitted=found.evidence, scale=found.scale, temperature=found.temperature,
        )  # fmt: skip

    def _approximation(self, target: Target, state: LaplaceState) -> Approximation:
        """The approximation at the prior and the noise of the start."""
        setup = self.setup(target, state.params, state.buffers, tuple(state.names))
        prior, total = self._prior(target, state), state.curvature
        estimate = total.estimate(target, state.params, prior)
        covariance: Covariance = self.passes.covariance(setup, total.sums, estimate)
        evidence = total.evidence(target, state.params, state.names, prior)
        if evidence.base is not None:
            covariance = covariance.plus(evidence.base)
        return Approximation(state.params, covariance, evidence, estimate.scale, target.temperature)

    def _learns_prior(self, target: Target) -> bool:
        """Whether the evidence sets the prior's precisions. Not beside `damping`, for which they would make up; nor beside a Hessian,
        which smaller precisions could make indefinite."""
        prior = _around(target).normal
        free = prior is not None and prior.learned
        return free and self.damping == 0 and (self.curvature != "hessian" or self.clip)

    def _guesses_noise(self, target: Target, start: Start) -> bool:
        """Whether a learned noise has no value yet, so that it is estimated from the residuals."""
        likelihood = target.model.likelihood.gaussian
        if not any("log_scale" in name for name in start.unset) or target.model.likelihood.discrete:
            return False  # logits of unit scale are what a network for classes is trained with
        known = likelihood is not None and (self.structure != "lowrank" or likelihood.outputs == 1)
        known = known and self.curvature in ("ggn", "fisher")
        if not known or target.model.prior.joint is not None:
            raise ValueError(
                "the noise is learned, and here it cannot be taken from the residuals: give start=, a MAP posterior or weights with "
                f"{list(start.unset)}, or a fixed scale"
            )
        return True

    def setup(self, target: Target, params: Params, buffers: Buffers, names: tuple[str, ...]) -> Setup:
        """Which curvature, at which weights."""
        structure = "dense" if self.structure == "lowrank" else self.structure
        return Setup(target.model, params, buffers, names, Spec(structure, self.curvature, self.draws, self.shared))

    def names(self, target: Target, start: Start, batch: Batch) -> tuple[str, ...]:
        """The weights that `subset` chooses."""
        names = tuple(name for name in start.params if ":" not in name)
        if self.subset == "all":
            return names
        if self.subset == "last_layer":
            return last_layer(target.model, start.params, target.model.split(batch)[0], start.buffers, names)
        network = target.model.network
        # a weight that is tied goes by the first of its names, and a pattern may mean any of them
        meant = {id(leaf) for name, leaf in network.named_parameters(remove_duplicate=False) if re.search(self.subset, name)}
        meant = {name for name, leaf in network.named_parameters() if id(leaf) in meant}
        chosen = tuple(name for name in names if name in meant)
        if not chosen:
            raise ValueError(f"subset={self.subset!r} matches no Bayesian parameter; there are {list(names)[:8]}")
        return chosen

    def _prior(self, target: Target, state: LaplaceState) -> Params:
        """The prior's precision, one number a leaf."""
        prior, like = _around(target).normal, next(iter(state.params.values()))
        kind = torch.promote_types(like.dtype, torch.float32)
        # that of an earlier posterior is added as a whole; until then any will do
        values = {name: 1.0 if prior is None else prior.scale_of(name) ** -2 for name in state.names}
        if self.optimize_evidence and self._learns_prior(target):
            values = shared_precisions(values, self.prior_groups)
        return {name: torch.tensor(value + self.damping, dtype=kind, device=like.device) for name, value in values.items()}

    def _warn(self, target: Target, state: LaplaceState, found: Approximation, stretch: float) -> None:
        """Warn of weights that are not at an optimum, in posterior standard deviations."""
        prior = {name: leaf - self.damping for name, leaf in found.evidence.prior.items()}
        rise, effective, noise = state.curvature.decrement(target, state.params, found.covariance, prior, stretch)
        if rise > effective + 2 * noise + 10:
            warnings.warn(
                f"the weights are not at an optimum: the log joint could rise by about {rise / 2:.3g}, and the mode is about "
                f"{(rise / effective) ** 0.5:.2g} posterior standard deviations away for each of {effective:.3g} effective parameters. "
                "Train on with the same prior, or take the uncertainty with a grain of salt (Laplace(check=False) says nothing)",
                stacklevel=2,
            )


def _around(target: Target) -> Prior:
    """The prior of the weights' differences from its mean: of a `Centered` one, the prior inside."""
    prior = target.model.prior
    return prior.prior if isinstance(prior, Centered) else prior
