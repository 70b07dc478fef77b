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


def test_many_normals_are_normal():
    """Moments to the sixth, the distribution function, and the tails."""
    x, n = torch.zeros(2, 1_000_000), 2_000_000
    randomness.perturb([x], 1.0, torch.Generator().manual_seed(0))
    z = x.flatten().double()
    for power, (moment, square) in {1: (0, 1), 2: (1, 3), 3: (0, 15), 4: (3, 105), 5: (0, 945), 6: (15, 10395)}.items():
        error = ((square - moment**2) / n) ** 0.5
        assert float(z.pow(power).mean()) == pytest.approx(moment, abs=4.5 * error), power
    ranked = torch.special.ndtr(z.sort().values)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    largest = torch.maximum((ranked - steps).abs().max(), (ranked - steps + 1 / n).abs().max())
    assert float(largest) * n**0.5 < 1.95, "Kolmogorov and Smirnov, one in a thousand"
    for far in (3.0, 4.0, 4.5):
        for side in (z > far, z < -far):
            share = float(torch.special.ndtr(torch.tensor(-far, dtype=torch.float64)))
            assert float(side.double().mean()) == pytest.approx(share, abs=4.5 * (share / n) ** 0.5), far
    assert z.isfinite().all()


def test_many_normals_are_independent():
    x = torch.zeros(1_000_000)
    generator = torch.Generator().manual_seed(0)
    randomness.perturb([x], 1.0, generator)
    y = torch.zeros_like(x)
    randomness.perturb([y], 1.0, generator)
    for power in (1, 2):
        a, b = ((z.double().pow(power) - power + 1) / power**0.5 for z in (x, y))  # 1/sqrt(2) (z^2 - 1) has variance 1
        for lag in (1, 2, 3, 4, 8, 32, randomness.PIECE, 2 * randomness.PIECE):
            assert abs(float((a[lag:] * a[:-lag]).mean())) < 5e-3, lag
        assert abs(float((a * b).mean())) < 5e-3, "the next call gives others"


def test_the_ends_of_the_integers_are_finite_too(monkeypatch):
    class Ends:
        def __init__(self, seed: int): ...

        def random_raw(self, n: int) -> np.ndarray:
            return np.tile(np.array([-(2**31), 2**31 - 1], dtype=np.int32), n).view(np.uint64)

    monkeypatch.setattr(np.random, "SFC64", Ends)
    x = torch.zeros(30_000)
    randomness.perturb([x], 1.0, torch.Generator())
    assert 5.4 < float(x.max()) < 5.5
    assert -5.5 < float(x.min()) < -5.4


@pytest.mark.parametrize("sizes", [(7, 5), (25_001, 3, 70_000), (0, 30_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_added_to_all_of_a_list_and_repeats_with_the_generator(sizes, dtype):
    found = []
    for _ in range(2):
        leaves = [torch.full((n,), 2.0, dtype=dtype) for n in sizes]
        generator = torch.Generator().manual_seed(3)
        randomness.perturb(leaves, 0.1, generator, keep=0.5)
        found.append((leaves, generator.get_state()))
    (a, after), (b, again) = found
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(after, again)
    joined = torch.cat(a)
    assert float(joined.mean()) == pytest.approx(1.0, abs=0.5 / len(joined) ** 0.5)
    assert len(joined.unique()) > 0.98 * len(joined)
    randomness.perturb(a, 0.1, generator, keep=0.5)
    assert not torch.equal(a[0], b[0]) or not len(a[0])


def test_noise_for_tensors_of_any_layout_and_mixed_precision():
    wide = torch.zeros(4, 100, 10, 10).to(memory_format=torch.channels_last)
    leaves = [wide, torch.zeros(10, dtype=torch.float64), torch.zeros(8, dtype=torch.bfloat16)]
    randomness.perturb(leaves, 1.0, torch.Generator().manual_seed(0))
    assert float(wide.std()) == pytest.approx(1.0, abs=0.02)
    assert all(leaf.abs().min() > 0 for leaf in leaves)
