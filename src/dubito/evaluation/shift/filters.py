r"""Filters of whole batches of images [B, C, H, W], and random numbers in their type and on their device.

What works along rows and along columns one after the other (smoothing, zooming, averaging boxes) is two small matrices,
:math:`Y = R X K^T`: border and resampling are entries of R and K, and a batch costs two matrix products.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Border = Literal["nearest", "reflect", "mirror"]  # aaa|abcd, cba|abcd, dcb|abcd, with the names that scipy.ndimage gives them
NOTHING = 1e-8  # a weight that no float32 image can show


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows [H', H] and columns [W', W] applied to images [..., H, W].

    >>> separable(torch.ones(1, 1, 2, 2), torch.eye(2), torch.ones(1, 2)).shape
    torch.Size([1, 1, 2, 1])
    """
    return ((images @ columns.mT).mT @ rows.mT).mT


def beyond(index: Tensor, n: int, border: Border) -> Tensor:
    """The pixel 0 ... n-1 that stands for one at any whole number.

    >>> [beyond(torch.arange(-2, 5), 3, border).tolist() for border in ("nearest", "reflect", "mirror")]
    [[0, 0, 0, 1, 2, 2, 2], [1, 0, 0, 1, 2, 2, 1], [2, 1, 0, 1, 2, 1, 0]]
    """
    if border == "nearest" or n == 1:
        return index.clamp(0, n - 1)
    period = 2 * n if border == "reflect" else 2 * n - 2
    index = index % period
    return torch.where(index < n, index, (period - 1 if border == "reflect" else period) - index)


def correlation(n: int, kernel: Tensor, border: Border) -> Tensor:
    """The matrix [n, n] of a correlation with a kernel of odd length, centred."""
    half = len(kernel) // 2
    index = beyond(torch.arange(n)[:, None] + torch.arange(-half, half + 1), n, border).to(kernel.device)
    return kernel.new_zeros(n, n).scatter_add(1, index, kernel.expand(n, -1))


def bell(n: int, scale: float, like: Tensor, *, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """The matrix [n, n] of a Gaussian filter, cut off `truncate` standard deviations (rounded to pixels) from its centre.

    >>> bell(3, 0.5, torch.zeros(1))[1]
    tensor([0.1067, 0.7866, 0.1067])
    """
    half = int(truncate * scale + 0.5)
    steps = torch.arange(-half, half + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (steps / scale) ** 2) if half else torch.ones(1, dtype=torch.float64)
    return correlation(n, kernel / kernel.sum(), border).to(like)


def smoothed(images: Tensor, scale: float, *, border: Border = "nearest", truncate: float = 4.0) -> Tensor:
    """A Gaussian filter with a standard deviation of `scale` pixels.

    >>> smoothed(torch.ones(1, 1, 4, 4), 1.0).mean()
    tensor(1.)
    """
    if int(truncate * scale + 0.5) == 0:
        return images
    rows, columns = (bell(n, scale, images, border=border, truncate=truncate) for n in images.shape[-2:])
    return separable(images, rows, columns)


def zoom(n: int, factor: float, like: Tensor) -> Tensor:
    """The matrix [n, n] that magnifies the middle: ceil(n / factor) pixels, stretched over round(factor times as many) by linear
    interpolation from the first to the last, of which the middle n are kept.

    >>> zoom(4, 2.0, torch.zeros(1))
    tensor([[0.0000, 1.0000, 0.0000, 0.0000],
            [0.0000, 0.6667, 0.3333, 0.0000],
            [0.0000, 0.3333, 0.6667, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.0000]])
    """
    inner = math.ceil(n / factor)
    outer = round(inner * factor)
    first, trim = (n - inner) // 2, (outer - n) // 2
    place = torch.arange(trim, trim + n, dtype=torch.float64) * ((inner - 1) / max(1, outer - 1))
    left = place.floor().clamp(0, max(0, inner - 2))
    share = place - left
    index = first + left.long()
    matrix = torch.zeros(n, n, dtype=torch.float64)
    matrix.scatter_add_(1, index[:, None], (1 - share)[:, None])
    matrix.scatter_add_(1, (index + 1).clamp_max(n - 1)[:, None], share[:, None])
    return matrix.to(like)


def boxes(n: int, size: int, like: Tensor) -> Tensor:
    """The matrix [size, n] that resamples n pixels to `size` by boxes: the mean of the pixels whose centres lie in
    ((i, i + 1] n / size], or of the one around its centre where the new pixels are smaller.

    >>> boxes(4, 2, torch.zeros(1))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    step = n / size
    width = max(step, 1.0)
    centre = (torch.arange(size, dtype=torch.float64)[:, None] + 0.5) * step
    away = (torch.arange(n, dtype=torch.float64) + 0.5 - centre) / width
    matrix = ((away > -0.5) & (away <= 0.5)).double()
    return (matrix / matrix.sum(1, keepdim=True)).to(like)


def motion(images: Tensor, degrees: Tensor, *, radius: int, scale: float) -> Tensor:
    r"""Every image blurred along its own direction, `degrees` [B], as ImageMagick does: half a Gaussian that starts at the pixel.

    .. math:: y(u, v) = \sum_{i=0}^{2r} k_i\, x(u + \lceil i \cos\alpha - \tfrac12 \rceil,\, v + \lceil i \sin\alpha - \tfrac12 \rceil),
              \qquad k_i \propto e^{-i^2 / 2 \sigma^2}

    for column u and row v; beyond the border its pixels go on.
    """
    height, width = images.shape[-2:]
    steps = torch.arange(2 * radius + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (steps / scale) ** 2)
    kernel = kernel / kernel.sum()
    angle = torch.deg2rad(degrees.double().cpu())[:, None]
    right, down = ((steps * part - 0.5).ceil().long() for part in (angle.cos(), angle.sin()))  # [B, 2 radius + 1]
    flat = images.flatten(2)
    blurred = kernel[0].item() * flat
    for i in range(1, len(steps)):
        if kernel[i] < NOTHING:
            break
        rows = (torch.arange(height) + down[:, i, None]).clamp(0, height - 1)  # [B, H]
        columns = (torch.arange(width) + right[:, i, None]).clamp(0, width - 1)
        index = (width * rows[:, :, None] + columns[:, None, :]).flatten(1).to(images.device)  # [B, H W]
        blurred.add_(flat.gather(2, index.unsqueeze(1).expand_as(flat)), alpha=kernel[i].item())
    return blurred.view_as(images)


def warped(images: Tensor, rows: Tensor, columns: Tensor, *, border: Literal["reflect", "mirror", "zeros"]) -> Tensor:
    """Images read at other places, rows and columns [B, H', W'] in pixels, by bilinear interpolation.

    >>> warped(torch.tensor([[[[0.0, 1.0]]]]), torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.25), border="mirror")
    tensor([[[[0.2500]]]])
    """
    height, width = images.shape[-2:]
    centred = border == "mirror"  # torch's corners are then the centres of the last pixels, about which it reflects
    if centred:
        x, y = 2 * columns / max(1, width - 1) - 1, 2 * rows / max(1, height - 1) - 1
    else:
        x, y = (2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1
    padding = "zeros" if border == "zeros" else "reflection"
    return F.grid_sample(images, torch.stack([x, y], -1).to(images), padding_mode=padding, align_corners=centred)


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normals. Drawn where the generator is, so that images on any device get the same ones.

    >>> normal((2, 3), torch.zeros(1), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    return torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform numbers between `low` and `high`, drawn where the generator is.

    >>> bool((uniform((100,), torch.zeros(1), torch.Generator().manual_seed(0), -2.0, -1.0) <= -1).all())
    True
    """
    unit = torch.rand(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)
    return low + (high - low) * unit
