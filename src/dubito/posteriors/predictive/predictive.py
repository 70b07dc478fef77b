"""What every predictive answers, and quantiles of mixtures as roots of their cdf."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from dubito.model.likelihoods import Likelihood, Uncertainty
from dubito.tensors.checks import positive

if TYPE_CHECKING:
    from dubito.posteriors.predictive.latent_mixture import LatentMixture

CACHE = 2**16  # numbers that quantiles work on at a time, so that they stay in the cache


def normal_mixture_quantile(mean: Tensor, scale: Tensor, weights: Tensor, level: float) -> Tensor:
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


def within_support(distribution: Distribution, y: Tensor) -> Tensor:
    """Within the bounds of what a distribution gives, such as 0 of a duration: its cdf is NaN or an error outside."""
    try:
        support = distribution.support
    except NotImplementedError:  # of a distribution of one's own
        return y
    low, high = (getattr(support, name, None) for name in ("lower_bound", "upper_bound"))
    return y if low is None and high is None else y.clamp(low, high)


def takes_counts(distribution: Distribution) -> bool:
    """Whether a distribution gives whole numbers."""
    try:
        return distribution.support is not None and distribution.support.is_discrete
    except NotImplementedError:  # of a distribution of one's own
        return False


Units = Tensor | np.ndarray | Sequence[float] | float
FLOOR = math.log(torch.finfo(torch.float64).tiny)  # the least log probability


class Predictive(ABC):
    r"""The predictive distribution of a target y at each of B inputs x, given the data D:

    .. math:: p(y \mid x, D) = \int p\big(y \mid f_\theta(x)\big)\, p(\theta \mid D)\, d\theta

    The likelihood :math:`p(y \mid f)` holds the noise of observations, which is always included. From the predictive follow

    * the mean :math:`E[y \mid x, D]`, which for classes are their probabilities;
    * the log score :math:`\log p(y \mid x, D)` of an observed y (`log_prob`), of which the mean over new data is what to maximize;
    * the uncertainty, which is total = aleatoric + epistemic:

    .. math:: \underbrace{\mathrm{Var}[y]}_{\text{total}} = \underbrace{E_\theta\, \mathrm{Var}[y \mid \theta]}_{\text{aleatoric}}
              + \underbrace{\mathrm{Var}_\theta\, E[y \mid \theta]}_{\text{epistemic}}, \qquad
              \underbrace{H[y]}_{\text{total}} = \underbrace{E_\theta\, H[y \mid \theta]}_{\text{aleatoric}}
              + \underbrace{I[y; \theta]}_{\text{epistemic}}

    with variances for numbers and entropies in nats for classes, all given x and D.

    What the split can do: the epistemic part is what more data at x would remove, if the model is right. It is large far from the
    data, ranks inputs that are worth a label, and is zero where all plausible weights agree. What it cannot do: it is a property of the
    model, not of the world. If no weights fit the data, or the approximate posterior is too narrow, noise and ignorance are mixed up
    between the two parts; with few data the aleatoric part is an estimate as uncertain as any other. For classes the two parts often
    rise and fall together, since both are largest where probabilities are far from 0 and 1: on images that people label differently,
    both parts follow the disagreement of people about equally well. Use the total to say how sure a prediction is.
    """

    likelihood: Likelihood
    means: Tensor  # [S, B, *D, C]: of the network's output, one for each draw or component

    @property
    def mixture(self) -> LatentMixture | None:
        """The predictive, if it is a mixture over the network's outputs whose components can be read; else None."""
        return None

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """E[y | x, D]: class probabilities [B, *D, C], or the regression mean [B, *D, C]."""

    @property
    def complement(self) -> Tensor:
        """P(y = 0 | x, D) of labels, [B, *D, C]: 1 - mean, with the digits that this loses near 1 where they are known."""
        return 1 - self.mean

    @property
    def log_forecasts(self) -> Tensor:
        """Log probabilities of classes, or the log odds of labels, [B, *D, C] in float64."""
        probs = self.mean.double()
        return probs.log().clamp_min(FLOOR) if self.likelihood.indexed else torch.logit(probs, eps=1e-12)

    @property
    @abstractmethod
    def uncertainty(self) -> Uncertainty:
        """Total = aleatoric + epistemic, as defined above: entropies [B, *D] for classes, variances [B, *D, C] for numbers."""

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

    def task(self, name: str) -> Predictive:
        """The predictive of one task of a `MultiTask` likelihood."""
        raise ValueError(f"only a MultiTask predictive has tasks; this one is {type(self.likelihood).__name__}")

    @abstractmethod
    def to(self, device: torch.device | str) -> Predictive:
        """The same predictive on another device."""

    def rescaled(self, shift: Units, scale: Units) -> Predictive:
        """The predictive of shift + scale * y, each [C] or one number: back to the units that the targets of a regression were
        standardized from."""
        raise ValueError(f"a {type(self).__name__} predictive cannot be rescaled to other units")

    def followed_by(self, others: Sequence[Any]) -> Predictive:
        """This predictive and those of further batches, from the same draws, as one of all their inputs."""
        raise ValueError(f"{type(self).__name__} predictives of several batches cannot be joined: predict the batches one by one")


def as_units(shift: Units, scale: Units, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Both as [C], in the precision in which they come as tensors, or else in that of the mean."""

    def _each(value: Units) -> Tensor:
        found = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=mean.dtype)
        found = found.to(mean.device)
        if found.numel() not in (1, mean.shape[-1]):
            raise ValueError(
                f"there are {mean.shape[-1]} targets, whose shift and scale are one number or one for each; got {value}"
            )
        return found.reshape(-1).expand(mean.shape[-1])

    shift, scale = _each(shift), _each(scale)
    positive(scale=scale)
    return shift, scale
