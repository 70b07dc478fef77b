"""Regression with outliers: Student-t noise, whose scale is known, learned, or predicted by the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal, constraints
from torch.distributions import StudentT as StudentTDistribution

from dubito.model.likelihoods.likelihood import PREFIX, DiagonalFisher
from dubito.model.likelihoods.noise import Heteroscedastic, Scaled, given_nodes, known_noise
from dubito.model.likelihoods.special import student_t_tail
from dubito.tensors.checks import require
from dubito.tensors.tree import Params

LOG_DOF = PREFIX + "log_dof"
PRIOR = (2.0, 0.1)  # shape and rate of the Gamma prior of dof - 2 (Juarez & Steel 2010)
PRECISIONS = 48  # nodes of a quadrature over the precision of the noise
JOINT = {2: 48, 3: 32}  # the same for each of so many correlated outputs
MANY = 2**22  # nodes of all rows that are looked at together


class _StudentT(StudentTDistribution):
    """With the distribution function that torch's lacks."""

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value)."""
        z = ((value - self.loc) / self.scale).double()
        tail = student_t_tail(z.abs(), self.df.double())
        return torch.where(z > 0, 1 - tail, tail).to(value.dtype)


def student_t(dof: Tensor, mean: Tensor, scale: Tensor) -> Distribution:
    """Independent Student-t outputs."""
    return Independent(_StudentT(dof.expand_as(mean), mean, scale.expand_as(mean), validate_args=False), 1)


def log_density(z: Tensor, dof: Tensor) -> Tensor:
    """The log density of a standard Student-t."""
    constant = torch.lgamma((dof + 1) / 2) - torch.lgamma(dof / 2) - 0.5 * (math.pi * dof).log()
    return constant - (dof + 1) / 2 * torch.log1p(z * z / dof)


def precisions(dof: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The logarithms [..., n] of n precisions of Student-t noise, and their log weights, up to a constant.

    The precision g is Gamma(dof / 2, dof / 2). The trapezoidal rule in u = ln g sums the density e^(dof / 2 (u - e^u)).
    """
    dof, steps = dof.double().unsqueeze(-1), torch.linspace(0, 1, n, dtype=torch.float64, device=dof.device)
    wide = (80 / dof).sqrt()  # where the density has fallen to e^-20 if dof is large
    low, high = -(60 / dof + wide.clamp_max(1.0)), (1 + 40 / dof + wide).log()  # and whatever it is
    u = low + (high - low) * steps
    return u, 0.5 * dof * (u - u.exp())


def blurred_student_t(dof: Tensor, mean: Tensor, spread: Tensor, scale: Tensor) -> Distribution:
    """The sum of N(mean, spread), for variances [..., C], and Student-t noise: a mixture of Gaussians over the precision of noise."""
    u, logits = precisions(dof, PRECISIONS)  # [..., 1, n]
    variance = spread.unsqueeze(-1) + (scale.unsqueeze(-1) ** 2 * (-u).exp()).to(mean)
    components = Normal(mean.unsqueeze(-1).expand_as(variance), variance.sqrt(), validate_args=False)
    shares = Categorical(logits=logits.to(mean).expand_as(variance), validate_args=False)
    return Independent(MixtureSameFamily(shares, components, validate_args=False), 1, validate_args=False)


class JointStudentT(Distribution):
    """The sum of N(mean, cov), for two or three correlated outputs, and Student-t noise of each: a mixture of Gaussians over the
    precisions of all outputs."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, dof: Tensor, mean: Tensor, cov: Tensor, scale: Tensor):
        self.dof, self.center, self.cov, self.scale = dof if dof.ndim else dof.unsqueeze(0), mean, cov, scale
        super().__init__(mean.shape[:-1], mean.shape[-1:], validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """The joint log density, by a grid of the precisions, some rows at a time."""
        width, shape = value.shape[-1], torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        u, logits = precisions(self.dof, JOINT[width])
        terms = (
            (value - self.center, (width,)),
            (self.cov, (width, width)),
            (self.scale**2, (width,)),
            (u.squeeze(-2), u.shape[-1:]),
            (logits.log_softmax(-1).squeeze(-2), u.shape[-1:]),
        )
        rows = [term.double().expand(*shape, *last).reshape(-1, *last) for term, last in terms]
        pieces = zip(*(row.split(max(1, MANY // JOINT[width] ** width)) for row in rows), strict=True)
        return torch.cat([mixed_log_density(*piece) for piece in pieces]).reshape(shape).to(self.center.dtype)


def mixed_log_density(residual: Tensor, cov: Tensor, squares: Tensor, u: Tensor, weights: Tensor) -> Tensor:
    """The log density at residuals [..., C] of N(0, cov + diag(squares e^-u)), mixed over nodes u [..., n] of every output.

    Given the precision of the first output it is a Gaussian, and the other outputs given the first are such a mixture again.
    """
    first = cov[..., 0, :1] + squares[..., :1] * (-u).exp()  # [..., n]
    scores = weights - 0.5 * (residual[..., :1] ** 2 / first + first.log() + math.log(2 * math.pi))
    if residual.shape[-1] > 1:
        slope = cov[..., 1:, 0].unsqueeze(-2) / first.unsqueeze(-1)  # [..., n, C - 1]
        rest = residual[..., 1:].unsqueeze(-2) - slope * residual[..., :1].unsqueeze(-1)
        left = cov[..., 1:, 1:].unsqueeze(-3) - slope.unsqueeze(-1) * cov[..., :1, 1:].unsqueeze(-3)
        scores = scores + mixed_log_density(rest, left, squares[..., 1:].unsqueeze(-2), u.unsqueeze(-2), weights.unsqueeze(-2))
    return scores.logsumexp(-1)


def convolved(dof: Tensor, mean: Tensor, cov: Tensor, scale: Tensor) -> Distribution | None:
    """The sum of N(mean, cov), of a covariance [..., C] or [..., C, C], and Student-t noise; None for more correlated outputs than
    three."""
    width = mean.shape[-1]
    if cov.ndim == mean.ndim or width == 1:
        return blurred_student_t(dof, mean, cov if cov.ndim == mean.ndim else cov.diagonal(dim1=-2, dim2=-1), scale)
    return JointStudentT(dof, mean, cov, scale) if width in JOINT else None


@dataclass(frozen=True)
class Tails(DiagonalFisher):
    """Degrees of freedom, known or learned as `likelihood:log_dof`."""

    dof: float | None = field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        fine = self.dof is None or self.dof > 2
        require(fine, f"dof must be above 2, or the noise has no variance, which uncertainty is made of; got {self.dof}")

    def degrees(self, f: Tensor, params: Params) -> Tensor:
        """The degrees of freedom, [] or [1]: 2 + exp(likelihood:log_dof) if learned."""
        if self.dof is None:
            return 2 + params[LOG_DOF].exp()
        return torch.as_tensor(self.dof, dtype=f.dtype, device=f.device)

    def parameters(self, y: Tensor | None = None) -> Params:
        """What is learned of the scale, and `likelihood:log_dof`: 5 degrees of freedom to begin with."""
        return super().parameters(y) | ({} if self.dof is not None else {LOG_DOF: torch.full((1,), math.log(3.0))})

    def log_prior(self, params: Params) -> Tensor:
        """That of the scale, and a Gamma(2, 0.1) density of dof - 2 in the coordinate log_dof: Student-t noise of any large dof is
        Gaussian, so that without a prior the posterior would not be a distribution."""
        if self.dof is not None:
            return super().log_prior(params)
        (shape, rate), log = PRIOR, params[LOG_DOF]
        return (shape * (log + math.log(rate)) - math.lgamma(shape) - rate * log.exp()).sum() + super().log_prior(params)


@dataclass(frozen=True)
class StudentT(Tails, Scaled):
    r"""y = f + scale t, where t has a Student-t distribution with `dof` degrees of freedom: outliers pull less than with `Gaussian`.

    .. math:: \ln p(y \mid f) = \ln \frac{\Gamma(\frac{\nu + 1}{2})}{\Gamma(\frac\nu2) \sqrt{\pi\nu}\, s}
              - \tfrac{\nu + 1}{2} \ln \Big(1 + \tfrac{(y - f)^2}{\nu s^2}\Big), \qquad
              \mathrm{Var}[y \mid f] = \tfrac{\nu}{\nu - 2} s^2

    Scale and `dof` (above 2) are known if given, else learned along with the weights, as `likelihood:log_scale` and
    `likelihood:log_dof`; dof - 2 then has a Gamma(2, 0.1) prior. `outputs=3` learns a scale for each of three outputs. The scale is the
    s of the formula, not the standard deviation, which is larger.

    >>> StudentT(1.0, dof=4.0)(torch.zeros(1, 1), {}).variance
    tensor([[2.]])
    """

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return student_t(self.degrees(f, params), f, self.noise(f, params))

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The sum of the log densities of the outputs."""
        scale = self.noise(f, params)
        return (log_density((y - f) / scale, self.degrees(f, params)) - scale.log()).sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """f itself."""
        return f

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """(dof + 1) / (dof + 3) / scale^2."""
        dof = self.degrees(f, params)
        return ((dof + 1) / (dof + 3) / self.noise(f, params) ** 2).expand_as(f)

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """dof / (dof - 2) scale^2."""
        dof = self.degrees(f_mean, params)
        return (dof / (dof - 2) * self.noise(f_mean, params) ** 2).expand_as(f_mean)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """A mixture of Gaussians over the precision of the noise; for up to three outputs, or independent ones."""
        return convolved(self.degrees(f_mean, params), f_mean, f_cov, self.noise(f_mean, params))


@dataclass(frozen=True)
class HeteroscedasticStudentT(Tails, Heteroscedastic):
    r"""`StudentT` whose scale the network predicts: f = [means m, log squared scales s], twice as many outputs as targets.

    :math:`y = m(x) + e^{s(x) / 2} t_\nu`, of which the variance is :math:`\frac{\nu}{\nu - 2} e^s`. `dof` is known or learned as in
    `StudentT`, `missing` is as in `HeteroscedasticGaussian`.

    >>> HeteroscedasticStudentT(dof=4.0)(torch.zeros(1, 2), {}).variance
    tensor([[2.]])
    """

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        mean, log_square = self.moments(f)
        return student_t(self.degrees(f, params), mean, (0.5 * log_square).exp())

    def densities(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log densities of the outputs."""
        mean, log_square = self.moments(f)
        return log_density((y - mean) * (-0.5 * log_square).exp(), self.degrees(f, params)) - 0.5 * log_square

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """((dof + 1) e^-s, dof / 2) / (dof + 3)."""
        mean, log_square = self.moments(f)
        dof = self.degrees(f, params)
        return torch.cat([(dof + 1) * (-log_square).exp(), (0.5 * dof).expand_as(mean)], -1) / (dof + 3)

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """dof / (dof - 2) times the mean of e^s."""
        dof, square = self.degrees(f_mean, params), super().noise_variance(f_mean, f_var, params)
        return None if square is None else dof / (dof - 2) * square

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """As of `StudentT`, if the scales are certain."""
        mean, log_square = self.moments(f_mean)
        spread = known_noise(f_cov, f_mean, mean.shape[-1])
        scale = (0.5 * log_square).exp()
        return None if spread is None else convolved(self.degrees(f_mean, params), mean, spread, scale)

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Nodes over the scales, where the means then have a closed form."""
        if f_cov.ndim > f_mean.ndim and self.width(f_mean) > 1:
            return None
        free = torch.arange(f_mean.shape[-1], device=f_mean.device) >= self.width(f_mean)
        return given_nodes(f_mean, f_cov, free, n)
