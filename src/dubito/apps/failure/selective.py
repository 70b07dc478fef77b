"""Selective prediction: an answer where the score of failure is low enough, and none elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.apps.failure.scores import SCORES, class_probs, read, wrong
from dubito.apps.network import examples, posterior_of
from dubito.evaluation import metrics
from dubito.evaluation.metrics.reading import Array, tensor
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.tensors.checks import between, one_of, require

Score = str | Callable[[Any], Array]


class Answer(NamedTuple):
    """What is answered: the most probable class of every input, whether that is to be trusted, and the score it was decided by."""

    prediction: Tensor  # [B, *D]
    accepted: Tensor  # [B, *D] of bool
    score: Tensor  # [B, *D]


@dataclass(frozen=True)
class Selective:
    r"""The most inputs that can be answered with a share of at most `risk` wrong, as held-out data tell.

    Inputs are accepted whose score is at most a threshold: the largest with

    .. math:: \frac{\#\{i : s_i \le t,\; \hat y_i \ne y_i\}}{\#\{i : s_i \le t\}} \le \mathrm{risk}.

    With `confidence`, as in .95, not the observed share is bounded but the true one, which is at most `risk` with that probability (see
    `metrics.threshold`); if that cannot be promised, nothing is accepted. `score` is the name of a score of the predictive, or anything
    that gives one from inputs: what `ConfidNet().fit(...)` or a detector of `apps.ood` returns.

    >>> import dubito
    >>> _ = torch.manual_seed(0)
    >>> net, x = nn.Linear(1, 2), torch.linspace(-3, 3, 400).unsqueeze(-1)
    >>> y = torch.bernoulli(torch.sigmoid(2 * x[:, 0])).long()
    >>> net.load_state_dict({"weight": torch.tensor([[-1.0], [1.0]]), "bias": torch.zeros(2)})
    <All keys matched successfully>
    >>> selector = Selective(risk=0.05).fit(net, (x, y))
    >>> bool(selector.risk <= 0.05), selector(torch.tensor([[0.0], [3.0]])).accepted
    (True, tensor([False,  True]))
    """

    risk: float
    score: Score = "mcp"
    confidence: float | None = None  # at which the risk is guaranteed; None takes the observed share for the risk

    def __post_init__(self):
        between(0, 1, include="low", risk=self.risk)
        between(0, 1, confidence=self.confidence)
        one_of(SCORES, score=self.score if isinstance(self.score, str) else None)

    def fit(self, posterior: Posterior | Model | nn.Module, data: Any) -> Selector:
        """A threshold from held-out data, which is neither what the model was trained on nor what it will be judged by."""
        posterior = posterior_of(posterior)
        found, is_error = [], []
        with closing(examples(posterior.model, data)) as batches:
            for x, y in batches:
                if y is None:
                    raise ValueError("a risk is known where the answers are: give held-out batches of (x, y)")
                p = posterior.predict(x)
                probs, target, kept = read(p, y, "Selective")
                found.append(_score(self.score, p, x)[kept].cpu())
                is_error.append(wrong(probs, target, kept)[kept].cpu())
        require(found, "there is no data: the loader gave no batch")
        return self.choose(posterior, torch.cat(found), torch.cat(is_error))

    def choose(self, posterior: Posterior, scores: Array, is_error: Array) -> Selector:
        """The same from scores and errors that are there already, [N] each."""
        return Selector(posterior, self.score, *metrics.threshold(scores, is_error, risk=self.risk, confidence=self.confidence))


@dataclass(frozen=True)
class Selector:
    """A posterior that may decline to answer. `coverage` and `risk` are those of the data that the threshold was chosen on; `bound` is
    what the risk on others is at most, at the confidence that was asked for (nan if none was)."""

    posterior: Posterior
    score: Score
    threshold: float
    coverage: float
    risk: float
    bound: float

    def __call__(self, x: Any) -> Answer:
        p = self.posterior.predict(x)
        probs, score = class_probs(p, "Selective"), _score(self.score, p, x)
        confidence, top = probs.max(-1)
        return Answer(top, self.accept(score) & ~confidence.isnan(), score)  # what is NaN is no answer, whatever the score

    def accept(self, scores: Array) -> Tensor:
        """Whether inputs with such scores are answered."""
        return tensor(scores) <= self.threshold


def _score(score: Score, p: Any, x: Any) -> Tensor:
    if isinstance(score, str):
        return SCORES[score](p)
    found, wanted = tensor(score(x)), p.mean.shape[:-1]
    if found.shape != wanted:
        raise ValueError(f"the score is {list(found.shape)} for predictions {list(wanted)}: it gives one number for each")
    return found.to(p.mean.device)
