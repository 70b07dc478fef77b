import pytest
import torch

from dubito.data import digits


def test_shapes_types_and_range():
    split = digits()
    assert len(split.x_train) + len(split.x_test) == 1797
    for x, y in ((split.x_train, split.y_train), (split.x_test, split.y_test)):
        assert x.shape == (len(y), 1, 8, 8)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert (x.min(), x.max()) == (0, 1)
        assert y.unique().tolist() == list(range(10))


def test_the_seed_decides_the_split():
    first, again, other = digits(seed=1), digits(seed=1), digits(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.y_train, other.y_train)


def test_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    digits(seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_every_image_is_in_one_part_once():
    split = digits(seed=0, test=0.1)
    whole = torch.cat([split.x_train, split.x_test]).flatten(1)
    other = torch.cat([*digits(seed=5)[::2]]).flatten(1)
    assert len(split.x_test) == 180
    assert sorted(whole.tolist()) == sorted(other.tolist())


@pytest.mark.parametrize("share", [0, 1, 1.5])
def test_the_test_part_is_a_share(share):
    with pytest.raises(ValueError, match="test must be above 0 and below 1"):
        digits(test=share)
