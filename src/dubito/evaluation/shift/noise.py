"""Noise on every pixel and channel, with the constants of CIFAR-10-C (Hendrycks & Dietterich, 2019).

Images are [B, C, H, W] in [0, 1]; `severity` is 1 to 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.evaluation.shift.draw import normal, uniform


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
