"""Random numbers from an explicit generator, wherever it is, in the type and on the device of the images."""

from __future__ import annotations

import torch
from torch import Tensor


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
