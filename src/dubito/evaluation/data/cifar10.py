"""CIFAR-10: 32 x 32 colour images in ten classes, 50,000 to train and 10,000 to test.

Source: Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html; published for research, without a licence text.
Files: lossless WebP sheets `cifar10/train_00.webp` ... and `test_00.webp` ..., each a grid of 32 x 32 tiles in the
original order, row by row, with `train_labels.npy` and `test_labels.npy`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.examples import Examples, Part, check_part
from dubito.evaluation.data.root import locate
from dubito.tensors.checks import require

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(part: Part = "train", *, root: str | Path | None = None) -> Examples:
    """Images x [N, 3, 32, 32] in [0, 1] and labels y [N], in the original order; `CLASSES` names the labels.

    >>> x, y = cifar10("test")  # doctest: +SKIP
    >>> x.shape, CLASSES[y[0]]  # doctest: +SKIP
    (torch.Size([10000, 3, 32, 32]), 'cat')
    """
    check_part(part)
    labels = torch.from_numpy(np.load(locate("cifar10", f"{part}_labels.npy", root=root), allow_pickle=False)).long()
    first = locate("cifar10", f"{part}_00.webp", root=root)
    images = torch.cat([_tiles(path) for path in sorted(first.parent.glob(f"{part}_[0-9][0-9].webp"))])
    require(len(images) == len(labels), f"{first.parent}: {len(images)} {part} images do not go with {len(labels)} labels")
    return Examples(images.float().div_(255), labels)


def _tiles(path: Path) -> Tensor:
    """One sheet cut into its tiles: uint8 [N, 3, 32, 32]."""
    from PIL import Image

    with Image.open(path) as image:
        sheet = torch.from_numpy(np.array(image.convert("RGB")))  # [R * 32, K * 32, 3]
    return sheet.unfold(0, 32, 32).unfold(1, 32, 32).reshape(-1, 3, 32, 32)  # from [R, K, 3, 32, 32]
