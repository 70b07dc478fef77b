"""Convolution kernels whose neighbouring weights are alike (Fortuin et al. 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors.prior import Prior, source_for, zero
from dubito.model.priors.scales import keep_positive
from dubito.tensors.tree import Params, full_precision


@dataclass(frozen=True)
class ConvCorrelated(Prior):
    r"""The weights at positions p and q of a kernel have the covariance
    :math:`\mathrm{scale}^2 \exp(-\lVert p - q \rVert / \mathrm{length})`.

    Kernels of different channels, and leaves without positions (fewer than three axes), are independent :math:`N(0, \mathrm{scale}^2)`.

    >>> prior = ConvCorrelated(scale=1.0, length=1.0)
    >>> prior.covariance((1, 2)).double().round(decimals=3)  # neighbours have 1 / e in common
    tensor([[1.0000, 0.3680],
            [0.3680, 1.0000]], dtype=torch.float64)
    """

    scale: float = 1.0
    length: float = field(default=1.0, kw_only=True)

    def __post_init__(self):
        keep_positive(self, "scale", "length")

    def covariance(self, shape: tuple[int, ...]) -> Tensor:
        """Of the positions of a kernel, [k, k], in float64."""
        return self.scale**2 * _correlation(shape, self.length)

    def _root(self, leaf: Tensor) -> Tensor:
        """The Cholesky factor of a leaf's kernels."""
        if leaf.ndim < 3:
            return leaf.new_full((1, 1), self.scale)
        return self.scale * torch.linalg.cholesky(_correlation(tuple(leaf.shape[2:]), self.length)).to(leaf)

    def _kernels(self, leaf: Tensor) -> Tensor:
        return leaf.reshape(-1, math.prod(leaf.shape[2:])) if leaf.ndim > 2 else leaf.reshape(-1, 1)

    def log_prob(self, params: Params) -> Tensor:
        """Sum over kernels of log N(0, K) with K = `covariance`."""
        total = zero(params)
        for leaf in params.values():
            kernels = self._kernels(full_precision(leaf))  # [n, k]
            root = self._root(leaf).to(kernels)
            white = torch.linalg.solve_triangular(root, kernels.mT, upper=False)
            total = total - 0.5 * white.square().sum() - len(kernels) * root.diagonal().log().sum()
            total = total - 0.5 * leaf.numel() * math.log(2 * math.pi)
        return total

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """For independent weights only the diagonal of the precision is needed beside the mean."""
        if not independent:
            return None
        total = self.log_prob(mean)
        for leaf in variance.values():
            precision = torch.cholesky_inverse(self._root(leaf)).diagonal()
            total = total - 0.5 * (self._kernels(leaf) * precision).sum()
        return total

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """One draw in the shapes of `like`."""
        source = source_for(like, generator)
        normals = {name: torch.empty_like(leaf).normal_(generator=source) for name, leaf in like.items()}
        return {name: (self._kernels(leaf) @ self._root(leaf).mT).reshape(leaf.shape) for name, leaf in normals.items()}

    def units(self, params: Params) -> Params:
        """`scale` for every weight."""
        return {name: torch.full_like(leaf, self.scale) for name, leaf in params.items()}


def _correlation(shape: tuple[int, ...], length: float) -> Tensor:
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in shape), indexing="ij")
    places = torch.stack([axis.reshape(-1) for axis in axes], 1)  # [k, d]
    return torch.exp(-(places.unsqueeze(1) - places).square().sum(2).sqrt() / length)
