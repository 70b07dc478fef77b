"""The first labels of a simulation."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.tensors.randomness import generator


def balanced(labels: Tensor, n: int, *, seed: int = 0) -> Tensor:
    """The positions of n random examples with all classes alike, as simulations of active learning begin with: [n].

    >>> y = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> y[balanced(y, 3)].sort().values
    tensor([0, 1, 2])
    """
    labels = labels.cpu()
    classes = labels.unique()
    if n % len(classes):
        raise ValueError(
            f"{n} labels cannot be shared out evenly among {len(classes)} classes: give a multiple of {len(classes)}"
        )
    each, source = n // len(classes), generator("cpu", seed, "balanced")
    parts = []
    for one in classes:
        rows = (labels == one).nonzero().squeeze(1)
        if len(rows) < each:
            raise ValueError(f"class {int(one)} has {len(rows)} examples, fewer than the {each} that are wanted of it")
        parts.append(rows[torch.randperm(len(rows), generator=source)[:each]])
    found = torch.cat(parts)
    return found[torch.randperm(len(found), generator=source)]
