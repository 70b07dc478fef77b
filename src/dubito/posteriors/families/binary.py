"""Weights that have one of two values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors import Bernoulli, ByName, Prior
from dubito.posteriors.families.factorized import uniform_like
from dubito.posteriors.families.family import Family
from dubito.posteriors.families.leaves import label, pick, pick_weight, total
from dubito.posteriors.families.mean_field import MeanField
from dubito.tensors.checks import positive, require
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Binary(Family):
    r"""Independent weights with one of two `values`: the second with probability :math:`\sigma(l)`, otherwise the first.

    Draws of the posterior have these values. In training they are relaxed so that they have a gradient (Maddison et al. 2017):
    :math:`w = a + (b - a)\, \sigma((l + \ln u - \ln(1 - u)) / \lambda)` with u uniform in (0, 1) and the `temperature`
    :math:`\lambda`. The prior must be `priors.Bernoulli` with the same values; the divergence is the exact one of the discrete weights.

    `at` is a pattern of the names of binary weights; the others are independent Gaussians. The prior is then
    `priors.ByName({"weight": Bernoulli(0.5, values=(-1, 1)), "": Normal(scale=1.0)})`.

    >>> q = Binary((-1.0, 1.0))
    >>> leaves = q.leaves({"w": torch.zeros(4)}, {"w": torch.ones(4)})
    >>> q.sample(leaves, q.noise(leaves, torch.Generator().manual_seed(0)))["w"].abs()
    tensor([1., 1., 1., 1.])
    """

    values: tuple[float, float] = (0.0, 1.0)
    temperature: float = field(default=0.5, kw_only=True)
    at: str = field(default="", kw_only=True)  # a pattern of names

    def __post_init__(self):
        low, high = self.values
        require(low < high, f"values must be in increasing order; got {self.values}")
        positive(temperature=self.temperature)
        object.__setattr__(self, "values", (low, high))  # a list if it comes from a file

    def leaves(self, start: Params, scale: Params) -> Params:
        """Logits between -1 and 1 towards the nearer value, and means and rho of the other weights."""
        low, high = self.values
        binary = {name: leaf for name, leaf in start.items() if re.search(self.at, name)}
        require(binary, f"at={self.at!r} matches none of the weights, which are {list(start)[:8]}")
        logits = {name: (2 * (leaf - (low + high) / 2) / (high - low)).clamp(-1, 1) for name, leaf in binary.items()}
        rest = {name: leaf for name, leaf in start.items() if name not in binary}
        return {**label("logit", logits), **MeanField().leaves(rest, {name: scale[name] for name in rest})}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A uniform number for every binary weight, and a standard normal one for the others."""
        return {**uniform_like(pick(leaves, "logit"), generator), **MeanField().noise(leaves, generator)}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Relaxed weights, between the two values, and Gaussian ones."""
        low, high = self.values
        relaxed = {
            name: low + (high - low) * torch.sigmoid((leaf + torch.logit(noise[name])) / self.temperature)
            for name, leaf in pick(leaves, "logit").items()
        }
        return {**relaxed, **MeanField().draw(leaves, noise)}

    def sample(self, leaves: Params, noise: Params) -> Params:
        """As `draw`, with relaxed weights rounded to the nearer value."""
        low, high = self.values
        drawn = self.draw(leaves, noise)
        for name in pick(leaves, "logit"):
            drawn[name] = torch.where(drawn[name] > (low + high) / 2, high, low).to(drawn[name])
        return drawn

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor:
        """The exact KL divergence of the binary weights, plus that of the Gaussian ones, estimated by a draw if need be."""
        terms, q = [], MeanField()
        priors = {name: prior.priors[prior.pattern_of(name)] if isinstance(prior, ByName) else prior for name in noise}
        for name, logit in pick(leaves, "logit").items():
            bernoulli = priors[name]
            if not isinstance(bernoulli, Bernoulli) or tuple(bernoulli.values) != self.values:
                raise ValueError(
                    f"the prior of {name} must be priors.Bernoulli(values={self.values}), alone or in a ByName; got {bernoulli!r}"
                )
            terms.append(bernoulli.divergence({name: logit}))
        for name in pick(leaves, "mean"):
            rest = pick_weight(leaves, name)
            expected = priors[name].expected_log_prob(*q.moments(rest), independent=True)
            expected = priors[name].log_prob(q.draw(rest, noise)) if expected is None else expected
            terms.append(-q.entropy(rest) - expected)
        return total(terms)

    def weight_moments(self, leaves: Params) -> tuple[Params, Params]:
        r"""Mean :math:`a + (b - a) p` and variance :math:`(b - a)^2 p (1 - p)`, with :math:`p = \sigma(l)`, of binary weights."""
        low, high = self.values
        mean, variance = MeanField().moments(leaves)
        for name, logit in pick(leaves, "logit").items():
            p = torch.sigmoid(logit)
            mean[name], variance[name] = low + (high - low) * p, (high - low) ** 2 * p * (1 - p)
        return mean, variance
