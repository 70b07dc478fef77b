"""Stochastic gradient Hamiltonian Monte Carlo (Chen et al. 2014), in a symmetric splitting, and in cycles (Zhang et al. 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dubito.inference.sgmcmc import Langevin, Move
from dubito.tensors import tree
from dubito.tensors.checks import between
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class SGHMC(Langevin):
    r"""SGD with momentum on mini-batches, with as much noise as makes the posterior its stationary law.

    The weights have a velocity v, of which the stationary law is N(0, I). With :math:`\epsilon^2 = 2 h / (1 + \mu)`, where
    :math:`h = \text{learning\_rate} \cdot T / N` and :math:`\mu` is the momentum, a step is a kick, half a drift, friction with its
    noise, and another half (BAOA; Leimkuhler & Matthews 2013):

    .. math:: v \leftarrow v + \epsilon \nabla \log p(\theta \mid D), \quad \theta \leftarrow \theta + \tfrac{\epsilon}{2} v, \quad
        v \leftarrow \mu v + \sqrt{1 - \mu^2}\, \xi, \quad \theta \leftarrow \theta + \tfrac{\epsilon}{2} v.

    Without noise this is, to the letter, SGD with `learning_rate` and `momentum` on the loss per example. On a Gaussian posterior of
    precision :math:`\lambda`, where the gradient's noise has variance :math:`s^2`, the variance of the draws is

    .. math:: \frac{1}{\lambda} \Big(1 + \frac{1 + \mu}{1 - \mu} \, \frac{\epsilon^2 s^2}{4 - \epsilon^2 \lambda}\Big),

    exact with all data at any step that is stable. A preconditioner is a change of coordinates, learned in the burn-in and then held.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, SGHMC(burn_in=10, draws=6, cycles=2), (torch.zeros(64, 1), torch.zeros(64, 1)))
    >>> len(posterior)
    6
    """

    momentum: float = field(default=0.9, kw_only=True)  # share of the velocity that a step keeps

    rates: ClassVar[dict[str, float]] = {"none": 0.03, "rmsprop": 1e-3}

    def __post_init__(self):
        super().__post_init__()
        between(0, 1, momentum=self.momentum, include="low")

    def begin(self, params: Params) -> Params:
        """Velocities of zero."""
        return tree.apply(torch.zeros_like, params)

    def factor(self, h: float) -> float:
        """epsilon, the length of a kick."""
        return math.sqrt(2 * h / (1 + self.momentum))

    def move(self, move: Move, h: float) -> None:
        """Kick, half a drift, friction with its noise, and the other half."""
        half = self.factor(h) / 2
        move.push(move.velocity, move.slopes, drift=half)
        move.shake(move.velocity, math.sqrt(1 - self.momentum**2), keep=self.momentum, drift=half)
