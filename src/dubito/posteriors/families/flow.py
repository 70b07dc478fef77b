"""Multiplicative normalizing flows (Louizos & Welling 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.model.priors import Prior
from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.grouped import along, unit_axis
from dubito.posteriors.families.mean_field import noise_like
from dubito.tensors import tree
from dubito.tensors.tree import Params

LOG_TWO_PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Flow(Family):
    r"""Gaussian weights whose means are multiplied by one random factor a unit, and these come from a flow:

    .. math:: w_{ij} \sim N(z_i \mu_{ij}, \sigma_{ij}^2), \qquad z = f(z_0), \quad z_0 \sim N(m, s^2).

    A step of the flow keeps every other unit and moves the rest, in turn, by a gate g and a shift t that depend on those kept:
    :math:`z \leftarrow g z + (1 - g) t`. So weights vary together, in more than one mode if need be. Units are the inputs of a
    matrix and the filters of a convolution.

    The density of w is an integral over z that nobody can do; an auxiliary distribution r(z | w), learned too, bounds it:
    :math:`\mathrm{KL}(q \| p) \le E[\mathrm{KL}(q(w \mid z) \| p) + \log q(z) - \log r(z \mid w)]`.

    >>> q = Flow(hidden=4)
    >>> leaves = q.leaves({"w": torch.ones(2, 3)}, {"w": torch.full((2, 3), 0.1)})
    >>> q.draw(leaves, q.noise(leaves, torch.Generator().manual_seed(0)))["w"].shape
    torch.Size([2, 3])
    """

    steps: int = 2  # of the flow, and of the auxiliary one
    hidden: int = 50  # units of the networks that gate and shift

    def __post_init__(self):
        if self.steps < 1 or self.hidden < 1:
            raise ValueError(f"steps and hidden are at least 1; got {self.steps} and {self.hidden}")

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        made = {**of_kind("mean", tree.clone(start)), **of_kind("rho", tree.apply(inverse_softplus, scale))}
        generator = torch.Generator().manual_seed(0)
        for name, leaf in start.items():
            if leaf.ndim < 2:
                continue
            units = leaf.shape[unit_axis(leaf)]

            def small(*shape: int, leaf: Tensor = leaf) -> Tensor:
                """Small random numbers."""
                return 0.1 * torch.randn(*shape, generator=generator).to(leaf) / math.sqrt(shape[-1])

            made |= {f"start/{name}": leaf.new_ones(units), f"start_spread/{name}": leaf.new_full((units,), math.log(0.1))}
            for which in ("flow", "back"):
                made[f"{which}_in/{name}"] = small(self.steps, self.hidden, units)
                made[f"{which}_gate/{name}"] = small(self.steps, units, self.hidden)
                made[f"{which}_shift/{name}"] = small(self.steps, units, self.hidden)
            made |= {f"look/{name}": small(units), f"where/{name}": small(units), f"sure/{name}": small(units)}
        return made

    def _flow(self, leaves: Params, name: str, z: Tensor, which: str) -> tuple[Tensor, Tensor]:
        """z after the steps, and the log determinant of its slope."""
        total = z.new_zeros(())
        places = torch.arange(len(z), device=z.device)
        for k in range(self.steps):
            kept = (places % 2 == k % 2).to(z)
            hidden = torch.tanh(leaves[f"{which}_in/{name}"][k] @ (kept * z))
            gate = torch.sigmoid(leaves[f"{which}_gate/{name}"][k] @ hidden + 2.0)  # opens wide at the start
            shift = leaves[f"{which}_shift/{name}"][k] @ hidden
            z = kept * z + (1 - kept) * (gate * z + (1 - gate) * shift)
            total = total + ((1 - kept) * gate.log()).sum()
        return z, total

    def _factors(self, leaves: Params, noise: Params, name: str) -> tuple[Tensor, Tensor]:
        """z, and log q(z)."""
        eps, spread = noise[f"unit/{name}"], leaves[f"start_spread/{name}"]
        z, logdet = self._flow(leaves, name, leaves[f"start/{name}"] + spread.exp() * eps, "flow")
        return z, -0.5 * (eps.square() + LOG_TWO_PI).sum() - spread.sum() - logdet

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        mean = kind(leaves, "mean")
        units = {
            f"unit/{name}": torch.empty_like(leaf).normal_(generator=generator) for name, leaf in kind(leaves, "start").items()
        }
        return {**noise_like(mean, generator), **units}

    def _given(self, leaves: Params, noise: Params) -> tuple[Params, Params, Tensor, dict[str, Tensor]]:
        """Mean and scale of every weight given z; log q(z); z."""
        mean, scales = kind(leaves, "mean"), tree.apply(F.softplus, kind(leaves, "rho"))
        found, logs, factors = {}, [mean[next(iter(mean))].new_zeros(())], {}
        for name, leaf in mean.items():
            if leaf.ndim < 2:
                found[name] = leaf
                continue
            factors[name], log = self._factors(leaves, noise, name)
            found[name] = leaf * along(factors[name], leaf)
            logs.append(log)
        return found, scales, torch.stack(logs).sum(), factors

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        mean, scales, *_ = self._given(leaves, noise)
        return {name: torch.addcmul(leaf, scales[name], noise[name]) for name, leaf in mean.items()}

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor:
        """KL(q || p), or an estimate of it."""
        mean, scales, log_q, factors = self._given(leaves, noise)
        drawn = {name: torch.addcmul(leaf, scales[name], noise[name]) for name, leaf in mean.items()}
        entropy = torch.stack([scale.log().sum() for scale in scales.values()]).sum()
        entropy = entropy + tree.size(scales) * 0.5 * (1 + LOG_TWO_PI)
        expected = prior.expected_log_prob({**mean, **hyper}, tree.apply(torch.square, scales), independent=True)
        if expected is None:
            expected = prior.log_prob({**drawn, **hyper})
        log_r = torch.stack([self._auxiliary(leaves, name, z, drawn[name]) for name, z in factors.items()] or [log_q * 0]).sum()
        return -entropy - expected + log_q - log_r

    def _auxiliary(self, leaves: Params, name: str, z: Tensor, weight: Tensor) -> Tensor:
        """log r(z | w)."""
        matrix = weight.movedim(unit_axis(weight), 0).flatten(1)  # [units, others]
        seen = torch.tanh(leaves[f"look/{name}"] @ matrix).mean()
        back, logdet = self._flow(leaves, name, z, "back")
        mean, log_precision = leaves[f"where/{name}"] * seen, leaves[f"sure/{name}"] * seen
        return (0.5 * log_precision - 0.5 * log_precision.exp() * (back - mean).square() - 0.5 * LOG_TWO_PI).sum() + logdet
