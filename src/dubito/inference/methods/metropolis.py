"""Metropolis-Hastings (Metropolis et al. 1953, Hastings 1970), with any proposal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.integrators import Point, rise
from dubito.inference.log_density import Density, Value
from dubito.inference.tuning import metropolis
from dubito.tensors.checks import require

# (positions [C, P], step sizes [C, 1], generator) -> new positions [C, P] and log q(old | new) - log q(new | old), [C]
Proposal = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Metropolis(Tuned):
    r"""Try a random step, and accept or reject it by the posterior density at both ends: asymptotically exact, without gradients.

    A step is accepted with probability

    .. math:: \min \left(1, \frac{p(\theta')\, q(\theta \mid \theta')}{p(\theta)\, q(\theta' \mid \theta)}\right)

    The proposal is a random walk, :math:`\theta' = \theta + h s \xi` with :math:`\xi \sim N(0, I)` and s the prior's standard
    deviations, unless `proposal` is given: a function of (positions [C, P], step sizes [C, 1], generator) that returns the proposed
    positions and the logarithm of the Hastings ratio, :math:`\log q(\theta \mid \theta') - \log q(\theta' \mid \theta)`, [C], which
    is 0 for symmetric ones. It needs no gradient, and so it is slow where there are many weights: a random walk takes of the order
    of P steps for one independent draw.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, Metropolis(draws=20, burn_in=20, thin=5), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 1])
    """

    step_size: float | None = None  # in prior standard deviations; None begins at 2.4 / sqrt(P) of the prior
    tune: bool = field(default=True, kw_only=True)  # adapt the step size in the burn-in
    target_acceptance: float = field(default=0.234, kw_only=True)  # the best for a random walk in many dimensions
    proposal: Proposal | None = field(default=None, kw_only=True, repr=False)
    thin: int = field(default=10, kw_only=True)  # transitions in a step, of which the last is kept
    least: ClassVar[int | None] = None
    searches: ClassVar[bool] = False

    def first_step(self, size: int) -> float:
        """The best on a Gaussian in many dimensions."""
        return 2.4 / math.sqrt(size)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A proposal for every chain, accepted or rejected."""
        step = state.step_size
        proposed, log_ratio = self._proposed(state, step.unsqueeze(1), generator)
        value = density.values(proposed)
        after = Point(proposed, state.velocity, state.gradient, value.log_likelihood, value.log_prior)
        change = rise(density, Value(state.gradient, state.log_likelihood, state.log_prior), after) - log_ratio
        probability, accepted = metropolis(change, generator)
        state.accept(after, accepted)
        self.adapt(state, probability)
        # a step out of the prior's support is a proposal like others, and rightly rejected
        lost = ~(value.log_likelihood + value.log_prior).isfinite() & ~value.log_prior.isneginf()
        return {"acceptance": probability, "accepted": accepted.double(), "divergent": lost.double(), "step_size": step}

    def _proposed(self, state: ChainState, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """What the proposal gives, if it is what it should be: positions alone could be unpacked by chains, and nobody would notice."""
        position = state.padded(state.position)
        proposed: Any = (self.proposal or self._walk(state))(position, state.padded(step), generator)
        several = isinstance(proposed, tuple | list)
        shapes = [tuple(getattr(part, "shape", (type(part).__name__,))) for part in (proposed if several else [proposed])]
        wanted = [tuple(position.shape), tuple(position.shape[:1])]
        require(
            several and shapes == wanted,
            f"a proposal returns the new positions {wanted[0]} and the logarithm of the Hastings ratio {wanted[1]}, "
            "log q(old | new) - log q(new | old), which is 0 if it is symmetric: `return new, torch.zeros(len(new))`; "
            f"got {shapes}",
        )
        return state.own(proposed[0]), state.own(proposed[1])

    def _walk(self, state: ChainState) -> Proposal:
        def walk(position: Tensor, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            """A Gaussian step of `step` prior standard deviations, which is symmetric."""
            noise = torch.empty_like(position).normal_(generator=generator)
            return position + step * state.scale * noise, position.new_zeros(len(position), dtype=torch.float64)

        return walk
