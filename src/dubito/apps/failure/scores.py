r"""Scores of failure that a predictive has by itself, how well scores rank errors first, and answers where a score is low enough.

A score is `[B]`, larger is less certain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.apps.network import examples, posterior_of
from dubito.evaluation import metrics
from dubito.evaluation.judge import rank
from dubito.evaluation.measures import MEASURES, one_minus_max, predictive_entropy
from dubito.evaluation.metrics.reading import Array, labelled, suits, targets, tensor
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import between, one_of, require

# the names that the literature has for them, and those of all measures
SCORES: dict[str, Callable[[Predictive], Tensor]] = {"mcp": one_minus_max, "entropy": predictive_entropy, **MEASURES}
USUAL = ("mcp", "entropy", "mutual_information", "variation_ratio")


def scores(p: Predictive, names: Sequence[str] = USUAL) -> dict[str, Tensor]:
    """Scores of a predictive by name, each [B, *D]: "mcp" (one minus the maximum class probability), "entropy", and any measure.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]]).log())
    >>> scores(p, ["mcp", "variation_ratio"])
    {'mcp': tensor([0.3000]), 'variation_ratio': tensor([0.2500])}
    """
    for name in names:
        one_of(SCORES, score=name)
    return {name: SCORES[name](p) for name in names}


def one_minus_true(p: Predictive, y: Array) -> Tensor:
    r"""One minus the true class probability, :math:`1 - \bar p_y`, [B, *D]: the oracle, which has to be told the answer.

    Below 1/2 only where the most probable class is right, above :math:`1 - 1/C` only where it is wrong. NaN where the target is
    `ignore_index`.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> one_minus_true(p, torch.tensor([0, 1]))
    tensor([0.1000, 0.6000])
    """
    probs, target, kept = read(p, y, "one_minus_true")
    true = torch.where(kept, target, 0).unsqueeze(-1)
    return torch.where(kept, probs.scatter(-1, true, 0.0).sum(-1), torch.nan)  # the sum of all others: 1 - p without its rounding


def errors(p: Predictive, y: Array) -> Tensor:
    """Where the most probable class is not the true one, [B, *D]; False where the target is `ignore_index`.

    A prediction that is NaN is an error. One label that is on or off (`Bernoulli`) is two classes, here as in all of this package.

    >>> import dubito
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> errors(p, torch.tensor([0, 1]))
    tensor([False,  True])
    """
    return wrong(*read(p, y, "errors"))


def wrong(probs: Tensor, target: Tensor, kept: Tensor) -> Tensor:
    """Errors, [B, *D], of what `read` gives."""
    confidence, top = probs.max(-1)
    return ((top != target) | confidence.isnan()) & kept


def class_probs(p: Predictive, name: str) -> Tensor:
    """Probabilities of classes, [B, *D, K], for the function of that name; one label is two classes."""
    suits(p, name, classes=True, advice=("", "dubito.judge ranks squared errors, and metrics.threshold takes any loss"))
    if p.likelihood.indexed:
        return p.mean
    labels = p.likelihood.width(p.f_mean)
    way_out = "look at them one by one, or use dubito.judge, for which one wrong label is an error"
    require(labels == 1, f"{name} is for one class an input, and here are {labels} labels that are each on or off: {way_out}")
    return torch.cat([p.complement, p.mean], -1)


def read(p: Predictive, y: Array, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of classes, [B, *D, K], the true class, and whether there is one, [B, *D] each."""
    probs, target = class_probs(p, name), targets(p, y, name, classes=True)
    return probs, target if p.likelihood.indexed else target.squeeze(-1).long(), labelled(p, target)


class Failure(NamedTuple):
    """What a score of failure is worth.

    `fpr95`: the share of errors that are accepted where 95 % of what is right is. `aupr_error` and `aupr_success`: average
    precision with the errors, or with what is right, as what is to be found. `aurc`: the mean risk over all coverages; `excess_aurc`
    is what is left of it when the best order's is taken away.
    """

    fpr95: float
    aupr_error: float
    aupr_success: float
    auroc: float
    aurc: float
    excess_aurc: float


def failure(score: Array, is_error: Array) -> Failure:
    """All figures of one score, [N], larger is less certain, and of the errors, [N].

    >>> import torch
    >>> failure(torch.tensor([0.1, 0.2, 0.3, 0.9]), torch.tensor([False, False, False, True]))
    Failure(fpr95=0.0, aupr_error=1.0, aupr_success=1.0, auroc=1.0, aurc=0.0625, excess_aurc=0.0)
    """
    return Failure(**rank(score, is_error, Failure._fields))


def failures(
    p: Predictive, y: Array, *, names: Sequence[str] = USUAL, others: Mapping[str, Array] | None = None, oracle: bool = False
) -> dict[str, Failure]:
    """Scores of a predictive by name, and others that were found elsewhere ([B, *D] each), all judged by the errors of p.

    `oracle` adds the true class probability, "tcp", which bounds what a learned confidence can reach.

    >>> import dubito, torch
    >>> p = dubito.posteriors.predictive.LatentMixture(dubito.Categorical(), torch.tensor([[[0.9, 0.1], [0.6, 0.4]]]).log())
    >>> failures(p, torch.tensor([0, 1]), names=["mcp"])["mcp"].auroc
    1.0
    """
    probs, target, kept = read(p, y, "failures")
    every = scores(p, names) | ({"tcp": one_minus_true(p, y)} if oracle else {})
    for name, other in (others or {}).items():
        score = tensor(other)
        require(score.shape == kept.shape, f"the score {name!r} is {list(score.shape)} for predictions {list(kept.shape)}")
        every[name] = score.to(kept.device)
    is_error = wrong(probs, target, kept)[kept]
    return {name: failure(score[kept], is_error) for name, score in every.items()}


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
        one_of(SCORES, score=None if callable(self.score) else self.score)

    def fit(self, posterior: Posterior | Model | nn.Module, data: Any) -> Selector:
        """A threshold from held-out data, which is neither what the model was trained on nor what it will be judged by."""
        posterior = posterior_of(posterior)
        values, is_error = [], []
        with closing(examples(posterior.model, data)) as batches:
            for x, y in batches:
                require(y is not None, "the risk is estimated from known answers: give held-out batches of (x, y)")
                p = posterior.predict(x)
                probs, target, kept = read(p, y, "Selective")
                values.append(_score(self.score, p, x)[kept].cpu())
                is_error.append(wrong(probs, target, kept)[kept].cpu())
        require(values, "there is no data: the loader gave no batch")
        return self.choose(posterior, torch.cat(values), torch.cat(is_error))

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
    if not callable(score):
        return SCORES[score](p)
    values, wanted = tensor(score(x)), p.mean.shape[:-1]
    require(values.shape == wanted, f"the score is {list(values.shape)} for predictions {list(wanted)}: give one number for each")
    return values.to(p.mean.device)
