"""The scores of a posterior on a problem, and the predictions that pictures are drawn from.

A detector or confidence score that does not suit a posterior (ConfidNet an ensemble, for example) is NaN.
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

from dubito._moved import renamed
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
from dubito.tensors.checks import require

ROWS = 1024  # inputs predicted at a time
SEVERITIES = (1, 3, 5)
SHIFTED = ("accuracy", "nll", "ece")  # metrics that are computed under corruption
FOLLOWED = (*SHIFTED, "aleatoric", "epistemic")
DECISIONS = ("auroc", "fpr95", "aupr_error", "aurc")  # of errors, ranked by 1 - the largest probability
CONFIDENCE = (*SCORES, "confidnet")  # scores that rank errors
OF_LOGITS = ("msp", "max_logit", "energy", "odin", "mutual_information")  # detectors for classification only


@dataclass(frozen=True)
class Evaluation:
    """Scores, the arrays that pictures are drawn from, and scores under corruption (corruption -> severity -> score -> number)."""

    scores: Mapping[str, float]
    arrays: Mapping[str, Tensor]
    shift: Mapping[str, Any] = field(default_factory=dict)


def predict_split(posterior: Posterior, x: Tensor, part: Part, *, seed: int) -> Predictive:
    """The predictive of all inputs, in the original units of the targets, on the CPU."""
    p = predict_in_batches(predictor(posterior, seed=seed), x, ROWS)
    return p if part.shift is None or part.scale is None else p.rescaled(part.shift, part.scale)


def evaluate(
    posterior: Posterior,
    problem: Problem,
    part: Part,
    *,
    seed: int,
    corruptions: Sequence[str] = (),
    severities: Sequence[int] = SEVERITIES,
    detectors: Sequence[str] = (),
    confidence: Sequence[str] = (),
) -> Evaluation:
    """All scores that suit the problem. Nothing is chosen on the test data."""
    p = predict_split(posterior, part.x_test, part, seed=seed)
    classes = problem.kind == "classification"
    scores = score(p, part.y_test)
    if not math.isfinite(scores["nll"]):  # left out of the means, such a fit would make its method look better than it is
        raise FloatingPointError("the predictions are not finite: lower learning_rate, or set clip")
    arrays = _classes(p, part.y_test) if classes else _regression(p, part.y_test)
    if classes:
        wrong = arrays["wrong"].bool()
        scores |= {f"errors {figure}": value for figure, value in rank(arrays["doubt"], wrong, DECISIONS).items()}
        for name in confidence:
            scores |= rank_errors(name, posterior, p, part, wrong, seed=seed)
    for name, x in part.unfamiliar.items():
        unfamiliar = _uncertainties(predict_split(posterior, x, part, seed=seed), classes=classes)
        scores |= _separations(name, arrays, unfamiliar)
        arrays |= {f"unfamiliar {name} {measure}": values for measure, values in unfamiliar.items()}
    for name in detectors if part.unfamiliar else ():
        scores |= detect_unfamiliar(name, posterior, part)
    if problem.people is not None:
        scores |= agreement(arrays["aleatoric"], problem.people)
    clean = score(p, part.y_test, FOLLOWED) if corruptions else {}
    shift = {name: {"0": clean, **_shifted(posterior, part, name, severities, seed)} for name in corruptions}
    scores |= _most_severe(shift)
    return Evaluation(scores, {name: value.detach().contiguous() for name, value in arrays.items()}, shift)


def _separations(name: str, arrays: Mapping[str, Tensor], unfamiliar: Mapping[str, Tensor]) -> dict[str, float]:
    """How well each uncertainty separates the unfamiliar inputs from the test inputs."""
    figures = {measure: separation(arrays[measure], values) for measure, values in unfamiliar.items()}
    scores = {}
    for measure, found in figures.items():
        scores[f"{name} auroc {measure}"] = found["auroc"]
        if measure == "total":
            scores[f"{name} fpr95"] = found["fpr95"]
    return scores


def check_names(detectors: Sequence[str], confidence: Sequence[str], *, classes: bool) -> None:
    """Raise a ValueError for names that are unknown, or do not suit the kind of problem."""
    for names, known, noun in ((detectors, DETECTORS, "detector"), (confidence, CONFIDENCE, "confidence score")):
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"no {noun} is called {name!r}; {hint}choose from {', '.join(known)}")
    if classes:
        return
    require(not confidence, "confidence scores need a classification: leave out --confidence")
    wrong = [name for name in detectors if name in OF_LOGITS]
    others = ", ".join(name for name in DETECTORS if name not in OF_LOGITS)
    require(not wrong, f"detector {', '.join(wrong)} needs a classification: choose from {others}")


def detect_unfamiliar(name: str, posterior: Posterior, part: Part) -> dict[str, float]:
    """How well a detector, fitted on the training part, separates each set of unfamiliar inputs from the test inputs."""
    try:
        detector = DETECTORS[name]().fit(posterior, (part.x_train, part.y_train))
        familiar = score_loader(detector, part.x_test)
        figures = {kind: separation(familiar, score_loader(detector, x)) for kind, x in part.unfamiliar.items()}
    except ValueError:
        figures = {kind: {"auroc": math.nan, "fpr95": math.nan} for kind in part.unfamiliar}
    return {f"{kind} {figure} {name}": value for kind, found in figures.items() for figure, value in found.items()}


def rank_errors(name: str, posterior: Posterior, p: Predictive, part: Part, wrong: Tensor, *, seed: int) -> dict[str, float]:
    """How well a confidence score finds the errors. ConfidNet is trained on the training part."""
    figures = dict.fromkeys(DECISIONS, math.nan)
    if name != "confidnet":
        figures = rank(SCORES[name](p), wrong, DECISIONS)
    else:
        with suppress(ValueError):
            learned = ConfidNet().fit(posterior, (part.x_train, part.y_train), seed=seed, progress=False)
            figures = rank(score_loader(learned, part.x_test), wrong, DECISIONS)
    return {f"errors {figure} by {name}": value for figure, value in figures.items()}


def agreement(aleatoric: Tensor, human: Tensor) -> dict[str, float]:
    r"""Spearman's and Pearson's correlation of a predicted aleatoric entropy [N] with the entropy of people's answers [N].

    >>> agreement(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.3, 0.4]))["human spearman"]
    1.0
    """
    spearman, pearson = _correlation(ranks(aleatoric), ranks(human)), _correlation(aleatoric, human)
    return {"human spearman": round(spearman, 12), "human pearson": round(pearson, 12)}


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; NaN where one is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else math.nan


def ranks(values: Tensor) -> Tensor:
    """The rank of each value from 0, [N] float64; equal values share the mean of their ranks.

    >>> ranks(torch.tensor([5.0, 1.0, 5.0]))
    tensor([1.5000, 0.0000, 1.5000], dtype=torch.float64)
    """
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    count = count.double()
    return (count.cumsum(0) - (count + 1) / 2)[place]


def _classes(p: Predictive, y: Tensor) -> dict[str, Tensor]:
    probs = p.mean.float()
    wrong = (probs.argmax(-1) != y).to(torch.uint8)
    return {"probs": probs, "y": y, "wrong": wrong, "doubt": measures.one_minus_max(p).float(), **_uncertainties(p, classes=True)}


def _regression(p: Predictive, y: Tensor) -> dict[str, Tensor]:
    y = y.reshape(p.mean.shape)
    return {"mean": p.mean.float(), "y": y, "pit": metrics.pit(p, y).float(), **_uncertainties(p, classes=False)}


def _uncertainties(p: Predictive, *, classes: bool) -> dict[str, Tensor]:
    """Total, aleatoric and epistemic uncertainty of every input, [N]: entropies, or variances summed over the outputs."""
    parts = p.uncertainty
    found = {"total": parts.total, "aleatoric": parts.aleatoric, "epistemic": parts.epistemic}
    return {name: (value if classes else value.sum(-1)).float() for name, value in found.items()}


def _shifted(posterior: Posterior, part: Part, name: str, severities: Sequence[int], seed: int) -> dict[str, Any]:
    found = {}
    for severity in severities:
        # one seed for the corruption, so that all methods see the same images
        x = corrupt(part.x_test, name, severity=severity)
        found[str(severity)] = score(predict_split(posterior, x, part, seed=seed), part.y_test, FOLLOWED)
    return found


def _most_severe(shift: Mapping[str, Any]) -> dict[str, float]:
    """Means over the corruptions at the highest severity."""
    if not shift:
        return {}
    top = max(next(iter(shift.values())), key=int)
    return {f"shifted {key}": sum(by[top][key] for by in shift.values()) / len(shift) for key in SHIFTED}


__getattr__ = renamed(__name__, {"people": "agreement"})
