r"""The log evidence of a Laplace approximation, as a function of prior precisions, noise and temperature.

.. math:: \log p(D) \approx \log p(D \mid \theta^*) - \tfrac12 \Big( \log\det(H + P_0) - \log\det P_0
          + (\theta^* - \mu_0)^T P_0 (\theta^* - \mu_0) \Big)

At a temperature T the likelihood and the quadratic term are divided by T: it is the evidence of the likelihood
:math:`p(D \mid \theta)^{1/T}` under the prior :math:`p(\theta)^{1/T}`, normalized.

`Approximation` is the Gaussian around a mode that it belongs to, of which curvature, prior and noise are known apart: what a Laplace
fit ends with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dubito.model.likelihoods import NOISE
from dubito.tensors.checks import positive, require
from dubito.tensors.covariances import Covariance
from dubito.tensors.tree import Params

LARGE = BINS = 2**15  # curvatures of a block above which they are counted in bins, and how many of these


@dataclass(frozen=True)
class Evidence:
    """What the evidence is made of beside the curvature: sums over all data, in float64."""

    log_likelihood: Tensor  # [], at the fitted noise
    errors: Tensor  # [G], squared residuals of each learned noise
    counts: Tensor  # [G], how many; zero where the noise is not learned
    prior: Params  # precision of every leaf, [] or [*shape]
    deviation: Params  # mean minus prior mean, of the leaves the covariance is over
    base: Covariance | None = None  # the prior's covariance, where the prior is an earlier posterior

    @property
    def noisy(self) -> bool:
        """Whether there is a learned noise."""
        return bool(self.counts.any())

    def likelihood(self, scale: Tensor) -> Tensor:
        """Log likelihood at noise precisions `scale` [G]."""
        if not self.noisy:
            return self.log_likelihood
        scale = scale.double().to(self.errors.device)
        return 0.5 * (self.counts * (scale.log() - math.log(2 * math.pi)) - self.errors * scale).sum()

    def value(
        self, covariance: Covariance, prior: Mapping[str, Tensor], scale: Tensor, temperature: Tensor | float = 1.0
    ) -> Tensor:
        """The log evidence, differentiable in `prior`, `scale` and `temperature`."""
        if self.base is not None:
            return self._continued(covariance, scale, float(temperature))
        quadratic, log_prior = self.prior_terms(covariance, prior)
        occam = covariance.log_precision(prior, scale) - log_prior
        return self.likelihood(scale) / temperature - 0.5 * (occam + quadratic / temperature)

    def prior_terms(self, covariance: Covariance, prior: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(theta - mu)^T P0 (theta - mu) and log det P0, over the weights the covariance is over."""
        picked = covariance.picked()
        quadratic, logs = [], []
        for name, deviation in self.deviation.items():
            precision = prior[name].double()
            if name in picked:
                squared = deviation.double().reshape(-1) ** 2
                chosen = picked[name]
                quadratic.append((precision.expand(deviation.shape).reshape(-1) * squared)[chosen].sum())
                logs.append(precision.expand(deviation.shape).reshape(-1)[chosen].log().sum())
            elif precision.ndim == 0:
                quadratic.append(precision * self._squares[name])
                logs.append(deviation.numel() * precision.log())
            else:
                quadratic.append((precision * deviation.double() ** 2).sum())
                logs.append(precision.expand(deviation.shape).log().sum())
        return torch.stack(quadratic).sum(), torch.stack(logs).sum()

    def moved(self, covariance: Covariance) -> tuple[Params, Params]:
        """Of the weights the covariance is over, how many there are and their squared deviations from the prior's mean, by leaf."""
        picked, sizes, squares = covariance.picked(), {}, {}
        for name, deviation in self.deviation.items():
            chosen = deviation.reshape(-1)[picked[name]].double() if name in picked else deviation
            squares[name] = (chosen**2).sum() if name in picked else self._squares[name]
            sizes[name] = squares[name].new_tensor(chosen.numel())
        return sizes, squares

    @cached_property
    def _squares(self) -> Params:
        """Squared norms, leaf by leaf."""
        return {name: (leaf.double() ** 2).sum() for name, leaf in self.deviation.items()}

    def _continued(self, covariance: Covariance, scale: Tensor, temperature: float) -> Tensor:
        """At the prior, noise and temperature of the fit."""
        assert self.base is not None
        stacked = {name: leaf.unsqueeze(0) for name, leaf in self.deviation.items()}
        pulled = self.base.solve(stacked)
        quadratic = torch.stack([(stacked[name].double() * pulled[name].double()).sum() for name in stacked]).sum()
        occam = self.base.logdet() + covariance.moving * math.log(temperature) - covariance.logdet()
        return self.likelihood(scale) / temperature - 0.5 * (occam + quadratic / temperature)


def groups(names: tuple[str, ...], by: str) -> dict[str, tuple[str, ...]]:
    """Which leaves share a prior precision: all ("one"), those of a module ("layer"), or each its own ("parameter").

    >>> groups(("0.weight", "0.bias", "2.weight"), "layer")
    {'0': ('0.weight', '0.bias'), '2': ('2.weight',)}
    """
    key: Callable[[str], str] = {
        "one": lambda name: "",
        "layer": lambda name: name.rpartition(".")[0],
        "parameter": lambda name: name,
    }[by]
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(key(name), []).append(name)
    return {group: tuple(members) for group, members in found.items()}


def shared_precisions(values: Mapping[str, float], by: str) -> dict[str, float]:
    """Precisions at which the search begins: the mean over each of the `groups`.

    >>> shared_precisions({"0.weight": 2.0, "0.bias": 1.0}, "layer")
    {'0.weight': 1.5, '0.bias': 1.5}
    """
    means = {members: sum(values[name] for name in members) / len(members) for members in groups(tuple(values), by).values()}
    return {name: mean for members, mean in means.items() for name in members}


@dataclass(frozen=True)
class _Spectrum:
    """log det (s H + P0) of blocks of which the spectrum is known: sum n log(s h + delta) over curvatures h, each n times there. Large
    blocks are histograms, since a search asks many times."""

    values: Tensor  # [blocks, n], in float64
    counts: Tensor  # [blocks, n], zero where a block has fewer
    group: Tensor  # [blocks], index of the precision that is the block's

    @staticmethod
    def of(parts: list[tuple[Tensor, int]]) -> list[_Spectrum]:
        """From curvatures and their group; blocks of about the same size are in one."""
        sizes: dict[int, list[tuple[Tensor, Tensor, int]]] = {}
        for curvatures, group in parts:
            values, counts = _histogram(curvatures)
            sizes.setdefault(len(values).bit_length(), []).append((values, counts, group))
        found = []
        for blocks in sizes.values():
            values, counts, group = zip(*blocks, strict=True)
            padded = [pad_sequence(list(each), batch_first=True) for each in (values, counts)]
            found.append(_Spectrum(padded[0], padded[1], torch.tensor(group, device=values[0].device)))
        return found

    def log_precision(self, precisions: Tensor, scale: Tensor) -> Tensor:
        """The sum for the groups' precisions [g]."""
        return (self.counts * (scale[0] * self.values + precisions[self.group].unsqueeze(1)).log()).sum()


def _histogram(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values and how many there are of each; of many, means in bins of a thousandth of their size."""
    flat = values.detach().double().flatten()
    if len(flat) <= LARGE:
        return flat, torch.ones_like(flat)
    flat = flat.clamp_min(0)
    index = ((flat / flat.max().clamp_min(1e-300)).clamp_min(1e-20).log() * (BINS / math.log(1e-20))).long().clamp(0, BINS)
    counts = torch.bincount(index, minlength=BINS + 1).double()
    some = counts > 0
    return torch.bincount(index, weights=flat, minlength=BINS + 1)[some] / counts[some], counts[some]


class _Objective:
    """The log evidence as a function of the groups' precisions [g] and of the noise, quickly: what does not change is summed before."""

    def __init__(self, evidence: Evidence, covariance: Covariance, members: dict[str, tuple[str, ...]], temperature: float):
        self.evidence, self.members, self.temperature = evidence, list(members.values()), temperature
        group = {name: i for i, names in enumerate(self.members) for name in names}
        parts: list[tuple[Tensor, int]] = []
        self.others: list[Covariance] = []
        for block in covariance.independent_blocks:
            spectra = block.spectra()
            if spectra and all(len({group[name] for name in part.shapes}) == 1 for part, _ in spectra):
                parts += [(values, group[next(iter(part.shapes))]) for part, values in spectra]
            else:
                self.others.append(block)
        self.spectra = _Spectrum.of(parts)
        sizes, squares = evidence.moved(covariance)
        self.sizes, self.squares = (
            torch.stack([torch.stack([by[n] for n in names]).sum() for names in self.members]) for by in (sizes, squares)
        )

    def __call__(self, precisions: Tensor, scale: Tensor) -> Tensor:
        """The log evidence."""
        occam = -(self.sizes * precisions.log()).sum()
        for spectrum in self.spectra:
            occam = occam + spectrum.log_precision(precisions, scale)
        if self.others:
            # one tensor for all of a group, by which it is known as one precision
            each = {name: value for value, names in zip(precisions.unbind(), self.members, strict=True) for name in names}
            occam = occam + torch.stack([block.log_precision(each, scale) for block in self.others]).sum()
        quadratic = (precisions * self.squares).sum()
        return self.evidence.likelihood(scale) / self.temperature - 0.5 * (occam + quadratic / self.temperature)


def maximize(
    evidence: Evidence,
    covariance: Covariance,
    scale: Tensor,
    *,
    by: str,
    prior: bool,
    noise: bool,
    temperature: float = 1.0,
    steps: int = 60,
) -> tuple[Params, Tensor, Tensor]:
    """Prior precisions of the groups and noise precisions that maximize the evidence, and its value: L-BFGS over their logarithms."""
    names = tuple(covariance.shapes)
    members = groups(names, by)
    device = evidence.log_likelihood.device
    start = [float(evidence.prior[group[0]].double().mean().log()) for group in members.values()]
    log_prior = torch.tensor(start, dtype=torch.float64, device=device, requires_grad=prior)
    log_scale = scale.detach().double().to(device).log().requires_grad_(noise)
    free = [p for p, wanted in ((log_prior, prior), (log_scale, noise)) if wanted]
    objective = _Objective(evidence, covariance, members, temperature) if prior else None

    def precisions() -> Tensor:
        """Those of the groups at the present point."""
        return log_prior.clamp(-25, 25).exp()

    def value() -> Tensor:
        """The log evidence at the present point."""
        if objective is None:
            return evidence.value(covariance, evidence.prior, log_scale.exp(), temperature)
        return objective(precisions(), log_scale.exp())

    if free:
        size = float(evidence.counts.sum()) or float(abs(evidence.log_likelihood)) or 1.0
        optimizer = torch.optim.LBFGS(
            free, max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            """The loss and its gradient, for L-BFGS."""
            optimizer.zero_grad()
            loss = -value() / max(1.0, size)
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        found, scale = dict(evidence.prior), log_scale.detach().exp()
        if prior:
            found = {n: value for value, names in zip(precisions().unbind(), members.values(), strict=True) for n in names}
        return found, scale, evidence.value(covariance, found, scale, temperature)


def highest(function: Callable[[float], float], low: float, high: float, *, points: int = 101, tolerance: float = 1e-9) -> float:
    """Where a function of one number is highest: the best of a grid, then the golden section around it."""
    step = (high - low) / (points - 1)
    best = max((low + i * step for i in range(points)), key=function)
    low, high, ratio = best - step, best + step, (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > tolerance:
        if at_a > at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2


CONTINUED = "the prior is an earlier posterior: change it there, and fit again"
FIXED = "the noise is not learned by this likelihood, so it is part of the curvature: fit with another noise"

Precision = float | Tensor | Mapping[str, float | Tensor]  # one for all, by pattern of names, or by leaf


@dataclass(frozen=True)
class Approximation:
    r""":math:`N(\theta^*, T (\sum_k s_k H_k + P_0)^{-1})`, with curvatures :math:`H_k`, noise precisions :math:`s_k`, prior precision
    :math:`P_0` and temperature T. Another prior, noise or temperature needs no further pass over the data."""

    params: Params
    covariance: Covariance
    evidence: Evidence
    scale: Tensor  # [G], noise precisions
    temperature: float = 1.0

    def with_prior(
        self, precision: Precision | None = None, *, noise: float | Tensor | None = None, temperature: float | None = None
    ) -> Approximation:
        """The approximation under another prior precision, noise (a standard deviation) or temperature."""
        require(self.evidence.base is None, CONTINUED)
        prior = self.precisions(precision)
        if any(bool((leaf <= 0).any()) for leaf in prior.values()):
            raise ValueError("prior precisions must be positive")
        scale, params = self.scale, self.params
        if noise is not None:
            require(self.evidence.noisy, FIXED)
            sigma = torch.as_tensor(noise, dtype=torch.float64, device=scale.device).expand(scale.shape)
            positive(noise=sigma)
            scale = sigma**-2
            params = {**params, NOISE: sigma.log().to(params[NOISE])}
        temperature = self.temperature if temperature is None else temperature
        positive(temperature=temperature)
        covariance = self.covariance.with_prior({n: p.detach() for n, p in prior.items()}, scale, temperature)
        return Approximation(params, covariance, replace(self.evidence, prior=prior), scale, temperature)

    def log_evidence(
        self,
        precision: Precision | None = None,
        *,
        noise: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """Log marginal likelihood, here or at another prior precision, noise or temperature; differentiable in what is a tensor."""
        require(self.evidence.base is None or precision is noise is temperature is None, CONTINUED)
        scale = self.scale
        if noise is not None:
            require(self.evidence.noisy, FIXED)
            scale = torch.as_tensor(noise, dtype=torch.float64, device=scale.device).expand(scale.shape) ** -2
        temperature = self.temperature if temperature is None else temperature
        return self.evidence.value(self.covariance, self.precisions(precision), scale, temperature)

    def maximized(self, *, by: str = "layer", prior: bool = True, noise: bool = True) -> Approximation:
        """The approximation at the prior precisions and the noise that maximize the evidence; groups of leaves `by` which precisions
        are shared are those of `dubito.curvature.evidence.groups`."""
        noise = noise and self.evidence.noisy
        best, scale, _ = maximize(
            self.evidence, self.covariance, self.scale, by=by, prior=prior, noise=noise, temperature=self.temperature
        )
        return self.with_prior(best if prior else None, noise=scale.rsqrt() if noise else None)

    def precisions(self, precision: Precision | None) -> Params:
        """Precisions of all leaves: a number for all; by leaf; or by pattern, where the first that is found in a name counts."""
        known = self.evidence.prior
        if precision is None:
            return known
        if not isinstance(precision, Mapping):
            return {name: _number(precision, old) for name, old in known.items()}
        lost = [p for p in precision if p not in known and not any(re.search(p, name) for name in known)]
        require(not lost, f"{lost} match none of the weights that have a covariance, {list(known)[:8]}")
        found: Params = {}
        for name, old in known.items():
            matching = (value for pattern, value in precision.items() if re.search(pattern, name))
            found[name] = _number(precision[name] if name in precision else next(matching, old), old)
        return found


def _number(value: float | Tensor, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64, device=like.device)
