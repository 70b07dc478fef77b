"""Weights that have one of two values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors import Bernoulli, ByName, Prior
from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.mean_field import MeanField
from dubito.tensors import tree
from dubito.tensors.tree import Params

EDGE = 1e-6  # uniform numbers are kept so far from 0 and 1


@dataclass(frozen=True)
class Binary(Family):
    r"""Weights that are the second of two `values` with probability :math:`\sigma(l)`, and else the first, each on its own.

    Draws of the posterior have these values. While training they are relaxed, so that a gradient can follow them
    (Maddison et al. 2017): :math:`w = a + (b - a)\, \sigma((l + \ln u - \ln(1 - u)) / \lambda)` with `temperature`
    :math:`\lambda`. The prior is `priors.Bernoulli` with the same values, and the divergence is the exact one of the discrete weights.

    `at` picks the binary weights by their names; the others are independent Gaussians. The prior is then
    `priors.ByName({"weight": Bernoulli(0.5, values=(-1, 1)), "": Normal(scale=1.0)})`.

    >>> q = Binary((-1.0, 1.0))
    >>> leaves = q.leaves({"w": torch.zeros(4)}, {"w": torch.ones(4)})
    >>> q.sampled(leaves, q.noise(leaves, torch.Generator().manual_seed(0)))["w"].abs()
    tensor([1., 1., 1., 1.])
    """

    values: tuple[float, float] = (0.0, 1.0)
    temperature: float = field(default=0.5, kw_only=True)
    at: str = field(default="", kw_only=True)  # a pattern of names

    def __post_init__(self):
        if not self.values[0] < self.values[1] or not self.temperature > 0:
            raise ValueError(f"values are in order and the temperature positive; got {self.values} and {self.temperature}")
        object.__setattr__(self, "values", tuple(self.values))  # from a file it comes as a list

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        low, high = self.values
        binary = {name: leaf for name, leaf in start.items() if re.search(self.at, name)}
        if not binary:
            raise ValueError(f"at={self.at!r} names none of the weights, which are {list(start)[:8]}")
        rest = {name: leaf for name, leaf in start.items() if name not in binary}
        # towards the nearer value, not far
        logits = {name: (2 * (leaf - (low + high) / 2) / (high - low)).clamp(-1, 1) for name, leaf in binary.items()}
        rho = {name: inverse_softplus(scale[name]) for name in rest}
        return {**of_kind("logit", logits), **of_kind("mean", tree.clone(rest)), **of_kind("rho", rho)}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        uniform = {
            name: torch.empty_like(leaf, requires_grad=False).uniform_(EDGE, 1 - EDGE, generator=generator)
            for name, leaf in kind(leaves, "logit").items()
        }
        return {**uniform, **MeanField().noise(leaves, generator)}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        low, high = self.values
        relaxed = {
            name: low + (high - low) * torch.sigmoid((leaf + torch.logit(noise[name])) / self.temperature)
            for name, leaf in kind(leaves, "logit").items()
        }
        return {**relaxed, **MeanField().draw(leaves, noise)}

    def sampled(self, leaves: Params, noise: Params) -> Params:
        """A draw of the posterior."""
        low, high = self.values
        drawn = self.draw(leaves, noise)
        for name in kind(leaves, "logit"):
            drawn[name] = torch.where(drawn[name] > (low + high) / 2, high, low).to(drawn[name])
        return drawn

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor:
        """KL(q || p), or an estimate of it."""
        total, q = [], MeanField()
        parts = {name: prior.priors[prior.pattern_of(name)] if isinstance(prior, ByName) else prior for name in noise}
        for name, logit in kind(leaves, "logit").items():
            own = parts[name]
            if not isinstance(own, Bernoulli) or tuple(own.values) != self.values:
                raise ValueError(
                    f"{name} has the values {self.values}, so its prior is priors.Bernoulli(values={self.values}), "
                    f"alone or in a ByName; got {type(own).__name__}"
                )
            total.append(own.divergence({name: logit}))
        for name in kind(leaves, "mean"):
            rest = {key: leaf for key, leaf in leaves.items() if key.split("/", 1)[1] == name}
            expected = parts[name].expected_log_prob(*q.moments(rest), independent=True)
            if expected is None:
                expected = parts[name].log_prob(q.draw(rest, noise))
            total.append(-q.entropy(rest) - expected)
        return torch.stack(total).sum()

    def weight_moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight."""
        low, high = self.values
        mean, variance = MeanField().moments(leaves)
        for name, logit in kind(leaves, "logit").items():
            p = torch.sigmoid(logit)
            mean[name], variance[name] = low + (high - low) * p, (high - low) ** 2 * p * (1 - p)
        return mean, variance
