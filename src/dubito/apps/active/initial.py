"""The first labels of a simulation."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.tensors.checks import require
from dubito.tensors.randomness import generator


def balanced(labels: Tensor, n: int, *, seed: int = 0) -> Tensor:
    """The positions of n random examples with all classes alike, as simulations of active learning begin with: [n].

    >>> y = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> y[balanced(y, 3)].sort().values
    tensor([0, 1, 2])
    """
    labels = labels.cpu()
    classes = labels.unique()
    require(n % len(classes) == 0, f"n must be a multiple of {len(classes)}, the number of classes; got {n}")
    each, source = n // len(classes), generator("cpu", seed, "balanced")
    parts = []
    for label in classes:
        rows = (labels == label).nonzero().squeeze(1)
        require(len(rows) >= each, f"class {int(label)} has {len(rows)} examples, fewer than the {each} that are needed of it")
        parts.append(rows[torch.randperm(len(rows), generator=source)[:each]])
    chosen = torch.cat(parts)
    return chosen[torch.randperm(len(chosen), generator=source)]
