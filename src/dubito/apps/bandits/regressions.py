"""Exact Bayesian linear regressions, one for each arm, updated one observation at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.tensors.checks import positive


@dataclass
class Regressions:
    r"""K Normal-inverse-gamma posteriors over d weights each. For one arm:

    .. math:: y = \phi^T w + \epsilon, \quad \epsilon \sim N(0, \sigma^2), \quad w \mid \sigma^2 \sim N(0, \sigma^2 / \lambda), \quad
        \sigma^2 \sim \mathrm{InvGamma}(a_0, b_0).

    The covariance is kept as a root, :math:`\Lambda^{-1} = R R^T`. An observation changes it by a rank-one matrix: with
    :math:`v = R^T \phi`, :math:`s = 1 + v^T v` and :math:`e = y - \phi^T m`,

    .. math:: R' = R - \frac{(R v) v^T}{s + \sqrt s}, \quad m' = m + \frac{R v}{s} e, \quad a' = a + \tfrac12, \quad
        b' = b + \frac{e^2}{2 s}.

    Both an update and a draw :math:`m + \sigma R z` cost :math:`O(d^2)`. :math:`R R^T` stays positive semi-definite however many
    observations are added. All tensors are in float64.

    >>> arms = Regressions.prior(2, 3)
    >>> for _ in range(100):
    ...     arms.update(0, torch.tensor([1.0, 0.0, 0.0]), 2.0)
    >>> arms.mean[0].round(decimals=1), arms.mean[1]
    (tensor([2., 0., 0.], dtype=torch.float64), tensor([0., 0., 0.], dtype=torch.float64))
    """

    mean: Tensor  # m, [K, d]
    root: Tensor  # R, [K, d, d]
    shape: Tensor  # a, [K]
    rate: Tensor  # b, [K]

    @staticmethod
    def prior(
        arms: int, width: int, *, precision: float = 0.25, a0: float = 6.0, b0: float = 6.0, device: torch.device | str = "cpu"
    ) -> Regressions:
        """The prior: `precision` is :math:`\\lambda`, in units of the noise's precision. The defaults are the published ones."""
        positive(precision=precision, a0=a0, b0=b0)
        root = torch.eye(width, dtype=torch.float64, device=device).div(precision**0.5).repeat(arms, 1, 1)
        return Regressions(root.new_zeros(arms, width), root, root.new_full((arms,), a0), root.new_full((arms,), b0))

    def update(self, arm: int, phi: Tensor, y: float) -> None:
        """Add one observation y of one arm at features phi [d], in place."""
        phi, mean, root = phi.to(self.mean), self.mean[arm], self.root[arm]
        v = phi @ root  # [d]
        gain, s, error = root @ v, 1 + v @ v, y - mean @ phi
        mean.add_(gain * (error / s))
        root.addr_(gain, v / (s + s.sqrt()), alpha=-1.0)
        self.shape[arm] += 0.5
        self.rate[arm] += 0.5 * error * error / s

    def observe(self, phi: Tensor, action: Tensor, y: Tensor) -> None:
        """Add many observations in place: features [n, d], arms [n] and values [n]. Costs O(n d^2 + d^3) for each arm."""
        phi, y = phi.to(self.mean), y.to(self.mean)
        for arm in action.unique().tolist():
            rows = action == arm
            x, target = phi[rows], y[rows]
            inverse = torch.linalg.inv(self.root[arm])  # R^-1; the precision so far is R^-T R^-1
            pull = inverse.mT @ (inverse @ self.mean[arm])  # the precision times the mean
            old = self.mean[arm] @ pull
            precision = inverse.mT @ inverse + x.mT @ x
            lower = torch.linalg.cholesky(precision)
            mean = torch.cholesky_solve((pull + x.mT @ target).unsqueeze(1), lower).squeeze(1)
            self.rate[arm] += 0.5 * (target @ target + old - mean @ (precision @ mean)).clamp_min(0)
            self.shape[arm] += 0.5 * len(x)
            self.mean[arm] = mean
            unit = torch.eye(len(mean), dtype=lower.dtype, device=lower.device)
            self.root[arm] = torch.linalg.solve_triangular(lower, unit, upper=False).mT

    def sample(self, generator: torch.Generator) -> Tensor:
        """A draw of the weights of all arms, [K, d]: :math:`\\sigma^2` from its inverse gamma, then w given :math:`\\sigma^2`."""
        device = generator.device
        unit = torch.randn(self.mean.shape, generator=generator, dtype=torch.float64, device=device).to(self.mean)
        precision = torch._standard_gamma(self.shape.to(device), generator=generator).to(self.rate)
        scale = (self.rate / precision).sqrt().unsqueeze(-1)
        return self.mean + scale * (self.root @ unit.unsqueeze(-1)).squeeze(-1)
