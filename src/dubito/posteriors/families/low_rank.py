"""A Gaussian with independent weights plus a few directions in which all weights vary together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dubito.posteriors.families.family import Drawing, ScaledFamily
from dubito.posteriors.families.leaves import LOG_TWO_PI, label, log_scales, pick, reparametrize, standard_entropy, total
from dubito.posteriors.families.mean_field import MeanField
from dubito.posteriors.families.reparametrized import Estimator, Layers, Reparametrized
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.covariances import Covariance
from dubito.tensors.covariances import LowRank as Structure
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class LowRank(ScaledFamily):
    r"""Gaussian weights with the covariance :math:`\mathrm{diag}(\sigma)\,(I + V V^T)\,\mathrm{diag}(\sigma)`, V with `rank` columns
    (Ong et al. 2018). V is in units of sigma, so that the same step size suits weights of any scale.

    A draw is :math:`\mu + \sigma (\epsilon + V e)` with standard normal :math:`\epsilon` and e. The entropy is
    :math:`\sum_i \ln \sigma_i + \frac12 \ln \det(I + V^T V) + \frac n2 (1 + \ln 2\pi)`.

    >>> LowRank(rank=3).leaves({"w": torch.zeros(5)}, {"w": torch.ones(5)})["columns/w"].shape
    torch.Size([3, 5])
    """

    rank: int = 5
    local: ClassVar[bool] = True

    def __post_init__(self):
        require(self.rank >= 1, f"rank must be at least 1; got {self.rank}: without columns use family='mean_field'")

    def leaves(self, start: Params, scale: Params) -> Params:
        """Means, rho, and columns that start small and random: at zero their gradient would vanish."""
        generator = torch.Generator().manual_seed(0)
        columns = {
            name: torch.randn(self.rank, *leaf.shape, generator=generator).to(leaf) * (0.1 / math.sqrt(self.rank))
            for name, leaf in start.items()
        }
        return {**super().leaves(start, scale), **label("columns", columns)}

    def constrain(self, leaves: Params) -> Params:
        """Means, scales and columns."""
        return {**MeanField().constrain(leaves), **label("columns", pick(leaves, "columns"))}

    def unconstrain_gradient(self, leaves: Params, slopes: Params) -> Params:
        """As in `MeanField`; the gradient of the columns stays."""
        return MeanField().unconstrain_gradient(leaves, slopes)

    def outputs(self, leaves: Params, layers: Layers, estimator: Estimator, generator: torch.Generator) -> Drawing:
        """Means moved along the columns, by one draw for the batch since all layers share it; the rest as in `MeanField`."""
        scales, columns, coordinates = self.scales(leaves), pick(leaves, "columns"), self._coordinates(leaves, generator)
        shifts = {name: torch.tensordot(coordinates, column, 1) for name, column in columns.items()}
        moved = reparametrize(pick(leaves, "mean"), scales, shifts)
        return moved, Reparametrized(moved, scales, layers, estimator, generator)

    def _coordinates(self, leaves: Params, generator: torch.Generator) -> Tensor:
        """How far a draw goes along each column, [rank]."""
        return next(iter(leaves.values())).new_empty(self.rank).normal_(generator=generator)

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        r""":math:`\epsilon` for every weight, and e under the name ""."""
        return {**super().noise(leaves, generator), "": self._coordinates(leaves, generator)}

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`\mu + \sigma (\epsilon + V e)`."""
        columns = pick(leaves, "columns")
        mixed = {name: noise[name] + torch.tensordot(noise[""], column, 1) for name, column in columns.items()}
        return reparametrize(pick(leaves, "mean"), self.scales(leaves), mixed)

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        r""":math:`\mu` and :math:`\sigma_i^2 (1 + \sum_k V_{ik}^2)`."""
        columns = pick(leaves, "columns")
        variance = {name: scale.square() * (1 + columns[name].square().sum(0)) for name, scale in self.scales(leaves).items()}
        return pick(leaves, "mean"), variance

    def _inner(self, leaves: Params) -> Tensor:
        """I + V^T V."""
        gram = torch.stack([(flat := rows.reshape(self.rank, -1)) @ flat.T for rows in pick(leaves, "columns").values()]).sum(0)
        return gram + torch.eye(self.rank, dtype=gram.dtype, device=gram.device)

    def _logdet(self, scales: Params, inner: Tensor) -> Tensor:
        return 2 * log_scales(scales) + torch.linalg.slogdet(inner)[1]

    def entropy(self, leaves: Params) -> Tensor:
        r""":math:`\sum_i \ln \sigma_i + \frac12 \ln \det(I + V^T V) + \frac n2 (1 + \ln 2\pi)`."""
        scales = self.scales(leaves)
        return 0.5 * self._logdet(scales, self._inner(leaves)) + standard_entropy(scales)

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """The Gaussian log density, with the inverse of the covariance by the matrix inversion lemma."""
        scales, inner, columns, mean = self.scales(leaves), self._inner(leaves), pick(leaves, "columns"), pick(leaves, "mean")
        away = {name: (params[name] - leaf) / scales[name] for name, leaf in mean.items()}
        along = torch.stack([columns[name].reshape(self.rank, -1) @ away[name].flatten() for name in mean]).sum(0)
        square = total(leaf.square().sum() for leaf in away.values()) - along @ torch.linalg.solve(inner, along)
        return -0.5 * (square + self._logdet(scales, inner) + tree.size(mean) * LOG_TWO_PI)

    def covariance(self, leaves: Params) -> Covariance:
        """The diagonal and the columns, as a low-rank structure."""
        scales, columns = self.scales(leaves), pick(leaves, "columns")
        return Structure.of(tree.apply(torch.square, scales), {name: scale * columns[name] for name, scale in scales.items()})
