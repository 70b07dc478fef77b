"""A process's rows of a common batch."""

import pytest
import torch

from dubito.tensors.shares import Share, draw_rows, sharing


@pytest.mark.parametrize(("total", "size"), [(7, 2), (7, 3), (2, 3), (1, 4)])
def test_shares_have_every_row_once(total, size):
    whole = torch.arange(total * 3.0).view(total, 3) + 1
    shares = [Share.of(total, rank, size) for rank in range(size)]
    parts = [share.take(whole) for share in shares]
    assert all(len(part) == share.count for part, share in zip(parts, shares, strict=True))
    assert torch.equal(sum(share.alone(part) for share, part in zip(shares, parts, strict=True)), whole)
    for share, part in zip(shares, parts, strict=True):
        assert torch.equal(share.take(share.pad(part)), part)
        assert share.pad(part).shape == whole.shape


def test_two_batches_one_after_the_other():
    first, second = torch.arange(5), torch.arange(10, 14)
    share = Share.of(5, 1, 3).followed_by(Share.of(4, 1, 3))
    assert share.take(torch.cat([first, second])).tolist() == [1, 2, 11]
    stands_in = Share.of(1, 0, 3).followed_by(Share.of(4, 0, 3))
    assert stands_in.alone(torch.tensor([7, 8])).tolist() == [0, 8, 0, 0, 0]


@pytest.mark.parametrize(("shape", "axis"), [((7, 4), 0), ((5, 7, 4), 1), ((14, 4), 0)])
def test_what_is_drawn_is_a_part_of_what_one_process_draws(shape, axis):
    torch.manual_seed(3)
    whole = torch.rand(shape)
    pieces = []
    for rank in range(3):
        share, each = Share.of(7, rank, 3), shape[axis] // 7
        own = (*shape[:axis], share.count * each, *shape[axis + 1 :])
        torch.manual_seed(3)
        with sharing(share):
            pieces.append(draw_rows(torch.rand, own, axis))
        assert share.axis(own) == axis
    assert torch.equal(torch.cat(pieces, axis), whole)


def test_what_is_of_no_example_is_drawn_as_it_is():
    with sharing(Share.of(7, 0, 2)):
        assert draw_rows(torch.zeros, (4, 2)).shape == (4, 2)
    assert Share.of(8, 0, 2).axis((3, 5)) is None
    assert Share.of(8, 0, 2).axis(()) is None
