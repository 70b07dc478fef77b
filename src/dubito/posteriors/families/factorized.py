"""Independent weights: of any distribution, drawn by the inverse of its distribution function, or with one of two values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, distributions

from dubito._moved import renamed
from dubito.model.priors import Bernoulli, ByName, Prior
from dubito.posteriors.families.family import Family, ScaledFamily, label, pick, pick_weight, total
from dubito.posteriors.families.gaussian import MeanField
from dubito.tensors.checks import positive, require
from dubito.tensors.tree import Params

SHAPES: dict[str, Callable[[Tensor, Tensor], distributions.Distribution]] = {
    "normal": distributions.Normal,
    "laplace": distributions.Laplace,
    "cauchy": distributions.Cauchy,
    "logistic": lambda loc, scale: distributions.TransformedDistribution(
        distributions.Uniform(torch.zeros_like(loc), torch.ones_like(loc)),
        [distributions.SigmoidTransform().inv, distributions.AffineTransform(loc, scale)],
    ),
    "uniform": lambda loc, scale: distributions.Uniform(loc - scale, loc + scale, validate_args=False),
}
EDGE = 1e-6  # smallest distance of uniform numbers from 0 and 1, where the inverse may be infinite


@dataclass(frozen=True)
class Factorized(ScaledFamily):
    r"""Independent weights of any distribution with a location and a scale: :math:`w = F^{-1}_{\mu, \sigma}(u)` with uniform u.

    `shape` is "normal", "laplace", "logistic", "cauchy" or "uniform". For another distribution derive a class from this one and
    override `distribution`. Density and entropy are those of the torch distribution. A distribution with bounded support cannot match
    the tails of an unbounded prior, but it may suit a quantizer.

    >>> q = Factorized("laplace")
    >>> leaves = q.leaves({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    >>> q.draw(leaves, {"w": torch.tensor([0.5])})["w"]                      # the median
    tensor([0.])
    """

    shape: str = "laplace"
    stored_name: ClassVar[str] = "Factorised"  # in checkpoints, as version 0.1 wrote it

    def __post_init__(self):
        require(
            self.shape in SHAPES or self._is_derived,
            f"shape must be one of {', '.join(SHAPES)}; got {self.shape!r}: for another distribution derive from Factorized",
        )

    @property
    def _is_derived(self) -> bool:
        return type(self) is not Factorized

    def distribution(self, location: Tensor, scale: Tensor) -> distributions.Distribution:
        """The distribution of weights with the given locations and scales: a torch distribution with `icdf` and `log_prob`."""
        return SHAPES[self.shape](location, scale)

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A uniform number in (0, 1) for every weight."""
        return uniform_like(pick(leaves, "mean"), generator)

    def _distributions(self, leaves: Params) -> dict[str, distributions.Distribution]:
        scales = self.scales(leaves)
        return {name: self.distribution(mean, scales[name]) for name, mean in pick(leaves, "mean").items()}

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`F^{-1}_{\mu, \sigma}(u)`."""
        return {name: q.icdf(noise[name]) for name, q in self._distributions(leaves).items()}

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """The sum of the log densities of the weights."""
        return total(q.log_prob(params[name]).sum() for name, q in self._distributions(leaves).items())

    def weight_moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight, if they are finite and known."""
        if self.shape == "logistic" and not self._is_derived:  # torch does not know these
            return pick(leaves, "mean"), {name: (scale * math.pi).square() / 3 for name, scale in self.scales(leaves).items()}
        try:
            mean, variance = {}, {}
            for name, q in self._distributions(leaves).items():
                mean[name], variance[name] = q.mean, q.variance
        except NotImplementedError:
            return None
        return (mean, variance) if all(bool(leaf.isfinite().all()) for leaf in variance.values()) else None

    def entropy(self, leaves: Params) -> Tensor | None:
        """The sum of the entropies of the weights, if torch knows them."""
        try:
            return total(q.entropy().sum() for q in self._distributions(leaves).values())
        except NotImplementedError:
            return None


def uniform_like(leaves: Params, generator: torch.Generator) -> Params:
    """Uniform numbers in (0, 1), not too near to its ends, in the shapes of some tensors."""
    return {
        name: torch.empty_like(leaf, requires_grad=False).uniform_(EDGE, 1 - EDGE, generator=generator)
        for name, leaf in leaves.items()
    }


__getattr__ = renamed(__name__, {"Factorised": "Factorized"})


@dataclass(frozen=True)
class Binary(Family):
    r"""Independent weights with one of two `values`: the second with probability :math:`\sigma(l)`, otherwise the first.

    In training they are relaxed so that they have a gradient (Maddison et al. 2017):
    :math:`w = a + (b - a)\, \sigma((l + \ln u - \ln(1 - u)) / \lambda)` with u uniform in (0, 1) and the `temperature`
    :math:`\lambda`. The prior must be `priors.Bernoulli` with the same values; the divergence is the exact one of the discrete weights.

    Each tensor of weights has a scale, which multiplies both values and is learned as a point. It starts where outputs are as large as
    inputs, at :math:`1 / \sqrt{\text{fan-in}}` for values of ±1. `learn_scale=False` leaves the values as they are; sums over many
    inputs are then so large that deep networks hardly train.

    `at` is a pattern of the names of binary weights; the others are independent Gaussians. The prior is then
    `priors.ByName({"weight": Bernoulli(0.5, values=(-1, 1)), "": Normal(scale=1.0)})`.

    >>> q = Binary((-1.0, 1.0), learn_scale=False)
    >>> leaves = q.leaves({"w": torch.zeros(4)}, {"w": torch.ones(4)})
    >>> q.sample(leaves, q.noise(leaves, torch.Generator().manual_seed(0)))["w"].abs()
    tensor([1., 1., 1., 1.])
    """

    values: tuple[float, float] = (0.0, 1.0)
    temperature: float = field(default=0.5, kw_only=True)
    at: str = field(default="", kw_only=True)  # a pattern of names
    learn_scale: bool = field(default=True, kw_only=True, metadata={"before": False})  # a learned factor of each tensor's values

    def __post_init__(self):
        right = len(self.values) == 2 and -math.inf < self.values[0] < self.values[1] < math.inf
        require(right, f"values must be two finite numbers in increasing order; got {self.values}")
        low, high = self.values
        positive(temperature=self.temperature)
        object.__setattr__(self, "values", (low, high))  # a list if it comes from a file

    def leaves(self, start: Params, scale: Params) -> Params:
        """Logits between -1 and 1 towards the nearer value, logarithms of the scales, and means and rho of the other weights."""
        low, high = self.values
        binary = {name: leaf for name, leaf in start.items() if re.search(self.at, name)}
        require(binary, f"at={self.at!r} matches none of the weights, which are {list(start)[:8]}")
        size = ((low**2 + high**2) / 2) ** 0.5
        first = {
            n: size**-1 * leaf[0].numel() ** -0.5 if leaf.ndim > 1 else 1.0 for n, leaf in binary.items() if self.learn_scale
        }
        sizes = {name: torch.full_like(start[name].flatten()[0], math.log(value)) for name, value in first.items()}
        middles = {name: (leaf / first.get(name, 1.0) - (low + high) / 2) / (high - low) for name, leaf in binary.items()}
        logits = {name: (2 * leaf).clamp(-1, 1) for name, leaf in middles.items()}
        rest = {name: leaf for name, leaf in start.items() if name not in binary}
        others = MeanField().leaves(rest, {name: scale[name] for name in rest})
        return {**label("logit", logits), **label("log_size", sizes), **others}

    def _size(self, leaves: Params, name: str) -> Tensor | float:
        """What multiplies the values of a tensor: 1 without a learned scale, as in posteriors of version 0.1."""
        size = leaves.get(f"log_size/{name}")
        return 1.0 if size is None else size.exp()

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A uniform number for every binary weight, and a standard normal one for the others."""
        return {**uniform_like(pick(leaves, "logit"), generator), **MeanField().noise(leaves, generator)}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Relaxed weights, between the two values, and Gaussian ones."""
        low, high = self.values
        relaxed = {
            name: (low + (high - low) * torch.sigmoid((leaf + torch.logit(noise[name])) / self.temperature))
            * self._size(leaves, name)
            for name, leaf in pick(leaves, "logit").items()
        }
        return {**relaxed, **MeanField().draw(leaves, noise)}

    def sample(self, leaves: Params, noise: Params) -> Params:
        """As `draw`, with relaxed weights rounded to the nearer value."""
        low, high = self.values
        drawn = self.draw(leaves, noise)
        for name, logit in pick(leaves, "logit").items():
            drawn[name] = torch.where(logit + torch.logit(noise[name]) > 0, high, low).to(logit) * self._size(leaves, name)
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
            p, size = torch.sigmoid(logit), self._size(leaves, name)
            mean[name], variance[name] = size * (low + (high - low) * p), (size * (high - low)) ** 2 * p * (1 - p)
        return mean, variance
