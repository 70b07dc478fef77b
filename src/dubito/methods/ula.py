"""The unadjusted Langevin algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dubito.chains import Chains, ChainState
from dubito.density import Density


@dataclass(frozen=True)
class ULA(Chains):
    r"""Steps up the gradient, and noise:

    .. math:: \theta' = \theta + \tfrac{\epsilon}{2} s^2 \nabla \log p(\theta, D) + \sqrt{\epsilon}\, s\, \xi

    :math:`\xi \sim N(0, I)`, and s are the prior's standard deviations, so that :math:`\sqrt\epsilon` = `step_size` is a length in
    units of the prior, as it is for MALA and HMC. Nothing is rejected, so the draws are biased by the step: on a Gaussian posterior
    of variance :math:`\sigma^2` (in units of s) they have the variance :math:`\sigma^2 / (1 - \epsilon / (4 \sigma^2))`, and they
    fly apart for :math:`\epsilon > 4 \sigma^2`. `MALA` corrects it.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, ULA(0.1, draws=20, burn_in=20), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> posterior.sampler["adjusted"]
    False
    """

    step_size: float = 1e-3  # in prior standard deviations: the root of the textbook's epsilon
    thin: int = field(default=10, kw_only=True)  # transitions in a step, of which the last is kept

    exact: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        if not self.step_size > 0:
            raise ValueError(f"step_size is a positive length; got {self.step_size}")

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        noise = torch.empty_like(state.position).normal_(generator=generator)
        reach = self.step_size * state.scale
        proposed = state.position + reach * (0.5 * reach * state.gradient + noise)
        value = density(proposed)
        lost = ~(value.log_likelihood + value.log_prior).isfinite()
        self.accept(state, self.here(state, noise)._replace(position=proposed, **value._asdict()), ~lost)
        return {"divergent": lost.double(), "gradients": torch.ones_like(state.log_prior)}
