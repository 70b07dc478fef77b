"""Gaussian families: independent weights, a few directions in which all vary together, full covariance matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.families.family import (
    LOG_TWO_PI,
    Drawing,
    Family,
    ScaledFamily,
    inverse_softplus,
    label,
    log_scales,
    normal_like,
    pick,
    reparametrize,
    standard_entropy,
    total,
)
from dubito.posteriors.families.reparametrized import Estimator, Layers, Reparametrized, names_in
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.covariances import Blocks, Covariance, Dense, Diagonal
from dubito.tensors.covariances import LowRank as Structure
from dubito.tensors.randomness import PIECE
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class MeanField(ScaledFamily):
    r"""Independent Gaussians, :math:`w = \mu + \ln(1 + e^\rho)\, \epsilon` with :math:`\epsilon \sim N(0, 1)` (Blundell et al. 2015).

    Density :math:`\prod_i N(w_i; \mu_i, \sigma_i^2)`, entropy :math:`\sum_i \ln \sigma_i + \frac n2 (1 + \ln 2\pi)`.

    >>> leaves = MeanField().leaves({"w": torch.zeros(2)}, {"w": torch.full((2,), 0.1)})
    >>> MeanField().moments(leaves)[1]["w"]
    tensor([0.0100, 0.0100])
    """

    local: ClassVar[bool] = True

    def constrain(self, leaves: Params) -> Params:
        """Means and scales."""
        return {**label("mean", pick(leaves, "mean")), **label("scale", self.scales(leaves))}

    def unconstrain_gradient(self, leaves: Params, slopes: Params) -> Params:
        r"""The gradient in :math:`\rho`: that in the scale times :math:`1 / (1 + e^{-\rho})`. It overwrites `slopes`."""
        for name, rho in pick(leaves, "rho").items():
            slopes[f"rho/{name}"] = slope = slopes.pop(f"scale/{name}")
            for slope_piece, rho_piece in pieces(slope, rho):
                slope_piece.mul_(torch.sigmoid(rho_piece))
        return slopes

    def backward(self, leaves: Params, noise: Params, drawn: Params, slopes: Params) -> None:
        """Add the slope to the gradient of the mean, and slope * noise to that of the scale. It overwrites `noise`."""
        with torch.no_grad():
            for name, slope in slopes.items():
                add_gradient(leaves[f"scale/{name}"], noise[name].mul_(slope))
                add_gradient(leaves[f"mean/{name}"], slope)

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`\mu + \sigma \epsilon`."""
        return reparametrize(pick(leaves, "mean"), self.scales(leaves), noise)

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        r""":math:`\mu` and :math:`\sigma^2`."""
        return pick(leaves, "mean"), tree.apply(torch.square, self.scales(leaves))

    def entropy(self, leaves: Params) -> Tensor:
        r""":math:`\sum_i \ln \sigma_i + \frac n2 (1 + \ln 2\pi)`."""
        scales = self.scales(leaves)
        return log_scales(scales) + standard_entropy(scales)

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        r""":math:`\sum_i \ln N(w_i; \mu_i, \sigma_i^2)`."""
        mean, scales = pick(leaves, "mean"), self.scales(leaves)
        terms = (
            -0.5 * ((params[name] - leaf) / scales[name]).square().sum() - scales[name].log().sum() for name, leaf in mean.items()
        )
        return total(terms) - tree.size(mean) * 0.5 * LOG_TWO_PI

    def outputs(self, leaves: Params, layers: Layers, estimator: Estimator, generator: torch.Generator) -> Drawing:
        """The means, and outputs drawn by local reparametrization or flipout."""
        means = pick(leaves, "mean")
        drawing = Reparametrized(means, self.scales(leaves), layers, estimator, generator)
        return {name: means[name] for name in names_in(layers)}, drawing

    def covariance(self, leaves: Params) -> Covariance:
        r""":math:`\mathrm{diag}(\sigma^2)`."""
        return Diagonal.of(self.moments(leaves)[1])


def pieces(*leaves: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of the same shape, in pieces that stay in the cache over several operations."""
    if leaves[0].device.type != "cpu" or not all(leaf.is_contiguous() for leaf in leaves):
        yield leaves
        return
    yield from zip(*(leaf.view(-1).split(PIECE) for leaf in leaves), strict=True)


def add_gradient(leaf: Tensor, slope: Tensor) -> None:
    """Add to the accumulated gradient of a leaf."""
    leaf.grad = slope if leaf.grad is None else leaf.grad.add_(slope)


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


LARGEST = 8192  # weights in a matrix


@dataclass(frozen=True)
class Layerwise(Family):
    r"""Gaussian weights with a full covariance in each layer: :math:`w_l = \mu_l + L_l \epsilon`, :math:`\epsilon \sim N(0, I)`.

    :math:`L_l` is lower triangular, of n rows. They are in units of its diagonal, so that one step size suits weights of any scale,
    and what lies beside the diagonal is divided by :math:`\sqrt n`, so that the noise of so many numbers does not widen q.

    The weights of a layer are those with the same name up to the last dot. The entropy is
    :math:`\sum_l \ln \det L_l + \frac n2 (1 + \ln 2\pi)`. The matrix has a row for each weight, so layers must be small.

    >>> leaves = Layerwise().leaves({"0.weight": torch.zeros(1, 2), "0.bias": torch.zeros(1)}, {})
    >>> leaves["rows/0"].shape
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
            leaves[f"rows/{block}"] = torch.diag(inverse_softplus(torch.cat(spread)))
        return leaves

    def _factors(self, leaves: Params) -> dict[str, Tensor]:
        """The lower triangular matrices by block, with positive diagonals."""
        # "factor" are those of version 0.1, which are not divided
        shares = {
            f"{kind}/{block}": divided for kind, divided in (("rows", True), ("factor", False)) for block in pick(leaves, kind)
        }
        factors = {}
        for key, divided in shares.items():
            raw = leaves[key]
            scale = F.softplus(raw.diagonal())
            beside = scale / math.sqrt(len(raw)) if divided else scale
            factors[key.split("/", 1)[1]] = raw.tril(-1) * beside.unsqueeze(1) + torch.diag(scale)
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
    ['mean/0.weight', 'mean/1.weight', 'rows/']
    """

    def blocks(self, names: list[str]) -> dict[str, list[str]]:
        """All weights in one block."""
        return {"": names}
