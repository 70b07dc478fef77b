"""The Metropolis-adjusted microcanonical sampler (Robnik, Cohn-Gordon & Seljak 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.integrators import MINIMAL_NORM, Point, minimal_norm, on_sphere, rise
from dubito.inference.log_density import Density
from dubito.inference.tuning import dice, metropolis
from dubito.model import Target
from dubito.tensors.checks import require


@dataclass(frozen=True)
class MAMS(Tuned):
    r"""Microcanonical trajectories, accepted by the change of their energy: MCLMC without its bias, asymptotically exact.

    Every transition draws a direction anew, follows it for a random number of steps of which the mean length is `path_length`, and
    accepts the end with probability :math:`\min(1, e^{-\Delta E})`, where :math:`\Delta E` is the rise of the potential energy and
    of the log volume that the turning direction has swept. Lengths are in prior standard deviations, as for HMC; a step takes two
    gradients, and `units="posterior"` learns a unit of length for every coordinate in the burn-in.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, MAMS(draws=20, burn_in=20), (torch.zeros(8, 2), torch.zeros(8, 1)))
    >>> len(posterior)
    80
    """

    step_size: float | None = None  # in prior standard deviations; None finds one
    path_length: float = math.pi / 2  # of a trajectory in the mean, in prior standard deviations
    tune: bool = field(default=True, kw_only=True)  # adapt the step size in the burn-in
    target_acceptance: float = field(default=0.9, kw_only=True)
    units: Literal["prior", "posterior"] = field(default="prior", kw_only=True)  # whose standard deviations measure lengths
    max_steps: int = field(default=1000, kw_only=True)  # of a trajectory, however short they are
    gibbs: bool = field(default=True, kw_only=True)  # draw a learned noise from its conditional, if it has one
    searches: ClassVar[bool] = False

    def first_step(self, size: int) -> float:
        """A tenth of the path, over the root of the number of weights."""
        return 0.1 * self.path_length / math.sqrt(size)

    def initial_tuning(self, target: Target, state: ChainState) -> dict[str, Tensor]:
        """As of all, but for a single weight."""
        require(state.position.shape[1] > 1, "MAMS turns a direction, and one weight has none to turn: use HMC")
        return super().initial_tuning(target, state)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A microcanonical trajectory from a fresh direction, accepted or rejected."""
        step = state.step_size
        # one number for all chains, which run side by side and would wait for the longest
        share = 2 * float(dice(step.new_empty(()), generator))
        count = (share * self.path_length / step).ceil().clamp(1, self.max_steps).int()
        before = state.point(on_sphere(state.noise(generator)))
        after, gain = self._trajectory(density, before, step, count, state.scale)
        change = rise(density, before, after) + gain
        change = torch.where(change.isnan(), torch.inf, change)
        probability, accepted = metropolis(change, generator)
        state.accept(after, accepted)
        self.adapt(state, probability)
        diverged = change > 1000.0
        return {
            "acceptance": probability,
            "accepted": accepted.double(),
            "divergent": diverged.double(),
            "energy_error": torch.where(change.isfinite(), change, torch.nan),
            "step_size": step,
            "gradients": torch.full_like(change, 2.0 * int(count.max())),
        }

    def _trajectory(self, density: Density, before: Point, step: Tensor, count: Tensor, scale: Tensor) -> tuple[Point, Tensor]:
        kernel, options = density.kernel, {"step": step, "count": count, "scale": scale, "share": MINIMAL_NORM}
        if kernel is not None and (moved := kernel.microcanonical(*before[:3], **options)) is not None:
            return Point(*moved[0]), moved[1]

        def once(position, velocity, gradient, likelihood, prior, gain, left, step, scale):
            """One step of all chains that have steps left."""
            point = Point(position, velocity, gradient, likelihood, prior)
            point, more = minimal_norm(density, point, step=step * (left > 0), scale=scale)
            return *point, gain + more, left - 1

        nothing = torch.zeros_like(before.log_prior)
        *moved, gain, _ = density.loop("trajectory", once)((*before, nothing, count), (step, scale), int(count.max()))
        return Point(*moved), gain
