"""Digits: 1,797 real handwritten digits, 8 x 8 grey, ten classes; bundled with scikit-learn.

Source: the test part of Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), UCI Machine Learning
Repository. Licence: CC BY 4.0; scikit-learn, which carries the file, is BSD-3-Clause.
"""

import torch

from dubito.evaluation.data.examples import Split
from dubito.tensors.checks import require


def digits(*, seed: int = 0, test: float = 0.25) -> Split:
    """Images [N, 1, 8, 8] in [0, 1] and labels [N], shuffled by `seed`; the share `test` of them is the test part.

    >>> split = digits(seed=0)
    >>> split.x_train.shape, split.y_test.shape
    (torch.Size([1348, 1, 8, 8]), torch.Size([449]))
    """
    require(0 < test < 1, f"test is the share of the examples kept for testing, between 0 and 1, not {test}")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, 8, 8)  # the file counts from 0 to 16
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, held = order.split([len(x) - round(test * len(x)), round(test * len(x))])
    return Split(x[train], y[train], x[held], y[held])
