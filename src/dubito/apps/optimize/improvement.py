"""Expected improvement: of one input in closed form, of several together by draws of functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.model.likelihoods import average
from dubito.posteriors.predictive import LatentMixture, Predictive


def expected_improvement(p: Predictive, best: float, *, maximize: bool = True) -> Tensor:
    r"""How much f(x) is expected to be above the best known value, [B]; for `maximize=False` below it.

    .. math:: E[\max(f - f^*, 0)] = \sum_s w_s \big[(\mu_s - f^*) \Phi(z_s) + \sigma_s \varphi(z_s)\big], \quad
        z_s = (\mu_s - f^*) / \sigma_s,

    exact for the weighted Gaussians over f that a predictive is: one of a Laplace, draws without spread of an ensemble. The noise of
    observations has no part in it: it is f that is to be high.

    >>> import dubito
    >>> p = LatentMixture(dubito.Gaussian(scale=0.1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> expected_improvement(p, 0.0)                                                  # 1 / sqrt(2 pi)
    tensor([0.3989])
    """
    if not isinstance(p, LatentMixture):
        raise TypeError(
            f"expected improvement has a closed form for Gaussians over f, not for a {type(p).__name__}: predict with how='sampled'"
        )
    if p.likelihood.discrete or p.means.ndim != 3 or p.means.shape[-1] != 1:
        raise ValueError("expected improvement is of one number an input: a regression with a single output")
    mean, sign = p.means.squeeze(-1), 1.0 if maximize else -1.0  # [S, B]
    gain = sign * (mean - best)
    weights = mean.new_full((len(mean),), 1 / len(mean)) if p.weights is None else p.weights
    if p.certain:
        return average(gain.clamp_min(0), weights)
    scale = p.covariances.reshape(mean.shape).clamp_min(torch.finfo(mean.dtype).tiny).sqrt()
    z = gain / scale
    density = (-0.5 * z * z).exp() / math.sqrt(2 * math.pi)
    return average((gain * torch.special.ndtr(z) + scale * density).clamp_min(0), weights)


def greedy_improvement(values: Tensor, best: float, k: int, *, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""k of N inputs that together improve most, one after another, and by how much: positions [k] and gains [k].

    `values` [S, N] are functions at all inputs, with `weights` [S] that sum to 1 (None: equal ones). A set's improvement is
    :math:`\sum_s w_s \max(\max_i f_s(x_i) - f^*, 0)`, of which each next input adds what the others have not: two inputs that are
    high in the same functions are not taken both.

    >>> values = torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]])
    >>> greedy_improvement(values, 0.0, 2)
    (tensor([0, 2]), tensor([1.5000, 0.5000]))
    """
    if not 1 <= k <= values.shape[1]:
        raise ValueError(f"{k} inputs were asked for, of {values.shape[1]}")
    shares = values.new_full((len(values),), 1 / len(values)) if weights is None else weights
    known = values.new_full((len(values), 1), best)
    free, chosen, gains = torch.ones(values.shape[1], dtype=torch.bool, device=values.device), [], []
    for _ in range(k):
        gain = average((values - known).clamp_min(0), shares).masked_fill(~free, -torch.inf)
        i = int(gain.argmax())
        free[i] = False
        chosen.append(i)
        gains.append(gain[i])
        known = torch.maximum(known, values[:, i : i + 1])
    return torch.tensor(chosen), torch.stack(gains)
