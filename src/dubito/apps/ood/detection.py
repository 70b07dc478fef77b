"""How well a score keeps the unfamiliar apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.evaluation.judge import rank


class Detection(NamedTuple):
    """`auroc`; average precision with the unfamiliar, or the familiar, as what is to be found; and the share of unfamiliar inputs that
    are accepted where 95 % of the familiar are."""

    auroc: float
    aupr_out: float
    aupr_in: float
    fpr95: float


def detection(familiar: Tensor, unfamiliar: Tensor) -> Detection:
    """All figures of a score, larger is less familiar, of two sets of inputs, [N] and [M]. Average precisions depend on N / M.

    >>> detection(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))
    Detection(auroc=0.875, aupr_out=0.8333..., aupr_in=0.95, fpr95=0.5)
    """
    score = torch.cat([scores.detach().flatten().to(familiar.device, torch.float64) for scores in (familiar, unfamiliar)])
    unknown = torch.arange(len(score), device=score.device) >= familiar.numel()
    return Detection(*rank(score, unknown, ("auroc", "aupr_error", "aupr_success", "fpr95")).values())
