"""The predictive of a conjugate regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.model.likelihoods import Likelihood, Uncertainty
from dubito.model.likelihoods.special import log_beta, student_t_tail
from dubito.network.examples import as_arrays
from dubito.posteriors.predictive.predictive import Predictive, Units, as_units
from dubito.tensors import tree
from dubito.tensors.checks import between
from dubito.tensors.randomness import fork_rng, fresh_generator


@dataclass(frozen=True)
class StudentT(Predictive):
    r"""The predictive of a conjugate regression with unknown noise: Student-t, exactly.

    Each output is :math:`y = f + \epsilon` with :math:`\sigma^2 \sim \mathrm{InvGamma}(a, b)`,
    :math:`f \mid \sigma^2 \sim N(m, \sigma^2 q)` and :math:`\epsilon \mid \sigma^2 \sim N(0, \sigma^2)`. Then

    .. math:: y \sim t_{2a}\left(m,\; \tfrac{b}{a} (1 + q)\right), \qquad
        \mathrm{Var}[y] = \underbrace{\tfrac{b}{a - 1}}_{\text{aleatoric}} + \underbrace{\tfrac{b}{a - 1}\, q}_{\text{epistemic}}

    For :math:`a \le 1` (two observations or fewer, with a weak prior) the noise has no mean: the variances are infinite, as they should
    be, while densities, quantiles and intervals stay finite. Outputs that share one noise are a joint Student-t, and are scored so.

    >>> import dubito
    >>> one = torch.ones(1, 1, 1)
    >>> p = StudentT(dubito.Gaussian(), 0 * one, one, torch.tensor([3.0]), torch.tensor([4.0]))
    >>> p.uncertainty.total, p.uncertainty.aleatoric
    (tensor([[4.]]), tensor([[2.]]))
    """

    likelihood: Likelihood
    means: Tensor  # [1, B, *D, C]
    spread: Tensor  # q, [1, B, *D, C]: the variance of f in units of the noise's
    shape: Tensor  # a, [C] or, for one noise shared by all outputs, [1]
    rate: Tensor  # b, [C] or [1]

    @property
    def mean(self) -> Tensor:
        """E[y | x, D]: class probabilities, or the regression mean."""
        return self.means[0]

    @property
    def f_mean(self) -> Tensor:
        """Mean of the network's output."""
        return self.means[0]

    @property
    def f_var(self) -> Tensor:
        """Variance of the network's output over the posterior."""
        return self.uncertainty.epistemic

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Total = aleatoric + epistemic."""
        noise = torch.where(self.shape > 1, self.rate / (self.shape - 1), torch.inf).to(self.means).expand_as(self.mean)
        known = torch.where(self.spread[0] > 0, noise * self.spread[0], 0.0)  # not inf * 0, where f is certain
        return Uncertainty(noise + known, noise, known)

    @cached_property
    def scale(self) -> Tensor:
        """The scale of the Student-t, [B, *D, C], in float64: a difference of log gammas needs it."""
        return (self.rate.double() / self.shape.double() * (1 + self.spread[0].double())).sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) for every input, [B]."""
        y, dof = self.likelihood.target(tree.tensors(as_arrays(y)), self.mean), 2 * self.shape.double()
        squares, logs = ((y - self.mean) / self.scale) ** 2, self.scale.log()
        width = 1
        if len(self.shape) < y.shape[-1]:  # one noise for all outputs: what one output shows of it counts for the others
            squares, logs, width = squares.sum(-1, keepdim=True), logs.sum(-1, keepdim=True), y.shape[-1]
        constant = torch.lgamma((dof + width) / 2) - torch.lgamma(dof / 2) - width / 2 * (math.pi * dof).log()
        score = (constant - logs - (dof + width) / 2 * torch.log1p(squares / dof)).sum(-1).to(self.means)
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y for every input."""
        device = self.means.device
        source = fresh_generator(device) if generator is None else generator
        unit = torch.randn((n, *self.mean.shape), generator=source, dtype=torch.float64, device=device)
        seed = int(torch.randint(2**62, (1,), generator=source, device=device))
        with fork_rng(seed):  # torch.distributions draws from the global generator only
            chi2 = torch.distributions.Chi2(2 * self.shape.double()).sample((n, *self.mean.shape[:-1]))
        return (self.mean + self.scale * unit * (2 * self.shape.double() / chi2).sqrt()).to(self.means)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Central interval of every output of a regression."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) of every output on its own, [B, *D, C], for y [B, *D, C]."""
        z = (y - self.mean) / self.scale
        tail = student_t_tail(z.abs(), 2 * self.shape.double())
        return torch.where(z > 0, 1 - tail, tail).to(self.means)

    def quantile(self, level: float) -> Tensor:
        """The level-quantile of every output, [B, *D, C]: that of the standard Student-t, moved and scaled."""
        between(0, 1, level=level)
        low = torch.zeros(1, len(self.shape), dtype=torch.float64, device=self.shape.device)
        high, cuts = torch.ones_like(low), torch.linspace(0, 1, 257, dtype=torch.float64, device=low.device).unsqueeze(-1)
        for _ in range(7):  # 8 bits at a time, over (0, 1), which a Cauchy's quantile function takes to the whole tail
            grid = low + (high - low) * cuts  # [257, G]
            inside = student_t_tail(torch.tan(grid * math.pi / 2), 2 * self.shape.double()) > min(level, 1 - level)
            last = (inside.sum(0, keepdim=True) - 1).clamp(0, 255)
            low, high = grid.gather(0, last), grid.gather(0, last + 1)
        z = math.copysign(1, level - 0.5) * torch.tan((low + high) * math.pi / 4).squeeze(0)
        return (self.mean + z * self.scale).to(self.means)

    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of every output on its own, [B, *D, C], for y [B, *D, C].

        :math:`\frac{\mathrm{crps}}{s} = z (2 F(z) - 1) + \frac{2 (\nu + z^2)}{\nu - 1} p(z) - \frac{2 \sqrt\nu}{\nu - 1}
        \frac{B(1/2, \nu - 1/2)}{B(1/2, \nu / 2)^2}` with :math:`z = (y - m) / s`, :math:`\nu = 2a > 1`; infinite for :math:`\nu \le 1`.
        """
        dof, half = 2 * self.shape.double(), torch.tensor(0.5, dtype=torch.float64, device=self.shape.device)
        z = (y - self.mean) / self.scale
        beta = log_beta(half, dof / 2)
        density = (-(dof + 1) / 2 * torch.log1p(z * z / dof) - 0.5 * dof.log() - beta).exp()
        center = z.abs() * (1 - 2 * student_t_tail(z.abs(), dof))
        spread = dof.sqrt() * (log_beta(half, dof - 0.5) - 2 * beta).exp()
        score = self.scale * (center + 2 * ((dof + z * z) * density - spread) / (dof - 1))
        return torch.where(dof > 1, score, torch.inf).to(self.means)

    def to(self, device: torch.device | str) -> StudentT:
        """The same predictive on another device."""
        means, spread, shape, rate = (t.to(device) for t in (self.means, self.spread, self.shape, self.rate))
        return replace(self, means=means, spread=spread, shape=shape, rate=rate)

    def rescaled(self, shift: Units, scale: Units) -> StudentT:
        """The predictive of shift + scale * y."""
        shift, scale = as_units(shift, scale, self.means)
        return replace(self, means=shift + scale * self.means, rate=self.rate * scale.to(self.rate) ** 2)

    def followed_by(self, others: Sequence[StudentT]) -> StudentT:
        """One predictive of all inputs."""
        parts = [self, *others]
        return replace(self, means=torch.cat([p.means for p in parts], 1), spread=torch.cat([p.spread for p in parts], 1))
