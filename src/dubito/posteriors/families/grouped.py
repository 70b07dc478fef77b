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
from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.mean_field import noise_like
from dubito.posteriors.families.reparametrized import LINEAR, TINY, Estimator, Reparametrized
from dubito.tensors import tree
from dubito.tensors.tree import Params

# -KL of a Gaussian to the log-uniform prior, fitted by Molchanov, Ashukha & Vetrov (2017): right to three digits
K = (0.63576, 1.87320, 1.48695)


def unit_axis(weight: Tensor) -> int:
    """The axis of a weight whose units share a factor: the inputs of a matrix, the filters (outputs) of a convolution."""
    return 1 if weight.ndim == 2 else 0


@dataclass(frozen=True)
class Grouped(Family):
    r"""A weight is :math:`w_{ij} = z_i \tilde w_{ij}`, where a sparse prior on z can switch off a whole unit: an input of a linear
    layer, a filter of a convolution. The prior comes with the family, and the model's own is not used:
    :math:`\tilde w \sim N(0, 1)`, and

    - `prior="normal_jeffreys"`: :math:`p(z) \propto 1 / |z|`, :math:`q(z) = N(\mu_z, \sigma_z^2)`. It is improper, so the ELBO is known
      up to a constant only, and is no bound (Hron et al. 2018).
    - `prior="horseshoe"`: :math:`z_i = s\, t_i` with half-Cauchy :math:`t_i \sim C^+(0, 1)`, :math:`s \sim C^+(0, \tau)`, one s
      for each layer. A squared half-Cauchy is a gamma times an inverse-gamma variable, and q is log-normal for each.

    `units` gives a score for every unit, the larger the less it is needed: :math:`\ln \sigma_z^2 / \mu_z^2`, or minus the log of
    z's mode. `dubito.compress` cuts those units out.

    >>> q = Grouped()
    >>> leaves = q.leaves({"w": torch.ones(2, 3)}, {"w": torch.full((2, 3), 0.1)})
    >>> q.units(leaves)["w"].shape
    torch.Size([3])
    """

    prior: Literal["normal_jeffreys", "horseshoe"] = "normal_jeffreys"
    tau: float = 1e-5  # scale of the horseshoe's global factor
    # largest standard deviation of a weight, or {pattern of names: it}; keeps the first steps from wandering. Below the prior's one, a
    # limit also takes from what is gained by switching a unit off, namely that its weights may go back to the prior
    limit: float | Mapping[str, float] | None = None

    def __post_init__(self):
        if (
            self.prior not in ("normal_jeffreys", "horseshoe")
            or not self.tau > 0
            or not all(limit > 0 for limit in self._limits.values())
        ):
            raise ValueError(
                f"prior is 'normal_jeffreys' or 'horseshoe', tau and limit positive; got {self.prior!r}, {self.tau}, {self.limit}"
            )

    local: ClassVar[bool] = True

    @property
    def _limits(self) -> Mapping[str, float]:
        return {} if self.limit is None else self.limit if isinstance(self.limit, Mapping) else {"": self.limit}

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        for pattern in self._limits:
            if not any(re.search(pattern, name) for name in start):
                raise ValueError(f"the limit's pattern {pattern!r} matches no weight; there are {list(start)}")
        made = {**of_kind("mean", tree.clone(start)), **of_kind("rho", tree.apply(inverse_softplus, scale))}
        self.bounded(made)
        small = math.log(1e-2)  # standard deviations of the factors, or of their logarithms, at the start
        for name, leaf in start.items():
            if leaf.ndim < 2:
                continue
            one = leaf.new_zeros(leaf.shape[unit_axis(leaf)])
            if self.prior == "normal_jeffreys":
                made |= {f"factor/{name}": one + 1, f"spread/{name}": one + small}
                continue
            # of a (gamma) and b (inverse-gamma), whose product is z^2; the global ones have one entry. These begin where their prior
            # is, a at tau^2: from 1, which costs 1 / tau^2 nats, it would take 2 ln(1 / tau) / learning_rate steps to get there. The
            # units begin as exceptions from that, with factors of one: what is not needed then falls back to the global factor
            far = 2 * math.log(self.tau)
            for part, whole, own in (("gamma", far, 0.0), ("inverse", 0.0, -far)):
                made |= {f"{part}/{name}": one + own, f"{part}_spread/{name}": one + small}
                made |= {
                    f"all_{part}/{name}": leaf.new_full((1,), whole),
                    f"all_{part}_spread/{name}": leaf.new_full((1,), small),
                }
        return made

    # ---- the factors

    def grouped(self, leaves: Params) -> list[str]:
        """The weights that have factors."""
        return [name for name, leaf in kind(leaves, "mean").items() if leaf.ndim >= 2]

    def _log_factor(self, leaves: Params, name: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of log z under the log-normal posterior of a horseshoe."""
        parts = ("gamma", "inverse", "all_gamma", "all_inverse")
        mean = 0.5 * sum(leaves[f"{part}/{name}"] for part in parts)
        variance = 0.25 * sum((2 * leaves[f"{part}_spread/{name}"]).exp() for part in parts)
        return torch.as_tensor(mean), torch.as_tensor(variance)

    def factor_moments(self, leaves: Params, name: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of z."""
        if self.prior == "normal_jeffreys":
            return leaves[f"factor/{name}"], (2 * leaves[f"spread/{name}"]).exp()
        mean, variance = self._log_factor(leaves, name)
        first = (mean + variance / 2).exp()
        return first, first.square() * torch.expm1(variance)

    def factors(self, leaves: Params, name: str, noise: Tensor) -> Tensor:
        """z, of standard normal noise [..., units]."""
        if self.prior == "normal_jeffreys":
            return leaves[f"factor/{name}"] + leaves[f"spread/{name}"].exp() * noise
        mean, variance = self._log_factor(leaves, name)
        return (mean + variance.sqrt() * noise).exp()

    def units(self, leaves: Params) -> Params:
        """How little each unit is needed."""
        found = {}
        for name in self.grouped(leaves):
            if self.prior == "normal_jeffreys":
                mean, variance = self.factor_moments(leaves, name)
                found[name] = variance.log() - mean.square().clamp_min(1e-20).log()
            else:
                mean, variance = self._log_factor(leaves, name)
                found[name] = variance - mean
        return found

    # ---- q

    def scales(self, leaves: Params) -> Params:
        """Standard deviations of every weight."""
        return tree.apply(F.softplus, kind(leaves, "rho"))

    def bounded(self, leaves: Params) -> None:
        """Put leaves back into their bounds."""
        # here and not in `scales`: a clamped scale has no slope, so what had once come to the limit could never leave it
        for pattern, limit in self._limits.items():
            for name, rho in kind(leaves, "rho").items():
                if re.search(pattern, name):
                    rho.clamp_(max=math.log(math.expm1(limit)))

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        mean = kind(leaves, "mean")
        units = {
            f"unit/{name}": mean[name].new_empty(mean[name].shape[unit_axis(mean[name])]).normal_(generator=generator)
            for name in self.grouped(leaves)
        }
        return {**noise_like(mean, generator), **units}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        scales, drawn = self.scales(leaves), {}
        for name, mean in kind(leaves, "mean").items():
            drawn[name] = torch.addcmul(mean, scales[name], noise[name])
            if mean.ndim >= 2:
                drawn[name] = drawn[name] * along(self.factors(leaves, name, noise[f"unit/{name}"]), mean)
        return drawn

    def weight_moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight; the weights of a unit are not Gaussian, and vary together."""
        mean, variance, scales = {}, {}, self.scales(leaves)
        for name, leaf in kind(leaves, "mean").items():
            mean[name], variance[name] = leaf, scales[name].square()
            if leaf.ndim >= 2:
                z, spread = (along(part, leaf) for part in self.factor_moments(leaves, name))
                variance[name] = z.square() * variance[name] + spread * leaf.square() + spread * variance[name]
                mean[name] = z * leaf
        return mean, variance

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor:
        """KL(q || p), or an estimate of it."""
        scales, total = self.scales(leaves), []
        for name, mean in kind(leaves, "mean").items():
            total.append((0.5 * (scales[name].square() + mean.square() - 1) - scales[name].log()).sum())
        for name in self.grouped(leaves):
            if self.prior == "normal_jeffreys":
                alpha = self.units(leaves)[name]
                k1, k2, k3 = K
                total.append(-(k1 * torch.sigmoid(k2 + k3 * alpha) - 0.5 * F.softplus(-alpha) - k1).sum())
                continue
            for part, tau in (("", 1.0), ("all_", self.tau)):
                a, b = leaves[f"{part}gamma/{name}"], leaves[f"{part}inverse/{name}"]
                u, v = leaves[f"{part}gamma_spread/{name}"], leaves[f"{part}inverse_spread/{name}"]  # log standard deviations
                gamma = 0.5 * (a + 2 * u + 1 + math.log(2)) - (a + (2 * u).exp() / 2).exp() / tau**2 - math.log(tau)
                inverse = 0.5 * (-b + 2 * v + 1 + math.log(2)) - ((2 * v).exp() / 2 - b).exp()
                total.append(-(gamma.sum() + inverse.sum()))
        return torch.stack(total).sum()

    def outputs(
        self, leaves: Params, layers: dict[str, str | None], estimator: Estimator, generator: torch.Generator
    ) -> tuple[Params, Reparametrized]:
        """What draws the outputs of layers."""
        mean, scales = kind(leaves, "mean"), self.scales(leaves)
        names = [name for pair in layers.items() for name in pair if name is not None]
        return {name: mean[name] for name in names}, _Factored(self, leaves, mean, scales, layers, estimator, generator)


class _Factored(Reparametrized):
    """Draws a factor for every unit of every example, and then the outputs."""

    def __init__(self, family: Grouped, leaves: Params, means, scales, layers, estimator, generator):
        super().__init__(means, scales, layers, "flipout", generator)  # no leaves of its own
        self.family, self.own = family, leaves

    def _drawn(self, func, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple, options: dict) -> Tensor:
        own = self.layers[name]
        bias_scale = None if own is None else self.scales[own]
        units = weight.shape[unit_axis(weight)]
        noise = x.new_empty(x.shape[0], units).normal_(generator=self.generator)
        z = self.family.factors(self.own, name, noise)  # [B, units]
        if func in LINEAR:
            x = x * z.view(len(z), *[1] * (x.ndim - 2), units)
        mean = func(x, weight, None, *rest, **options)
        variance = func(x.square(), self.scales[name].square(), None, *rest, **options)
        drawn = torch.addcmul(mean, variance.clamp_min(TINY).sqrt(), self._normal(mean))
        if func not in LINEAR:
            drawn = drawn * z.view(len(z), units, *[1] * (drawn.ndim - 2))
        if bias is not None:
            channel = -1 if func in LINEAR else 1
            shape = [len(z), *[1] * (drawn.ndim - 1)]
            shape[channel] = len(bias)
            if bias_scale is None:  # a bias that is not Bayesian
                return drawn + bias.view([1, *shape[1:]])
            noise = x.new_empty(len(z), len(bias)).normal_(generator=self.generator)
            drawn = drawn + (bias + bias_scale * noise).view(shape)
        return drawn


def along(units: Tensor, weight: Tensor) -> Tensor:
    """A vector over units, shaped to multiply a weight."""
    shape = [1] * weight.ndim
    shape[unit_axis(weight)] = len(units)
    return units.view(shape)
