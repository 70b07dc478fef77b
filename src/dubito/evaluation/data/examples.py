"""What the readers return, plain tuples of tensors ready for `torch.utils.data.TensorDataset(*examples)`, and where their files are."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from dubito.tensors.checks import one_of


def locate(*parts: str, root: str | Path | None = None) -> Path:
    """The path of a file or folder of a data set, under `root` or else under the folder named by DUBITO_DATA.

    >>> locate("mnist", "train-images-idx3-ubyte.gz", root="nowhere")
    Traceback (most recent call last):
    FileNotFoundError: nowhere/mnist/train-images-idx3-ubyte.gz is not there: put the published file in that place, ...
    """
    folder = root or os.environ.get("DUBITO_DATA")
    if not folder:
        wanted = "/".join(parts)
        raise FileNotFoundError(
            f"the folder of data sets is not known: set the environment variable DUBITO_DATA to the folder with {wanted}, or give root="
        )
    path = Path(folder, *parts)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: put the published file in that place, "
            "or name another folder with root= or the environment variable DUBITO_DATA"
        )
    return path


Part = Literal["train", "test"]


class Examples(NamedTuple):
    """Inputs and their labels, in the published order."""

    x: Tensor  # [N, ...] float32; images [N, C, H, W] in [0, 1]
    y: Tensor  # [N] int64 labels; [N, H, W] where every pixel has one


class Split(NamedTuple):
    """A set cut into a training and a test part."""

    x_train: Tensor  # [N, ...] float32
    y_train: Tensor  # [N] int64 labels, or [N, C] float32
    x_test: Tensor
    y_test: Tensor


def check_part(part: str) -> None:
    """Raise a ValueError unless `part` is "train" or "test"."""
    one_of(("train", "test"), part=part)
