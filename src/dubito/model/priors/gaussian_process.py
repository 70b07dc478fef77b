"""Gaussian processes: what a wide network is before it sees data (Neal 1996, Lee et al. 2018), and exact regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dubito.model.priors.scales import keep_positive
from dubito.tensors.checks import at_least, one_of
from dubito.tensors.covariances.covariance import normal
from dubito.tensors.eigen import eigh


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
        one_of(("relu", "erf"), activation=self.activation)
        at_least(0, depth=self.depth, bias=self.bias)

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


JITTER = 1e-8  # of the largest variance: kernels of near points are singular but for rounding


@dataclass(frozen=True)
class RBF:
    r""":math:`k(x, z) = \mathrm{scale}^2 \exp(-\lVert x - z \rVert^2 / (2\, \mathrm{length}^2))`.

    >>> RBF(scale=2.0)(torch.zeros(1, 1))
    tensor([[4.]])
    """

    scale: float = 1.0
    length: float = field(default=1.0, kw_only=True)

    def __post_init__(self):
        keep_positive(self, "scale", "length")

    def __call__(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        gaps = (x.unsqueeze(1) - (x if z is None else z)).square().sum(2)
        return self.scale**2 * torch.exp(-0.5 * gaps / self.length**2)


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    r"""Functions with mean 0 and covariance `kernel`, observed with noise: :math:`y = f(x) + \epsilon`, :math:`\epsilon \sim N(0,
    \mathrm{noise}^2)`. `kernel` maps x [N, d] and z [M, d] to [N, M], such as `NNGP` or `RBF`. Several outputs are independent.

    >>> process = GaussianProcess(RBF(), noise=0.1)
    >>> mean, cov = process.given(torch.zeros(1, 1), torch.ones(1)).moments(torch.zeros(1, 1))
    >>> mean, cov.sqrt()
    (tensor([0.9901]), tensor([[0.0995]]))
    """

    kernel: Callable[..., Tensor]
    noise: float = field(default=0.1, kw_only=True)
    data: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)  # x [N, d] and y [N] or [N, C], in float64

    def __post_init__(self):
        keep_positive(self, "noise")

    def given(self, x: Tensor, y: Tensor) -> GaussianProcess:
        """The process given observations, x [N, d] and y [N] or [N, C]."""
        if x.ndim != 2 or len(x) != len(y):
            raise ValueError(f"observations are x [N, d] and y [N] or [N, C]; got {list(x.shape)} and {list(y.shape)}")
        return replace(self, data=(x.double(), y.double()))

    @cached_property
    def _fitted(self) -> tuple[Tensor, Tensor]:
        """The Cholesky factor L of K + noise^2 I, and L^-1 y."""
        assert self.data is not None
        x, y = self.data
        root = torch.linalg.cholesky(self.kernel(x) + self.noise**2 * torch.eye(len(x)).to(x))
        return root, torch.linalg.solve_triangular(root, y.reshape(len(y), -1), upper=False)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of f at x, [B] (or [B, C], as y was), and its covariance [B, B], noise not included."""
        at = x.double()
        cov = self.kernel(at)
        if self.data is None:
            return torch.zeros(len(x)).to(x), cov.to(x)
        root, white = self._fitted
        cross = torch.linalg.solve_triangular(root, self.kernel(self.data[0], at), upper=False)  # [N, B]
        mean = (cross.mT @ white).reshape(len(x), *self.data[1].shape[1:])
        return mean.to(x), (cov - cross.mT @ cross).to(x)

    def sample(self, x: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n functions at x, [n, B] (or [n, B, C])."""
        mean, cov = self.moments(x.double())
        root, failed = torch.linalg.cholesky_ex(cov + JITTER * cov.diagonal().max() * torch.eye(len(x)).to(cov))
        if failed:  # next to observations with little noise, what is left of the variances is rounding
            values, vectors = eigh(cov)
            root = vectors * values.clamp_min(0).sqrt()
        noise = normal((n, *mean.shape), mean, generator)
        return (mean + torch.einsum("bk,nk...->nb...", root, noise)).to(x)

    def log_evidence(self) -> Tensor:
        """log p(y | x) of the observations, summed over outputs."""
        if self.data is None:
            raise ValueError("there are no observations: use `given(x, y)` first")
        root, white = self._fitted
        n, outputs = white.shape
        return -0.5 * white.square().sum() - outputs * (root.diagonal().log().sum() + 0.5 * n * math.log(2 * math.pi))
