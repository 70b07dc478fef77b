"""Means and variances of the noise against closed forms."""

import math

import pytest
import torch

from dubito.shift import camera

SIZE = (4, 3, 128, 128)
COUNT = math.prod(SIZE)


def source():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("severity", "scale"), [*enumerate((0.04, 0.06, 0.08, 0.09, 0.10), 1)])
def test_gaussian(severity, scale):
    away = camera.gaussian_noise(torch.full(SIZE, 0.5), severity, generator=source()) - 0.5
    assert abs(float(away.mean())) < 5 * scale / COUNT**0.5
    assert abs(float(away.std()) / scale - 1) < 5 / (2 * COUNT) ** 0.5


@pytest.mark.parametrize(("severity", "photons"), [*enumerate((500, 250, 100, 75, 50), 1)])
def test_shot(severity, photons):
    """Mean x and variance x / k, in steps of 1 / k."""
    found = camera.shot_noise(torch.full(SIZE, 0.3), severity, generator=source())
    variance = 0.3 / photons
    assert abs(float(found.mean()) - 0.3) < 5 * (variance / COUNT) ** 0.5
    assert abs(float(found.var()) / variance - 1) < 5 * (2 / COUNT) ** 0.5 * 1.1
    torch.testing.assert_close(found * photons, (found * photons).round(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("severity", "share"), [*enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1)])
def test_impulse(severity, share):
    found = camera.impulse_noise(torch.full(SIZE, 0.3), severity, generator=source())
    torch.testing.assert_close(found.unique(), torch.tensor([0.0, 0.3, 1.0]))
    for value in (0.0, 1.0):
        assert abs(float((found == value).float().mean()) - share / 2) < 5 * (share / 2 / COUNT) ** 0.5


@pytest.mark.parametrize(("severity", "scale"), [*enumerate((0.06, 0.1, 0.12, 0.16, 0.2), 1)])
def test_speckle(severity, scale):
    found = camera.speckle_noise(torch.full(SIZE, 0.4), severity, generator=source())
    assert abs(float(found.mean()) - 0.4) < 5 * 0.4 * scale / COUNT**0.5
    assert abs(float(found.std()) / (0.4 * scale) - 1) < 5 / (2 * COUNT) ** 0.5


def test_black_stays_black():
    """Noise of photons and speckles needs light."""
    black = torch.zeros(1, 3, 8, 8)
    assert not camera.shot_noise(black, 5, generator=source()).any()
    assert not camera.speckle_noise(black, 5, generator=source()).any()
