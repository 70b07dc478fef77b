r"""Whether chains that started apart have come to the same place.

All kinds of R-hat compare the spread of the chains' means with the spread inside the chains, and are 1 where they agree.
Draws are [chains, n, ...].
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.quantities import halves, one
from dubito.posteriors.diagnostics.ranks import normal_scores, scored


def rhat(draws: Tensor) -> Tensor:
    r"""R-hat of Vehtari et al. (2021): split, rank-normalised, the larger one of the bulk's and the tails'. At most 1.01 is good.

    Every chain is cut into two halves, so that a drift within a chain is seen, and a single chain has an R-hat too. Values are replaced
    by the normal scores of their ranks among all draws, once as they are (do the chains agree on the location?) and once folded,
    :math:`|x - \mathrm{median}|` (do they agree on the scale?). With m half-chains of n draws, :math:`W` the mean of their variances
    and :math:`B / n` the variance of their means,

    .. math:: \hat R = \sqrt{\frac{n - 1}{n} + \frac{B}{n W}}

    It is inf where no chain moves but they differ, and nan for constants, values that are not finite, and fewer than 4 draws.

    >>> g = torch.Generator().manual_seed(0)
    >>> chains = torch.randn(4, 500, 3, generator=g)
    >>> chains[0, :, 1] += 1                        # one chain is elsewhere
    >>> chains[0, :, 2] *= 3                        # one chain is wider: the means agree, the tails do not
    >>> rhat(chains).round(decimals=2)
    tensor([1.0000, 1.1200, 1.1400], dtype=torch.float64)
    """
    return one(lambda x: ranked(halves(x))[0], draws)


def ranked(split: Tensor) -> tuple[Tensor, Tensor]:
    """(R-hat [P], the normal scores it was found from), for half-chains [P, m, n]."""
    scores, median = scored(split)
    folded = normal_scores((split - median.view(-1, 1, 1)).abs_())
    return torch.fmax(_of_scores(scores), _of_scores(folded)), scores  # folded may be constant: of two values, say


def rhat_classic(draws: Tensor) -> Tensor:
    r"""R-hat as Gelman and Rubin (1992) have it, of whole chains and of the values themselves: nan for one chain.

    .. math:: \hat R = \sqrt{\hat V / W}, \quad \hat V = \frac{n - 1}{n} W + \frac{B}{n}, \quad
        W = \frac1m \sum_j s_j^2, \quad \frac{B}{n} = \frac{1}{m - 1} \sum_j (\bar x_j - \bar x)^2

    without the correction for degrees of freedom. It is here to compare with figures from before 2021, such as those of the HMC study
    of Izmailov et al. (2021). It does not see chains that drift together, chains that differ in scale only, or anything at all where
    the variance is infinite; use `rhat`. TensorFlow Probability's `potential_scale_reduction` is
    :math:`\frac{m + 1}{m} \hat R^2 - \frac{n - 1}{m n}`: a ratio of variances, without the root.

    >>> rhat_classic(torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 2.0, 1.0, 2.0]]))
    tensor(1.5000, dtype=torch.float64)
    """
    return one(_of_values, draws, least=2)


def nested_rhat(draws: Tensor, superchains: Tensor | int) -> Tensor:
    r"""R-hat for many short chains (Margossian et al. 2022): m chains from each of K starting points, in the limit of one draw each.

    A superchain is the chains that began at the same point; its mean has a small error even if each chain is short. With
    :math:`\hat B` the variance of the K superchains' means, and :math:`\hat W` the mean over superchains of the variance between their
    chains' means plus the mean variance inside these chains,

    .. math:: n\hat R = \sqrt{1 + \hat B / \hat W}

    `superchains` names the superchain of every chain, [chains], or is their number K: then the first chains / K are the first one.

    >>> g = torch.Generator().manual_seed(0)
    >>> chains = torch.randn(64, 1, 2, generator=g)             # 64 chains of one draw
    >>> chains[:, :, 1] += torch.arange(4.0).repeat_interleave(16).unsqueeze(1)
    >>> nested_rhat(chains, 4).round(decimals=2)                # the second quantity remembers where it started
    tensor([1.0500, 1.5800], dtype=torch.float64)
    """
    if draws.ndim < 2:
        raise ValueError(f"draws are [chains, n, ...]; got {list(draws.shape)}")
    chains, n = draws.shape[:2]
    if isinstance(superchains, int):
        if superchains < 1 or chains % superchains:
            raise ValueError(f"{chains} chains are not {superchains} superchains of equal size")
        superchains = torch.arange(superchains).repeat_interleave(chains // superchains)
    if superchains.shape != (chains,):
        raise ValueError(f"there are {chains} chains: name the superchain of each, [{chains}]; got {list(superchains.shape)}")
    order = superchains.argsort(stable=True)
    sizes = torch.unique(superchains, return_counts=True)[1]
    if len(sizes) < 2:
        raise ValueError("nested R-hat compares superchains: there must be at least two, from different starting points")
    if not bool((sizes == sizes[0]).all()):
        raise ValueError(f"superchains have the same number of chains each; got {sizes.tolist()}")
    if n == 1 and int(sizes[0]) == 1:
        raise ValueError("one chain of one draw has no spread to compare with: give more chains to a superchain, or more draws")

    def ratio(x: Tensor) -> Tensor:
        x = x.view(len(x), len(sizes), -1, n)  # [P, K, m, n]
        means = x.mean(-1)
        within = x.var(-1).mean(-1) if n > 1 else torch.zeros_like(means[..., 0])
        between = means.var(-1) if means.shape[-1] > 1 else torch.zeros_like(within)
        return (1 + means.mean(-1).var(-1) / (within + between).mean(-1)).sqrt()

    return one(ratio, draws[order.to(draws.device)], least=1)


def _ratio(within: Tensor, means: Tensor, n: int) -> Tensor:
    """sqrt(V / W) from variances inside the chains and their means, [P, m]; inf where no chain moves and they differ."""
    if means.shape[1] < 2:
        return torch.full_like(means[:, 0], torch.nan)
    return ((n - 1) / n + means.var(-1) / within.mean(-1)).sqrt()


def _of_scores(x: Tensor) -> Tensor:
    """Of normal scores [P, m, n]. They lie around 0 and apart, so that E[x^2] - E[x]^2 is as good as the slower ways to a variance."""
    n, means = x.shape[-1], x.mean(-1)
    within = torch.linalg.vector_norm(x, dim=-1).square() / n - means.square()
    within = within.where(within > 1e-13, 0.0) * (n / (n - 1))
    return _ratio(within, means, n)


def _of_values(x: Tensor) -> Tensor:
    """Of values [P, m, n]."""
    still = x.amax(-1) == x.amin(-1)  # exactly 0, where rounding would leave something
    return _ratio(x.var(-1).masked_fill(still, 0.0), x.mean(-1), x.shape[-1])
