"""What data several processes may be given, and what is refused."""

import itertools
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import dubito
from distributed_ranks import errors, on_ranks
from dubito import priors
from dubito.tensors import processes

N = 37
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
Y = torch.sin(X).sum(1, keepdim=True) + 0.1 * torch.randn(N, 1, generator=GENERATOR)
MAP = dubito.MAP(epochs=5)


def model(*layers, seed=1, scale=None):
    torch.manual_seed(seed)
    return dubito.Model(
        nn.Sequential(nn.Linear(3, 8), *layers, nn.Tanh(), nn.Linear(8, 1)), dubito.Gaussian(scale=scale), priors.Normal()
    )


def fit(data, method=MAP, *, of=None, **options):
    posterior = dubito.fit(of or model(), method, data, progress=False, **options)
    return {"mean": posterior.predict(X[:5]).mean, **posterior.center[0]}


def same(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        torch.testing.assert_close(other[name], leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (TensorDataset(X, Y), {"batch_size": 20}),
        ((X, Y), {"batch_size": 2}),  # fewer examples than processes
        ((X, Y), {"batch_size": 8, "accumulate": 2}),
        ((X, Y), {"batch_size": 20, "validation": (X[:11], -Y[:11]), "patience": 1}),
        ((X.numpy(), Y.numpy()), {"batch_size": 20, "temperature": 0.5, "n_data": 1000}),
    ],
)
def test_whole_data_are_divided(data, options):
    network = model(nn.Dropout(0.2))
    alone = fit(data, of=network, **options)
    for other in on_ranks(3, lambda rank: fit(data, of=network, **options)):
        same(alone, other)


BATCHES = [
    [(X[:5], Y[:5]), (X[5:10], Y[5:10]), (X[10:15], Y[10:15])],
    [(X[15:19], Y[15:19]), (X[19:21], Y[19:21])],
]
TOGETHER = [
    (torch.cat([BATCHES[rank][i][0] for rank in (0, 1) if i < len(BATCHES[rank])]),
     torch.cat([BATCHES[rank][i][1] for rank in (0, 1) if i < len(BATCHES[rank])]))
    for i in range(3)
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        (MAP, ()),
        (MAP, (nn.BatchNorm1d(8), nn.Dropout(0.3))),
        (dubito.Variational(epochs=5, draws=4), ()),
        (dubito.NeuralLinear(), ()),
        (dubito.OnlineLaplace(epochs=5, every=2), ()),
    ],
)
def test_own_batches_of_every_process_count_once_also_where_some_have_more(method, layers):
    alone = fit(TOGETHER, method, of=model(*layers, scale=0.3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apart = on_ranks(2, lambda rank: fit(BATCHES[rank], method, of=model(*layers, scale=0.3)))
    assert not said
    for other in apart:
        same(alone, other)


def test_uneven_shares_are_told_by_the_first_process_alone():
    def work(rank):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(BATCHES[rank])
        return [str(one.message) for one in said]

    told, silent = on_ranks(2, work)
    assert told[0].startswith("The processes have 15, 6 examples: all 21 count once")
    assert silent == []


class Stream(IterableDataset):
    def __init__(self, rank):
        self.rows = range(rank, N, 2)

    def __iter__(self):
        return iter([(X[i], Y[i]) for i in self.rows])


def test_an_iterable_of_every_process():
    rows = [[*range(0, 20, 2), *range(1, 20, 2)], [*range(20, N, 2), *range(21, N, 2)]]
    batches = [(X[each], Y[each]) for each in rows]
    alone = fit(batches, of=model(scale=0.3))
    for other in on_ranks(2, lambda rank: fit(DataLoader(Stream(rank), batch_size=10), n_data=N, of=model(scale=0.3))):
        same(alone, other)


def test_a_distributed_sampler_counts_every_example_once_and_keeps_its_epoch():
    def work(rank):
        sampler = DistributedSampler(TensorDataset(X, Y), 2, rank, seed=5)
        sampler.set_epoch(7)
        orders = []

        def seen(event):
            orders.append((event.epoch, sampler.epoch))

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader = DataLoader(TensorDataset(X, Y), batch_size=10, sampler=sampler)
            posterior = dubito.fit(model(), dubito.NeuralLinear(), loader, callbacks=[seen])
            dubito.fit(model(), MAP, loader, callbacks=[seen], progress=False)
        assert all(epoch == held for epoch, held in orders)
        return sampler.epoch, [str(one.message) for one in said], posterior.shape

    (epoch, told, shape), (_, silent, _) = on_ranks(2, work)
    assert epoch == 7
    assert told[0].startswith("The DistributedSampler repeats 1 of the 37 examples in every pass")
    assert silent == []
    assert shape.item() == pytest.approx(1e-3 + N / 2)


def test_batch_norm_statistics_are_those_of_the_whole_batch():
    def run(rank):
        posterior = dubito.fit(model(nn.BatchNorm1d(8)), dubito.MAP(epochs=3), (X, Y), batch_size=20, progress=False)
        return posterior.buffers

    alone = run(0)
    for other in on_ranks(3, run):
        same(alone, other)
    assert not torch.equal(alone["1.running_mean"], torch.zeros(8))


def test_all_processes_begin_where_the_first_does():
    alone = fit((X, Y), of=model(seed=0))
    for other in on_ranks(2, lambda rank: fit((X, Y), of=model(seed=rank))):
        same(alone, other)


P = 3 * 8 + 8 + 8 + 1 + 1  # weights and the learned noise
COSTS = {  # bytes and all-reduces of a step, as docs/distributed.md has them
    "MAP": (dubito.MAP(epochs=3), 4 * (P + 1), 1),
    "SWAG": (dubito.SWAG(epochs=4), 4 * (P + 1), 1),
    "IVON": (dubito.IVON(epochs=3), 4 * (P + 1), 1),
    "IVON, two samples": (dubito.IVON(epochs=3, samples=2), 4 * 2 * (P + 1), 2),
    "IVON, draws of its own": (dubito.IVON(epochs=3, samples=2, draws_per_rank=True), 4 * (2 * P + 2), 1),
    "Variational": (dubito.Variational(epochs=3, samples=2), 4 * (2 * (P - 1) + 1 + 1), 1),
    "SGHMC": (dubito.SGHMC(draws=1, burn_in=2, thin=1, chains=2, vectorize=False), 4 * 2 * (P + 1), 2),
    "MeanTeacher": (dubito.MeanTeacher(dubito.MAP(epochs=3)), 4 * (P + 2), 2),
    "NeuralLinear": (dubito.NeuralLinear(), 8 * (9 * 9 + 9 + 1 + 1), 1),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_step_costs_what_the_page_says(name, monkeypatch):
    method, size, times = COSTS[name]

    def work(rank):
        used = []

        def note(event):
            total = event_processes[0].bytes, event_processes[0].collectives
            used.append(total)

        event_processes, one = [], processes.Processes.sum_

        def counted(self, tensors, **options):
            event_processes[:] = [self]
            one(self, tensors, **options)

        monkeypatch.setattr(processes.Processes, "sum_", counted)
        dubito.fit(model(), method, (X, Y), batch_size=20, callbacks=[note], progress=False)
        return used

    for used in on_ranks(2, work):
        assert len(used) >= 2
        for before, after in itertools.pairwise(used):
            assert (after[0] - before[0], after[1] - before[1] - 1) in (
                (size, times),
                (size, times + 1),
            )  # and the callbacks' gather


def test_distributed_false_fits_every_process_for_itself():
    alone = fit((X[:20], Y[:20]))
    first, second = on_ranks(2, lambda rank: fit((X[:20], Y[:20]) if rank == 0 else (X[20:], Y[20:]), distributed=False))
    same(alone, first, 0)
    assert not torch.equal(first["mean"], second["mean"])


class Counting(nn.Module):
    """A network with a running mean of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.seen.lerp_(x.mean(0), 0.1)
        return self.layer(x - self.seen)


REFUSED = {
    "other data": (lambda rank: ((X + rank, Y), {}), "the processes are given different data: give all of them the same"),
    "other lengths": (lambda rank: ((X[rank:], Y[rank:]), {}), "the processes differ in number of examples: process 0 has .37, 37."),
    "other kinds": (
        lambda rank: ((X, Y) if rank else BATCHES[0], {}),
        "the processes differ in kind of data: process 0 has 'a loader or batches' and process 1 'whole'",
    ),
    "the same batches": (lambda rank: (BATCHES[0], {}), "processes 0 and 1 are given the same first batch, so its examples"),
    "the same loader": (
        lambda rank: (DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(rank)), {}),
        "processes 0 and 1 are given the same first batch",
    ),
    "another sampler": (
        lambda rank: (DataLoader(TensorDataset(X, Y), sampler=DistributedSampler(TensorDataset(X, Y), 4, 2 * rank)), {}),
        "the DistributedSamplers do not divide the data over these 2 processes",
    ),
    "another seed": (lambda rank: ((X, Y), {"seed": rank}), "the processes differ in seed: process 0 has 0 and process 1 1"),
    "another batch size": (lambda rank: ((X, Y), {"batch_size": 5 + rank}), "the processes differ in batch size"),
    "another network": (lambda rank: ((X, Y), {"of": model(*[nn.Linear(8, 8)] * rank)}), "the processes differ in network"),
    "another method": (lambda rank: ((X, Y), {"method": dubito.MAP(epochs=rank + 1)}), "the processes differ in method"),
    "other validation": (
        lambda rank: ((X, Y), {"validation": (X[rank:], Y[rank:])}), "the processes are given different validation data",
    ),
    "another version": (lambda rank: (setattr(dubito, "__version__", str(rank)), ((X, Y), {}))[1], "the processes differ in version"),
    "a buffer of its own": (
        lambda rank: ((X, Y), {"of": dubito.Model(Counting(), dubito.Gaussian())}), "no longer hold the same .*seen.*distributed=False",
    ),
    "coupled rows": (
        lambda rank: ((X, Y), {"of": replace(model(), coupled=True)}), "rows that are coupled cannot be divided: give ",
    ),
    "BatchNorm in several chains": (
        lambda rank: (
            (X, Y), {"method": dubito.SGLD(draws=1, burn_in=2, thin=1, chains=2, vectorize=True), "of": model(nn.BatchNorm1d(8))}
        ),
        "BatchNorm on several processes needs one setting of the weights at a time: give vectorize=False",
    ),
    "an ensemble": (lambda rank: ((X, Y), {"method": dubito.Ensemble(1)}), "Ensemble cannot run on 2 processes: its members"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_every_process(name):
    make, words = REFUSED[name]

    def work(rank):
        data, options = make(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(data, **options)

    for said in errors(2, work):
        assert re.search(words, said), said
