"""Multiplicative normalizing flows (Louizos & Welling 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.model.priors import Prior
from dubito.posteriors.families.family import ScaledFamily
from dubito.posteriors.families.grouped import broadcast_units, unit_axis
from dubito.posteriors.families.leaves import LOG_TWO_PI, log_scales, pick, reparametrize, standard_entropy, total
from dubito.tensors import tree
from dubito.tensors.checks import at_least
from dubito.tensors.tree import Params


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
