"""What detectors of the unfamiliar have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from dubito.model import Model
from dubito.posteriors import Posterior

Given = Posterior | Model | nn.Module  # a model, or a network that returns logits, is a point at its present weights
Score = Callable[[Any], Tensor]  # inputs -> [B], larger is less familiar; dense outputs give maps [B, *D]


class Detector(Protocol):
    """Settings of a score. `data` are familiar inputs, as `dubito.fit` takes them; a detector that learns nothing needs none."""

    def fit(self, posterior: Given, data: Any = None) -> Score:
        """The score for inputs, from the posterior and from familiar data if it learns from these."""
        ...


def required(data: Any, name: str, what: str) -> None:
    """Raise, in words, where there are no data."""
    if data is None:
        raise ValueError(f"{name} learns from familiar inputs: give fit(posterior, data), {what}")
