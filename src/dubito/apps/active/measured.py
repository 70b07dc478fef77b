r"""Acquisition functions that score every candidate by itself, from its predictive: `[B]`, larger is more worth a label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.apps.active.acquisition import Choice, best
from dubito.apps.active.view import View, expected_log_noise
from dubito.evaluation import measures
from dubito.model.likelihoods import MultiTask, average
from dubito.posteriors.predictive import LatentMixture, Predictive, StudentT
from dubito.tensors.checks import require


def bald(p: Predictive) -> Tensor:
    r"""What a label tells of the weights (Houlsby et al. 2011): :math:`I[y; \theta] = H[y] - E_\theta H[y \mid \theta]` in nats.

    Of classes it is `measures.mutual_information`. Of numbers it is that of a Gaussian with the predictive's variance, summed over
    the outputs: :math:`\frac12 (\ln \mathrm{Var}[y] - E_\theta \ln \sigma_\theta^2)`, exact if the predictive is Gaussian. Of several
    tasks it is the sum over the tasks.

    >>> import dubito
    >>> p = LatentMixture(dubito.Gaussian(scale=1.0), torch.zeros(1, 1, 1), cov=torch.full((1, 1, 1), 3.0))
    >>> bald(p)                                               # ln(4 / 1) / 2
    tensor([0.6931])
    """
    if isinstance(p, LatentMixture) and isinstance(p.likelihood, MultiTask):
        return torch.stack([bald(p.task(name)) for name in p.likelihood.tasks]).sum(0)
    if p.likelihood.discrete:
        return measures.mutual_information(p)
    if isinstance(p, StudentT):  # in units of a noise whose mean may be infinite
        return 0.5 * torch.log1p(p.spread[0]).sum(-1)
    # the noise differs between draws: the mean of its entropy, not the entropy of its mean
    noise = expected_log_noise(p) if isinstance(p, LatentMixture) else p.uncertainty.aleatoric.log()
    return 0.5 * (p.uncertainty.total.log() - noise).clamp_min(0).sum(-1)


def mean_std(p: Predictive) -> Tensor:
    r"""Mean standard deviation of the class probabilities over draws, :math:`\frac1C \sum_c \sqrt{\mathrm{Var}_s[p_{sc}]}`.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> mean_std(p)
    tensor([0.4000])
    """
    if not p.likelihood.discrete:
        return p.uncertainty.epistemic.sqrt().mean(-1)
    if not isinstance(p, LatentMixture):
        raise ValueError(f"mean_std needs draws of the network's output, which a {type(p).__name__} does not have")
    return average((p.probs - p.mean) ** 2, p.draw_weights).sqrt().mean(-1)


# the names that the literature has for them, and those of all measures
SCORES: dict[str, Callable[[Predictive], Tensor]] = {
    "entropy": measures.predictive_entropy,
    "bald": bald,
    "variation_ratio": measures.variation_ratio,
    "margin": measures.margin,
    "least_confidence": measures.one_minus_max,
    "mean_std": mean_std,
    "variance": measures.total_variance,
    **measures.MEASURES,
}


@dataclass(frozen=True)
class Measured:
    """Label first what a measure of uncertainty is largest for. Dense outputs count with the mean over their positions.

    `score` is a name ("entropy", "bald", "variation_ratio", "margin", "least_confidence", "mean_std", "variance", or any of
    `dubito.measures`), or a function of a predictive, `Predictive -> [B]`.

    >>> import dubito
    >>> from dubito.apps.active import Pool, View
    >>> model = dubito.Model(torch.nn.Linear(1, 2), dubito.Categorical())
    >>> posterior = dubito.posteriors.Gaussian.diagonal(model, {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)},
    ...                                                 {"weight": torch.ones(2, 1), "bias": torch.ones(2)})
    >>> view = View(posterior, Pool(torch.tensor([[0.0], [5.0], [1.0]])), torch.arange(3))
    >>> Measured("bald").choose(view, 2, torch.Generator()).positions               # the furthest is known least
    tensor([1, 2])
    """

    score: str | Callable[[Predictive], Tensor] = "bald"

    def __post_init__(self):
        known = not isinstance(self.score, str) or self.score in SCORES
        require(known, f"there is no score {self.score!r}; there are {', '.join(SCORES)}")

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """The measure of every candidate, [N]."""
        function = SCORES[self.score] if isinstance(self.score, str) else self.score
        parts = []
        for p in view.predictions():
            values, n = function(p), p.means.shape[1]
            require(values.shape[:1] == (n,), f"a score must give one number for each input, [{n}]; got {list(values.shape)}")
            parts.append(values.flatten(1).mean(1) if values.ndim > 1 else values)
        return torch.cat(parts)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores."""
        return best(self.scores(view, generator), k, generator)


@dataclass(frozen=True)
class Random:
    """Label anything: what the others are compared with. It looks at no prediction."""

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """Uniform random numbers, [N]."""
        return torch.rand(len(view), generator=generator)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores."""
        return best(self.scores(view, generator), k, generator)
