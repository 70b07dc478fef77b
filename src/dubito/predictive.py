"""What a model predicts: one object for every way to get there.

Inside, the network's output f is [S, B, *D, C]: S draws or mixture components, B inputs, *D positions (pixels, time), C last.
A predictive answers in terms of the target y, with the observation noise always included.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent

from dubito import tree
from dubito.likelihoods import Likelihood, MultiTask, Uncertainty, align, average, nodes
from dubito.randomness import forked, fresh
from dubito.tree import Params


class Predictive(ABC):
    """The predictive distribution p(y | x, D) for a batch of inputs."""

    likelihood: Likelihood

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[y | x, D]: class probabilities [B, *D, C], or the regression mean [B, *D, C]."""

    @property
    @abstractmethod
    def uncertainty(self) -> Uncertainty:
        """Total = aleatoric + epistemic: entropies [B, *D] for classes, variances [B, *D, C] for numbers."""

    @property
    @abstractmethod
    def f_mean(self) -> Tensor:
        """Mean of the network's output, [B, *D, C]."""

    @property
    @abstractmethod
    def f_var(self) -> Tensor:
        """Variance of the network's output over the posterior, noise not included, [B, *D, C]."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) for every input, [B]. Positions of dense outputs are scored one by one and summed."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y for every input, [n, B, *D] for classes and [n, B, *D, C] for numbers."""

    @abstractmethod
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Central interval of every output of a regression, (lower, upper), each [B, *D, C]."""


@dataclass(frozen=True)
class LatentMixture(Predictive):
    r"""The general predictive: a weighted mixture of Gaussians over f, seen through the likelihood.

    .. math:: p(y \mid x) = \sum_s w_s \int p(y \mid f)\, N(f;\, m_s, V_s)\, df

    Draws of weights have no covariance (`cov=None`); a linearised or one-pass predictive is S = 1 with one; an ensemble of those has
    both. With a Gaussian likelihood the density is exact; otherwise each Gaussian becomes deterministic nodes with its moments.

    >>> import dubito
    >>> p = LatentMixture(dubito.Categorical(), torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]]))   # two draws that disagree
    >>> p.mean, p.uncertainty.epistemic
    (tensor([[0.5000, 0.5000]]), tensor([0.6931]))
    """

    likelihood: Likelihood
    means: Tensor  # [S, B, *D, C]
    cov: Tensor | None = None  # [S, B, *D, C] or [S, B, *D, C, C]
    weights: Tensor | None = None  # [S], sums to 1
    params: Params | None = None  # what the likelihood learned, leaves [K] or [S, K]
    quadrature: int = 128  # nodes for each Gaussian where there is no closed form

    @cached_property
    def _weights(self) -> Tensor:
        draws = self.means.shape[0]
        if self.weights is not None:
            return self.weights
        dtype = torch.promote_types(self.means.dtype, torch.float32)
        return torch.full((draws,), 1 / draws, dtype=dtype, device=self.means.device)

    @cached_property
    def _params(self) -> Params:
        return align(self.params or {}, self.means)

    @cached_property
    def _root(self) -> Tensor:
        """A square root of the covariances, in their shape."""
        assert self.cov is not None
        if self.cov.ndim == self.means.ndim:
            return self.cov.clamp_min(0).sqrt()
        values, vectors = torch.linalg.eigh(self.cov)  # unlike Cholesky, defined for singular covariances too
        return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)

    @cached_property
    def _points(self) -> LatentMixture:
        """The same predictive without covariances: every Gaussian as nodes with its mean and covariance."""
        if self.cov is None:
            return self
        n = self.quadrature
        unit = nodes(n, self.means).reshape(1, n, *[1] * (self.means.ndim - 2), self.means.shape[-1])
        return self._finer(self.means.unsqueeze(1) + _times(self._root.unsqueeze(1), unit), None)

    @cached_property
    def _resolved(self) -> LatentMixture:
        """The same predictive, of components whose distribution of y has a closed form: as many as that takes."""
        if self.cov is None or self._exact is not None:
            return self
        finer = self.likelihood.resolve(self.means, self.cov, self.quadrature)
        return self._points if finer is None else self._finer(*finer)

    def _finer(self, means: Tensor, cov: Tensor | None) -> LatentMixture:
        """Every component as n equal ones: means [S, n, B, *D, C], cov in a shape to match."""
        n = means.shape[1]
        params = {k: v.repeat_interleave(n, 0) if v.ndim == 2 else v for k, v in (self.params or {}).items()}
        weights = self._weights.repeat_interleave(n) / n
        return replace(
            self, means=means.flatten(0, 1), cov=None if cov is None else cov.flatten(0, 1), weights=weights, params=params
        )

    @cached_property
    def _exact(self) -> Distribution | None:
        """The components' distributions of y in closed form, batch [S, B, *D]."""
        if self.cov is None:
            return self.likelihood(self.means, self._params)
        return self.likelihood.convolve(self.means, self.cov, self._params)

    @cached_property
    def probs(self) -> Tensor:
        """E[y | f] of every draw or node, [S, B, *D, C]: for classes their probabilities."""
        return self.likelihood.mean(self._points.means, self._points._params)

    @property
    def draw_weights(self) -> Tensor:
        """The weights that belong to `probs`, [S]."""
        return self._points._weights

    @cached_property
    def mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return average(self.probs, self.draw_weights)

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        points = self._points
        split = self.likelihood.uncertainty(points.means, points._weights, points._params)
        if self.cov is None or self._exact is None:
            return split
        # exact where the likelihood integrates in closed form: the nodes' aleatoric part plus the full variance of f
        return Uncertainty(split.aleatoric + self.f_var, split.aleatoric, self.f_var)

    @cached_property
    def f_mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return average(self.means, self._weights)

    @cached_property
    def f_var(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        between = average((self.means - self.f_mean) ** 2, self._weights)
        if self.cov is None:
            return between
        within = self.cov if self.cov.ndim == self.means.ndim else self.cov.diagonal(dim1=-2, dim2=-1)
        return between + average(within, self._weights)

    def log_prob(self, y: Tensor) -> Tensor:
        closed = self._resolved
        y = self.likelihood.target(tree.tensors(y), self.means[0])
        if closed.cov is None:
            score = self.likelihood.log_prob(closed.means, y, closed._params)  # [S, B, *D]
        else:
            assert closed._exact is not None
            score = closed._exact.log_prob(y)
        log_weights = closed._weights.log().reshape(-1, *[1] * (score.ndim - 1))
        score = (score + log_weights).logsumexp(0)  # [B, *D]
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.means.device
        generator = fresh(device) if generator is None else generator
        which = torch.multinomial(self._weights, n, replacement=True, generator=generator)
        params = {k: v[which] if v.ndim == 2 else v for k, v in (self.params or {}).items()}
        f = self.means[which]
        if self.cov is not None:  # from the Gaussians themselves: nodes would leave gaps where the noise is small
            unit = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=device)
            f = f + _times(self._root if len(self._root) == 1 else self._root[which], unit)
        # torch.distributions draws from the global generator only: lend it a seed from ours and put it back
        seed = int(torch.randint(2**62, (1,), generator=generator, device=device))
        with forked(seed):
            return self.likelihood(f, align(params, f)).sample()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) of every output of a regression on its own, [B, *D, C], for y [B, *D, C]."""
        marginal, weights = self.marginals
        return average(marginal.cdf(y.expand(self.marginals[0].batch_shape)), weights)

    def quantile(self, level: float) -> Tensor:
        """The level-quantile of every output of a regression, [B, *D, C], by bisection on the mixture's exact cdf."""
        if not 0 < level < 1:
            raise ValueError(f"a quantile's level lies between 0 and 1; got {level}")
        marginal, _ = self.marginals
        width = 2 + math.sqrt(2) * abs(float(torch.erfinv(torch.tensor(2 * level - 1, dtype=torch.float64))))
        low = (marginal.mean - width * marginal.stddev).amin(0)
        high = (marginal.mean + width * marginal.stddev).amax(0)
        for _ in range(60 if low.dtype == torch.float64 else 30):
            middle = (low + high) / 2
            below = self.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    @cached_property
    def marginals(self) -> tuple[Distribution, Tensor]:
        """Every component's distribution of each output on its own, batch [S, B, *D, C], and the weights."""
        if self.likelihood.discrete or isinstance(self.likelihood, MultiTask):
            raise ValueError(f"intervals and quantiles are for regression; {type(self.likelihood).__name__} has classes")
        exact, weights = self._resolved._exact, self._resolved._weights
        if isinstance(exact, torch.distributions.MultivariateNormal):
            return torch.distributions.Normal(exact.mean, exact.stddev, validate_args=False), weights
        assert isinstance(exact, Independent)
        return exact.base_dist, weights

    def to(self, device: torch.device | str) -> LatentMixture:
        """The same predictive on another device."""
        params = {name: leaf.to(device) for name, leaf in (self.params or {}).items()}
        cov, weights = (None if t is None else t.to(device) for t in (self.cov, self.weights))
        return replace(self, means=self.means.to(device), cov=cov, weights=weights, params=params)

    def task(self, name: str) -> LatentMixture:
        """The predictive of one task of a `MultiTask` likelihood."""
        if not isinstance(self.likelihood, MultiTask):
            raise ValueError(f"only a MultiTask predictive has tasks; this one is {type(self.likelihood).__name__}")
        if name not in self.likelihood.tasks:
            raise ValueError(f"there is no task {name!r}; the tasks are {list(self.likelihood.tasks)}")
        likelihood, split, cov = self.likelihood.tasks[name][0], self.likelihood.split, self.cov
        if cov is not None:
            cov = split(cov)[name] if cov.ndim == self.means.ndim else split(split(cov)[name].mT)[name]
        return replace(
            self,
            likelihood=likelihood if likelihood.dim != -1 else replace(likelihood, dim=self.likelihood.dim),
            means=split(self.means)[name],
            cov=cov,
            params=self.likelihood.of(name, self.params or {}),
        )


def _times(root: Tensor, unit: Tensor) -> Tensor:
    """A diagonal [..., C] or dense [..., C, C] root times vectors [..., C]."""
    return root * unit if root.ndim == unit.ndim else (root @ unit.unsqueeze(-1)).squeeze(-1)


def concatenate(parts: list[LatentMixture]) -> LatentMixture:
    """Predictives of consecutive batches, from the same draws, as one predictive of all inputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    cov = None if first.cov is None else torch.cat([p.cov for p in parts if p.cov is not None], 1)
    return replace(first, means=torch.cat([p.means for p in parts], 1), cov=cov)


def mix(parts: list[LatentMixture], weights: list[float]) -> LatentMixture:
    """Predictives of the same inputs, mixed with weights that sum to 1."""
    stacked = [{k: v if v.ndim == 2 else v.expand(p.means.shape[0], -1) for k, v in (p.params or {}).items()} for p in parts]
    if any(p.cov is not None for p in parts) and any(p.cov is None for p in parts):
        parts = [replace(p, cov=torch.zeros_like(p.means)) if p.cov is None else p for p in parts]
    ranks = {p.cov.ndim for p in parts if p.cov is not None}
    if len(ranks) == 2:
        parts = [replace(p, cov=torch.diag_embed(p.cov)) if p.cov is not None and p.cov.ndim == min(ranks) else p for p in parts]
    cov = None if parts[0].cov is None else torch.cat([p.cov for p in parts if p.cov is not None])
    return replace(
        parts[0],
        means=torch.cat([p.means for p in parts]),
        cov=cov,
        weights=torch.cat([w * p._weights for p, w in zip(parts, weights, strict=True)]),
        params={k: torch.cat([s[k] for s in stacked]) for k in stacked[0]},
    )
