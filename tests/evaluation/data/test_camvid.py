import numpy as np
import pytest
import torch
from dubito.data.camvid import CLASSES, COLOURS, VOID
from PIL import Image

from dubito.data import camvid


@pytest.fixture
def folder(tmp_path):
    """Three images of 4 x 6 pixels, kept without loss."""
    folder = tmp_path / "camvid" / "val"
    folder.mkdir(parents=True)
    source = np.random.default_rng(0)
    for i in range(3):
        Image.fromarray(source.integers(0, 256, (4, 6, 3), dtype=np.uint8)).save(folder / f"{i:03}.webp", lossless=True)
        Image.fromarray(((np.arange(24).reshape(4, 6) + i) % 12).astype(np.uint8)).save(folder / f"{i:03}.png")
    return folder


def test_images_and_labels_in_order(folder, tmp_path):
    x, y = camvid("val", root=tmp_path)
    assert x.shape == (3, 3, 4, 6)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert torch.equal(y, torch.stack([(torch.arange(24).reshape(4, 6) + i) % 12 for i in range(3)]))
    with Image.open(folder / "002.webp") as image:
        assert torch.equal(x[2], torch.from_numpy(np.array(image)).movedim(-1, 0) / 255)


def test_smaller(folder, tmp_path):
    """Halved, a label is one that was there, and colours are averaged: one colour stays as it is, and others come closer together."""
    Image.fromarray(np.full((4, 6, 3), 51, dtype=np.uint8)).save(folder / "001.webp", lossless=True)
    whole, small = camvid("val", root=tmp_path), camvid("val", size=(2, 3), root=tmp_path)
    assert small.x.shape == (3, 3, 2, 3)
    assert torch.equal(small.y, whole.y[:, 1::2, 1::2])
    torch.testing.assert_close(small.x[1], torch.full((3, 2, 3), 0.2))
    assert small.x[0].std() < 0.8 * whole.x[0].std()
    with pytest.raises(ValueError, match="makes images smaller"):
        camvid("val", size=(8, 6), root=tmp_path)
    with pytest.raises(ValueError, match="a height and a width"):
        camvid("val", size=(0, 3), root=tmp_path)


def test_what_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="part must be one of 'train', 'val', 'test'"):
        camvid("valid", root=tmp_path)
    with pytest.raises(FileNotFoundError, match="test is not there"):
        camvid("test", root=tmp_path)
    Image.fromarray(np.full((4, 6), 12, dtype=np.uint8)).save(folder / "001.png")
    with pytest.raises(ValueError, match="this image has 12"):
        camvid("val", root=tmp_path)
    Image.fromarray(np.zeros((4, 5), dtype=np.uint8)).save(folder / "001.png")
    with pytest.raises(ValueError, match=r"the image is \[4, 6\] and its labels are \[4, 5\]"):
        camvid("val", root=tmp_path)
    Image.fromarray(np.zeros((4, 6, 3), dtype=np.uint8)).save(folder / "001.png")
    with pytest.raises(ValueError, match="in colour"):
        camvid("val", root=tmp_path)
    (folder / "001.png").unlink()
    with pytest.raises(ValueError, match="001 has one of them only"):
        camvid("val", root=tmp_path)


def test_one_size_for_all(folder, tmp_path):
    Image.fromarray(np.zeros((4, 8, 3), dtype=np.uint8)).save(folder / "001.webp", lossless=True)
    Image.fromarray(np.zeros((4, 8), dtype=np.uint8)).save(folder / "001.png")
    with pytest.raises(ValueError, match="several sizes"):
        camvid("val", root=tmp_path)
    assert camvid("val", size=(2, 3), root=tmp_path).y.shape == (3, 2, 3)


def test_published_files(data_root):
    x, y = camvid("val", size=(45, 60), root=data_root)
    assert x.shape == (101, 3, 45, 60)
    assert y.shape == (101, 45, 60)
    assert len(CLASSES) == 11
    assert len(COLOURS) == 12
    share = y.flatten().bincount(minlength=12) / y.numel()
    assert share[VOID] < 0.03
    assert [CLASSES[i] for i in share.argsort(descending=True)[:3]] == ["road", "building", "tree"]
    sky, road = (x.movedim(1, -1)[y == CLASSES.index(name)].mean() for name in ("sky", "road"))
    assert sky > 2 * road
