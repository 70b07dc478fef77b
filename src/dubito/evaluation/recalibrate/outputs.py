"""Every output of a regression on its own: its density, distribution function and truncated moments, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, LogNormal, MixtureSameFamily, Normal, Weibull
from torch.distributions import StudentT as StudentTDistribution

from dubito.model.likelihoods import average
from dubito.model.likelihoods.likelihood import log_average
from dubito.model.likelihoods.special import log_beta, student_t_tail
from dubito.posteriors.predictive import LatentMixture, Predictive, StudentT
from dubito.posteriors.predictive.predictive import takes_counts

Exact = LatentMixture | StudentT
Moments = tuple[Tensor, Tensor]
CELLS = 2**18  # numbers that a distribution function works on at a time


def exact(name: str, p: Predictive) -> Exact:
    """The predictive, if the distribution of its outputs is known in closed form; else an error in words."""
    if isinstance(p, StudentT):
        return p
    if p.mixture is None:
        raise ValueError(
            f"{name} is for predictives as posteriors give them, and for what Variance makes of them; a {type(p).__name__} is neither"
        )
    marginal, likelihood = p.mixture.marginals[0], type(p.likelihood).__name__
    if takes_counts(marginal):
        raise ValueError(
            f"{name} is for numbers on a line, and {likelihood} predicts counts, whose distribution functions are stairs: "
            "ConformalIntervals takes them, and NegativeBinomial learns how far counts spread"
        )
    if _rule(marginal) is None:
        raise ValueError(
            f"{name} needs the moments of a {type(marginal).__name__}, as {likelihood} gives, up to a bound, which are not known here: "
            "use ConformalIntervals"
        )
    return p.mixture


def log_density(p: Exact, y: Tensor) -> Tensor:
    """The log density of every output, [B, *D, C]."""
    if isinstance(p, StudentT):
        return _log_student_t(((y - p.mean) / p.scale).double(), 2 * p.shape.double()) - p.scale.log()
    marginal, weights = p.marginals
    return log_average(marginal.log_prob(y.to(p.means).expand(marginal.batch_shape)), weights)


def below(p: Exact, q: Tensor) -> Moments:
    """E[d 1(d <= q)] and E[d^2 1(d <= q)] of d, an output's distance from its mean, for q [B, *D, C]."""
    if isinstance(p, StudentT):
        first, second = _of_standard_student_t((q / p.scale).double(), 2 * p.shape.double())
        return p.scale * first, p.scale**2 * second
    marginal, weights = p.marginals
    rule = _rule(marginal)
    assert rule is not None
    first, second = rule(_precise(marginal), q.double(), p.mean.double())
    return average(first, weights), average(second, weights)


def cdf(p: Exact, y: Tensor) -> Tensor:
    """P(Y <= y) for y [n, B, *D, C]; some y at a time, since all at once might not fit."""
    if isinstance(p, StudentT):
        return _student_t_cdf((y - p.mean) / p.scale, 2 * p.shape.double())
    marginal, weights = p.marginals
    marginal = _precise(marginal)
    parts = y.double().split(max(1, CELLS // max(1, marginal.batch_shape.numel())))
    return torch.cat([average(marginal.cdf(part.unsqueeze(1)).movedim(1, 0), weights) for part in parts])


def quantile_at(p: Exact, levels: Tensor) -> Tensor:
    """Quantiles whose levels [n, B, *D, C] differ, by bisection."""
    low, high = (p.quantile(level).double().expand_as(levels) for level in (1e-9, 1 - 1e-9))
    for _ in range(60 if p.means.dtype == torch.float64 else 35):
        middle = (low + high) / 2
        less = cdf(p, middle) < levels
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return (low + high) / 2


def _precise(d: Distribution) -> Distribution:
    """The same distribution in float64."""
    if isinstance(d, MixtureSameFamily):
        shares = Categorical(logits=d.mixture_distribution.logits.double(), validate_args=False)
        return MixtureSameFamily(shares, _precise(d.component_distribution), validate_args=False)
    return type(d)(**{name: getattr(d, name).double() for name in d.arg_constraints}, validate_args=False)


def _rule(d: Distribution) -> Callable[[Any, Tensor, Tensor], Moments] | None:
    """What gives the truncated moments of a distribution about a center: E[d 1(d <= q)] and E[d^2 1(d <= q)] of d = y - center."""
    return next((rule for kind, rule in RULES.items() if isinstance(d, kind)), None)


def _of_normal(d: Normal, q: Tensor, center: Tensor) -> Moments:
    r"""For :math:`N(m, s^2)` about 0, with :math:`z = (q - m) / s`: :math:`m \Phi(z) - s \varphi(z)` and
    :math:`(m^2 + s^2) \Phi(z) - s (m + q) \varphi(z)`."""
    mean, scale = d.mean - center, d.stddev
    z = (q - mean) / scale
    share, density = torch.special.ndtr(z), torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return mean * share - scale * density, (mean**2 + scale**2) * share - scale * (mean + q) * density


def _of_student_t(d: StudentTDistribution, q: Tensor, center: Tensor) -> Moments:
    """From those of the standard one."""
    mean, scale = d.loc - center, d.scale
    z = (q - mean) / scale
    share, (first, second) = _student_t_cdf(z, d.df), _of_standard_student_t(z, d.df)
    return mean * share + scale * first, mean**2 * share + 2 * mean * scale * first + scale**2 * second


def _of_mixture(d: MixtureSameFamily, q: Tensor, center: Tensor) -> Moments:
    """The mean over the components."""
    parts, shares = d.component_distribution, d.mixture_distribution.probs
    rule = _rule(parts)
    assert rule is not None
    first, second = rule(parts, q.unsqueeze(-1), center.unsqueeze(-1))
    return (shares * first).sum(-1), (shares * second).sum(-1)


def _of_log_normal(d: LogNormal, q: Tensor, center: Tensor) -> Moments:
    r"""From :math:`E[y^k 1(y \le q)] = e^{k m + k^2 s^2 / 2} \Phi((\ln q - m - k s^2) / s)`."""
    z = ((q + center).log() - d.loc) / d.scale
    return _about(center, *((k * d.loc + (k * d.scale) ** 2 / 2).exp() * torch.special.ndtr(z - k * d.scale) for k in range(3)))


def _of_weibull(d: Weibull, q: Tensor, center: Tensor) -> Moments:
    r"""From :math:`E[y^k 1(y \le q)] = \lambda^k \gamma(1 + k / c, (q / \lambda)^c)`."""
    power = ((q + center) / d.scale) ** d.concentration
    orders = [1 + k / d.concentration for k in range(3)]
    raw = (d.scale**k * torch.lgamma(a).exp() * torch.special.gammainc(a, power) for k, a in enumerate(orders))
    return _about(center, *raw)


def _about(center: Tensor, share: Tensor, first: Tensor, second: Tensor) -> Moments:
    """Moments about a center, from those about 0."""
    return first - center * share, second - 2 * center * first + center**2 * share


RULES: dict[type[Distribution], Callable[[Any, Tensor, Tensor], Moments]] = {
    Normal: _of_normal,
    StudentTDistribution: _of_student_t,
    MixtureSameFamily: _of_mixture,
    LogNormal: _of_log_normal,
    Weibull: _of_weibull,
}


def _of_standard_student_t(z: Tensor, dof: Tensor) -> Moments:
    r""":math:`-\frac{\nu + z^2}{\nu - 1} t_\nu(z)` and :math:`\nu (\frac{\nu - 1}{\nu - 2} F_{\nu - 2}(z \sqrt{(\nu - 2) / \nu}) -
    F_\nu(z))`, where these exist."""
    first = -(dof + z * z) / (dof - 1) * _log_student_t(z, dof).exp()
    less = (dof - 2).clamp_min(1e-3)
    second = dof * ((dof - 1) / less * _student_t_cdf(z * (less / dof).sqrt(), less) - _student_t_cdf(z, dof))
    return torch.where(dof > 1, first, math.nan), torch.where(dof > 2, second, torch.inf)


def _log_student_t(z: Tensor, dof: Tensor) -> Tensor:
    return -(dof + 1) / 2 * torch.log1p(z * z / dof) - 0.5 * dof.log() - log_beta(dof.new_tensor(0.5), dof / 2)


def _student_t_cdf(z: Tensor, dof: Tensor) -> Tensor:
    tail = student_t_tail(z.abs(), dof)
    return torch.where(z > 0, 1 - tail, tail)
