"""Every weight on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.covariances.covariance import Covariance, Indefinite, normal
from dubito.tensors.covariances.propagation import WIDE, Gradients, LayerRows, propagate_independent, single_position
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Diagonal(Covariance):
    """Independent weights.

    >>> cov = Diagonal.of({"w": torch.tensor([4.0, 1.0])})
    >>> cov.solve({"w": torch.ones(1, 2)})
    {'w': tensor([[0.2500, 1.0000]])}
    """

    curvature: Params  # leaves [K, *shape]
    prior: Params  # leaves [] or [*shape]
    scale: Tensor  # [K]
    temperature: float = 1.0

    @staticmethod
    def of(variance: Params) -> Diagonal:
        """From variances alone."""
        first = next(iter(variance.values()))
        nothing = {name: leaf.new_zeros(1, *leaf.shape) for name, leaf in variance.items()}
        return Diagonal(nothing, {name: 1 / leaf for name, leaf in variance.items()}, torch.ones(1).to(first))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves in order, and their shapes."""
        return {name: tuple(leaf.shape[1:]) for name, leaf in self.curvature.items()}

    @cached_property
    def precision(self) -> Params:
        """(sum_k s_k h_k + p_0) / T of every weight; all must be positive."""
        full = {}
        for name, leaf in self.curvature.items():
            full[name] = (torch.tensordot(self.scale.to(leaf), leaf, 1) + self.prior[name].to(leaf)) / self.temperature
            if not bool((full[name] > 0).all()):
                bad = full[name]
                raise Indefinite(float(bad.min()), float(bad.max()), int((~(bad > 0)).sum()), bad.numel())
        return full

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws with mean zero, leaves [n, *shape]."""
        return {name: normal((n, *p.shape), p, generator) * p.rsqrt() for name, p in self.precision.items()}

    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""
        return {name: v[name] / p for name, p in self.precision.items()}

    def solve(self, v: Params) -> Params:
        """The precision times v; leaves [n, *shape]."""
        return {name: v[name] * p for name, p in self.precision.items()}

    def logdet(self) -> Tensor:
        """Log determinant of the covariance, in float64."""
        return -torch.stack([p.double().log().sum() for p in self.precision.values()]).sum()

    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""
        return {name: p.reciprocal() for name, p in self.precision.items()}

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """log det (sum_k s_k H_k + P_0), differentiable in prior and scale."""
        parts = [
            (torch.tensordot(scale.double(), leaf.double(), 1) + prior[name].double()).log().sum()
            for name, leaf in self.curvature.items()
        ]
        return torch.stack(parts).sum()

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> Diagonal:
        """The same curvature under another prior, noise or temperature."""
        scale, temperature = self.scale if scale is None else scale, self.temperature if temperature is None else temperature
        return replace(self, prior={name: prior[name] for name in self.curvature}, scale=scale, temperature=temperature)

    @property
    def independent(self) -> bool:
        """Always."""
        return True

    def spectra(self) -> list[tuple[Covariance, Tensor]]:
        """Every leaf by itself, where there is one curvature."""
        return [(self.over([name]), leaf[0]) for name, leaf in self.curvature.items()] if len(self.scale) == 1 else []

    def propagate(self, layers: Gradients, others: Params, like: Tensor, factors: Sequence[float]) -> Tensor:
        """Squares of the rows of the Jacobian times the variances."""
        return propagate_independent(
            [self.times(factor).variance() for factor in factors], layers, others, torch.zeros_like(like)
        )

    def propagate_output(self, layer: LayerRows, classes: int, factors: Sequence[float]) -> Tensor:
        """Expected squares of the inputs times the variances."""
        v = torch.stack([single_position(layer, self.times(factor).variance()) for factor in factors])
        return v if v.shape[-1] > WIDE else torch.diag_embed(v)  # a thousand classes need no thousand times a thousand zeros

    def output_variances(self, layer: LayerRows, classes: int) -> Tensor:
        """Expected squares of the inputs times the variances."""
        return single_position(layer, self.variance())

    def noise(self, weight: str, bias: str | None) -> None:
        """None: independent weights need no matrix."""
        return

    def over(self, names: Iterable[str]) -> Diagonal:
        """Of some leaves alone."""
        kept = list(names)
        return replace(self, curvature={n: self.curvature[n] for n in kept}, prior={n: self.prior[n] for n in kept})

    def times(self, factor: float) -> Diagonal:
        """The covariance under a multiple of the prior's precision."""
        return self if factor == 1 else replace(self, prior={name: leaf * factor for name, leaf in self.prior.items()})

    def with_temperature(self, temperature: float) -> Diagonal:
        """The same curvature and prior at another temperature."""
        return replace(self, temperature=temperature)

    def plus(self, other: Covariance) -> Covariance:
        """The curvatures of both, each with its scale, under the prior of `other`."""
        if not isinstance(other, Diagonal):
            return super().plus(other)
        both = {name: torch.cat([leaf, other.curvature[name].to(leaf)]) for name, leaf in self.curvature.items()}
        prior = {name: other.prior[name] for name in both}
        return replace(self, curvature=both, scale=torch.cat([self.scale, other.scale.to(self.scale)]), prior=prior)


def flat(v: Params, names: Mapping[str, object]) -> Tensor:
    """Stacked leaves as rows [n, P], in the order of `names`."""
    return tree.flatten({name: v[name] for name in names}, stacked=True)
