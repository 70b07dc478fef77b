"""What samplers on all data ask of a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Moved = tuple[
    tuple[Tensor, ...], Tensor
]  # the new point (position, velocity, gradient, log likelihood, log prior), and an energy [C]


class Kernel(ABC):
    """Whole trajectories of many chains on one posterior; `dubito.inference.integrators` defines the steps.

    Positions, velocities and gradients are [C, P]; log likelihoods and log priors [C], float64; `step` [C] is in units of `scale` [P].
    """

    @abstractmethod
    def leapfrog(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, left: Tensor, scale: Tensor, steps: int,
    ) -> None:  # fmt: skip
        """`min(left, steps)` leapfrog steps of every chain, in place."""

    @abstractmethod
    def minimal_norm(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, *, step: Tensor, scale: Tensor, share: float
    ) -> Moved:
        """One microcanonical step: the new point, and the rise of its kinetic energy [C]."""

    @abstractmethod
    def langevin(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, scale: Tensor, share: float, length: float, steps: int, generator: torch.Generator,
    ) -> Moved | None:  # fmt: skip
        """`steps` microcanonical steps, after each of which the direction is partly drawn anew.

        The new point, and the error of the energy in the last step [C]. None, and the generator as it was, where a chain leaves the
        range of numbers.
        """

    def microcanonical(
        self, position: Tensor, velocity: Tensor, gradient: Tensor,
        *, step: Tensor, count: Tensor | None, scale: Tensor, share: float,
    ) -> Moved | None:  # fmt: skip
        """`count` [C] microcanonical steps, or one; None where a kernel makes no more than one at a time."""
        return None
