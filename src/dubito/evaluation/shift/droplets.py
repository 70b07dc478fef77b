"""The relief of drops of water on a lens: edges of the wet places, the distance from them, and its embossed picture.

Layers are [B, H, W] with whole numbers from 0 to 255.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FAR = 20  # pixels: distances beyond count as this
FLAT, STEEP = math.tan(math.pi / 8), math.tan(3 * math.pi / 8)  # slopes that part the four directions


def edges(layer: Tensor, low: float, high: float) -> Tensor:
    """Edges after Canny (1986), bool [B, H, W]: where the Sobel gradient, |gx| + |gy|, is above `low` and the largest along its
    direction, and connected to where it is above `high`."""
    padded = F.pad(layer.unsqueeze(1), (1, 1, 1, 1), mode="replicate")
    sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]).to(layer)
    gx, gy = F.conv2d(padded, torch.stack([sobel, sobel.mT]).unsqueeze(1)).unbind(1)
    size = gx.abs() + gy.abs()
    height, width = layer.shape[-2:]
    around = F.pad(size, (1, 1, 1, 1))

    def beside(down: int, right: int) -> Tensor:
        """The gradient of the neighbor that lies so far down and to the right."""
        return around[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    # of two equal neighbours one must be kept, so one side may be as large, but not on the diagonals
    across = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    diagonal = torch.where(gx * gy < 0, rising, falling)
    peak = torch.where(gy.abs() < FLAT * gx.abs(), across, torch.where(gy.abs() > STEEP * gx.abs(), upright, diagonal))
    weak = peak & (size > low)
    found = weak & (size > high)
    while True:
        grown = (F.max_pool2d(found.to(layer.dtype).unsqueeze(1), 3, 1, 1).squeeze(1) > 0) & weak
        if bool((grown == found).all()):
            return found
        found = grown


def distance(found: Tensor, like: Tensor) -> Tensor:
    """How far the nearest of the marked pixels [B, H, W] is, in pixels, at most `FAR`: first along rows, then along columns."""
    square = torch.where(found, 0.0, float(FAR**2)).to(like)
    for axis in (1, 2):
        n = square.shape[axis]
        best = square.clone()
        for step in range(1, min(FAR, n)):
            near, far = square.narrow(axis, 0, n - step) + step**2, square.narrow(axis, step, n - step) + step**2
            for part, other in ((best.narrow(axis, step, n - step), near), (best.narrow(axis, 0, n - step), far)):
                torch.minimum(part, other, out=part)
        square = best
    return square.sqrt()


def equalised(layer: Tensor) -> Tensor:
    """Levels spread so that every one has as many pixels below it as it is high; a layer of one level stays as it is."""
    flat = layer.long().flatten(1)
    count = torch.zeros(len(flat), 256, dtype=torch.int64, device=flat.device)
    count.scatter_add_(1, flat, torch.ones_like(flat))
    lowest = flat.amin(1, keepdim=True)
    first = count.gather(1, lowest)
    rest = flat.shape[1] - first
    level = 255 * (count.cumsum(1) - first).clamp_min(0) / rest.clamp_min(1)
    spread = level.round().gather(1, flat)
    return torch.where(rest > 0, spread, flat.to(spread.dtype)).view_as(layer).to(layer)


def relief(layer: Tensor) -> Tensor:
    """Light and shade on drops, 0 to 255."""

    def filtered(values: Tensor, kernel: Tensor) -> Tensor:
        """Convolution with a kernel of 3 x 3, reflected at the border."""
        padded = F.pad(values.unsqueeze(1), (1, 1, 1, 1), mode="reflect")
        return F.conv2d(padded, kernel.to(values)[None, None]).squeeze(1)

    mean = torch.full((3, 3), 1 / 9, dtype=torch.float64)
    emboss = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    away = distance(edges(layer, 50, 150), layer)
    away = equalised((filtered(away, mean) + 1e-4).floor())  # a mean of equal numbers may come out below them
    return filtered(filtered(away, emboss).clamp(0, 255), mean).round()
