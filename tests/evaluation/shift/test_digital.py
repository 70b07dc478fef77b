"""Against slow references: PIL, matplotlib's colours, scipy, and loops over the definition."""

import numpy as np
import pytest
import torch
from dubito.shift.filters import uniform
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage

from dubito.shift import camera, corrupt

SEVERITIES = range(1, 6)


def source():
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module")
def images():
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, :, :4] = x[0, :1, :4]  # grey
    x[0, :, 4] = 0  # black
    return x


@pytest.mark.parametrize(("severity", "share"), [*enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1)])
def test_contrast(severity, share, images):
    expected = torch.stack([torch.stack([share * c + (1 - share) * c.mean() for c in image]) for image in images])
    torch.testing.assert_close(camera.contrast(images, severity), expected)


@pytest.mark.parametrize(("severity", "constants"), [*enumerate([(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)], 1)])
def test_saturate(severity, constants, images):
    hsv = rgb_to_hsv(images.movedim(1, -1).numpy())
    hsv[..., 1] = np.clip(constants[0] * hsv[..., 1] + constants[1], 0, 1)
    expected = torch.from_numpy(hsv_to_rgb(hsv)).movedim(-1, 1)
    torch.testing.assert_close(camera.saturate(images, severity), expected)


@pytest.mark.parametrize(("severity", "share"), [*enumerate((0.95, 0.9, 0.85, 0.75, 0.65), 1)])
@pytest.mark.parametrize("size", [32, 28, 9])
def test_pixelate(severity, share, size, images):
    """PIL resamples real numbers too."""
    images = images[..., :size, :size].float()
    fewer = int(size * share)
    expected = []
    for channel in images.flatten(0, 1).numpy():
        small = Image.fromarray(channel).resize((fewer, fewer), Image.Resampling.BOX)
        expected.append(np.asarray(small.resize((size, size), Image.Resampling.BOX)))
    torch.testing.assert_close(camera.pixelate(images, severity).flatten(0, 1), torch.from_numpy(np.stack(expected)))


def test_pixelate_of_bytes_is_rounded_as_pillow_does(images):
    levels = (255 * images).round().to(torch.uint8).movedim(1, -1)  # [B, H, W, C]
    fewer = (int(0.65 * levels.shape[2]), int(0.65 * levels.shape[1]))
    expected = [
        np.array(Image.fromarray(one.numpy()).resize(fewer, Image.Resampling.BOX).resize(one.shape[1::-1], Image.Resampling.BOX))
        for one in levels
    ]
    away = corrupt(levels, "pixelate", severity=5).int() - torch.from_numpy(np.stack(expected)).int()
    assert away.abs().max() <= 1
    assert away.float().mean().abs() < 0.3  # Pillow rounds between rows and columns as well; cut off, it would be 0.7


def test_jpeg(images, tmp_path):
    """A file on disk, one image at a time; the lower the quality, the further off."""
    levels = (255 * images).round().to(torch.uint8)
    for severity, quality in enumerate((80, 65, 58, 50, 40), 1):
        Image.fromarray(levels[1].movedim(0, -1).numpy()).save(tmp_path / "x.jpg", quality=quality)
        expected = torch.from_numpy(np.array(Image.open(tmp_path / "x.jpg"))).movedim(-1, 0) / 255
        torch.testing.assert_close(camera.jpeg_compression(levels / 255, severity)[1], expected)


def test_jpeg_grey(images):
    found = camera.jpeg_compression(images[:, :1], 1)
    assert (found - images[:, :1]).abs().mean() < 0.1


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic(severity, images):
    """Three points and where they go fix an affine map; scipy reads the images at its inverse, and then along the field."""
    alpha, sigma, jump = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))[severity - 1]
    generator = source()
    moves = uniform((3, 3, 2), images, generator, -32 * jump, 32 * jump).numpy()
    fields = uniform((3, 2, 32, 32), images, generator, -1.0, 1.0).numpy() if alpha else np.zeros((3, 2, 32, 32))
    before = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
    rows, columns = np.mgrid[:32, :32]
    expected = []
    for image, move, field in zip(images.numpy(), moves, fields, strict=True):
        there = np.linalg.solve(np.c_[before, np.ones(3)], before + move).T  # [2, 3]: x' = A (x, 1)
        inverse = np.linalg.inv(np.vstack([there, [0, 0, 1]]))
        x, y, _ = np.einsum("ij,jhw->ihw", inverse, np.stack([columns, rows, np.ones((32, 32))]))
        dx, dy = (
            32 * alpha * (ndimage.gaussian_filter(f, 32 * sigma, mode="reflect", truncate=3) if alpha else f) for f in field
        )
        for channel in image:
            stretched = ndimage.map_coordinates(channel, [y, x], order=1, mode="mirror")
            expected.append(ndimage.map_coordinates(stretched, [rows + dy, columns + dx], order=1, mode="reflect"))
    found = camera.elastic_transform(images, severity, generator=source())
    torch.testing.assert_close(found.flatten(0, 1), torch.from_numpy(np.stack(expected)))
