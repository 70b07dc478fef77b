import numpy as np
import pytest
import torch
from dubito.data.uci import FOLDERS

from dubito.data import Split, standardize, uci


@pytest.fixture
def root(tmp_path):
    """Four rows in the published layout: an input, the target, a column in neither index, an input."""
    folder = tmp_path / "uci" / FOLDERS["naval"] / "data"
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("1 10 -1 5\n2 20 -1 5\n 3\t30 -1 5\n4 40 -1 6\n\n")
    indices = {"features": [0, 3], "target": [1], "train_0": [2, 0, 1], "test_0": [3], "train_1": [3, 1], "test_1": [0]}
    for name, index in indices.items():
        np.savetxt(folder / f"index_{name}.txt", index, fmt="%d")
    return tmp_path


def test_reads_the_columns_and_rows_that_the_indices_name(root):
    split = uci("naval", 0, root=root)
    assert split.x_train.tolist() == [[3, 5], [1, 5], [2, 5]]
    assert split.y_train.tolist() == [[30], [10], [20]]
    assert split.x_test.tolist() == [[4, 6]]
    assert split.y_test.tolist() == [[40]]
    assert {part.dtype for part in split} == {torch.float32}
    assert uci("naval", 1, root=root).y_train.tolist() == [[40], [20]]


def test_unknown_set_and_split(root):
    with pytest.raises(ValueError, match="'navel'; there are boston, concrete"):
        uci("navel", 0, root=root)
    with pytest.raises(ValueError, match="splits 0 to 1, not 2"):
        uci("naval", 2, root=root)


def test_standardize_uses_the_training_part_only(root):
    split = uci("naval", 0, root=root)
    s = standardize(split)
    torch.testing.assert_close(s.x_train[:, 0].mean(), torch.tensor(0.0))
    torch.testing.assert_close(s.x_train[:, 0].std(correction=0), torch.tensor(1.0))
    assert s.x_train[:, 1].tolist() == [0, 0, 0]  # constant: shifted, not divided by 0
    assert s.x_test[0, 1] == 1
    torch.testing.assert_close(s.y_mean + s.y_scale * s.y_test, split.y_test)
    torch.testing.assert_close(s.y_scale, split.y_train.std(0, correction=0))


def test_standardize_a_constant_that_has_no_exact_mean():
    x = torch.full((1000, 1), 0.1)
    y = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0))
    assert standardize(Split(x, y, x, y)).x_train.abs().max() < 1e-6


@pytest.mark.parametrize("name", FOLDERS)
def test_published_files(name, data_root):
    rows = {"boston": 506, "concrete": 1030, "energy": 768, "kin8nm": 8192, "naval": 11934, "power": 9568}
    rows |= {"protein": 45730, "wine": 1599, "yacht": 308}
    split = uci(name, 4 if name == "protein" else 19, root=data_root)
    assert len(split.x_train) + len(split.x_test) == rows[name]
    assert len(split.x_train) == round(0.9 * rows[name])
    s = standardize(split)
    assert all(part.isfinite().all() for part in s)
    assert s.x_train.abs().max() < 100
    torch.testing.assert_close(s.y_train.double().mean(), torch.tensor(0.0).double(), atol=1e-4, rtol=0)
