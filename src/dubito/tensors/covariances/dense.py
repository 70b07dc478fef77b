"""All weights together, or some picked ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.covariances.covariance import Covariance, Indefinite, alike, expanded, normal
from dubito.tensors.covariances.diagonal import flat
from dubito.tensors.covariances.propagation import Full, LayerRows
from dubito.tensors.covariances.propagation import flat as joined
from dubito.tensors.eigen import eigh
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Dense(Covariance):
    """The full matrix over some leaves; with `index`, over picked weights of them only, and the others do not move.

    `leaves` gives names and shapes in order; `index` [k] are positions in the vector of all of them.
    """

    leaves: dict[str, list[int]]
    curvature: Tensor  # [K, P, P]
    prior: Params  # leaves [] or [*shape]
    scale: Tensor  # [K]
    temperature: float = 1.0
    index: Tensor | None = field(default=None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves in order, and their shapes."""
        return {name: tuple(shape) for name, shape in self.leaves.items()}

    @property
    def moving(self) -> int:
        """All weights, or those that are picked."""
        return self.size if self.index is None else len(self.index)

    @cached_property
    def _like(self) -> Params:
        return {name: torch.empty(shape, device="meta") for name, shape in self.leaves.items()}

    def _pick(self, v: Params) -> Tensor:
        rows = flat(v, self.leaves)
        return rows if self.index is None else rows[:, self.index]

    def _place(self, rows: Tensor) -> Params:
        if self.index is not None:
            rows = rows.new_zeros(len(rows), self.size).index_copy_(1, self.index, rows)
        return tree.unflatten(rows, self._like)

    def _prior(self, prior: Mapping[str, Tensor]) -> Tensor:
        whole = expanded(prior, self.shapes)
        return whole if self.index is None else whole[self.index]

    @cached_property
    def _cholesky(self) -> Tensor:
        """Of the precision, lower; in double precision, which costs a factor of two and saves refusals."""
        matrix = torch.tensordot(self.scale.double(), self.curvature.double(), 1)
        matrix.diagonal().add_(self._prior(self.prior).double().to(matrix.device))
        factor, failed = torch.linalg.cholesky_ex(matrix if self.temperature == 1 else matrix / self.temperature)
        if failed:
            factor = self._repaired(matrix)
        return factor.to(self.curvature.dtype)

    def _repaired(self, matrix: Tensor) -> Tensor:
        """The Cholesky factor where nothing but the rounding of sums in single precision makes a precision indefinite."""
        shift = self._prior(self.prior).double().to(matrix.device)
        values, vectors = eigh(matrix - torch.diag(shift))
        if float(values[0]) < -self._rounding * float(values.abs().max()):
            whole = torch.linalg.eigvalsh(matrix)
            raise Indefinite(float(whole[0]), float(whole[-1]), int((whole <= 0).sum()), len(whole))
        mended = (vectors * values.clamp_min(0)) @ vectors.mT + torch.diag(shift)
        return torch.linalg.cholesky(mended / self.temperature)

    @cached_property
    def _values(self) -> Tensor:
        """Eigenvalues of a single curvature."""
        values = torch.linalg.eigvalsh(self.curvature[0].double())
        return torch.where(values.abs() < self._rounding * values.abs().max(), values.clamp_min(0), values)

    @property
    def _rounding(self) -> float:
        """How far below zero, relative to the largest, an eigenvalue of a sum of squares may come by rounding alone."""
        return 100 * torch.finfo(self.curvature.dtype).eps

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws, L^-T z with the Cholesky factor L of the precision."""
        unit = normal((n, self.curvature.shape[-1]), self.curvature, generator)
        return self._place(torch.linalg.solve_triangular(self._cholesky.mT, unit.mT, upper=True).mT)

    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""
        return self._place(torch.cholesky_solve(self._pick(v).mT, self._cholesky).mT)

    def solve(self, v: Params) -> Params:
        """The precision times v; leaves [n, *shape]."""
        return self._place(self._pick(v) @ self._cholesky @ self._cholesky.mT)

    def logdet(self) -> Tensor:
        """Log determinant of the covariance, in float64."""
        return -2 * self._cholesky.diagonal().double().log().sum()

    @cached_property
    def inverse(self) -> Tensor:
        """The covariance of the (picked) weights, [P, P]."""
        return torch.cholesky_inverse(self._cholesky)

    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""
        return {name: leaf[0] for name, leaf in self._place(self.inverse.diagonal().unsqueeze(0)).items()}

    def whiten(self, rows: Tensor) -> Tensor:
        """Rows [..., P] times a root of the covariance: their inner products are then those under the covariance."""
        picked = rows if self.index is None else rows[..., self.index]
        flat = picked.reshape(-1, picked.shape[-1])
        if flat.is_cuda and flat.shape[-1] <= flat.shape[0]:  # there one product is done sooner than many small solutions
            return (flat @ self._root).reshape(picked.shape)
        return torch.linalg.solve_triangular(self._cholesky, flat.mT, upper=False).mT.reshape(picked.shape)

    @cached_property
    def _root(self) -> Tensor:
        """The inverse of the Cholesky factor of the precision, transposed."""
        factor = self._cholesky
        return torch.linalg.solve_triangular(
            factor.double(), torch.eye(len(factor), dtype=torch.float64, device=factor.device), upper=False
        ).mT.to(factor)

    def grams(self, rows: Params, factors: Sequence[float]) -> Tensor:
        """Inner products of whitened rows, or in the basis of `spectrum` for several factors."""
        vectors = torch.cat([joined(rows[name], 2) for name in self.leaves], -1).transpose(0, 1)  # [B, C, P]
        if len(factors) == 1:
            white = self.whiten(vectors)
            return (white @ white.mT).unsqueeze(0)
        values, basis = self.spectrum
        rotated = (vectors if self.index is None else vectors[..., self.index]) @ basis
        return torch.stack([(rotated * (self.temperature / (values + factor))) @ rotated.mT for factor in factors])

    def propagate_output(self, layer: LayerRows, classes: int, factors: Sequence[float]) -> Tensor | None:
        """phi^T Sigma_cd phi for every pair of outputs, from the blocks of the covariance."""
        if self.index is not None or len(factors) > 1 or layer.spread is not None:
            return None
        a, inputs = layer.extended.squeeze(1), layer.a.shape[-1]
        weight_first = next(iter(self.leaves)) == layer.part.weight
        weight, bias = (0, classes * inputs) if weight_first else (classes, 0)  # where they begin
        cov = a.new_zeros(a.shape[0], classes, classes)
        index = [
            torch.cat(
                [torch.arange(weight + c * inputs, weight + (c + 1) * inputs), torch.tensor([bias + c])[: layer.width - inputs]]
            )
            for c in range(classes)
        ]
        for c in range(classes):
            for d in range(c, classes):
                block = self.inverse[index[c].to(a.device)][:, index[d].to(a.device)]
                cov[:, c, d] = cov[:, d, c] = ((a @ block) * a).sum(1)
        return cov.unsqueeze(0)

    def noise(self, weight: str, bias: str | None) -> Full | None:
        """The block of the covariance that belongs to the layer."""
        names = [weight] if bias is None else [weight, bias]
        if self.index is not None or any(name not in self.leaves for name in names):
            return None
        outputs = self.leaves[weight][0]
        where = torch.cat([self._positions[name].reshape(outputs, -1) for name in names], -1).flatten().to(self.inverse.device)
        sigma = self.inverse[where][:, where]
        return Full(sigma.reshape(outputs, -1, outputs, sigma.shape[0] // outputs), bias is not None)

    @cached_property
    def _positions(self) -> Params:
        """Where the weights of each leaf are in the vector of all."""
        return tree.unflatten(torch.arange(self.size), self._like)

    def picked(self) -> dict[str, Tensor]:
        """The positions of `index`, leaf by leaf."""
        if self.index is None:
            return {}
        where = {name: places.reshape(-1) for name, places in self._positions.items()}
        inside = {name: self.index[(self.index >= p[0]) & (self.index <= p[-1])] for name, p in where.items()}
        return {name: index - int(where[name][0]) for name, index in inside.items()}

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """By eigenvalues where one number is the whole prior, else by a Cholesky factor."""
        shift = self._prior(prior).double()
        if len(self.curvature) == 1 and alike(prior[name] for name in self.leaves):
            return (scale.double()[0] * self._values + shift).log().sum()  # one precision for all: eigenvalues are enough
        matrix = torch.tensordot(scale.double(), self.curvature.double(), 1) + torch.diag(shift)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed:
            jitter = self._rounding * float(matrix.detach().diagonal().max())
            factor = torch.linalg.cholesky(matrix + jitter * torch.eye(len(shift), dtype=matrix.dtype, device=matrix.device))
        return 2 * factor.diagonal().log().sum()

    def spectra(self) -> list[tuple[Covariance, Tensor]]:
        """Itself, where there is one curvature."""
        return [(self, self._values)] if len(self.curvature) == 1 else []

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> Dense:
        """The same curvature under another prior, noise or temperature."""
        scale, temperature = self.scale if scale is None else scale, self.temperature if temperature is None else temperature
        return replace(self, prior={name: prior[name] for name in self.leaves}, scale=scale, temperature=temperature)

    def times(self, factor: float) -> Dense:
        """The covariance under a multiple of the prior's precision."""
        return self if factor == 1 else replace(self, prior={name: leaf * factor for name, leaf in self.prior.items()})

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        r"""Values l [P] and a basis W [P, P] that no multiple of the prior changes: the covariance of `times(k)` is
        :math:`T\, W \mathrm{diag}(1 / (l + k)) W^T`."""
        root = self._prior(self.prior).double().to(self.curvature.device).rsqrt()
        matrix = torch.tensordot(self.scale.double(), self.curvature.double(), 1) * root * root.unsqueeze(1)
        values, vectors = eigh(matrix)
        if float(values[0]) < -self._rounding * float(values.abs().max()):
            raise Indefinite(float(values[0]), float(values[-1]), int((values < 0).sum()), len(values))
        return values.clamp_min(0).to(self.curvature.dtype), (root.unsqueeze(1) * vectors).to(self.curvature.dtype)

    def with_temperature(self, temperature: float) -> Dense:
        """The same curvature and prior at another temperature."""
        return replace(self, temperature=temperature)

    def plus(self, other: Covariance) -> Covariance:
        """The curvatures of both, each with its scale, under the prior of `other`."""
        same = isinstance(other, Dense) and other.leaves == self.leaves and (other.index is None) == (self.index is None)
        if not isinstance(other, Dense) or not same or (self.index is not None and not torch.equal(self.index, other.index)):  # pyright: ignore[reportArgumentType]
            return super().plus(other)
        both, scale = torch.cat([self.curvature, other.curvature]), torch.cat([self.scale, other.scale.to(self.scale)])
        return replace(self, curvature=both, scale=scale, prior=other.prior)
