"""Data as batches with targets, and anything that predicts as one function of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.inference.batches import Arrays
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.network.examples import split_batch
from dubito.posteriors.posterior import Posterior, inputs_of
from dubito.posteriors.predictive import Predictive, concatenate
from dubito.tensors.checks import require
from dubito.tensors.randomness import borrowed_generators, fork_rng

Predictor = Callable[[Any], Predictive]


def predictor(
    posterior: Posterior | Predictor, *, how: str | None = None, draws: int | None = None, memory: float = 1.0, seed: int = 0
) -> Predictor:
    """A posterior with the options of its `predict`, or any function from inputs to a `Predictive`, as such a function."""
    if isinstance(posterior, Posterior):
        return partial(posterior.predict, how=how, draws=draws, memory=memory, seed=seed)
    if not callable(posterior):
        raise TypeError(f"expected a posterior, or a function from inputs to a Predictive; got a {type(posterior).__name__}")
    require(how is None and draws is None, "`how` and `draws` are for posteriors: leave them out for a function")

    def predict(x: Any) -> Predictive:
        """The function's predictive, checked."""
        p = posterior(x)
        if not isinstance(p, Predictive):
            advice = "for outputs f [B, ..., C] return LatentMixture(likelihood, f[None])"
            raise TypeError(f"the function returns a {type(p).__name__}: {advice}")
        return p

    return predict


def model_of(posterior: Posterior | Predictor) -> Model | None:
    """The model of a posterior; None for a function."""
    return posterior.model if isinstance(posterior, Posterior) else None


def input_dtype(model: Model | None) -> torch.dtype:
    """The dtype of the network's weights, to which NumPy's float64 inputs are converted."""
    return torch.get_default_dtype() if model is None else model.dtype


def predict_in_batches(predict: Predictor, x: Tensor, size: int, transform: Callable[[Tensor], Any] | None = None) -> Predictive:
    """The predictive of all rows of x (or of transform(x)), from batches of `size`, on the CPU."""
    parts = (rows if transform is None else transform(rows) for rows in x.split(size))
    return concatenate([predict(part).to("cpu") for part in parts])


def for_each_batch(
    data: Any, model: Model | None, take: Callable[[Any, Any], int], *, size: int, title: str, unit: str, progress: bool | None
) -> None:
    """Call take(x, y) for every batch of the data. It returns how many `unit`s it has seen, which the progress bar shows.

    `data` is a tuple (x, y), a Dataset (both in batches of `size`), a DataLoader or any iterable of batches. Global generators are
    put back at the end.
    """
    loader = _batches(data, input_dtype(model), size)
    total = _length(loader)
    bar = Progress(title, total, show=progress if total else False)
    with bar, borrowed_generators(loader), fork_rng():  # a DataLoader draws from the global generator, even unshuffled
        for i, batch in enumerate(loader):
            x, y = split_batch(batch) if model is None else inputs_of(model, batch)
            require(y is not None, "the batches hold inputs only: scores need the targets as well")
            bar.update(i + 1, {unit: take(x, y)})


def _batches(data: Any, dtype: torch.dtype, size: int) -> Iterable[Any]:
    if isinstance(data, tuple) and len(data) == 2 and any(isinstance(part, Tensor | np.ndarray) for part in data):
        if not isinstance(data[1], Tensor | np.ndarray | dict):
            raise TypeError(f"in data (x, y), y must be a tensor, an array or a dict of these; y is a {type(data[1]).__name__}")
        return Arrays.of(data, dtype, size, shuffle=False)
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=size)
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise TypeError(f"data must be a tuple (x, y), a Dataset, a DataLoader or batches; got a {type(data).__name__}")
    return data


def _length(loader: Iterable[Any]) -> int:
    """The number of batches, or 0 where it is not known."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 0
