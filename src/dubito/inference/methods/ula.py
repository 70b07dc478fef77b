"""The unadjusted Langevin algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.log_density import Density
from dubito.inference.method import Traits
from dubito.inference.tuning import langevin, metropolis


@dataclass(frozen=True)
class ULA(Tuned):
    r"""Steps up the gradient, and noise:

    .. math:: \theta' = \theta + \tfrac{\epsilon}{2} s^2 \nabla \log p(\theta, D) + \sqrt{\epsilon}\, s\, \xi

    :math:`\xi \sim N(0, I)`, and s are the prior's standard deviations, so that :math:`\sqrt\epsilon` = `step_size` is a length in
    units of the prior, as it is for MALA and HMC. Nothing is rejected, so the draws are biased by the step: on a Gaussian posterior
    of variance :math:`\sigma^2` (in units of s) they have the variance :math:`\sigma^2 / (1 - \epsilon / (4 \sigma^2))`, and they
    fly apart for :math:`\epsilon > 4 \sigma^2`. `MALA` corrects it.

    A step size that is not given is found in the burn-in, which is then MALA's, such that it accepts `target_acceptance` of its
    proposals: where nearly all are right, little is lost by taking all of them. "acceptance" is what an accept step would have taken.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, ULA(0.1, draws=20, burn_in=20), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> posterior.sampler["adjusted"]
    False
    """

    step_size: float | None = None  # in prior standard deviations: the root of the textbook's epsilon; None finds one
    target_acceptance: float = field(default=0.95, kw_only=True)  # of MALA at the step size that is found
    thin: int = field(default=10, kw_only=True)  # transitions in a step, of which the last is kept
    tune: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]
    least: ClassVar[int | None] = 1

    @property
    def traits(self) -> Traits:
        """Those of chains without an accept step."""
        return replace(super().traits, adjusted=False)

    @property
    def tunes(self) -> bool:
        """Whether a step size is looked for during the burn-in."""
        return self.step_size is None

    def first_step(self, size: int) -> float:
        """A tenth, over the root of the number of weights."""
        return 0.1 / math.sqrt(size)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A Langevin step; accepted or rejected only while its size is looked for."""
        step, after, change = langevin(density, state, generator)
        lost = ~(after.log_likelihood + after.log_prior).isfinite()
        if state.step < self.burn_in and self.tunes:  # a step that is still too large would throw a chain far out
            probability, accepted = metropolis(change, generator)
            self.adapt(state, probability)
        else:
            probability, accepted = (-change.nan_to_num(nan=torch.inf)).exp().clamp(max=1.0), ~lost
        state.accept(after, accepted)
        return {
            "acceptance": probability,
            "divergent": lost.double(),
            "step_size": step,
            "gradients": torch.ones_like(state.log_prior),
        }
