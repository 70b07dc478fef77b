"""What cameras and files do to images, with the constants of CIFAR-10-C (Hendrycks & Dietterich, 2019).

Images are [B, C, H, W] in [0, 1]; `severity` is 1 to 5.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from torch import Tensor

from dubito.evaluation.shift.draw import uniform
from dubito.evaluation.shift.filters import boxes, separable, smoothed, warped


def contrast(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Less contrast: :math:`(x - \bar x) c + \bar x`, with the mean of each channel of each image. Nothing is drawn.

    >>> contrast(torch.tensor([[[[0.0, 1.0]]]]), 2)
    tensor([[[[0.2500, 0.7500]]]])
    """
    share = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    mean = images.mean((-2, -1), keepdim=True)
    return (mean + share * (images - mean)).clamp(0, 1)


def saturate(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Paler (severity 1 and 2) or stronger colours: the saturation S of HSV becomes a S + b, cut off at 1. Nothing is drawn.

    At the same hue and value V, all of V - R, V - G and V - B are proportional to the saturation. Grey has none, and the hue of red.

    >>> saturate(torch.tensor([0.8, 0.4, 0.4]).view(1, 3, 1, 1), 3).flatten()
    tensor([0.8000, 0.2000, 0.2000])
    """
    factor, more = ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))[severity - 1]
    if images.shape[1] != 3:
        raise ValueError(f"saturate changes colours, and these images have {images.shape[1]} channel(s): leave it out")
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    before = chroma / value.clamp_min(torch.finfo(images.dtype).tiny)
    after = (factor * before + more).clamp(0, 1)
    coloured = value - (value - images) * after / torch.where(chroma > 0, before, 1)
    red = torch.tensor([0.0, 1.0, 1.0]).to(images).view(1, 3, 1, 1)
    return torch.where(chroma > 0, coloured, value * (1 - red * after)).clamp(0, 1)


def pixelate(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Fewer pixels: averaged over boxes to a share of the size, and back by repeating. Nothing is drawn.

    >>> pixelate(torch.eye(4).view(1, 1, 4, 4), 5).squeeze()
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]

    def both(n: int) -> Tensor:
        """The matrix that shrinks n pixels and enlarges them again."""
        fewer = max(1, int(share * n))
        like = images.new_zeros((), dtype=torch.float64)
        return (boxes(fewer, n, like) @ boxes(n, fewer, like)).to(images)

    return separable(images, both(images.shape[-2]), both(images.shape[-1])).clamp(0, 1)


def jpeg_compression(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Written as a JPEG file of low quality and read again; pixels are rounded to 256 levels. Nothing is drawn."""
    from PIL import Image

    quality = (80, 65, 58, 50, 40)[severity - 1]
    if images.shape[1] not in (1, 3):
        raise ValueError(f"a JPEG file holds 1 or 3 channels, and these images have {images.shape[1]}")
    levels = (255 * images).round().to(torch.uint8).movedim(1, -1).cpu().numpy()  # [B, H, W, C]
    done = np.empty_like(levels)
    for before, after in zip(levels, done, strict=True):
        file = io.BytesIO()
        Image.fromarray(before.squeeze(-1) if before.shape[-1] == 1 else before).save(file, "JPEG", quality=quality)
        after[:] = np.asarray(Image.open(file)).reshape(after.shape)
    return torch.from_numpy(done).movedim(-1, 1).to(images) / 255


def elastic_transform(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """Stretched and bent: three points move at random, the image with them, and then every pixel by a smooth random field.

    All lengths are shares of the smaller side.
    """
    bend, smooth, jump = ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))[
        severity - 1
    ]
    number, (height, width) = len(images), images.shape[-2:]
    side = min(height, width)
    rows, columns = torch.meshgrid(torch.arange(height).to(images), torch.arange(width).to(images), indexing="ij")

    # The map of three points is affine: A [before, 1] = after. What is seen at a place comes from A^-1 of it.
    middle, reach = torch.tensor([width // 2, height // 2]).to(images), side // 3
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]).to(images)
    before = middle + reach * corners  # [3, 2] of (x, y)
    after = before + uniform((number, 3, 2), images, generator, -jump * side, jump * side)
    one = images.new_ones(number, 3, 1)
    back = torch.linalg.solve(torch.cat([after, one], -1).double(), before.expand(number, 3, 2).double()).to(images)  # [B, 3, 2]
    place = torch.stack([columns, rows, torch.ones_like(rows)], -1) @ back.unsqueeze(1)  # [B, H, W, 2]
    images = warped(images, place[..., 1], place[..., 0], border="mirror")

    if bend:
        field = uniform((number, 2, height, width), images, generator, -1.0, 1.0)
        field = bend * side * smoothed(field, smooth * side, border="reflect", truncate=3.0)
        images = warped(images, rows + field[:, 1], columns + field[:, 0], border="reflect")
    return images.clamp(0, 1)
