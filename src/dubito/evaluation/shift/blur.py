"""Blur, with the constants of CIFAR-10-C (Hendrycks & Dietterich, 2019), which are in pixels of 32 x 32 images.

Images are [B, C, H, W] in [0, 1]; `severity` is 1 to 5.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.shift.draw import uniform
from dubito.evaluation.shift.filters import correlation, motion, separable, smoothed, zoom


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
