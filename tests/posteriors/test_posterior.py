"""What every posterior can do, whatever its form."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

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
