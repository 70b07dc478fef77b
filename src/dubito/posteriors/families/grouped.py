"""Weights with a random factor for every unit: Bayesian compression (Louizos, Ullrich & Welling 2017) and multiplicative
normalizing flows (Louizos & Welling 2017)."""

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
from dubito.posteriors.families.family import (
    LOG_TWO_PI,
    Drawing,
    ScaledFamily,
    log_scales,
    pick,
    reparametrize,
    standard_entropy,
    total,
)
from dubito.posteriors.families.reparametrized import TINY, Estimator, LayerCall, Layers, Reparametrized, names_in
from dubito.tensors import tree
from dubito.tensors.checks import at_least, one_of, positive, require
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


@dataclass(frozen=True)
class Flow(ScaledFamily):
    r"""Gaussian weights whose means are multiplied by one random factor for each unit, drawn from a normalizing flow:

    .. math:: w_{ij} \sim N(z_i \mu_{ij}, \sigma_{ij}^2), \qquad z = f(z_0), \quad z_0 \sim N(m, s^2).

    A step of the flow keeps every other unit and moves the rest by a gate g and a shift t that depend on those kept:
    :math:`z \leftarrow g z + (1 - g) t`. Weights are therefore correlated, and q may have several modes. Units are the inputs of a
    matrix and the filters of a convolution.

    The density of w is an intractable integral over z. A learned auxiliary distribution r(z | w) gives a bound:
    :math:`\mathrm{KL}(q \| p) \le E[\mathrm{KL}(q(w \mid z) \| p) + \log q(z) - \log r(z \mid w)]`.

    >>> q = Flow(hidden=4)
    >>> leaves = q.leaves({"w": torch.ones(2, 3)}, {"w": torch.full((2, 3), 0.1)})
    >>> q.draw(leaves, q.noise(leaves, torch.Generator().manual_seed(0)))["w"].shape
    torch.Size([2, 3])
    """

    steps: int = 2  # of the flow of z, and of that of r
    hidden: int = 50  # hidden units of the networks of gate and shift

    def __post_init__(self):
        at_least(1, steps=self.steps, hidden=self.hidden)

    def leaves(self, start: Params, scale: Params) -> Params:
        """Means and rho of all weights, and for each weight with units the start and the networks of the two flows, small at first."""
        leaves, generator = super().leaves(start, scale), torch.Generator().manual_seed(0)
        for name, leaf in start.items():
            if leaf.ndim < 2:
                continue
            units = leaf.shape[unit_axis(leaf)]

            def _small(*shape: int, leaf: Tensor = leaf) -> Tensor:
                return 0.1 * torch.randn(*shape, generator=generator).to(leaf) / math.sqrt(shape[-1])

            leaves |= {f"start/{name}": leaf.new_ones(units), f"start_spread/{name}": leaf.new_full((units,), math.log(0.1))}
            for flow in ("flow", "back"):
                leaves[f"{flow}_in/{name}"] = _small(self.steps, self.hidden, units)
                leaves[f"{flow}_gate/{name}"] = _small(self.steps, units, self.hidden)
                leaves[f"{flow}_shift/{name}"] = _small(self.steps, units, self.hidden)
            leaves |= {f"{kind}/{name}": _small(units) for kind in ("look", "where", "sure")}
        return leaves

    def _flow(self, leaves: Params, name: str, z: Tensor, which: str) -> tuple[Tensor, Tensor]:
        """z after the steps of the flow `which`, and the log determinant of the Jacobian."""
        logdet = z.new_zeros(())
        units = torch.arange(len(z), device=z.device)
        for k in range(self.steps):
            kept = (units % 2 == k % 2).to(z)
            hidden = torch.tanh(leaves[f"{which}_in/{name}"][k] @ (kept * z))
            gate = torch.sigmoid(leaves[f"{which}_gate/{name}"][k] @ hidden + 2.0)  # close to 1 at the start
            shift = leaves[f"{which}_shift/{name}"][k] @ hidden
            z = kept * z + (1 - kept) * (gate * z + (1 - gate) * shift)
            logdet = logdet + ((1 - kept) * gate.log()).sum()
        return z, logdet

    def _factors(self, leaves: Params, noise: Params, name: str) -> tuple[Tensor, Tensor]:
        """z, and log q(z)."""
        eps, spread = noise[f"unit/{name}"], leaves[f"start_spread/{name}"]
        z, logdet = self._flow(leaves, name, leaves[f"start/{name}"] + spread.exp() * eps, "flow")
        return z, -0.5 * (eps.square() + LOG_TWO_PI).sum() - spread.sum() - logdet

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A standard normal number for every weight and for every unit."""
        starts = pick(leaves, "start")
        units = {f"unit/{name}": torch.empty_like(leaf).normal_(generator=generator) for name, leaf in starts.items()}
        return {**super().noise(leaves, generator), **units}

    def _conditional(self, leaves: Params, noise: Params) -> tuple[Params, Tensor, Params]:
        """The mean of every weight given z; log q(z); z by the name of its weight."""
        means = dict(pick(leaves, "mean"))
        logs, factors = [next(iter(means.values())).new_zeros(())], {}
        for name, leaf in means.items():
            if leaf.ndim >= 2:
                factors[name], log = self._factors(leaves, noise, name)
                means[name] = leaf * broadcast_units(factors[name], leaf)
                logs.append(log)
        return means, total(logs), factors

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`z \mu + \sigma \epsilon` with z drawn from the flow."""
        return reparametrize(self._conditional(leaves, noise)[0], self.scales(leaves), noise)

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor:
        """The bound on the KL divergence above, estimated by one draw of z and, where E[ln p] has no closed form, of w."""
        scales, (means, log_q, factors) = self.scales(leaves), self._conditional(leaves, noise)
        drawn = reparametrize(means, scales, noise)
        entropy = log_scales(scales) + standard_entropy(scales)
        expected = prior.expected_log_prob({**means, **hyper}, tree.apply(torch.square, scales), independent=True)
        if expected is None:
            expected = prior.log_prob({**drawn, **hyper})
        log_r = total([self._auxiliary(leaves, name, z, drawn[name]) for name, z in factors.items()] or [log_q * 0])
        return -entropy - expected + log_q - log_r

    def _auxiliary(self, leaves: Params, name: str, z: Tensor, weight: Tensor) -> Tensor:
        """log r(z | w)."""
        matrix = weight.movedim(unit_axis(weight), 0).flatten(1)  # [units, others]
        feature = torch.tanh(leaves[f"look/{name}"] @ matrix).mean()
        back, logdet = self._flow(leaves, name, z, "back")
        mean, log_precision = leaves[f"where/{name}"] * feature, leaves[f"sure/{name}"] * feature
        return (0.5 * log_precision - 0.5 * log_precision.exp() * (back - mean).square() - 0.5 * LOG_TWO_PI).sum() + logdet
