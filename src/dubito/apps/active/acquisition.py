"""What acquisition functions have in common: they choose which inputs of a pool are worth a label."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dubito.apps.active.view import View


class Choice(NamedTuple):
    """Which candidates to label, best first, and what each is worth by the acquisition's own score."""

    positions: Tensor  # [k], among the candidates of the view
    scores: Tensor  # [k]


class Acquisition(Protocol):
    """Settings of an acquisition function."""

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates to label next."""
        ...


class Scored(Acquisition, Protocol):
    """An acquisition function that gives every candidate a score of its own, whatever else is chosen with it."""

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """What each candidate is worth, [N]: larger is labelled first."""
        ...


def check_finite(scores: Tensor) -> None:
    """An error if scores hold NaN."""
    if bool(scores.isnan().any()):
        raise ValueError("the scores hold NaN, so the model's predictions are not finite: check its training")


def best(scores: Tensor, k: int, generator: torch.Generator) -> Choice:
    """The k largest scores; those that are tied are taken in random order.

    >>> best(torch.tensor([0.1, 0.9, 0.5]), 2, torch.Generator())
    Choice(positions=tensor([1, 2]), scores=tensor([0.9000, 0.5000]))
    """
    check_finite(scores)
    order = torch.randperm(len(scores), generator=generator).to(scores.device)
    top = torch.topk(scores[order], k)
    return Choice(order[top.indices], top.values)
