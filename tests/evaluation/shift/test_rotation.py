import numpy as np
import pytest
import torch
from scipy import ndimage

from dubito.shift import rotate


@pytest.fixture(scope="module")
def images():
    return torch.rand(3, 2, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("quarters", [0, 1, 2, 3, 4, -1])
def test_quarters_move_pixels(quarters, images):
    torch.testing.assert_close(rotate(images, 90 * quarters), images.rot90(quarters, (-2, -1)))
    torch.testing.assert_close(rotate(images.float(), 90 * quarters), images.float().rot90(quarters, (-2, -1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("degrees", [10.0, 45.0, -130.0])
@pytest.mark.parametrize("shape", [(9, 9), (8, 13)])
def test_against_scipy(degrees, shape, images):
    """scipy places pixels beyond the border as we do, zero, and turns the same way."""
    x = torch.rand(1, 1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = ndimage.rotate(x[0, 0].numpy(), degrees, reshape=False, order=1, mode="grid-constant")
    torch.testing.assert_close(rotate(x, degrees)[0, 0], torch.from_numpy(np.asarray(expected)), atol=1e-5, rtol=0)


def test_each_its_own_angle(images):
    angles = torch.tensor([0.0, 20.0, 90.0])
    found = rotate(images, angles)
    for i, angle in enumerate(angles.tolist()):
        torch.testing.assert_close(found[i : i + 1], rotate(images[i : i + 1], angle))


def test_fill_and_types(images):
    full = torch.full((1, 1, 8, 8), 0.7)
    torch.testing.assert_close(rotate(full, 33, fill=0.7), full)
    whole = (255 * images).round().to(torch.uint8).movedim(1, -1).contiguous()
    assert torch.equal(rotate(whole, 90), whole.rot90(1, (1, 2)))
    assert rotate(images.to(torch.bfloat16), 5).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "degrees", "message"),
    [
        (torch.rand(2, 9), 3.0, "\\[B, C, H, W\\]"),
        (torch.zeros(2, 1, 9, 9, dtype=torch.int64), 3.0, "torch.int64"),
        (torch.rand(2, 1, 9, 9), torch.zeros(3), "one for each of the 2 images"),
    ],
)
def test_errors(x, degrees, message):
    with pytest.raises(ValueError, match=message):
        rotate(x, degrees)
