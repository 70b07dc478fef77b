"""Independent Gaussians."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dubito.posteriors.families.family import Drawing, ScaledFamily
from dubito.posteriors.families.leaves import LOG_TWO_PI, label, log_scales, pick, reparametrize, standard_entropy, total
from dubito.posteriors.families.reparametrized import Estimator, Layers, Reparametrized, names_in
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance, Diagonal
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
