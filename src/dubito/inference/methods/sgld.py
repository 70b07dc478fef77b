"""Stochastic gradient Langevin dynamics (Welling & Teh 2011), preconditioned (Li et al. 2016), in cycles (Zhang et al. 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dubito.inference.sgmcmc import Langevin, Move


@dataclass(frozen=True)
class SGLD(Langevin):
    r"""Gradient descent on mini-batches, with as much noise as makes the posterior its stationary law:

    .. math:: \theta' = \theta + h G \nabla \log p(\theta \mid D) + \sqrt{2 h G}\, \xi, \qquad \xi \sim N(0, I), \qquad
        h = \text{learning\_rate} \cdot T / N.

    The textbook's epsilon is 2 h. Without noise this is SGD with `learning_rate` on the loss per example. G is the identity, or with
    `preconditioner="rmsprop"` diagonal: 1 / (1 / N + r), r being the root mean square of the gradient of the loss per example. It is
    learned in the burn-in and held while draws are made, so that its derivative, a term of the drift that is usually dropped at the
    cost of a bias, is zero.

    There is no accept step. On a Gaussian posterior of precision :math:`\lambda` in some direction, where the gradient's noise has
    variance :math:`s^2`, the variance of the draws is :math:`(1 + h s^2 / 2) / (\lambda (1 - h \lambda / 2))`.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, SGLD(burn_in=10, draws=5, chains=2), (torch.zeros(64, 1), torch.zeros(64, 1)))
    >>> posterior.sample(3)["weight"].shape, posterior.chains
    (torch.Size([3, 1, 1]), 2)
    """

    rates: ClassVar[dict[str, float]] = {"none": 0.1, "rmsprop": 3e-3}

    def factor(self, h: float) -> float:
        """h itself."""
        return h

    def move(self, move: Move, h: float) -> None:
        """Add h times the gradient, and noise of variance 2 h."""
        move.shake(move.slopes, math.sqrt(2 * h), drift=1.0)
