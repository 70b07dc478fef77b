"""What every posterior can do, whatever its form."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Categorical, Ensemble, Laplace, MCDropout, Model

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def fit(method) -> dubito.posteriors.Posterior:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))
    return dubito.fit(Model(net, Categorical()), method, (X, Y))


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
@pytest.mark.parametrize("method", [Laplace(check=False), MCDropout(epochs=2), Ensemble(MCDropout(epochs=2), 2)], ids=repr)
def test_a_posterior_that_has_predicted_can_be_pickled_and_copied(method, how):
    posterior = fit(method)
    p = posterior.predict(X, how)
    before = dict(vars(posterior))
    for again in (pickle.loads(pickle.dumps(posterior)), copy.deepcopy(posterior), copy.copy(posterior)):
        assert type(again) is type(posterior)
        assert torch.equal(again.predict(X, how).means, p.means)
        assert torch.equal(again.predict(X, how).mean, p.mean)
    assert vars(posterior) == before, "the posterior itself keeps what it has at hand"


class Augmented(TensorDataset):
    """Inputs that are other in every pass, by all three global generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(3) + random.random() + float(np.random.rand()), y  # noqa: NPY002


def test_streaming_leaves_the_generators_alone_and_takes_the_batches_that_the_loader_gives():
    posterior = fit(MCDropout(epochs=1))
    own = torch.Generator().manual_seed(3)
    for options in ({}, {"shuffle": True}, {"shuffle": True, "generator": own}):
        loader = DataLoader(Augmented(X, Y), batch_size=4, **options)

        def state():
            position = np.random.get_state()[2]  # noqa: NPY002
            return [torch.get_rng_state().tolist(), own.get_state().tolist(), random.getstate(), position]

        before = state()
        seen = []
        for p, y in posterior.predict_batches(loader, draws=5):
            assert state() == before
            seen.append((p.means, y))
        assert state() == before
        alone = [(posterior.predict(x, draws=5).means, y) for x, y in loader]  # which moves the generators
        assert state() != before
        assert all(torch.equal(a, b) for one, other in zip(seen, alone, strict=True) for a, b in zip(one, other, strict=True))


def test_streaming_gives_the_generators_back_where_it_is_broken_off():
    posterior = fit(MCDropout(epochs=1))
    before = torch.get_rng_state()
    for _ in posterior.predict_batches(DataLoader(TensorDataset(X, Y), batch_size=4)):
        drawn = torch.rand(1)  # the caller's own draws are the next of the caller's generator
        break
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(1), drawn)
