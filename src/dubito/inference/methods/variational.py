"""Variational inference: Bayes by Backprop (Blundell et al. 2015) and richer families."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.inference.chains import check_precision
from dubito.inference.descent import Descent, DescentState, advance, clip
from dubito.inference.method import Start, Traits
from dubito.model import Target
from dubito.model.likelihoods import likelihood_params
from dubito.model.priors import Normal
from dubito.network.examples import Batch
from dubito.posteriors import Drawn, Gaussian, Posterior
from dubito.posteriors.families import FAMILIES, Family, LowRank, MeanField
from dubito.posteriors.families.family import pick
from dubito.posteriors.families.gaussian import pieces
from dubito.posteriors.families.reparametrized import Estimator, Reparametrized, drawable_layers
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, one_of, positive, require
from dubito.tensors.tree import Params

LEVELS = 100  # of the divergence's weight as it rises: steps that share one can be recorded together
REPORTED = 10  # steps from one report of the divergence to the next: where the gradient has a formula its value costs extra


@dataclass
class VariationalState(DescentState):
    """`params` are the leaves of the family, "kind/weight", and what is learned as a point."""

    period: int  # steps in a pass over the data
    layers: dict[str, str | None]  # whose outputs are drawn in the place of their weights: weight to bias
    joint: bool  # whether the prior is scored at the draws that the likelihood is


@dataclass(frozen=True)
class Variational(Descent[VariationalState]):
    r"""The member q of a family of distributions that is closest to the posterior, by gradient ascent on the evidence bound,

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p) \le \log p(D).

    The likelihood of a batch of B is scaled by N / B and the divergence counts once for all data, so that the optimum depends neither
    on the batch size nor on how the weights are cut into layers. The divergence is exact where prior and family have a closed form,
    and estimated from the same draws where not.

    `family` is a name or an object of `dubito.families`: "mean_field", "low_rank", "layerwise", "full", "matrix_normal", "flow" ...
    `estimator` says how the expectation is estimated: by draws of the "weights", for any network; by "local" reparametrization or
    "flipout" at linear layers and convolutions, with weights drawn elsewhere. "auto" takes for each layer what has the least variance
    and is still exact: local reparametrization for linear layers on [B, D], flipout for other linear layers and convolutions.

    `kl_weight` multiplies the divergence: another thing than the temperature of `fit`, which divides the log joint and not the
    entropy of q. `kl_batches="blundell"` lets the divergence count most in the first batches of an epoch, 2^(M - i) / (2^M - 1).
    On several processes all have the same draws, and the numbers are those of one; with `draws_per_rank` each has draws of its own
    for its part of a batch, so that a step averages over more of them.

    `path_only` leaves out the part of the gradient that is zero on average ("sticking the landing", Roeder et al. 2017): q and the
    prior are scored at the draws of weights that the likelihood sees, and where q is the posterior the gradient of every draw is 0.

    What the likelihood learns (a noise) and hyperparameters of the prior are points that maximize the ELBO: empirical Bayes. With
    `learn_prior`, so are the scales of a `Normal()` that was given none, one for each tensor of weights: from a trained network, since
    in a new one scales and weights may fall to zero together.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0), dubito.priors.Normal(scale=1.0))
    >>> posterior = dubito.fit(model, Variational(epochs=10), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 1])
    """

    family: str | Family = "mean_field"  # its name, or an object of dubito.families
    estimator: Estimator = field(default="auto", kw_only=True)  # how the expected log likelihood is estimated
    samples: int = field(default=1, kw_only=True)  # draws a step
    init_scale: float = field(default=0.01, kw_only=True)  # standard deviations at the start
    moped: float | None = field(default=None, kw_only=True)  # or, so many times the size of each weight at the start
    kl_weight: float = field(default=1.0, kw_only=True)  # of the divergence
    kl_warmup: float = field(default=0.0, kw_only=True)  # share of the steps in which that weight rises from zero
    kl_batches: Literal["uniform", "blundell"] = field(default="uniform", kw_only=True)  # how batches share the divergence
    path_only: bool = field(default=False, kw_only=True)  # leave out the score of q, which is zero on average
    learn_prior: bool = field(default=False, kw_only=True)  # scales of a Normal() without any, by the ELBO
    draws: int = field(default=30, kw_only=True)  # functions to average when predicting
    draws_per_rank: bool = field(default=False, kw_only=True, metadata={"before": False})  # on each process draws of its own

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.family, str):
            one_of(FAMILIES, family=self.family)
        one_of(("auto", "weights", "local", "flipout"), estimator=self.estimator)
        one_of(("uniform", "blundell"), kl_batches=self.kl_batches)
        at_least(1, samples=self.samples, draws=self.draws)
        at_least(0, kl_weight=self.kl_weight)
        positive(init_scale=self.init_scale, moped=self.moped)
        between(0, 1, kl_warmup=self.kl_warmup, include="low")
        by_outputs = self.estimator in ("local", "flipout")
        require(
            self.q.local or not by_outputs,
            f"outputs can be drawn instead of weights only where weights are independent: with family={self.family!r} use "
            "estimator='auto' or 'weights'",
        )
        require(
            not self.path_only or type(self.q).log_prob is not Family.log_prob,
            f"path_only needs the density of q, which family={self.family!r} does not know",
        )
        require(
            not self.path_only or not (self.learn_prior or by_outputs),
            "path_only scores q and a given prior at draws of the weights: leave out learn_prior, and use estimator='auto' or "
            "'weights'",
        )

    @property
    def traits(self) -> Traits:
        """Those of descent, one member at a time; it draws weights."""
        inherited = super().traits
        warmup = ("kl_warmup=0",) if self.kl_warmup else ()
        settings, exact = (*inherited.length_settings, *warmup), (("kl_weight", 1.0),)
        return replace(inherited, draws_weights=True, stacks=False, length_settings=settings, exact_settings=exact)

    @property
    def q(self) -> Family:
        """The family as an object."""
        return FAMILIES[self.family]() if isinstance(self.family, str) else self.family

    def memory(self, weights: int) -> int:
        """A family has at least two numbers for each weight."""
        return 2 * super().memory(weights) + weights

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> VariationalState:
        """q around the start, and which layers draw their outputs."""
        prior, q = target.model.prior.normal, self.q
        require(
            not self.learn_prior or (prior is not None and prior.learned and q.independent),
            "learn_prior finds the scales of independent Gaussians: use the prior Normal() and family='mean_field'",
        )
        weights, points = _split(start.params)
        check_precision(weights)
        leaves = q.leaves(weights, {name: self._first_scale(leaf) for name, leaf in weights.items()})
        drawn = self._drawn_layers(target, start, batch)
        trained = super().init(target, Start({**leaves, **points}, start.buffers), batch, generator, steps=steps)
        return VariationalState(
            **vars(trained),
            period=max(1, steps // max(1, self.passes_over_data)),
            layers=drawn,
            joint=not (drawn or self.path_only or self.learn_prior) and self._joint(target, trained.params, generator),
        )

    def _first_scale(self, leaf: Tensor) -> Tensor:
        """Standard deviations at the start."""
        if self.moped is None:
            return torch.full_like(leaf, self.init_scale)
        return (self.moped * leaf.abs()).clamp_min(1e-4 * self.moped)

    def _drawn_layers(self, target: Target, start: Start, batch: Batch) -> dict[str, str | None]:
        """The layers that draw their outputs instead of their weights: weight to bias."""
        q = self.q
        if self.estimator == "weights" or self.path_only or not q.local:
            return {}
        drawn = drawable_layers(target.model, start.params, target.model.split(batch)[0], start.buffers)
        # the directions of a low-rank family are of all weights, and these would be drawn in two ways
        return {} if isinstance(q, LowRank) and _names(drawn) != set(_split(start.params)[0]) else drawn

    def _joint(self, target: Target, params: Params, generator: torch.Generator) -> bool:
        """Whether the expected log prior has no closed form, and is all of the divergence that has none."""
        q, (leaves, _) = self.q, _split(params)
        hyper = {name: leaf for name, leaf in params.items() if name.startswith("prior:")}
        state, noise = generator.get_state(), q.noise(leaves, generator)
        generator.set_state(state)
        with torch.no_grad():
            if q.divergence(leaves, noise, target.model.prior, hyper) is not None or q.entropy(leaves) is None:
                return False
            return self._expected(target, leaves, hyper) is None

    def kind(self, state: VariationalState) -> Hashable | None:
        """Steps with the same weight of the divergence are of one kind, apart from those that report it."""
        return None if self.kl_batches == "blundell" else (self._weight(state), state.step % REPORTED == 0)

    def update(self, target: Target, state: VariationalState, data: list[Batch], generator: torch.Generator) -> dict[str, Tensor]:
        """A gradient of minus the evidence bound, estimated by `samples` draws, and a step of the optimizer."""
        q, (leaves, points), n = self.q, _split(state.params), target.n_data
        live = {name: leaf.detach().requires_grad_() for name, leaf in {**q.constrain(leaves), **points}.items()}
        scores, buffers = [], state.buffers
        generator = target.processes.own_generator(generator) if self.draws_per_rank else generator
        # all processes add the same divergence, each a part of it, to the likelihood of examples of its own
        target = replace(target, n_data=n * target.processes.size)
        for _ in range(self.samples):
            score, buffers = self._likelihood(target, state, live, data, buffers, generator)
            scores.append(score)
        complexity = self._complexity(target, state, live, generator)
        gradient = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in live.items()}
        score = torch.stack(scores).mean()
        target.processes.sum_gradient_(gradient.values(), score)
        gradient = q.unconstrain_gradient(leaves, gradient)
        slopes = [gradient[name] for name in state.params]
        if self.clip is not None:
            clip(slopes, self.clip, stacked=False)
        advance(state.optimizer, state.params, slopes, pace=self.pace)
        q.enforce_bounds(leaves)
        tree.become(state.buffers, {name: leaf.detach() for name, leaf in buffers.items()})
        info = {"log_likelihood": score}
        return info if complexity is None else {**info, "complexity": complexity / n}

    def _likelihood(
        self,
        target: Target,
        state: VariationalState,
        live: Params,
        data: list[Batch],
        buffers: Params,
        generator: torch.Generator,
    ) -> tuple[Tensor, Params]:
        """Add the gradient of minus the expected log likelihood of an example, by one draw; its value, and the buffers after it."""
        q, (leaves, points), apart = self.q, _split(live), _names(state.layers)
        whole = {key: leaf for key, leaf in leaves.items() if key.split("/", 1)[1] not in apart}
        with torch.enable_grad():
            noise = q.noise(whole, generator) if whole else {}
            drawn = q.draw(whole, noise) if whole else {}
        weights = {name: leaf.detach().requires_grad_() for name, leaf in drawn.items()}
        inputs = [*(leaf for key, leaf in live.items() if key not in whole), *weights.values()]

        def outputs() -> tuple[Params, Reparametrized | None]:
            """The means of layers that draw their outputs, and what draws them, anew for every batch."""
            return q.outputs(leaves, state.layers, self.estimator, generator) if apart else ({}, None)

        score, buffers = self._score(target, {**weights, **points}, inputs, outputs, data, buffers)
        if drawn:
            slopes = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in weights.items()}
            if state.joint or self.path_only:
                self._score_prior(target, state, weights, points, slopes)
            if self.path_only:
                self._score_density(target, state, whole, weights, slopes)
            q.backward(whole, noise, drawn, slopes)
        return score, buffers

    def _score(
        self,
        target: Target,
        params: Params,
        inputs: list[Tensor],
        outputs: Callable[[], tuple[Params, Reparametrized | None]],
        data: list[Batch],
        buffers: Params,
    ) -> tuple[Tensor, Params]:
        """The mean log likelihood of the batches; minus its gradient, over the number of draws, is added to the `inputs`."""
        require(data, "there is no data: the loader gave no batch")
        total, n = None, target.examples(data)
        for i, batch in enumerate(data):
            with torch.enable_grad():
                means, drawing = outputs()
                seen = target if drawing is None else replace(target, around=lambda _, drawing=drawing: drawing)
                value, buffers = seen.sum_scores({**means, **params}, i, batch, buffers, train=True)
            factor = torch.full_like(value, -1 / n / self.samples)
            torch.autograd.backward(value, factor, inputs=[*inputs, *(drawing.leaves if drawing else ())])
            if drawing:
                drawing.collect_gradients()
            total = value.detach() if total is None else total + value.detach()
        assert total is not None
        return total / n, buffers

    def _score_prior(self, target: Target, state: VariationalState, weights: Params, points: Params, slopes: Params) -> None:
        """Add the gradient of minus the log prior at a draw, by its formula."""
        hyper = {name: leaf for name, leaf in points.items() if name.startswith("prior:")}
        for leaf in hyper.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        at = {name: leaf.detach() for name, leaf in {**weights, **hyper}.items()}
        gradient: Params = {**slopes, **{name: leaf.grad for name, leaf in hyper.items() if leaf.grad is not None}}
        with torch.no_grad():
            target.model.prior.add_gradient(gradient, at, -self._weight(state) / target.n_data / self.samples)

    def _score_density(self, target: Target, state: VariationalState, leaves: Params, weights: Params, slopes: Params) -> None:
        """Add the gradient of T log q at a draw, in the weights alone: as if q had no parameters."""
        fixed = {name: leaf.detach() for name, leaf in leaves.items()}
        at = {name: leaf.detach().requires_grad_() for name, leaf in weights.items()}
        with torch.enable_grad():
            density = self.q.log_prob(fixed, at)
        assert density is not None
        gradients = torch.autograd.grad(density, list(at.values()), allow_unused=True)
        for name, slope in zip(at, gradients, strict=True):
            if slope is not None:
                slopes[name].add_(slope, alpha=target.temperature * self._weight(state) / target.n_data / self.samples)

    def _weight(self, state: VariationalState) -> float:
        """The weight of the divergence in this step."""
        warmup = math.ceil(self.kl_warmup * state.steps)
        share = min(1.0, (state.step + 1) / warmup if warmup else 1.0)
        weight = self.kl_weight * math.ceil(share * LEVELS) / LEVELS
        if self.kl_batches == "blundell":
            m, i = state.period, state.step % state.period
            weight *= m * 2.0 ** -(i + 1) / (1 - 2.0**-m)
        return weight

    def _complexity(self, target: Target, state: VariationalState, live: Params, generator: torch.Generator) -> Tensor | None:
        """Add the gradient of the divergence, and of the prior of what the likelihood learns; its value in nats, now and then."""
        weight, n = self._weight(state), target.n_data
        leaves, points = _split(live)
        with torch.enable_grad():
            prior = target.model.likelihood.log_prior(likelihood_params(points))
            if prior.requires_grad:
                torch.autograd.backward(prior, torch.full_like(prior, -1 / n), inputs=list(likelihood_params(points).values()))
        if self.path_only:
            return None  # all of the rest was scored with the likelihood
        if target.model.prior.normal is not None and type(self.q) is MeanField and not self.learn_prior:
            return self._closed(target, live, weight / n, report=state.step % REPORTED == 0)
        with torch.enable_grad():
            if state.joint:
                entropy = self.q.entropy(leaves)
                assert entropy is not None
                value = -target.temperature * entropy
            else:
                value = self._divergence(target, live, generator)
        torch.autograd.backward(value, torch.full_like(value, weight / n), inputs=list(live.values()))
        return None if state.joint else value.detach()

    def _closed(self, target: Target, live: Params, factor: float, *, report: bool) -> Tensor | None:
        """`_divergence` of independent Gaussians from one another and `factor` times its gradient, in few passes over the memory."""
        prior, temperature, total = target.model.prior.normal, target.temperature, []
        assert prior is not None
        for name, mean in pick(live, "mean").items():
            scale = live[f"scale/{name}"]
            mu, sigma, s = mean.detach(), scale.detach(), prior.scale_of(name)
            for leaf in (mean, scale):
                leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert mean.grad is not None
            assert scale.grad is not None
            mean.grad.add_(mu, alpha=factor / s**2)
            for slope, part in pieces(scale.grad, sigma):
                slope.add_(part, alpha=factor / s**2).sub_(part.reciprocal(), alpha=factor * temperature)
            if not report:
                continue
            squares = torch.linalg.vector_norm(mu).square() + torch.linalg.vector_norm(sigma).square()
            constant = mu.numel() * (math.log(s) + 0.5 * (1 - temperature) * math.log(2 * math.pi) - 0.5 * temperature)
            total.append(0.5 * squares / s**2 - temperature * sigma.log().sum() + constant)
        return torch.stack(total).sum() if report else None

    def _divergence(self, target: Target, live: Params, generator: torch.Generator) -> Tensor:
        """T E[log q] - E[log p] in nats, exact or by one draw."""
        q, prior, (leaves, points) = self.q, target.model.prior, _split(live)
        hyper = {name: leaf for name, leaf in points.items() if name.startswith("prior:")}
        noise = q.noise(leaves, generator)
        whole = q.divergence(leaves, noise, prior, hyper)
        if whole is not None:
            require(
                target.temperature == 1,
                f"the divergence of {type(q).__name__} from its prior is a whole, of which a temperature cannot divide a part: "
                "fit at temperature=1, or with another family",
            )
            return whole
        moments, entropy = q.moments(leaves), q.entropy(leaves)
        if self.learn_prior and moments is not None and entropy is not None:
            return -target.temperature * entropy - _profiled(*moments)
        expected = self._expected(target, leaves, hyper)
        drawn = q.draw(leaves, noise) if expected is None or entropy is None else {}
        entropy = self._estimated_entropy(leaves, drawn) if entropy is None else entropy
        expected = prior.log_prob({**drawn, **hyper}) if expected is None else expected
        return -target.temperature * entropy - expected

    def _estimated_entropy(self, leaves: Params, drawn: Params) -> Tensor:
        """-log q at a draw."""
        density = self.q.log_prob(leaves, drawn)
        if density is None:
            raise ValueError(f"{type(self.q).__name__} gives neither an entropy nor a density: one of them is needed")
        return -density

    def _expected(self, target: Target, leaves: Params, hyper: Params) -> Tensor | None:
        """E[log p] under q, where it has a closed form."""
        if (moments := self.q.moments(leaves)) is None:
            return None
        return target.model.prior.expected_log_prob({**moments[0], **hyper}, moments[1], independent=self.q.independent)

    def posterior(self, target: Target, state: VariationalState, draws: store.Draws) -> Posterior:
        """q, as a Gaussian where it is one."""
        q, model, (leaves, points) = self.q, target.model, _split(state.params)
        if self.learn_prior:
            mean, variance = q.moments(leaves) or ({}, {})
            scales = {f"^{re.escape(name)}$": _spread(leaf, variance[name]) for name, leaf in mean.items()}
            model = replace(model, prior=Normal(scale={name: float(scale) for name, scale in scales.items()}))
        covariance = q.covariance(leaves)
        if covariance is None:
            return Drawn(model, q, leaves, points, state.buffers, self.draws)
        mean = (q.moments(leaves) or ({}, {}))[0]
        return Gaussian(model, {**mean, **points}, state.buffers, covariance, how="sampled", draws=self.draws)


def _split(params: Params) -> tuple[Params, Params]:
    """The leaves that belong to weights, and the quantities that are learned as points."""
    weights = {name: leaf for name, leaf in params.items() if ":" not in name}
    return weights, {name: leaf for name, leaf in params.items() if ":" in name}


def _names(layers: dict[str, str | None]) -> set[str]:
    """The weights and biases of layers that draw their outputs."""
    return {name for pair in layers.items() for name in pair if name is not None}


def _spread(mean: Tensor, variance: Tensor) -> Tensor:
    """The scale of a Gaussian prior about zero under which weights like these are most probable."""
    return (mean.square() + variance).mean().sqrt()


def _profiled(mean: Params, variance: Params) -> Tensor:
    """E[log p] under N(0, s^2), one s for each leaf, at the s that make it largest."""
    parts = [
        -leaf.numel() * (_spread(leaf, variance[name]).log() + 0.5 * (1 + math.log(2 * math.pi))) for name, leaf in mean.items()
    ]
    return torch.stack(parts).sum()
