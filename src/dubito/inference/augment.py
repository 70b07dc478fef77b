"""Small random changes of images that leave their meaning alone, for stability training.

An augmentation is any function of (x, generator) that returns inputs of the same shape. One that takes x alone, as most transforms of
other libraries do, is given as `lambda x, _: transform(x)`; what it draws from the global generators is seeded by `fit` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.tensors.checks import at_least

Augmentation = Callable[[Any, torch.Generator], Any]


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on every number.

    >>> Noise(0.1)(torch.zeros(2, 3), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """

    scale: float = 0.15  # standard deviation

    def __post_init__(self):
        at_least(0, scale=self.scale)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"noise goes on one tensor of real numbers; got {kind}: give a function of your own, (x, generator) -> x"
            )
        return x + self.scale * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


@dataclass(frozen=True)
class Shift:
    """Each image [..., H, W] moved by up to so many pixels, up or down and left or right; what comes in is a reflection.

    >>> x = torch.arange(4.0).expand(1, 1, 4, 4)
    >>> sorted({tuple(Shift(1)(x, torch.Generator().manual_seed(i))[0, 0, 0].int().tolist()) for i in range(20)})
    [(0, 1, 2, 3), (1, 0, 1, 2), (1, 2, 3, 2)]
    """

    pixels: int = 2

    def __post_init__(self):
        at_least(0, pixels=self.pixels)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if x.ndim < 3 or self.pixels >= min(x.shape[-2:]):
            raise ValueError(f"images [B, ..., H, W] larger than {self.pixels} pixels are moved; got {list(x.shape)}")
        moved = x
        for axis in (-2, -1):
            size = x.shape[axis]
            by = torch.randint(-self.pixels, self.pixels + 1, (len(x), 1), generator=generator, device=x.device)
            place = (torch.arange(size, device=x.device) + by).abs()  # [B, size]; reflected at the first pixel
            place = size - 1 - (size - 1 - place).abs()  # and at the last
            shape = [len(x), *[1] * (x.ndim - 1)]
            shape[axis] = size
            moved = moved.take_along_dim(place.view(shape), axis)
        return moved


@dataclass(frozen=True)
class Flip:
    """Each image [..., H, W] seen in a mirror, or not: left is right in half of them.

    >>> x = torch.arange(3.0).expand(8, 1, 3, 3)
    >>> 0 < Flip()(x, torch.Generator().manual_seed(0))[:, 0, 0, 0].sum() < 16
    tensor(True)
    """

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if x.ndim < 3:
            raise ValueError(f"images [B, ..., H, W] are seen in a mirror; got {list(x.shape)}")
        turned = torch.rand((len(x), *[1] * (x.ndim - 1)), generator=generator, device=x.device) < 0.5
        return torch.where(turned, x.flip(-1), x)


@dataclass(frozen=True)
class Compose:
    """One augmentation after another.

    >>> Compose((Shift(1), Flip(), Noise(0.1)))(torch.zeros(2, 1, 4, 4), torch.Generator()).shape
    torch.Size([2, 1, 4, 4])
    """

    parts: tuple[Augmentation, ...]

    def __call__(self, x: Any, generator: torch.Generator) -> Any:
        for part in self.parts:
            x = part(x, generator)
        return x
