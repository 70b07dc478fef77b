"""Images to classify: scikit-learn's digits, the MNIST family (28 x 28 grey), and CIFAR-10 (32 x 32 in colour), ten classes each.

| set | files | source | licence |
|---|---|---|---|
| digits | bundled with scikit-learn | Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998) | CC BY 4.0 |
| MNIST | mnist/*-ubyte.gz | LeCun, Cortes and Burges, http://yann.lecun.com/exdb/mnist | CC BY-SA 3.0 |
| Fashion-MNIST | fashion-mnist/*-ubyte.gz | https://github.com/zalandoresearch/fashion-mnist | MIT |
| notMNIST | notmnist/*-ubyte.gz | https://github.com/davidflanagan/notMNIST-to-MNIST | MIT |
| KMNIST | kmnist/kmnist-*.npz | Clanuwat et al., https://github.com/rois-codh/kmnist | CC BY-SA 4.0 |
| CIFAR-10 | cifar10/*.webp, *.npy | Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html | for research |
| CIFAR-10H | cifar10h/cifar10h-counts.npy | Peterson et al. (2019), https://github.com/jcpeterson/cifar-10h | CC BY-NC-SA 4.0 |

scikit-learn, which carries the digits, is BSD-3-Clause; CIFAR-10 has no licence text. The files are as published; of CIFAR-10 lossless
WebP sheets `train_00.webp` ... and `test_00.webp` ..., each a grid of 32 x 32 tiles in the original order, row by row, with
`train_labels.npy` and `test_labels.npy`.
"""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.examples import Examples, Part, Split, check_part, locate
from dubito.tensors.checks import between, require


def mnist(part: Part = "train", *, root: str | Path | None = None) -> Examples:
    """Handwritten digits: x [N, 1, 28, 28] in [0, 1], y [N]; 60,000 to train and 10,000 to test."""
    return _idx("mnist", part, root)


def fashion_mnist(part: Part = "train", *, root: str | Path | None = None) -> Examples:
    """Articles of clothing: x [N, 1, 28, 28] in [0, 1], y [N]; 60,000 to train and 10,000 to test."""
    return _idx("fashion-mnist", part, root)


def notmnist(part: Part = "test", *, root: str | Path | None = None) -> Examples:
    """The letters A to J in many typefaces: x [N, 1, 28, 28] in [0, 1], y [N]; the unfamiliar for an MNIST network."""
    return _idx("notmnist", part, root)


def kmnist(part: Part = "test", *, root: str | Path | None = None) -> Examples:
    """Cursive Japanese characters: x [N, 1, 28, 28] in [0, 1], y [N]; the unfamiliar for an MNIST network."""
    check_part(part)
    arrays = []
    for what in ("imgs", "labels"):
        with np.load(locate("kmnist", f"kmnist-{part}-{what}.npz", root=root), allow_pickle=False) as file:
            arrays.append(torch.from_numpy(file["arr_0"]))
    return _examples(*arrays)


def read_idx(path: str | Path) -> Tensor:
    """The bytes of a gzipped idx file, in the shape that its header gives: uint8 [N, ...]."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error
    # The header is 0, 0, 8 (for uint8), the number of axes, then the length of each as a big-endian int32.
    require(len(content) >= 4 and content[:3] == b"\x00\x00\x08", f"{path} is not an idx file of bytes")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} holds {len(content) - start} values where its header promises {math.prod(shape)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


def _idx(folder: str, part: str, root: str | Path | None) -> Examples:
    check_part(part)
    prefix = {"train": "train", "test": "t10k"}[part]
    images = read_idx(locate(folder, f"{prefix}-images-idx3-ubyte.gz", root=root))
    labels = read_idx(locate(folder, f"{prefix}-labels-idx1-ubyte.gz", root=root))
    return _examples(images, labels)


def _examples(images: Tensor, labels: Tensor) -> Examples:
    require(len(images) == len(labels), f"{len(images)} images do not go with {len(labels)} labels")
    return Examples(images.unsqueeze(1).float().div_(255), labels.long())


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


def digits(*, seed: int = 0, test: float = 0.25) -> Split:
    """Images [N, 1, 8, 8] in [0, 1] and labels [N], shuffled by `seed`; the share `test` of them is the test part.

    >>> split = digits(seed=0)
    >>> split.x_train.shape, split.y_test.shape
    (torch.Size([1348, 1, 8, 8]), torch.Size([449]))
    """
    between(0, 1, test=test)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, 8, 8)  # the file counts from 0 to 16
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, held = order.split([len(x) - round(test * len(x)), round(test * len(x))])
    return Split(x[train], y[train], x[held], y[held])
