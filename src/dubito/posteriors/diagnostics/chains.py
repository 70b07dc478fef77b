r"""Whether chains have converged, quantity by quantity: R-hat, effective draws, energies. Draws are [chains, n, ...].

R-hat tells whether chains that started apart have converged to the same distribution. Every kind of it compares the variance between
the means of the chains with the variance inside the chains; it is 1 where they agree.

The effective sample size is the number of independent draws with the same Monte Carlo error, from the autocorrelation of the chains:

.. math:: S_{\mathrm{eff}} = \frac{S}{\hat\tau}, \quad \hat\tau = 1 + 2 \sum_{t \ge 1} \hat\rho_t, \quad
    \hat\rho_t = 1 - \frac{W - \frac1m \sum_j \hat\gamma_{jt}}{\hat V}

for S draws in m half-chains, their autocovariances :math:`\hat\gamma_{jt}` at lag t (by FFT) and the variances W and V of R-hat.
Chains that disagree therefore have few effective draws. The sum ends by the rule of Geyer (1992): in a reversible chain the sums
:math:`\hat\rho_{2k} + \hat\rho_{2k+1}` are positive and decrease with k, so the terms after the first that is not positive are noise
and left out, and a sum that increases is replaced by the one before it. Chains with negative autocorrelation can have more effective
draws than draws, at most S log10(S). It is nan for constants, for values that are not finite, and for fewer than 4 draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.tensors.checks import at_least, require

Diagnostic = Callable[[Tensor], tuple[Tensor, ...]]
NUMBERS = {"cpu": 2**19, "cuda": 2**26}  # numbers in a piece


def map_quantities(function: Diagnostic, draws: Tensor, *, answers: int, least: int = 4) -> tuple[Tensor, ...]:
    """Apply `function` to draws [chains, n, ...], in pieces [P, chains, n] in float64; its `answers`, [P] each, are returned as [...].

    The answer is nan for quantities with a draw that is not finite, for quantities that are equal in all draws (a constant, or chains
    that never moved), and for all quantities if a chain has fewer than `least` draws.
    """
    require(draws.ndim >= 2, f"draws must be [chains, n, ...], with a first axis also for one chain; got {list(draws.shape)}")
    require(not draws.is_complex(), "draws must be real numbers: pass the real and the imaginary part separately")
    (chains, n), shape = draws.shape[:2], draws.shape[2:]
    if chains < 1 or n < least or not draws.numel():
        return (torch.full(shape, math.nan, dtype=torch.float64, device=draws.device),) * answers
    flat = draws.detach().reshape(chains * n, -1)
    size = max(1, NUMBERS.get(draws.device.type, 2**22) // (chains * n))
    results = [_mask_undefined(function, piece.T.contiguous().double().view(-1, chains, n)) for piece in flat.split(size, 1)]
    return tuple(torch.cat(values).reshape(shape) for values in zip(*results, strict=True))


def map_quantity(function: Callable[[Tensor], Tensor], draws: Tensor, *, least: int = 4) -> Tensor:
    """`map_quantities` for a function with one answer."""
    return map_quantities(lambda x: (function(x),), draws, answers=1, least=least)[0]


def _mask_undefined(function: Diagnostic, x: Tensor) -> tuple[Tensor, ...]:
    low, high = x.amin((1, 2)), x.amax((1, 2))  # nan where a draw is
    defined = torch.isfinite(low) & torch.isfinite(high) & (low < high)
    return tuple(answer.masked_fill(~defined, math.nan) for answer in function(x))


def split_chains(x: Tensor) -> Tensor:
    """Both halves of every chain as separate chains, [P, 2 chains, n // 2]; an odd n loses its middle draw."""
    half = x.shape[-1] // 2
    if x.shape[-1] == 2 * half:
        return x.view(len(x), -1, half)
    return torch.cat([x[..., :half], x[..., -half:]], 1)


def normal_scores(x: Tensor) -> Tensor:
    r""":math:`\Phi^{-1}\big((r - \tfrac38) / (N + \tfrac14)\big)` for the rank r of an entry among the N of its row, [P, ...].

    Equal entries get the mean of their ranks. There are many of them, since a rejected proposal repeats a draw.

    >>> normal_scores(torch.tensor([[3.0, -1.0, 3.0, 100.0]], dtype=torch.float64))
    tensor([[ 0.0000, -1.0491,  0.0000,  1.0491]], dtype=torch.float64)
    """
    return scores_and_median(x)[0]


def scores_and_median(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normal scores [P, ...], and the median of every row [P]."""
    rows = x.flatten(1)
    count = rows.shape[1]
    order = _argsort(rows)
    values = rows.gather(1, order)
    differ = values[:, 1:] != values[:, :-1]
    table = _scores(count).to(x.device)  # indexed by doubled ranks, which are integers
    if bool(differ.all()):
        scores = table[::2].expand_as(rows)
    else:
        first = (
            torch.cat([differ.new_ones(len(rows), 1), differ], 1).flatten().nonzero().squeeze(1)
        )  # index of each group of equal entries
        size = torch.diff(first, append=first.new_tensor([rows.numel()]))
        scores = table[2 * (first % count) + size - 1].repeat_interleave(size, output_size=rows.numel()).view_as(rows)
    median = (values[:, (count - 1) // 2] + values[:, count // 2]) / 2
    return torch.empty_like(rows).scatter_(1, order, scores).view_as(x), median


def sort_rows(rows: Tensor) -> Tensor:
    """Every row sorted."""
    return _by_numpy(np.sort, rows) if rows.device.type == "cpu" else rows.sort(-1).values


def _argsort(rows: Tensor) -> Tensor:
    return _by_numpy(np.argsort, rows) if rows.device.type == "cpu" else rows.argsort(-1)


def _by_numpy(function: Callable[..., np.ndarray], rows: Tensor) -> Tensor:
    """Sort on a CPU: numpy sorts short rows eight times faster than torch does, in one thread, so several threads share the rows."""
    values, threads = rows.numpy(), min(torch.get_num_threads(), len(rows))
    if threads < 2:
        return torch.from_numpy(function(values, -1))
    with ThreadPoolExecutor(threads) as pool:
        blocks = pool.map(lambda block: function(block, -1), np.array_split(values, threads))
        return torch.from_numpy(np.concatenate(list(blocks)))


@lru_cache(maxsize=8)
def _scores(count: int) -> Tensor:
    """Normal scores of the ranks 1, 1.5, 2, ... count."""
    rank = torch.arange(2, 2 * count + 1, dtype=torch.float64) / 2
    return torch.special.ndtri((rank - 0.375) / (count + 0.25))


def rhat(draws: Tensor) -> Tensor:
    r"""R-hat of Vehtari et al. (2021): split, rank-normalized, the larger one of bulk and tails. At most 1.01 is good.

    Every chain is split into two halves, which shows a drift within a chain and gives a single chain an R-hat too. Values are replaced
    by the normal scores of their ranks among all draws, once unchanged (to compare locations) and once folded,
    :math:`|x - \mathrm{median}|` (to compare scales). With m half-chains of n draws, :math:`W` the mean of their variances
    and :math:`B / n` the variance of their means,

    .. math:: \hat R = \sqrt{\frac{n - 1}{n} + \frac{B}{n W}}

    It is inf where no chain moves and they differ, and nan for constants, for values that are not finite, and for fewer than 4 draws.

    >>> g = torch.Generator().manual_seed(0)
    >>> chains = torch.randn(4, 500, 3, generator=g)
    >>> chains[0, :, 1] += 1                        # one chain is elsewhere
    >>> chains[0, :, 2] *= 3                        # one chain is wider: the means agree, the tails do not
    >>> rhat(chains).round(decimals=2)
    tensor([1.0000, 1.1200, 1.1400], dtype=torch.float64)
    """
    return map_quantity(lambda x: rank_rhat(split_chains(x))[0], draws)


def rank_rhat(split: Tensor) -> tuple[Tensor, Tensor]:
    """`rhat` [P] of half-chains [P, m, n], and their normal scores."""
    scores, median = scores_and_median(split)
    folded = normal_scores((split - median.view(-1, 1, 1)).abs_())
    return torch.fmax(
        _rhat_of_scores(scores), _rhat_of_scores(folded)
    ), scores  # folded values may be constant, for example if there are two values


def rhat_classic(draws: Tensor) -> Tensor:
    r"""R-hat of Gelman and Rubin (1992), of whole chains and of the values themselves; nan for one chain.

    .. math:: \hat R = \sqrt{\hat V / W}, \quad \hat V = \frac{n - 1}{n} W + \frac{B}{n}, \quad
        W = \frac1m \sum_j s_j^2, \quad \frac{B}{n} = \frac{1}{m - 1} \sum_j (\bar x_j - \bar x)^2

    without the correction for degrees of freedom. Use it to compare with older figures, such as those of the HMC study of Izmailov et
    al. (2021), and `rhat` for everything else: this one misses chains that drift together and chains that differ only in scale, and
    it is meaningless where the variance is infinite. TensorFlow Probability's `potential_scale_reduction` is
    :math:`\frac{m + 1}{m} \hat R^2 - \frac{n - 1}{m n}`: a ratio of variances, without the root.

    >>> rhat_classic(torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 2.0, 1.0, 2.0]]))
    tensor(1.5000, dtype=torch.float64)
    """
    return map_quantity(_rhat_of_values, draws, least=2)


def nested_rhat(draws: Tensor, superchains: Tensor | int) -> Tensor:
    r"""R-hat for many short chains (Margossian et al. 2022): m chains from each of K starting points, in the limit of one draw each.

    A superchain is the set of chains that started at the same point; its mean has a small error even if each chain is short. With
    :math:`\hat B` the variance of the K superchains' means, and :math:`\hat W` the mean over superchains of the variance between their
    chains' means plus the mean variance inside these chains,

    .. math:: n\hat R = \sqrt{1 + \hat B / \hat W}

    `superchains` gives the superchain of every chain, [chains], or their number K: then the first chains / K chains are the first one.

    >>> g = torch.Generator().manual_seed(0)
    >>> chains = torch.randn(64, 1, 2, generator=g)             # 64 chains of one draw
    >>> chains[:, :, 1] += torch.arange(4.0).repeat_interleave(16).unsqueeze(1)
    >>> nested_rhat(chains, 4).round(decimals=2)                # the second quantity still depends on its start
    tensor([1.0500, 1.5800], dtype=torch.float64)
    """
    require(draws.ndim >= 2, f"draws must be [chains, n, ...]; got {list(draws.shape)}")
    chains, n = draws.shape[:2]
    if isinstance(superchains, int):
        if superchains < 1 or chains % superchains:
            raise ValueError(
                f"superchains must divide the chains into equal sets; got {superchains} superchains for {chains} chains"
            )
        superchains = torch.arange(superchains).repeat_interleave(chains // superchains)
    shape = list(superchains.shape)
    require(shape == [chains], f"superchains must give the superchain of each of {chains} chains; got the shape {shape}")
    order = superchains.argsort(stable=True)
    sizes = torch.unique(superchains, return_counts=True)[1].tolist()
    require(len(sizes) >= 2, f"nested R-hat needs at least two superchains, from different starting points; got {len(sizes)}")
    require(len(set(sizes)) == 1, f"superchains must have the same number of chains each; got {sizes}")
    require(
        n > 1 or sizes[0] > 1,
        "superchains of one chain with one draw have no variance inside: give them more chains or more draws",
    )

    def _ratio_of(x: Tensor) -> Tensor:
        x = x.view(len(x), len(sizes), -1, n)  # [P, K, m, n]
        means = x.mean(-1)
        within = x.var(-1).mean(-1) if n > 1 else torch.zeros_like(means[..., 0])
        between = means.var(-1) if means.shape[-1] > 1 else torch.zeros_like(within)
        return (1 + means.mean(-1).var(-1) / (within + between).mean(-1)).sqrt()

    return map_quantity(_ratio_of, draws[order.to(draws.device)], least=1)


def _ratio(within: Tensor, means: Tensor, n: int) -> Tensor:
    """sqrt(V / W) from the variances inside the chains and their means, [P, m] each; inf where no chain moves and they differ."""
    if means.shape[1] < 2:
        return torch.full_like(means[:, 0], torch.nan)
    return ((n - 1) / n + means.var(-1) / within.mean(-1)).sqrt()


def _rhat_of_scores(x: Tensor) -> Tensor:
    """R-hat of normal scores [P, m, n]. They lie around 0, so the fast formula E[x^2] - E[x]^2 of the variance is accurate."""
    n, means = x.shape[-1], x.mean(-1)
    within = torch.linalg.vector_norm(x, dim=-1).square() / n - means.square()
    within = within.where(within > 1e-13, 0.0) * (n / (n - 1))
    return _ratio(within, means, n)


def _rhat_of_values(x: Tensor) -> Tensor:
    """R-hat of values [P, m, n]."""
    still = x.amax(-1) == x.amin(-1)  # their variance is exactly 0, which rounding would miss
    return _ratio(x.var(-1).masked_fill(still, 0.0), x.mean(-1), x.shape[-1])


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


def bfmi(energy: Tensor) -> Tensor:
    r"""The Bayesian fraction of missing information of every chain (Betancourt 2016), for energies [chains, n]: [chains].

    .. math:: \sum_i (E_i - E_{i-1})^2 \Big/ \sum_i (E_i - \bar E)^2

    :math:`E_i` is the value of the Hamiltonian on the trajectory to draw i. Below 0.3, new momenta change the energy too little, and
    the chain reaches the tails only by a slow random walk. nan for a constant energy.

    >>> g = torch.Generator().manual_seed(0)
    >>> bfmi(torch.randn(2, 10000, generator=g)).round(decimals=1)            # 2 for independent energies
    tensor([2., 2.], dtype=torch.float64)
    >>> bfmi(torch.randn(1, 1000, generator=g).cumsum(1)).round(decimals=1)   # 0 for a random walk
    tensor([0.], dtype=torch.float64)
    """
    require(energy.ndim == 2, f"energy must be [chains, n]; got {list(energy.shape)}")

    def _ratio(x: Tensor) -> Tensor:
        return x.diff(dim=-1).square().sum((1, 2)) / (x - x.mean(-1, keepdim=True)).square().sum((1, 2))

    return map_quantity(_ratio, energy.T.unsqueeze(0), least=2)  # every chain is a quantity


def energy_error_per_dimension(energy_error: Tensor, dimensions: int) -> Tensor:
    r"""The variance of the energy errors per dimension, :math:`\mathrm{Var}[\Delta E] / d`, for errors [chains, n]: [chains].

    It measures the bias of a sampler without an accept step (Robnik et al. 2023). MCLMC chooses its step size so that it is about
    5e-4. inf where a step diverged, nan for fewer than two draws.

    >>> energy_error_per_dimension(torch.tensor([[0.3, -0.1, 0.2, -0.4]]), 100)
    tensor([0.0010], dtype=torch.float64)
    """
    at_least(1, dimensions=dimensions)
    require(energy_error.ndim == 2, f"energy_error must be [chains, n]; got {list(energy_error.shape)}")
    errors = energy_error.detach().to(torch.float64)
    if errors.shape[1] < 2:
        return errors.new_full(errors.shape[:1], torch.nan)
    return (errors.var(1) / dimensions).masked_fill(~torch.isfinite(errors).all(1), torch.inf)


RHAT_GOOD = 1.01  # a quantity has converged up to this R-hat
RHAT_BAD = 1.05  # above it even the largest R-hat of many quantities is no chance
SHARE = 0.95  # of the quantities should be good

Statistic = Literal["rhat", "ess_bulk", "ess_tail"]


class Convergence(NamedTuple):
    """R-hat and effective sample sizes of every quantity, [...] each."""

    rhat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def convergence(draws: Tensor) -> Convergence:
    """`rhat`, `ess_bulk` and `ess_tail` of draws [chains, n, ...] together, in two thirds of the time.

    >>> result = convergence(torch.randn(4, 100, 3, 5, generator=torch.Generator().manual_seed(0)))
    >>> result.rhat.shape, bool((result.rhat < 1.1).all())
    (torch.Size([3, 5]), True)
    """

    def _all_three(x: Tensor) -> tuple[Tensor, ...]:
        value, scores = rank_rhat(split_chains(x))
        return value, effective_draws(scores), effective_tail_draws(x)

    return Convergence(*map_quantities(_all_three, draws, answers=3))


@dataclass(frozen=True, eq=False)
class Spread:
    """R-hat and effective draws of Q quantities, [Q] each. `still` counts those equal in all draws, `broken` those not finite."""

    rhat: Tensor = field(repr=False)
    ess_bulk: Tensor = field(repr=False)
    ess_tail: Tensor = field(repr=False)
    still: int = 0
    broken: int = 0

    @staticmethod
    def of(*leaves: Tensor) -> Spread:
        """The spread of draws [chains, n, ...], with the quantities of all leaves in one row."""
        results, still, broken = [], 0, 0
        for leaf in leaves:
            result = Convergence(*(value.flatten().cpu() for value in convergence(leaf)))
            missing = result.rhat.isnan().to(leaf.device)
            if missing.any():
                finite = leaf.reshape(*leaf.shape[:2], -1)[..., missing].isfinite().all(0).all(0)
                broken += int((~finite).sum())
                still += int(finite.sum()) if leaf.shape[1] >= 4 else 0
            results.append(result)
        return Spread(*(torch.cat(values) for values in zip(*results, strict=True)), still=still, broken=broken)

    def __len__(self) -> int:
        return len(self.rhat)

    def _finite(self, name: Statistic) -> Tensor:
        values: Tensor = getattr(self, name)
        return values[~values.isnan()]

    def quantile(self, name: Statistic, level: float) -> float:
        """A quantile of the values that are not nan, rounded to the worse of two neighbors; nan if there are none."""
        values = self._finite(name)
        if not len(values):
            return math.nan
        place = (len(values) - 1) * level
        return float(values.sort().values[math.ceil(place) if name == "rhat" else math.floor(place)])

    @property
    def worst(self) -> float:
        """The largest R-hat."""
        return self.quantile("rhat", 1.0)

    @property
    def agree(self) -> float:
        """The share of quantities with an R-hat of at most 1.01."""
        return float((self._finite("rhat") <= RHAT_GOOD).double().mean())

    @property
    def fewest(self) -> float:
        """The number of effective draws, in the bulk and in the tails, that 95 % of the quantities have."""
        values = [self.quantile(name, 1 - SHARE) for name in ("ess_bulk", "ess_tail")]
        return min((value for value in values if not math.isnan(value)), default=math.nan)
