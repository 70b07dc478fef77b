"""What a wide network is before it sees data: a Gaussian process (Neal 1996, Lee et al. 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dubito.model.priors.scales import keep_positive


@dataclass(frozen=True)
class NNGP:
    r"""The covariance of the outputs of a perceptron with `depth` hidden layers, as their width goes to infinity, under the prior
    `Normal.fan_in(network, scale, bias=bias)`:

    .. math:: K_0(x, z) = b^2 + s^2 \frac{x^T z}{d}, \qquad
              K_{l+1}(x, z) = b^2 + s^2\, E_{(u, v) \sim N(0, K_l)}[\phi(u) \phi(v)]

    For ReLU the expectation is :math:`\frac{1}{2 \pi} \sqrt{K_l(x, x) K_l(z, z)} (\sin \theta + (\pi - \theta) \cos \theta)` with
    :math:`\cos \theta` the correlation (Cho & Saul 2009); for erf it is (Williams 1997)
    :math:`\frac{2}{\pi} \arcsin(2 K_l(x, z) / \sqrt{(1 + 2 K_l(x, x)) (1 + 2 K_l(z, z))})`.

    >>> NNGP(depth=1, scale=2**0.5, bias=0.0)(torch.ones(1, 3))  # a scale of root 2 keeps the size of ReLU features
    tensor([[2.]])
    """

    depth: int = 1
    activation: Literal["relu", "erf"] = "relu"
    scale: float = field(default=1.0, kw_only=True)
    bias: float = field(default=1.0, kw_only=True)

    def __post_init__(self):
        keep_positive(self, "scale")
        if self.activation not in ("relu", "erf"):
            raise ValueError(f"the activation is 'relu' or 'erf', whose recursions are known; got {self.activation!r}")
        if self.depth < 0 or not self.bias >= 0:
            raise ValueError(f"depth and bias are at least 0; got {self.depth} and {self.bias}")

    def __call__(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The covariances of the outputs at x [N, d] with those at z [M, d], [N, M]."""
        z = x if z is None else z
        width, b, s = x.shape[-1], self.bias**2, self.scale**2
        k, kx, kz = b + s * (x @ z.mT) / width, b + s * x.square().sum(1) / width, b + s * z.square().sum(1) / width
        for _ in range(self.depth):
            k, kx, kz = b + s * self._hidden(k, kx.unsqueeze(1), kz), b + s * self._own(kx), b + s * self._own(kz)
        return k

    def _hidden(self, k: Tensor, kx: Tensor, kz: Tensor) -> Tensor:
        if self.activation == "erf":
            return 2 / math.pi * torch.asin((2 * k / ((1 + 2 * kx) * (1 + 2 * kz)).sqrt()).clamp(-1, 1))
        size = (kx * kz).sqrt()
        cosine = (k / size.clamp_min(torch.finfo(k.dtype).tiny)).clamp(-1, 1)
        theta = torch.acos(cosine)
        return size / (2 * math.pi) * (torch.sin(theta) + (math.pi - theta) * cosine)

    def _own(self, k: Tensor) -> Tensor:
        """The same at one input, where the correlation is 1: no rounding there."""
        return 0.5 * k if self.activation == "relu" else 2 / math.pi * torch.asin(2 * k / (1 + 2 * k))
