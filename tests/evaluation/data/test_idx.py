import gzip

import numpy as np
import pytest
import torch
from dubito.data.images import read_idx

from dubito.data import fashion_mnist, kmnist, mnist, notmnist


def write_idx(path, array):
    path.parent.mkdir(exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)


def check(examples, images):
    assert torch.equal(examples.x, torch.from_numpy(images).float()[:, None] / 255)
    assert torch.equal(examples.y, torch.tensor([7, 0, 9]))


@pytest.mark.parametrize(("reader", "folder"), [(mnist, "mnist"), (fashion_mnist, "fashion-mnist"), (notmnist, "notmnist")])
@pytest.mark.parametrize(("part", "prefix"), [("train", "train"), ("test", "t10k")])
def test_idx_sets(reader, folder, part, prefix, images, tmp_path):
    write_idx(tmp_path / folder / f"{prefix}-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / folder / f"{prefix}-labels-idx1-ubyte.gz", np.array([7, 0, 9], dtype=np.uint8))
    check(reader(part, root=tmp_path), images)


def test_kmnist(images, tmp_path):
    (tmp_path / "kmnist").mkdir()
    np.savez_compressed(tmp_path / "kmnist" / "kmnist-test-imgs.npz", images)
    np.savez_compressed(tmp_path / "kmnist" / "kmnist-test-labels.npz", np.array([7, 0, 9], dtype=np.uint8))
    check(kmnist(root=tmp_path), images)


def test_labels_must_go_with_the_images(images, tmp_path):
    write_idx(tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", np.zeros(2, dtype=np.uint8))
    with pytest.raises(ValueError, match="3 images do not go with 2 labels"):
        mnist("test", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"not gzip", "not a whole gzip file", id="foreign"),
        pytest.param(gzip.compress(bytes(100))[:-12], "not a whole gzip file", id="truncated"),
        pytest.param(gzip.compress(b"\x00\x00\x0d\x01" + bytes(4)), "not an idx file of bytes", id="floats"),
        pytest.param(gzip.compress(b""), "not an idx file of bytes", id="empty"),
        pytest.param(gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05abc"), "holds 3 values .* promises 5", id="short"),
    ],
)
def test_broken_files(content, message, tmp_path):
    path = tmp_path / "broken.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)


@pytest.mark.parametrize("reader", [mnist, kmnist])
def test_unknown_part(reader, tmp_path):
    with pytest.raises(ValueError, match="part must be one of 'train', 'test'; got 'valid'"):
        reader("valid", root=tmp_path)


@pytest.mark.parametrize("reader", [mnist, fashion_mnist, notmnist, kmnist])
def test_published_files(reader, data_root):
    x, y = reader("test", root=data_root)
    assert (x.shape, x.dtype) == ((10000, 1, 28, 28), torch.float32)
    assert (x.min(), x.max()) == (0, 1)
    assert y.unique().tolist() == list(range(10))
