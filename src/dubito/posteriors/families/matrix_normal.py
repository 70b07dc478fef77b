"""Matrix-variate Gaussians, with pseudo-inputs (Louizos & Welling 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.families.family import (
    Drawing,
    Family,
    inverse_softplus,
    label,
    normal_like,
    pick,
    pick_weight,
    standard_entropy,
    total,
)
from dubito.posteriors.families.reparametrized import TINY, Estimator, LayerCall, Layers, Reparametrized, names_in
from dubito.tensors import tree
from dubito.tensors.checks import at_least
from dubito.tensors.covariances import Blocks, Covariance, Diagonal, Kronecker
from dubito.tensors.tree import Params


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
