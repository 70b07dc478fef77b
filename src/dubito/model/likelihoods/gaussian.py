"""Regression: noise that is known, learned, or predicted by the network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributions import Distribution, Gamma, Independent
from torch.distributions import Normal as NormalDistribution

from dubito.model.likelihoods.likelihood import PREFIX, Likelihood, nodes, positive
from dubito.tensors.tree import Params


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
        scales = torch.as_tensor(self.scale, dtype=torch.float64).flatten().tolist()
        positive(tuple(scales))
        if self.prior is not None:
            raise ValueError("a prior on the noise is for learned noise: leave out `scale`, or the prior")
        object.__setattr__(self, "scale", tuple(scales) if len(scales) > 1 else scales[0])

    def noise(self, f: Tensor, params: Params) -> Tensor:
        """The standard deviation of the noise, broadcasting against f."""
        if self.scale is None:
            return params[PREFIX + "log_scale"].exp()
        return torch.as_tensor(self.scale, dtype=f.dtype, device=f.device)

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(NormalDistribution(f, self.noise(f, params).expand_as(f), validate_args=False), 1)

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:log_scale`, if the noise is learned: the log of the spread of the targets."""
        if self.scale is not None:
            return {}
        spread = torch.ones(self.outputs)
        channels = y.shape[self.dim] if y is not None and y.ndim > 1 else 1
        if y is not None and y.numel() > self.outputs and self.outputs in (1, channels):
            rows = y.movedim(self.dim, -1).reshape(-1, self.outputs) if self.outputs > 1 else y.reshape(-1, 1)
            found = rows.float().std(0).cpu()
            # targets that are all alike in the first batch say nothing of the noise, and a start at 0 would never be left
            spread = torch.where(found > 1e-3 * rows.float().abs().mean(0).cpu().clamp_min(1e-3), found, 1.0)
        return {PREFIX + "log_scale": spread.log()}

    def log_prior(self, params: Params) -> Tensor:
        """The density of the precision in the coordinate log scale; 0 without a prior."""
        if self.scale is not None or self.prior is None:
            return torch.zeros(())
        log_precision = -2 * params[PREFIX + "log_scale"]
        density = self._log_gamma(log_precision) if isinstance(self.prior, Gamma) else self.prior.log_prob(log_precision.exp())
        # change of variables from the precision to log scale: |d precision / d log scale| = 2 precision
        return (density + log_precision + math.log(2)).sum()

    def _log_gamma(self, log_precision: Tensor) -> Tensor:
        """As the distribution's own, which cannot take numbers that are on a GPU while its parameters are not."""
        assert isinstance(self.prior, Gamma)
        a, b = (item.to(log_precision) for item in (self.prior.concentration, self.prior.rate))
        return a * b.log() - torch.lgamma(a) + (a - 1) * log_precision - b * log_precision.exp()

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
        old = params[PREFIX + "log_scale"]
        return {PREFIX + "log_scale": (-0.5 * precision.log()).to(old.dtype).reshape(old.shape)}

    def mean_noise(self, f: Tensor, params: Params) -> Tensor:
        """scale^2."""
        return self.noise(f, params).expand_as(f) ** 2

    def least_noise(self, params: Params) -> Tensor | float:
        """The smallest scale."""
        if self.scale is None:
            return params[PREFIX + "log_scale"].amin(-1).exp()
        return min(self.scale) if isinstance(self.scale, tuple) else self.scale

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """As all targets, once the number of scales fits the outputs."""
        width = self.outputs if self.scale is None else torch.as_tensor(self.scale).numel()
        if width not in (1, f.shape[-1]):
            raise ValueError(
                f"there are {width} noise scales, but the network has {f.shape[-1]} outputs: give one, or one for each"
            )
        return super().target(y, f)

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """-sum_c ((y_c - f_c)^2 / (2 scale_c^2) + log scale_c + log(2 pi) / 2)."""
        constant = 0.5 * math.log(2 * math.pi)
        if isinstance(self.scale, float):  # plain numbers: a small network's step is made of such little things
            z = (y - f) / self.scale
            return (z * z).sum(-1) * -0.5 - f.shape[-1] * (math.log(self.scale) + constant)
        scale = self.noise(f, params)
        z = (y - f) / scale
        return torch.addcmul(-scale.log() - constant, z, z, value=-0.5).sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """f itself."""
        return f

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """diag(1 / scale^2)."""
        return torch.diag_embed(self.noise(f, params).expand_as(f) ** -2)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        """diag(1 / scale)."""
        return torch.diag_embed(1 / self.noise(f, params).expand_as(f)).movedim(-1, 0)

    def noise_groups(self, width: int) -> Tensor | None:
        """One group, or one for each output, if the noise is learned."""
        if self.scale is not None:
            return None
        return torch.zeros(width, dtype=torch.long) if self.outputs == 1 else torch.arange(width)

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """scale^2."""
        return self.noise(f_mean, params).square().expand_as(f_mean)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """N(f_mean, f_cov + scale^2 I)."""
        variance = f_cov if f_cov.ndim == f_mean.ndim else f_cov.diagonal(dim1=-2, dim2=-1)
        noise = self.noise(f_mean, params) ** 2
        if f_cov.ndim == f_mean.ndim or f_mean.shape[-1] == 1:
            return Independent(NormalDistribution(f_mean, (variance + noise).sqrt(), validate_args=False), 1)
        full = f_cov + torch.diag_embed(noise.expand_as(variance))
        return torch.distributions.MultivariateNormal(f_mean, full, validate_args=False)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The scale is multiplied along."""
        if self.scale is not None:
            noise = tuple((torch.as_tensor(self.scale, dtype=torch.float64) * scale.cpu().double()).tolist())
            return replace(self, scale=noise), shift, scale, params
        # the prior was one of the precision in the old units
        wide = replace(self, outputs=len(scale), prior=None)
        return wide, shift, scale, {name: leaf + scale.log() for name, leaf in params.items()}


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""y ~ N(m(x), exp s(x)): the network gives f = [means, log variances], twice as many outputs as targets.

    The loss is :math:`(y-m)^2 e^{-s}/2 + s/2`: data that cannot be explained is discounted, at a price. The Hessian at the observed
    y is indefinite; `fisher` is diag(e^{-s}, 1/2).

    `missing=True` skips positions of which a target is NaN, as maps of depth have them.

    >>> y = torch.tensor([[0.0], [torch.nan]])
    >>> HeteroscedasticGaussian(missing=True).log_prob(torch.zeros(2, 2), y, {})
    tensor([-0.9189,  0.0000])
    """

    missing: bool = field(default=False, kw_only=True)

    def _split(self, f: Tensor) -> tuple[Tensor, Tensor]:
        if f.shape[-1] % 2:
            raise ValueError(
                f"HeteroscedasticGaussian needs a mean and a log variance for each target, an even number of outputs; "
                f"the network gives {f.shape[-1]}"
            )
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance

    def width(self, f: Tensor) -> int:
        """Half of the outputs are means."""
        return self._split(f)[0].shape[-1]

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        mean, log_variance = self._split(f)
        return Independent(NormalDistribution(mean, (0.5 * log_variance).exp(), validate_args=False), 1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets must be finite, or NaN where `missing` allows it."""
        y = self.target(y, f)
        if self.missing and not bool((torch.isfinite(y) | y.isnan()).all()):
            raise ValueError("the targets hold infinite values: mark what is missing by NaN")
        if not self.missing and not bool(torch.isfinite(y).all()):
            raise ValueError(
                "the targets hold NaN or infinite values: remove those rows, fill them in, or have NaN skipped by missing=True"
            )

    def mean_noise(self, f: Tensor, params: Params) -> Tensor:
        """e^s."""
        return self._split(f)[1].exp()

    def observed(self, y: Tensor) -> Tensor | None:
        """Where no number of a target is NaN."""
        seen = ~y.isnan().any(-1)
        return seen if self.missing and not bool(seen.all()) else None

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """-sum ((y - m)^2 e^-s + s + log 2 pi) / 2."""
        mean, log_variance = self._split(f)
        seen = ~y.isnan().any(-1) if self.missing else None
        if seen is not None:
            y = torch.where(seen.unsqueeze(-1), y, 0.0)  # a NaN would come back through the gradient of what is left out
        score = -0.5 * ((y - mean) ** 2 * (-log_variance).exp() + log_variance + math.log(2 * math.pi)).sum(-1)
        return score if seen is None else torch.where(seen, score, 0.0)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """m, the first half of the outputs."""
        return self._split(f)[0]

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """diag(e^-s, 1/2)."""
        mean, log_variance = self._split(f)
        return torch.diag_embed(torch.cat([(-log_variance).exp(), torch.full_like(mean, 0.5)], -1))

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        """The root of a diagonal matrix."""
        return self.fisher(f, params).sqrt().movedim(-1, 0)  # it is diagonal

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """The mean of a log-normal number, e^(s + Var[s] / 2), which far from data may be more than a float holds: then half the
        largest, to which something can be added."""
        expected = (self._split(f_mean)[1] + 0.5 * self._split(f_var)[1]).exp()
        return expected.clamp_max(0.5 * torch.finfo(expected.dtype).max)

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """Closed if the log variances are known: then the spread of the means adds to the noise."""
        mean, log_variance = self._split(f_mean)
        diagonal = f_cov.ndim == f_mean.ndim
        spread = f_cov if diagonal else f_cov.diagonal(dim1=-2, dim2=-1)
        if bool(self._split(spread)[1].any()):
            return None
        variance, noise = self._split(spread)[0], log_variance.exp()
        if diagonal or mean.shape[-1] == 1:
            return Independent(NormalDistribution(mean, (variance + noise).sqrt(), validate_args=False), 1)
        width = mean.shape[-1]
        full = f_cov[..., :width, :width] + torch.diag_embed(noise)
        return torch.distributions.MultivariateNormal(mean, full, validate_args=False)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """Of a log variance the scale is a shift."""
        return self, torch.cat([shift, 2 * scale.log()]), torch.cat([scale, torch.ones_like(scale)]), params

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Nodes over the log variances only; given those, the means stay Gaussian and are convolved exactly.

        Nodes over the means too would make a comb of narrow peaks wherever the noise is small beside the spread.
        """
        free = torch.arange(f_mean.shape[-1], device=f_mean.device) >= f_mean.shape[-1] // 2
        return given_nodes(f_mean, f_cov, free, n)


def given_nodes(f_mean: Tensor, f_cov: Tensor, free: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """N(f_mean, f_cov) [S, ..., C] as n equal Gaussians, in which the outputs that are `free` [C] stand at nodes and the others keep
    the Gaussian they have given those."""
    if f_cov.ndim == f_mean.ndim:
        unit = nodes(n, f_mean[..., free]).reshape(1, n, *[1] * (f_mean.ndim - 2), -1)
        means = f_mean.unsqueeze(1).repeat(1, n, *[1] * (f_mean.ndim - 1))
        means[..., free] += f_cov[..., free].clamp_min(0).sqrt().unsqueeze(1) * unit
        return means, (f_cov * ~free).unsqueeze(1).expand_as(means)
    values, vectors = torch.linalg.eigh(f_cov[..., free, :][..., free])
    unit = nodes(n, values).reshape(1, n, *[1] * (f_mean.ndim - 2), -1)
    known = values > 1e-12 * values.amax(-1, keepdim=True).clamp_min(1e-30)
    # symmetric roots, which do not depend on the arbitrary signs and bases of eigenvectors
    inverse = (vectors * torch.where(known, values.clamp_min(1e-30).rsqrt(), 0.0).unsqueeze(-2)) @ vectors.mT
    gain = f_cov[..., free] @ inverse  # [S, ..., C, k], covariance of all outputs with the unit nodes
    gain[..., free, :] = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    means = f_mean.unsqueeze(1) + (gain.unsqueeze(1) @ unit.unsqueeze(-1)).squeeze(-1)
    fixed = ~free
    left = (f_cov - gain @ gain.mT) * fixed * fixed.unsqueeze(-1)
    return means, left.unsqueeze(1).expand(*means.shape, means.shape[-1])
