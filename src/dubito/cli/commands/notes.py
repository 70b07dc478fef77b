"""Notes on the scores of a fit: what a person should know before using it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping

from torch import Tensor

ENOUGH = 50  # held-out rows from which the coverage of intervals is judged
USUAL = (0.75, 0.99)  # coverage of 90 % intervals that calls for no note
RELY = "check it on further rows with `dubito evaluate` before you rely on it"
REMEDY = "`dubito fit TABLE` without a method calibrates it, as does dubito.recalibrate.Variance"
ADVICE = {
    "epochs": "more --epochs",
    "learning_rate": "another --learning-rate",
    "step_size": "another --step-size",
    "burn_in": "a longer --burn-in",
}


def notes(scores: Mapping[str, float], train: Tensor, held_out: Tensor, flags: Container[str]) -> Iterator[str]:
    """Notes on the scores of the held-out targets. `flags` are the flags of the methods, of which some may help.

    >>> import torch
    >>> y = torch.tensor([[1.0], [3.0]])
    >>> next(notes({"rmse": 1.2}, y, y, {"epochs"}))
    'on the held-out rows the fit is no better than always predicting the mean of the training rows (rmse 1): try more --epochs'
    """
    better, constant = _against_mean(scores, train, held_out) if "rmse" in scores else _against_mode(scores, train, held_out)
    if not better:
        advice = [text for flag, text in ADVICE.items() if flag in flags and not (flag == "burn_in" and "epochs" in flags)]
        hint = f": try {' or '.join(advice)}" if advice else ""
        yield f"on the held-out rows the fit is no better than always predicting {constant}{hint}"
    yield from calibration_note(scores, len(held_out))


def calibration_note(
    scores: Mapping[str, float | None], rows: int, where: str = "held-out", remedy: str = REMEDY
) -> Iterator[str]:
    """A note on intervals that contain too few or too many of the targets, and what to do.

    >>> next(calibration_note({"coverage": 0.5}, 100)).partition(":")[0]
    'the 90 % intervals contain 50% of the held-out targets'
    """
    coverage = scores.get("coverage")
    if coverage is None or rows < ENOUGH or USUAL[0] <= coverage <= USUAL[1]:
        return
    size = "small" if coverage < 0.9 else "large"
    yield f"the 90 % intervals contain {coverage:.0%} of the {where} targets: the predicted uncertainty is too {size}; {remedy}"


def _against_mean(scores: Mapping[str, float], train: Tensor, held_out: Tensor) -> tuple[bool, str]:
    """Whether a regression beats the mean of the training targets."""
    constant = float((held_out.double() - train.double().mean(0)).square().mean().sqrt())
    return scores["rmse"] < constant, f"the mean of the training rows (rmse {constant:.4g})"


def _against_mode(scores: Mapping[str, float], train: Tensor, held_out: Tensor) -> tuple[bool, str]:
    """Whether a classification beats the most frequent class; at the same accuracy, by its log loss."""
    counts = train.bincount()
    constant = float((held_out == counts.argmax()).double().mean())
    shares = counts.double() / len(train)
    guess = float(-shares.log()[held_out].mean()) if int(held_out.max()) < len(shares) else math.inf
    gain = (scores["accuracy"] - constant) * len(held_out)  # in rows
    better = gain > 0.5 or (gain > -0.5 and scores["nll"] < guess)
    return better, f"the most frequent class (accuracy {constant:.4g})"
