"""Weights with a random factor for every unit: Bayesian compression (Louizos, Ullrich & Welling 2017)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.model.priors import Prior
from dubito.posteriors.families.family import Drawing, ScaledFamily
from dubito.posteriors.families.leaves import pick, total
from dubito.posteriors.families.reparametrized import TINY, Estimator, LayerCall, Layers, Reparametrized, names_in
from dubito.tensors.checks import one_of, positive, require
from dubito.tensors.tree import Params

# -KL of a Gaussian to the log-uniform prior, fitted by Molchanov, Ashukha & Vetrov (2017): correct to three digits
K = (0.63576, 1.87320, 1.48695)
SMALL = math.log(1e-2)  # log standard deviation of the factors, or of their logarithms, at the start


def unit_axis(weight: Tensor) -> int:
    """The axis of a weight whose units share a factor: the inputs of a matrix, the filters (outputs) of a convolution."""
    return 1 if weight.ndim == 2 else 0


def broadcast_units(units: Tensor, weight: Tensor) -> Tensor:
    """A vector over the units of a weight, in a shape that multiplies the weight."""
    shape = [1] * weight.ndim
    shape[unit_axis(weight)] = len(units)
    return units.view(shape)


class NormalJeffreys:
    r"""The prior :math:`p(z) \propto 1 / |z|` with :math:`q(z) = N(\mu_z, \sigma_z^2)`."""

    def leaves(self, name: str, zeros: Tensor) -> Params:
        """Factors of 1, with small standard deviations."""
        return {f"factor/{name}": zeros + 1, f"spread/{name}": zeros + SMALL}

    def moments(self, leaves: Params, name: str) -> tuple[Tensor, Tensor]:
        r""":math:`\mu_z` and :math:`\sigma_z^2`."""
        return leaves[f"factor/{name}"], (2 * leaves[f"spread/{name}"]).exp()

    def draw(self, leaves: Params, name: str, noise: Tensor) -> Tensor:
        r""":math:`\mu_z + \sigma_z \epsilon`."""
        return leaves[f"factor/{name}"] + leaves[f"spread/{name}"].exp() * noise

    def score(self, leaves: Params, name: str) -> Tensor:
        r""":math:`\ln \alpha = \ln \sigma_z^2 / \mu_z^2`."""
        mean, variance = self.moments(leaves, name)
        return variance.log() - mean.square().clamp_min(1e-20).log()

    def divergences(self, leaves: Params, name: str) -> list[Tensor]:
        """KL(q(z) || p(z)) up to a constant, by the fit of Molchanov et al. (2017)."""
        alpha, (k1, k2, k3) = self.score(leaves, name), K
        return [-(k1 * torch.sigmoid(k2 + k3 * alpha) - 0.5 * F.softplus(-alpha) - k1).sum()]


@dataclass(frozen=True)
class Horseshoe:
    r"""The prior :math:`z_i = s\, t_i` with :math:`t_i \sim C^+(0, 1)` and one :math:`s \sim C^+(0, \tau)` for each layer.

    The square of a half-Cauchy variable is the product of a gamma and an inverse-gamma variable. These four, "gamma" and "inverse" of
    the units, "all_gamma" and "all_inverse" of the layer, have log-normal posteriors.
    """

    tau: float

    def leaves(self, name: str, zeros: Tensor) -> Params:
        r"""Factors of 1. The global factor starts at its prior, :math:`\tau`, and the units as exceptions from it.

        From 1, which costs :math:`1 / \tau^2` nats, it would need :math:`2 \ln(1 / \tau)` / learning_rate steps to get there. The
        factors of units that are not needed fall back to the global one.
        """
        far, leaves = 2 * math.log(self.tau), {}
        for kind, layer, unit in (("gamma", far, 0.0), ("inverse", 0.0, -far)):
            leaves |= {f"{kind}/{name}": zeros + unit, f"{kind}_spread/{name}": zeros + SMALL}
            leaves |= {
                f"all_{kind}/{name}": zeros.new_full((1,), layer),
                f"all_{kind}_spread/{name}": zeros.new_full((1,), SMALL),
            }
        return leaves

    def log_moments(self, leaves: Params, name: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of ln z, which is Gaussian."""
        kinds = ("gamma", "inverse", "all_gamma", "all_inverse")
        mean = 0.5 * sum(leaves[f"{kind}/{name}"] for kind in kinds)
        variance = 0.25 * sum((2 * leaves[f"{kind}_spread/{name}"]).exp() for kind in kinds)
        return torch.as_tensor(mean), torch.as_tensor(variance)

    def moments(self, leaves: Params, name: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of a log-normal variable."""
        mean, variance = self.log_moments(leaves, name)
        first = (mean + variance / 2).exp()
        return first, first.square() * torch.expm1(variance)

    def draw(self, leaves: Params, name: str, noise: Tensor) -> Tensor:
        """The exponential of a Gaussian draw."""
        mean, variance = self.log_moments(leaves, name)
        return (mean + variance.sqrt() * noise).exp()

    def score(self, leaves: Params, name: str) -> Tensor:
        """Minus the logarithm of the mode of z."""
        mean, variance = self.log_moments(leaves, name)
        return variance - mean

    def divergences(self, leaves: Params, name: str) -> list[Tensor]:
        """The exact KL divergences of the log-normal posteriors of units and layer, which sum to KL(q(z) || p(z))."""
        terms = []
        for prefix, tau in (("", 1.0), ("all_", self.tau)):
            a, b = leaves[f"{prefix}gamma/{name}"], leaves[f"{prefix}inverse/{name}"]
            u, v = leaves[f"{prefix}gamma_spread/{name}"], leaves[f"{prefix}inverse_spread/{name}"]  # log standard deviations
            gamma = 0.5 * (a + 2 * u + 1 + math.log(2)) - (a + (2 * u).exp() / 2).exp() / tau**2 - math.log(tau)
            inverse = 0.5 * (-b + 2 * v + 1 + math.log(2)) - ((2 * v).exp() / 2 - b).exp()
            terms.append(-(gamma.sum() + inverse.sum()))
        return terms


@dataclass(frozen=True)
class Grouped(ScaledFamily):
    r"""Weights :math:`w_{ij} = z_i \tilde w_{ij}` with Gaussian :math:`\tilde w`, where a sparse prior on z can switch off a unit: an
    input of a linear layer, a filter of a convolution. The prior of the model is not used: :math:`\tilde w \sim N(0, 1)`, and

    - `prior="normal_jeffreys"`: :math:`p(z) \propto 1 / |z|`, :math:`q(z) = N(\mu_z, \sigma_z^2)`. This prior is improper: the ELBO is
      known only up to a constant and is no bound (Hron et al. 2018).
    - `prior="horseshoe"`: :math:`z_i = s\, t_i` with half-Cauchy :math:`t_i \sim C^+(0, 1)` and, for each layer, one
      :math:`s \sim C^+(0, \tau)`. Their squares are products of a gamma and an inverse-gamma variable, with log-normal q.

    `units` gives a score for each unit, the larger the less it is needed: :math:`\ln \sigma_z^2 / \mu_z^2`, or minus the log of the
    mode of z. `dubito.compress` removes units by it.

    >>> q = Grouped()
    >>> leaves = q.leaves({"w": torch.ones(2, 3)}, {"w": torch.full((2, 3), 0.1)})
    >>> q.units(leaves)["w"].shape
    torch.Size([3])
    """

    prior: Literal["normal_jeffreys", "horseshoe"] = "normal_jeffreys"
    tau: float = 1e-5  # scale of the global factor of a horseshoe
    # largest standard deviation of a weight, or {pattern of names: largest}; it stabilizes the first steps. A limit below 1, the
    # scale of the prior, also reduces the gain of switching a unit off, since its weights cannot return to the prior
    limit: float | Mapping[str, float] | None = None
    local: ClassVar[bool] = True

    def __post_init__(self):
        one_of(("normal_jeffreys", "horseshoe"), prior=self.prior)
        positive(tau=self.tau)
        for limit in self._limits.values():
            positive(limit=limit)

    @property
    def _limits(self) -> Mapping[str, float]:
        return {} if self.limit is None else self.limit if isinstance(self.limit, Mapping) else {"": self.limit}

    @property
    def factors(self) -> NormalJeffreys | Horseshoe:
        """The posterior of the factors that belongs to the prior."""
        return NormalJeffreys() if self.prior == "normal_jeffreys" else Horseshoe(self.tau)

    def leaves(self, start: Params, scale: Params) -> Params:
        """Means and rho of all weights, and the parameters of the factors."""
        for pattern in self._limits:
            matches = any(re.search(pattern, name) for name in start)
            require(matches, f"the pattern {pattern!r} of limit matches no weight; the weights are {list(start)}")
        leaves = super().leaves(start, scale)
        self.enforce_bounds(leaves)
        for name, leaf in start.items():
            if leaf.ndim >= 2:
                leaves |= self.factors.leaves(name, leaf.new_zeros(leaf.shape[unit_axis(leaf)]))
        return leaves

    def grouped(self, leaves: Params) -> list[str]:
        """The names of the weights that have factors."""
        return [name for name, leaf in pick(leaves, "mean").items() if leaf.ndim >= 2]

    def units(self, leaves: Params) -> Params:
        """A score for each unit, the larger the less the unit is needed."""
        return {name: self.factors.score(leaves, name) for name in self.grouped(leaves)}

    def enforce_bounds(self, leaves: Params) -> None:
        """Limit the scales of the weights."""
        # not in `scales`: a clamped scale has no gradient and could never leave the limit again
        for pattern, limit in self._limits.items():
            for name, rho in pick(leaves, "rho").items():
                if re.search(pattern, name):
                    rho.clamp_(max=math.log(math.expm1(limit)))

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A standard normal number for every weight and for every unit."""
        mean = pick(leaves, "mean")
        units = {
            f"unit/{name}": mean[name].new_empty(mean[name].shape[unit_axis(mean[name])]).normal_(generator=generator)
            for name in self.grouped(leaves)
        }
        return {**super().noise(leaves, generator), **units}

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`z (\mu + \sigma \epsilon)`."""
        scales, drawn = self.scales(leaves), {}
        for name, mean in pick(leaves, "mean").items():
            drawn[name] = torch.addcmul(mean, scales[name], noise[name])
            if mean.ndim >= 2:
                drawn[name] = drawn[name] * broadcast_units(self.factors.draw(leaves, name, noise[f"unit/{name}"]), mean)
        return drawn

    def weight_moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight. The weights of a unit are neither Gaussian nor independent."""
        mean, variance, scales = {}, {}, self.scales(leaves)
        for name, leaf in pick(leaves, "mean").items():
            mean[name], variance[name] = leaf, scales[name].square()
            if leaf.ndim >= 2:
                z, spread = (broadcast_units(moment, leaf) for moment in self.factors.moments(leaves, name))
                variance[name] = z.square() * variance[name] + spread * leaf.square() + spread * variance[name]
                mean[name] = z * leaf
        return mean, variance

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor:
        r"""KL of :math:`\tilde w` to N(0, 1) plus that of the factors; the model's prior is not used."""
        scales, terms = self.scales(leaves), []
        for name, mean in pick(leaves, "mean").items():
            terms.append((0.5 * (scales[name].square() + mean.square() - 1) - scales[name].log()).sum())
        for name in self.grouped(leaves):
            terms += self.factors.divergences(leaves, name)
        return total(terms)

    def outputs(self, leaves: Params, layers: Layers, estimator: Estimator, generator: torch.Generator) -> Drawing:
        """The means, and outputs drawn with factors for every example."""
        means = pick(leaves, "mean")
        drawing = _Factored(self, leaves, means, self.scales(leaves), layers, generator)
        return {name: means[name] for name in names_in(layers)}, drawing


class _Factored(Reparametrized):
    """Draws a factor for every unit of every example, and then the outputs by local reparametrization."""

    def __init__(
        self, family: Grouped, parameters: Params, means: Params, scales: Params, layers: Layers, generator: torch.Generator
    ):
        super().__init__(means, scales, layers, "flipout", generator)  # no leaves of variances
        self.family, self.parameters = family, parameters

    def _draw(self, call: LayerCall, name: str) -> Tensor:
        x, weight, bias = call.x, call.weight, self.layers[name]
        noise = x.new_empty(len(x), weight.shape[unit_axis(weight)]).normal_(generator=self.generator)
        z = self.family.factors.draw(self.parameters, name, noise)  # [B, units]
        if call.linear:
            x = x * call.spread(z, x.ndim)
        mean, variance = call.run(x, weight), call.run(x.square(), self.scales[name].square())
        drawn = torch.addcmul(mean, variance.clamp_min(TINY).sqrt(), self._normal(mean))
        if not call.linear:
            drawn = drawn * call.spread(z, drawn.ndim)
        if call.bias is None:
            return drawn
        shift = call.bias.unsqueeze(0)
        if bias is not None:
            shift = shift + self.scales[bias] * x.new_empty(len(z), len(call.bias)).normal_(generator=self.generator)
        return drawn + call.spread(shift, drawn.ndim)
