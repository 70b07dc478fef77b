"""Which classes are taken for which, and how far prediction and truth overlap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.tensors.checks import require


@dataclass(frozen=True)
class Confusion:
    r"""Counts of pixels by true and predicted class; those of two batches add up.

    .. math:: \mathrm{IoU}_c = \frac{n_{cc}}{\sum_d n_{cd} + \sum_d n_{dc} - n_{cc}}

    `miou` is the mean over classes that occur, in the truth or in the prediction; the others are nan in `iou`.

    >>> found = Confusion.of(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 0]]), classes=3)
    >>> found.iou, found.miou, found.accuracy
    (tensor([0.5000, 0.5000,    nan], dtype=torch.float64), 0.5, 0.66...)
    """

    counts: Tensor  # [C, C] int64, truth by prediction

    @staticmethod
    def of(prediction: Tensor, y: Tensor, *, classes: int, ignore_index: int | None = None) -> Confusion:
        """From predicted and true classes of the same shape; positions whose truth is `ignore_index` are left out."""
        same = prediction.shape == y.shape
        require(same, f"predictions {list(prediction.shape)} and labels {list(y.shape)} must have the same shape")
        prediction, y = prediction.flatten(), y.flatten().to(prediction.device)
        if ignore_index is not None:
            prediction, y = prediction[y != ignore_index], y[y != ignore_index]
        for name, values in (("predictions", prediction), ("labels", y)):
            if values.numel() and (int(values.min()) < 0 or int(values.max()) >= classes):
                raise ValueError(
                    f"the {name} go from {int(values.min())} to {int(values.max())}, but there are {classes} classes; a label to be "
                    "skipped is given as ignore_index"
                )
        return Confusion(torch.bincount(classes * y.long() + prediction.long(), minlength=classes**2).reshape(classes, classes))

    def __add__(self, other: Confusion) -> Confusion:
        return Confusion(self.counts + other.counts)

    def cpu(self) -> Confusion:
        """The same counts on the CPU."""
        return Confusion(self.counts.cpu())

    @property
    def n(self) -> int:
        """All pixels that were counted."""
        return int(self.counts.sum())

    @property
    def iou(self) -> Tensor:
        """Intersection over union of every class, [C] in float64."""
        hit = self.counts.diagonal().double()
        return hit / (self.counts.sum(0) + self.counts.sum(1) - hit)

    @property
    def recall(self) -> Tensor:
        """The share of every class's pixels that are found, [C] in float64; nan for classes that are not there."""
        return self.counts.diagonal().double() / self.counts.sum(1)

    @property
    def miou(self) -> float:
        """The mean of `iou` over the classes that occur."""
        return float(self.iou.nanmean())

    @property
    def accuracy(self) -> float:
        """The share of all pixels that are right."""
        return float(self.counts.diagonal().sum().double() / self.counts.sum())

    @property
    def class_accuracy(self) -> float:
        """The mean recall of the classes that are there: a rare one counts as much as the road."""
        return float(self.recall.nanmean())
