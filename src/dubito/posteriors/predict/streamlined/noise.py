"""Weights of a layer that are not independent: the noise they put on the layer's output for certain inputs.

Each kind has `var(m)` [..., O], `cov(m)` [..., O, O] and `directions(m)` [O, ..., O], whose outer products add up to `cov`, for inputs
m [..., I]; the bias, where there is one, is inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.tensors.covariances import Covariance, Dense, Kronecker, LowRank


@dataclass(frozen=True)
class Rotated:
    """A Kronecker product, in its eigenbasis."""

    basis: Tensor  # [in, J], its last row that of the bias
    variances: Tensor  # [O, J]
    left: Tensor  # [O, O]
    marginal: Tensor  # [O, J], squares of `left` times `variances`
    biased: bool

    @cached_property
    def squares(self) -> Tensor:
        """Of the basis, without the bias: variances of inputs times these are variances in the eigenbasis."""
        return (self.basis[:-1] if self.biased else self.basis).square()

    def energy(self, m: Tensor) -> Tensor:
        """Squares of the inputs in the eigenbasis."""
        turned = F.linear(m, self.basis[:-1].mT, self.basis[-1]) if self.biased else m @ self.basis
        return turned.square()

    def var(self, m: Tensor) -> Tensor:
        return self.energy(m) @ self.marginal.mT

    def cov(self, m: Tensor) -> Tensor:
        return (self.left * (self.energy(m) @ self.variances.mT).unsqueeze(-2)) @ self.left.mT

    def directions(self, m: Tensor) -> Tensor:
        return (self.left * (self.energy(m) @ self.variances.mT).sqrt().unsqueeze(-2)).movedim(-1, 0)


@dataclass(frozen=True)
class Full:
    """All weights of the layer together."""

    sigma: Tensor  # [O, in, O, in], `in` with the bias last
    biased: bool

    def _input(self, m: Tensor) -> Tensor:
        return torch.cat([m, torch.ones_like(m[..., :1])], -1) if self.biased else m

    def var(self, m: Tensor) -> Tensor:
        a = self._input(m)
        own = self.sigma.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [O, in, in]
        return torch.einsum("oij,...i,...j->...o", own, a, a).clamp_min(0)

    def cov(self, m: Tensor) -> Tensor:
        a = self._input(m)
        half = torch.einsum("oipj,...j->...oip", self.sigma, a)
        return torch.einsum("...oip,...i->...op", half, a)

    def directions(self, m: Tensor) -> Tensor:
        return _root(self.cov(m))


@dataclass(frozen=True)
class Directions:
    """Independent weights, and directions in which they move together."""

    own: Tensor  # [O, in], may be negative where directions take away
    rows: Tensor  # [k, O, in]
    signs: Tensor  # [k], what each direction adds: 1, or -1 where it takes away
    biased: bool

    def _each(self, m: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.cat([m, torch.ones_like(m[..., :1])], -1) if self.biased else m
        return a.square() @ self.own.mT, torch.einsum("koi,...i->...ko", self.rows, a)

    def var(self, m: Tensor) -> Tensor:
        own, along = self._each(m)
        return (own + (self.signs.unsqueeze(-1) * along.square()).sum(-2)).clamp_min(0)

    def cov(self, m: Tensor) -> Tensor:
        own, along = self._each(m)
        return torch.diag_embed(own) + (along * self.signs.unsqueeze(-1)).mT @ along

    def directions(self, m: Tensor) -> Tensor:
        return _root(self.cov(m))


@dataclass(frozen=True)
class Shift:
    """A bias whose entries move together, apart from the layer's matrix: whatever comes in, the same."""

    sigma: Tensor  # [O, O]

    def cov(self, m: Tensor) -> Tensor:
        return self.sigma.expand(*m.shape[:-1], *self.sigma.shape)

    def directions(self, m: Tensor) -> Tensor:
        root = _root(self.sigma)
        return root.view(len(root), *[1] * (m.ndim - 1), -1).expand(-1, *m.shape[:-1], -1)


def _root(cov: Tensor) -> Tensor:
    """Columns [O, ..., O] whose outer products add up to the covariance."""
    values, vectors = torch.linalg.eigh(cov)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).movedim(-1, 0)


Noise = Rotated | Full | Directions


def shift_of(block: Covariance, bias: str) -> Shift:
    """The noise of a bias alone in a block."""
    (outputs,), like = block.shapes[bias], next(iter(block.variance().values()))
    unit = {name: like.new_zeros(outputs, *shape) for name, shape in block.shapes.items()}
    unit[bias] = torch.eye(outputs, dtype=like.dtype, device=like.device)
    return Shift(block.product(unit)[bias])


def noise_of(block: Covariance, weight: str, bias: str | None) -> Noise | None:
    """The noise of a layer with these weights (a matrix and its bias) in a block; None where they are independent."""
    if isinstance(block, Kronecker):
        if bias != block.bias:
            return None
        return Rotated(block.inputs, block.variances, block.left, block.left**2 @ block.variances, block.biased)
    if weight not in block.shapes or (bias is not None and bias not in block.shapes):
        return None
    outputs = block.shapes[weight][0]
    if isinstance(block, Dense) and block.index is None:
        where = _positions(block, weight).reshape(outputs, -1)
        if bias is not None:
            where = torch.cat([where, _positions(block, bias).reshape(outputs, 1)], -1)
        where = where.flatten().to(block.inverse.device)
        sigma = block.inverse[where][:, where]
        return Full(sigma.reshape(outputs, -1, outputs, sigma.shape[0] // outputs), bias is not None)
    if isinstance(block, LowRank):
        names = [weight] if bias is None else [weight, bias]
        own = torch.cat([block.diagonal[name].reshape(outputs, -1) for name in names], -1)
        rows = torch.cat([block.directions[name].reshape(len(block.logs), outputs, -1) for name in names], -1)
        size = block.logs.expm1()
        return Directions(own, rows * own.sqrt() * size.abs().sqrt()[:, None, None], size.sign(), bias is not None)
    return None


def _positions(block: Dense, name: str) -> Tensor:
    """Where a leaf stands in the vector of all."""
    start = 0
    for other, shape in block.shapes.items():
        size = torch.Size(shape).numel()
        if other == name:
            return torch.arange(start, start + size)
        start += size
    raise KeyError(name)
