"""Where labels change: a second task that label maps hold for nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.tensors.checks import at_least


def edges(labels: Tensor, *, width: int = 1, ignore_index: int = -100) -> Tensor:
    """1 where another label lies within `width` pixels (up, down, aside or across), 0 elsewhere; [B, H, W] as the labels are.

    Pixels that are `ignore_index` stay so, and are no other label for those beside them.

    >>> edges(torch.tensor([[[0, 0, 0, 2, 2]]]))
    tensor([[[0, 0, 1, 1, 0]]])
    """
    if labels.ndim != 3 or labels.is_floating_point():
        raise ValueError(f"label maps are whole numbers [B, H, W]; got {list(labels.shape)} of {labels.dtype}")
    at_least(1, width=width)
    void = labels == ignore_index
    if not labels.numel() or bool(void.all()):
        return labels.clone()
    known = labels[~void]
    if int(known.max()) >= 2**24 or int(known.min()) <= -(2**24):
        raise ValueError("labels of edges are small whole numbers: these are too large to be told apart")
    low, high = int(known.min()) - 1, int(known.max()) + 1
    whole = labels.long()  # bytes have no number below 0
    largest = _largest(torch.where(void, low, whole), width)
    least = -_largest(-torch.where(void, high, whole), width)
    other = (largest != whole) | (least != whole)
    return torch.where(void, labels, other.to(labels.dtype))


def edge_distance(labels: Tensor, *, cap: int = 8, ignore_index: int = -100) -> Tensor:
    """How many pixels lie between each pixel and the nearest edge, from 0 beside it to `cap` where none is near: [B, H, W], float32.

    NaN where the label is `ignore_index`: `HeteroscedasticGaussian(missing=True)` leaves those out.

    >>> edge_distance(torch.tensor([[[0, 0, 0, 2, 2]]]), cap=4)
    tensor([[[2., 1., 0., 0., 1.]]])
    """
    at_least(1, cap=cap)
    near = torch.stack([edges(labels, width=k, ignore_index=ignore_index) == 1 for k in range(1, cap + 1)])
    distance = (cap - near.sum(0)).to(torch.float32)
    return distance.masked_fill(labels == ignore_index, torch.nan)


def _largest(labels: Tensor, width: int) -> Tensor:
    """The largest label within `width` pixels."""
    return F.max_pool2d(labels.float().unsqueeze(1), 2 * width + 1, 1, width).squeeze(1).to(labels.dtype)
