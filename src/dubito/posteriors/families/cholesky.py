"""Gaussians with a covariance matrix: of every layer, or of all weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.mean_field import noise_like
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Dense
from dubito.tensors.tree import Params

LARGEST = 8192  # weights that share a matrix


@dataclass(frozen=True)
class Layerwise(Family):
    r"""The weights of a layer vary together: :math:`w_l = \mu_l + L_l \epsilon` with a lower triangular :math:`L_l`, whose rows are in
    units of its diagonal, so that steps of one size suit weights of any.

    A layer is what shares a name up to its last dot. Its matrix has as many rows as the layer has weights, so this is for small ones.

    >>> leaves = Layerwise().leaves({"0.weight": torch.zeros(1, 2), "0.bias": torch.zeros(1)}, {})
    >>> leaves["factor/0"].shape
    torch.Size([3, 3])
    """

    def blocks(self, names: list[str]) -> dict[str, list[str]]:
        """The weights that vary together, by the name of what they share."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        made = of_kind("mean", tree.clone(start))
        for block, names in self.blocks(list(start)).items():
            size = sum(start[name].numel() for name in names)
            if size > LARGEST:
                raise ValueError(
                    f"a covariance matrix of {size:,} weights ({block or 'all'}) does not fit: use family='low_rank' or "
                    "'matrix_normal', or set `only` to Bayesian weights that are fewer"
                )
            spread = [scale.get(name, torch.full_like(start[name], 0.01)).flatten() for name in names]
            made[f"factor/{block}"] = torch.diag(inverse_softplus(torch.cat(spread)))
        return made

    def _factors(self, leaves: Params) -> dict[str, Tensor]:
        """The lower triangular matrices, whose diagonal is kept positive."""
        found = {}
        for block, raw in kind(leaves, "factor").items():
            scale = F.softplus(raw.diagonal())
            found[block] = raw.tril(-1) * scale.unsqueeze(1) + torch.diag(scale)
        return found

    def _blocks(self, leaves: Params) -> dict[str, Params]:
        mean = kind(leaves, "mean")
        return {block: {name: mean[name] for name in names} for block, names in self.blocks(list(mean)).items()}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        return noise_like(kind(leaves, "mean"), generator)

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        factors, drawn = self._factors(leaves), {}
        for block, mean in self._blocks(leaves).items():
            flat = tree.flatten(mean) + factors[block] @ tree.flatten({name: noise[name] for name in mean})
            drawn |= tree.unflatten(flat, mean)
        return {name: drawn[name] for name in kind(leaves, "mean")}

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight."""
        factors, variance = self._factors(leaves), {}
        for block, mean in self._blocks(leaves).items():
            variance |= tree.unflatten(factors[block].square().sum(1), mean)
        return kind(leaves, "mean"), variance

    def entropy(self, leaves: Params) -> Tensor:
        """Entropy of q in nats."""
        logs = torch.stack([factor.diagonal().log().sum() for factor in self._factors(leaves).values()]).sum()
        return logs + tree.size(kind(leaves, "mean")) * 0.5 * (1 + math.log(2 * math.pi))

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """Log density of some weights."""
        factors, total = self._factors(leaves), []
        for block, mean in self._blocks(leaves).items():
            away = tree.flatten({name: params[name] for name in mean}) - tree.flatten(mean)
            white = torch.linalg.solve_triangular(factors[block], away.unsqueeze(1), upper=False)
            total.append(
                -0.5 * white.square().sum() - factors[block].diagonal().log().sum() - 0.5 * len(away) * math.log(2 * math.pi)
            )
        return torch.stack(total).sum()

    def covariance(self, leaves: Params) -> Covariance:
        """The covariance of q."""
        factors, made = self._factors(leaves), []
        for block, mean in self._blocks(leaves).items():
            precision = torch.cholesky_inverse(factors[block].double()).to(factors[block])
            shapes = {name: list(leaf.shape) for name, leaf in mean.items()}
            # in the weights' own dtype, as its users expect; what rounding takes from a precision is given back where it has to be
            lost = bool(torch.linalg.cholesky_ex(precision.double())[1])
            shift = precision.diagonal().max() * (len(precision) * torch.finfo(precision.dtype).eps * lost)
            made.append(Dense(shapes, precision.unsqueeze(0), dict.fromkeys(mean, shift), precision.new_ones(1)))
        return made[0] if len(made) == 1 else Blocks(tuple(made))


@dataclass(frozen=True)
class Full(Layerwise):
    """All weights vary together. On a linear model with Gaussian noise this is the posterior itself.

    >>> list(Full().leaves({"0.weight": torch.zeros(1, 2), "1.weight": torch.zeros(1)}, {}))
    ['mean/0.weight', 'mean/1.weight', 'factor/']
    """

    def blocks(self, names: list[str]) -> dict[str, list[str]]:
        """All weights in one block."""
        return {"": names}
