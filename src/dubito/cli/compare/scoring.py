"""The scores of a posterior on a problem, and the predictions that pictures are drawn from.

A detector or confidence score that does not suit a posterior (ConfidNet an ensemble, for example) is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from dubito.evaluation.judge.stream import Predictor, predict_in_batches, predictor
from dubito.evaluation.problems import Problem, Split
from dubito.evaluation.shift import corrupt
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import Predictive
from dubito.tensors.checks import require, suggestion

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


def evaluate(
    posterior: Posterior | Predictor,
    problem: Problem,
    split: Split,
    *,
    seed: int,
    fix: Callable[[Predictive], Predictive] | None = None,
    corruptions: Sequence[str] = (),
    severities: Sequence[int] = SEVERITIES,
    detectors: Sequence[str] = (),
    confidence: Sequence[str] = (),
) -> Evaluation:
    """All scores that suit the problem, of predictions that `fix` recalibrates. Nothing is chosen on the test data."""
    classes, predict_rows = problem.kind == "classification", predictor(posterior, seed=seed)

    def predict(x: Tensor) -> Predictive:
        """The predictive of all inputs, in the original units of the targets, on the CPU."""
        p = predict_in_batches(predict_rows, x, ROWS)
        p = p if fix is None else fix(p)
        return p if split.shift is None or split.scale is None else p.rescaled(split.shift, split.scale)

    p = predict(split.x_test)
    scores = score(p, split.y_test)
    if not math.isfinite(scores["nll"]):  # left out of the means, such a fit would make its method look better than it is
        raise FloatingPointError("the predictions are not finite: lower learning_rate, or set clip")
    arrays = (_classes if classes else _regression)(p, split.y_test) | _uncertainties(p, classes=classes)
    if classes:
        wrong = arrays["wrong"].bool()
        scores |= {f"errors {figure}": value for figure, value in rank(arrays["doubt"], wrong, DECISIONS).items()}
        for name in confidence:
            scores |= rank_errors(name, posterior, p, split, wrong, seed=seed)
    for name, x in split.unfamiliar.items():
        for measure, values in _uncertainties(predict(x), classes=classes).items():
            figures = separation(arrays[measure], values)
            scores[f"{name} auroc {measure}"] = figures["auroc"]
            scores |= {f"{name} fpr95": figures["fpr95"]} if measure == "total" else {}
            arrays[f"unfamiliar {name} {measure}"] = values
    for name in detectors if split.unfamiliar else ():
        scores |= detect_unfamiliar(name, posterior, split)
    if problem.people is not None:
        scores |= agreement(arrays["aleatoric"], problem.people)
    shift = {}
    for name in corruptions:
        # one seed for the corruption, so that all methods see the same images
        inputs = {0: split.x_test} | {severity: corrupt(split.x_test, name, severity=severity) for severity in severities}
        shift[name] = {str(level): score(predict(x), split.y_test, FOLLOWED) for level, x in inputs.items()}
    for key in SHIFTED if shift else ():
        scores[f"shifted {key}"] = sum(by[str(max(severities))][key] for by in shift.values()) / len(shift)
    return Evaluation(scores, {name: value.detach().contiguous() for name, value in arrays.items()}, shift)


def check_names(detectors: Sequence[str], confidence: Sequence[str], *, classes: bool) -> None:
    """Raise a ValueError for names that are unknown, or do not suit the kind of problem."""
    for names, known, noun in ((detectors, DETECTORS, "detector"), (confidence, CONFIDENCE, "confidence score")):
        for name in names:
            require(name in known, f"no {noun} is called {name!r}; {suggestion(name, known)}")
    if classes:
        return
    require(not confidence, "confidence scores need a classification: leave out --confidence")
    wrong = [name for name in detectors if name in OF_LOGITS]
    others = ", ".join(name for name in DETECTORS if name not in OF_LOGITS)
    require(not wrong, f"detector {', '.join(wrong)} needs a classification: choose from {others}")


def detect_unfamiliar(name: str, posterior: Posterior | Predictor, split: Split) -> dict[str, float]:
    """How well a detector, fitted on the training rows, separates each set of unfamiliar inputs from the test inputs."""
    figures = {kind: {"auroc": math.nan, "fpr95": math.nan} for kind in split.unfamiliar}
    if isinstance(posterior, Posterior):
        with suppress(ValueError):
            detector = DETECTORS[name]().fit(posterior, (split.x_train, split.y_train))
            familiar = score_loader(detector, split.x_test)
            figures = {kind: separation(familiar, score_loader(detector, x)) for kind, x in split.unfamiliar.items()}
    return {f"{kind} {figure} {name}": value for kind, found in figures.items() for figure, value in found.items()}


def rank_errors(
    name: str, posterior: Posterior | Predictor, p: Predictive, split: Split, wrong: Tensor, *, seed: int
) -> dict[str, float]:
    """How well a confidence score finds the errors. ConfidNet is trained on the training rows."""
    figures = dict.fromkeys(DECISIONS, math.nan)
    if name != "confidnet":
        figures = rank(SCORES[name](p), wrong, DECISIONS)
    elif isinstance(posterior, Posterior):
        with suppress(ValueError):
            learned = ConfidNet().fit(posterior, (split.x_train, split.y_train), seed=seed, progress=False)
            figures = rank(score_loader(learned, split.x_test), wrong, DECISIONS)
    return {f"errors {figure} by {name}": value for figure, value in figures.items()}


def agreement(aleatoric: Tensor, human: Tensor) -> dict[str, float]:
    r"""Spearman's and Pearson's correlation of a predicted aleatoric entropy [N] with the entropy of people's answers [N].

    >>> agreement(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.3, 0.4]))["human spearman"]
    1.0
    """
    from scipy.stats import rankdata

    ranks = (torch.from_numpy(rankdata(values.cpu())) for values in (aleatoric, human))
    spearman, pearson = _correlation(*ranks), _correlation(aleatoric, human)
    return {"human spearman": round(spearman, 12), "human pearson": round(pearson, 12)}


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; NaN where one is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else math.nan


def _classes(p: Predictive, y: Tensor) -> dict[str, Tensor]:
    probs = p.mean.float()
    wrong = (probs.argmax(-1) != y).to(torch.uint8)
    return {"probs": probs, "y": y, "wrong": wrong, "doubt": measures.one_minus_max(p).float()}


def _regression(p: Predictive, y: Tensor) -> dict[str, Tensor]:
    y = y.reshape(p.mean.shape)
    return {"mean": p.mean.float(), "y": y, "pit": metrics.pit(p, y).float()}


def _uncertainties(p: Predictive, *, classes: bool) -> dict[str, Tensor]:
    """Total, aleatoric and epistemic uncertainty of every input, [N]: entropies, or variances summed over the outputs."""
    values = {name: getattr(p.uncertainty, name) for name in ("total", "aleatoric", "epistemic")}
    return {name: (value if classes else value.sum(-1)).float() for name, value in values.items()}


__getattr__ = renamed(__name__, {"people": "agreement"})
