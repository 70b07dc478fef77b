"""Global generators are lent and given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dubito.tensors import randomness


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
        with randomness.fork_rng(5):
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
    with randomness.fork_rng(3):
        pass
    assert len(torch.cuda._queued_calls) == before


def test_seeds_are_derived_apart():
    seeds = {randomness.derive_seed(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_loaders_own_generators_are_lent_too():
    g = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(torch.arange(8)), shuffle=True, generator=g)
    before = g.get_state()
    with randomness.borrowed_generators(loader) as generators:
        assert generators == [g]
        list(loader)
    assert torch.equal(g.get_state(), before)
    with randomness.borrowed_generators([1, 2]) as generators:
        assert generators == []


def test_our_normals_are_normal():
    """Moments to the sixth, the distribution function, and the tails."""
    n, normals = 2_000_000, randomness.Normals(torch.Generator().manual_seed(0))
    z = normals(n).double()
    for power, (moment, square) in {1: (0, 1), 2: (1, 3), 3: (0, 15), 4: (3, 105), 5: (0, 945), 6: (15, 10395)}.items():
        error = ((square - moment**2) / n) ** 0.5
        assert float(z.pow(power).mean()) == pytest.approx(moment, abs=4.5 * error), power
    ranked = torch.special.ndtr(z.sort().values)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    largest = torch.maximum((ranked - steps).abs().max(), (ranked - steps + 1 / n).abs().max())
    assert float(largest) * n**0.5 < 1.95, "Kolmogorov and Smirnov, one in a thousand"
    for far in (3.0, 4.0, 4.5):
        share = float(torch.special.ndtr(torch.tensor(-far, dtype=torch.float64)))
        for side in (z > far, z < -far):
            assert float(side.double().mean()) == pytest.approx(share, abs=4.5 * (share / n) ** 0.5), far
    assert z.isfinite().all()
    assert float(randomness.Normals(torch.Generator().manual_seed(0), 3.0)(n).std()) == pytest.approx(3.0, rel=0.01)


def test_our_normals_are_independent():
    generator = torch.Generator().manual_seed(0)
    first, second = randomness.Normals(generator), randomness.Normals(generator)
    x, y, n = first(1_000_000).double(), second(1_000_000).double(), 1_000_000
    z = first(n).double()
    for power in (1, 2):
        a, b, c = ((x.pow(power) - power + 1) / power**0.5 for x in (x, y, z))  # (z^2 - 1) / sqrt(2) has variance 1
        for lag in (1, 2, 3, 4, 8, 32, 2**16, 2**17):
            assert abs(float((a[lag:] * a[:-lag]).mean())) < 5e-3, lag
        assert abs(float((a * b).mean())) < 5e-3, "the next draw of the generator seeds others"
        assert abs(float((a * c).mean())) < 5e-3, "and so does the next call"


def test_the_same_generator_gives_the_same_normals_in_odd_numbers_too():
    for n in (1, 2, 7, 100_001):
        a, b = (randomness.Normals(torch.Generator().manual_seed(5))(n).clone() for _ in range(2))
        assert a.shape == (n,)
        assert torch.equal(a, b)


def test_the_ends_of_the_integers_are_finite_too(monkeypatch):
    class Ends:
        def __init__(self, seed: int): ...

        def random_raw(self, n: int) -> np.ndarray:
            return np.tile(np.array([-(2**31), 2**31 - 1], dtype=np.int32), n).view(np.uint64)

    monkeypatch.setattr(np.random, "SFC64", Ends)
    x = randomness.Normals(torch.Generator())(10)
    assert 5.4 < float(x.max()) < 5.5
    assert float(x.min()) == -float(x.max())


def test_our_normals_are_for_many_in_single_precision_on_a_cpu():
    many = torch.empty(30_000, device="meta")
    assert not randomness.Normals.pay([many])
    assert not randomness.Normals.pay([torch.empty(30_000, dtype=torch.float64)])
    assert not randomness.Normals.pay([torch.empty(300)])
    assert randomness.Normals.pay([torch.empty(10_000)] * 3) == torch.backends.mkl.is_available()


def test_hashes_tell_rows_apart_and_know_them_again():
    images = torch.randint(0, 2, (5000, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    for kind in (torch.float32, torch.uint8, torch.bool):
        assert len(randomness.hash_rows([images.to(kind)]).unique()) == len(images.flatten(1).unique(dim=0))
    words = torch.cartesian_prod(*[torch.arange(-1, 7)] * 5)  # small integers, of which sums over places are soon alike
    keys = randomness.hash_rows([words])
    assert len(keys.unique()) == len(words)
    assert torch.equal(randomness.hash_rows([words.mT.contiguous().mT.flip(0)]).flip(0), keys)
    assert len(randomness.hash_rows([words[:, :2], words[:, 2:]]).unique()) == len(words)
    assert not torch.equal(
        randomness.hash_rows([words[:, :1], words[:, 1:2]]), randomness.hash_rows([words[:, 1:2], words[:, :1]])
    )


def test_uniforms_of_hashes():
    u = randomness.uniforms_from(torch.arange(-50_000, 50_000)).sort().values
    assert 0 <= float(u[0]) <= float(u[-1]) < 1
    even = (torch.arange(100_000) + 0.5) / 100_000
    assert float((u - even).abs().max()) < 1.95 / 100_000**0.5  # Kolmogorov and Smirnov, at a thousandth
