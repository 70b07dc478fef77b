r"""Effective sample sizes: the number of independent draws with the same Monte Carlo error, from the autocorrelation of the chains.

.. math:: S_{\mathrm{eff}} = \frac{S}{\hat\tau}, \quad \hat\tau = 1 + 2 \sum_{t \ge 1} \hat\rho_t, \quad
    \hat\rho_t = 1 - \frac{W - \frac1m \sum_j \hat\gamma_{jt}}{\hat V}

for S draws in m half-chains, their autocovariances :math:`\hat\gamma_{jt}` at lag t (by FFT) and the variances W and V of R-hat.
Chains that disagree therefore have few effective draws. The sum ends by the rule of Geyer (1992): in a reversible chain the sums
:math:`\hat\rho_{2k} + \hat\rho_{2k+1}` are positive and decrease with k, so the terms after the first that is not positive are noise
and left out, and a sum that increases is replaced by the one before it. Chains with negative autocorrelation can have more effective
draws than draws, at most S log10(S).

Draws are [chains, n, ...]. The result is nan for constants, for values that are not finite, and for fewer than 4 draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.quantities import map_quantity, split_chains
from dubito.posteriors.diagnostics.ranks import normal_scores, sort_rows

TAILS = (0.05, 0.95)


def ess_bulk(draws: Tensor) -> Tensor:
    """Effective draws for the bulk of a distribution: those of the normal scores of the ranks (Vehtari et al. 2021). 400 is good.

    >>> g = torch.Generator().manual_seed(0)
    >>> bool(3600 < ess_bulk(torch.randn(4, 1000, generator=g)) < 4400)
    True
    """
    return map_quantity(lambda x: effective_draws(normal_scores(split_chains(x))), draws)


def ess_tail(draws: Tensor) -> Tensor:
    """Effective draws for the tails: the smaller one of the 5 % and the 95 % quantile (Vehtari et al. 2021). 400 is good.

    >>> g = torch.Generator().manual_seed(0)
    >>> bool(3600 < ess_tail(torch.randn(4, 1000, generator=g)) < 4400)
    True
    """
    return map_quantity(effective_tail_draws, draws)


def ess_mean(draws: Tensor) -> Tensor:
    """Effective draws for the mean: those of the values themselves.

    >>> g = torch.Generator().manual_seed(0)
    >>> bool(3600 < ess_mean(torch.randn(4, 1000, generator=g)) < 4400)
    True
    """
    return map_quantity(lambda x: effective_draws(split_chains(x)), draws)


def mcse_mean(draws: Tensor) -> Tensor:
    r"""Monte Carlo standard error of the mean over all draws, :math:`s / \sqrt{S_{\mathrm{eff}}}` with their standard deviation s.

    >>> g = torch.Generator().manual_seed(0)
    >>> mcse_mean(torch.randn(4, 1000, generator=g))           # 1 / sqrt(4000) is 0.0158
    tensor(0.0158, dtype=torch.float64)
    """
    return map_quantity(lambda x: x.flatten(1).std(1) / effective_draws(split_chains(x)).sqrt(), draws)


def effective_tail_draws(x: Tensor) -> Tensor:
    """`ess_tail` of chains [P, m, n]."""
    ordered = sort_rows(x.flatten(1))
    # the indicator of "up to the sorted value just below the quantile" is exact, where an interpolated quantile is not
    bounds = [ordered[:, math.floor(level * (ordered.shape[1] - 1))].view(-1, 1, 1) for level in TAILS]
    low, high = (effective_draws(split_chains((x <= value).to(x.dtype))) for value in bounds)
    return torch.fmin(low, high)  # one of them may be nan, where nearly all draws are equal


def effective_draws(x: Tensor) -> Tensor:
    """Effective draws for the mean of chains [P, m, n], by the formula above; nan where the variance is 0."""
    m, n = x.shape[1:]
    means = x.mean(-1)
    covariance = _autocovariance(x, means)  # [P, n]
    within = covariance[:, :1] * (n / (n - 1))
    total = covariance[:, :1] + (means.var(-1, keepdim=True) if m > 1 else 0)
    correlation = 1 - (within - covariance) / total
    correlation[:, 0] = 1
    last = max(0, (n - 3) // 2)
    even, odd = correlation[:, : 2 * last + 1 : 2], correlation[:, 1 : 2 * last + 2 : 2]
    pairs = even + odd  # [P, last + 1]
    # sum up to the first pair that is not positive; of that pair add only the even lag, once, if it is positive
    stop = torch.where(pairs > 0, last, torch.arange(last + 1, device=x.device)).amin(-1, keepdim=True)
    before = torch.arange(last + 1, device=x.device) < stop
    falling = pairs.cummin(-1).values
    end = even.gather(1, stop).squeeze(1)
    end = torch.where((end > 0) | (pairs.gather(1, stop).squeeze(1) >= 0), end, 0.0)
    time = (-1 + 2 * torch.where(before, falling, 0.0).sum(-1) + end).clamp_min(1 / math.log10(m * n))
    return (m * n / time).masked_fill(total.squeeze(1) == 0, math.nan)


def _autocovariance(x: Tensor, means: Tensor) -> Tensor:
    """Autocovariances of chains [P, m, n], averaged over the chains, [P, n], with one inverse transform for all of them."""
    m, n = x.shape[1:]
    size = 2 ** math.ceil(math.log2(2 * n))
    centered = x.new_empty(len(x), m, size)
    centered[..., n:] = 0
    torch.sub(x, means.unsqueeze(-1), out=centered[..., :n])
    spectrum = torch.view_as_real(torch.fft.rfft(centered)).flatten(2)
    power = spectrum.square_().sum(1).view(len(x), -1, 2).sum(-1)
    return torch.fft.irfft(power, n=size)[:, :n] / (n * m)
