"""The general predictive: a mixture of Gaussians over the output of the network, seen through the likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from dubito.model.likelihoods import Likelihood, MultiTask, Uncertainty, align, average, entropy, quadrature
from dubito.network.examples import as_arrays
from dubito.posteriors.predictive.classes import (
    NODES,
    ClassTerms,
    class_scores,
    class_terms,
    in_pieces,
    joint_scores,
    node_count,
    symmetric_root,
    times,
)
from dubito.posteriors.predictive.predictive import (
    Predictive,
    Units,
    as_units,
    normal_mixture_quantile,
    takes_counts,
    within_support,
)
from dubito.tensors import tree
from dubito.tensors.checks import between, one_of, require
from dubito.tensors.randomness import fork_rng, fresh_generator, generator
from dubito.tensors.tree import Params

LINKS = ("nodes", "mc", "pairwise", "probit", "bridge")


@dataclass(frozen=True)
class LatentMixture(Predictive):
    r"""The general predictive: a weighted mixture of Gaussians over f, seen through the likelihood.

    .. math:: p(y \mid x) = \sum_s w_s \int p(y \mid f)\, N(f;\, m_s, V_s)\, df

    Draws of weights have no covariance (`cov=None`); a linearized or one-pass predictive is S = 1 with one; an ensemble of those has
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
    quadrature: int | None = None  # nodes for each Gaussian where there is no closed form; None: 128, or as its spread asks for
    root: Tensor | None = None  # [S, B, *D, C, R], a root of the covariances, given in the place of `cov` where C is large
    link: str = "nodes"  # class probabilities of a Gaussian over logits: nodes, mc (random nodes), pairwise, probit or bridge
    how: str = ""  # the way in which it was found, where there was a choice

    def __post_init__(self):
        one_of(LINKS, link=self.link)

    def stretched(self, factor: float) -> LatentMixture:
        """The same with all covariances of f times a factor: those of the components, or that of the draws."""
        if factor == 1:
            return self
        if self.certain:
            return replace(self, means=self.f_mean + (self.means - self.f_mean) * factor**0.5)
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
    def component_weights(self) -> Tensor:
        """The weights of the components, [S]."""
        if self.weights is not None:
            return self.weights
        dtype = torch.promote_types(self.means.dtype, torch.float32)
        return torch.full((len(self.means),), 1 / len(self.means), dtype=dtype, device=self.means.device)

    @cached_property
    def aligned_params(self) -> Params:
        """What the likelihood learned, in shapes that broadcast against f."""
        return align(self.params or {}, self.means)

    @cached_property
    def _root(self) -> Tensor:
        """A square root of the covariances, in their shape."""
        if self.root is not None:
            return self.root
        assert self.cov is not None
        if self.cov.ndim == self.means.ndim:
            return self.cov.clamp_min(0).sqrt()
        return symmetric_root(self.cov)

    @property
    def points(self) -> LatentMixture:
        """The same predictive without covariances: every Gaussian as nodes with its mean and covariance."""
        return self if self.certain else self._nodes  # itself in its own cache would be freed by the garbage collector alone

    @cached_property
    def _nodes(self) -> LatentMixture:
        """The nodes of all Gaussians."""
        n, width = node_count(self), (self.means if self.root is None else self.root).shape[-1]
        if self.link == "mc":
            unit, weights = torch.randn(n, width, generator=generator("cpu", "link"), dtype=torch.float64).to(self.means), None
        else:
            unit, weights = quadrature(n, self.means if self.root is None else self.root)
        if self._root.ndim == self.means.ndim:
            spread = self._root.unsqueeze(1) * unit.reshape(1, n, *[1] * (self.means.ndim - 2), width)
        else:
            spread = torch.einsum("s...cr,nr->sn...c", self._root, unit)
        return self._finer(self.means.unsqueeze(1) + spread, None, weights)

    @property
    def _resolved(self) -> LatentMixture:
        """The same predictive, of components whose distribution of y has a closed form: as many as that takes."""
        return self if self.certain or self._exact is not None else self._split

    @cached_property
    def _split(self) -> LatentMixture:
        """The same, where its own components have none."""
        if self.likelihood.discrete:
            return self.points
        finer = self.likelihood.resolve(self.means, self.covariances, self.quadrature or NODES)
        return self.points if finer is None else self._finer(*finer)

    def _finer(self, means: Tensor, cov: Tensor | None, shares: Tensor | None = None) -> LatentMixture:
        """Every component as n, equal ones or with these shares [n]: means [S, n, B, *D, C], cov in a shape to match."""
        n = means.shape[1]
        params = {k: v.repeat_interleave(n, 0) if v.ndim == 2 else v for k, v in (self.params or {}).items()}
        share = 1 / n if shares is None else shares.to(self.component_weights)
        weights = (self.component_weights.unsqueeze(1) * share).expand(-1, n).flatten()
        means, cov = means.flatten(0, 1), None if cov is None else cov.flatten(0, 1)
        return replace(self, means=means, cov=cov, weights=weights, params=params, root=None, link="nodes")

    @cached_property
    def _exact(self) -> Distribution | None:
        """The components' distributions of y in closed form, batch [S, B, *D]."""
        if self.certain:
            return self.likelihood(self.means, self.aligned_params)
        if self.likelihood.discrete:
            return None
        return self.likelihood.convolve(self.means, self.covariances, self.aligned_params)

    @property
    def marginal_points(self) -> LatentMixture:
        """Points with the right distribution of every output on its own, as labels and counts need them: exact nodes of one dimension,
        which all outputs share. For other likelihoods they are `points`."""
        free = self.certain or self.link == "mc" or self.means.shape[-1] == 1 or not self.likelihood.separate
        return self.points if free else self._line_nodes

    @cached_property
    def _line_nodes(self) -> LatentMixture:
        """Nodes of one dimension, which all outputs share."""
        unit, weights = quadrature(self.quadrature or NODES, self.means[..., :1])
        spread = self.variances.clamp_min(0).sqrt().unsqueeze(1) * unit.reshape(1, -1, *[1] * (self.means.ndim - 1))
        return self._finer(self.means.unsqueeze(1) + spread, None, weights)

    @cached_property
    def probs(self) -> Tensor:
        """E[y | f] of every draw or node, [S, B, *D, C]: for classes their probabilities."""
        return self.likelihood.mean(self.marginal_points.means, self.marginal_points.aligned_params)

    @property
    def draw_weights(self) -> Tensor:
        """The weights that belong to `probs`, [S]."""
        return self.marginal_points.component_weights

    @cached_property
    def _class_terms(self) -> ClassTerms | None:
        """Means over draws or nodes, some positions at a time; None where there is a shorter way."""
        return class_terms(self) if in_pieces(self) else None

    @cached_property
    def linked_points(self) -> LatentMixture | None:
        """Points that have, on average, the class probabilities of one of the closed approximations; None for nodes."""
        if self.certain or self.link in ("nodes", "mc") or not self.likelihood.discrete:
            return None
        f = self.likelihood.linked(self.means, self.covariances, self.aligned_params, self.link)
        return LatentMixture(self.likelihood.plain, f, weights=self.component_weights)

    @cached_property
    def mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """E[y | x, D]: class probabilities, or the regression mean."""
        if self.linked_points is not None:
            return self.linked_points.mean
        if self._class_terms is not None:
            return self._class_terms.probs.clamp(0, 1).unflatten(0, self.means.shape[1:-1])
        if isinstance(self.likelihood, MultiTask) and not self.certain:  # each task with the nodes that it asks for
            return torch.cat([self.task(name).mean for name in self.likelihood.tasks], -1)
        linear = None if self._noise is None else self.f_mean[..., : self._noise.shape[-1]]
        mean = average(self.probs, self.draw_weights) if linear is None else linear
        return mean.clamp(0, 1) if self.likelihood.discrete else mean  # a mean of probabilities may round to more than 1

    @cached_property
    def complement(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """P(y = 0 | x, D) of labels, with all digits."""
        if not (self.likelihood.separate and self.likelihood.discrete):
            return super().complement
        if self.linked_points is not None:
            return self.linked_points.complement
        points = self.marginal_points
        return average(self.likelihood.off(points.means, points.aligned_params), points.component_weights).clamp(0, 1)

    @property
    def log_forecasts(self) -> Tensor:
        """Log probabilities of classes, or the log odds of labels, averaged over draws: they are formed in logarithms."""
        if self.linked_points is not None:
            return self.linked_points.log_forecasts
        if self._class_terms is not None:
            return self._class_terms.log_probs.double().unflatten(0, self.means.shape[1:-1])
        points = self.marginal_points
        return self.likelihood.log_forecasts(points.means, points.component_weights, points.aligned_params)

    @cached_property
    def _noise(self) -> Tensor | None:
        """The mean variance of the noise in each component, where the first outputs are the means of y; None of draws."""
        return None if self.certain else self.likelihood.noise_variance(self.means, self.variances, self.aligned_params)

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Total = aleatoric + epistemic."""
        if isinstance(self.likelihood, MultiTask) and not self.certain:
            return self.likelihood.beside([self.task(name).uncertainty for name in self.likelihood.tasks], self.means.ndim - 1)
        if self._noise is not None:  # exactly: the mean of the noise, and the variance of the outputs that are means
            aleatoric, epistemic = average(self._noise, self.component_weights), self.f_var[..., : self._noise.shape[-1]]
            return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
        if self._class_terms is not None:
            return Uncertainty.of(entropy(self.mean), self._class_terms.entropy.reshape(self.means.shape[1:-1]))
        points = self.marginal_points
        split = self.likelihood.uncertainty(points.means, points.component_weights, points.aligned_params)
        return split if self.linked_points is None else Uncertainty.of(self.linked_points.uncertainty.total, split.aleatoric)

    @cached_property
    def f_mean(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Mean of the network's output."""
        return average(self.means, self.component_weights)

    @cached_property
    def f_var(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Variance of the network's output over the posterior."""
        between = average((self.means - self.f_mean) ** 2, self.component_weights)
        return between if self.certain else between + average(self.variances, self.component_weights)

    @property
    def variances(self) -> Tensor:
        """The variances of the outputs in each component, the diagonals of the covariances, [S, B, *D, C]."""
        if self.root is not None:
            return self.root.square().sum(-1)
        assert self.cov is not None
        return self.cov if self.cov.ndim == self.means.ndim else self.cov.diagonal(dim1=-2, dim2=-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) for every input, [B]."""
        score = self.log_prob_by_position(y)
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def log_prob_by_position(self, y: Tensor) -> Tensor:
        """log p(y | x, D) at every position (pixel, token) on its own, [B, *D], whose sum is `log_prob`; 0 where there is no target.

        Of a text, each position has the score of the token that follows.

        >>> import dubito
        >>> p = LatentMixture(dubito.NextToken(), torch.zeros(1, 1, 3, 8))
        >>> p.log_prob_by_position(torch.tensor([[4, 2, 7]]))
        tensor([[-2.0794, -2.0794,  0.0000]])
        """
        if self.linked_points is not None:
            return self.linked_points.log_prob_by_position(y)
        y = self._target(y)
        if in_pieces(self):
            return class_scores(self, y)
        return joint_scores(self, y) if self._joint else self.position_scores(y)

    def _target(self, y: Tensor) -> Tensor:
        """Targets in the layout of the likelihood; those of classes checked, since torch's indexing does not say what is wrong."""
        y = tree.tensors(as_arrays(y))
        if self.likelihood.indexed:
            self.likelihood.check(self.means[0], y)
        return self.likelihood.target(y, self.means[0])

    @property
    def _joint(self) -> bool:
        """Whether a log score of labels, counts or tasks is an integral over several outputs, with as many nodes as their spread asks
        for."""
        likelihood = self.likelihood
        free = not self.certain and self.quadrature is None and self.link == "nodes" and self.means.shape[-1] > 1
        joint = likelihood.separate or isinstance(likelihood, MultiTask) or (likelihood.discrete and not likelihood.indexed)
        return free and joint and not self._labels_alone and self._exact is None

    @property
    def _labels_alone(self) -> bool:
        """Whether labels or counts are independent within each component."""
        return self.likelihood.separate and self.cov is not None and self.cov.ndim == self.means.ndim

    def position_scores(self, y: Tensor) -> Tensor:
        """log p(y | x, D) at every position, [B, *D], for targets in the layout of the likelihood's `target`."""
        alone = self._labels_alone
        closed = self if alone else self._resolved
        if alone:
            score = self._label_scores(y)
        elif closed.certain:
            score = self.likelihood.log_prob(closed.means, y, closed.aligned_params)  # [S, B, *D]
        else:
            assert closed._exact is not None
            seen = self.likelihood.observed(y)
            if seen is not None and self.likelihood.task_names:
                raise ValueError(
                    "some targets are missing, and the joint density of correlated tasks needs all of them: score each task alone, "
                    f"p.task(name).log_prob(...) with one of {list(self.likelihood.task_names)}"
                )
            score = closed._exact.log_prob(y if seen is None else torch.where(seen.unsqueeze(-1), y, 0.0))
            score = score if seen is None else torch.where(seen, score, 0.0)
        log_weights = closed.component_weights.log().reshape(-1, *[1] * (score.ndim - 1))
        return (score + log_weights).logsumexp(0)  # [B, *D]

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """log p(y | x, D) of all positions of every input together (pixels, tokens), [B].

        `log_prob` averages over draws at each position and adds the logs. Here the probabilities of all positions are multiplied within
        each draw, and averaged afterwards, because one function gives all positions.
        """
        require(self.certain, "a joint probability needs draws of functions: use predict(..., draws=30)")
        y = self._target(y)
        score = self.likelihood.log_prob(self.means, y, self.aligned_params).double()  # [S, B, *D]
        log_weights = self.component_weights.double().log().unsqueeze(1)
        return (score.reshape(*score.shape[:2], -1).sum(-1) + log_weights).logsumexp(0)

    def _label_scores(self, y: Tensor) -> Tensor:
        """Log scores [S, B, *D] of labels or counts that are independent within each component: products of integrals of one
        dimension."""
        points, n = self.marginal_points, len(self.marginal_points.means) // len(self.means)
        each = self.likelihood.label_scores(points.means, y, points.aligned_params).unflatten(0, (-1, n))  # [S, n, B, *D, C]
        shares = (points.component_weights.unflatten(0, (-1, n)) / self.component_weights.unsqueeze(1)).log().to(each)
        return (each + shares.reshape(-1, n, *[1] * (each.ndim - 2))).logsumexp(1).sum(-1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y for every input."""
        device = self.means.device
        generator = fresh_generator(device) if generator is None else generator
        which = torch.multinomial(self.component_weights, n, replacement=True, generator=generator)
        params = {k: v[which] if v.ndim == 2 else v for k, v in (self.params or {}).items()}
        f = self.means[which]
        if not self.certain:  # from the Gaussians themselves: nodes would leave gaps where the noise is small
            width = f.shape[-1] if self.root is None else self.root.shape[-1]
            unit = torch.randn((*f.shape[:-1], width), generator=generator, dtype=f.dtype, device=device)
            f = f + times(self._root if len(self._root) == 1 else self._root[which], unit)
        # torch.distributions draws from the global generator only: lend it a seed from ours and put it back
        seed = int(torch.randint(2**62, (1,), generator=generator, device=device))
        with fork_rng(seed):
            return self.likelihood(f, align(params, f)).sample()

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Central interval of every output of a regression."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) of every output of a regression on its own, [B, *D, C], for y [B, *D, C]."""
        marginal, weights = self.marginals
        y = y if takes_counts(marginal) else within_support(marginal, y)
        try:
            below = marginal.cdf(y.expand(marginal.batch_shape))
        except NotImplementedError:  # which torch raises without a word
            raise ValueError(
                f"a {type(marginal).__name__} has no cdf in torch, so there are no exact quantiles and intervals: take them from "
                "draws, as p.sample(2000).quantile(0.95, 0), or let the likelihood return a distribution that has one"
            ) from None
        return average(below, weights)

    def quantile(self, level: float) -> Tensor:
        """The level-quantile of every output of a regression, [B, *D, C]: a root of the mixture's exact cdf, or the first count at
        which it is reached."""
        between(0, 1, level=level)
        marginal, weights = self.marginals
        if self.gaussian:
            mean, scale = (t.expand(marginal.batch_shape) for t in (marginal.mean, marginal.stddev))
            return normal_mixture_quantile(mean, scale, weights, level)
        # Cantelli's bounds, which hold for every distribution that has a variance: no more than 1 / (1 + k^2) lies k deviations below
        low = (marginal.mean - math.sqrt((1 - level) / level) * marginal.stddev).amin(0)
        high = (marginal.mean + math.sqrt(level / (1 - level)) * marginal.stddev).amax(0)
        low, high = within_support(marginal, low), within_support(marginal, high)
        counts = takes_counts(marginal)
        for _ in range(60 if low.dtype == torch.float64 else 30):
            middle = (low + high) / 2
            below = self.cdf(middle) < level
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
            if counts and bool((high - low < 0.5).all()):  # one whole number at most is left between them
                break
        return high.floor() if counts else (low + high) / 2

    @property
    def mixture(self) -> LatentMixture:
        """Itself."""
        return self

    @property
    def gaussian(self) -> bool:
        """Whether every component of a regression is a Gaussian in each output."""
        return isinstance(self.marginals[0], Normal)

    @cached_property
    def marginals(self) -> tuple[Distribution, Tensor]:
        """Every component's distribution of each output on its own, batch [S, B, *D, C], and the weights."""
        if self.likelihood.discrete or self.likelihood.task_names:
            raise ValueError(f"intervals and quantiles are for regression; {type(self.likelihood).__name__} has classes")
        resolved = self.marginal_points if self.likelihood.separate else self._resolved
        if not self.certain and (resolved.certain or not isinstance(resolved._exact, Independent | MultivariateNormal)):
            # outputs that hang together may still have closed forms one by one
            alone = replace(self, cov=self.variances, root=None)
            resolved = resolved if alone._exact is None else alone
        exact, weights = resolved._exact, resolved.component_weights
        assert isinstance(exact, Independent | MultivariateNormal)
        joint = isinstance(exact, MultivariateNormal)
        return Normal(exact.mean, exact.stddev, validate_args=False) if joint else exact.base_dist, weights

    def to(self, device: torch.device | str) -> LatentMixture:
        """The same predictive on another device."""
        params = {name: leaf.to(device) for name, leaf in (self.params or {}).items()}
        cov, weights, root = (None if t is None else t.to(device) for t in (self.cov, self.weights, self.root))
        return replace(self, means=self.means.to(device), cov=cov, weights=weights, params=params, root=root)

    def rescaled(self, shift: Units, scale: Units) -> LatentMixture:
        """The predictive of shift + scale * y."""
        shift, scale = as_units(shift, scale, self.mean)
        likelihood, offset, factor, params = self.likelihood.rescaled(shift, scale, self.params or {})
        cov = self.cov
        if cov is not None:
            cov = cov * factor**2 if cov.ndim == self.means.ndim else cov * factor.unsqueeze(-1) * factor
        root = None if self.root is None else self.root * factor.unsqueeze(-1)
        return replace(self, likelihood=likelihood, means=offset + factor * self.means, cov=cov, root=root, params=params)

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

    def followed_by(self, others: Sequence[LatentMixture]) -> LatentMixture:
        """One predictive of all inputs."""
        cov = None if self.cov is None else torch.cat([self.cov, *(p.cov for p in others if p.cov is not None)], 1)
        root = None if self.root is None else torch.cat([self.root, *(p.root for p in others if p.root is not None)], 1)
        return replace(self, means=torch.cat([self.means, *(p.means for p in others)], 1), cov=cov, root=root)
