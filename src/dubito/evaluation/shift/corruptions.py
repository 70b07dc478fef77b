"""The 15 + 4 common corruptions by name; `corrupt`, which applies one to images of any number, layout and size; and `rotate`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dubito.evaluation.shift import camera, weather
from dubito.evaluation.shift.filters import warped
from dubito.tensors.checks import require
from dubito.tensors.randomness import generator

PIECE = 2**19  # pixels that are worked on at a time: a few megabytes


class Corruption(Protocol):
    """Images [B, C, H, W] in [0, 1], real numbers, and a severity from 1 to 5; what is random comes from the generator."""

    def __call__(self, images: Tensor, severity: int, *, generator: torch.Generator) -> Tensor: ...


COMMON: dict[str, Corruption] = {
    "gaussian_noise": camera.gaussian_noise,
    "shot_noise": camera.shot_noise,
    "impulse_noise": camera.impulse_noise,
    "defocus_blur": camera.defocus_blur,
    "glass_blur": camera.glass_blur,
    "motion_blur": camera.motion_blur,
    "zoom_blur": camera.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": camera.contrast,
    "elastic_transform": camera.elastic_transform,
    "pixelate": camera.pixelate,
    "jpeg_compression": camera.jpeg_compression,
}
EXTRA: dict[str, Corruption] = {  # held out in the paper, to choose by
    "speckle_noise": camera.speckle_noise,
    "gaussian_blur": camera.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": camera.saturate,
}
CORRUPTIONS: dict[str, Corruption] = {**COMMON, **EXTRA}
ROUNDED = ("motion_blur", "pixelate")  # made of bytes by ImageMagick and Pillow, which round to the nearest level


def corrupt(images: Tensor, name: str, *, severity: int = 3, seed: int = 0) -> Tensor:
    """Images as they are after a common corruption, one of `CORRUPTIONS`, with the constants of CIFAR-10-C for `severity` 1 to 5.

    Images are real numbers in [0, 1], [B, C, H, W], or bytes, [B, H, W, C]; what comes back is the same in type, layout and device.
    Bytes are cut to whole levels, as those of CIFAR-10-C are, or rounded where its programs do; real numbers are not rounded. The same
    seed gives the same images, on every device, and the same random numbers at every severity, so that severities differ in nothing
    else. Random numbers are of all images that are given together: with one seed, a second batch has those of the first. Give all
    images at once, or each batch a seed of its own.

    >>> x = torch.full((2, 3, 32, 32), 0.5)
    >>> corrupt(x, "contrast", severity=5).shape, corrupt(x, "fog").dtype
    (torch.Size([2, 3, 32, 32]), torch.float32)
    """
    check(images, name, severity)
    whole = images.dtype == torch.uint8
    x = images.movedim(-1, 1) / 255 if whole else images.to(torch.promote_types(images.dtype, torch.float32))
    number = max(1, PIECE // (x.shape[-2] * x.shape[-1]))
    with torch.no_grad():
        parts = [
            CORRUPTIONS[name](part, severity, generator=generator("cpu", seed, name, i))
            for i, part in enumerate(x.detach().contiguous().split(number))
        ]
        done = torch.cat(parts)
        if not whole:
            return done.to(images.dtype)
        # cut off, where a level that is whole but for rounding stays what it is
        levels = (255 * done + (0.5 if name in ROUNDED else 0.0) + 1e-3).floor()
        return levels.to(torch.uint8).movedim(1, -1).contiguous()


def check(images: Tensor, name: str, severity: int) -> None:
    """Raise a ValueError, in words, where these images cannot be corrupted so."""
    require(name in CORRUPTIONS, f"there is no corruption {name!r}: use one of {', '.join(CORRUPTIONS)}")
    whole = severity in (1, 2, 3, 4, 5) and not isinstance(severity, bool)
    require(whole, f"severity is 1, 2, 3, 4 or 5; got {severity!r}")
    check_images(images)
    channels, shape = images.shape[-1] if images.dtype == torch.uint8 else images.shape[1], list(images.shape)
    require(channels in (1, 3), f"images have 1 channel (gray) or 3 (red, green, blue), and these have {channels}, shape {shape}")
    require(name != "saturate" or channels == 3, "saturate changes colors, and these images are gray: leave it out")


def check_images(images: Tensor) -> None:
    """Raise a ValueError unless these are images: [B, C, H, W] in [0, 1], or bytes [B, H, W, C]."""
    height, width = images.shape[1:3] if are_bytes(images) else images.shape[2:]
    layout = "bytes are [B, H, W, C], real numbers [B, C, H, W]"
    require(min(height, width) >= 4, f"images have at least 4 x 4 pixels; these have {height} x {width}: {layout}")
    if images.is_floating_point() and images.numel():
        low, high = (float(end) for end in torch.aminmax(images.detach()))
        advice = "corrupt them before they are normalized (`transform=` where there is one)"
        require(low >= 0 and high <= 1, f"images lie in [0, 1], and these go from {low:.3g} to {high:.3g}: {advice}")


def are_bytes(images: Tensor) -> bool:
    """Whether images are bytes; an error if they are not images at all."""
    dtype = getattr(images, "dtype", None)
    whole = dtype == torch.uint8
    fine = (whole or getattr(dtype, "is_floating_point", False)) and images.ndim == 4
    given = type(images).__name__ if dtype is None else f"{list(images.shape)} of {dtype}"
    require(fine, f"images are a tensor [B, C, H, W] of real numbers, or [B, H, W, C] of bytes; got {given}")
    return whole


def rotate(images: Tensor, degrees: float | Tensor, *, fill: float = 0.0) -> Tensor:
    """Images [B, C, H, W] turned counter-clockwise about their middle, all by the same angle or each by its own, [B].

    Bilinear interpolation; what comes in from outside is `fill`, the background: 0 for digits on black. Any real numbers will do, so
    that normalized images can be turned too; bytes are [B, H, W, C] and come back as bytes, rounded.

    >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90).squeeze()
    tensor([[2., 4.],
            [1., 3.]])
    """
    whole = are_bytes(images)
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
