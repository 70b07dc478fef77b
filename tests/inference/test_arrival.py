"""Training that ends on its way is told; training at the defaults, and at an optimum, is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dubito
from dubito import IVON, MAP, Ensemble, MeanTeacher, Variational

G = torch.Generator().manual_seed(0)
X = torch.randn(80, 5, generator=G)
Y = X @ torch.randn(5, 1, generator=G) + 0.5 + 0.3 * torch.randn(80, 1, generator=G)
LABELS = (Y.flatten() > 0).long()
WORDS = "The training has not arrived"


def fit(method, *, classes: bool = False, layers: bool = False, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = 2 if classes else 1
        network = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, outputs)) if layers else nn.Linear(5, outputs)
    likelihood = dubito.Categorical() if classes else dubito.Gaussian(scale=0.3)
    return dubito.fit(
        dubito.Model(network, likelihood, dubito.priors.Normal(1.0)),
        method,
        (X, LABELS if classes else Y),
        progress=False,
        **options,
    )


SHORT = [
    MAP(epochs=100),
    MAP(epochs=3),
    MAP(epochs=300, learning_rate=1e-6),
    Variational(epochs=3),
    MAP(epochs=30, learning_rate=0.003),
    Variational(epochs=100),
    Ensemble(MAP(epochs=100), 3),
    Ensemble(MAP(epochs=100), 2, vectorize=False),
    MeanTeacher(MAP(epochs=100)),
    IVON(epochs=10),
]


@pytest.mark.parametrize("method", SHORT, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("batch_size", [80, 20])
def test_short_training_is_told(method, batch_size):
    with pytest.warns(UserWarning, match=WORDS):
        fit(method, batch_size=batch_size)


@pytest.mark.parametrize("method", [MAP(epochs=100, check=False), Ensemble(MAP(epochs=100), 2, hold_out=0.2)])
def test_it_says_nothing_on_request_and_where_training_stops_early(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(method)


def test_a_fit_that_a_callback_stops_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(MAP(epochs=100), callbacks=[lambda event: event.step == 3])


@pytest.mark.parametrize("method", [MAP(), Variational(), IVON()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("classes", [True, False])
def test_the_defaults_arrive(method, classes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(method, classes=classes, layers=True)
