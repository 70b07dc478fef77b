"""The MNIST family: 28 x 28 grey images in ten classes, read from the published files.

| set | files | source | licence |
|---|---|---|---|
| MNIST | mnist/*-ubyte.gz | LeCun, Cortes and Burges, http://yann.lecun.com/exdb/mnist | CC BY-SA 3.0 |
| Fashion-MNIST | fashion-mnist/*-ubyte.gz | https://github.com/zalandoresearch/fashion-mnist | MIT |
| notMNIST | notmnist/*-ubyte.gz | https://github.com/davidflanagan/notMNIST-to-MNIST | MIT |
| KMNIST | kmnist/kmnist-*.npz | Clanuwat et al., https://github.com/rois-codh/kmnist | CC BY-SA 4.0 |
"""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.data.examples import Examples, Part, check_part
from dubito.evaluation.data.root import locate
from dubito.tensors.checks import require


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
