"""Temporal ensembling against its recursion, example by example."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dubito
from dubito import MAP, Categorical, Gaussian, Model, TemporalEnsembling
from dubito.priors import Normal


def data(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 3


def test_what_is_remembered_of_every_example():
    """The average is kept by hand from the weights before every step, for labelled and unlabelled examples."""
    x, y = data()
    more = torch.randn(9, 2, generator=torch.Generator().manual_seed(1))
    model = Model(nn.Linear(2, 3), Categorical())
    weights = [model.parameters()]
    states, told = [], []

    def keep(event):
        weights.append({name: leaf.clone() for name, leaf in event.state.student.params.items()})
        states.append((event.state.sums.clone(), event.state.seen.clone()))
        told.append(float(event.info["consistency"]))

    method = TemporalEnsembling(MAP(epochs=5, learning_rate=0.1), unlabelled=more, unlabelled_size=9, decay=0.6, ramp_up=0.0)
    dubito.fit(model, method, (x, y), batch_size=12, callbacks=[keep])
    everything = torch.cat([x, more])
    sums, expected = torch.zeros(21, 3), []
    for k, (params, (found, seen)) in enumerate(zip(weights[:-1], states, strict=True)):
        z = torch.softmax(everything @ params["weight"].mT + params["bias"], -1)
        expected.append(0.0 if k == 0 else float((z - sums / (1 - 0.6**k)).pow(2).mean()))
        sums = 0.6 * sums + 0.4 * z
        assert (seen == k + 1).all()
        assert torch.allclose(found[12:], sums[12:], atol=1e-5)  # the unlabelled, by their rows
        order = [int((found[:12] - row).abs().sum(1).argmin()) for row in sums[:12]]
        assert sorted(order) == list(range(12))  # the labelled, wherever each has its place
        assert torch.allclose(found[:12][order], sums[:12], atol=1e-5)
    assert told == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert told[0] == 0.0, "who comes for the first time has nothing to agree with"
    assert told[2] > 0


def test_on_linear_regression_it_is_the_ridge_solution():
    """Where the weights stand still the averages catch up, and agreement costs nothing."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(60, 3, generator=source, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.5 * torch.randn(60, 1, generator=source).double()
    model = Model(nn.Linear(3, 1, bias=False).double(), Gaussian(scale=0.5), Normal(scale=0.8))
    exact = torch.linalg.solve(x.mT @ x / 0.25 + torch.eye(3) / 0.64, x.mT @ y / 0.25)
    method = TemporalEnsembling(MAP(epochs=150, learning_rate=0.2), weight=3.0)
    found = dubito.fit(model, method, (x, y), batch_size=60)
    assert torch.allclose(found.params["weight"].mT, exact, atol=1e-4)


def test_examples_that_change_are_noticed():
    class Augmented(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return torch.randn(2), i % 3

    with pytest.raises(ValueError, match="more than 12 different labelled examples"):
        dubito.fit(Model(nn.Linear(2, 3), Categorical()), TemporalEnsembling(MAP(epochs=3)), DataLoader(Augmented(), 4))


def test_an_example_that_is_there_twice_is_one():
    x, y = data()
    counts = []
    dubito.fit(
        Model(nn.Linear(2, 3), Categorical()),
        TemporalEnsembling(MAP(epochs=2)),
        (torch.cat([x, x]), torch.cat([y, y])),
        batch_size=24,
        callbacks=[lambda event: counts.append((event.state.known, int(event.state.seen.sum())))],
    )
    assert counts == [(12, 12), (12, 24)]


def test_the_first_prediction_is_given_back_whatever_the_decay():
    """Z / (1 - a^k) after one is that one, also where 1 - a is small."""
    told = []
    method = TemporalEnsembling(MAP(epochs=2, learning_rate=1e-12), decay=0.99999, ramp_up=0.0)
    dubito.fit(
        Model(nn.Linear(2, 3), Categorical()), method, data(), callbacks=[lambda event: told.append(event.info["consistency"])]
    )
    assert float(told[1]) < 1e-10


def test_refusals():
    with pytest.raises(ValueError, match="decay must be"):
        TemporalEnsembling(MAP(), decay=1.0)
