"""A random part of many rows, from one pass."""

from __future__ import annotations

import torch

from dubito.evaluation.reservoir import Reservoir


def kept(most: int | None, n: int, seed: int = 0, size: int = 9) -> torch.Tensor:
    some = Reservoir(most, seed=seed)
    for batch in torch.arange(n).split(size):
        some.add(batch, 2 * batch)
        assert most is None or some.held < 2 * most + size
    rows, double = some.rows()
    assert torch.equal(double, 2 * rows)
    assert some.count == n
    return rows


def test_every_row_has_the_same_chance():
    times = torch.zeros(60)
    for seed in range(600):
        times[kept(15, 60, seed)] += 1
    assert times.sum() == 15 * 600
    assert float((times - 150).abs().max()) < 5 * (600 * 0.25 * 0.75) ** 0.5
    assert torch.equal(kept(15, 60, 3), kept(15, 60, 3))


def test_few_rows_are_all_kept_in_their_order():
    for most in (None, 60, 100):
        assert torch.equal(kept(most, 60), torch.arange(60))
    assert len(kept(59, 60)) == 59
    assert Reservoir(3).rows() == ()
