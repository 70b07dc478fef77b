"""CIFAR-10H: what about 51 people said each of the 10,000 CIFAR-10 test images shows; ground truth for aleatoric uncertainty.

Source: Peterson, Battleday, Griffiths and Russakovsky (2019), https://github.com/jcpeterson/cifar-10h. Licence: CC BY-NC-SA 4.0.
Files: `cifar10h/cifar10h-counts.npy`, as published.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.root import locate


def cifar10h(*, root: str | Path | None = None) -> Tensor:
    """How many people chose each class for each image of `cifar10("test")`, in its order: counts [10000, 10] int64.

    >>> cifar10h().sum(1).double().mean()  # doctest: +SKIP
    tensor(51.1000, dtype=torch.float64)
    """
    path = locate("cifar10h", "cifar10h-counts.npy", root=root)
    counts = torch.from_numpy(np.load(path, allow_pickle=False)).long()
    if counts.ndim != 2 or counts.shape[1] != 10 or (counts.sum(1) < 1).any():
        raise ValueError(
            f"{path}: ten counts for every image are expected, at least one of them positive; got {list(counts.shape)}"
        )
    return counts


def label_entropy(counts: Tensor) -> Tensor:
    r"""Entropy of the people's answers to each image, :math:`-\sum_c q_c \ln q_c`, q the shares of the counts [N, C]: [N], in nats.

    >>> label_entropy(torch.tensor([[5, 5], [0, 7]]))
    tensor([0.6931, 0.0000])
    """
    shares = counts.double() / counts.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).to(torch.get_default_dtype())
