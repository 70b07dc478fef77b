"""Gaussian priors of correlated weights: within a matrix, within the kernels of a convolution, or in any covariance structure."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from dubito.model.priors.prior import Prior, source_for, zero
from dubito.model.priors.scales import keep_positive
from dubito.tensors.covariances import Covariance, Diagonal
from dubito.tensors.randomness import fresh_generator
from dubito.tensors.tree import Params, full_precision


class Matrices(Prior):
    r"""Every leaf is a matrix :math:`A Z B^T` of standard normals Z, with roots A and B of two covariances; None is the identity."""

    @abstractmethod
    def shaped(self, name: str, leaf: Tensor) -> Tensor:
        """The leaf as a matrix."""

    @abstractmethod
    def roots(self, leaf: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Cholesky factors of the covariances of rows and columns, in float64."""

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the matrix normal distribution."""
        total = zero(params)
        for name, leaf in params.items():
            matrix, (up, left) = self.shaped(name, full_precision(leaf)), self.roots(leaf)
            rows, columns = matrix.shape
            if up is not None:
                total = total - columns * up.diagonal().log().sum().to(matrix)
                matrix = torch.linalg.solve_triangular(up.to(matrix), matrix, upper=False)
            if left is not None:
                total = total - rows * left.diagonal().log().sum().to(matrix)
                matrix = torch.linalg.solve_triangular(left.mT.to(matrix), matrix, upper=True, left=False)
            total = total - 0.5 * matrix.square().sum() - 0.5 * leaf.numel() * math.log(2 * math.pi)
        return total

    def _scaled(self, name: str, leaf: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
        """The leaf as a matrix, times a factor of each row and of each column that follow from the roots."""
        matrix = self.shaped(name, leaf)
        for axis, root in zip((1, 0), self.roots(leaf), strict=True):
            matrix = matrix if root is None else matrix * factor(root).to(matrix).unsqueeze(axis)
        return matrix

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """For independent weights only the diagonals of both precisions are needed beside the mean."""
        if not independent:
            return None
        total = self.log_prob(mean)
        for name, leaf in variance.items():
            total = total - 0.5 * self._scaled(name, leaf, lambda root: torch.cholesky_inverse(root).diagonal()).sum()
        return total

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """A Z B^T."""
        source, drawn = source_for(like, generator), {}
        for name, leaf in like.items():
            matrix, (up, left) = self.shaped(name, torch.empty_like(leaf).normal_(generator=source)), self.roots(leaf)
            matrix = matrix if up is None else up.to(matrix) @ matrix
            drawn[name] = (matrix if left is None else matrix @ left.mT.to(matrix)).reshape(leaf.shape)
        return drawn

    def units(self, params: Params) -> Params:
        """Standard deviations, from the diagonals of both covariances."""
        found = {name: self._scaled(name, torch.ones_like(leaf), lambda root: root.norm(dim=1)) for name, leaf in params.items()}
        return {name: leaf.reshape(params[name].shape) for name, leaf in found.items()}


@dataclass(frozen=True, eq=False)
class MatrixNormal(Matrices):
    r""":math:`W \sim MN(0, U, V)`: :math:`\mathrm{Cov}(w_{ai}, w_{bj}) = U_{ab} V_{ij}`, for the output units a, b and inputs i, j of a
    layer.

    `rows` is U [O, O] and `columns` V [I, I]; None is the identity, which fits any size. A convolution's filters are rows, its input
    channels and positions the columns, [I k k]. A leaf with one axis is a single column. It is for leaves of one shape:
    `ByName({"^0.weight": MatrixNormal(rows=...), "": Normal()})`.

    >>> prior = MatrixNormal(columns=torch.eye(2) * 4.0)
    >>> prior.log_prob({"w": torch.zeros(3, 2)})  # 6 normals of scale 2
    tensor(-9.6725)
    """

    rows: Tensor | None = None
    columns: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self):
        for name, matrix in (("rows", self.rows), ("columns", self.columns)):
            if matrix is None:
                continue
            square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
            if not square or not torch.allclose(matrix, matrix.mT) or torch.linalg.cholesky_ex(matrix.double())[1]:
                raise ValueError(f"`{name}` is a covariance: a square matrix, symmetric and positive definite")
        _ = self._factors  # now, and not in the middle of a trace

    @cached_property
    def _factors(self) -> tuple[Tensor | None, Tensor | None]:
        up, left = (None if m is None else torch.linalg.cholesky(m.double()) for m in (self.rows, self.columns))
        return up, left

    def roots(self, leaf: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Cholesky factors of both covariances, in float64."""
        return self._factors

    def shaped(self, name: str, leaf: Tensor) -> Tensor:
        """The leaf as [O, I]; raise if the prior's covariances have another size."""
        matrix = leaf.reshape(leaf.shape[0], -1) if leaf.ndim else leaf.reshape(1, 1)
        for side, axis, root in zip(("rows", "columns"), (0, 1), self._factors, strict=True):
            if root is not None and len(root) != matrix.shape[axis]:
                raise ValueError(
                    f"{name} is {list(matrix.shape)} as a matrix, but the prior's {side} are {list(root.shape)}: give this prior to "
                    "leaves of its size alone, as ByName({'^0.weight': MatrixNormal(...), '': Normal()})"
                )
        return matrix


@dataclass(frozen=True)
class ConvCorrelated(Matrices):
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
        """The covariance of the positions of a kernel, [k, k], in float64."""
        return self.scale**2 * _correlation(shape, self.length)

    def roots(self, leaf: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The Cholesky factor of a leaf's kernels."""
        if leaf.ndim < 3:
            return None, leaf.new_full((1, 1), self.scale, dtype=torch.float64)
        correlation = _correlation(tuple(leaf.shape[2:]), self.length)
        return None, self.scale * torch.linalg.cholesky(correlation).to(leaf.device)

    def shaped(self, name: str, leaf: Tensor) -> Tensor:
        """One row for each kernel."""
        return leaf.reshape(-1, math.prod(leaf.shape[2:])) if leaf.ndim > 2 else leaf.reshape(-1, 1)


def _correlation(shape: tuple[int, ...], length: float) -> Tensor:
    axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in shape), indexing="ij")
    places = torch.stack([axis.reshape(-1) for axis in axes], 1)  # [k, d]
    return torch.exp(-(places.unsqueeze(1) - places).square().sum(2).sqrt() / length)


@dataclass(frozen=True, eq=False)
class MultivariateNormal(Prior):
    """N(mean, covariance) over the weights that the covariance names: what `posterior.as_prior()` gives, to continue with new data.

    >>> from dubito.tensors.covariances import Diagonal
    >>> prior = MultivariateNormal({"w": torch.ones(2)}, Diagonal.of({"w": torch.ones(2)}))
    >>> prior.gradient({"w": torch.zeros(2)})
    {'w': tensor([1., 1.])}
    """

    mean: Params
    covariance: Covariance

    @property
    def joint(self) -> MultivariateNormal:
        """Itself."""
        return self

    @property
    def stacks(self) -> bool:
        """True."""
        return True

    def over(self, names: Iterable[str]) -> MultivariateNormal:
        """The prior of some of the weights, which are independent of the others."""
        names = [name for name in names if ":" not in name]
        if missing := [name for name in names if name not in self.mean]:
            raise ValueError(f"the prior says nothing of {missing}: the model it is for has only {list(self.mean)}; set `only`")
        lost = [name for name in self.mean if name not in names]
        if not lost:
            return self
        if not self.covariance.independent:
            raise ValueError(
                f"the prior is of {lost} and of the other weights together, and this model leaves these out: give Model the `only` "
                "that the earlier posterior had"
            )
        return MultivariateNormal({name: self.mean[name] for name in names}, self.covariance.over(names))

    def _away(self, params: Params) -> Params:
        return {name: params[name] - self.mean[name].to(params[name]) for name in self.mean}

    def log_prob(self, params: Params) -> Tensor:
        """log N(w; mean, covariance)."""
        if (own := self.over(params)) is not self:
            return own.log_prob(params)
        away = {name: leaf.unsqueeze(0) for name, leaf in self._away(params).items()}
        pulled = self._solved(away)
        quadratic = torch.stack([(away[name] * pulled[name]).sum() for name in away]).sum()
        return -0.5 * (quadratic + self.covariance.logdet().to(quadratic) + self.covariance.moving * math.log(2 * math.pi))

    def _solved(self, away: Params) -> Params:
        """Precision times a difference, computed in the dtype of the covariance: samplers ask in float64."""
        own = {name: leaf.to(self.mean[name].dtype) for name, leaf in away.items()}
        return {name: leaf.to(away[name]) for name, leaf in self.covariance.solve(own).items()}

    def gradient(self, params: Params) -> Params:
        """-precision (w - mean)."""
        if (own := self.over(params)) is not self:
            return own.gradient(params)
        away = self._away(params)
        first = next(iter(away))
        stacked = away[first].ndim > self.mean[first].ndim
        pulled = self._solved(away if stacked else {name: leaf.unsqueeze(0) for name, leaf in away.items()})
        return {name: -(pulled[name] if stacked else pulled[name][0]) for name in params}

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """A closed form if the covariance is diagonal."""
        if not isinstance(self.covariance, Diagonal):
            return None
        precision = self.covariance.precision
        spread = [(leaf * precision[name].to(leaf)).sum() for name, leaf in variance.items()]
        return self.log_prob(mean) - 0.5 * torch.stack(spread).sum()

    def units(self, params: Params) -> Params:
        """Roots of the variances."""
        return {name: leaf.sqrt().to(params[name]) for name, leaf in self.over(params).covariance.variance().items()}

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """mean + a draw of the covariance."""
        drawn = self.covariance.sample(1, generator or fresh_generator(next(iter(like.values())).device))
        return {name: (self.mean[name] + drawn[name][0]).to(leaf) for name, leaf in like.items()}
