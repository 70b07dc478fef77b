"""Counts 0, 1, 2, ...: Poisson, and with more spread, negative binomial."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, Independent
from torch.distributions import NegativeBinomial as NegativeBinomialDistribution
from torch.distributions import Poisson as PoissonDistribution

from dubito.model.likelihoods.likelihood import NOISE, DiagonalFisher, Likelihood
from dubito.model.likelihoods.noise import Scaled
from dubito.model.likelihoods.special import incomplete_beta
from dubito.tensors.checks import require
from dubito.tensors.tree import Params

LARGEST = 40.0  # of log rates in predictions: the square of e^40 is a float still
SMALLEST = math.log(1e-4)  # of log scales: below it a negative binomial is a Poisson distribution to all digits that matter
TERMS = 500  # of the continued fraction, at most


class _Poisson(PoissonDistribution):
    """With the distribution function that torch's lacks."""

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value)."""
        count = value.floor().double()
        below = torch.special.gammaincc(count.clamp_min(0) + 1, self.rate.double())
        return torch.where(count < 0, 0.0, below).to(value.dtype)


class _NegativeBinomial(NegativeBinomialDistribution):
    """With the distribution function that torch's lacks."""

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), an incomplete beta function."""
        count, size, logits = value.floor().double(), self.total_count.double(), self.logits.double()
        upper = count.clamp_min(0) + 1
        size, upper, logits = torch.broadcast_tensors(size, upper, logits)
        terms = min(TERMS, int(15 + 3 * max(float(size.max()), float(upper.max())) ** 0.5))
        below = incomplete_beta(size, upper, F.logsigmoid(-logits), F.logsigmoid(logits), terms=terms)
        return torch.where(count < 0, 0.0, below.clamp(0, 1)).to(value.dtype)


@dataclass(frozen=True)
class Counts(DiagonalFisher):
    """Targets that are whole numbers from 0 on, with the mean e^f."""

    separate: ClassVar[bool] = True

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The sum of the log probabilities of the outputs."""
        return self.label_scores(f, y, params).sum(-1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets must be counts."""
        y, name = self.target(y, f), type(self).__name__
        whole = bool(((y >= 0) & (y == y.round()) & y.isfinite()).all())
        require(whole, f"the targets of {name} are counts, whole numbers from 0 on: round them, or use Gaussian or StudentT")

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """e^f, at most e^40."""
        return f.clamp_max(LARGEST).exp()

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """Counts have no other units."""
        raise ValueError(f"the targets of {type(self).__name__} are counts, which have no units: do not standardize them")

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """None: counts are whole numbers."""
        return None


@dataclass(frozen=True)
class Poisson(Counts):
    r"""y ~ Poisson(e^f): counts, such as events in an hour. f is the log rate, and the variance equals the mean.

    .. math:: \ln p(y \mid f) = y f - e^f - \ln y!

    >>> Poisson().mean(torch.tensor([[0.0]]), {})
    tensor([[1.]])
    """

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(_Poisson(self.mean(f, params), validate_args=False), 1)

    def label_scores(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """y f - e^f - log y!."""
        return y * f - f.exp() - torch.lgamma(y + 1)

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """e^f."""
        return self.mean(f, params)


@dataclass(frozen=True)
class NegativeBinomial(Counts, Scaled):
    r"""Counts with more spread than `Poisson`: y ~ Poisson(g e^f), where g has a Gamma distribution with mean 1.

    `scale` is the standard deviation of g: known if given, else learned as `likelihood:log_scale`, with a half-normal prior of scale 1;
    `outputs=3` learns one for each of three outputs. The mean is :math:`\mu = e^f`, and with :math:`r = 1 / \mathrm{scale}^2`

    .. math:: p(y \mid f) = \frac{\Gamma(y + r)}{\Gamma(r)\, y!} \Big(\frac{r}{r + \mu}\Big)^r \Big(\frac{\mu}{r + \mu}\Big)^y, \qquad
              \mathrm{Var}[y \mid f] = \mu + \mathrm{scale}^2 \mu^2

    >>> round(float(NegativeBinomial(0.5)(torch.tensor([[4.0]]).log(), {}).variance), 3)     # 4 + 4^2 / 4
    8.0
    """

    def _log_scale(self, f: Tensor, params: Params) -> Tensor:
        """The log of the scale; below a small bound nothing changes."""
        return self.noise(f, params).log().clamp_min(SMALLEST)

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        log_scale, f = self._log_scale(f, params), f.clamp_max(LARGEST)
        size = (-2 * log_scale).exp().expand_as(f)
        return Independent(_NegativeBinomial(size, logits=f + 2 * log_scale, validate_args=False), 1)

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:log_scale`, if it is learned: the log of .5 to begin with."""
        return {NOISE: torch.full((self.outputs,), math.log(0.5))} if self.scale is None else {}

    def log_prior(self, params: Params) -> Tensor:
        """Half-normal: counts with any small scale are Poisson, so that without a prior the posterior would not be a distribution."""
        if self.scale is not None:
            return torch.zeros(())
        log = params[NOISE]
        return (0.5 * math.log(2 / math.pi) + log - 0.5 * (2 * log).exp()).sum()

    def least_noise(self, params: Params) -> Tensor | float:
        """1: the scale is not in units of f."""
        return 1.0

    def label_scores(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log probability of each output."""
        log_scale = self._log_scale(f, params)
        size, logits, count = (-2 * log_scale).exp(), f + 2 * log_scale, y.double()
        # differences of log gammas, of which only float64 leaves enough digits
        ways = torch.lgamma(count + size.double()) - torch.lgamma(size.double()) - torch.lgamma(count + 1)
        return ways.to(f.dtype) + size * F.logsigmoid(-logits) + y * F.logsigmoid(logits)

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """e^f / (1 + scale^2 e^f)."""
        return 1 / ((-f).exp() + (2 * self._log_scale(f, params)).exp())
