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
    pick_weight,
    reparametrize,
    standard_entropy,
    total,
)
from dubito.posteriors.families.reparametrized import TINY, Estimator, LayerCall, Layers, Reparametrized, names_in
from dubito.tensors import tree
from dubito.tensors.checks import at_least, require
from dubito.tensors.covariances import Blocks, Covariance, Dense, Diagonal, Kronecker
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

    independent: ClassVar[bool] = True
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


@dataclass(frozen=True)
class MatrixNormal(Family):
    r"""Matrix-variate Gaussians: a matrix [out, in] has one covariance over its inputs, which all outputs share up to scales c:

    .. math:: W \sim MN(M,\; \mathrm{diag}(c^2),\; U), \qquad U = \mathrm{diag}(r)\, (I + A^T A)^{-1}\, \mathrm{diag}(r).

    The rows of A [pseudo, in] are pseudo-inputs in units of 1 / r: U is the covariance that is left of independent entries after noisy
    outputs were observed there. (The pseudo-outputs of the paper would only move the mean, which is free.) The first axis of a weight
    with two axes or more is its outputs, the rest is its inputs. Vectors, such as biases, are independent.

    A draw forms no [in, in] matrix: with standard normal E [out, in] and e [out, pseudo],
    :math:`W = M + c \circ (E - (E A^T + e)(I + A A^T)^{-1} A) \circ r`. The entropy of a matrix is
    :math:`n_\mathrm{in} \sum \ln c + n_\mathrm{out} (\sum \ln r - \frac12 \ln \det(I + A A^T)) + \frac n2 (1 + \ln 2\pi)`.

    >>> leaves = MatrixNormal(pseudo=4).leaves({"w": torch.zeros(3, 5)}, {"w": torch.ones(3, 5)})
    >>> leaves["pseudo/w"].shape
    torch.Size([4, 5])
    """

    pseudo: int = 10  # pseudo-inputs of each layer

    local: ClassVar[bool] = True

    def __post_init__(self):
        at_least(1, pseudo=self.pseudo)

    def leaves(self, start: Params, scale: Params) -> Params:
        """Means; rho of vectors; and for matrices c, r ("columns", "rows") and random pseudo-inputs."""
        leaves, generator = label("mean", tree.clone(start)), torch.Generator().manual_seed(0)
        for name, leaf in start.items():
            if leaf.ndim < 2:
                leaves[f"rho/{name}"] = inverse_softplus(scale[name])
                continue
            spread = scale[name].flatten(1)
            size, inputs = spread.mean().sqrt(), spread.shape[1]  # the scale of an entry is a product of c and r
            leaves[f"columns/{name}"] = inverse_softplus((spread.mean(1) / size).clamp_min(1e-6))
            leaves[f"rows/{name}"] = inverse_softplus((spread.mean(0) / size).clamp_min(1e-6))
            pseudo = torch.randn(min(self.pseudo, inputs), inputs, generator=generator).to(leaf)
            leaves[f"pseudo/{name}"] = pseudo / math.sqrt(inputs)
        return leaves

    def matrix_factors(self, leaves: Params, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c, r, A and the Cholesky factor of I + A A^T, which always exists: no check, which would have to wait for a GPU."""
        c, r = F.softplus(leaves[f"columns/{name}"]), F.softplus(leaves[f"rows/{name}"])
        a = leaves[f"pseudo/{name}"]
        return c, r, a, torch.linalg.cholesky_ex(a @ a.T + torch.eye(len(a), dtype=a.dtype, device=a.device)).L

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """Standard normal E for every weight, and e for the pseudo-inputs of every matrix."""
        mean = pick(leaves, "mean")
        extra = {
            f"pseudo/{name}": mean[name].new_empty(len(mean[name]), len(a)).normal_(generator=generator)
            for name, a in pick(leaves, "pseudo").items()
        }
        return {**normal_like(mean, generator), **extra}

    def draw(self, leaves: Params, noise: Params) -> Params:
        r""":math:`M + c \circ (E - (E A^T + e)(I + A A^T)^{-1} A) \circ r`, and independent vectors."""
        drawn = {}
        for name, mean in pick(leaves, "mean").items():
            if mean.ndim < 2:
                drawn[name] = mean + F.softplus(leaves[f"rho/{name}"]) * noise[name]
                continue
            c, r, a, root = self.matrix_factors(leaves, name)
            free = noise[name].flatten(1)
            observed = free @ a.T + noise[f"pseudo/{name}"]  # noisy outputs at the pseudo-inputs
            explained = torch.cholesky_solve(observed.T, root).T @ a
            drawn[name] = mean + (c.unsqueeze(1) * (free - explained) * r).view_as(mean)
        return drawn

    def outputs(self, leaves: Params, layers: Layers, estimator: Estimator, generator: torch.Generator) -> Drawing:
        """The means, and outputs drawn by the covariance over the inputs."""
        means = pick(leaves, "mean")
        return {name: means[name] for name in names_in(layers)}, _Correlated(self, leaves, means, layers, generator)

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        """M, and the variances c^2 diag(U)."""
        mean, variance = pick(leaves, "mean"), {}
        for name, leaf in mean.items():
            if leaf.ndim < 2:
                variance[name] = F.softplus(leaves[f"rho/{name}"]).square()
                continue
            c, r, a, root = self.matrix_factors(leaves, name)
            inputs = r.square() * (1 - (a * torch.cholesky_solve(a, root)).sum(0))
            variance[name] = torch.outer(c.square(), inputs).view_as(leaf)
        return mean, variance

    def entropy(self, leaves: Params) -> Tensor:
        """The sum of the entropies of the matrices, see above, and of the vectors."""
        mean, logs = pick(leaves, "mean"), []
        for name, leaf in mean.items():
            if leaf.ndim < 2:
                logs.append(F.softplus(leaves[f"rho/{name}"]).log().sum())
                continue
            c, r, _, root = self.matrix_factors(leaves, name)
            logs.append(len(r) * c.log().sum() + len(c) * (r.log().sum() - root.diagonal().log().sum()))
        return total(logs) + standard_entropy(mean)

    def covariance(self, leaves: Params) -> Covariance:
        """A Kronecker product for each matrix, and a diagonal for each vector."""
        blocks: list[Covariance] = []
        for name, leaf in pick(leaves, "mean").items():
            if leaf.ndim < 2:
                blocks.append(Diagonal.of({name: F.softplus(leaves[f"rho/{name}"]).square()}))
                continue
            c, r, a, _ = self.matrix_factors(leaves, name)
            outputs, inputs = torch.diag(c.double() ** -2), torch.diag(r.double() ** -2) + (a / r).double().T @ (a / r).double()
            zero, one = {name: outputs.new_zeros(())}, outputs.new_ones(1).to(leaf)
            precision = outputs.unsqueeze(0).to(leaf), inputs.to(leaf)
            blocks.append(Kronecker.of(name, None, list(leaf.shape), *precision, zero, scale=one))
        return blocks[0] if len(blocks) == 1 else Blocks(tuple(blocks))


class _Correlated(Reparametrized):
    r"""Draws the outputs of layers whose rows are independent and differ only in their scales c.

    Where an example uses a matrix once, :math:`y_o \sim N(x^T M_o,\; c_o^2\, x^T U x)`. Elsewhere there is one draw for the batch, and
    each example has its own random signs of the rows. Rows are independent, so their signs are free; those of inputs are not.
    """

    def __init__(self, family: MatrixNormal, parameters: Params, means: Params, layers: Layers, generator: torch.Generator):
        super().__init__(means, {}, layers, "flipout", generator)  # no leaves of variances
        self.family, self.parameters = family, parameters

    def _draw(self, call: LayerCall, name: str) -> Tensor:
        x, bias = call.x, self.layers[name]
        mean = call.run(x, call.weight, call.bias)
        if call.linear and x.ndim == 2:
            c, r, a, root = self.family.matrix_factors(self.parameters, name)
            inputs = x * r
            explained = torch.linalg.solve_triangular(root, a @ inputs.T, upper=False)  # by the pseudo-inputs
            left = (inputs.square().sum(1) - explained.square().sum(0)).clamp_min(TINY).sqrt()
            noise = left.unsqueeze(1) * c * self._normal(mean)
        else:
            leaves = pick_weight(self.parameters, name)
            delta = self.family.draw(leaves, self.family.noise(leaves, self.generator))[name] - call.weight
            noise = self._signs(mean, call.channel) * call.run(x, delta)
        if call.bias is not None and bias is not None:
            shift = F.softplus(self.parameters[f"rho/{bias}"]) * self._normal(x.new_empty(len(x), len(call.bias)))
            noise = noise + call.spread(shift, mean.ndim)
        return mean + noise
