"""Matrix-variate Gaussians, with pseudo-inputs (Louizos & Welling 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.mean_field import noise_like
from dubito.posteriors.families.reparametrized import LINEAR, TINY, Estimator, Reparametrized
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Diagonal, Kronecker
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class MatrixNormal(Family):
    r"""A layer's matrix [out, in] has one covariance over its inputs, shared by all outputs up to their scales c:

    .. math:: W \sim MN(M,\; \mathrm{diag}(c^2),\; U), \qquad U = \mathrm{diag}(r)\, (I + A^T A)^{-1}\, \mathrm{diag}(r).

    The rows of A [pseudo, in] are pseudo-inputs, in units of 1 / r, at which the layer's output is known, the better the larger they
    are: this is what conditioning a matrix with independent entries on noisy outputs there leaves of its covariance. (The paper's
    pseudo-outputs would only move the mean, which is free.) The leading axis of a weight with two axes or more is its outputs; the
    rest is its inputs. Vectors, such as biases, are independent.

    A draw forms no matrix of the size of the inputs: with standard normal E [out, in] and e [out, pseudo],
    :math:`W = M + c \circ (E - (E A^T + e)(I + A A^T)^{-1} A) \circ r`.

    >>> leaves = MatrixNormal(pseudo=4).leaves({"w": torch.zeros(3, 5)}, {"w": torch.ones(3, 5)})
    >>> leaves["pseudo/w"].shape
    torch.Size([4, 5])
    """

    pseudo: int = 10  # pseudo-inputs of each layer

    local: ClassVar[bool] = True

    def __post_init__(self):
        if self.pseudo < 1:
            raise ValueError(f"pseudo is at least 1; got {self.pseudo}")

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        made, generator = of_kind("mean", tree.clone(start)), torch.Generator().manual_seed(0)
        for name, leaf in start.items():
            if leaf.ndim < 2:
                made[f"rho/{name}"] = inverse_softplus(scale[name])
                continue
            spread = scale[name].flatten(1)
            size = spread.mean().sqrt()  # of an entry, the product of a row's and a column's
            made[f"columns/{name}"] = inverse_softplus((spread.mean(1) / size).clamp_min(1e-6))
            made[f"rows/{name}"] = inverse_softplus((spread.mean(0) / size).clamp_min(1e-6))
            inputs = spread.shape[1]
            made[f"pseudo/{name}"] = torch.randn(min(self.pseudo, inputs), inputs, generator=generator).to(leaf) / math.sqrt(
                inputs
            )
        return made

    def _parts(self, leaves: Params, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c, r, A and the Cholesky factor of I + A A^T, which is there for any A: whether, need not be asked of a GPU."""
        c, r = F.softplus(leaves[f"columns/{name}"]), F.softplus(leaves[f"rows/{name}"])
        a = leaves[f"pseudo/{name}"]
        return c, r, a, torch.linalg.cholesky_ex(a @ a.T + torch.eye(len(a), dtype=a.dtype, device=a.device)).L

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        mean = kind(leaves, "mean")
        extra = {
            f"pseudo/{name}": mean[name].new_empty(len(mean[name]), len(a)).normal_(generator=generator)
            for name, a in kind(leaves, "pseudo").items()
        }
        return {**noise_like(mean, generator), **extra}

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        drawn = {}
        for name, mean in kind(leaves, "mean").items():
            if mean.ndim < 2:
                drawn[name] = mean + F.softplus(leaves[f"rho/{name}"]) * noise[name]
                continue
            c, r, a, root = self._parts(leaves, name)
            free = noise[name].flatten(1)
            seen = free @ a.T + noise[f"pseudo/{name}"]  # what the pseudo-outputs would have been
            known = torch.cholesky_solve(seen.T, root).T @ a
            drawn[name] = mean + (c.unsqueeze(1) * (free - known) * r).view_as(mean)
        return drawn

    def outputs(
        self, leaves: Params, layers: dict[str, str | None], estimator: Estimator, generator: torch.Generator
    ) -> tuple[Params, Reparametrized]:
        """What draws the outputs of layers."""
        mean = kind(leaves, "mean")
        names = [name for pair in layers.items() for name in pair if name is not None]
        return {name: mean[name] for name in names}, _Correlated(self, leaves, mean, layers, generator)

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight."""
        mean, variance = kind(leaves, "mean"), {}
        for name, leaf in mean.items():
            if leaf.ndim < 2:
                variance[name] = F.softplus(leaves[f"rho/{name}"]).square()
                continue
            c, r, a, root = self._parts(leaves, name)
            inputs = r.square() * (1 - (a * torch.cholesky_solve(a, root)).sum(0))
            variance[name] = torch.outer(c.square(), inputs).view_as(leaf)
        return mean, variance

    def entropy(self, leaves: Params) -> Tensor:
        """Entropy of q in nats."""
        mean, logs = kind(leaves, "mean"), []
        for name, leaf in mean.items():
            if leaf.ndim < 2:
                logs.append(F.softplus(leaves[f"rho/{name}"]).log().sum())
                continue
            c, r, _, root = self._parts(leaves, name)
            logs.append(len(r) * c.log().sum() + len(c) * (r.log().sum() - root.diagonal().log().sum()))
        return torch.stack(logs).sum() + tree.size(mean) * 0.5 * (1 + math.log(2 * math.pi))

    def covariance(self, leaves: Params) -> Covariance:
        """The covariance of q."""
        made: list[Covariance] = []
        for name, leaf in kind(leaves, "mean").items():
            if leaf.ndim < 2:
                made.append(Diagonal.of({name: F.softplus(leaves[f"rho/{name}"]).square()}))
                continue
            c, r, a, _ = self._parts(leaves, name)
            outputs, inputs = torch.diag(c.double() ** -2), torch.diag(r.double() ** -2) + (a / r).double().T @ (a / r).double()
            nothing = {name: outputs.new_zeros(())}
            shape, one = list(leaf.shape), outputs.new_ones(1)
            made.append(
                Kronecker.of(name, None, shape, outputs.unsqueeze(0).to(leaf), inputs.to(leaf), nothing, scale=one.to(leaf))
            )
        return made[0] if len(made) == 1 else Blocks(tuple(made))


class _Correlated(Reparametrized):
    r"""Draws the outputs of layers whose rows are independent, and alike but for their scales c.

    Of a matrix that is used once an example, :math:`y_o \sim N(x^T M_o,\; c_o^2\, x^T U x)`. Elsewhere one draw for the batch, of which
    every example has the rows with random signs: rows are independent, so their signs are free; those of inputs are not.
    """

    def __init__(self, family: MatrixNormal, leaves: Params, means: Params, layers: dict[str, str | None], generator):
        super().__init__(means, {}, layers, "flipout", generator)  # no leaves of its own
        self.family, self.own = family, leaves

    def _drawn(self, func: Any, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple, options: dict) -> Tensor:
        mean, once = func(x, weight, bias, *rest, **options), func in LINEAR and x.ndim == 2
        channel = -1 if func in LINEAR else 1
        if once:
            c, r, a, root = self.family._parts(self.own, name)
            inputs = x * r
            known = torch.linalg.solve_triangular(root, a @ inputs.T, upper=False)  # what the pseudo-inputs tell of these
            left = (inputs.square().sum(1) - known.square().sum(0)).clamp_min(TINY).sqrt()
            noise = left.unsqueeze(1) * c * self._normal(mean)
        else:
            part = {key: leaf for key, leaf in self.own.items() if key.split("/", 1)[1] == name}
            delta = self.family.draw(part, self.family.noise(part, self.generator))[name] - weight
            noise = self._signs(mean, channel) * func(x, delta, None, *rest, **options)
        if bias is not None and (own := self.layers[name]) is not None:
            shape = [len(x), *[1] * (mean.ndim - 1)]
            shape[channel] = len(bias)
            noise = noise + (F.softplus(self.own[f"rho/{own}"]) * self._normal(x.new_empty(len(x), len(bias)))).view(shape)
        return mean + noise
