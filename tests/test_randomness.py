"""Global generators are lent and given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dubito import randomness


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002


def test_forked_gives_back_what_it_took_also_on_error():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    expected = draw()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    inside = []

    def fail():
        with randomness.forked(5):
            inside.append(draw())
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert inside[0] == inside[1]
    assert draw() == expected


def test_states_round_trip():
    state = randomness.global_state()
    first = draw()
    randomness.set_global_state(state)
    assert draw() == first


def test_seeding_leaves_nothing_behind_for_devices_not_in_use():
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use")
    before = len(torch.cuda._queued_calls)
    with randomness.forked(3):
        pass
    assert len(torch.cuda._queued_calls) == before


def test_seeds_are_derived_apart():
    seeds = {randomness.derive(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_loaders_own_generators_are_lent_too():
    g = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(torch.arange(8)), shuffle=True, generator=g)
    before = g.get_state()
    with randomness.lent(loader) as generators:
        assert generators == [g]
        list(loader)
    assert torch.equal(g.get_state(), before)
    with randomness.lent([1, 2]) as generators:
        assert generators == []
