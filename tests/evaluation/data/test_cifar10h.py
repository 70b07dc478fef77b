import numpy as np
import pytest
import torch
from scipy.stats import entropy

from dubito.data import cifar10h, label_entropy


def test_counts_are_read_and_checked(tmp_path):
    folder = tmp_path / "cifar10h"
    folder.mkdir()
    np.save(folder / "cifar10h-counts.npy", np.eye(10)[:3] * 51)
    counts = cifar10h(root=tmp_path)
    assert counts.dtype == torch.int64
    assert counts.sum(1).tolist() == [51, 51, 51]
    np.save(folder / "cifar10h-counts.npy", np.zeros((3, 10)))
    with pytest.raises(ValueError, match="at least one of them positive"):
        cifar10h(root=tmp_path)
    with pytest.raises(FileNotFoundError, match="cifar10h-counts.npy is not there"):
        cifar10h(root=tmp_path / "elsewhere")


def test_entropy_is_that_of_scipy():
    counts = torch.tensor([[50, 1, 0], [17, 17, 17], [51, 0, 0]])
    np.testing.assert_allclose(label_entropy(counts), entropy(counts.numpy(), axis=1), atol=1e-6)


def test_people_agree_with_the_labels_of_the_published_images(data_root):
    counts = cifar10h(root=data_root)
    labels = torch.from_numpy(np.load(data_root / "cifar10" / "test_labels.npy")).long()
    assert counts.shape == (10000, 10)
    assert float((counts.argmax(1) == labels).double().mean()) > 0.99
