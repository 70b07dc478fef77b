"""What holds for all corruptions: types, layouts, seeds, severities and errors. The single ones are in the files of their families."""

from itertools import pairwise

import pytest
import torch

from dubito.shift import COMMON, CORRUPTIONS, EXTRA, corrupt

DRAWN = set(CORRUPTIONS) - {
    "defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "saturate", "pixelate", "jpeg_compression",
}  # fmt: skip
# Their constants do not grow in step: more but smaller flakes, a darker pane, a longer line of the same blur. Elastic severities
# stretch less and less and bend more, and the two first of saturate make paler, so that these two have no such order at all.
UNEVEN = ("spatter", "glass_blur", "snow", "frost", "motion_blur", "pixelate")
GREY = [name for name in CORRUPTIONS if name != "saturate"]


@pytest.fixture(scope="module")
def images():
    """Smooth, coloured, with an edge: something that all of them can spoil."""
    torch.manual_seed(0)
    x = torch.nn.functional.interpolate(torch.rand(6, 3, 5, 5), (32, 32), mode="bilinear")
    x[:, :, 10:20, 8:26] = torch.rand(6, 3, 1, 1)
    return x.clamp(0.05, 0.95)


def test_fifteen_and_four():
    assert (len(COMMON), len(EXTRA), len(CORRUPTIONS)) == (15, 4, 19)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_type_range_and_seed(name, images):
    kept, state = images.clone(), torch.get_rng_state()
    one = corrupt(images, name, severity=4, seed=1)
    assert one.shape == images.shape
    assert one.dtype == torch.float32
    assert one.isfinite().all()
    assert one.min() >= 0
    assert one.max() <= 1
    assert not torch.equal(one, images)
    assert torch.equal(one, corrupt(images, name, severity=4, seed=1))
    assert torch.equal(one, corrupt(images, name, severity=4, seed=2)) == (name not in DRAWN)
    assert torch.equal(images, kept)
    assert torch.equal(state, torch.get_rng_state())
    double = corrupt(images.double(), name, severity=4, seed=1)
    assert double.dtype == torch.float64
    if name not in DRAWN:  # others are drawn anew in the other precision
        torch.testing.assert_close(double.float(), one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_bytes(name, images):
    """Bytes, channels last, become the same images cut to whole levels."""
    levels = (255 * images).round().to(torch.uint8)
    found = corrupt(levels.movedim(1, -1), name, severity=3)
    assert found.dtype == torch.uint8
    assert found.shape == (6, 32, 32, 3)
    expected = corrupt(levels / 255, name, severity=3)
    assert (found.movedim(-1, 1) - (255 * expected)).abs().max() <= 1.01


@pytest.mark.parametrize("name", GREY)
@pytest.mark.parametrize("shape", [(3, 1, 28, 28), (2, 1, 8, 8), (2, 1, 20, 37)])
def test_grey_and_other_sizes(name, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        found = corrupt(x, name, severity=severity)
        assert found.shape == shape
        assert found.isfinite().all()


def test_grey_is_grey_colour(images):
    """A grey image is corrupted as the same image in colour is, where noise and paint have no colour."""
    grey = images.mean(1, keepdim=True)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "fog", "brightness", "contrast", "elastic_transform",
                 "pixelate", "gaussian_blur"):  # fmt: skip
        coloured = corrupt(grey.expand(-1, 3, -1, -1), name, severity=3)
        torch.testing.assert_close(corrupt(grey, name, severity=3).expand(-1, 3, -1, -1), coloured, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {*UNEVEN, "saturate", "elastic_transform"}))
def test_further_from_clean_with_severity(name, images):
    away = [float((corrupt(images, name, severity=s) - images).square().mean()) for s in range(1, 6)]
    assert all(a < b for a, b in pairwise(away)), away


@pytest.mark.parametrize("name", UNEVEN)
def test_further_from_clean_from_first_to_last(name, images):
    assert (corrupt(images, name, severity=5) - images).square().mean() > (
        corrupt(images, name, severity=1) - images
    ).square().mean()


def test_pieces():
    """More images than are worked on at a time; each piece has random numbers of its own."""
    x = torch.full((3, 1, 512, 512), 0.5)
    found = corrupt(x, "gaussian_noise")
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[:2], corrupt(x[:2], "gaussian_noise"))
    assert corrupt(x[:0], "fog").shape == (0, 1, 512, 512)


def test_half_precision():
    x = torch.rand(2, 3, 8, 8).to(torch.bfloat16)
    assert corrupt(x, "motion_blur").dtype == torch.bfloat16


def test_no_graph():
    assert not corrupt(torch.rand(1, 3, 8, 8, requires_grad=True), "contrast").requires_grad


@pytest.mark.parametrize(
    ("x", "name", "severity", "message"),
    [
        (torch.rand(2, 3, 8, 8), "rain", 3, "no corruption 'rain': use one of gaussian_noise"),
        (torch.rand(2, 3, 8, 8), "fog", 0, "severity is 1, 2, 3, 4 or 5; got 0"),
        (torch.rand(2, 3, 8, 8), "fog", 2.5, "severity is"),
        (torch.rand(2, 3, 8, 8), "fog", True, "severity is"),
        (torch.rand(2, 64), "fog", 3, "a tensor \\[B, C, H, W\\]"),
        (torch.rand(2, 3, 3, 8), "fog", 3, "at least 4 x 4 pixels"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "fog", 3, "at least 4 x 4|channels|have 8"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "fog", 3, "torch.int64"),
        (torch.randn(2, 3, 8, 8), "fog", 3, "before they are normalized"),
        (torch.full((2, 3, 8, 8), torch.nan), "fog", 3, "from nan"),
        (torch.rand(2, 2, 8, 8), "fog", 3, "these have 2"),
        (torch.rand(2, 1, 8, 8), "saturate", 3, "these images are gray"),
    ],
)
def test_errors(x, name, severity, message):
    with pytest.raises(ValueError, match=message):
        corrupt(x, name, severity=severity)
