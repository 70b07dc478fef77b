"""What cameras and files do to images: noise, blur, and digital artifacts.

The constants are those of CIFAR-10-C (Hendrycks & Dietterich, 2019), in pixels of 32 x 32 images.

Images are [B, C, H, W] in [0, 1]; `severity` is 1 to 5.
"""

from __future__ import annotations

import io

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.shift.filters import boxes, correlation, motion, normal, separable, smoothed, uniform, warped, zoom

# ---- noise on every pixel and channel


def gaussian_noise(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    r"""Noise of a sensor in the dark: :math:`\min(1, \max(0, x + s \epsilon))`, :math:`\epsilon \sim N(0, 1)`.

    >>> x = gaussian_noise(torch.full((1, 1, 100, 100), 0.5), 5, generator=torch.Generator().manual_seed(0))
    >>> round(float(x.std()), 2)
    0.1
    """
    scale = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return (images + scale * normal(tuple(images.shape), images, generator)).clamp(0, 1)


def shot_noise(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    r"""Few photons: :math:`n / k` with :math:`n \sim \mathrm{Poisson}(k x)`, cut off at 1.

    >>> x = shot_noise(torch.full((1, 1, 100, 100), 0.5), 5, generator=torch.Generator().manual_seed(0))
    >>> round(float(x.var()), 2)                                    # 0.5 / 50
    0.01
    """
    photons = (500, 250, 100, 75, 50)[severity - 1]
    rate = (photons * images).clamp_min(0).to(generator.device)
    return (torch.poisson(rate, generator=generator).to(images) / photons).clamp_max(1)


def impulse_noise(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """Salt and pepper: a share of the numbers is replaced by 0 or 1, evenly.

    >>> x = impulse_noise(torch.full((1, 1, 100, 100), 0.5), 5, generator=torch.Generator().manual_seed(0))
    >>> round(float((x != 0.5).float().mean()), 2)
    0.07
    """
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    chance = uniform(tuple(images.shape), images, generator)
    salt = (chance < share / 2).to(images.dtype)  # given that it is below the share, one half
    return torch.where(chance < share, salt, images)


def speckle_noise(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    r"""Noise that grows with the light: :math:`\min(1, \max(0, x + s x \epsilon))`, :math:`\epsilon \sim N(0, 1)`.

    >>> x = speckle_noise(torch.full((1, 1, 100, 100), 0.5), 5, generator=torch.Generator().manual_seed(0))
    >>> round(float(x.std()), 2)
    0.1
    """
    scale = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    return (images + scale * images * normal(tuple(images.shape), images, generator)).clamp(0, 1)


# ---- blur


def gaussian_blur(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A Gaussian filter; the pixels at the border go on beyond it. Nothing is drawn.

    >>> gaussian_blur(torch.eye(3).view(1, 1, 3, 3), 3).squeeze().diagonal()
    tensor([0.6584, 0.4172, 0.6584])
    """
    scale = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return smoothed(images, scale).clamp(0, 1)


def defocus_blur(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A lens out of focus: a disc of pixels, its edge softened by a Gaussian of 3 x 3 pixels. Nothing is drawn.

    >>> defocus_blur(torch.ones(1, 1, 4, 4), 5).mean()
    tensor(1.)
    """
    radius, soft = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    reach = int(radius) + 1  # the softening spreads the disc by a pixel
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disc = (steps[:, None] ** 2 + steps**2 <= radius**2).double()
    edge = torch.exp(-0.5 * (torch.arange(-1, 2, dtype=torch.float64) / soft) ** 2)
    kernel = F.conv2d((disc / disc.sum())[None, None], (edge[:, None] * edge)[None, None] / edge.sum() ** 2, padding=1)[0, 0]
    # a kernel of a few pixels is a sum of fewer products of a row and a column than it has entries
    u, s, v = torch.linalg.svd(kernel)
    blurred = torch.zeros_like(images)
    for i in range(int((s > 1e-12 * s[0]).sum())):
        rows = correlation(images.shape[-2], s[i] * u[:, i], "mirror").to(images)
        blurred += separable(images, rows, correlation(images.shape[-1], v[i], "mirror").to(images))
    return blurred.clamp(0, 1)


def glass_blur(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """Frosted glass: smoothed, pixels displaced by up to one to the right and down, and smoothed again.

    The paper speaks of pixels that are exchanged. In the images of CIFAR-10-C they are copied: every pixel from the third row
    and column on takes the value of itself or of its neighbour above, to the left, or both, at random.
    """
    scale, times = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    height, width = images.shape[-2:]
    moved = (255 * smoothed(images, scale) + 1e-3).floor().div(255)  # whole levels; a level that is one but for rounding stays
    flat = moved.flatten(2)
    inside = ((torch.arange(height) > 1)[:, None] & (torch.arange(width) > 1)).to(images.device)
    here = torch.arange(height * width, device=images.device).view(height, width)
    for _ in range(times):
        chance = uniform((2, len(images), height, width), images, generator)
        up, left = ((chance < 0.5) & inside).long()
        index = (here - width * up - left).flatten(1).unsqueeze(1)
        flat = flat.gather(2, index.expand_as(flat))
    return smoothed(flat.view_as(images), scale).clamp(0, 1)


def motion_blur(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """A camera that moves, within 45 degrees of the horizontal: half a Gaussian along a line of pixels (see `filters.motion`)."""
    radius, scale = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    degrees = uniform((len(images),), images, generator, -45.0, 45.0)
    return motion(images, degrees, radius=radius, scale=scale).clamp(0, 1)


def zoom_blur(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A camera that comes closer: the mean of the image and of its middle at many magnifications. Nothing is drawn.

    >>> zoom_blur(torch.ones(1, 1, 8, 8), 5).std()
    tensor(0.)
    """
    most = (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1]
    factors = np.arange(1, most, 0.01)  # as published: rounding decides whether the end belongs to it
    height, width = images.shape[-2:]
    total = images.clone()
    for factor in factors.tolist():
        total += separable(images, zoom(height, factor, images), zoom(width, factor, images))
    return (total / (len(factors) + 1)).clamp(0, 1)


# ---- digital


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
