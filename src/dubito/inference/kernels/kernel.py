"""What samplers on all data ask of a kernel, and how a posterior that the kernels know is recognized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Gamma

from dubito.model import Target
from dubito.model.likelihoods import NOISE
from dubito.network.examples import pick_output
from dubito.tensors.tree import Params

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

    def path(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, moves: Tensor, scale: Tensor, steps: int,
    ) -> tuple[Tensor, ...] | None:  # fmt: skip
        """Every point of `steps` leapfrog steps of the chains that move [C]; the others stay. Leaves [steps, C, ...]; None where a
        kernel does not keep them."""
        return None

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


def is_plain(target: Target) -> bool:
    """Whether nothing changes how the target sees the data or the network."""
    changes = (target.around, target.weights, target.adversary, target.precision)
    return target.model.output is pick_output and all(change is None for change in changes)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module does more than its class says."""
    changed = "forward" in vars(module) or "parametrizations" in module._modules
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or changed)


def offsets(like: Params) -> dict[str, int]:
    """Where each leaf starts in the vector of a chain."""
    starts, total = {}, 0
    for name, leaf in like.items():
        starts[name], total = total, total + leaf.numel()
    return starts


def all_bayesian(like: Params, layers: Mapping[str, nn.Module]) -> bool:
    """Whether the weights are those of the layers, all of them, and perhaps a learned noise."""
    expected = {f"{key}.{name}": p.shape for key, layer in layers.items() for name, p in layer.named_parameters()}
    return {name: leaf.shape for name, leaf in like.items() if name != NOISE} == expected


def gamma(prior: Distribution | None) -> tuple[float, float] | None:
    """Shape and rate of a gamma prior of a noise's precision, (0, 0) for none; None for a prior that the kernels do not know."""
    if prior is None:
        return 0.0, 0.0
    if type(prior) is not Gamma or prior.concentration.numel() != 1 or prior.rate.numel() != 1:
        return None
    return float(prior.concentration), float(prior.rate)


def is_real(dtype: torch.dtype) -> bool:
    """Whether numbers are in single or double precision."""
    return dtype in (torch.float32, torch.float64)
