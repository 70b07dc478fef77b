"""Noise that correlated weights of a layer add to its output, for given inputs.

Each kind has `var(m)` [..., O], `cov(m)` [..., O, O] and `directions(m)` [O, ..., O], whose outer products add up to `cov`, for inputs
m [..., I]; the bias, where there is one, is inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


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
        return self.rotate(m).square()

    def rotate(self, m: Tensor) -> Tensor:
        """The inputs, and the 1 of the bias, in the eigenbasis."""
        return F.linear(m, self.basis[:-1].mT, self.basis[-1]) if self.biased else m @ self.basis

    def var(self, m: Tensor) -> Tensor:
        """Variances [..., O] of the outputs for inputs m [..., I]."""
        return self.energy(m) @ self.marginal.mT

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        return (self.left * (self.energy(m) @ self.variances.mT).unsqueeze(-2)) @ self.left.mT

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        return (self.left * (self.energy(m) @ self.variances.mT).sqrt().unsqueeze(-2)).movedim(-1, 0)


@dataclass(frozen=True)
class Full:
    """All weights of the layer together."""

    sigma: Tensor  # [O, in, O, in], `in` with the bias last
    biased: bool

    def _input(self, m: Tensor) -> Tensor:
        return torch.cat([m, torch.ones_like(m[..., :1])], -1) if self.biased else m

    def var(self, m: Tensor) -> Tensor:
        """Variances [..., O] of the outputs for inputs m [..., I]."""
        a = self._input(m)
        own = self.sigma.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [O, in, in]
        return torch.einsum("oij,...i,...j->...o", own, a, a).clamp_min(0)

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        a = self._input(m)
        half = torch.einsum("oipj,...j->...oip", self.sigma, a)
        return torch.einsum("...oip,...i->...op", half, a)

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
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
        """Variances [..., O] of the outputs for inputs m [..., I]."""
        own, along = self._each(m)
        return (own + (self.signs.unsqueeze(-1) * along.square()).sum(-2)).clamp_min(0)

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        own, along = self._each(m)
        return torch.diag_embed(own) + (along * self.signs.unsqueeze(-1)).mT @ along

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        return _root(self.cov(m))


@dataclass(frozen=True)
class Shift:
    """A bias whose entries move together, apart from the layer's matrix: whatever comes in, the same."""

    sigma: Tensor  # [O, O]

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        return self.sigma.expand(*m.shape[:-1], *self.sigma.shape)

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        root = _root(self.sigma)
        return root.view(len(root), *[1] * (m.ndim - 1), -1).expand(-1, *m.shape[:-1], -1)


def _root(cov: Tensor) -> Tensor:
    """Columns [O, ..., O] whose outer products add up to the covariance."""
    values, vectors = torch.linalg.eigh(cov)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).movedim(-1, 0)


Noise = Rotated | Full | Directions
