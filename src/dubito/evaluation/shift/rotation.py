"""Images turned about their middle."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.evaluation.shift.filters import warped
from dubito.tensors.checks import require


def rotate(images: Tensor, degrees: float | Tensor, *, fill: float = 0.0) -> Tensor:
    """Images [B, C, H, W] turned counter-clockwise about their middle, all by the same angle or each by its own, [B].

    Bilinear interpolation; what comes in from outside is `fill`, the background: 0 for digits on black. Any real numbers will do, so
    that normalized images can be turned too; bytes are [B, H, W, C] and come back as bytes, rounded.

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90).squeeze()
    tensor([[2., 4.],
            [1., 3.]])
    """
    whole = _check(images)
    x = images.movedim(-1, 1).float() if whole else images.to(torch.promote_types(images.dtype, torch.float32))
    angle = torch.as_tensor(degrees, dtype=torch.float64)
    fits = angle.shape in ((), (len(x),))
    require(fits, f"degrees is a number, or one for each of the {len(x)} images; got the shape {list(angle.shape)}")
    angle = torch.deg2rad(angle.cpu()).expand(len(x)).view(-1, 1, 1)
    height, width = x.shape[-2:]
    down = torch.arange(height, dtype=torch.float64).view(1, -1, 1) - (height - 1) / 2
    right = torch.arange(width, dtype=torch.float64).view(1, 1, -1) - (width - 1) / 2
    rows = right * angle.sin() + down * angle.cos() + (height - 1) / 2
    columns = right * angle.cos() - down * angle.sin() + (width - 1) / 2
    # a place that is whole but for the rounding of sines is whole: quarters of a turn then move pixels, and the border keeps its own
    rows, columns = (place.mul(2**20).round().div(2**20).to(x) for place in (rows, columns))
    turned = warped(x - fill, rows, columns, border="zeros") + fill
    return turned.round().to(torch.uint8).movedim(1, -1).contiguous() if whole else turned.to(images.dtype)


def _check(images: Tensor) -> bool:
    """Whether images are bytes; an error if they are not images at all."""
    if not isinstance(images, Tensor):
        raise ValueError(f"images are real numbers [B, C, H, W], or bytes [B, H, W, C]; got {type(images).__name__}")
    whole, shape = images.dtype == torch.uint8, list(images.shape)
    fine = images.ndim == 4 and (whole or images.is_floating_point())
    require(fine, f"images are real numbers [B, C, H, W], or bytes [B, H, W, C]; got {shape} of {images.dtype}")
    return whole
