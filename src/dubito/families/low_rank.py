"""A Gaussian that is independent but for a few directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito import tree
from dubito.families.family import Family, inverse_softplus, kind, of_kind
from dubito.families.mean_field import normals
from dubito.linalg import Covariance
from dubito.linalg import LowRank as Structure
from dubito.tree import Params


@dataclass(frozen=True)
class LowRank(Family):
    r"""The covariance :math:`\mathrm{diag}(\sigma^2) + V V^T` over all weights, where V has `rank` columns (Ong et al. 2018).

    >>> LowRank(rank=3).leaves({"w": torch.zeros(5)}, {"w": torch.ones(5)})["columns/w"].shape
    torch.Size([3, 5])
    """

    rank: int = 5

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank is at least 1; got {self.rank}: without columns this is family='mean_field'")

    def leaves(self, start: Params, scale: Params) -> Params:
        # columns that begin at zero have no slope, so they begin small, each different
        generator = torch.Generator().manual_seed(0)
        columns = {
            name: torch.randn(self.rank, *leaf.shape, generator=generator).to(leaf) * (0.1 * scale[name] / math.sqrt(self.rank))
            for name, leaf in start.items()
        }
        rho = tree.apply(inverse_softplus, scale)
        return {**of_kind("mean", tree.clone(start)), **of_kind("rho", rho), **of_kind("columns", columns)}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        mean = kind(leaves, "mean")
        first = next(iter(mean.values()))
        along = torch.empty(self.rank, dtype=first.dtype, device=first.device).normal_(generator=generator)
        return {**normals(mean, generator), "": along}

    def draw(self, leaves: Params, noise: Params) -> Params:
        rho, columns = kind(leaves, "rho"), kind(leaves, "columns")
        return {
            name: torch.addcmul(leaf, F.softplus(rho[name]), noise[name]) + torch.tensordot(noise[""], columns[name], 1)
            for name, leaf in kind(leaves, "mean").items()
        }

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        columns = kind(leaves, "columns")
        variance = {name: F.softplus(rho).square() + columns[name].square().sum(0) for name, rho in kind(leaves, "rho").items()}
        return kind(leaves, "mean"), variance

    def _inner(self, leaves: Params) -> tuple[Params, Tensor]:
        """Standard deviations, and I + V^T diag(1 / sigma^2) V."""
        scales, columns = tree.apply(F.softplus, kind(leaves, "rho")), kind(leaves, "columns")
        white = [(columns[name] / scale).flatten(1) for name, scale in scales.items()]
        gram = torch.stack([rows @ rows.T for rows in white]).sum(0)
        return scales, gram + torch.eye(self.rank, dtype=gram.dtype, device=gram.device)

    def _logdet(self, scales: Params, inner: Tensor) -> Tensor:
        return 2 * torch.stack([scale.log().sum() for scale in scales.values()]).sum() + torch.linalg.slogdet(inner)[1]

    def entropy(self, leaves: Params) -> Tensor:
        scales, inner = self._inner(leaves)
        return 0.5 * self._logdet(scales, inner) + tree.size(scales) * 0.5 * (1 + math.log(2 * math.pi))

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        (scales, inner), columns, mean = self._inner(leaves), kind(leaves, "columns"), kind(leaves, "mean")
        away = {name: (params[name] - leaf) / scales[name] for name, leaf in mean.items()}
        along = torch.stack([(columns[name] / scales[name]).flatten(1) @ away[name].flatten() for name in mean]).sum(0)
        square = torch.stack([leaf.square().sum() for leaf in away.values()]).sum() - along @ torch.linalg.solve(inner, along)
        return -0.5 * (square + self._logdet(scales, inner) + tree.size(mean) * math.log(2 * math.pi))

    def covariance(self, leaves: Params) -> Covariance:
        diagonal = {name: F.softplus(rho).square() for name, rho in kind(leaves, "rho").items()}
        return Structure.of(diagonal, kind(leaves, "columns"))
