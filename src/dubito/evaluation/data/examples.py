"""What the readers return: plain tuples of tensors, ready for `torch.utils.data.TensorDataset(*examples)`."""

from typing import Literal, NamedTuple

from torch import Tensor

from dubito.tensors.checks import require

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
    require(part in ("train", "test"), f'part is "train" or "test", not {part!r}')
