"""Conformal sets of classes: as many as it takes to hold the true one with a given probability."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dubito._moved import renamed_fields
from dubito.evaluation.judge.means import Means
from dubito.evaluation.metrics.reading import Array, labelled
from dubito.evaluation.recalibrate import forecasts
from dubito.evaluation.recalibrate.forecasts import Batches
from dubito.evaluation.recalibrate.rank import check_level, conformal_quantile, tell
from dubito.model.likelihoods import Bernoulli
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import one_of
from dubito.tensors.randomness import fresh_generator

SCORES = ("lac", "aps", "raps")


class SetCoverage(NamedTuple):
    """How sets did on data whose classes are known."""

    coverage: float  # share of sets that hold the true class
    size: float  # mean number of classes in a set
    by_class: Tensor  # [C], coverage of the examples of each class; nan where there are none
    n: int
    standard_error: float = math.nan  # of the coverage, over examples


@renamed_fields(randomised="randomized")
@dataclass(frozen=True)
class ConformalSets:
    r"""Sets of classes that hold the true one with probability `level`, whatever the model and the data, if those are exchangeable.

    A score tells how strange class c is at x; a set holds the classes with a score of at most the :math:`\lceil (n + 1)\,
    \mathrm{level} \rceil`-th smallest score of the n held-out examples and their true classes. The probability is over
    these examples as well; it is at least `level`, and at most 1 / (n + 1) more if no scores are tied.

    - "lac", :math:`1 - \bar p_c`: the smallest sets on average; some are empty (Sadinle et al. 2019).
    - "aps", :math:`\sum_{d: p_d > p_c} p_d + u\, p_c`: larger where the model is less sure, so that coverage is more even (Romano et
      al. 2020).
    - "raps", the same plus :math:`\mathrm{penalty} \cdot \max(0, \mathrm{rank}_c - \mathrm{free})`: no long tails of improbable classes
      (Angelopoulos et al. 2021).

    u is uniform, one for each example; `randomized=False` takes 1, for larger sets that are the same each time. With `by_class`
    every class has a quantile of its own, from the examples of that class: it is then covered in each class (Mondrian). `nonempty` adds
    the most probable class to an empty set. Labels (`Bernoulli`) have sets of {0, 1}, and each label its own quantile. A prediction
    that is NaN says nothing, and gets the set of all classes, so that the promise is kept; none may be among the held-out ones.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Categorical(), torch.tensor([[[0.7, 0.2, 0.1]] * 9]).log())
    >>> rule = ConformalSets(score="lac").fit(p, torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2]), level=0.8)
    >>> rule(p)[0], rule.threshold
    (tensor([ True,  True, False]), tensor([[0.8000]], dtype=torch.float64))
    """

    score: Literal["lac", "aps", "raps"] = "aps"
    by_class: bool = False
    randomized: bool = True
    nonempty: bool = False
    penalty: float = 0.01
    free: int = 5

    def __post_init__(self):
        one_of(SCORES, score=self.score)
        if self.penalty < 0 or self.free < 0:
            raise ValueError(f"RAPS has a penalty and a number of free classes of 0 or more; got {self.penalty} and {self.free}")

    def fit(
        self,
        predictive: Predictive | Batches,
        y: Array | None = None,
        *,
        level: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> SetRule:
        """The quantiles of held-out data; `generator` draws u."""
        check_level(level)
        found = forecasts.classes("ConformalSets", predictive, y)
        probs = _classes(found.logits, found.labels)
        truth = found.truth.reshape(len(probs), -1, 1)  # [n, L, 1]
        own = _scores(self, probs, generator).gather(-1, truth).squeeze(-1)  # [n, L]
        groups, kinds = own.shape[1], probs.shape[-1]
        if self.by_class:
            chosen = [[own[truth[:, i, 0] == k, i] for k in range(kinds)] for i in range(groups)]
        else:
            chosen = [[own[:, i]] for i in range(groups)]
        threshold = torch.stack([torch.stack([conformal_quantile(s, level) for s in row]) for row in chosen])
        tell([(len(s), f"class {k}" if self.by_class else "") for row in chosen for k, s in enumerate(row)], level, "all classes")
        return SetRule(self, threshold, level, len(probs))


@dataclass(frozen=True)
class SetRule:
    """Predictives to sets: what `ConformalSets` fits."""

    settings: ConformalSets
    threshold: Tensor  # [1, 1], or [1, C] by class; of labels [L, 1] or [L, 2]
    level: float
    n: int  # held-out examples

    def __call__(self, predictive: Predictive, *, generator: torch.Generator | None = None) -> Tensor:
        """Which classes are in the set of each input, [B, *D, C] of bool; of labels [B, *D, L, 2]: whether it may be 0, whether 1."""
        forecasts.suits("ConformalSets", predictive, classes=True)
        labels, z = isinstance(predictive.likelihood, Bernoulli), forecasts.log_forecasts(predictive)
        probs = _classes(z, labels)
        if self.threshold.shape[0] != probs.shape[-2] or self.threshold.shape[1] not in (1, probs.shape[-1]):
            width = self.threshold.shape[0] if labels else self.threshold.shape[1]
            raise ValueError(f"these sets were fitted to {width} outputs; this predictive has {z.shape[-1]}")
        sets = _scores(self.settings, probs, generator) <= self.threshold.to(probs)
        if self.settings.nonempty:
            top = torch.zeros_like(sets).scatter(-1, probs.argmax(-1, keepdim=True), True)
            sets = sets | (top & ~sets.any(-1, keepdim=True))
        sets = sets | probs.isnan().any(-1, keepdim=True).any(-2, keepdim=True)
        return sets if labels else sets.squeeze(-2)

    def judge(
        self, predictive: Predictive | Batches, y: Array | None = None, *, generator: torch.Generator | None = None
    ) -> SetCoverage:
        """Coverage and size on data that is neither that of training nor that of `fit`."""
        covered, sizes, truths, width, means = [], [], [], 0, Means()
        for p, given in forecasts.pairs("ConformalSets", predictive, y):
            sets, target = self(p, generator=generator), forecasts.targets(p, given).long()
            keep = labelled(p, target)
            sets, target = sets[keep], target[keep]  # [n, C] and [n]; of labels [n, L, 2] and [n, L]
            inside = sets.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            means.add(keep, {"coverage": inside.double().reshape(len(inside), -1).mean(1)})
            covered.append(inside.flatten().cpu())
            sizes.append(sets.sum(-1).flatten().cpu())
            truths.append(target.flatten().cpu())
            width = sets.shape[-1]
        inside, truth = torch.cat(covered).double(), torch.cat(truths)
        zero = torch.zeros(width, dtype=torch.float64)
        by_class = zero.index_add(0, truth, inside) / torch.bincount(truth, minlength=width)
        size, error = float(torch.cat(sizes).double().mean()), means.standard_errors()["coverage"]
        return SetCoverage(float(inside.mean()), size, by_class, len(inside), error)


def _classes(z: Tensor, labels: bool) -> Tensor:
    """Log probabilities, or log odds of labels, [..., C] to probabilities [..., L, K]. One function for both sides of a rule: where
    scores are tied, the last bit decides what is in a set."""
    return torch.stack([torch.sigmoid(-z), torch.sigmoid(z)], -1) if labels else z.exp().unsqueeze(-2)


def _scores(settings: ConformalSets, probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """How strange each class is, in the shape of probs [..., K]."""
    if settings.score == "lac":
        return 1 - probs
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    if settings.randomized:
        source = fresh_generator(probs.device) if generator is None else generator
        u = torch.rand(*probs.shape[:-1], 1, generator=source, dtype=probs.dtype, device=source.device).to(probs.device)
    else:
        u = 1.0
    score = before + u * ordered
    if settings.score == "raps":
        rank = torch.arange(1, probs.shape[-1] + 1, dtype=probs.dtype, device=probs.device)
        score = score + settings.penalty * (rank - settings.free).clamp_min(0)
    return torch.empty_like(score).scatter(-1, order, score)
