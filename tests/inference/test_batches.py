"""What is given as data: all of it is read, and counted right."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import dubito
from dubito import MAP, Gaussian, Laplace, Model, NeuralLinear
from dubito.inference.batches import batches

N = 45


def data(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    return x, x[:, :1] + 0.1 * torch.randn(n, 1, generator=g, dtype=torch.float64)


def model(*layers: nn.Module) -> Model:
    return Model(nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 1)).double(), Gaussian(scale=0.1))


class Stream:
    """Batches without a length, the largest first; the global generator is drawn from on the way."""

    def __init__(self, endless: bool = False):
        self.endless = endless

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        parts = list(zip(*(leaf.split([9, *[1] * 36]) for leaf in data()), strict=True))
        for part in cycle(parts) if self.endless else parts:
            torch.rand(1)
            yield part


class Shards(IterableDataset):
    """Every worker has its share of the examples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info, (x, y) = get_worker_info(), data()
        share = slice(None) if info is None else slice(info.id, None, info.num_workers)
        return iter(list(zip(x[share], y[share], strict=True)))

    def __len__(self) -> int:
        return N


@pytest.mark.parametrize("method", [NeuralLinear(), Laplace(check=False), Laplace(corrected=True, check=False)])
@pytest.mark.parametrize("kind", ["stream", "one worker", "shards"])
def test_data_without_a_length_are_read_whole_in_one_pass(method, kind):
    loaders = {
        "stream": Stream(),
        "one worker": DataLoader(Shards(), batch_size=4, num_workers=1),
        "shards": DataLoader(Shards(), batch_size=5, num_workers=2),  # of 23 and 22: 10 batches, not 45 / 5
    }
    mine, (x, y) = model(), data()
    whole, parts = dubito.fit(mine, method, (x, y)), dubito.fit(mine, method, loaders[kind], n_data=N)
    torch.testing.assert_close(parts.predict(x).mean, whole.predict(x).mean)
    torch.testing.assert_close(parts.predict(x).uncertainty.epistemic, whole.predict(x).uncertainty.epistemic)


def test_counting_a_pass_leaves_all_generators_as_they_were():
    mine, own = model(), torch.Generator().manual_seed(3)
    for source in (Stream(), DataLoader(Shards(), batch_size=5, num_workers=2, generator=own)):
        before = torch.get_rng_state(), own.get_state()
        assert batches(mine, source, n_data=N).n_batches == (37 if isinstance(source, Stream) else 10)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(own.get_state(), before[1])


def test_a_stream_without_an_end_has_passes_of_n_data_examples():
    assert batches(model(), Stream(endless=True), n_data=N).n_batches == 37
    steps = []
    dubito.fit(model(), MAP(epochs=2), Stream(endless=True), n_data=10, callbacks=[lambda event: steps.append(event.step)])
    assert steps == [1, 2, 3, 4]  # 9 + 1 examples a pass


@pytest.mark.parametrize(("n", "size"), [(33, 32), (33, 16), (5, 2), (32, 16), (3, 8)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_a_data_set_are_of_nearly_one_size(n, size, shuffle):
    x, y = data(n)
    read = batches(model(), TensorDataset(x, y), size=size, shuffle=shuffle)
    parts = [part for part, _ in read]
    assert (read.n_data, read.n_batches) == (n, len(parts)) == (n, -(-n // size))
    sizes = [len(part) for part in parts]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    rows = torch.cat(parts)
    assert torch.equal(rows, x) != shuffle
    assert torch.equal(rows[rows[:, 0].argsort()], x[x[:, 0].argsort()]), "every example once"


def test_a_data_set_is_shuffled_as_by_a_loader():
    given, mine = TensorDataset(*data(32)), model()
    fits = [dubito.fit(mine, MAP(epochs=3), d, batch_size=8) for d in (given, DataLoader(given, batch_size=8, shuffle=True))]
    assert all(torch.equal(leaf, fits[1].params[name]) for name, leaf in fits[0].params.items())


def test_a_data_set_with_one_example_more_than_fits_goes_through_batch_norm():
    fitted = dubito.fit(model(nn.BatchNorm1d(4)), MAP(epochs=2), TensorDataset(*data(33)), batch_size=16)
    assert torch.isfinite(fitted.predict(data()[0]).mean).all()


def test_a_data_set_without_examples():
    with pytest.raises(ValueError, match="there is no data"):
        dubito.fit(model(), MAP(epochs=1), TensorDataset(*data(0)))


@pytest.mark.parametrize("method", [MAP(epochs=1), NeuralLinear(), Laplace(check=False)])
@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_batch_is_told_in_words(method, place):
    (x, y), given = data(), [data(20)]
    given.insert(place, (x[:0], y[:0]))
    for listed in (given, [{"input": one, "labels": two} for one, two in given]):
        with pytest.raises(ValueError, match=f"batch {place} of the data has no examples: leave out empty batches"):
            dubito.fit(model(), method, listed)
