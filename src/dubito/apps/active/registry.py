"""Acquisition functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from dubito.apps.active.acquisition import Acquisition
from dubito.apps.active.batchbald import BatchBALD
from dubito.apps.active.epig import EPIG
from dubito.apps.active.measured import Measured, Random
from dubito.apps.active.randomized import Randomized
from dubito.evaluation.measures import MEASURES
from dubito.posteriors.predictive import Predictive

ACQUISITIONS: dict[str, Callable[..., Acquisition]] = {
    "entropy": partial(Measured, "entropy"),
    "bald": partial(Measured, "bald"),
    "variation_ratio": partial(Measured, "variation_ratio"),
    "margin": partial(Measured, "margin"),
    "mean_std": partial(Measured, "mean_std"),
    "least_confidence": partial(Measured, "least_confidence"),
    "variance": partial(Measured, "variance"),
    "random": Random,
    "epig": EPIG,
    "batchbald": BatchBALD,
    "power_bald": partial(Randomized, Measured("bald"), "power"),
    "softmax_bald": partial(Randomized, Measured("bald"), "softmax"),
    "softrank_bald": partial(Randomized, Measured("bald"), "softrank"),
}


def acquisition(given: str | Acquisition | Callable[[Predictive], Tensor]) -> Acquisition:
    """An acquisition function from its name, from the name of any measure, or from a score `Predictive -> [B]` of one's own.

    >>> acquisition("margin")
    Measured(score='margin')
    """
    if isinstance(given, str):
        if given in ACQUISITIONS:
            return ACQUISITIONS[given]()
        if given in MEASURES:
            return Measured(given)
        raise ValueError(f"there is no acquisition function {given!r}; there are {', '.join([*ACQUISITIONS, *MEASURES])}")
    if isinstance(given, type):
        raise TypeError(f"an acquisition function is an object: write {given.__name__}() in the place of {given.__name__}")
    if hasattr(given, "choose"):
        return cast(Acquisition, given)
    if callable(given):
        return Measured(given)
    raise TypeError(f"an acquisition function is a name, an object with `choose` or a function of a predictive; got {given!r}")
