"""Gaussians with a full covariance matrix for every layer, or for all weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.families.family import Family
from dubito.posteriors.families.leaves import LOG_TWO_PI, inverse_softplus, label, normal_like, pick, standard_entropy, total
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.covariances import Blocks, Covariance, Dense
from dubito.tensors.tree import Params

LARGEST = 8192  # weights in a matrix


@dataclass(frozen=True)
class Layerwise(Family):
    r"""Gaussian weights with a full covariance in each layer: :math:`w_l = \mu_l + L_l \epsilon`, :math:`\epsilon \sim N(0, I)`.

    :math:`L_l` is lower triangular, with rows in units of its diagonal, so that the same step size suits weights of any scale.

    The weights of a layer are those with the same name up to the last dot. The entropy is
    :math:`\sum_l \ln \det L_l + \frac n2 (1 + \ln 2\pi)`. The matrix has a row for each weight, so layers must be small.

    >>> leaves = Layerwise().leaves({"0.weight": torch.zeros(1, 2), "0.bias": torch.zeros(1)}, {})
    >>> leaves["factor/0"].shape
    torch.Size([3, 3])
    """

    def blocks(self, names: list[str]) -> dict[str, list[str]]:
        """The names of the weights that share a matrix, by their common prefix."""
        blocks: dict[str, list[str]] = {}
        for name in names:
            blocks.setdefault(name.rpartition(".")[0], []).append(name)
        return blocks

    def leaves(self, start: Params, scale: Params) -> Params:
        """Means, and diagonal matrices of the raw scales (.01 where none is given)."""
        leaves = label("mean", tree.clone(start))
        for block, names in self.blocks(list(start)).items():
            size = sum(start[name].numel() for name in names)
            require(
                size <= LARGEST,
                f"a covariance matrix of {size:,} weights ({block or 'all'}) is too large: use family='low_rank' or 'matrix_normal', "
                "or give Model(only=...) a pattern of fewer weights",
            )
            spread = [scale.get(name, torch.full_like(start[name], 0.01)).flatten() for name in names]
            leaves[f"factor/{block}"] = torch.diag(inverse_softplus(torch.cat(spread)))
        return leaves

    def _factors(self, leaves: Params) -> dict[str, Tensor]:
        """The lower triangular matrices by block, with positive diagonals."""
        factors = {}
        for block, raw in pick(leaves, "factor").items():
            scale = F.softplus(raw.diagonal())
            factors[block] = raw.tril(-1) * scale.unsqueeze(1) + torch.diag(scale)
        return factors

    def _blocks(self, leaves: Params) -> dict[str, Params]:
        mean = pick(leaves, "mean")
        return {block: {name: mean[name] for name in names} for block, names in self.blocks(list(mean)).items()}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A standard normal number for every weight."""
        return normal_like(pick(leaves, "mean"), generator)

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`\mu_l + L_l \epsilon_l` for every block."""
        factors, drawn = self._factors(leaves), {}
        for block, mean in self._blocks(leaves).items():
            flat = tree.flatten(mean) + factors[block] @ tree.flatten({name: noise[name] for name in mean})
            drawn |= tree.unflatten(flat, mean)
        return {name: drawn[name] for name in pick(leaves, "mean")}

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        r""":math:`\mu`, and the sums of squares of the rows of L."""
        factors, variance = self._factors(leaves), {}
        for block, mean in self._blocks(leaves).items():
            variance |= tree.unflatten(factors[block].square().sum(1), mean)
        return pick(leaves, "mean"), variance

    def entropy(self, leaves: Params) -> Tensor:
        r""":math:`\sum_l \ln \det L_l + \frac n2 (1 + \ln 2\pi)`."""
        logs = total(factor.diagonal().log().sum() for factor in self._factors(leaves).values())
        return logs + standard_entropy(pick(leaves, "mean"))

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """The Gaussian log density, by solving with the triangular matrices."""
        factors, terms = self._factors(leaves), []
        for block, mean in self._blocks(leaves).items():
            factor, away = factors[block], tree.flatten({name: params[name] for name in mean}) - tree.flatten(mean)
            white = torch.linalg.solve_triangular(factor, away.unsqueeze(1), upper=False)
            terms.append(-0.5 * white.square().sum() - factor.diagonal().log().sum() - 0.5 * len(away) * LOG_TWO_PI)
        return total(terms)

    def covariance(self, leaves: Params) -> Covariance:
        r"""A dense precision :math:`(L_l L_l^T)^{-1}` for each block."""
        factors, blocks = self._factors(leaves), []
        for block, mean in self._blocks(leaves).items():
            precision = torch.cholesky_inverse(factors[block].double()).to(factors[block])
            shapes = {name: list(leaf.shape) for name, leaf in mean.items()}
            # rounding to the dtype of the weights may leave a precision that is not positive definite: then shift its diagonal
            indefinite = bool(torch.linalg.cholesky_ex(precision.double())[1])
            shift = precision.diagonal().max() * (len(precision) * torch.finfo(precision.dtype).eps * indefinite)
            blocks.append(Dense(shapes, precision.unsqueeze(0), dict.fromkeys(mean, shift), precision.new_ones(1)))
        return blocks[0] if len(blocks) == 1 else Blocks(tuple(blocks))


@dataclass(frozen=True)
class Full(Layerwise):
    """Gaussian weights with one covariance matrix for all of them. For a linear model with Gaussian noise this is the exact posterior.

    >>> list(Full().leaves({"0.weight": torch.zeros(1, 2), "1.weight": torch.zeros(1)}, {}))
    ['mean/0.weight', 'mean/1.weight', 'factor/']
    """

    def blocks(self, names: list[str]) -> dict[str, list[str]]:
        """All weights in one block."""
        return {"": names}
