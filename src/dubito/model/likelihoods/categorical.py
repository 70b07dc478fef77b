"""One of C classes, with or without noise on the logits, and labels that are each on or off."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent

from dubito.model.likelihoods.likelihood import (
    NOISE,
    DiagonalFisher,
    Likelihood,
    Uncertainty,
    average,
    entropy,
    halves,
    log_average,
    nodes,
    positive,
)
from dubito.tensors.checks import require
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Tempered(Likelihood):
    """Logits with a noise level: f / scale^2, where the scale is known, or learned as `likelihood:log_scale` if it is None."""

    scale: float | None = 1.0

    def __post_init__(self):
        positive(1.0 if self.scale is None else self.scale)

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:log_scale`, 0, if the noise level is learned."""
        return {NOISE: torch.zeros(1)} if self.scale is None else {}

    def logits(self, f: Tensor, params: Params) -> Tensor:
        """f / scale^2."""
        if self.scale is None:
            return f * (-2 * params[NOISE]).exp()
        return f if self.scale == 1.0 else f / self.scale**2

    def factor(self, f: Tensor, params: Params) -> Tensor:
        """1 / scale^2 for every output, the slope of the logits."""
        return self.logits(torch.ones_like(f), params)


@dataclass(frozen=True)
class Classes(Likelihood):
    """What likelihoods over classes share: integer targets without a channel axis, and entropies."""

    discrete: ClassVar[bool] = True
    indexed: ClassVar[bool] = True

    ignore_index: int = field(default=-100, kw_only=True)

    @abstractmethod
    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        """Log class probabilities [..., C]."""

    def logits(self, f: Tensor, params: Params) -> Tensor:
        """Numbers whose softmax are the class probabilities, [..., C]."""
        return self.log_probs(f, params)

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return CategoricalDistribution(logits=self.log_probs(f, params), validate_args=False)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """The class probabilities."""
        return self.log_probs(f, params).exp()

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """Integer indices in the shape of f without its last axis."""
        if y.ndim == f.ndim and y.shape[-1] == 1 and f.ndim == 2:
            y = y.squeeze(-1)
        if y.is_floating_point():
            gone = int(y.isnan().sum())
            require(not gone, f"{gone} class targets are missing (NaN): leave those rows out, or number them {self.ignore_index}")
            raise ValueError("class targets are integer indices; got floating point: use y.long(), or a regression likelihood")
        if y.shape != f.shape[:-1]:
            raise ValueError(
                f"class targets of shape {list(y.shape)} do not fit the network's output {list(f.shape)} (channel axis last): "
                f"expected {list(f.shape[:-1])}; if the classes stand on another axis, set `dim`"
            )
        return y.long()

    def check(self, f: Tensor, y: Tensor) -> None:
        """Indices must be from 0 to C - 1, or `ignore_index`."""
        y, classes = self.target(y, f), self.width(f)
        seen = y[y != self.ignore_index]
        if seen.numel() and (int(seen.min()) < 0 or int(seen.max()) >= classes):
            raise ValueError(
                f"the targets go from {int(seen.min())} to {int(seen.max())}, but the network has {classes} classes (0 to "
                f"{classes - 1}); an index to be skipped is given as ignore_index"
                + ("; one output for yes or no goes with Bernoulli()" if classes == 1 else "")
            )

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """log p_y, and 0 where y is `ignore_index`."""
        log_probs = self.log_probs(f, params)
        keep = y != self.ignore_index
        index = torch.where(keep, y, 0).unsqueeze(-1)
        return torch.where(keep, log_probs.gather(-1, index.expand(*log_probs.shape[:-1], 1)).squeeze(-1), 0.0)

    @property
    def plain(self) -> Likelihood:
        """`Categorical` with noise level 1."""
        return Categorical(dim=self.dim, ignore_index=self.ignore_index)

    def observed(self, y: Tensor) -> Tensor | None:
        """Where y is not `ignore_index`."""
        keep = y != self.ignore_index
        return None if bool(keep.all()) else keep

    def log_forecasts(self, f: Tensor, weights: Tensor, params: Params) -> Tensor:
        """The logarithm of the mean probabilities."""
        return log_average(self.log_probs(f, params), weights)

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """H(mean p) (total) and mean H(p) (aleatoric) over the draws; their difference is the mutual information."""
        probs = self.mean(f, params)
        return Uncertainty.of(entropy(average(probs, weights)), average(entropy(probs), weights))


@dataclass(frozen=True)
class Categorical(Tempered, Classes):
    r"""y ~ softmax(f): one of C classes. `ignore_index` marks targets to be skipped (unlabelled pixels, padding).

    `scale=None` learns a noise level: the logits are divided by scale^2, as when several tasks are weighed (see `MultiTask`).

    >>> Categorical().mean(torch.zeros(1, 4), {})
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        """log softmax(f / scale^2)."""
        return F.log_softmax(self.logits(f, params), -1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """(diag(p) - p p^T) / scale^4."""
        probs = self.mean(f, params)
        slope = self.factor(f, params)
        outer = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
        return outer * slope.unsqueeze(-1) * slope.unsqueeze(-2)

    def random_slope(self, f: Tensor, params: Params, generator: torch.Generator | None = None) -> Tensor:
        """onehot(y) - p for y ~ p, over scale^2."""
        probs = self.mean(f.detach(), params)
        flat = probs.reshape(-1, f.shape[-1])
        if generator is not None and generator.device != flat.device:
            flat = flat.to(generator.device)
        drawn = torch.multinomial(flat, 1, generator=generator).reshape(*f.shape[:-1], 1).to(f.device)
        slope = (-probs).scatter_add(-1, drawn, torch.ones_like(probs[..., :1]))
        return slope if self.scale == 1.0 else slope * self.factor(f, params)

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """p (1 - p) / scale^4."""
        probs = self.mean(f, params)
        return probs * (1 - probs) * self.factor(f, params) ** 2

    def fisher_product(self, f: Tensor, v: Tensor, params: Params) -> Tensor:
        """p (v - p^T v), over scale^4."""
        probs, slope = self.mean(f, params), self.factor(f, params)
        v = slope * v
        return slope * probs * (v - (probs * v).sum(-1, keepdim=True))

    def fisher_sum(self, f: Tensor, params: Params) -> Tensor:
        """sum_n diag(p_n) - p_n p_n^T, over scale^4."""
        probs = self.mean(f, params).reshape(-1, f.shape[-1])
        slope = self.factor(probs[:1], params)
        return (torch.diag(probs.sum(0)) - probs.mT @ probs) * slope * slope.mT

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""The Cholesky factor of diag(p) - p p^T in closed form, which has one column less than there are classes.

        With the tails :math:`t_k = \sum_{j \ge k} p_j`, column k is :math:`\sqrt{p_k t_{k+1} / t_k}` times 1 at k and
        :math:`-p_j / t_{k+1}` at every later j.
        """
        probs = self.mean(f, params)
        tails = probs.flip(-1).cumsum(-1).flip(-1)
        here, later = tails[..., :-1], tails[..., 1:].clamp_min(torch.finfo(f.dtype).tiny)
        size = (probs[..., :-1] * later / here.clamp_min(torch.finfo(f.dtype).tiny)).sqrt()  # [..., K]
        share = (probs.unsqueeze(-2) / later.unsqueeze(-1)).triu(1)  # [..., K, C]
        columns = size.unsqueeze(-1) * (torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)[:-1] - share)
        return (columns * self.factor(f, params).unsqueeze(-2)).movedim(-2, 0)

    def linked(self, f_mean: Tensor, f_cov: Tensor, params: Params, link: str) -> Tensor:
        r"""Three closed forms. Probit: :math:`\mathrm{softmax}(m_c / \sqrt{1 + \pi V_{cc} / 8})`. Pairwise (Lu et al. 2020):
        :math:`p_c \propto 1 / \sum_d \exp((m_d - m_c) / \sqrt{1 + \pi \mathrm{Var}(f_c - f_d) / 8})`. Bridge (Hobbhahn et al.
        2022): the mean of the Dirichlet with :math:`\alpha_c = \frac{1}{V_{cc}} (1 - \frac{2}{C} + \frac{e^{m_c}}{C^2} \sum_d
        e^{-m_d})`, after the logits are made to sum to zero."""
        mean, classes = self.logits(f_mean, params), f_mean.shape[-1]
        slope = self.factor(f_mean, params)
        if link == "probit":  # which needs no matrices
            variance = f_cov.diagonal(dim1=-2, dim2=-1) if f_cov.ndim > f_mean.ndim else f_cov
            return mean / (1 + math.pi / 8 * variance * slope**2).sqrt()
        cov = (f_cov if f_cov.ndim > f_mean.ndim else torch.diag_embed(f_cov)) * slope.unsqueeze(-1) * slope.unsqueeze(-2)
        variance = cov.diagonal(dim1=-2, dim2=-1)
        if link == "pairwise":
            apart = variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2 * cov  # variances of f_k - f_j
            gaps = (mean.unsqueeze(-2) - mean.unsqueeze(-1)) / (1 + math.pi / 8 * apart.clamp_min(0)).sqrt()  # [k, j]: f_j - f_k
            return -gaps.logsumexp(-1)
        ones = cov.sum(-1)  # covariance with the sum of the logits
        total = ones.sum(-1, keepdim=True)
        free = total > 100 * torch.finfo(cov.dtype).eps * variance.sum(-1, keepdim=True)  # else the sum is known already
        share = torch.where(free, ones / torch.where(free, total, 1.0), 1 / classes)
        mean = mean - share * mean.sum(-1, keepdim=True)
        variance = (variance - torch.where(free, ones * share, 0.0)).clamp_min(1e-12)
        large = (
            mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(classes)
        )  # all in logs: e^m may be more than a float holds
        constant = math.log(1 - 2 / classes) if classes > 2 else -math.inf
        return torch.logaddexp(large, large.new_tensor(constant)) - variance.log()


@dataclass(frozen=True)
class HeteroscedasticCategorical(Classes):
    r"""Classes with noise on the logits that depends on x (Kendall & Gal 2017): f = [logits m, log variances s].

    .. math:: p(y = c) = E_{\epsilon \sim N(0, I)} \mathrm{softmax}(m + e^{s/2} \epsilon)_c

    The expectation is over `samples` deterministic nodes with matched moments: a log of a mean (not a mean of logs), free of
    sampling noise, so that it is the same function of f every time.
    """

    samples: int = field(default=64, kw_only=True)

    def width(self, f: Tensor) -> int:
        """Half of the outputs are logits."""
        return f.shape[-1] // 2

    def _noisy(self, f: Tensor) -> Tensor:
        """The logits at every node, [C, n, ...]. Classes come first: over a last axis of ten, softmax takes several times as long."""
        parts = halves(f, type(self).__name__, "a logit and a log variance for each class")
        logits, log_variance = (part.movedim(-1, 0).contiguous().unsqueeze(1) for part in parts)  # [C, 1, ...]
        points = nodes(self.samples, f[..., : len(logits)]).mT.reshape(len(logits), self.samples, *[1] * (f.ndim - 1))
        return logits + (0.5 * log_variance).exp() * points

    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        """The log of the mean softmax over the nodes."""
        return (F.log_softmax(self._noisy(f), 0).logsumexp(1) - math.log(self.samples)).movedim(0, -1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """The mean softmax over the nodes."""
        return F.softmax(self._noisy(f), 0).mean(1).movedim(0, -1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """sum_c p_c grad log p_c grad log p_c^T."""
        root = self.fisher_root(f, params)
        return torch.einsum("k...c,k...d->...cd", root, root)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""One column for each class: :math:`\sqrt{p_c} \nabla \log p_c`."""
        leaf = f.detach().requires_grad_()
        with torch.enable_grad():
            log_probs = self.log_probs(leaf, params)
            slopes = [torch.autograd.grad(one.sum(), leaf, retain_graph=True)[0] for one in log_probs.unbind(-1)]
        return torch.stack(slopes) * (0.5 * log_probs.detach()).exp().movedim(-1, 0).unsqueeze(-1)


@dataclass(frozen=True)
class Bernoulli(Tempered, DiagonalFisher):
    r"""Each output is a label of its own: y_c ~ Bernoulli(sigmoid f_c). One output: binary; several: multi-label.

    Uncertainty is the sum of the labels' entropies. `scale=None` learns a noise level as in `Categorical`.
    """

    discrete: ClassVar[bool] = True
    separate: ClassVar[bool] = True

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(BernoulliDistribution(logits=self.logits(f, params), validate_args=False), 1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets must be 0 or 1."""
        y = self.target(y, f)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("the targets of Bernoulli are 0 or 1; for classes numbered 0 to C - 1 use Categorical")

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """sum_c y_c log sigmoid(f_c) + (1 - y_c) log sigmoid(-f_c)."""
        return self.label_scores(f, y, params).sum(-1)

    def label_scores(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log probability of each label on its own, [..., C]."""
        logits = self.logits(f, params)
        return -F.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none")

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """P(y = 1 | f) = sigmoid(f)."""
        return torch.sigmoid(self.logits(f, params))

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """p (1 - p) / scale^4."""
        probs = self.mean(f, params)
        return probs * (1 - probs) * self.factor(f, params) ** 2

    def linked(self, f_mean: Tensor, f_cov: Tensor, params: Params, link: str) -> Tensor:
        """Probit: f / sqrt(1 + pi Var(f) / 8)."""
        if link != "probit":
            return super().linked(f_mean, f_cov, params, link)
        slope = self.factor(f_mean, params)
        variance = slope**2 * (f_cov if f_cov.ndim == f_mean.ndim else f_cov.diagonal(dim1=-2, dim2=-1))
        return self.logits(f_mean, params) / (1 + math.pi / 8 * variance).sqrt()

    @property
    def plain(self) -> Likelihood:
        """With noise level 1."""
        return Bernoulli(dim=self.dim)

    def off(self, f: Tensor, params: Params) -> Tensor:
        """P(y = 0 | f), with the digits that 1 - `mean` loses where a label is nearly sure to be on."""
        return self.mean(-f, params)

    def log_forecasts(self, f: Tensor, weights: Tensor, params: Params) -> Tensor:
        """The log odds of the mean probabilities."""
        logits = self.logits(f, params).double()
        return log_average(F.logsigmoid(logits), weights) - log_average(F.logsigmoid(-logits), weights)

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """Entropies of the labels, summed: of the mean probabilities (total), and their mean over draws (aleatoric)."""
        probs = torch.stack([self.off(f, params), self.mean(f, params)], -1)
        return Uncertainty.of(entropy(average(probs, weights)).sum(-1), average(entropy(probs), weights).sum(-1))
