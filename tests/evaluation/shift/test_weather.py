"""Against slow references, image by image, with loops over the definition."""

import math

import numpy as np
import pytest
import torch
from dubito.shift.filters import normal, uniform
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from scipy import ndimage

from dubito.shift import weather

SEVERITIES = range(1, 6)


def source():
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module")
def images():
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, :, :4] = x[0, :1, :4]  # grey
    x[0, :, 4] = 0  # black
    return x


@pytest.mark.parametrize(("severity", "more"), [*enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1)])
def test_brightness(severity, more, images):
    hsv = rgb_to_hsv(images.movedim(1, -1).numpy())
    hsv[..., 2] = np.clip(hsv[..., 2] + more, 0, 1)
    torch.testing.assert_close(weather.brightness(images, severity), torch.from_numpy(hsv_to_rgb(hsv)).movedim(-1, 1))


def plasma(size, decay, draws):
    """Midpoint displacement, point by point, on a torus; `draws` are the random steps of each round."""
    field, step, root = np.zeros((size, size)), size, 100.0
    for middles, tops, sides in draws:
        half = step // 2

        def at(i, j, field=field):
            return field[i % size, j % size]

        for i in range(0, size, step):
            for j in range(0, size, step):
                four = at(i, j) + at(i + step, j) + at(i, j + step) + at(i + step, j + step)
                field[i + half, j + half] = four / 4 + root**2 * middles[i // step, j // step]
        for i in range(0, size, step):
            for j in range(0, size, step):
                top = at(i, j) + at(i, j + step) + at(i + half, j + half) + at(i - half, j + half)
                side = at(i, j) + at(i + step, j) + at(i + half, j + half) + at(i + half, j - half)
                field[i, j + half] = top / 4 + root**2 * tops[i // step, j // step]
                field[i + half, j] = side / 4 + root**2 * sides[i // step, j // step]
        step, root = half, root / decay
    return (field - field.min()) / (field.max() - field.min())


@pytest.mark.parametrize(("severity", "dense", "decay"), [(1, 0.2, 3), (3, 0.75, 2.5), (5, 1.5, 1.75)])
def test_fog(severity, dense, decay, images):
    generator, draws = source(), []
    for n in (1, 2, 4, 8, 16):  # squares, then the two kinds of diamonds
        draws.append([uniform((2, n, n), images, generator, -1.0, 1.0).numpy() for _ in range(3)])
    found = weather.fog(images, severity, generator=source())
    for i, image in enumerate(images.numpy()):
        clouds = plasma(32, decay, [[kind[i] for kind in one] for one in draws])
        expected = (image + dense * clouds) * image.max() / (image.max() + dense)
        torch.testing.assert_close(found[i], torch.from_numpy(expected))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow(severity, images):
    loc, scale, factor, least, radius, length, keep = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    generator = source()
    layers = (loc + scale * normal((2, 1, 32, 32), images, generator)).squeeze(1).numpy()
    degrees = uniform((2,), images, generator, -135.0, -45.0).tolist()
    found = weather.snow(images, severity, generator=source())
    weights = np.array([math.exp(-(i**2) / (2 * length**2)) for i in range(2 * radius + 1)])
    weights /= weights.sum()
    for i, (image, layer, angle) in enumerate(zip(images.numpy(), layers, degrees, strict=True)):
        inner = int(np.ceil(32 / factor))
        top = (32 - inner) // 2
        layer = ndimage.zoom(layer[top : top + inner, top : top + inner], factor, order=1)
        trim = (len(layer) - 32) // 2
        layer = layer[trim : trim + 32, trim : trim + 32]
        layer = np.where(layer < least, 0, layer).clip(0, 1)
        layer = np.floor(255 * layer) / 255
        flakes = np.zeros((32, 32))
        for step, weight in enumerate(weights):
            right = math.ceil(step * math.cos(math.radians(angle)) - 0.5)
            down = math.ceil(step * math.sin(math.radians(angle)) - 0.5)
            flakes += weight * layer[np.clip(np.arange(32) + down, 0, 31)][:, np.clip(np.arange(32) + right, 0, 31)]
        grey = np.tensordot([0.299, 0.587, 0.114], image, 1)
        expected = keep * image + (1 - keep) * np.maximum(image, 1.5 * grey + 0.5) + flakes + np.rot90(flakes, 2)
        torch.testing.assert_close(found[i], torch.from_numpy(expected.clip(0, 1)), atol=1e-6, rtol=0)


def test_frost(images):
    """Between the darkest and the brightest pane, as bright as ice and bluish; grey images get grey ice."""
    black = torch.zeros(64, 3, 32, 32)
    ice = weather.frost(black, 5, generator=source()) / 0.45
    assert 0.4 < ice.mean() < 0.7
    assert 0.1 < ice.std() < 0.35
    assert (ice[:, 2] >= ice[:, 0]).all()
    again = weather.frost(black + 0.5, 1, generator=source())
    torch.testing.assert_close(again, (0.5 + 0.2 * ice).clamp(0, 1))
    assert weather.frost(black[:, :1], 5, generator=source()).shape == (64, 1, 32, 32)


def canny(layer, low, high):
    """Point by point."""
    sobel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    gx, gy = (ndimage.correlate(layer, kernel, mode="nearest") for kernel in (sobel, sobel.T))
    size = np.pad(abs(gx) + abs(gy), 1)
    weak = np.zeros(layer.shape, bool)
    for i, j in np.ndindex(layer.shape):
        here, near = size[i + 1, j + 1], size[i : i + 3, j : j + 3]
        angle = math.degrees(math.atan2(abs(gy[i, j]), abs(gx[i, j])))
        if angle < 22.5:
            peak = here > near[1, 0] and here >= near[1, 2]
        elif angle > 67.5:
            peak = here > near[0, 1] and here >= near[2, 1]
        elif gx[i, j] * gy[i, j] < 0:
            peak = here > near[0, 2] and here > near[2, 0]
        else:
            peak = here > near[0, 0] and here > near[2, 2]
        weak[i, j] = peak and here > low
    labels, _ = ndimage.label(weak, np.ones((3, 3)))
    strong = labels[weak & (size[1:-1, 1:-1] > high)]
    return np.isin(labels, strong) & weak


def equalised(layer):
    values, counts = np.unique(layer, return_counts=True)
    if len(values) == 1:
        return layer
    below = np.cumsum(counts) - counts[0]
    return np.round(255 * below / below[-1])[np.searchsorted(values, layer)]


def wet(images, severity):
    loc, scale, smooth, least = (
        (0.62, 0.1, 0.7, 0.7),
        (0.65, 0.1, 0.8, 0.7),
        (0.65, 0.3, 1, 0.69),
        (0.65, 0.1, 0.7, 0.69),
        (0.65, 0.1, 0.5, 0.68),
    )[severity - 1]
    drawn = (loc + scale * normal((len(images), 32, 32), images, source())).numpy()
    layers = np.stack([ndimage.gaussian_filter(layer, smooth, mode="nearest") for layer in drawn])
    return np.where(layers < least, 0, layers), least


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water(severity, images):
    found = weather.spatter(images, severity, generator=source())
    colour = np.array([175, 238, 238]).reshape(3, 1, 1) / 255
    for i, layer in enumerate(wet(images, severity)[0]):
        layer = np.floor(255 * layer) % 256
        away = ndimage.distance_transform_edt(~canny(layer, 50, 150)).clip(0, 20)
        away = np.floor(ndimage.uniform_filter(away, 3, mode="mirror") + 1e-4)
        away = ndimage.correlate(equalised(away), np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror").clip(0, 255)
        drops = layer * np.round(ndimage.uniform_filter(away, 3, mode="mirror"))
        expected = images[i].numpy() + 0.5 * drops / drops.max() * colour
        torch.testing.assert_close(
            found[i], torch.from_numpy(expected.clip(0, 1)), atol=0.01, rtol=0
        )  # a level rounds either way


@pytest.mark.parametrize("severity", [4, 5])
def test_mud(severity, images):
    found = weather.spatter(images, severity, generator=source())
    layers, least = wet(images, severity)
    colour = np.array([63, 42, 20]).reshape(3, 1, 1) / 255
    for i, layer in enumerate(layers):
        covered = ndimage.gaussian_filter((layer > least).astype(float), 0.6, mode="nearest")
        covered = np.where(covered < 0.8, 0, covered)
        expected = images[i].numpy() * (1 - covered) + covered * colour
        torch.testing.assert_close(found[i], torch.from_numpy(expected))
        assert covered.any()


def test_edges_and_distance():
    layer = torch.zeros(1, 24, 24)
    layer[:, 6:18, 6:18] = 200
    found = weather.edges(layer, 50, 150)
    assert torch.equal(found[0], torch.from_numpy(canny(layer[0].numpy(), 50, 150)))
    expected = ndimage.distance_transform_edt(~found[0].numpy()).clip(0, 20)
    torch.testing.assert_close(weather.distance(found, layer)[0].double(), torch.from_numpy(expected), atol=1e-5, rtol=0)
    assert (weather.distance(torch.zeros(1, 5, 5, dtype=torch.bool), layer) == 20).all()  # nothing near


def test_dry():
    """A layer without drops leaves the image as it is."""
    flat = torch.zeros(1, 8, 8)
    assert not (flat * weather.relief(flat)).any()
