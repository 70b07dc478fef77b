r"""R-hat: whether chains that started apart have converged to the same distribution.

Every kind of R-hat compares the variance between the means of the chains with the variance inside the chains; it is 1 where they agree.
Draws are [chains, n, ...].
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.quantities import map_quantity, split_chains
from dubito.posteriors.diagnostics.ranks import normal_scores, scores_and_median
from dubito.tensors.checks import require


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
