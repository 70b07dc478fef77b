"""Diagnostics of the energies of a Hamiltonian sampler."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.quantities import map_quantity
from dubito.tensors.checks import at_least, require


def bfmi(energy: Tensor) -> Tensor:
    r"""The Bayesian fraction of missing information of every chain (Betancourt 2016), for energies [chains, n]: [chains].

    .. math:: \sum_i (E_i - E_{i-1})^2 \Big/ \sum_i (E_i - \bar E)^2

    :math:`E_i` is the value of the Hamiltonian on the trajectory to draw i. Below 0.3, new momenta change the energy too little, and
    the chain reaches the tails only by a slow random walk. nan for a constant energy.

    >>> g = torch.Generator().manual_seed(0)
    >>> bfmi(torch.randn(2, 10000, generator=g)).round(decimals=1)            # 2 for independent energies
    tensor([2., 2.], dtype=torch.float64)
    >>> bfmi(torch.randn(1, 1000, generator=g).cumsum(1)).round(decimals=1)   # 0 for a random walk
    tensor([0.], dtype=torch.float64)
    """
    require(energy.ndim == 2, f"energy must be [chains, n]; got {list(energy.shape)}")

    def _ratio(x: Tensor) -> Tensor:
        return x.diff(dim=-1).square().sum((1, 2)) / (x - x.mean(-1, keepdim=True)).square().sum((1, 2))

    return map_quantity(_ratio, energy.T.unsqueeze(0), least=2)  # every chain is a quantity


def energy_error_per_dimension(energy_error: Tensor, dimensions: int) -> Tensor:
    r"""The variance of the energy errors per dimension, :math:`\mathrm{Var}[\Delta E] / d`, for errors [chains, n]: [chains].

    It measures the bias of a sampler without an accept step (Robnik et al. 2023). MCLMC chooses its step size so that it is about
    5e-4. inf where a step diverged, nan for fewer than two draws.

    >>> energy_error_per_dimension(torch.tensor([[0.3, -0.1, 0.2, -0.4]]), 100)
    tensor([0.0010], dtype=torch.float64)
    """
    at_least(1, dimensions=dimensions)
    require(energy_error.ndim == 2, f"energy_error must be [chains, n]; got {list(energy_error.shape)}")
    errors = energy_error.detach().to(torch.float64)
    if errors.shape[1] < 2:
        return errors.new_full(errors.shape[:1], torch.nan)
    return (errors.var(1) / dimensions).masked_fill(~torch.isfinite(errors).all(1), torch.inf)
