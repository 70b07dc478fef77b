"""What a model predicts: one object for every way to get there.

Inside, the network's output f is [S, B, *D, C]: S draws or mixture components, B inputs, *D positions (pixels, time), C last.
A predictive answers in terms of the target y, with the observation noise always included.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from dubito.model.likelihoods import Bernoulli, Likelihood, MultiTask, Uncertainty, align, average, quadrature
from dubito.tensors import tree
from dubito.tensors.randomness import forked, fresh, generator
from dubito.tensors.tree import Params

CACHE = 2**16  # numbers that quantiles work on at a time, so that they stay in the cache
Units = Tensor | np.ndarray | Sequence[float] | float
LINKS = ("nodes", "mc", "pairwise", "probit", "bridge")


class Predictive(ABC):
    """The predictive distribution p(y | x, D) for a batch of inputs."""

    likelihood: Likelihood
    means: Tensor  # [S, B, *D, C]: of the network's output, one for each draw or component

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[y | x, D]: class probabilities [B, *D, C], or the regression mean [B, *D, C]."""

    @property
    def complement(self) -> Tensor:
        """P(y = 0 | x, D) of labels, [B, *D, C]: 1 - mean, with the digits that this loses near 1 where they are known."""
        return 1 - self.mean

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

    @abstractmethod
    def to(self, device: torch.device | str) -> Predictive:
        """The same predictive on another device."""

    def rescaled(self, shift: Units, scale: Units) -> Predictive:
        """The predictive of shift + scale * y, each [C] or one number: back to the units that the targets of a regression were
        standardised from."""
        raise ValueError(f"a {type(self).__name__} has no other units to be seen in")


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
    root: Tensor | None = None  # [S, B, *D, C, R], a root of the covariances, given in the place of `cov` where C is large
    link: str = "nodes"  # class probabilities of a Gaussian over logits: nodes, mc (random nodes), pairwise, probit or bridge
    how: str = ""  # the way in which it was found, where there was a choice

    def __post_init__(self):
        if self.link not in LINKS:
            raise ValueError(f"link is one of {', '.join(LINKS)}; got {self.link!r}")

    def stretched(self, factor: float) -> LatentMixture:
        """The same with all covariances of f times a factor."""
        if factor == 1:
            return self
        if self.root is not None:
            return replace(self, root=self.root * factor**0.5)
        return replace(self, cov=None if self.cov is None else self.cov * factor)

    def linked(self, link: str) -> LatentMixture:
        """The same with another link from Gaussian logits to class probabilities."""
        return self if link == self.link else replace(self, link=link)

    @property
    def certain(self) -> bool:
        """No covariances: the components are points."""
        return self.cov is None and self.root is None

    @cached_property
    def covariances(self) -> Tensor:
        """[S, B, *D, C] or [S, B, *D, C, C]."""
        if self.cov is not None:
            return self.cov
        assert self.root is not None
        return self.root @ self.root.mT

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
        if self.root is not None:
            return self.root
        assert self.cov is not None
        if self.cov.ndim == self.means.ndim:
            return self.cov.clamp_min(0).sqrt()
        # unlike Cholesky, defined for singular covariances too; the symmetric root does not depend on signs and bases of eigenvectors
        values, vectors = torch.linalg.eigh(self.cov)
        return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT

    @cached_property
    def _points(self) -> LatentMixture:
        """The same predictive without covariances: every Gaussian as nodes with its mean and covariance."""
        if self.certain:
            return self
        n, width = self.quadrature, (self.means if self.root is None else self.root).shape[-1]
        if self.link == "mc":
            unit, weights = torch.randn(n, width, generator=generator("cpu", "link"), dtype=torch.float64).to(self.means), None
        else:
            unit, weights = quadrature(n, self.means if self.root is None else self.root)
        if self._root.ndim == self.means.ndim:
            spread = self._root.unsqueeze(1) * unit.reshape(1, n, *[1] * (self.means.ndim - 2), width)
        else:
            spread = torch.einsum("s...cr,nr->sn...c", self._root, unit)
        return self._finer(self.means.unsqueeze(1) + spread, None, weights)

    @cached_property
    def _resolved(self) -> LatentMixture:
        """The same predictive, of components whose distribution of y has a closed form: as many as that takes."""
        if self.certain or self._exact is not None:
            return self
        if self.likelihood.discrete:
            return self._points
        finer = self.likelihood.resolve(self.means, self.covariances, self.quadrature)
        return self._points if finer is None else self._finer(*finer)

    def _finer(self, means: Tensor, cov: Tensor | None, shares: Tensor | None = None) -> LatentMixture:
        """Every component as n, equal ones or with these shares [n]: means [S, n, B, *D, C], cov in a shape to match."""
        n = means.shape[1]
        params = {k: v.repeat_interleave(n, 0) if v.ndim == 2 else v for k, v in (self.params or {}).items()}
        weights = (self._weights.unsqueeze(1) * (1 / n if shares is None else shares.to(self._weights))).expand(-1, n).flatten()
        cov = None if cov is None else cov.flatten(0, 1)
        return replace(self, means=means.flatten(0, 1), cov=cov, weights=weights, params=params, root=None, link="nodes")

    @cached_property
    def _exact(self) -> Distribution | None:
        """The components' distributions of y in closed form, batch [S, B, *D]."""
        if self.certain:
            return self.likelihood(self.means, self._params)
        if self.likelihood.discrete:
            return None
        return self.likelihood.convolve(self.means, self.covariances, self._params)

    @cached_property
    def probs(self) -> Tensor:
        """E[y | f] of every draw or node, [S, B, *D, C]: for classes their probabilities."""
        return self.likelihood.mean(self._points.means, self._points._params)

    @property
    def draw_weights(self) -> Tensor:
        """The weights that belong to `probs`, [S]."""
        return self._points._weights

    @cached_property
    def _linked(self) -> LatentMixture | None:
        """Points that have, on average, the class probabilities of one of the closed approximations; None for nodes."""
        if self.certain or self.link in ("nodes", "mc") or not self.likelihood.discrete:
            return None
        f = self.likelihood.linked(self.means, self.covariances, self._params, self.link)
        return LatentMixture(self.likelihood.plain, f, weights=self._weights)

    @cached_property
    def mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._linked is not None:
            return self._linked.mean
        mean = average(self.probs, self.draw_weights)
        return mean.clamp(0, 1) if self.likelihood.discrete else mean  # a mean of probabilities may round to more than 1

    @cached_property
    def complement(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(self.likelihood, Bernoulli):
            return super().complement
        if self._linked is not None:
            return self._linked.complement
        points = self._points
        return average(self.likelihood.off(points.means, points._params), points._weights).clamp(0, 1)

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self.likelihood, MultiTask) and not self.certain:
            return self.likelihood.beside([self.task(name).uncertainty for name in self.likelihood.tasks], self.means.ndim - 1)
        noise = None if self.certain else self.likelihood.noise_variance(self.means, self._variances, self._params)
        if noise is not None:  # exactly: the mean of the noise, and the variance of the outputs that are means
            aleatoric, epistemic = average(noise, self._weights), self.f_var[..., : noise.shape[-1]]
            return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
        points = self._points
        split = self.likelihood.uncertainty(points.means, points._weights, points._params)
        return split if self._linked is None else Uncertainty.of(self._linked.uncertainty.total, split.aleatoric)

    @cached_property
    def f_mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return average(self.means, self._weights)

    @cached_property
    def f_var(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        between = average((self.means - self.f_mean) ** 2, self._weights)
        return between if self.certain else between + average(self._variances, self._weights)

    @property
    def _variances(self) -> Tensor:
        """The diagonals of the covariances, [S, B, *D, C]."""
        if self.root is not None:
            return self.root.square().sum(-1)
        assert self.cov is not None
        return self.cov if self.cov.ndim == self.means.ndim else self.cov.diagonal(dim1=-2, dim2=-1)

    def log_prob(self, y: Tensor) -> Tensor:
        if self._linked is not None:
            return self._linked.log_prob(y)
        closed = self._resolved
        y = self.likelihood.target(tree.tensors(y), self.means[0])
        if closed.certain:
            score = self.likelihood.log_prob(closed.means, y, closed._params)  # [S, B, *D]
        else:
            assert closed._exact is not None
            seen = self.likelihood.observed(y)
            if seen is not None and isinstance(self.likelihood, MultiTask):
                raise ValueError(
                    "some targets are missing, and a joint density of tasks that hang together needs all: ask for each task alone, "
                    f"p.task(name).log_prob(...) with one of {list(self.likelihood.tasks)}"
                )
            score = closed._exact.log_prob(y if seen is None else torch.where(seen.unsqueeze(-1), y, 0.0))
            score = score if seen is None else torch.where(seen, score, 0.0)
        log_weights = closed._weights.log().reshape(-1, *[1] * (score.ndim - 1))
        score = (score + log_weights).logsumexp(0)  # [B, *D]
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.means.device
        generator = fresh(device) if generator is None else generator
        which = torch.multinomial(self._weights, n, replacement=True, generator=generator)
        params = {k: v[which] if v.ndim == 2 else v for k, v in (self.params or {}).items()}
        f = self.means[which]
        if not self.certain:  # from the Gaussians themselves: nodes would leave gaps where the noise is small
            width = f.shape[-1] if self.root is None else self.root.shape[-1]
            unit = torch.randn((*f.shape[:-1], width), generator=generator, dtype=f.dtype, device=device)
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
        try:
            below = marginal.cdf(y.expand(marginal.batch_shape))
        except NotImplementedError:  # which torch raises without a word
            raise ValueError(
                f"a {type(marginal).__name__} has no cdf in torch, so there are no exact quantiles and intervals: take them from "
                "draws, as p.sample(2000).quantile(0.95, 0), or let the likelihood return a distribution that has one"
            ) from None
        return average(below, weights)

    def quantile(self, level: float) -> Tensor:
        """The level-quantile of every output of a regression, [B, *D, C]: a root of the mixture's exact cdf."""
        if not 0 < level < 1:
            raise ValueError(f"a quantile's level lies between 0 and 1; got {level}")
        marginal, weights = self.marginals
        if isinstance(marginal, Normal):
            mean, scale = (t.expand(marginal.batch_shape) for t in (marginal.loc, marginal.scale))
            return _normal_quantile(mean, scale, weights, level)
        # Cantelli's bounds, which hold for every distribution that has a variance: no more than 1 / (1 + k^2) lies k deviations below
        low = (marginal.mean - math.sqrt((1 - level) / level) * marginal.stddev).amin(0)
        high = (marginal.mean + math.sqrt(level / (1 - level)) * marginal.stddev).amax(0)
        low, high = _supported(marginal, low), _supported(marginal, high)
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
            return Normal(exact.mean, exact.stddev, validate_args=False), weights
        assert isinstance(exact, Independent)
        return exact.base_dist, weights

    def to(self, device: torch.device | str) -> LatentMixture:
        """The same predictive on another device."""
        params = {name: leaf.to(device) for name, leaf in (self.params or {}).items()}
        cov, weights, root = (None if t is None else t.to(device) for t in (self.cov, self.weights, self.root))
        return replace(self, means=self.means.to(device), cov=cov, weights=weights, params=params, root=root)

    def rescaled(self, shift: Units, scale: Units) -> LatentMixture:
        shift, scale = _units(shift, scale, self.mean)
        likelihood, offset, factor, params = self.likelihood.rescaled(shift, scale, self.params or {})
        cov = self.cov
        if cov is not None:
            cov = cov * factor**2 if cov.ndim == self.means.ndim else cov * factor.unsqueeze(-1) * factor
        root = None if self.root is None else self.root * factor.unsqueeze(-1)
        means = offset + factor * self.means
        return replace(self, likelihood=likelihood, means=means, cov=cov, root=root, params=params)

    def task(self, name: str) -> LatentMixture:
        """The predictive of one task of a `MultiTask` likelihood."""
        if not isinstance(self.likelihood, MultiTask):
            raise ValueError(f"only a MultiTask predictive has tasks; this one is {type(self.likelihood).__name__}")
        if name not in self.likelihood.tasks:
            raise ValueError(f"there is no task {name!r}; the tasks are {list(self.likelihood.tasks)}")
        likelihood, split, cov = self.likelihood.tasks[name][0], self.likelihood.split, self.cov
        if self.root is not None:
            rows = split(self.root.mT)[name].mT
            cov = rows @ rows.mT
        elif cov is not None:
            cov = split(cov)[name] if cov.ndim == self.means.ndim else split(split(cov)[name].mT)[name]
        return replace(
            self,
            likelihood=likelihood if likelihood.dim != -1 else replace(likelihood, dim=self.likelihood.dim),
            means=split(self.means)[name],
            cov=cov,
            params=self.likelihood.of(name, self.params or {}),
            root=None,
        )


def _normal_quantile(mean: Tensor, scale: Tensor, weights: Tensor, level: float) -> Tensor:
    """The level-quantile of mixtures of Normals, [...], whose components are [S, ...]."""
    shape, weights = mean.shape[1:], weights.to(mean.dtype)
    # the upper half is the lower one of the mirror image: small probabilities keep all their digits
    sign = 1 if level <= 0.5 else -1
    columns = max(1, CACHE // len(mean)) if mean.device.type == "cpu" else max(1, mean[0].numel())
    parts = zip((sign * mean).flatten(1).split(columns, 1), scale.flatten(1).split(columns, 1), strict=True)
    found = [_lower_quantile(m.contiguous(), s.contiguous(), weights, min(level, 1 - level)) for m, s in parts]
    return sign * torch.cat(found).reshape(shape)


def _lower_quantile(mean: Tensor, scale: Tensor, weights: Tensor, level: float) -> Tensor:
    """The same for [S, n] and a level of at most 1/2: Newton's method on ln F, and bisection where that goes astray.

    Every component's own quantile is a bound of the mixture's on one side or the other, so that the least and the largest of them
    enclose it.
    """
    ends = mean + NormalDist().inv_cdf(level) * scale
    low, high, result = ends.amin(0), ends.amax(0), torch.empty_like(mean[0])
    at, x, least = torch.arange(len(result), device=mean.device), (weights @ ends).clamp(low, high), scale.amin(0)
    eps, before = torch.finfo(mean.dtype).eps, high - low
    for _ in range(200):  # many times what it takes: bisection alone needs as many as a number has bits
        z = (x - mean) / scale
        below = 0.5 * (weights @ torch.erfc(z * -math.sqrt(0.5)))
        density = weights @ (torch.exp(-0.5 * z * z) / scale) / math.sqrt(2 * math.pi)
        step = (below / level).log() * below / density
        low, high = torch.where(below < level, x, low), torch.where(below < level, high, x)
        # the next step would be about the square of this one, in units of the narrowest component: less than can be told
        close = (step.abs() <= 0.1 * eps**0.5 * least + 2 * eps * x.abs()) | (below == level)
        # other steps have to stay between the ends and to halve, or bisection does it
        newton = close | ((x - step > low) & (x - step < high) & (step.abs() <= before / 2))
        before = torch.where(newton, step.abs(), (high - low) / 2)
        x = torch.where(newton, (x - step.nan_to_num(0.0)).clamp(low, high), (low + high) / 2)
        left = (~close & (high - low > 2 * eps * x.abs())).nonzero().squeeze(1)  # what is NaN stays so
        result[at] = x
        if not len(left):
            break
        if 2 * len(left) <= len(at):
            at, x, low, high, before, least = (t[left] for t in (at, x, low, high, before, least))
            mean, scale = mean[:, left], scale[:, left]
    return result


def _times(root: Tensor, unit: Tensor) -> Tensor:
    """A diagonal [..., C] or dense [..., C, R] root times vectors [..., R]."""
    if root.ndim == unit.ndim:
        return root * unit
    return (root @ unit.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class StudentT(Predictive):
    r"""The predictive of a conjugate regression with unknown noise: Student-t, exactly.

    Each output is :math:`y = f + \epsilon` with :math:`\sigma^2 \sim \mathrm{InvGamma}(a, b)`,
    :math:`f \mid \sigma^2 \sim N(m, \sigma^2 q)` and :math:`\epsilon \mid \sigma^2 \sim N(0, \sigma^2)`. Then

    .. math:: y \sim t_{2a}\left(m,\; \tfrac{b}{a} (1 + q)\right), \qquad
        \mathrm{Var}[y] = \underbrace{\tfrac{b}{a - 1}}_{\text{aleatoric}} + \underbrace{\tfrac{b}{a - 1}\, q}_{\text{epistemic}}

    For :math:`a \le 1` (two observations or fewer, with a weak prior) the noise has no mean: the variances are infinite, as they should
    be, while densities, quantiles and intervals stay finite. Outputs that share one noise are a joint Student-t, and are scored so.

    >>> import dubito
    >>> one = torch.ones(1, 1, 1)
    >>> p = StudentT(dubito.Gaussian(), 0 * one, one, torch.tensor([3.0]), torch.tensor([4.0]))
    >>> p.uncertainty.total, p.uncertainty.aleatoric
    (tensor([[4.]]), tensor([[2.]]))
    """

    likelihood: Likelihood
    means: Tensor  # [1, B, *D, C]
    spread: Tensor  # q, [1, B, *D, C]: the variance of f in units of the noise's
    shape: Tensor  # a, [C] or, for one noise shared by all outputs, [1]
    rate: Tensor  # b, [C] or [1]

    @property
    def mean(self) -> Tensor:
        return self.means[0]

    @property
    def f_mean(self) -> Tensor:
        return self.means[0]

    @property
    def f_var(self) -> Tensor:
        return self.uncertainty.epistemic

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        noise = torch.where(self.shape > 1, self.rate / (self.shape - 1), torch.inf).to(self.means).expand_as(self.mean)
        known = torch.where(self.spread[0] > 0, noise * self.spread[0], 0.0)  # not inf * 0, where f is certain
        return Uncertainty(noise + known, noise, known)

    @cached_property
    def _scale(self) -> Tensor:
        """The scale of the Student-t, [B, *D, C], in float64: a difference of log gammas needs it."""
        return (self.rate.double() / self.shape.double() * (1 + self.spread[0].double())).sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        y, dof = self.likelihood.target(tree.tensors(y), self.mean), 2 * self.shape.double()
        squares, logs = ((y - self.mean) / self._scale) ** 2, self._scale.log()
        width = 1
        if len(self.shape) < y.shape[-1]:  # one noise for all outputs: what one output shows of it counts for the others
            squares, logs, width = squares.sum(-1, keepdim=True), logs.sum(-1, keepdim=True), y.shape[-1]
        constant = torch.lgamma((dof + width) / 2) - torch.lgamma(dof / 2) - width / 2 * (math.pi * dof).log()
        score = (constant - logs - (dof + width) / 2 * torch.log1p(squares / dof)).sum(-1).to(self.means)
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        device = self.means.device
        source = fresh(device) if generator is None else generator
        unit = torch.randn((n, *self.mean.shape), generator=source, dtype=torch.float64, device=device)
        seed = int(torch.randint(2**62, (1,), generator=source, device=device))
        with forked(seed):  # torch.distributions draws from the global generator only
            chi2 = torch.distributions.Chi2(2 * self.shape.double()).sample((n, *self.mean.shape[:-1]))
        return (self.mean + self._scale * unit * (2 * self.shape.double() / chi2).sqrt()).to(self.means)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) of every output on its own, [B, *D, C], for y [B, *D, C]."""
        z = (y - self.mean) / self._scale
        tail = _student_t_tail(z.abs(), 2 * self.shape.double())
        return torch.where(z > 0, 1 - tail, tail).to(self.means)

    def quantile(self, level: float) -> Tensor:
        """The level-quantile of every output, [B, *D, C]: that of the standard Student-t, moved and scaled."""
        if not 0 < level < 1:
            raise ValueError(f"a quantile's level lies between 0 and 1; got {level}")
        low = torch.zeros(1, len(self.shape), dtype=torch.float64, device=self.shape.device)
        high, cuts = torch.ones_like(low), torch.linspace(0, 1, 257, dtype=torch.float64, device=low.device).unsqueeze(-1)
        for _ in range(7):  # 8 bits at a time, over (0, 1), which a Cauchy's quantile function takes to the whole tail
            grid = low + (high - low) * cuts  # [257, G]
            inside = _student_t_tail(torch.tan(grid * math.pi / 2), 2 * self.shape.double()) > min(level, 1 - level)
            last = (inside.sum(0, keepdim=True) - 1).clamp(0, 255)
            low, high = grid.gather(0, last), grid.gather(0, last + 1)
        z = math.copysign(1, level - 0.5) * torch.tan((low + high) * math.pi / 4).squeeze(0)
        return (self.mean + z * self._scale).to(self.means)

    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of every output on its own, [B, *D, C], for y [B, *D, C].

        :math:`\frac{\mathrm{crps}}{s} = z (2 F(z) - 1) + \frac{2 (\nu + z^2)}{\nu - 1} p(z) - \frac{2 \sqrt\nu}{\nu - 1}
        \frac{B(1/2, \nu - 1/2)}{B(1/2, \nu / 2)^2}` with :math:`z = (y - m) / s`, :math:`\nu = 2a > 1`; infinite for :math:`\nu \le 1`.
        """
        dof, half = 2 * self.shape.double(), torch.tensor(0.5, dtype=torch.float64, device=self.shape.device)
        z = (y - self.mean) / self._scale
        beta = _log_beta(half, dof / 2)
        density = (-(dof + 1) / 2 * torch.log1p(z * z / dof) - 0.5 * dof.log() - beta).exp()
        centre = z.abs() * (1 - 2 * _student_t_tail(z.abs(), dof))
        spread = dof.sqrt() * (_log_beta(half, dof - 0.5) - 2 * beta).exp()
        score = self._scale * (centre + 2 * ((dof + z * z) * density - spread) / (dof - 1))
        return torch.where(dof > 1, score, torch.inf).to(self.means)

    def to(self, device: torch.device | str) -> StudentT:
        """The same predictive on another device."""
        means, spread, shape, rate = (t.to(device) for t in (self.means, self.spread, self.shape, self.rate))
        return replace(self, means=means, spread=spread, shape=shape, rate=rate)

    def rescaled(self, shift: Units, scale: Units) -> StudentT:
        shift, scale = _units(shift, scale, self.means)
        return replace(self, means=shift + scale * self.means, rate=self.rate * scale.to(self.rate) ** 2)


def _units(shift: Units, scale: Units, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [C], in the precision in which they come as tensors, or else in that of the mean."""

    def each(value: Units) -> Tensor:
        found = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=mean.dtype)
        found = found.to(mean.device)
        if found.numel() not in (1, mean.shape[-1]):
            raise ValueError(
                f"there are {mean.shape[-1]} targets, whose shift and scale are one number or one for each; got {value}"
            )
        return found.reshape(-1).expand(mean.shape[-1])

    shift, scale = each(shift), each(scale)
    if not bool((scale > 0).all()):
        raise ValueError(f"a scale is above 0; got {scale.tolist()}")
    return shift, scale


def _supported(distribution: Distribution, y: Tensor) -> Tensor:
    """Within the bounds of what a distribution gives, such as 0 of a duration: its cdf is NaN or an error outside."""
    try:
        support = distribution.support
    except NotImplementedError:  # of a distribution of one's own
        return y
    low, high = (getattr(support, name, None) for name in ("lower_bound", "upper_bound"))
    return y if low is None and high is None else y.clamp(low, high)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _student_t_tail(z: Tensor, dof: Tensor) -> Tensor:
    r"""P(T > z) of a standard Student-t for z >= 0: :math:`\frac12 I_x(\nu/2, 1/2)` at :math:`x = \nu / (\nu + z^2)`.

    The incomplete beta function is its continued fraction, on the side where that converges: 40 terms give all digits for any dof.
    """
    ratio = z * z / dof
    log_x, log_rest = -torch.log1p(ratio), ratio.log() - torch.log1p(ratio)
    a, b = (dof / 2).expand_as(z), torch.full_like(z, 0.5)
    direct = log_x.exp() < (a + 1) / (a + 2.5)
    p, q, x = torch.where(direct, a, b), torch.where(direct, b, a), torch.where(direct, log_x, log_rest).exp()
    upper, lower = torch.ones_like(x), 1 / (1 - (p + q) * x / (p + 1))
    fraction = lower
    for m in range(1, 41):
        even = m * (q - m) * x / ((p + 2 * m - 1) * (p + 2 * m))
        odd = -(p + m) * (p + q + m) * x / ((p + 2 * m) * (p + 2 * m + 1))
        for term in (even, odd):
            upper, lower = 1 + term / upper, 1 / (1 + term * lower)
            fraction = fraction * upper * lower
    value = (a * log_x + b * log_rest - _log_beta(a, b)).exp() / p * fraction
    return 0.5 * torch.where(direct, value, 1 - value)


def concatenate(parts: Sequence[Predictive]) -> Predictive:
    """Predictives of consecutive batches, from the same draws, as one predictive of all inputs."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, StudentT):
        spread = torch.cat([p.spread for p in parts if isinstance(p, StudentT)], 1)
        return replace(first, means=torch.cat([p.means for p in parts], 1), spread=spread)
    if not isinstance(first, LatentMixture):
        raise ValueError(f"predictives of the kind {type(first).__name__} cannot be put one after another")
    rest = [p for p in parts if isinstance(p, LatentMixture)]
    cov = None if first.cov is None else torch.cat([p.cov for p in rest if p.cov is not None], 1)
    root = None if first.root is None else torch.cat([p.root for p in rest if p.root is not None], 1)
    return replace(first, means=torch.cat([p.means for p in parts], 1), cov=cov, root=root)


def mix(given: Sequence[Predictive], weights: Sequence[float]) -> LatentMixture:
    """Predictives of the same inputs, mixed with weights that sum to 1."""
    parts = [p for p in given if isinstance(p, LatentMixture)]
    if len(parts) < len(given):
        raise ValueError("predictives of other kinds than LatentMixture cannot be mixed exactly: predict with how='sampled'")
    roots = [p.root for p in parts if p.root is not None]
    root = torch.cat(roots) if len(roots) == len(parts) and len({r.shape[1:] for r in roots}) == 1 else None
    if root is None:
        parts = [p if p.root is None else replace(p, cov=p.covariances, root=None) for p in parts]
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
        root=root,
        weights=torch.cat([w * p._weights for p, w in zip(parts, weights, strict=True)]),
        params={k: torch.cat([s[k] for s in stacked]) for k in stacked[0]},
    )
