"""Independent Gaussians."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.families.family import Family, inverse_softplus, kind, of_kind
from dubito.posteriors.families.reparametrized import Estimator, Reparametrized
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance, Diagonal
from dubito.tensors.randomness import PIECE, normals
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class MeanField(Family):
    r"""Every weight on its own: :math:`w = \mu + \ln(1 + e^\rho)\, \epsilon` (Blundell et al. 2015).

    >>> leaves = MeanField().leaves({"w": torch.zeros(2)}, {"w": torch.full((2,), 0.1)})
    >>> MeanField().moments(leaves)[1]["w"]
    tensor([0.0100, 0.0100])
    """

    local: ClassVar[bool] = True

    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning."""
        return {**of_kind("mean", tree.clone(start)), **of_kind("rho", tree.apply(inverse_softplus, scale))}

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""
        return noise_like(kind(leaves, "mean"), generator)

    def opened(self, leaves: Params) -> Params:
        """The leaves with standard deviations in the place of rho."""
        rho = kind(leaves, "rho")
        return {**of_kind("mean", kind(leaves, "mean")), **of_kind("scale", tree.apply(F.softplus, rho))}

    def closed(self, leaves: Params, slopes: Params) -> Params:
        """The gradient in the leaves."""
        for name, rho in kind(leaves, "rho").items():
            slopes[f"rho/{name}"] = slope = slopes.pop(f"scale/{name}")
            for part, own in pieces(slope, rho):
                part.mul_(torch.sigmoid(own))
        return slopes

    def pull(self, leaves: Params, noise: Params, drawn: Params, slopes: Params) -> None:
        """Add the gradients by hand, without a graph."""
        with torch.no_grad():
            for name, slope in slopes.items():
                add_to(leaves[f"scale/{name}"], noise[name].mul_(slope))  # nobody needs the noise after this
                add_to(leaves[f"mean/{name}"], slope)

    def scales(self, leaves: Params) -> Params:
        """Standard deviations."""
        return kind(leaves, "scale") or tree.apply(F.softplus, kind(leaves, "rho"))

    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""
        scales = self.scales(leaves)
        return {name: torch.addcmul(mean, scales[name], noise[name]) for name, mean in kind(leaves, "mean").items()}

    def moments(self, leaves: Params) -> tuple[Params, Params]:
        """Mean and variance of every weight."""
        return kind(leaves, "mean"), tree.apply(torch.square, self.scales(leaves))

    def entropy(self, leaves: Params) -> Tensor:
        """Entropy of q in nats."""
        scales = self.scales(leaves)
        logs = torch.stack([leaf.log().sum() for leaf in scales.values()]).sum()
        return logs + tree.size(scales) * 0.5 * (1 + math.log(2 * math.pi))

    def log_prob(self, leaves: Params, params: Params) -> Tensor:
        """Log density of some weights."""
        mean, scales = kind(leaves, "mean"), self.scales(leaves)
        parts = [
            -0.5 * ((params[name] - leaf) / scales[name]).square().sum() - scales[name].log().sum() for name, leaf in mean.items()
        ]
        return torch.stack(parts).sum() - tree.size(mean) * 0.5 * math.log(2 * math.pi)

    def outputs(
        self, leaves: Params, layers: dict[str, str | None], estimator: Estimator, generator: torch.Generator
    ) -> tuple[Params, Reparametrized]:
        """What draws the outputs of layers."""
        names = [name for pair in layers.items() for name in pair if name is not None]
        means, scales = kind(leaves, "mean"), self.scales(leaves)
        return {name: means[name] for name in names}, Reparametrized(means, scales, layers, estimator, generator)

    def covariance(self, leaves: Params) -> Covariance:
        """The covariance of q."""
        return Diagonal.of(self.moments(leaves)[1])


def noise_like(leaves: Params, generator: torch.Generator) -> Params:
    """Standard normal numbers in the shapes of some leaves."""
    return dict(zip(leaves, normals(list(leaves.values()), generator), strict=True))


def pieces(*leaves: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape a piece at a time, so that several passes over them find them in the cache."""
    if leaves[0].device.type != "cpu" or not all(leaf.is_contiguous() for leaf in leaves):
        yield leaves
        return
    yield from zip(*(leaf.view(-1).split(PIECE) for leaf in leaves), strict=True)


def add_to(leaf: Tensor, slope: Tensor) -> None:
    """To the gradient that has built up in a leaf."""
    leaf.grad = slope if leaf.grad is None else leaf.grad.add_(slope)
