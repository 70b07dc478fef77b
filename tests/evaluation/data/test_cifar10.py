import numpy as np
import pytest
import torch
from dubito.data.images import CLASSES
from PIL import Image

from dubito.data import cifar10


@pytest.fixture
def images(tmp_path):
    """Two sheets of 2 x 3 tiles."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    for number, tiles in enumerate(np.split(images, 2)):
        sheet = np.concatenate([np.concatenate(row, axis=1) for row in np.split(tiles, 2)], axis=0)
        Image.fromarray(sheet).save(folder / f"train_{number:02}.webp", lossless=True)
    np.save(folder / "train_labels.npy", np.arange(12, dtype=np.uint8) % 10)
    return torch.from_numpy(images)


def test_tiles_in_order(images, tmp_path):
    x, y = cifar10("train", root=tmp_path)
    assert torch.equal(x, images.permute(0, 3, 1, 2).float() / 255)
    assert torch.equal(y, torch.arange(12) % 10)


def test_labels_must_go_with_the_images(images, tmp_path):
    (tmp_path / "cifar10" / "train_01.webp").unlink()
    with pytest.raises(ValueError, match="6 train images do not go with 12 labels"):
        cifar10("train", root=tmp_path)


def test_published_files(data_root):
    x, y = cifar10("test", root=data_root)
    assert x.shape == (10000, 3, 32, 32)
    assert torch.equal(y.bincount(), torch.full((10,), 1000))
    assert [CLASSES[label] for label in y[:4]] == ["cat", "ship", "ship", "airplane"]
    # The first test image, bit for bit as it was published.
    assert (x[0, :, 0, 0] * 255).round().tolist() == [158, 112, 49]
