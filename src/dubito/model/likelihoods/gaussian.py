"""Regression: Gaussian noise that is known, learned, or predicted by the network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributions import Distribution, Gamma, Independent, MultivariateNormal
from torch.distributions import Normal as NormalDistribution

from dubito.model.likelihoods.likelihood import NOISE, Likelihood
from dubito.model.likelihoods.noise import Heteroscedastic, Scaled, given_nodes, known_noise
from dubito.tensors.checks import between
from dubito.tensors.tree import Params

CONSTANT = 0.5 * math.log(2 * math.pi)


def normal(mean: Tensor, covariance: Tensor, noise: Tensor) -> Distribution:
    """N(mean, covariance + diag(noise)), of a covariance [..., C] or [..., C, C] and variances of the noise [..., C]."""
    if covariance.ndim > mean.ndim and mean.shape[-1] > 1:
        full = covariance + torch.diag_embed(noise.expand_as(mean))
        return MultivariateNormal(mean, full, validate_args=False)
    variance = covariance if covariance.ndim == mean.ndim else covariance.diagonal(dim1=-2, dim2=-1)
    return Independent(NormalDistribution(mean, (variance + noise).sqrt(), validate_args=False), 1)


def log_gamma(prior: Gamma, log: Tensor) -> Tensor:
    """The log density of e^log, as the distribution's own, which cannot take numbers on a GPU if its parameters are not there."""
    a, b = (item.to(log) for item in (prior.concentration, prior.rate))
    return a * b.log() - torch.lgamma(a) + (a - 1) * log - b * log.exp()


@dataclass(frozen=True)
class Gaussian(Scaled):
    r"""y ~ N(f, scale^2): regression with noise that does not depend on x.

    `Gaussian(scale=0.1)`: known noise, one number or one for each output. `Gaussian()`: noise learned along with the weights as
    `likelihood:log_scale`; `outputs=3` learns one for each of three outputs. `prior`, a distribution over the precision
    :math:`1/\sigma^2` such as `torch.distributions.Gamma(0.5, 1.0)`, is optional; without it the prior is flat in log scale.

    >>> Gaussian(scale=0.1)(torch.zeros(1, 1), {}).stddev
    tensor([[0.1000]])
    """

    prior: Distribution | None = field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.scale is not None and self.prior is not None:
            raise ValueError("a prior on the noise is for learned noise: leave out `scale`, or the prior")

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(NormalDistribution(f, self.noise(f, params).expand_as(f), validate_args=False), 1)

    @property
    def gaussian(self) -> Gaussian:
        """Itself."""
        return self

    def log_prior(self, params: Params) -> Tensor:
        """The density of the precision in the coordinate log scale; 0 without a prior."""
        if self.scale is not None or self.prior is None:
            return torch.zeros(())
        log_precision = -2 * params[NOISE]
        given = self.prior
        density = log_gamma(given, log_precision) if isinstance(given, Gamma) else given.log_prob(log_precision.exp())
        # change of variables from the precision to log scale: |d precision / d log scale| = 2 precision
        return (density + log_precision + math.log(2)).sum()

    def resample(
        self,
        outputs: Iterable[tuple[Tensor, Tensor]],
        params: Params,
        share: float,
        temperature: float,
        generator: torch.Generator,
    ) -> Params:
        r"""The precision given the residuals r of n numbers is Gamma((a + n/2) / T, (b + sum r^2 / 2) / T).

        a and b are those of a Gamma prior, or 0 for the flat one; with T the density in log scale is raised to 1/T, as all others are.
        """
        if self.scale is not None or not isinstance(self.prior, Gamma | None):
            return {}
        squares, count = torch.zeros((), dtype=torch.float64), 0.0
        for f, y in outputs:
            gone = (self.target(y, f[0]) - f).double().square().flatten(1, -2)  # [C, B, K]
            squares, count = squares.to(gone.device) + gone.sum(1), count + gone.shape[1]
        if self.outputs == 1:
            count, squares = count * squares.shape[1], squares.sum(1, keepdim=True)
        a, b = (0.0, 0.0) if self.prior is None else (self.prior.concentration, self.prior.rate)
        shape = (torch.as_tensor(a, dtype=torch.float64, device=squares.device) + 0.5 * share * count) / temperature
        rate = (torch.as_tensor(b, dtype=torch.float64, device=squares.device) + 0.5 * share * squares) / temperature
        precision = torch._standard_gamma(shape.expand_as(rate).contiguous(), generator=generator) / rate
        old = params[NOISE]
        return {NOISE: (-0.5 * precision.log()).to(old.dtype).reshape(old.shape)}

    def mean_noise(self, f: Tensor, params: Params) -> Tensor:
        """scale^2."""
        return self.noise(f, params).expand_as(f) ** 2

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """-sum_c ((y_c - f_c)^2 / (2 scale_c^2) + log scale_c + log(2 pi) / 2)."""
        if isinstance(self.scale, float):  # plain numbers: a small network's step is made of such little things
            z = (y - f) / self.scale
            return (z * z).sum(-1) * -0.5 - f.shape[-1] * (math.log(self.scale) + CONSTANT)
        scale = self.noise(f, params)
        z = (y - f) / scale
        return torch.addcmul(-scale.log() - CONSTANT, z, z, value=-0.5).sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """f itself."""
        return f

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """1 / scale^2."""
        return self.noise(f, params).expand_as(f) ** -2

    def noise_groups(self, width: int) -> Tensor | None:
        """One group, or one for each output, if the noise is learned."""
        if self.scale is not None:
            return None
        return torch.zeros(width, dtype=torch.long) if self.outputs == 1 else torch.arange(width)

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """scale^2."""
        return self.mean_noise(f_mean, params)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """N(f_mean, f_cov + scale^2 I)."""
        return normal(f_mean, f_cov, self.noise(f_mean, params) ** 2)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The scale is multiplied along; a prior was one of the precision in the old units."""
        return Scaled.rescaled(replace(self, prior=None), shift, scale, params)


@dataclass(frozen=True)
class HeteroscedasticGaussian(Heteroscedastic):
    r"""y ~ N(m(x), exp s(x)): the network gives f = [means, log variances], twice as many outputs as targets.

    The loss is :math:`(y-m)^2 e^{-s}/2 + s/2`: data that the network cannot explain counts less, at the price s/2. The Hessian at
    the observed y is indefinite; `fisher` is diag(e^{-s}, 1/2).

    Where the network takes data for noise, their gradients are small, and its means may stay poor. There are two remedies:
    `NaturalGaussian`, the same likelihood in other outputs, and `BetaNLL`, another gradient.

    `missing=True` skips positions of which a target is NaN, as maps of depth have them.

    >>> y = torch.tensor([[0.0], [torch.nan]])
    >>> HeteroscedasticGaussian(missing=True).log_prob(torch.zeros(2, 2), y, {})
    tensor([-0.9189,  0.0000])
    """

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        mean, log_variance = self.moments(f)
        return Independent(NormalDistribution(mean, (0.5 * log_variance).exp(), validate_args=False), 1)

    def mean_noise(self, f: Tensor, params: Params) -> Tensor | None:
        """e^s."""
        return self.moments(f)[1].exp()

    def densities(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """-((y - m)^2 e^-s + s + log 2 pi) / 2."""
        mean, log_variance = self.moments(f)
        return -0.5 * ((y - mean) ** 2 * (-log_variance).exp() + log_variance) - CONSTANT

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """(e^-s, 1/2)."""
        mean, log_variance = self.moments(f)
        return torch.cat([(-log_variance).exp(), torch.full_like(mean, 0.5)], -1)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """A closed form if the log variances are certain: the covariance of the means adds to the noise."""
        mean, log_variance = self.moments(f_mean)
        spread = known_noise(f_cov, f_mean, mean.shape[-1])
        return None if spread is None else normal(mean, spread, log_variance.exp())

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Nodes over the log variances only; given those, the means stay Gaussian and are convolved exactly.

        Nodes over the means too would make a comb of narrow peaks wherever the noise is small beside the spread.
        """
        free = torch.arange(f_mean.shape[-1], device=f_mean.device) >= self.width(f_mean)
        return given_nodes(f_mean, f_cov, free, n)


@dataclass(frozen=True)
class NaturalGaussian(HeteroscedasticGaussian):
    r"""`HeteroscedasticGaussian` in natural parameters (Immer et al. 2023): f = :math:`[m / \sigma^2, -\ln \sigma^2]`.

    .. math:: \ln p(y \mid f) = f_1 y - \tfrac12 e^{f_2} y^2 - \tfrac12 f_1^2 e^{-f_2} + \tfrac12 f_2 - \tfrac12 \ln 2\pi

    The same likelihood, exactly, so a posterior is that of Bayes' rule; but its gradient in :math:`f_1` is the residual y - m, whatever
    the noise, so that the means are trained everywhere. Standardize the targets.

    >>> p = NaturalGaussian()(torch.tensor([[6.0, 1.0986]]), {})              # precision 3, and the mean is 6 / 3
    >>> p.mean, p.variance
    (tensor([[2.0000]]), tensor([[0.3333]]))
    """

    units: tuple[tuple[float, ...], tuple[float, ...]] | None = field(
        default=None, kw_only=True
    )  # y = shift + unit y', p(y' | f)

    fisher_root = Likelihood.fisher_root
    fisher_diagonal = Likelihood.fisher_diagonal
    fisher_product = Likelihood.fisher_product

    def _units(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and unit of the targets, each [C / 2] or []."""
        shift, unit = torch.as_tensor(self.units or (0.0, 1.0), dtype=f.dtype, device=f.device)
        return shift, unit

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The means and the log variances, each [..., C / 2]."""
        first, log_precision = super().moments(f)
        if self.units is None:
            return first * (-log_precision).exp(), -log_precision
        shift, unit = self._units(f)
        return shift + unit * first * (-log_precision).exp(), 2 * unit.log() - log_precision

    def mean_noise(self, f: Tensor, params: Params) -> Tensor | None:
        """None: the outputs are not means."""
        return None

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """None: the outputs are not means."""
        return None

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        r"""The block of each target, of :math:`y'` in the units of the network, with its mean m' and variance :math:`v'`:
        :math:`(v', -m'; -m', m'^2 / v' + 1/2)`."""
        mean, log_variance = replace(self, units=None).moments(f)
        variance = log_variance.exp()
        corner, cross = torch.diag_embed(variance), torch.diag_embed(-mean)
        return torch.cat([torch.cat([corner, cross], -1), torch.cat([cross, torch.diag_embed(mean**2 / variance + 0.5)], -1)], -2)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """A closed form if the precisions are certain: the means are then linear in the outputs."""
        mean, log_variance = self.moments(f_mean)
        spread, noise = known_noise(f_cov, f_mean, mean.shape[-1]), log_variance.exp()
        if spread is None:
            return None
        slope = noise / self._units(f_mean)[1]
        return normal(mean, spread * (slope**2 if spread.ndim == mean.ndim else slope.unsqueeze(-1) * slope.unsqueeze(-2)), noise)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The outputs stay as they are; the new units become part of the likelihood."""
        old_shift, old_unit = self._units(scale)
        units = ((shift + scale * old_shift).tolist(), (scale * old_unit).tolist())
        zeros = torch.zeros(2 * len(scale), dtype=scale.dtype, device=scale.device)
        return replace(self, units=(tuple(units[0]), tuple(units[1]))), zeros, zeros + 1, params

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """The first outputs move by offset / variance, in the units of the network."""
        precision = super().moments(f)[1].exp()
        first = offset / self._units(f)[1] * precision
        return f + torch.cat([first, torch.zeros_like(first)], -1)


@dataclass(frozen=True)
class BetaNLL(HeteroscedasticGaussian):
    r"""`HeteroscedasticGaussian` trained by another gradient, so that its means are trained everywhere (Seitzer et al. 2022).

    The gradient of every target is multiplied by :math:`e^{\beta s}`, taken as a constant. With `beta=0` it is that of the log
    likelihood, and with `beta=1` the means are trained by squared errors. In between it is the gradient of no log likelihood, so what
    is fitted is labelled generalized. `log_prob`, predictions and scores are those of `HeteroscedasticGaussian`.

    >>> f = torch.tensor([[0.0, 2.0]], requires_grad=True)
    >>> BetaNLL(beta=1.0).objective(f, torch.tensor([[3.0]]), {}).backward()
    >>> f.grad[0, 0]                                                              # the residual: variance e^2 times 3 / e^2
    tensor(3.)
    """

    beta: float = field(default=0.5, kw_only=True)

    def __post_init__(self):
        between(0, 1, include="both", beta=self.beta)

    @property
    def departures(self) -> tuple[str, ...]:
        """The weight of the gradients, if there is one."""
        return (f"beta = {self.beta:g}",) if self.beta else ()

    def objective(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log likelihood, with weights on its gradient in f."""
        weight = (self.beta * self.moments(f)[1]).detach().exp()
        return self.log_prob(f.detach() + torch.cat([weight, weight], -1) * (f - f.detach()), y, params)
