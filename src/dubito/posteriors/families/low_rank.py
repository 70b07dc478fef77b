"""A Gaussian that is independent but for a few directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.mean_field import MeanField, noise_like
from dubito.posteriors.families.reparametrized import Estimator, Reparametrized
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance
from dubito.tensors.covariances import LowRank as Structure
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class LowRank(Family):
    r"""The covariance :math:`\mathrm{diag}(\sigma)\,(I + V V^T)\,\mathrm{diag}(\sigma)` over all weights, where V has `rank` columns
    (Ong et al. 2018; V in units of sigma, so that steps of one size suit weights of any).

    >>> LowRank(rank=3).leaves({"w": torch.zeros(5)}, {"w": torch.ones(5)})["columns/w"].shape
    torch.Size([3, 5])
    """

    rank: int = 5

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank is at least 1; got {self.rank}: without columns this is family='mean_field'")

    local: ClassVar[bool] = True

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        # columns that begin at zero have no slope, so they begin small, each different
        generator = torch.Generator().manual_seed(0)
        columns = {
            name: torch.randn(self.rank, *leaf.shape, generator=generator).to(leaf) * (0.1 / math.sqrt(self.rank))
            for name, leaf in start.items()
        }
        rho = tree.apply(inverse_softplus, scale)
        return {**of_kind("mean", tree.clone(start)), **of_kind("rho", rho), **of_kind("columns", columns)}

    def opened(self, leaves: Params) -> Params:
        """The leaves with standard deviations in the place of rho."""
        return {**MeanField().opened(leaves), **of_kind("columns", kind(leaves, "columns"))}

    def closed(self, leaves: Params, slopes: Params) -> Params:
        """The gradient in the leaves."""
        return MeanField().closed(leaves, slopes)

    def scales(self, leaves: Params) -> Params:
        """Standard deviations of the independent part."""
        return MeanField().scales(leaves)

    def outputs(
        self, leaves: Params, layers: dict[str, str | None], estimator: Estimator, generator: torch.Generator
    ) -> tuple[Params, Reparametrized]:
        """What draws the outputs of layers."""
        means, columns, scales = kind(leaves, "mean"), kind(leaves, "columns"), self.scales(leaves)
        along = self._along(leaves, generator)  # one for the batch: it is what all layers share
        moved = {
            name: torch.addcmul(leaf, scales[name], torch.tensordot(along, columns[name], 1)) for name, leaf in means.items()
        }
        return moved, Reparametrized(moved, scales, layers, estimator, generator)

    def _along(self, leaves: Params, generator: torch.Generator) -> Tensor:
        """How far a draw goes along each column."""
        first = next(iter(leaves.values()))
        return torch.empty(self.rank, dtype=first.dtype, device=first.device).normal_(generator=generator)

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        return {**noise_like(kind(leaves, "mean"), generator), "": self._along(leaves, generator)}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        scales, columns = self.scales(leaves), kind(leaves, "columns")
        return {
            name: torch.addcmul(leaf, scales[name], noise[name] + torch.tensordot(noise[""], columns[name], 1))
            for name, leaf in kind(leaves, "mean").items()
        }

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight."""
        columns = kind(leaves, "columns")
        variance = {name: scale.square() * (1 + columns[name].square().sum(0)) for name, scale in self.scales(leaves).items()}
        return kind(leaves, "mean"), variance

    def _inner(self, leaves: Params) -> tuple[Params, Tensor]:
        """Standard deviations, and I + V^T V."""
        scales, columns = self.scales(leaves), kind(leaves, "columns")
        gram = torch.stack([(flat := rows.reshape(self.rank, -1)) @ flat.T for rows in columns.values()]).sum(0)
        return scales, gram + torch.eye(self.rank, dtype=gram.dtype, device=gram.device)

    def _logdet(self, scales: Params, inner: Tensor) -> Tensor:
        return 2 * torch.stack([scale.log().sum() for scale in scales.values()]).sum() + torch.linalg.slogdet(inner)[1]

    def entropy(self, leaves: Params) -> Tensor:
        """Entropy of q in nats."""
        scales, inner = self._inner(leaves)
        return 0.5 * self._logdet(scales, inner) + tree.size(scales) * 0.5 * (1 + math.log(2 * math.pi))

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """Log density of some weights."""
        (scales, inner), columns, mean = self._inner(leaves), kind(leaves, "columns"), kind(leaves, "mean")
        away = {name: (params[name] - leaf) / scales[name] for name, leaf in mean.items()}
        along = torch.stack([columns[name].reshape(self.rank, -1) @ away[name].flatten() for name in mean]).sum(0)
        square = torch.stack([leaf.square().sum() for leaf in away.values()]).sum() - along @ torch.linalg.solve(inner, along)
        return -0.5 * (square + self._logdet(scales, inner) + tree.size(mean) * math.log(2 * math.pi))

    def covariance(self, leaves: Params) -> Covariance:
        """The covariance of q."""
        scales, columns = self.scales(leaves), kind(leaves, "columns")
        return Structure.of(tree.apply(torch.square, scales), {name: scale * columns[name] for name, scale in scales.items()})
