"""Compare predictives with a reference, and with themselves as draws are added."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.model.likelihoods import align
from dubito.posteriors.predictive import Predictive
from dubito.tensors import tree
from dubito.tensors.checks import at_least, require


def agreement(p: Predictive | Tensor, reference: Predictive | Tensor) -> Tensor:
    """The share of inputs for which two predictives have the same most probable class. Tensors are class probabilities [..., C].

    >>> agreement(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    tensor(0.5000, dtype=torch.float64)
    """
    p, q = _probabilities(p, reference)
    return (p.argmax(-1) == q.argmax(-1)).double().mean()


def total_variation(p: Predictive | Tensor, reference: Predictive | Tensor) -> Tensor:
    r"""The total variation distance :math:`\frac12 \sum_c |p_c - q_c|`, averaged over inputs: from 0 to 1.

    >>> total_variation(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    tensor(0.2000, dtype=torch.float64)
    """
    p, q = _probabilities(p, reference)
    return 0.5 * (p - q).abs().sum(-1).mean()


def log_scores(p: Predictive, y: Tensor) -> Tensor:
    """ln p(y | x, draw) of every draw and input, [S, B]; summed over the positions of dense outputs."""
    draws = p.mixture
    if draws is None or not draws.certain or draws.weights is not None:
        raise ValueError('log_scores needs a predictive of draws with equal weights: predict(x, how="sampled")')
    y = p.likelihood.target(tree.move(tree.tensors(y), p.means.device), p.means[0])
    score = p.likelihood.log_prob(p.means, y, align(draws.params or {}, p.means))
    return score.flatten(2).sum(2) if score.ndim > 2 else score


def running_log_score(p: Predictive, y: Tensor, *, chains: int = 1) -> Tensor:
    r"""The mean log score of the mixture of the first k draws of every chain, for k = 1 ... n: [n].

    .. math:: \frac1B \sum_i \ln \frac{1}{k m} \sum_{j \le m} \sum_{s \le k} p(y_i \mid x_i, \theta_{js})

    If it still rises at the end, more draws would improve the predictions.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]]).log())
    >>> running_log_score(p, torch.tensor([0])).exp()
    tensor([0.8000, 0.6000], dtype=torch.float64)
    """
    return running_score(log_scores(p, y), chains)


def running_score(scores: Tensor, chains: int = 1) -> Tensor:
    """`running_log_score` of log scores [S, B]."""
    at_least(1, chains=chains)
    require(
        len(scores) % chains == 0, f"chains must divide the draws into equal lengths; got {chains} chains for {len(scores)} draws"
    )
    together = scores.detach().double().view(chains, -1, *scores.shape[1:]).logsumexp(0)  # [n, B]
    count = torch.arange(1, len(together) + 1, device=scores.device, dtype=torch.float64) * chains
    return together.logcumsumexp(0).flatten(1).mean(1) - count.log()


def _probabilities(p: Predictive | Tensor, reference: Predictive | Tensor) -> tuple[Tensor, Tensor]:
    first, second = _class_probabilities(p), _class_probabilities(reference)
    shape = list(first.shape)
    require(first.shape == second.shape, f"both must be for the same inputs; got the shapes {shape} and {list(second.shape)}")
    require(len(shape) >= 2 and first.numel(), f"class probabilities must be [B, C]; got {shape}")
    return first, second.to(first.device)


def _class_probabilities(p: Predictive | Tensor) -> Tensor:
    if isinstance(p, Predictive):
        require(p.likelihood.discrete, f"this compares class probabilities; {type(p.likelihood).__name__} predicts numbers")
        probs = p.mean.detach()
        probs = torch.stack([1 - probs, probs], -1) if p.likelihood.separate else probs  # a choice for each label
    else:
        probs = torch.as_tensor(p).detach()
    probs = probs.double()
    wrong = (probs < -1e-6) | (probs.sum(-1, keepdim=True) - 1).abs().gt(1e-3) | probs.isnan()
    message = (
        "class probabilities must not be negative and must sum to 1 over the last axis: are these logits, or in another layout?"
    )
    require(not bool(wrong.any()), message)
    return probs
