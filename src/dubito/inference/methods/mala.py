"""The Metropolis-adjusted Langevin algorithm (Roberts & Tweedie 1996)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.inference.full_batch import Chains, ChainState, average, averaging, find_step, langevin
from dubito.inference.integrators import leapfrog
from dubito.inference.log_density import Density
from dubito.model import Target


@dataclass(frozen=True)
class MALA(Chains):
    r"""A Langevin step, up the gradient and with noise, accepted or rejected,

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

    def __post_init__(self):
        super().__post_init__()
        if (self.step_size is not None and not self.step_size > 0) or not 0 < self.target_acceptance < 1:
            raise ValueError(
                f"step_size is positive and target_acceptance between 0 and 1; got {self.step_size} and {self.target_acceptance}"
            )
        if self.step_size is None and (not self.tune or self.burn_in < 1):
            raise ValueError("a step size is found during the burn-in: give step_size=..., or tune=True and a burn_in")

    def tuned(self, target: Target, state: ChainState) -> dict[str, Tensor]:
        return averaging(self.step_size or 0.1 / math.sqrt(state.position.shape[1]), state)

    def begin(self, density: Density, state: ChainState, generator: torch.Generator) -> None:
        super().begin(density, state, generator)
        if self.step_size is None:
            find_step(density, state, generator, leapfrog)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        step, after, change = langevin(self, density, state, generator)
        probability = (-change.nan_to_num(nan=torch.inf)).exp().clamp(max=1.0)
        accepted = torch.rand(probability.shape, dtype=torch.float64, device=step.device, generator=generator) < probability
        self.accept(state, after, accepted)
        if state.step < self.burn_in and self.tune:
            average(state.tuning, probability, self.target_acceptance)
        diverged = ~change.isfinite()
        return {
            "acceptance": probability,
            "accepted": accepted.double(),
            "divergent": diverged.double(),
            "step_size": step,
            "gradients": torch.ones_like(probability),
        }
