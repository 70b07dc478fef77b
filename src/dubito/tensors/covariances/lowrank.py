"""A diagonal and a few directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.covariances.covariance import Covariance, normal
from dubito.tensors.covariances.diagonal import flat
from dubito.tensors.covariances.propagation import Directions, Gradients, input_noise, propagate_independent, weight_gradients
from dubito.tensors.covariances.propagation import flat as joined
from dubito.tensors.eigen import eigh
from dubito.tensors.tree import Params

PIECE = 2**18  # columns that are in double precision at a time
NO_PRIOR = "this low-rank covariance was not made from a curvature and a prior, so the prior cannot be changed"


@dataclass(frozen=True)
class LowRank(Covariance):
    r""":math:`\Sigma = D^{1/2} (I + Q\, \mathrm{diag}(c)\, Q^T) D^{1/2}` with orthonormal columns Q and every :math:`c > -1`.

    One form for both kinds. `LowRank.of(diagonal, columns)` is a covariance diag + C C^T (SWAG; c > 0). `LowRank.precision(...)` has
    the precision P0 + U diag(l) U^T (curvature in its main directions; c < 0), and with a `remainder` d that of the curvature
    outside these directions, weight by weight: P0 + U diag(l) U^T + diag(d).

    >>> cov = LowRank.of({"w": torch.ones(2)}, {"w": torch.tensor([[1.0, 0.0]])})
    >>> cov.dense()
    tensor([[2., 0.],
            [0., 1.]])
    """

    diagonal: Params  # D, leaves [*shape]
    directions: Params  # Q, leaves [k, *shape]
    logs: Tensor  # ln(1 + c), [k]: a curvature far above the prior has c so near to -1 that c itself would lose it
    scale: Tensor | None = None  # [1]; None: not a curvature and a prior
    temperature: float = 1.0
    remainder: Params | None = None  # d at scale 1, leaves [*shape]
    prior: Params | None = None  # P0, beside a remainder

    @staticmethod
    def of(diagonal: Params, columns: Params) -> LowRank:
        """diag(diagonal) + C C^T, for columns stacked [k, *shape]."""
        tiny = {name: leaf.clamp_min(torch.finfo(leaf.dtype).tiny) for name, leaf in diagonal.items()}
        whitened = flat({name: columns[name] * d.rsqrt() for name, d in tiny.items()}, tiny)  # [k, P]
        values, q = _orthonormal(whitened)
        return LowRank(tiny, tree.unflatten(q, tiny), values.log1p())

    @staticmethod
    def precision(
        directions: Params,
        values: Tensor,
        prior: Mapping[str, Tensor],
        *,
        scale: Tensor,
        temperature: float = 1.0,
        remainder: Params | None = None,
    ) -> LowRank:
        """The inverse of (s (U diag(l) U^T + diag(d)) + P0) / T, for directions U stacked [k, *shape], their curvatures l [k] and the
        remainder d, leaves [*shape]."""
        own = {name: prior[name].to(leaf).expand(leaf.shape[1:]) for name, leaf in directions.items()}
        whole = own if remainder is None else {name: leaf + scale.to(leaf)[0] * remainder[name] for name, leaf in own.items()}
        diagonal = {name: 1 / leaf for name, leaf in whole.items()}
        root = (scale.to(values)[0] * values.clamp_min(0)).sqrt().unsqueeze(1)
        whitened = flat({name: leaf * diagonal[name].sqrt() for name, leaf in directions.items()}, diagonal) * root
        inside, q = _orthonormal(whitened)
        scaled = {name: temperature * leaf for name, leaf in diagonal.items()}
        kept = None if remainder is None else {name: prior[name].to(leaf) for name, leaf in directions.items()}
        return LowRank(scaled, tree.unflatten(q, scaled), -inside.log1p(), scale, temperature, remainder, kept)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves in order, and their shapes."""
        return {name: tuple(leaf.shape) for name, leaf in self.diagonal.items()}

    @cached_property
    def q(self) -> Tensor:
        """Q, [k, P]."""
        return flat(self.directions, self.diagonal)

    def _inner(self, rows: Tensor, values: Tensor) -> Tensor:
        """Rows [n, P] times I + Q diag(values) Q^T."""
        return rows + (rows @ self.q.mT * values) @ self.q

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """D^(1/2) (I + Q diag(sqrt(1 + c) - 1) Q^T) z."""
        unit = normal((n, self.size), self.logs, generator)  # one draw over all leaves together
        rows = self._inner(unit, (0.5 * self.logs).expm1())
        return {name: leaf * self.diagonal[name].sqrt() for name, leaf in tree.unflatten(rows, self.diagonal).items()}

    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""
        rows = self._inner(
            flat({name: v[name] * d.sqrt() for name, d in self.diagonal.items()}, self.diagonal), self.logs.expm1()
        )
        return {name: leaf * self.diagonal[name].sqrt() for name, leaf in tree.unflatten(rows, self.diagonal).items()}

    def solve(self, v: Params) -> Params:
        """The precision times v; leaves [n, *shape]."""
        rows = flat({name: v[name] * d.rsqrt() for name, d in self.diagonal.items()}, self.diagonal)
        rows = self._inner(rows, (-self.logs).expm1())
        return {name: leaf * self.diagonal[name].rsqrt() for name, leaf in tree.unflatten(rows, self.diagonal).items()}

    def logdet(self) -> Tensor:
        """Log determinant of the covariance, in float64."""
        return torch.stack([d.double().log().sum() for d in self.diagonal.values()]).sum() + self.logs.double().sum()

    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""
        directions = tree.unflatten(self.q, self.diagonal)
        variances = {}
        for name, d in self.diagonal.items():  # what is outside Q and what is inside, neither of which rounding may make negative
            squares = directions[name] ** 2
            variances[name] = d * ((1 - squares.sum(0)).clamp_min(0) + torch.tensordot(self.logs.exp(), squares, 1))
        return variances

    def propagate(self, layers: Gradients, others: Params, like: Tensor, factors: Sequence[float]) -> Tensor:
        """The diagonal part, and the rows of the Jacobian projected on Q."""
        if self.remainder is not None and tuple(factors) != (1.0,):
            return torch.cat([self.times(factor).propagate(layers, others, like[:1], (1.0,)) for factor in factors])
        layers = [(layer, g.to(like.dtype)) for layer, g in layers]
        total = propagate_independent([self.diagonal], layers, others, torch.zeros_like(like[:1]))
        inner = self._projected(layers, others, like[0])  # [B, C, k]
        rest = total[0] - inner @ inner.mT  # outside Q, where rounding must not make a variance negative
        rest = rest - torch.diag_embed(rest.diagonal(dim1=1, dim2=2).clamp_max(0))
        for layer, g in layers:
            if layer.spread is not None:  # there by its variances without the directions: it has those of the whole
                without, whole = input_noise(layer, g, [self.diagonal, self.variance()])
                rest = rest + whole - without
        if len(factors) == 1:
            return (rest + (inner * self.logs.exp()) @ inner.mT).unsqueeze(0)
        inside = [(factor, self.times(factor).logs.exp()) for factor in factors]
        return torch.stack([(rest + (inner * values) @ inner.mT) / factor for factor, values in inside])

    def _projected(self, layers: Gradients, others: Params, like: Tensor) -> Tensor:
        """J D^{1/2} Q, [B, C, k]."""
        directions = {n: joined(leaf * self.diagonal[n].sqrt(), 1) for n, leaf in self.directions.items()}  # [k, P]
        total = like.new_zeros(like.shape[0], like.shape[1], len(self.logs))
        for name, leaf in others.items():
            total += (joined(leaf, 2) @ directions[name].mT).transpose(0, 1)
        for layer, g in layers:
            for leaf, name, piece in weight_gradients(layer, g):
                total[piece] += (joined(leaf, 2) @ directions[name].mT).transpose(0, 1)
        return total

    def noise(self, weight: str, bias: str | None) -> Directions | None:
        """The layer's diagonal part, and its rows of Q."""
        names = [weight] if bias is None else [weight, bias]
        if any(name not in self.diagonal for name in names):
            return None
        outputs = self.diagonal[weight].shape[0]
        own = torch.cat([self.diagonal[name].reshape(outputs, -1) for name in names], -1)
        rows = torch.cat([self.directions[name].reshape(len(self.logs), outputs, -1) for name in names], -1)
        size = self.logs.expm1()
        return Directions(own, rows * own.sqrt() * size.abs().sqrt()[:, None, None], size.sign(), bias is not None)

    @cached_property
    def _curvature(self) -> tuple[Tensor, Params]:
        """(l, U stacked) of the curvature at scale 1."""
        if self.scale is None:
            raise ValueError(NO_PRIOR)
        inside = ((-self.logs).expm1() / self.scale.to(self.logs)[0]).clamp_min(0)
        diagonal = {name: leaf / self.temperature for name, leaf in self.diagonal.items()}
        rows = {name: leaf * diagonal[name].rsqrt() for name, leaf in self.directions.items()}
        values, q = _orthonormal(flat(rows, diagonal) * inside.sqrt().unsqueeze(1))
        return values, tree.unflatten(q, diagonal)

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        r"""By the determinant of a k x k matrix. With a remainder it is a bound from above,
        :math:`\ln\det(P_0 + s U l U^T) + \sum_i \ln(1 + s d_i / p_i)`, so that the evidence is never above that of the whole curvature:
        :math:`\det(A + R) \det P_0 \le \det A \det(P_0 + R)` for :math:`A \ge P_0` and R >= 0, and Hadamard's inequality."""
        values, directions = self._curvature
        shifts = [prior[name].double().expand(leaf.shape) for name, leaf in self.diagonal.items()]
        weighted = flat(directions, self.diagonal).double() / torch.cat([s.reshape(-1) for s in shifts]).sqrt()
        weighted = weighted * values.double().sqrt().unsqueeze(1)
        small = scale.double()[0] * (weighted @ weighted.mT)  # no root of the scale, which has no slope where a value is 0
        inner = torch.linalg.slogdet(small + torch.eye(len(values), dtype=small.dtype, device=small.device))[1]
        whole = torch.cat([s.reshape(-1) for s in shifts])
        if self.remainder is not None:
            whole = whole + scale.double()[0] * torch.cat([leaf.double().reshape(-1) for leaf in self.remainder.values()])
        return inner + whole.log().sum()

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> LowRank:
        """The same curvature under another prior, noise or temperature."""
        values, directions = self._curvature
        assert self.scale is not None
        scale, temperature = self.scale if scale is None else scale, self.temperature if temperature is None else temperature
        return LowRank.precision(
            directions, values, prior, scale=scale, temperature=temperature, remainder=self.remainder
        )  # fmt: skip

    def times(self, factor: float) -> LowRank:
        """D / factor, and c by the curvature that it stands for."""
        if self.scale is None:
            raise ValueError(NO_PRIOR)
        if factor == 1:
            return self
        if self.prior is not None:
            return self.with_prior({name: leaf * factor for name, leaf in self.prior.items()})
        diagonal = {name: leaf / factor for name, leaf in self.diagonal.items()}
        return replace(self, diagonal=diagonal, logs=-((-self.logs).expm1() / factor).log1p())

    def with_temperature(self, temperature: float) -> LowRank:
        """The same curvature and prior at another temperature."""
        diagonal = {name: leaf * (temperature / self.temperature) for name, leaf in self.diagonal.items()}
        return replace(self, diagonal=diagonal, temperature=temperature)

    def plus(self, other: Covariance) -> Covariance:
        """The directions of both, of which there are then twice as many."""
        if not isinstance(other, LowRank) or self.scale is None or other.scale is None:
            return super().plus(other)
        (mine, u), (theirs, v) = self._curvature, other._curvature
        both = {name: torch.cat([leaf, v[name].to(leaf)]) for name, leaf in u.items()}
        values = torch.cat([mine * self.scale[0], theirs.to(mine) * other.scale.to(mine)[0]])
        rows = flat(both, self.diagonal) * values.sqrt().unsqueeze(1)
        values, q = _orthonormal(rows)
        prior = other.prior or {name: other.temperature / leaf for name, leaf in other.diagonal.items()}
        one, left = torch.ones_like(self.scale), None
        if self.remainder is not None or other.remainder is not None:
            left = {name: self._left(name) + other._left(name).to(leaf) for name, leaf in self.diagonal.items()}
        directions = tree.unflatten(q, self.diagonal)
        return LowRank.precision(directions, values, prior, scale=one, temperature=self.temperature, remainder=left)

    def _left(self, name: str) -> Tensor:
        """The remainder of a leaf at the present scale."""
        if self.remainder is None or self.scale is None:
            return torch.zeros_like(self.diagonal[name])
        return self.scale.to(self.diagonal[name])[0] * self.remainder[name]


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(values [k], orthonormal rows [k, P]) with R^T R = Q^T diag(values) Q, by the small Gram matrix.

    In double precision, a piece at a time: curvatures differ by many orders of magnitude, and in single precision a direction whose
    curvature is a millionth of the largest would be lost, and left as free as the prior leaves it.
    """
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for piece in rows.split(PIECE, 1):
        gram += piece.double() @ piece.double().mT
    values, vectors = eigh(gram)
    tiny = torch.finfo(torch.float64).tiny
    keep = values > values[-1].clamp_min(tiny) * 1e-13
    turn = (vectors / values.clamp_min(tiny).sqrt()).mT
    q = torch.cat([(turn @ piece.double()).to(rows) for piece in rows.split(PIECE, 1)], 1)
    return torch.where(keep, values, 0.0).to(rows), torch.where(keep.unsqueeze(1), q, 0.0)
