r"""Likelihoods p(y | f): what the network's output f means, and how its uncertainty splits.

A likelihood must give one thing, the distribution of y for given f. Everything else has a default by Monte Carlo or from the
distribution's moments, which closed forms override; tests hold every closed form against the default.

Axes: f is `[..., C]` with C last. `dim` says where C stands in what the network returns (`dim=1` for NCHW). Learned quantities
live in `params` under names that start with `likelihood:`; their leaves broadcast against f.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent
from torch.distributions import Normal as NormalDistribution

from dubito.tree import Params

PREFIX = "likelihood:"


@dataclass(frozen=True)
class Uncertainty:
    """How uncertain a prediction is, and why: `total = aleatoric + epistemic`, each at least 0.

    Classification: entropies in nats, `[B, *D]`; epistemic is the mutual information of label and weights.
    Regression: variances, `[B, *D, C]`; total is the variance of the predictive, noise included.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @staticmethod
    def of(total: Tensor, aleatoric: Tensor) -> Uncertainty:
        """Rounding must not make ignorance negative, and the parts must still add up."""
        aleatoric = torch.minimum(aleatoric, total)
        return Uncertainty(total, aleatoric, total - aleatoric)


def entropy(probs: Tensor) -> Tensor:
    r"""Shannon entropy :math:`-\sum_c p_c \ln p_c` in nats over the last axis, with 0 ln 0 = 0.

    >>> entropy(torch.tensor([0.5, 0.5]))
    tensor(0.6931)
    """
    return torch.special.entr(probs).sum(-1).clamp_min(0)  # a mean of probabilities may round to more than 1


@lru_cache(maxsize=32)
def _unit_nodes(n: int, width: int) -> Tensor:
    if n < 2 or n % 2:
        raise ValueError(f"the nodes come in pairs: their number is even and at least 2; got {n}")
    # They outlive this call, so they are made in a thread of their own: torch.func transforms, inference mode and the like,
    # which may surround the first call, do not reach there.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_make_nodes, n, width).result()


def _make_nodes(n: int, width: int) -> Tensor:
    half = torch.quasirandom.SobolEngine(width, scramble=True, seed=0).draw(n // 2, dtype=torch.float64)
    nodes = math.sqrt(2) * torch.erfinv(2 * half.clamp(1e-9, 1 - 1e-9) - 1)
    nodes = torch.cat([nodes, -nodes])  # antithetic: all odd moments vanish
    if n // 2 > width:  # enough nodes to make the second moments exact as well
        factor = torch.linalg.cholesky(nodes.mT @ nodes / n)
        nodes = torch.linalg.solve_triangular(factor, nodes.mT, upper=False).mT
    return nodes


def nodes(n: int, like: Tensor) -> Tensor:
    """n equally weighted points [n, C] whose mean is 0 and covariance I (exactly, for n > 2 C): a deterministic N(0, I)."""
    return _unit_nodes(n, like.shape[-1]).to(like)


def align(params: Params, f: Tensor) -> Params:
    """Stacked leaves [S, K] made to broadcast against f [S, ..., C]; unstacked ones [K] already do."""
    return {
        name: leaf.reshape(leaf.shape[0], *[1] * (f.ndim - 2), leaf.shape[1]) if leaf.ndim == 2 else leaf
        for name, leaf in params.items()
    }


def own(params: Params) -> Params:
    """The leaves that belong to the likelihood."""
    return {name: leaf for name, leaf in params.items() if name.startswith(PREFIX)}


def average(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over the leading axis of draws."""
    return torch.tensordot(weights.to(values), values, dims=1)


def _tempered(f: Tensor, scale: float | None, params: Params) -> Tensor:
    """Logits at a noise level: f / scale^2, where None stands for a learned one."""
    if scale is None:
        return f * (-2 * params[PREFIX + "log_scale"]).exp()
    return f if scale == 1.0 else f / scale**2


def _positive(scale: float | tuple[float, ...] | None) -> None:
    for value in scale if isinstance(scale, tuple) else [1.0 if scale is None else scale]:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"a noise scale is a positive standard deviation; got {scale}")


@dataclass(frozen=True)
class Likelihood(ABC):
    """The base of all likelihoods; see the module's text for the axes."""

    dim: int = field(default=-1, kw_only=True)

    @property
    def discrete(self) -> bool:
        """Classes or labels rather than numbers: uncertainty is an entropy rather than a variance."""
        return False

    @abstractmethod
    def __call__(self, f: Tensor, params: Params) -> Distribution:
        """p(y | f), batch shape `[...]` and event shape as one target has it."""

    def parameters(self, y: Tensor | None = None) -> Params:
        """What is learned beside the weights, at its start; `y` (a batch of targets) may set the scale."""
        return {}

    def log_prior(self, params: Params) -> Tensor:
        """Log prior density of the learned parameters, in the coordinates in which they are learned."""
        return torch.zeros(())

    def width(self, f: Tensor) -> int:
        """How many numbers a target has at a position, or how many classes there are."""
        return f.shape[-1]

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """The targets in the layout of f, [..., C] (classes: [...]); a mismatch is an error, never a broadcast."""
        width = self.width(f)
        if y.ndim == f.ndim and self.dim != -1:
            y = y.movedim(self.dim, -1)
        if y.ndim == f.ndim - 1 and width == 1:
            y = y.unsqueeze(-1)
        if y.shape != (*f.shape[:-1], width):
            raise ValueError(
                f"targets of shape {list(y.shape)} do not fit {type(self).__name__}, which expects {[*f.shape[:-1], width]} "
                f"for this network (its output, with the channel axis last, is {list(f.shape)})"
            )
        return y.to(f.dtype)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise early, in words, for targets that can only be a mistake. Called once, on the first batch."""
        if not torch.isfinite(self.target(y, f)).all():
            raise ValueError("the targets hold NaN or infinite values: remove those rows, or fill them in")

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """log p(y | f) for every position, [...]; y is in the layout that `target` returns."""
        return self(f, params).log_prob(y)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """E[y | f], [..., C]; for classes their probabilities."""
        return self(f, params).mean

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        r"""Expected Hessian of -log p(y | f) in f, :math:`E_y[\nabla \log p \, \nabla \log p^T]`, [..., C, C].

        Positive semi-definite by construction, unlike the Hessian at the observed y. This default is a Monte Carlo estimate.
        """
        copies = f.detach().expand(draws, *f.shape).clone().requires_grad_()  # one for each draw: one backward pass for all
        with torch.enable_grad(), torch.random.fork_rng(devices=[f.device] if f.is_cuda else []):
            torch.manual_seed(0)
            y = self(f.detach(), params).sample((draws,))
            (g,) = torch.autograd.grad(self.log_prob(copies, y, params).sum(), copies)
        return torch.einsum("n...c,n...d->...cd", g, g) / draws

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """Draws of f [S, ..., C] with weights [S] to an `Uncertainty`: here the law of total variance."""
        distribution = self(f, params)
        aleatoric = average(distribution.variance, weights)
        mean = average(distribution.mean, weights)
        return Uncertainty.of(aleatoric + average((distribution.mean - mean) ** 2, weights), aleatoric)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """p(y) for f ~ N(f_mean, f_cov) where it has a closed form, else None; f_cov is [..., C] or [..., C, C]."""
        return None


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""y ~ N(f, scale^2): regression with noise that does not depend on x.

    `Gaussian(scale=0.1)`: known noise, one number or one for each output. `Gaussian()`: noise learned along with the weights as
    `likelihood:log_scale`; `outputs=3` learns one for each of three outputs. `prior`, a distribution over the precision
    :math:`1/\sigma^2` such as `torch.distributions.Gamma(0.5, 1.0)`, is optional; without it the prior is flat in log scale.

    >>> Gaussian(scale=0.1)(torch.zeros(1, 1), {}).stddev
    tensor([[0.1000]])
    """

    scale: float | tuple[float, ...] | None = None
    outputs: int = field(default=1, kw_only=True)
    prior: Distribution | None = field(default=None, kw_only=True)

    def __post_init__(self):
        if self.scale is None:
            return
        scales: tuple[float, ...] = tuple(torch.as_tensor(self.scale, dtype=torch.float64).flatten().tolist())
        _positive(scales)
        if self.prior is not None:
            raise ValueError("a prior on the noise is for learned noise: leave out `scale`, or the prior")
        object.__setattr__(self, "scale", scales if len(scales) > 1 else scales[0])

    def noise(self, f: Tensor, params: Params) -> Tensor:
        """The standard deviation of the noise, broadcasting against f."""
        if self.scale is None:
            return params[PREFIX + "log_scale"].exp()
        return torch.as_tensor(self.scale, dtype=f.dtype, device=f.device)

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(NormalDistribution(f, self.noise(f, params).expand_as(f), validate_args=False), 1)

    def parameters(self, y: Tensor | None = None) -> Params:
        if self.scale is not None:
            return {}
        spread = torch.ones(self.outputs)
        if y is not None and y.numel() > self.outputs:
            rows = y.movedim(self.dim, -1).reshape(-1, self.outputs) if self.outputs > 1 else y.reshape(-1, 1)
            spread = rows.float().std(0).clamp_min(1e-6)
        return {PREFIX + "log_scale": spread.log()}

    def log_prior(self, params: Params) -> Tensor:
        if self.scale is not None or self.prior is None:
            return torch.zeros(())
        log_precision = -2 * params[PREFIX + "log_scale"]
        # change of variables from the precision to log scale: |d precision / d log scale| = 2 precision
        return (self.prior.log_prob(log_precision.exp()) + log_precision + math.log(2)).sum()

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        width = self.outputs if self.scale is None else torch.as_tensor(self.scale).numel()
        if width not in (1, f.shape[-1]):
            raise ValueError(
                f"there are {width} noise scales, but the network has {f.shape[-1]} outputs: give one, or one for each"
            )
        return super().target(y, f)

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        scale = self.noise(f, params)
        z = (y - f) / scale
        constant = 0.5 * math.log(2 * math.pi)
        return (-0.5 * z * z - scale.log() - constant).sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        return f

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        return torch.diag_embed(self.noise(f, params).expand_as(f) ** -2)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        variance = f_cov if f_cov.ndim == f_mean.ndim else f_cov.diagonal(dim1=-2, dim2=-1)
        noise = self.noise(f_mean, params) ** 2
        if f_cov.ndim == f_mean.ndim or f_mean.shape[-1] == 1:
            return Independent(NormalDistribution(f_mean, (variance + noise).sqrt(), validate_args=False), 1)
        full = f_cov + torch.diag_embed(noise.expand_as(variance))
        return torch.distributions.MultivariateNormal(f_mean, full, validate_args=False)


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""y ~ N(m(x), exp s(x)): the network gives f = [means, log variances], twice as many outputs as targets.

    The loss is :math:`(y-m)^2 e^{-s}/2 + s/2`: data that cannot be explained is discounted, at a price. The Hessian at the observed
    y is indefinite; `fisher` is diag(e^{-s}, 1/2).
    """

    def _split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        if f.shape[-1] % 2:
            raise ValueError(
                f"HeteroscedasticGaussian needs a mean and a log variance for each target, an even number of outputs; "
                f"the network gives {f.shape[-1]}"
            )
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance

    def width(self, f: Tensor) -> int:
        return self._split(f)[0].shape[-1]

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        mean, log_variance = self._split(f)
        return Independent(NormalDistribution(mean, (0.5 * log_variance).exp(), validate_args=False), 1)

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        mean, log_variance = self._split(f)
        return -0.5 * ((y - mean) ** 2 * (-log_variance).exp() + log_variance + math.log(2 * math.pi)).sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        return self._split(f)[0]

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        mean, log_variance = self._split(f)
        return torch.diag_embed(torch.cat([(-log_variance).exp(), torch.full_like(mean, 0.5)], -1))


@dataclass(frozen=True)
class _Classes(Likelihood):
    """What the two likelihoods over classes share: integer targets without a channel axis, and entropies."""

    ignore_index: int = field(default=-100, kw_only=True)

    @property
    def discrete(self) -> bool:
        return True

    @abstractmethod
    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        """Log class probabilities [..., C]."""

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return CategoricalDistribution(logits=self.log_probs(f, params), validate_args=False)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        return self.log_probs(f, params).exp()

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        if y.ndim == f.ndim and y.shape[-1] == 1 and f.ndim == 2:
            y = y.squeeze(-1)
        if y.is_floating_point():
            raise ValueError("class targets are integer indices; got floating point: use y.long(), or a regression likelihood")
        if y.shape != f.shape[:-1]:
            raise ValueError(
                f"class targets of shape {list(y.shape)} do not fit the network's output {list(f.shape)} (channel axis last): "
                f"expected {list(f.shape[:-1])}; if the classes stand on another axis, set `dim`"
            )
        return y.long()

    def check(self, f: Tensor, y: Tensor) -> None:
        y, classes = self.target(y, f), self.width(f)
        seen = y[y != self.ignore_index]
        if seen.numel() and (int(seen.min()) < 0 or int(seen.max()) >= classes):
            raise ValueError(
                f"the targets go from {int(seen.min())} to {int(seen.max())}, but the network has {classes} classes (0 to "
                f"{classes - 1}); an index to be skipped is given as ignore_index"
            )

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        log_probs = self.log_probs(f, params)
        keep = y != self.ignore_index
        index = torch.where(keep, y, 0).unsqueeze(-1)
        return torch.where(keep, log_probs.gather(-1, index.expand(*log_probs.shape[:-1], 1)).squeeze(-1), 0.0)

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        probs = self.mean(f, params)
        return Uncertainty.of(entropy(average(probs, weights)), average(entropy(probs), weights))


@dataclass(frozen=True)
class Categorical(_Classes):
    r"""y ~ softmax(f): one of C classes. `ignore_index` marks targets to be skipped (unlabelled pixels, padding).

    `scale=None` learns a noise level: the logits are divided by scale^2, as when several tasks are weighed (see `MultiTask`).

    >>> Categorical().mean(torch.zeros(1, 4), {})
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    scale: float | None = 1.0

    def __post_init__(self):
        _positive(self.scale)

    def _logits(self, f: Tensor, params: Params) -> Tensor:
        return _tempered(f, self.scale, params)

    def parameters(self, y: Tensor | None = None) -> Params:
        return {PREFIX + "log_scale": torch.zeros(1)} if self.scale is None else {}

    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        return F.log_softmax(self._logits(f, params), -1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        probs = self.mean(f, params)
        slope = self._logits(torch.ones_like(f), params)
        outer = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
        return outer * slope.unsqueeze(-1) * slope.unsqueeze(-2)


@dataclass(frozen=True)
class HeteroscedasticCategorical(_Classes):
    r"""Classes with noise on the logits that depends on x (Kendall & Gal 2017): f = [logits m, log variances s].

    .. math:: p(y = c) = E_{\epsilon \sim N(0, I)} \mathrm{softmax}(m + e^{s/2} \epsilon)_c

    The expectation is over `samples` deterministic nodes with matched moments: a log of a mean (not a mean of logs), free of
    sampling noise, so that it is the same function of f every time.
    """

    samples: int = field(default=64, kw_only=True)

    def width(self, f: Tensor) -> int:
        return f.shape[-1] // 2

    def log_probs(self, f: Tensor, params: Params) -> Tensor:
        if f.shape[-1] % 2:
            raise ValueError(
                f"HeteroscedasticCategorical needs a logit and a log variance for each class, an even number of outputs; "
                f"the network gives {f.shape[-1]}"
            )
        logits, log_variance = f.chunk(2, -1)
        points = nodes(self.samples, logits).reshape(self.samples, *[1] * (f.ndim - 1), -1)
        noisy = logits + (0.5 * log_variance).exp() * points  # [n, ..., C]
        return F.log_softmax(noisy, -1).logsumexp(0) - math.log(self.samples)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""Each output is a label of its own: y_c ~ Bernoulli(sigmoid f_c). One output: binary; several: multi-label.

    Uncertainty is the sum of the labels' entropies. `scale=None` learns a noise level as in `Categorical`.
    """

    scale: float | None = 1.0

    @property
    def discrete(self) -> bool:
        return True

    def __post_init__(self):
        _positive(self.scale)

    def _logits(self, f: Tensor, params: Params) -> Tensor:
        return _tempered(f, self.scale, params)

    def parameters(self, y: Tensor | None = None) -> Params:
        return {PREFIX + "log_scale": torch.zeros(1)} if self.scale is None else {}

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(BernoulliDistribution(logits=self._logits(f, params), validate_args=False), 1)

    def check(self, f: Tensor, y: Tensor) -> None:
        y = self.target(y, f)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("the targets of Bernoulli are 0 or 1; for classes numbered 0 to C - 1 use Categorical")

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        logits = self._logits(f, params)
        return -F.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none").sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        return torch.sigmoid(self._logits(f, params))

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        probs = self.mean(f, params)
        return torch.diag_embed(probs * (1 - probs) * self._logits(torch.ones_like(f), params) ** 2)

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        def entropies(probs: Tensor) -> Tensor:
            return entropy(torch.stack([probs, 1 - probs], -1)).sum(-1)

        probs = self.mean(f, params)
        return Uncertainty.of(entropies(average(probs, weights)), average(entropies(probs), weights))


class _Joint(Distribution):
    """Independent tasks side by side: a sample is [..., T], the tasks' targets one after another."""

    def __init__(self, parts: list[Distribution]):
        self.parts = parts
        super().__init__(parts[0].batch_shape, torch.Size([sum(_columns(part) for part in parts)]), validate_args=False)

    @property
    def mean(self) -> Tensor:
        return torch.cat([part.probs if isinstance(part, CategoricalDistribution) else part.mean for part in self.parts], -1)

    def sample(self, sample_shape=torch.Size()) -> Tensor:
        draws = [(part, part.sample(sample_shape)) for part in self.parts]
        return torch.cat([d if part.event_shape else d.unsqueeze(-1) for part, d in draws], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        columns = value.split([_columns(part) for part in self.parts], -1)
        values = [v if part.event_shape else v.squeeze(-1).long() for part, v in zip(self.parts, columns, strict=True)]
        return torch.stack([part.log_prob(v) for part, v in zip(self.parts, values, strict=True)]).sum(0)


def _columns(part: Distribution) -> int:
    return part.event_shape[0] if part.event_shape else 1


@dataclass(frozen=True)
class MultiTask(Likelihood):
    r"""Several tasks from one network, weighed by their learned noise (Kendall, Gal & Cipolla 2018).

    `tasks` maps a name to a likelihood and the number of network outputs that belong to it, in order. The log likelihood is the
    sum over tasks; a task with a learned noise level (`Gaussian()`, `Categorical(scale=None)`) finds its own weight, 1/sigma^2, with
    log sigma as the price. Targets: a dict by task name, or one tensor [..., T] with the tasks' targets side by side. `p.task(name)`
    of a predictive is the ordinary predictive of one task.

    >>> tasks = MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(scale=None), 3)})
    >>> sorted(tasks.parameters())
    ['likelihood:depth.log_scale', 'likelihood:label.log_scale']
    """

    tasks: Mapping[str, tuple[Likelihood, int]] = field(default_factory=dict)

    def __post_init__(self):
        if not self.tasks:
            raise ValueError("MultiTask needs tasks: {name: (likelihood, number of outputs)}")

    def of(self, name: str, params: Params) -> Params:
        """The learned parameters of one task, under the names its own likelihood knows."""
        start = f"{PREFIX}{name}."
        return {PREFIX + key[len(start) :]: leaf for key, leaf in params.items() if key.startswith(start)}

    def split(self, f: Tensor) -> dict[str, Tensor]:
        widths = [width for _, width in self.tasks.values()]
        if sum(widths) != f.shape[-1]:
            raise ValueError(f"the tasks take {widths} outputs, {sum(widths)} in all, but the network gives {f.shape[-1]}")
        return dict(zip(self.tasks, f.split(widths, -1), strict=True))

    def _each(self, f: Tensor, params: Params):
        for name, part in self.split(f).items():
            yield name, self.tasks[name][0], part, self.of(name, params)

    def _targets(self, y: Tensor | dict[str, Tensor], f: Tensor) -> dict[str, Tensor]:
        if isinstance(y, dict):
            missing = [name for name in self.tasks if name not in y]
            if missing:
                raise ValueError(f"the targets lack the tasks {missing}; they have {list(y)}")
            return {
                name: self._channels_last(y[name], f) if task.dim == -1 else y[name] for name, (task, _) in self.tasks.items()
            }
        columns, y = self._columns(f), self._channels_last(y, f)
        if y.ndim != f.ndim or y.shape[-1] != sum(columns):
            raise ValueError(f"one tensor of targets for these tasks is [..., {sum(columns)}]; got {list(y.shape)}")
        return self._unstack(y, f)

    def _channels_last(self, y: Tensor, f: Tensor) -> Tensor:
        return y.movedim(self.dim, -1) if y.ndim == f.ndim else y

    def _columns(self, f: Tensor) -> list[int]:
        return [1 if isinstance(part, _Classes) else part.width(g) for _, part, g, _ in self._each(f, {})]

    def _unstack(self, y: Tensor, f: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(self.tasks, y.split(self._columns(f), -1), strict=True))
        return {n: v.squeeze(-1).long() if isinstance(self.tasks[n][0], _Classes) else v for n, v in parts.items()}

    def target(self, y: Tensor | dict[str, Tensor], f: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, columns = self._targets(y, f), []
        for name, likelihood, part, _ in self._each(f, {}):
            column = likelihood.target(y[name], part)
            columns.append((column.unsqueeze(-1) if isinstance(likelihood, _Classes) else column).to(f.dtype))
        return torch.cat(columns, -1)

    def check(self, f: Tensor, y: Tensor | dict[str, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = self._targets(y, f)
        for name, likelihood, part, _ in self._each(f, {}):
            likelihood.check(part, y[name])

    def parameters(self, y: Tensor | dict[str, Tensor] | None = None) -> Params:
        learned = {}
        for name, (likelihood, _) in self.tasks.items():
            inner = likelihood.parameters(y.get(name) if isinstance(y, dict) else None)
            learned |= {f"{PREFIX}{name}.{key[len(PREFIX) :]}": leaf for key, leaf in inner.items()}
        return learned

    def log_prior(self, params: Params) -> Tensor:
        parts = (part.log_prior(self.of(name, params)) for name, (part, _) in self.tasks.items())
        return sum(parts, torch.zeros(()))  # those without a prior are on the CPU, which a sum of scalars allows

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return _Joint([likelihood(part, inner) for _, likelihood, part, inner in self._each(f, params)])

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        y_parts = self._unstack(y, f)
        return torch.stack([part.log_prob(g, y_parts[n], inner) for n, part, g, inner in self._each(f, params)]).sum(0)

    def width(self, f: Tensor) -> int:
        return sum(self._columns(f))

    def mean(self, f: Tensor, params: Params) -> Tensor:
        return torch.cat([likelihood.mean(part, inner) for _, likelihood, part, inner in self._each(f, params)], -1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        full = f.new_zeros(*f.shape, f.shape[-1])
        start = 0
        for _, likelihood, part, inner in self._each(f, params):
            end = start + part.shape[-1]
            full[..., start:end, start:end] = likelihood.fisher(part, inner, draws=draws)
            start = end
        return full

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """The tasks' own, side by side [..., T]: entropies for classes, variances for numbers."""
        parts = [likelihood.uncertainty(part, weights, inner) for _, likelihood, part, inner in self._each(f, params)]
        as_columns = [[v if v.ndim == f.ndim - 1 else v.unsqueeze(-1) for v in (u.total, u.aleatoric)] for u in parts]
        return Uncertainty.of(*(torch.cat(column, -1) for column in zip(*as_columns, strict=True)))
