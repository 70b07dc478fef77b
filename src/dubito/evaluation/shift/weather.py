"""Weather, with the constants of CIFAR-10-C (Hendrycks & Dietterich, 2019), which are for 32 x 32 images.

Images are [B, C, H, W] in [0, 1] with 1 or 3 channels; `severity` is 1 to 5.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.evaluation.shift.filters import motion, normal, separable, smoothed, uniform, zoom

LUMA = (0.299, 0.587, 0.114)  # how bright red, green and blue are
WATER, MUD, ICE = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255), (0.88, 0.95, 1.0)


def snow(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """Flakes that fall and blur, twice (the second time upside down), on an image that is whitened."""
    centre, scale, size, least, radius, length, keep = (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    )[severity - 1]
    height, width = images.shape[-2:]
    layer = centre + scale * normal((len(images), 1, height, width), images, generator)
    layer = separable(layer, zoom(height, size, images), zoom(width, size, images))
    layer = torch.where(layer < least, 0.0, layer).clamp(0, 1)
    degrees = uniform((len(images),), images, generator, -135.0, -45.0)
    flakes = motion((255 * layer).floor() / 255, degrees, radius=radius, scale=length)
    pale = torch.maximum(images, 1.5 * grey(images) + 0.5)
    return (keep * images + (1 - keep) * pale + flakes + flakes.flip(-2, -1)).clamp(0, 1)


def frost(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """A pane with crystals of ice, a share of which is added to a share of the image.

    The crystals are made up: CIFAR-10-C takes pieces of six photographs, which are not ours to hand on. The two shares are the same.
    """
    keep, add = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    return (keep * images + add * coloured(crystals(images, generator), ICE, images)).clamp(0, 1)


def fog(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    r"""Clouds of all sizes, :math:`(x + c\, p)\, m / (m + c)`: p is a plasma fractal in [0, 1], m the image's largest number."""
    dense, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    height, width = images.shape[-2:]
    size = 1 << (max(height, width) - 1).bit_length()
    clouds = plasma(len(images), size, decay, images, generator)[:, None, :height, :width]
    most = images.amax((1, 2, 3), keepdim=True)
    return ((images + dense * clouds) * most / (most + dense)).clamp(0, 1)


def brightness(images: Tensor, severity: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""More light: the value V of HSV, the largest of the channels, grows by a constant up to 1. Nothing is drawn.

    At the same hue and saturation all channels are proportional to V; black becomes grey.

    >>> brightness(torch.tensor([0.4, 0.2, 0.0]).view(1, 3, 1, 1), 4).flatten()
    tensor([0.6000, 0.3000, 0.0000])
    """
    more = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    value = images.amax(1, keepdim=True)
    brighter = (value + more).clamp_max(1)
    return torch.where(value > 0, images * (brighter / torch.where(value > 0, value, 1)), brighter).clamp(0, 1)


def spatter(images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor:
    """Drops on the lens: of water (severity 1 to 3), or splashes of mud."""
    centre, scale, smooth, least, strength, mud = (
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    )[severity - 1]
    height, width = images.shape[-2:]
    liquid = smoothed(centre + scale * normal((len(images), height, width), images, generator), smooth)
    if mud:
        covered = smoothed((liquid > least).to(images.dtype), strength).unsqueeze(1)
        covered = torch.where(covered < 0.8, 0.0, covered)
        return (images * (1 - covered) + coloured(covered, MUD, images)).clamp(0, 1)
    liquid = (255 * torch.where(liquid < least, 0.0, liquid)).floor() % 256  # 8 bits, as published: the brightest start anew
    drops = (liquid * relief(liquid)).unsqueeze(1)
    drops = strength * drops / drops.amax((2, 3), keepdim=True).clamp_min(1)  # an image may stay dry
    return (images + coloured(drops, WATER, images)).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """How bright every pixel is, [B, 1, H, W].

    >>> grey(torch.tensor([0.0, 1.0, 0.0]).view(1, 3, 1, 1)).flatten()
    tensor([0.5870])
    """
    if images.shape[1] == 1:
        return images
    if images.shape[1] != 3:
        raise ValueError(f"weather is for grey or colour images, and these have {images.shape[1]} channels")
    return torch.einsum("bchw,c->bhw", images, torch.tensor(LUMA).to(images)).unsqueeze(1)


def coloured(layer: Tensor, colour: tuple[float, float, float], images: Tensor) -> Tensor:
    """A layer [B, 1, H, W] in a colour, or as bright where the images are grey."""
    return layer * torch.tensor(colour).to(images).view(1, 3, 1, 1) if images.shape[1] == 3 else layer * grey_of(colour)


def grey_of(colour: tuple[float, float, float]) -> float:
    """The brightness of a colour."""
    return sum(share * part for share, part in zip(LUMA, colour, strict=True))


def plasma(number: int, size: int, decay: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Clouds [number, size, size] from 0 to 1 by midpoint displacement on a torus; `size` is a power of two.

    A grid is refined in halves: the middle of four points is their mean and a random step, first the middles of squares, then
    those of the diamonds between them. The steps are uniform in plus or minus a square, 100^2, whose root is divided by `decay`
    each time.
    """
    field, step, root = like.new_zeros(number, size, size), size, 100.0

    def between(total: Tensor) -> Tensor:
        """The mean of four points and a random step."""
        return total / 4 + uniform(tuple(total.shape), like, generator, -(root**2), root**2)

    while step >= 2:
        half = step // 2
        corner = field[:, ::step, ::step].clone()
        below, right = corner + corner.roll(-1, 1), corner + corner.roll(-1, 2)
        middle = between(below + below.roll(-1, 2))
        field[:, half::step, half::step] = middle
        field[:, ::step, half::step] = between(right + middle + middle.roll(1, 1))
        field[:, half::step, ::step] = between(below + middle + middle.roll(1, 2))
        step, root = half, root / decay
    field = field - field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True).clamp_min(torch.finfo(like.dtype).tiny)


def crystals(images: Tensor, generator: torch.Generator) -> Tensor:
    """Ice [B, 1, H, W] from 0 to 1: needles from random seeds in three directions, 60 degrees apart as ice grows them, over a film
    that is thick in some places and thin in others."""
    number, _, height, width = images.shape
    shape = (number, 1, height, width)
    turn = uniform((number,), images, generator, 0.0, 360.0)
    seeds = normal(shape, images, generator).sub_(1.2).clamp_min_(0)
    needles = torch.zeros_like(seeds)
    for arm in range(6):
        torch.maximum(needles, motion(seeds, turn + 60 * arm, radius=8, scale=3.0), out=needles)
    size = 1 << (max(height, width) - 1).bit_length()
    film = plasma(number, size, 1.7, images, generator)[:, None, :height, :width]
    return (0.15 + 0.5 * film + (0.4 + 1.6 * film) * needles).clamp(0, 1)


FAR = 20  # pixels: distances beyond count as this
FLAT, STEEP = math.tan(math.pi / 8), math.tan(3 * math.pi / 8)  # slopes that part the four directions


# ---- the relief of drops of water on a lens: layers [B, H, W] with whole numbers from 0 to 255


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
    edge = weak & (size > high)
    while True:
        grown = (F.max_pool2d(edge.to(layer.dtype).unsqueeze(1), 3, 1, 1).squeeze(1) > 0) & weak
        if bool((grown == edge).all()):
            return edge
        edge = grown


def distance(marked: Tensor, like: Tensor) -> Tensor:
    """How far the nearest of the marked pixels [B, H, W] is, in pixels, at most `FAR`: first along rows, then along columns."""
    square = torch.where(marked, 0.0, float(FAR**2)).to(like)
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
