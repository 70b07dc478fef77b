"""One layer's weight and bias: a Kronecker product of a matrix over outputs and a matrix over inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.tensors.covariances.covariance import Covariance, Indefinite, alike, normal
from dubito.tensors.covariances.propagation import (
    Gradients,
    LayerRows,
    Rotated,
    by_pairs,
    few_positions,
    gram,
    inner_products,
    pieces,
)
from dubito.tensors.eigen import eigh
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Kronecker(Covariance):
    r"""The precision :math:`s\, B \otimes A + P_0` of a layer's matrix [out, in], where the bias is one more input that is always 1.

    With :math:`A = R\,\mathrm{diag}(\alpha) R^T` and :math:`B = L\,\mathrm{diag}(\beta) L^T` the prior is added exactly in the
    eigenbasis: the variances there are :math:`T / (s \beta_o \alpha_i + \delta)`. A prior that differs between weight and bias is
    absorbed by scaling the inputs first (`warp`). `values` replaces the products
    :math:`\beta_o \alpha_i` where they have been corrected (EKFAC).
    """

    weight: str
    bias: str | None
    shape: list[int]  # of the weight, [out, ...]
    left: Tensor  # L, [out, out]
    left_values: Tensor  # [out]
    right: Tensor  # R, [in, in]
    right_values: Tensor  # [in]
    delta: Tensor  # [], the prior's precision
    warp: Tensor | None = None  # [in], square root of the prior's precision relative to delta
    values: Tensor | None = None  # [out, in]
    scale: Tensor | None = None  # [K]
    parts: Tensor | None = None  # [K, out, out]: B of every noise, where there are several
    count: float = 1.0  # data behind A, for averages with further data
    temperature: float = 1.0

    @staticmethod
    def of(
        weight: str,
        bias: str | None,
        shape: list[int],
        left: Tensor,
        right: Tensor,
        prior: Mapping[str, Tensor],
        *,
        scale: Tensor,
        count: float = 1.0,
        temperature: float = 1.0,
        decompose: bool = True,
    ) -> Kronecker:
        """From B of every noise [K, out, out] and A [in, in]; without `decompose` with zeros for the `spectrum`, to be filled in."""
        delta, warp = _separated(prior, weight, bias, right.shape[0])
        a = right if warp is None else right / warp / warp.unsqueeze(1)
        b = torch.tensordot(scale.to(left), left, 1)
        right_values, right_vectors = _eigen(a.to(left)) if decompose else _zeros(a.to(left))
        left_values, left_vectors = _eigen(b) if decompose else _zeros(b)
        several = left.shape[0] > 1
        return Kronecker(
            weight, bias, shape, left_vectors, left_values, right_vectors, right_values, delta.to(left),
            None if warp is None else warp.to(left), None, scale.to(left), left if several else None, count, temperature,
        )  # fmt: skip

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves in order, and their shapes."""
        shapes = {self.weight: tuple(self.shape)}
        return shapes if self.bias is None else {**shapes, self.bias: (self.shape[0],)}

    @cached_property
    def variances(self) -> Tensor:
        """In the eigenbasis, [out, in]."""
        # `left_values` are at the present scale
        curvature = torch.outer(self.left_values, self.right_values) if self.values is None else self.values
        precision = curvature.clamp_min(0) + self.delta
        if not bool((precision > 0).all()):
            raise Indefinite(float(precision.min()), float(precision.max()), int((precision <= 0).sum()), precision.numel())
        return self.temperature / precision

    @property
    def spectrum(self) -> list[Tensor]:
        """Eigenvectors and eigenvalues of both sides."""
        return [self.left, self.left_values, self.right, self.right_values]

    @property
    def biased(self) -> bool:
        """Whether the bias is one of the inputs."""
        return self.bias is not None

    @property
    def plain(self) -> bool:
        """One curvature and one prior precision, told apart by numbers alone."""
        return self.parts is None and self.warp is None

    @property
    def layer(self) -> tuple[str, str | None]:
        """Weight and bias."""
        return self.weight, self.bias

    def spectra(self) -> list[tuple[Covariance, Tensor]]:
        """Itself, where curvature and prior are numbers in one eigenbasis."""
        return [(self, self.curvature)] if self.plain else []

    @property
    def curvature(self) -> Tensor:
        """Of a plain block, its eigenvalues at scale 1, [out, in]."""
        assert self.scale is not None
        values = torch.outer(self.left_values, self.right_values) if self.values is None else self.values
        return values / self.scale[0]

    def matrix(self, v: Params) -> Tensor:
        """Leaves [n, *shape] as matrices [n, out, in]."""
        weight = v[self.weight]
        rows = weight.reshape(*weight.shape[: weight.ndim - len(self.shape)], self.shape[0], -1)
        return rows if self.bias is None else torch.cat([rows, v[self.bias].unsqueeze(-1)], -1)

    def _leaves(self, matrix: Tensor) -> Params:
        n = matrix.shape[:-2]
        if self.bias is None:
            return {self.weight: matrix.reshape(*n, *self.shape)}
        return {self.weight: matrix[..., :-1].reshape(*n, *self.shape), self.bias: matrix[..., -1]}

    def _rotated(self, v: Params, *, warp: bool) -> Tensor:
        matrix = self.matrix(v)
        if self.warp is not None:
            matrix = matrix * self.warp if warp else matrix / self.warp
        return self.left.mT @ matrix @ self.right

    def _back(self, coordinates: Tensor, *, warp: bool) -> Params:
        matrix = self.left @ coordinates @ self.right.mT
        if self.warp is not None:
            matrix = matrix * self.warp if warp else matrix / self.warp
        return self._leaves(matrix)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws: independent in the eigenbasis, then rotated back."""
        unit = normal((n, *self.variances.shape), self.left, generator)
        return self._back(unit * self.variances.sqrt(), warp=False)

    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""
        return self._back(self._rotated(v, warp=False) * self.variances, warp=False)

    def solve(self, v: Params) -> Params:
        """The precision times v; leaves [n, *shape]."""
        return self._back(self._rotated(v, warp=True) / self.variances, warp=True)

    def logdet(self) -> Tensor:
        """Log determinant of the covariance, in float64."""
        value = self.variances.double().log().sum()
        return value if self.warp is None else value - 2 * self.shape[0] * self.warp.double().log().sum()

    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""
        matrix = self.left**2 @ self.variances @ (self.right**2).mT
        return self._leaves(matrix if self.warp is None else matrix / self.warp**2)

    @property
    def inputs(self) -> Tensor:
        """What inputs [.., in] are multiplied by to come into the eigenbasis, [in, in]."""
        return self.right if self.warp is None else self.right / self.warp.unsqueeze(1)

    def propagate(self, layers: Gradients, others: Params, like: Tensor, factors: Sequence[float]) -> Tensor:
        """Layer by layer, in the eigenbasis."""
        total = torch.zeros_like(like)
        variances = [self.times(factor).variances for factor in factors]
        for layer, g in layers:
            total += self._propagate_layer(variances, layer, g.to(like.dtype))
        if others:  # for these inputs it is not clear which of the layer's rows belong to which example
            leaves = {name: leaf.flatten(0, 1) for name, leaf in others.items()}  # [C B, *shape]
            rotated = self._rotated(leaves, warp=False).unflatten(0, like.shape[2:0:-1])
            total += torch.stack([gram((rotated * v.sqrt()).flatten(2)) for v in variances])
        return total

    def _propagate_layer(self, variances: list[Tensor], layer: LayerRows, g: Tensor) -> Tensor:
        r""":math:`\sum_o \tilde g_{co} \tilde g_{do} v_o` with :math:`v = V \tilde a^{\circ 2}, \tilde g = L^T g, \tilde a = R^T a`."""
        size, positions, outputs = g[0].shape
        basis, bias, classes = self.inputs, layer.part.bias is not None, len(g)
        if positions == 1:
            squared, turned = layer.energy(basis), g.squeeze(2) @ self.left
            return torch.stack([gram(turned * (squared @ v.mT).sqrt()) for v in variances])
        if few_positions(positions, classes, g):
            total = by_pairs(_to_basis(layer.a, basis, bias), g @ self.left, variances)
        else:
            roots, parts = [v.sqrt() for v in variances], []
            for piece in pieces(size, classes * outputs * basis.shape[0], basis):
                product = self._rotated_rows(layer.a[piece], g[:, piece], basis, bias)
                each = [(product.mul_(root) if len(roots) == 1 else product * root).flatten(2) for root in roots]
                parts.append(torch.stack([inner_products(white) for white in each]))
            total = torch.cat(parts, 1)
        if layer.spread is not None:  # noise of the inputs is each position's own
            squared, turned = layer.spread @ basis[: layer.a.shape[-1]] ** 2, g @ self.left
            total = total + torch.stack([gram((turned * (squared @ v.mT).sqrt()).flatten(2)) for v in variances])
        return total

    def _rotated_rows(self, a: Tensor, g: Tensor, basis: Tensor, bias: bool) -> Tensor:
        """Rows [n, C, O, I] of the Jacobian in the eigenbasis, for inputs a [n, T, I] and gradients g [C, n, T, O].

        Inputs and gradients are rotated before they are multiplied or after, whichever costs less.
        """
        classes, size, positions, outputs = g.shape
        inputs_first, outputs_first = positions < classes * outputs, positions < basis.shape[0]
        if inputs_first:
            a = _to_basis(a, basis, bias)
        g = g @ self.left if outputs_first else g
        columns = g.permute(1, 0, 3, 2).reshape(size, classes * outputs, positions)
        product = columns @ a
        if not inputs_first:
            if bias:
                product = torch.cat([product, columns.sum(-1, keepdim=True)], -1)
            product = product @ basis
        product = product.unflatten(1, (classes, outputs))
        return product if outputs_first else self.left.mT @ product

    def propagate_output(self, layer: LayerRows, classes: int, factors: Sequence[float]) -> Tensor:
        """L diag(v) L^T with v = V (R^T a)^2."""
        squared = layer.energy(self.inputs)
        each = [squared @ self.times(factor).variances.mT for factor in factors]  # [B, O]
        return torch.stack([(self.left * v.unsqueeze(1)) @ self.left.mT for v in each])

    def output_variances(self, layer: LayerRows, classes: int) -> Tensor:
        """The diagonal of L diag(v) L^T."""
        return layer.energy(self.inputs) @ (self.left**2 @ self.variances).mT

    def output_root(self, layer: LayerRows, factor: float = 1.0) -> Tensor:
        """L diag(v)^(1/2)."""
        v = layer.energy(self.inputs) @ self.times(factor).variances.mT  # [B, O]
        return self.left * v.sqrt().unsqueeze(1)

    def noise(self, weight: str, bias: str | None) -> Rotated | None:
        """The noise in the eigenbasis; None for a layer with another bias."""
        if bias != self.bias:
            return None
        return Rotated(self.inputs, self.variances, self.left, self.left**2 @ self.variances, self.biased)

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """In the eigenbasis; A is decomposed again where weight and bias have other precisions."""
        delta = prior[self.weight].double()
        if any(prior[name].ndim for name in self.shapes):
            raise ValueError(PRIOR)
        if self.values is not None:
            return self._log_precision_corrected(prior, scale)
        if self.bias is not None and not alike((prior[self.weight], prior[self.bias])):
            return self._log_precision_apart(prior, scale)
        values = self.left_values.double()
        if self.parts is not None:
            values = torch.linalg.eigvalsh(torch.tensordot(scale.double(), self.parts.double(), 1))
        elif self.scale is not None:
            values = values * (scale.double()[0] / self.scale.double()[0])
        right = self.right_values if self.warp is None else _eigen(self._a())[0]
        curvature = torch.outer(values, right.double())
        return (curvature.clamp_min(0) + delta).log().sum()

    def _log_precision_corrected(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Corrected eigenvalues belong to their eigenbasis, in which the bias has its precision relative to the weight's."""
        assert self.values is not None
        assert self.scale is not None
        inside = self.values.double() * (scale.double()[0] / self.scale.double()[0])
        total = (inside.clamp_min(0) + prior[self.weight].double()).log().sum()
        if self.bias is None or (self.warp is None and alike((prior[self.weight], prior[self.bias]))):
            return total
        ratio = prior[self.bias].double() / prior[self.weight].double()
        known = torch.ones_like(ratio) if self.warp is None else self.warp[-1].double() ** 2
        if ratio.requires_grad or not torch.allclose(ratio, known.to(ratio)):
            raise ValueError(BASIS.format(self.weight, self.bias))
        return total + self.shape[0] * ratio.log()

    def _log_precision_apart(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Weight and bias with precisions of their own: the inputs are scaled, and A decomposed again."""
        assert self.bias is not None
        assert self.scale is not None
        w, b = prior[self.weight].double(), prior[self.bias].double()
        warp = torch.cat([torch.ones(len(self.right) - 1, dtype=w.dtype, device=w.device), (b / w).sqrt().reshape(1)])
        a = self._a().double()
        right = torch.linalg.eigvalsh(a / warp / warp.unsqueeze(1)).clamp_min(0)
        values = self.left_values.double() * (scale.double()[0] / self.scale.double()[0])
        if self.parts is not None:
            values = torch.linalg.eigvalsh(torch.tensordot(scale.double(), self.parts.double(), 1))
        inside = (torch.outer(values.clamp_min(0), right) + w).log().sum()
        return inside + 2 * self.shape[0] * warp.log().sum()

    def _a(self) -> Tensor:
        """A itself, [in, in]."""
        a = (self.right * self.right_values) @ self.right.mT
        return a if self.warp is None else a * self.warp * self.warp.unsqueeze(1)

    def _b(self) -> Tensor:
        """B of every noise, [K, out, out]."""
        if self.parts is not None:
            return self.parts
        assert self.scale is not None
        return ((self.left * (self.left_values / self.scale[0])) @ self.left.mT).unsqueeze(0)

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> Kronecker:
        """Numbers in the eigenbasis change, or A is decomposed again where weight and bias have other precisions."""
        assert self.scale is not None
        scale = self.scale if scale is None else scale.to(self.scale)
        temperature = self.temperature if temperature is None else temperature
        delta, warp = _separated(prior, self.weight, self.bias, self.right.shape[0])
        if self._same_warp(warp) and self.parts is None:  # only numbers change
            ratio = scale[0] / self.scale[0]
            values = None if self.values is None else self.values * ratio
            return replace(
                self, delta=delta.to(self.left), left_values=self.left_values * ratio, values=values, scale=scale,
                temperature=temperature,
            )  # fmt: skip
        if self.values is not None:
            raise ValueError(BASIS.format(self.weight, self.bias))
        return Kronecker.of(
            self.weight, self.bias, self.shape, self._b(), self._a(), prior,
            scale=scale, count=self.count, temperature=temperature,
        )  # fmt: skip

    def _same_warp(self, warp: Tensor | None) -> bool:
        if warp is None or self.warp is None:
            return warp is self.warp
        return torch.allclose(warp.to(self.warp), self.warp)

    def times(self, factor: float) -> Kronecker:
        """The covariance under a multiple of the prior's precision."""
        return self if factor == 1 else replace(self, delta=self.delta * factor)

    def with_temperature(self, temperature: float) -> Kronecker:
        """The same curvature and prior at another temperature."""
        return replace(self, temperature=temperature)

    def plus(self, other: Covariance) -> Covariance:
        """As if the statistics had been collected over both data sets: exact for linear regression, KFAC's own approximation else."""
        if not isinstance(other, Kronecker) or other.weight != self.weight or other.bias != self.bias:
            return super().plus(other)
        if self.values is not None or other.values is not None:
            raise ValueError(
                "eigenvalue-corrected blocks have different eigenbases and cannot be added: leave out corrected=True"
            )
        assert self.scale is not None
        assert other.scale is not None
        total = self.count + other.count
        a = (self._a() * self.count + other._a().to(self.left) * other.count) / total
        b = torch.tensordot(self.scale, self._b(), 1) + torch.tensordot(other.scale, other._b(), 1).to(self.left)
        prior = {self.weight: other.delta}
        if self.bias is not None:
            prior[self.bias] = other.delta if other.warp is None else other.delta * other.warp[-1] ** 2
        return Kronecker.of(
            self.weight, self.bias, self.shape, b.unsqueeze(0), a, prior,
            scale=torch.ones_like(self.scale[:1]), count=total, temperature=self.temperature,
        )  # fmt: skip


def _to_basis(a: Tensor, basis: Tensor, bias: bool) -> Tensor:
    """Inputs in the eigenbasis, with the constant 1 of a bias."""
    return a @ basis[:-1] + basis[-1] if bias else a @ basis


BASIS = (
    "an eigenvalue-corrected block keeps its eigenbasis, which a prior that differs between {} and {} changes: give both the same "
    "precision, or leave out corrected=True"
)
PRIOR = (
    "a Kronecker block takes one prior precision for a layer's weight and one for its bias; for a precision of each weight use "
    "structure='diagonal' or 'dense'"
)


def _separated(prior: Mapping[str, Tensor], weight: str, bias: str | None, inputs: int) -> tuple[Tensor, Tensor | None]:
    """The prior of a block as delta and a scaling of the inputs: one number for the weight, one for the bias."""

    def precision_of(name: str) -> Tensor:
        """The one precision of a leaf."""
        leaf = prior[name]
        if leaf.ndim and not bool((leaf == leaf.reshape(-1)[0]).all()):
            raise ValueError(PRIOR)
        return leaf.detach().reshape(-1)[0]

    delta = precision_of(weight)
    if bias is None or bool(precision_of(bias) == delta):
        return delta, None
    warp = torch.ones(inputs, dtype=delta.dtype, device=delta.device)
    warp[-1] = (precision_of(bias) / delta).sqrt()
    return delta, warp


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, not below zero, and eigenvectors, found in double precision."""
    values, vectors = eigh(matrix.double())
    # in the order of memory that a file has, so that what is computed from a loaded one is the same to the last bit
    return values.clamp_min(0).to(matrix.dtype), vectors.to(matrix.dtype).contiguous()


def _zeros(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what `_eigen` finds."""
    return torch.zeros_like(matrix[0]), torch.zeros_like(matrix, memory_format=torch.contiguous_format)
