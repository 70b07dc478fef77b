"""Blurs against slow references: image by image, by scipy or by loops over the definition."""

import math

import numpy as np
import pytest
import torch
from dubito.shift.filters import uniform
from scipy import ndimage

from dubito.shift import camera

SEVERITIES = range(1, 6)


def source():
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_channel(images, function):
    return torch.from_numpy(np.stack([[function(channel) for channel in image] for image in images.numpy()]))


@pytest.mark.parametrize(("severity", "scale"), [*enumerate((0.4, 0.6, 0.7, 0.8, 1.0), 1)])
def test_gaussian(severity, scale, images):
    expected = by_channel(images, lambda x: ndimage.gaussian_filter(x, scale, mode="nearest", truncate=4.0))
    torch.testing.assert_close(camera.gaussian_blur(images, severity), expected)


@pytest.mark.parametrize(
    ("severity", "radius", "soft"), [(1, 0.3, 0.4), (2, 0.4, 0.5), (3, 0.5, 0.6), (4, 1, 0.2), (5, 1.5, 0.1)]
)
def test_defocus(severity, radius, soft, images):
    """A disc on a grid of 17 x 17, filtered by a Gaussian of 3 x 3, and the image correlated with that."""
    kernel = np.array([[float(i * i + j * j <= radius**2) for i in range(-8, 9)] for j in range(-8, 9)])
    edge = np.array([math.exp(-0.5 / soft**2), 1.0, math.exp(-0.5 / soft**2)])
    kernel = ndimage.correlate(kernel / kernel.sum(), np.outer(edge, edge) / edge.sum() ** 2, mode="mirror")
    expected = by_channel(images, lambda x: ndimage.correlate(x, kernel, mode="mirror"))
    torch.testing.assert_close(camera.defocus_blur(images, severity), expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_glass(severity, images):
    """Pixel by pixel from the lower right, as the published images were made: an exchange of two views of one array is a copy."""
    scale, times = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    images = (255 * images).round() / 255
    generator = source()
    rounds = [uniform((2, len(images), 32, 32), images, generator).numpy() < 0.5 for _ in range(times)]
    expected = []
    for i, image in enumerate(images.movedim(1, -1).numpy()):
        x = np.uint8(255 * ndimage.gaussian_filter(image, scale, axes=(0, 1), mode="nearest") + 1e-3)
        for up, left in (chance[:, i] for chance in rounds):
            for h in range(31, 1, -1):
                for w in range(31, 1, -1):
                    h_other, w_other = h - int(up[h, w]), w - int(left[h, w])
                    x[h, w], x[h_other, w_other] = x[h_other, w_other], x[h, w]
        expected.append(ndimage.gaussian_filter(x / 255, scale, axes=(0, 1), mode="nearest"))
    found = camera.glass_blur(images, severity, generator=source())
    torch.testing.assert_close(found, torch.from_numpy(np.stack(expected)).movedim(-1, 1))


@pytest.mark.parametrize(("severity", "radius", "scale"), [(1, 6, 1.0), (4, 8, 2.0), (5, 9, 2.5)])
def test_motion(severity, radius, scale, images):
    degrees = uniform((2,), images, source(), -45.0, 45.0).tolist()
    weights = np.array([math.exp(-(i**2) / (2 * scale**2)) for i in range(2 * radius + 1)])
    weights /= weights.sum()
    expected = torch.zeros_like(images)
    for b, angle in enumerate(degrees):
        for i, weight in enumerate(weights):
            right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
            down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
            rows, columns = (torch.tensor([min(max(place + by, 0), 31) for place in range(32)]) for by in (down, right))
            expected[b] += weight * images[b][:, rows][:, :, columns]
    torch.testing.assert_close(camera.motion_blur(images, severity, generator=source()), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("size", [32, 28, 9])
def test_zoom(severity, size, images):
    """The middle cut out, enlarged by scipy, and cut again."""
    images = images[..., :size, :size]
    most = (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1]
    factors = np.arange(1, most, 0.01)

    def one(x):
        total = x.copy()
        for factor in factors:
            inner = int(np.ceil(size / factor))
            top = (size - inner) // 2
            large = ndimage.zoom(x[top : top + inner, top : top + inner], factor, order=1)
            trim = (len(large) - size) // 2
            total += large[trim : trim + size, trim : trim + size]
        return total / (len(factors) + 1)

    torch.testing.assert_close(camera.zoom_blur(images, severity), by_channel(images, one))
