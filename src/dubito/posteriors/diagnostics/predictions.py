"""Predictives compared with a reference, and with themselves as draws are added."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.model.likelihoods import Bernoulli, align
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors import tree


def agreement(p: Predictive | Tensor, reference: Predictive | Tensor) -> Tensor:
    r"""The share of inputs for which two predictives have the same most probable class; class probabilities are [..., C].

    >>> agreement(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    tensor(0.5000, dtype=torch.float64)
    """
    one, two = _probabilities(p, reference)
    return (one.argmax(-1) == two.argmax(-1)).double().mean()


def total_variation(p: Predictive | Tensor, reference: Predictive | Tensor) -> Tensor:
    r"""The mean over inputs of the total variation distance, :math:`\frac12 \sum_c |p_c - q_c|`: from 0 to 1.

    >>> total_variation(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    tensor(0.2000, dtype=torch.float64)
    """
    one, two = _probabilities(p, reference)
    return 0.5 * (one - two).abs().sum(-1).mean()


def log_scores(p: Predictive, y: Tensor) -> Tensor:
    """ln p(y | x, draw) for every draw and input, [S, B]; positions of dense outputs are summed."""
    if not isinstance(p, LatentMixture) or not p.certain or p.weights is not None:
        raise ValueError('log scores by draw are for predictives of equal draws: predict(x, how="sampled")')
    y = p.likelihood.target(tree.move(tree.tensors(y), p.means.device), p.means[0])
    score = p.likelihood.log_prob(p.means, y, align(p.params or {}, p.means))
    return score.flatten(2).sum(2) if score.ndim > 2 else score


def running_log_score(p: Predictive, y: Tensor, *, chains: int = 1) -> Tensor:
    r"""The mean log score of the first k draws of every chain together, for k = 1 ... n: [n].

    .. math:: \frac1B \sum_i \ln \frac{1}{k m} \sum_{j \le m} \sum_{s \le k} p(y_i \mid x_i, \theta_{js})

    It rises and then stays: where it still rises at the end, more draws would predict better.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.8, 0.2]], [[0.4, 0.6]]]).log())
    >>> running_log_score(p, torch.tensor([0])).exp()
    tensor([0.8000, 0.6000], dtype=torch.float64)
    """
    return running(log_scores(p, y), chains)


def running(scores: Tensor, chains: int = 1) -> Tensor:
    """`running_log_score` of log scores [S, B]."""
    if chains < 1 or len(scores) % chains:
        raise ValueError(f"{len(scores)} draws are not {chains} chains of equal length")
    together = scores.detach().double().view(chains, -1, *scores.shape[1:]).logsumexp(0)  # [n, B]
    count = torch.arange(1, len(together) + 1, device=scores.device, dtype=torch.float64) * chains
    return together.logcumsumexp(0).flatten(1).mean(1) - count.log()


def _probabilities(p: Predictive | Tensor, reference: Predictive | Tensor) -> tuple[Tensor, Tensor]:
    one, two = _one(p), _one(reference)
    if one.shape != two.shape:
        raise ValueError(
            f"the predictives are of different shapes, {list(one.shape)} and {list(two.shape)}: give both the same inputs"
        )
    if one.ndim < 2 or not one.numel():
        raise ValueError(f"class probabilities are [B, C]; got {list(one.shape)}")
    return one, two.to(one.device)


def _one(p: Predictive | Tensor) -> Tensor:
    if isinstance(p, Predictive):
        if not p.likelihood.discrete:
            raise ValueError(f"these are for classes, and {type(p.likelihood).__name__} predicts numbers")
        probs = p.mean.detach()
        # of labels, each is a choice of its own
        probs = torch.stack([1 - probs, probs], -1) if isinstance(p.likelihood, Bernoulli) else probs
    else:
        probs = torch.as_tensor(p).detach()
    probs = probs.double()
    wrong = (probs < -1e-6) | (probs.sum(-1, keepdim=True) - 1).abs().gt(1e-3) | probs.isnan()
    if bool(wrong.any()):
        raise ValueError(
            "class probabilities are not negative and sum to 1 over the last axis: are these logits, or in another layout?"
        )
    return probs
