"""Expected improvement: in closed form for one input, by drawn functions for several inputs together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.model.likelihoods import average
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors.checks import between


def expected_improvement(p: Predictive, best: float, *, maximize: bool = True) -> Tensor:
    r"""The expected improvement of f(x) over the best known value, [B]; with `maximize=False` below it.

    .. math:: E[\max(f - f^*, 0)] = \sum_s w_s \big[(\mu_s - f^*) \Phi(z_s) + \sigma_s \varphi(z_s)\big], \quad
        z_s = (\mu_s - f^*) / \sigma_s,

    exact for a weighted mixture of Gaussians over f: one for a Laplace posterior, one without variance for each member of an ensemble.
    It is about f, so the noise of observations does not enter.

    >>> import dubito
    >>> p = LatentMixture(dubito.Gaussian(scale=0.1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> expected_improvement(p, 0.0)                                                  # 1 / sqrt(2 pi)
    tensor([0.3989])
    """
    if not isinstance(p, LatentMixture):
        raise TypeError(
            f"expected improvement needs a mixture of Gaussians over f; got {type(p).__name__}: predict with how='sampled'"
        )
    if p.likelihood.discrete or p.means.ndim != 3 or p.means.shape[-1] != 1:
        raise ValueError(
            f"expected improvement needs a regression with a single output; got means of shape {list(p.means.shape)}"
        )
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
    r"""Choose k of N inputs greedily by their joint improvement: positions [k] and the gain of each [k].

    `values` [S, N] are drawn functions at all inputs, with `weights` [S] that sum to 1 (None: equal). The improvement of a set is
    :math:`\sum_s w_s \max(\max_i f_s(x_i) - f^*, 0)`, and the gain of an input is what it adds to those before it. Inputs that are
    high in the same functions are therefore not chosen together.

    >>> values = torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]])
    >>> greedy_improvement(values, 0.0, 2)
    (tensor([0, 2]), tensor([1.5000, 0.5000]))
    """
    between(1, values.shape[1], k=k, include="both")
    shares = values.new_full((len(values),), 1 / len(values)) if weights is None else weights
    highest = values.new_full((len(values), 1), best)
    chosen: list[int] = []
    gains: list[Tensor] = []
    for _ in range(k):
        gain = average((values - highest).clamp_min(0), shares)
        gain[chosen] = -torch.inf
        i = int(gain.argmax())
        chosen.append(i)
        gains.append(gain[i])
        highest = torch.maximum(highest, values[:, i : i + 1])
    return torch.tensor(chosen), torch.stack(gains)
