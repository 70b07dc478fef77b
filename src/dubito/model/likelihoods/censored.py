"""Times and other numbers of which sometimes only an interval is known: survival, detection limits, rounded values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LogNormal, Normal, Weibull

from dubito.model.likelihoods.likelihood import Likelihood
from dubito.model.likelihoods.noise import Scaled
from dubito.model.likelihoods.special import log_ndtr
from dubito.tensors.checks import require
from dubito.tensors.tree import Params


class _Intervals(Independent):
    """Independent outputs whose log probability takes intervals, [..., 2 C], as well as numbers, [..., C]."""

    def __init__(self, outcome: Distribution, score: Callable[[Tensor], Tensor]):
        super().__init__(outcome, 1, validate_args=False)
        self.score = score

    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities of numbers, and log probabilities of intervals, added up over the outputs."""
        return self.score(value)


@dataclass(frozen=True)
class Censored(Scaled):
    """Numbers of which sometimes only an interval is known; see `CensoredGaussian` for the layout of targets."""

    intervals: ClassVar[bool] = True
    logarithm: ClassVar[bool] = False  # whether f is about the logarithm of the target

    @staticmethod
    @abstractmethod
    def log_density(z: Tensor) -> Tensor:
        """The log density of the standardized noise."""

    @staticmethod
    @abstractmethod
    def log_above(z: Tensor) -> Tensor:
        """ln P(Z > z)."""

    @staticmethod
    @abstractmethod
    def log_below(z: Tensor) -> Tensor:
        """ln P(Z < z)."""

    @staticmethod
    @abstractmethod
    def log_inside(low: Tensor, high: Tensor) -> Tensor:
        """ln P(low < Z < high)."""

    @abstractmethod
    def outcome(self, f: Tensor, scale: Tensor) -> Distribution:
        """The distribution of the number itself, batch [..., C]."""

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return self._with(f, self.noise(f, params))

    def _with(self, f: Tensor, scale: Tensor) -> Distribution:
        return _Intervals(self.outcome(f, scale.expand_as(f)), lambda y: self.score(f, y, scale))

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """Lower ends, then upper ends, [..., 2 C]; numbers [..., C] are both."""
        ends = (y, y)
        if y.ndim == f.ndim and y.shape[self.dim] == 2 * f.shape[-1]:
            ends = y.chunk(2, self.dim)
        return torch.cat([super(Censored, self).target(end, f) for end in ends], -1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Lower ends must not be above upper ends, numbers must be finite, and times positive."""
        lower, upper = self.target(y, f).chunk(2, -1)
        exact = (lower == upper).logical_and(~lower.isinf())
        if not bool((exact | (lower < upper)).all()):
            raise ValueError("a target is an interval (lower, upper), whose ends must not be NaN or swapped")
        fine = not self.logarithm or bool((lower >= 0).all() and (upper > 0).all())
        require(fine, f"the targets of {type(self).__name__} are positive; a lower end may be 0")

    def numbers(self, y: Tensor) -> Tensor:
        """The targets, if they are known exactly."""
        lower, upper = y.chunk(2, -1)
        require(bool((lower == upper).all()), "some targets are intervals, which this compares with no number: use nll")
        return lower

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:log_scale`, if the noise is learned: the log of the spread of the finite ends, or of their logarithms."""
        if y is not None:
            y = y[y.isfinite() & (y > 0)].log() if self.logarithm else y[y.isfinite()]
        return super().parameters(y)

    def score(self, f: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        """Log densities of what is exact and log probabilities of intervals, [...]."""
        lower, upper = y.chunk(2, -1) if y.shape[-1] == 2 * f.shape[-1] else (y, y)
        exact, open_below, open_above = lower == upper, self._is_least(lower), upper == torch.inf
        # only finite numbers go into any formula: what is not chosen must have finite gradients, too
        below = self._standardized(f, torch.where(open_below, 1.0, lower), scale)
        above = self._standardized(f, torch.where(open_above | self._is_least(upper), 1.0, upper), scale)
        inside = ~(exact | open_below | open_above)
        density = self.log_density(below) - scale.log() - (torch.where(open_below, 1.0, lower).log() if self.logarithm else 0.0)
        mass = self.log_inside(below, torch.where(inside, above, below + 1))
        mass = torch.where(open_below, self.log_below(above), torch.where(open_above, self.log_above(below), mass))
        mass = torch.where(open_below & open_above, 0.0, mass)
        density = torch.where(open_below, -torch.inf, density)  # a positive number is never 0
        return torch.where(exact, density, mass).sum(-1)

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """f + offset, but for positive numbers, which cannot move."""
        return None if self.logarithm else f + offset

    def _is_least(self, y: Tensor) -> Tensor:
        return y <= 0 if self.logarithm else y == -torch.inf

    def _standardized(self, f: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return ((y.log() if self.logarithm else y) - f) / scale

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log density of a target that is known, and the log probability of an interval."""
        return self.score(f, y, self.noise(f, params))

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """1 / scale^2, that of targets which are known exactly."""
        return self.noise(f, params).expand_as(f) ** -2

    def seen_share(self, f: Tensor, y: Tensor, params: Params) -> Tensor | None:
        """The curvature of the log probability of the intervals, which is not negative, times scale^2; 1 of what is exact."""
        lower, upper = y.chunk(2, -1)
        exact = lower == upper
        if bool(exact.all()):
            return None
        leaf, scale = f.detach().requires_grad_(), self.noise(f, params).detach()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.score(leaf, y, scale).sum(), leaf, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), leaf)
        return torch.where(exact, 1.0, (-curvature * scale**2).clamp_min(0))


@dataclass(frozen=True)
class CensoredGaussian(Censored):
    r"""y ~ N(f, scale^2), of which sometimes only an interval is known, as below a detection limit.

    A target is a pair (lower, upper), so that targets are [B, 2]. Its ends are equal if it is known exactly; an upper end of inf says
    that it lies above `lower` (right-censored), a lower end of -inf that it lies below `upper` (left-censored). With C outputs targets
    are [B, 2 C], all lower ends first. Targets [B] or [B, C] are exact.

    .. math:: p(\mathrm{lower}, \mathrm{upper} \mid f) = \Phi\Big(\frac{\mathrm{upper} - f}{s}\Big)
              - \Phi\Big(\frac{\mathrm{lower} - f}{s}\Big), \quad \text{or the density, if both are equal}

    The scale is known if given, else learned as `likelihood:log_scale`. Predictions are of y itself: mean, quantiles and draws.

    >>> y = torch.tensor([[0.0, 0.0], [0.0, torch.inf]])
    >>> CensoredGaussian(1.0).log_prob(torch.zeros(2, 1), y, {}).exp()
    tensor([0.3989, 0.5000])
    """

    @staticmethod
    def log_density(z: Tensor) -> Tensor:
        """Of a standard normal number."""
        return -0.5 * (z * z + math.log(2 * math.pi))

    @staticmethod
    def log_above(z: Tensor) -> Tensor:
        """ln Phi(-z)."""
        return log_ndtr(-z)

    @staticmethod
    def log_below(z: Tensor) -> Tensor:
        """ln Phi(z)."""
        return log_ndtr(z)

    @staticmethod
    def log_inside(low: Tensor, high: Tensor) -> Tensor:
        """ln (Phi(high) - Phi(low)), on the side of 0 where these are small."""
        low, high = torch.where(low > 0, -high, low), torch.where(low > 0, -low, high)
        most = log_ndtr(high)
        return most + log_one_minus_exp(log_ndtr(low) - most)

    def outcome(self, f: Tensor, scale: Tensor) -> Distribution:
        """N(f, scale^2)."""
        return Normal(f, scale, validate_args=False)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """f itself."""
        return f

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """scale^2."""
        return self.noise(f_mean, params).square().expand_as(f_mean)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """The spread of f adds to the noise; closed for one output, or independent ones."""
        if f_cov.ndim > f_mean.ndim and f_mean.shape[-1] > 1:
            return None
        variance = f_cov if f_cov.ndim == f_mean.ndim else f_cov.diagonal(dim1=-2, dim2=-1)
        return self._with(f_mean, (variance + self.noise(f_mean, params) ** 2).sqrt())


@dataclass(frozen=True)
class CensoredLogNormal(CensoredGaussian):
    r"""ln y ~ N(f, scale^2): positive numbers such as times, of which sometimes only an interval is known.

    Targets are as in `CensoredGaussian`, with 0 for the lower end of what is left-censored. The mean is
    :math:`e^{f + s^2 / 2}`, and the median :math:`e^f`.

    >>> y = torch.tensor([[1.0, torch.inf]])
    >>> CensoredLogNormal(1.0).log_prob(torch.zeros(1, 1), y, {}).exp()
    tensor([0.5000])
    """

    logarithm: ClassVar[bool] = True

    def outcome(self, f: Tensor, scale: Tensor) -> Distribution:
        """The exponential of N(f, scale^2)."""
        return LogNormal(f, scale, validate_args=False)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """e^(f + scale^2 / 2)."""
        return (f + 0.5 * self.noise(f, params) ** 2).exp()

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """None: f is not the mean."""
        return None

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The logarithm of the unit is added to f."""
        return logarithmic_units(self, shift, scale, params)


@dataclass(frozen=True)
class CensoredWeibull(Censored):
    r"""Times with a Weibull distribution: an accelerated failure time model, of which sometimes only an interval is known.

    .. math:: P(y > t \mid f) = \exp\big(-(t e^{-f})^{1 / s}\big), \qquad \text{so that } \ln y = f + s \ln \epsilon, \quad
              \epsilon \sim \mathrm{Exp}(1)

    `scale` is the s of the formula, 1 / shape: known if given, else learned as `likelihood:log_scale`. With s < 1 the hazard rises
    in time. The mean is :math:`e^f \Gamma(1 + s)`. Targets are as in `CensoredGaussian`, with 0 for the lower end of what is
    left-censored.

    >>> y = torch.tensor([[1.0, torch.inf]])
    >>> CensoredWeibull(1.0).log_prob(torch.zeros(1, 1), y, {})                    # e^-1 live longer than the scale of time
    tensor([-1.])
    """

    logarithm: ClassVar[bool] = True

    @staticmethod
    def log_density(z: Tensor) -> Tensor:
        """Of the logarithm of an exponential number."""
        return z - z.exp()

    @staticmethod
    def log_above(z: Tensor) -> Tensor:
        """-e^z."""
        return -z.exp()

    @staticmethod
    def log_below(z: Tensor) -> Tensor:
        """ln (1 - exp(-e^z))."""
        return log_one_minus_exp(-z.exp())

    @staticmethod
    def log_inside(low: Tensor, high: Tensor) -> Tensor:
        """ln (exp(-e^low) - exp(-e^high))."""
        return log_one_minus_exp(low.exp() - high.exp()) - low.exp()

    def outcome(self, f: Tensor, scale: Tensor) -> Distribution:
        """A Weibull distribution of shape 1 / scale."""
        return Weibull(f.exp(), 1 / scale, validate_args=False)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """e^f Gamma(1 + scale)."""
        return (f + torch.lgamma(1 + self.noise(f, params))).exp()

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The logarithm of the unit is added to f."""
        return logarithmic_units(self, shift, scale, params)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """ln (1 - e^x) for x < 0."""
    return torch.log(-torch.expm1(x.clamp_max(-torch.finfo(x.dtype).tiny)))


def logarithmic_units(
    likelihood: Censored, shift: Tensor, scale: Tensor, params: Params
) -> tuple[Likelihood, Tensor, Tensor, Params]:
    """What `rescaled` gives where f is about the logarithm of the target."""
    name = type(likelihood).__name__
    require(bool((shift == 0).all()), f"the targets of {name} are positive: divide them by a number, but do not shift them")
    return likelihood, scale.log(), torch.ones_like(scale), params
