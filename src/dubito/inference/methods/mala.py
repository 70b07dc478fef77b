"""The Metropolis-adjusted Langevin algorithm (Roberts & Tweedie 1996)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.log_density import Density
from dubito.inference.tuning import langevin, metropolis


@dataclass(frozen=True)
class MALA(Tuned):
    r"""A Langevin step, up the gradient and with noise, accepted or rejected: asymptotically exact,

    .. math:: \theta' = \theta + \tfrac{h^2}{2} s^2 \nabla \log p(\theta, D) + h s\, \xi.

    It is one leapfrog step of HMC from a fresh velocity :math:`\xi`: the Hastings ratio of the proposal and its way back is the
    change of kinetic energy. During the burn-in the step size is tuned to `target_acceptance`; 0.574 is the best in many
    dimensions.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, MALA(draws=20, burn_in=20), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> len(posterior)
    80
    """

    step_size: float | None = None  # in prior standard deviations; None finds one
    tune: bool = field(default=True, kw_only=True)  # adapt the step size in the burn-in
    target_acceptance: float = field(default=0.574, kw_only=True)
    thin: int = field(default=10, kw_only=True)  # transitions in a step, of which the last is kept
    least: ClassVar[int | None] = 1

    def first_step(self, size: int) -> float:
        """A tenth, over the root of the number of weights."""
        return 0.1 / math.sqrt(size)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A Langevin step, accepted or rejected."""
        step, after, change = langevin(density, state, generator)
        probability, accepted = metropolis(change, generator)
        state.accept(after, accepted)
        self.adapt(state, probability)
        diverged = ~change.isfinite()
        return {
            "acceptance": probability,
            "accepted": accepted.double(),
            "divergent": diverged.double(),
            "step_size": step,
            "gradients": torch.ones_like(probability),
        }
