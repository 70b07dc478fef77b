"""Regression where a target may have several likely values: a mixture of Gaussians for each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal

from dubito.model.likelihoods.likelihood import Likelihood
from dubito.model.likelihoods.noise import given_nodes, known_noise
from dubito.tensors.checks import at_least
from dubito.tensors.tree import Params

NODES = 64  # of the quadrature for the Fisher information, for each component


@dataclass(frozen=True)
class GaussianMixture(Likelihood):
    r"""A mixture of K Gaussians for every target, whose means, variances and shares the network predicts (Bishop 1994).

    .. math:: p(y \mid f) = \sum_k \pi_k N(y; m_k, e^{s_k}), \qquad \pi = \mathrm{softmax}(a)

    The network gives 3 K outputs for each target: f = [means m, log variances s, logits a], each with the K of the first target, then
    those of the second. It is for noise that is skewed or has several modes, and fits quantiles of any shape, with a
    likelihood that a posterior can be made of (the pinball losses of a quantile head are none).

    >>> mixture = GaussianMixture(2)
    >>> p = mixture(torch.tensor([[-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]), {})          # means -1 and 1, variances 1, equal shares
    >>> p.mean, p.variance
    (tensor([[0.]]), tensor([[2.]]))
    """

    components: int = 3

    def __post_init__(self):
        at_least(1, components=self.components)

    def parts(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means, log variances and log shares, each [..., D, K] for D targets."""
        if f.shape[-1] % (3 * self.components):
            raise ValueError(
                f"GaussianMixture({self.components}) needs a mean, a log variance and a logit for each component, "
                f"{3 * self.components} outputs for each target; the network gives {f.shape[-1]}"
            )
        mean, log_variance, logits = (part.unflatten(-1, (-1, self.components)) for part in f.chunk(3, -1))
        return mean, log_variance, logits.log_softmax(-1)

    def width(self, f: Tensor) -> int:
        """One target for every 3 K outputs."""
        return self.parts(f)[0].shape[-2]

    def _mixture(self, mean: Tensor, variance: Tensor, log_shares: Tensor) -> Distribution:
        components = Normal(mean, variance.sqrt(), validate_args=False)
        mixture = MixtureSameFamily(Categorical(logits=log_shares, validate_args=False), components, validate_args=False)
        return Independent(mixture, 1, validate_args=False)

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        mean, log_variance, log_shares = self.parts(f)
        return self._mixture(mean, log_variance.exp(), log_shares)

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The sum over the targets of the log of the sum over the components."""
        return self._log_joint(f, y.unsqueeze(-1)).logsumexp(-1).sum(-1)

    def _log_joint(self, f: Tensor, y: Tensor) -> Tensor:
        """ln pi_k N(y; m_k, e^s_k), [..., D, K], for y that broadcasts against it."""
        mean, log_variance, log_shares = self.parts(f)
        return log_shares - 0.5 * ((y - mean) ** 2 * (-log_variance).exp() + log_variance + math.log(2 * math.pi))

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """sum_k pi_k m_k."""
        mean, _, log_shares = self.parts(f)
        return (log_shares.exp() * mean).sum(-1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        r"""A block of each target, the mean of slope slope^T by Gauss-Hermite quadrature over each component.

        The slopes are, with the shares :math:`r_k` that the components have in y: :math:`r_k (y - m_k) e^{-s_k}` in the means,
        :math:`r_k ((y - m_k)^2 e^{-s_k} - 1) / 2` in the log variances and :math:`r_k - \pi_k` in the logits.
        """
        mean, log_variance, log_shares = (part.unsqueeze(0) for part in self.parts(f))
        z, w = (torch.as_tensor(each).to(f) for each in np.polynomial.hermite_e.hermegauss(NODES))
        # y at the nodes of every component, [n, ..., D, K, 1], against which the components stand in the last axis
        y = (mean + (0.5 * log_variance).exp() * z.reshape(-1, *[1] * (mean.ndim - 1))).unsqueeze(-1)
        weight = (w / w.sum()).reshape(-1, *[1] * (mean.ndim - 1)) * log_shares.exp()
        mean, log_variance, log_shares = (part.unsqueeze(-2) for part in (mean, log_variance, log_shares))
        gap = (y - mean) * (-0.5 * log_variance).exp()
        share = (log_shares - 0.5 * (gap**2 + log_variance)).softmax(-1)
        slopes = [share * gap * (-0.5 * log_variance).exp(), 0.5 * share * (gap**2 - 1), share - log_shares.exp()]
        slope = torch.stack([part.expand_as(share) for part in slopes], -2)  # [n, ..., D, K, 3, K]
        blocks = torch.einsum("n...jpa,n...jqb,n...j->...paqb", slope, slope, weight)  # [..., D, 3, K, 3, K]
        full = torch.einsum("...dpaqb,de->...pdaqeb", blocks, torch.eye(blocks.shape[-5], dtype=f.dtype, device=f.device))
        return full.reshape(*f.shape, f.shape[-1])

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """A closed form if only the means are uncertain: the variance of each adds to its noise."""
        mean, log_variance, log_shares = self.parts(f_mean)
        spread = known_noise(f_cov, f_mean, f_mean.shape[-1] // 3)
        if spread is None or (spread.ndim > f_mean.ndim and mean.shape[-2] > 1):
            return None  # of several targets whose means hang together: no product of mixtures
        variance = spread if spread.ndim == f_mean.ndim else spread.diagonal(dim1=-2, dim2=-1)
        return self._mixture(mean, log_variance.exp() + variance.unflatten(-1, (-1, self.components)), log_shares)

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Nodes over all but the means, where the means then have a closed form."""
        if f_cov.ndim > f_mean.ndim and self.width(f_mean) > 1:
            return None
        free = torch.arange(f_mean.shape[-1], device=f_mean.device) >= f_mean.shape[-1] // 3
        return given_nodes(f_mean, f_cov, free, n)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """Scaling y shifts the log variances; the logits stay."""
        shift, scale = (part.repeat_interleave(self.components) for part in (shift, scale))
        ones = torch.ones_like(scale)
        return self, torch.cat([shift, 2 * scale.log(), 0 * ones]), torch.cat([scale, ones, ones]), params

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """The means of all components move."""
        each = offset.repeat_interleave(self.components, -1)
        return f + torch.cat([each, torch.zeros_like(each), torch.zeros_like(each)], -1)
