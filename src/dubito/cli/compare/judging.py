"""What a posterior is worth on a problem: its scores, and the predictions that pictures are drawn from.

A score of the unfamiliar or of failure that is asked for by name and does not suit a posterior (ConfidNet an ensemble) is NaN.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.apps.failure import SCORES, ConfidNet
from dubito.apps.network import score_loader
from dubito.apps.ood import DETECTORS
from dubito.evaluation import measures, metrics
from dubito.evaluation.judge import rank, score, separation
from dubito.evaluation.judge.batches import predict_in_batches, predictor
from dubito.evaluation.problems import Part, Problem
from dubito.evaluation.shift import corrupt
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import Predictive

ROWS = 1024  # inputs predicted at a time
SEVERITIES = (1, 3, 5)
SHIFTED = ("accuracy", "nll", "ece")  # the metrics that are followed under corruption
FOLLOWED = (*SHIFTED, "aleatoric", "epistemic")
DECISIONS = ("auroc", "fpr95", "aupr_error", "aurc")  # of errors, ranked by 1 - the largest probability
CONFIDENCE = (*SCORES, "confidnet")  # what errors can be ranked by
OF_LOGITS = ("msp", "max_logit", "energy", "odin", "mutual_information")  # detectors that only classes have


@dataclass(frozen=True)
class Judged:
    scores: Mapping[str, float]
    arrays: Mapping[str, Tensor]
    shift: Mapping[str, Any] = field(default_factory=dict)  # corruption -> severity -> score -> number


def predicted(posterior: Posterior, x: Tensor, part: Part, *, seed: int) -> Predictive:
    """The predictive of all inputs, in the targets' own units, on the CPU."""
    p = predict_in_batches(predictor(posterior, seed=seed), x, ROWS)
    return p if part.shift is None or part.scale is None else p.rescaled(part.shift, part.scale)


def judged(
    posterior: Posterior,
    problem: Problem,
    part: Part,
    *,
    seed: int,
    corruptions: Sequence[str] = (),
    severities: Sequence[int] = SEVERITIES,
    detectors: Sequence[str] = (),
    confidence: Sequence[str] = (),
) -> Judged:
    """All scores that suit the problem. Nothing is chosen here: the test data are only looked at."""
    p = predicted(posterior, part.x_test, part, seed=seed)
    classes = problem.kind == "classification"
    scores = score(p, part.y_test)
    if not math.isfinite(scores["nll"]):  # left out of the means, such a fit would make its method look better than it is
        raise FloatingPointError("its predictions are not finite numbers: lower learning_rate, or set clip")
    arrays = _classes(p, part.y_test) if classes else _regression(p, part.y_test)
    if classes:
        wrong = arrays["wrong"].bool()
        scores |= {f"errors {figure}": value for figure, value in rank(arrays["doubt"], wrong, DECISIONS).items()}
        for name in confidence:
            scores |= ranked(name, posterior, p, part, wrong, seed=seed)
    for name, x in part.unfamiliar.items():
        strange = _doubts(predicted(posterior, x, part, seed=seed), classes=classes)
        for measure, values in strange.items():
            figures = separation(arrays[measure], values)
            scores[f"{name} auroc {measure}"] = figures["auroc"]
            if measure == "total":
                scores[f"{name} fpr95"] = figures["fpr95"]
            arrays[f"unfamiliar {name} {measure}"] = values
    for name in detectors if part.unfamiliar else ():
        scores |= detected(name, posterior, part)
    if problem.people is not None:
        scores |= people(arrays["aleatoric"], problem.people)
    shift = {
        name: {"0": score(p, part.y_test, FOLLOWED), **_shifted(posterior, part, name, severities, seed)} for name in corruptions
    }
    if shift:
        scores |= _worst(shift)
    return Judged(scores, {name: value.detach().contiguous() for name, value in arrays.items()}, shift)


def check(detectors: Sequence[str], confidence: Sequence[str], *, classes: bool) -> None:
    """Raise a ValueError, in words, for names that are not known or not for this kind of problem."""
    for names, known, what in ((detectors, DETECTORS, "detector"), (confidence, CONFIDENCE, "confidence score")):
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"no {what} is called {name!r}; {hint}there are {', '.join(known)}")
    if confidence and not classes:
        raise ValueError("confidence scores rank right and wrong answers, and a regression has neither: leave them out")
    wrong = [name for name in detectors if name in OF_LOGITS]
    if wrong and not classes:
        fine = ", ".join(name for name in DETECTORS if name not in OF_LOGITS)
        raise ValueError(f"{wrong[0]} is for classes, and this is a regression: take some of {fine}")


def detected(name: str, posterior: Posterior, part: Part) -> dict[str, float]:
    """How well a detector of `dubito.apps.ood`, fitted on the training part alone, tells every unfamiliar set from the test inputs."""
    try:
        detector = DETECTORS[name]().fit(posterior, (part.x_train, part.y_train))
        familiar = score_loader(detector, part.x_test)
        figures = {kind: separation(familiar, score_loader(detector, x)) for kind, x in part.unfamiliar.items()}
    except ValueError:
        figures = {kind: {"auroc": math.nan, "fpr95": math.nan} for kind in part.unfamiliar}
    return {f"{kind} {figure} {name}": value for kind, found in figures.items() for figure, value in found.items()}


def ranked(name: str, posterior: Posterior, p: Predictive, part: Part, wrong: Tensor, *, seed: int) -> dict[str, float]:
    """How well a score of `dubito.apps.failure` finds the errors; what ConfidNet learns it learns from the training part alone."""
    figures = dict.fromkeys(DECISIONS, math.nan)
    if name != "confidnet":
        figures = rank(SCORES[name](p), wrong, DECISIONS)
    else:
        with suppress(ValueError):
            learned = ConfidNet().fit(posterior, (part.x_train, part.y_train), seed=seed, progress=False)
            figures = rank(score_loader(learned, part.x_test), wrong, DECISIONS)
    return {f"errors {figure} by {name}": value for figure, value in figures.items()}


def people(aleatoric: Tensor, human: Tensor) -> dict[str, float]:
    r"""How well a predicted aleatoric entropy [N] goes with the entropy of people's answers [N]: Spearman's and Pearson's correlation.

    >>> people(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.3, 0.4]))["human spearman"]
    1.0
    """

    def pearson(a: Tensor, b: Tensor) -> float:
        a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
        scale = float(a.norm() * b.norm())
        return float(a @ b) / scale if scale > 0 else math.nan  # where one is constant there is nothing to correlate

    return {
        "human spearman": round(pearson(ranks(aleatoric), ranks(human)), 12),
        "human pearson": round(pearson(aleatoric, human), 12),
    }


def ranks(values: Tensor) -> Tensor:
    """The place of each value in order, [N] float64; those that are equal share the mean of their places.

    >>> ranks(torch.tensor([5.0, 1.0, 5.0]))
    tensor([1.5000, 0.0000, 1.5000], dtype=torch.float64)
    """
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    count = count.double()
    return (count.cumsum(0) - (count + 1) / 2)[place]


def _classes(p: Predictive, y: Tensor) -> dict[str, Tensor]:
    probs = p.mean.float()
    wrong = (probs.argmax(-1) != y).to(torch.uint8)
    return {"probs": probs, "y": y, "wrong": wrong, "doubt": measures.one_minus_max(p).float(), **_doubts(p, classes=True)}


def _regression(p: Predictive, y: Tensor) -> dict[str, Tensor]:
    y = y.reshape(p.mean.shape)
    return {"mean": p.mean.float(), "y": y, "pit": metrics.pit(p, y).float(), **_doubts(p, classes=False)}


def _doubts(p: Predictive, *, classes: bool) -> dict[str, Tensor]:
    """Total, aleatoric and epistemic uncertainty of every input, [N]: entropies, or variances summed over the outputs."""
    parts = p.uncertainty
    found = {"total": parts.total, "aleatoric": parts.aleatoric, "epistemic": parts.epistemic}
    return {name: (value if classes else value.sum(-1)).float() for name, value in found.items()}


def _shifted(posterior: Posterior, part: Part, name: str, severities: Sequence[int], seed: int) -> dict[str, Any]:
    found = {}
    for severity in severities:
        # the seed of the corruption is the same for all methods and seeds: all see the same images
        x = corrupt(part.x_test, name, severity=severity)
        found[str(severity)] = score(predicted(posterior, x, part, seed=seed), part.y_test, FOLLOWED)
    return found


def _worst(shift: Mapping[str, Any]) -> dict[str, float]:
    """Means over the corruptions at the highest severity."""
    top = max(next(iter(shift.values())), key=int)
    return {f"shifted {key}": sum(by[top][key] for by in shift.values()) / len(shift) for key in SHIFTED}
