r"""How many independent draws would tell as much: effective sample sizes, from the autocorrelation of the chains.

.. math:: S_{\mathrm{eff}} = \frac{S}{\hat\tau}, \quad \hat\tau = 1 + 2 \sum_{t \ge 1} \hat\rho_t, \quad
    \hat\rho_t = 1 - \frac{W - \frac1m \sum_j \hat\gamma_{jt}}{\hat V}

for S draws in m half-chains, their autocovariances :math:`\hat\gamma_{jt}` at lag t (by FFT) and the variances W and V of R-hat, so
that chains that disagree have few effective draws. The sum ends by Geyer's (1992) rule: in a reversible chain sums of two neighbours,
:math:`\hat\rho_{2k} + \hat\rho_{2k+1}`, are positive and fall with k, so what comes after the first that is not positive is
noise, and one that rises is taken to be as large as the one before. Chains whose draws alternate can have more effective draws
than draws, at most S log10(S).

Draws are [chains, n, ...]; constants, values that are not finite and fewer than 4 draws have no effective sample size: nan.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.quantities import halves, one
from dubito.posteriors.diagnostics.ranks import normal_scores, sort

TAILS = (0.05, 0.95)


def ess_bulk(draws: Tensor) -> Tensor:
    """Effective draws for the middle of a distribution, from the normal scores of the ranks (Vehtari et al. 2021). 400 is good.

    >>> g = torch.Generator().manual_seed(0)
    >>> bool(3600 < ess_bulk(torch.randn(4, 1000, generator=g)) < 4400)
    True
    """
    return one(lambda x: effective(normal_scores(halves(x))), draws)


def ess_tail(draws: Tensor) -> Tensor:
    """Effective draws for the tails: the smaller number for the estimated 5 % and 95 % quantiles (Vehtari et al. 2021). 400 is good.

    >>> g = torch.Generator().manual_seed(0)
    >>> bool(3600 < ess_tail(torch.randn(4, 1000, generator=g)) < 4400)
    True
    """
    return one(tails, draws)


def ess_mean(draws: Tensor) -> Tensor:
    """Effective draws for the mean, from the values themselves.

    >>> g = torch.Generator().manual_seed(0)
    >>> bool(3600 < ess_mean(torch.randn(4, 1000, generator=g)) < 4400)
    True
    """
    return one(lambda x: effective(halves(x)), draws)


def mcse_mean(draws: Tensor) -> Tensor:
    r"""Monte Carlo standard error of the mean over all draws, :math:`s / \sqrt{S_{\mathrm{eff}}}`.

    >>> g = torch.Generator().manual_seed(0)
    >>> mcse_mean(torch.randn(4, 1000, generator=g))           # 1 / sqrt(4000) is 0.0158
    tensor(0.0158, dtype=torch.float64)
    """
    return one(lambda x: x.flatten(1).std(1) / effective(halves(x)).sqrt(), draws)


def tails(x: Tensor) -> Tensor:
    """`ess_tail` of chains [P, m, n]."""
    ordered = sort(x.flatten(1))
    # the share below a quantile is known as well as the share up to the value below it, and that is exact
    at = [ordered[:, math.floor(level * (ordered.shape[1] - 1))].view(-1, 1, 1) for level in TAILS]
    low, high = (effective(halves((x <= value).to(x.dtype))) for value in at)
    return torch.fmin(low, high)  # one of them may have no answer, where nearly all draws are equal


def effective(x: Tensor) -> Tensor:
    """Effective draws for the mean of chains [P, m, n]; nan where the variance is 0."""
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
    # up to the first pair that is not positive; of that one only the even lag counts, once, if it is positive
    stop = torch.where(pairs > 0, last, torch.arange(last + 1, device=x.device)).amin(-1, keepdim=True)
    before = torch.arange(last + 1, device=x.device) < stop
    falling = pairs.cummin(-1).values
    end = even.gather(1, stop).squeeze(1)
    end = torch.where((end > 0) | (pairs.gather(1, stop).squeeze(1) >= 0), end, 0.0)
    time = (-1 + 2 * torch.where(before, falling, 0.0).sum(-1) + end).clamp_min(1 / math.log10(m * n))
    return (m * n / time).masked_fill(total.squeeze(1) == 0, math.nan)


def _autocovariance(x: Tensor, means: Tensor) -> Tensor:
    """Of chains [P, m, n], the mean over the chains, [P, n]: one transform back for all of them."""
    m, n = x.shape[1:]
    size = 2 ** math.ceil(math.log2(2 * n))
    centred = x.new_empty(len(x), m, size)
    centred[..., n:] = 0
    torch.sub(x, means.unsqueeze(-1), out=centred[..., :n])
    spectrum = torch.view_as_real(torch.fft.rfft(centred)).flatten(2)
    power = spectrum.square_().sum(1).view(len(x), -1, 2).sum(-1)
    return torch.fft.irfft(power, n=size)[:, :n] / (n * m)
