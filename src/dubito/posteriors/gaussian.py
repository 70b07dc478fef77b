"""A Gaussian over the weights, with a structured covariance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dubito.curvature.evidence import CONTINUED, Approximation, Evidence, Precision, highest
from dubito.model import Model
from dubito.model.likelihoods import NOISE
from dubito.model.priors import MultivariateNormal
from dubito.network.examples import Batch, Inputs, Targets
from dubito.posteriors.functions import Functions
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predict.adjoint import ONE_PASS, one_pass, refuse_one_pass_options
from dubito.posteriors.predict.linearized import joint, linearized, sweep
from dubito.posteriors.predict.sampled import Stack, draw_groups, room, sampled
from dubito.posteriors.predict.streamlined import Streamlined
from dubito.posteriors.predict.tangents import functions
from dubito.posteriors.predictive import LINKS, LatentMixture
from dubito.tensors import tree
from dubito.tensors.checks import at_least, one_of, require
from dubito.tensors.covariances import Covariance, Diagonal
from dubito.tensors.randomness import borrowed_generators, fork_rng, fresh_generator, generator
from dubito.tensors.tree import Buffers, Params

EXACT = ("linearized", "adjoint")  # ways that draw only where there are too many outputs, and with `draws=0` never


@dataclass(frozen=True, repr=False)
class Gaussian(Posterior):
    """N(params, covariance) over the weights that the covariance names; the other parameters are a point.

    It predicts by linearizing the network (`how="linearized"`: mean f(x), exact Gaussian over f), by `draws` of the weights
    (`how="sampled"`), or by moments of such draws in one pass (`how="streamlined"`, `how="adjoint"`). A fitted Laplace approximation
    also has its `evidence`, and its prior can be changed afterwards.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=0.1))
    >>> posterior = Gaussian.diagonal(model, {"weight": torch.ones(1, 1)}, {"weight": torch.full((1, 1), 0.04)})
    >>> p = posterior.predict(torch.tensor([[2.0]]))
    >>> p.mean, p.uncertainty.epistemic                      # 2^2 * 0.04
    (tensor([[2.]]), tensor([[0.1600]]))
    """

    params: Params
    buffers: Buffers
    covariance: Covariance
    how: str = "linearized"
    draws: int = 30
    fitted: Evidence | None = None
    scale: Tensor | None = None  # [G], noise precisions the curvature is multiplied by
    temperature: float = 1.0
    variance_scale: float = 1.0  # of predictions in one pass

    @staticmethod
    def diagonal(model: Model, mean: Params, variance: Params, buffers: Buffers | None = None) -> Gaussian:
        """Independent weights, by hand."""
        params = {name: mean.get(name, leaf) for name, leaf in model.parameters().items()}
        variance = {name: tree.full_precision(leaf) for name, leaf in variance.items()}
        return Gaussian(model, params, model.buffers() if buffers is None else buffers, Diagonal.of(variance))

    def _departures(self) -> tuple[str, ...]:
        own = (f"T = {self.temperature:g}",) if self.temperature != 1 else ()
        scaled = ("variances scaled on held-out rows",) if self.variance_scale != 1 else ()
        return tuple(dict.fromkeys((*own, *self.departures, *scaled)))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of the weights, leaves [n, *shape]; parameters without a covariance are the same in all."""
        source = generator or fresh_generator(self.model.device)
        drawn = self._noise(n, source)
        return {
            name: (leaf + drawn[name]).to(leaf.dtype) if name in drawn else leaf.expand(n, *leaf.shape).clone()
            for name, leaf in self.params.items()
        }

    @property
    def center(self) -> tuple[Params, Buffers]:
        """The mean."""
        return self.params, self.buffers

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        """Ways that draw nothing (one pass) are shown by the draws whose moments they carry."""
        source, count = generator(self.model.device, seed, "weights"), draws or self.draws
        if (how or self.how) == "linearized":
            return Functions(self.model, {**self.buffers, **self.params}, self.covariance.draws(count, source), tangent=True)
        shared, stacked = self._drawn(count, source)
        return Functions(self.model, shared, stacked)

    def _drawn(self, n: int, source: torch.Generator) -> tuple[Buffers, Params]:
        """Leaves that all draws share, and those that differ, [n, *shape]."""
        drawn = self._noise(n, source)
        stacked = {name: (self.params[name] + leaf).to(self.params[name].dtype) for name, leaf in drawn.items()}
        return {**self.buffers, **{name: leaf for name, leaf in self.params.items() if name not in stacked}}, stacked

    def _noise(self, n: int, source: torch.Generator) -> Params:
        """Draws about the mean; rows of padding stay where they are."""
        drawn, padding = self.covariance.draws(n, source), self.model.padding()
        rows = {
            name: torch.tensor(row % drawn[name].shape[1], device=source.device) for name, row in padding.items() if name in drawn
        }
        return {name: leaf.index_fill(1, rows[name], 0.0) if name in rows else leaf for name, leaf in drawn.items()}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the weights that the covariance is over, [] or, for stacked leaves, [n]."""
        stacked = params[next(iter(self.covariance.shapes))].ndim > self.params[next(iter(self.covariance.shapes))].ndim
        away = {
            n: params[n] - self.params[n] if stacked else (params[n] - self.params[n]).unsqueeze(0)
            for n in self.covariance.shapes
        }
        pulled = self.covariance.solve(away)
        quadratic = torch.stack([(p := away[n] * pulled[n]).double().reshape(len(p), -1).sum(1) for n in away]).sum(0)
        value = -0.5 * (quadratic + self.covariance.logdet() + self.covariance.moving * math.log(2 * math.pi))
        return value if stacked else value[0]

    def logdet(self) -> Tensor:
        """Log determinant of the covariance."""
        return self.covariance.logdet()

    def predict(
        self,
        x: Inputs,
        how: str | None = None,
        *,
        draws: int | None = None,
        memory: float | None = None,
        seed: int = 0,
        link: str = "nodes",
        x_var: Tensor | None = None,
        rank: int | None = None,
        top: int | None = None,
        rule: str = "moments",
    ) -> LatentMixture:
        """The predictive at x. Linearized with `draws`, it is made of so many linear functions instead of their exact Gaussian.

        With `draws=0` nothing is drawn, however many outputs there are. `memory` bounds, in gigabytes, what is held beside the result
        (None: 1, or on a GPU an eighth of its memory).

        `link` turns a Gaussian over logits into class probabilities: "nodes" (deterministic nodes with matched moments), "pairwise"
        (mean field), "probit", "bridge" (Laplace bridge) or "mc". In one pass (`how="streamlined"` or `"adjoint"`) `x_var` are
        variances of the input, and `draws` is how often an operation without a rule is drawn; for `"streamlined"`, `rank` says how
        many directions are carried in which units move together: 0 none, -1 all; None picks, and `p.how` tells what. `rule="taylor"`
        takes functions of random numbers to first order, at the mean, where `"moments"` takes their moments.

        `top`, linearized or for `"adjoint"`, is how many outputs at each position (pixel, token) have exact variances, the largest;
        the others have rougher ones, and there are no covariances. None: all, for `"adjoint"` 16 of more than 100. Of large images
        and long texts `draws` (30 if None) functions stand for the Gaussian; `p.how` tells. `how="point"` is the network at the mean
        of the weights alone.
        """
        how = self.how if how is None else how
        drawn = None if how in EXACT and draws == 0 else draws
        self._only(how, "linearized", "sampled", "streamlined", "adjoint", "point", draws=drawn)
        one_of(LINKS, link=link)
        if how in ONE_PASS:
            p = one_pass(
                self.streamlined, x, how, draws=draws, memory=memory, seed=seed, x_var=x_var, rank=rank, top=top, rule=rule
            )
            return p.stretched(self.variance_scale).linked(link)
        refuse_one_pass_options(x_var, rank, None if how == "linearized" else top, rule)
        at_least(1, top=top)
        if how == "point":
            return sampled(self.model, x, shared={**self.buffers, **self.params}, memory=memory)
        source = generator(self.model.device, seed, "weights")
        if how == "linearized":
            p = linearized(
                self.model, x, params=self.params, buffers=self.buffers, covariance=self.covariance,
                draws=draws, fallback=self.draws, memory=memory, generator=source, top=top,
            )  # fmt: skip
            return p.linked(link)
        return self._sampled(x, draws or self.draws, room(memory, self.model.device), source)

    def _sampled(self, x: Inputs, draws: int, memory: float, source: torch.Generator) -> LatentMixture:
        """By draws of the weights, a group at a time."""
        means, own = Stack(draws), []
        for n in draw_groups(draws, self.covariance, memory):
            shared, stacked = self._drawn(n, source)
            part = sampled(self.model, x, shared=shared, stacked=stacked, memory=memory, stack=means)
            own.append(part.params or {})  # a learned noise is the same for all draws, or one for each
        learned = {name: torch.cat([one[name] for one in own]) if leaf.ndim > 1 else leaf for name, leaf in own[0].items()}
        return LatentMixture(self.model.likelihood, means.whole, params=learned)

    def joint(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Mean [B, C] and covariance [B, C, B, C] of the linearized outputs at all inputs together."""
        return joint(self.model, x, params=self.params, buffers=self.buffers, covariance=self.covariance)

    def sample_functions(self, x: Inputs, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of the linearized function at all inputs together, [n, B, *D, C]: from their one joint Gaussian."""
        deltas = self.covariance.draws(n, generator or fresh_generator(self.model.device))
        return functions(self.model, x, params=self.params, buffers=self.buffers, deltas=deltas)

    @cached_property
    def streamlined(self) -> Streamlined:
        """The network as a program of means and variances, made once."""
        return Streamlined(self.model, self.params, self.buffers, self.covariance)

    # -- prior, noise, evidence

    @property
    def prior_precision(self) -> Params:
        """The prior's precision of every leaf."""
        return self._fitted.prior

    @property
    def _fitted(self) -> Evidence:
        if self.fitted is None:
            raise ValueError(
                "this Gaussian has no curvature and prior to change: only Laplace and OnlineLaplace fit one that has"
            )
        return self.fitted

    @property
    def _scale(self) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=self.model.device) if self.scale is None else self.scale

    @property
    def _approximation(self) -> Approximation:
        """This Gaussian as curvature, prior and noise."""
        return Approximation(self.params, self.covariance, self._fitted, self._scale, self.temperature)

    def _with(self, made: Approximation) -> Gaussian:
        return replace(
            self, params=made.params, covariance=made.covariance, fitted=made.evidence, scale=made.scale,
            temperature=made.temperature, departures=tuple(one for one in self.departures if not one.startswith("T = ")),
        )  # fmt: skip

    def with_prior(
        self, precision: Precision | None = None, *, noise: float | Tensor | None = None, temperature: float | None = None
    ) -> Gaussian:
        """The posterior under another prior precision (one, by pattern of names, or by leaf), noise, or temperature; same curvature.

        One precision, or one for each layer, costs nothing; one for each weight is for diagonal and dense structures.
        """
        return self._with(self._approximation.with_prior(precision, noise=noise, temperature=temperature))

    def log_evidence(
        self,
        precision: Precision | None = None,
        *,
        noise: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """Log marginal likelihood, here or at another prior precision, noise or temperature; differentiable in what is a tensor."""
        return self._approximation.log_evidence(precision, noise=noise, temperature=temperature)

    def optimized(self, *, by: str = "layer", prior: bool = True, noise: bool = True) -> Gaussian:
        """The posterior at the prior precisions and the noise that maximize the evidence."""
        return self._with(self._approximation.maximized(by=by, prior=prior, noise=noise))

    def tuned(
        self,
        data: Iterable[Batch],
        *,
        precisions: Sequence[float] = tuple(10 ** (i / 4) for i in range(-16, 17)),
        temperatures: Sequence[float] = (1.0,),
        noises: Sequence[float] = (1.0,),
    ) -> Gaussian:
        """The posterior whose linearized predictive scores held-out data best, (x, y) or batches: the alternative to the evidence.

        All prior precisions are multiplied by one of `precisions`, the covariance by one of `temperatures` (relative to its own), a
        learned noise by one of `noises`. The network runs over the data once: what it gives is kept, batch by batch, in the basis in
        which every multiple of the prior is diagonal, so that a grid point costs one matrix product a layer.
        """
        ratios = sorted({float(p) * float(s) ** 2 for p in precisions for s in noises})  # only prior over noise precision counts
        require(
            ratios and ratios[0] > 0 and min(temperatures, default=0) > 0 and (len(noises) <= 1 or self._fitted.noisy),
            "precisions, temperatures and noises are positive multipliers; several noises need a learned noise",
        )
        require(self._fitted.base is None, CONTINUED)
        scores = dict.fromkeys(((p, s, t) for p in precisions for s in noises for t in temperatures), 0.0)
        for batch in self._held_out(data):
            x, y = self.model.split(batch)
            swept = sweep(self.model, x, params=self.params, buffers=self.buffers, covariance=self.covariance, factors=ratios)
            for ratio, predictive in zip(ratios, swept, strict=True):
                for p, s, t in scores:
                    if float(p) * float(s) ** 2 == ratio:
                        scores[p, s, t] += _score(predictive, y, s, t)
        p, s, t = max(scores, key=lambda key: scores[key])
        if len(precisions) > 2 and p in (min(precisions), max(precisions)):
            warnings.warn(
                f"the held-out data like {p:g} times the present prior precision best, the end of the grid: give other `precisions`",
                stacklevel=2,
            )
        noise = None if s == 1 else self._scale.rsqrt() * s
        precision = {name: leaf * p for name, leaf in self.prior_precision.items()}
        tuned = self.with_prior(precision, noise=noise, temperature=self.temperature * t)
        return tuned.departing("tuned on held-out rows")

    def _held_out(self, data: Iterable[Batch]) -> list[Any]:
        batches: Iterable[Batch] = [data] if isinstance(data, tuple) else data
        with borrowed_generators(batches), fork_rng():  # a DataLoader draws from the global generator, even unshuffled
            batches = [tree.move(batch, self.model.device) for batch in batches]
        if not batches:
            raise ValueError("there is no held-out data: the loader gave no batch")
        return batches

    def calibrated(
        self, data: Iterable[Batch], how: str = "streamlined", *, rank: int | None = None, rule: str = "moments"
    ) -> Gaussian:
        """The posterior whose predictions in one pass have their variances of f multiplied by the factor, `variance_scale`, that scores
        held-out data best, (x, y) or batches. It is positive by construction, and 1 unless this is called."""
        self._only(how, "streamlined", "adjoint")
        plain = replace(self, variance_scale=1.0)
        found = []
        for batch in self._held_out(data):
            x, y = self.model.split(batch)
            found.append((plain.predict(x, how, rank=rank if how == "streamlined" else None, rule=rule), y))

        def _total(log: float) -> float:
            return sum(float(p.stretched(math.exp(log)).log_prob(y).double().sum()) for p, y in found)

        end = math.log(1e4)
        best = highest(_total, -end, end, points=17, tolerance=0.01)
        if abs(best) > 0.95 * end:
            warnings.warn(f"the best scale of variances, {math.exp(best):.0e}, is the end of what was tried", stacklevel=2)
        return replace(self, variance_scale=math.exp(best))

    def as_prior(self) -> MultivariateNormal:
        """This posterior as the prior of a fit on new data, which then continues from what is known.

        At a temperature, it is the posterior before tempering: the next fit, at the same temperature, will temper all of it."""
        require(
            not any(":" in name for name in self.covariance.shapes),
            "this posterior includes a learned noise, which a prior over weights cannot hold: fit with a fixed noise",
        )
        require(
            self.covariance.moving == self.covariance.size,
            "this posterior covers a subnetwork only, so it cannot be the prior of all weights: fit with subset= instead",
        )
        covariance = self.covariance if self.temperature == 1.0 else self.covariance.with_temperature(1.0)
        return MultivariateNormal({name: self.params[name] for name in covariance.shapes}, covariance)


def _score(predictive: LatentMixture, y: Targets, noise: float, temperature: float) -> float:
    """The log score of held-out targets, with the learned noise and the covariances times these factors."""
    learned = {k: v + math.log(noise) if k == NOISE else v for k, v in (predictive.params or {}).items()}
    changed = replace(predictive.stretched(temperature * float(noise) ** 2), params=learned)
    return float(changed.log_prob(y).double().sum())
