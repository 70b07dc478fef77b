"""The settings of a fit as one value, which `fit`, the loop, checkpoints and applications pass on whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dubito.inference.method import Event
from dubito.inference.start import Weights
from dubito.network.examples import Data
from dubito.tensors.checks import counts, require
from dubito.tensors.processes import Distributed


@dataclass(frozen=True)
class FitOptions:
    """The keyword arguments of `dubito.fit`, which documents them.

    >>> FitOptions(accumulate=0)
    Traceback (most recent call last):
        ...
    ValueError: accumulate must be at least 1; got 0
    """

    start: Weights | Sequence[Weights] | None = None
    n_data: int | None = None
    temperature: float = 1.0
    device: torch.device | str | None = None
    seed: int = 0
    batch_size: int = 128
    accumulate: int = 1
    precision: Literal["bfloat16"] | None = None
    validation: Data | None = None
    patience: int | None = None
    checkpoint: str | os.PathLike | None = None
    checkpoint_every: float = 60.0
    resume: bool = False
    store_dtype: Literal["bfloat16"] | None = None
    memory: float = 4.0
    progress: bool | None = None
    callbacks: Sequence[Callable[[Event], object]] = ()
    distributed: Distributed = "auto"
    exchange_dtype: Literal["bfloat16"] | None = None

    def __post_init__(self):
        for name in ("batch_size", "accumulate"):
            require(getattr(self, name) is not None, f"{name} must be a whole number; got None")
        counts(batch_size=self.batch_size, accumulate=self.accumulate, n_data=self.n_data)
        require(
            self.patience is None or self.validation is not None,
            f"patience={self.patience} needs validation data: give validation=...",
        )
        require(
            self.precision in (None, "bfloat16"),
            f"precision must be None or 'bfloat16'; got {self.precision!r} (float16 would need loss scaling)",
        )
        for name in ("store_dtype", "exchange_dtype"):
            value = getattr(self, name)
            require(value in (None, "bfloat16"), f"{name} must be None or 'bfloat16'; got {value!r}")
        require(
            not self.resume or self.checkpoint is not None, "resume=True needs a folder to resume from: give checkpoint='folder'"
        )
