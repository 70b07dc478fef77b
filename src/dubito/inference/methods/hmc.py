"""Hamiltonian Monte Carlo (Duane et al. 1987, Neal 2011)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.integrators import Point, kinetic, leapfrog, potential, rise
from dubito.inference.log_density import Density
from dubito.inference.method import Traits
from dubito.inference.tuning import dice, metropolis
from dubito.tensors.checks import between

DIVERGED = 1000.0  # a change of energy that no sound trajectory makes


@dataclass(frozen=True)
class HMC(Tuned):
    r"""Trajectories of a particle that rolls over the posterior, accepted by the change of its energy: asymptotically exact.

    The law of the draws is the posterior, :math:`p(\theta \mid D)^{1/T}`, in the limit of long chains, at any step size. Every
    transition draws a velocity from N(0, I), follows it for `path_length` by leapfrog steps of `step_size`, and accepts the end with
    probability :math:`\min(1, e^{-\Delta H})`; a rejected proposal counts the present draw again. Both lengths are in units of the
    prior's standard deviation at the target's temperature, so that a path of pi / 2 crosses the prior (Izmailov et al. 2021).

    During the burn-in `step_size` is tuned to `target_acceptance` by dual averaging, each chain's its own (`tune=False` keeps it),
    and with `units="posterior"` every coordinate's unit of length becomes its standard deviation over the chains, which is a
    diagonal mass matrix. `jitter` varies the length of each trajectory, since paths of one length can come back to where they
    began. A trajectory of which the energy is not finite, or rises by more than 1,000, is a divergence: rejected, and counted.

    `adjusted=False` leaves out the accept step; the draws are then biased by the integrator's error, and the posterior says so.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, HMC(draws=20, burn_in=20), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> len(posterior), posterior.chains
    (80, 4)
    """

    step_size: float | None = None  # in prior standard deviations; None finds one
    path_length: float = math.pi / 2  # in prior standard deviations
    tune: bool = field(default=True, kw_only=True)  # adapt the step size in the burn-in
    target_acceptance: float = field(default=0.8, kw_only=True)
    units: Literal["prior", "posterior"] = field(default="prior", kw_only=True)  # whose standard deviations measure lengths
    jitter: float = field(default=0.3, kw_only=True)  # share by which the path of a trajectory may be shorter or longer
    max_steps: int = field(default=1000, kw_only=True)  # of a trajectory, however short they are
    gibbs: bool = field(default=True, kw_only=True)  # draw a learned noise from its conditional, if it has one
    adjusted: bool = field(default=True, kw_only=True)  # accept or reject; without it the draws are biased

    def __post_init__(self):
        super().__post_init__()
        between(0, 1, jitter=self.jitter, include="low")

    @property
    def traits(self) -> Traits:
        """Those of chains; asymptotically exact if `adjusted`."""
        return replace(super().traits, adjusted=self.adjusted)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A trajectory of about `path_length` from a fresh velocity, accepted or rejected."""
        step = state.step_size
        # one number for all chains, which run side by side and would wait for the longest
        share = 1 + self.jitter * (2 * float(dice(step.new_empty(()), generator)) - 1)
        count = (self.path_length * share / step).ceil().clamp(1, self.max_steps).int()
        # what a Gibbs move draws has no unit of length: it does not move here, and has no share in the energy
        before = state.point(state.noise(generator) * (state.scale > 0))
        after = leapfrog(density, before, step=step, count=count, scale=state.scale)
        notes = self.judge(density, state, before, after, generator)
        self.adapt(state, notes["acceptance"])
        return {**notes, "step_size": step, "gradients": torch.full_like(step, int(count.max()))}

    def judge(
        self, density: Density, state: ChainState, before: Point, after: Point, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Accept or reject; energies and what became of them."""
        change = rise(density, before, after) + kinetic(after.velocity) - kinetic(before.velocity)
        change = torch.where(change.isnan(), torch.inf, change)
        diverged = change > DIVERGED
        probability, accepted = metropolis(change, generator)
        accepted = accepted & ~diverged if self.adjusted else change.isfinite()
        energy = potential(density, before) + kinetic(before.velocity) + torch.where(accepted, change, 0.0)
        state.accept(after, accepted)
        return {
            "acceptance": torch.where(diverged, 0.0, probability),
            "accepted": accepted.double(),
            "divergent": diverged.double(),
            "energy": energy,
            "energy_error": torch.where(change.isfinite(), change, torch.nan),
        }
