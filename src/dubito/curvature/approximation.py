"""A Gaussian around a mode, of which curvature, prior and noise are known apart: what a Laplace fit ends with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dubito.curvature.evidence import Evidence, maximize
from dubito.model.likelihoods import NOISE
from dubito.tensors.checks import positive, require
from dubito.tensors.covariances import Covariance
from dubito.tensors.tree import Params

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
