"""Judgements and predictions on several processes are those of one."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dubito
from distributed_ranks import errors, on_ranks
from dubito.posteriors.predictive import LatentMixture

N = 37
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
Y = X.sum(1, keepdim=True) + 0.5 * torch.randn(N, 1, generator=GENERATOR)
CLASSES = torch.randint(3, (N,), generator=GENERATOR)
LABELS = torch.randint(2, (N, 3), generator=GENERATOR)


def posterior(likelihood, y, method=None):
    torch.manual_seed(1)
    outputs = 3 if likelihood.discrete else 1
    model = dubito.Model(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)), likelihood)
    return dubito.fit(model, method or dubito.Laplace(check=False), (X, y), progress=False, distributed=False)


KINDS = {
    "classes": (lambda: posterior(dubito.Categorical(), CLASSES), CLASSES),
    "numbers": (lambda: posterior(dubito.Gaussian(scale=0.5), Y), Y),
    "labels": (lambda: posterior(dubito.Bernoulli(), LABELS), LABELS),
    "counts": (lambda: posterior(dubito.Poisson(), CLASSES.unsqueeze(1)), CLASSES.unsqueeze(1)),
    "draws": (lambda: posterior(dubito.Categorical(), CLASSES, dubito.MCDropout(epochs=2, at="", rate=0.3, draws=8)), CLASSES),
}  # fmt: skip


PARTS = {
    "reliability": ("edges", "count", "confidence", "accuracy", "lower", "upper"),
    "quantiles": ("levels", "observed", "n"),
}


def same(one, other):
    """Two judgements."""
    assert one.n == other.n
    assert list(one.values) == list(other.values)
    for mine, theirs in ((one.values, other.values), (one.standard_errors, other.standard_errors)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
    for name, decision in one.decisions.items():
        torch.testing.assert_close(other.decisions[name].risk, decision.risk, rtol=1e-5, atol=1e-6)
    for name in ("reliability", "quantiles"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        for part in PARTS[name] if mine is not None else ():
            torch.testing.assert_close(getattr(theirs, part), getattr(mine, part), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (one.pit is None) == (other.pit is None)
    if one.pit is not None:
        torch.testing.assert_close(other.pit, one.pit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_judgement_is_that_of_one_process(kind):
    make, y = KINDS[kind]
    scores = ["predictive_entropy", "mutual_information"] if kind == "classes" else None
    alone = dubito.judge(make(), (X, y), scores=scores)
    for size in (2, 3):
        for other in on_ranks(size, lambda rank: dubito.judge(make(), (X, y), scores=scores, distributed="auto")):
            same(alone, other)


class Own:
    """A function from inputs to a predictive, without a model."""

    def __call__(self, x):
        return LatentMixture(dubito.Categorical(), torch.stack([x, 2 * x]))


def shuffled(rank):
    return DataLoader(TensorDataset(X, CLASSES), 5, shuffle=True, generator=torch.Generator().manual_seed(rank))


BATCHES = [(X[:20], CLASSES[:20]), (X[20:21], CLASSES[20:21]), (X[21:], CLASSES[21:])]
DATA = {
    "arrays": lambda rank: (X.numpy(), CLASSES.numpy()),
    "a data set": lambda rank: TensorDataset(X, CLASSES),
    "a loader that shuffles": shuffled,
    "batches, the same": lambda rank: BATCHES,
    "one batch": lambda rank: [(X, CLASSES)],
    "a stream": lambda rank: iter(BATCHES),
    "a DistributedSampler": lambda rank: DataLoader(
        TensorDataset(X, CLASSES), 4, sampler=DistributedSampler(TensorDataset(X, CLASSES), 1, 0, shuffle=False)
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data_of_every_kind_count_once(name):
    alone = dubito.judge(Own(), (X, CLASSES))
    before = torch.get_rng_state()
    for other in on_ranks(3, lambda rank: dubito.judge(Own(), DATA[name](rank), size=8, distributed="auto")):
        same(alone, other)
    assert torch.equal(before, torch.get_rng_state())


def test_parts_of_their_own_count_once_also_where_a_process_has_none():
    own = [BATCHES[:1], BATCHES[1:], []]
    alone = dubito.judge(Own(), (X, CLASSES))
    for other in on_ranks(3, lambda rank: dubito.judge(Own(), own[rank], distributed="auto")):
        same(alone, other)


def test_without_distributed_every_process_judges_for_itself():
    first, second = on_ranks(2, lambda rank: dubito.judge(Own(), (X[: 10 + rank], CLASSES[: 10 + rank])))
    assert (first.n, second.n) == (10, 11)


def test_batches_are_predicted_by_one_process_each():
    whole = posterior(dubito.Categorical(), CLASSES)

    def work(rank):
        streamed = whole.predict_batches(BATCHES, distributed="auto")
        return [(p.mean, y) for p, y in streamed]

    parts = on_ranks(2, work)
    turns = [pair for turn in itertools.zip_longest(*parts) for pair in turn if pair is not None]
    assert [len(part) for part in parts] == [2, 1]
    torch.testing.assert_close(torch.cat([mean for mean, _ in turns]), whole.predict(X).mean)
    assert torch.equal(torch.cat([y for _, y in turns]), CLASSES)


def sampled(rank):
    data = TensorDataset(X, CLASSES)
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank))


REFUSED = {
    "a sampler that repeats": (lambda rank: (sampled(rank), {}), "the DistributedSampler repeats 1 of the 37 examples"),
    "some alike": (
        lambda rank: (BATCHES[rank // 2 :], {}),
        "some of the processes are given the same first batch, and others another",
    ),
    "other metrics": (lambda rank: (BATCHES, {"bins": 10 + rank}), "the processes differ in metrics"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_every_process(name):
    make, words = REFUSED[name]

    def work(rank):
        data, options = make(rank)
        dubito.judge(Own(), data, distributed="auto", **options)

    for said in errors(2 if name != "some alike" else 3, work):
        assert re.search(words, said), said


def test_an_error_of_one_process_ends_all():
    def predict(x):
        if len(x) == 1:
            raise ArithmeticError("one row")
        return Own()(x)

    first, second = errors(2, lambda rank: dubito.judge(predict, BATCHES, distributed="auto"))
    assert second == "ArithmeticError: one row"
    assert first.startswith("ProcessError: process 1 of 2 has failed: ArithmeticError: one row")
