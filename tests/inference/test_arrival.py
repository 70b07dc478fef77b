"""Training that ends on its way is told; training at the defaults, and at an optimum, is not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dubito
from dubito import IVON, MAP, SWAG, Ensemble, MeanTeacher, Variational
from dubito.model import Target

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
    IVON(epochs=4),
    SWAG(epochs=10, learning_rate=0.01),
    SWAG(epochs=30, learning_rate=0.003),
    Ensemble(SWAG(epochs=10, learning_rate=0.01), 2),
]


@pytest.mark.parametrize("method", SHORT, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("batch_size", [80, 20])
def test_short_training_is_told(method, batch_size):
    with pytest.warns(UserWarning, match=WORDS):
        fit(method, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [128, 256])
def test_a_short_training_of_ivon_in_many_batches_is_told(batch_size):
    """The noise of many batches in a pass hides the gradient of a single step, and not that of the last steps together."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 10, generator=source)
    y = x @ torch.randn(10, 1, generator=source) + 0.3 * torch.randn(1000, 1, generator=source)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 1))
    with pytest.warns(UserWarning, match=WORDS):
        dubito.fit(dubito.Model(network, dubito.Gaussian()), IVON(epochs=4), (x, y), batch_size=batch_size, progress=False)


@pytest.mark.parametrize(("batch_size", "epochs"), [(20, 400), (80, 1500)])
@pytest.mark.parametrize("classes", [True, False])
def test_a_long_training_of_ivon_is_not_told(batch_size, epochs, classes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(IVON(epochs=epochs), batch_size=batch_size, classes=classes)
        fit(IVON(epochs=epochs // 4, samples=2), batch_size=batch_size, classes=True)


def test_a_walk_around_the_mode_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            fit(SWAG(epochs=60), batch_size=20, seed=seed)
            fit(SWAG(epochs=60), batch_size=20, seed=seed, classes=True, layers=True)
            fit(Ensemble(SWAG(epochs=60), 2), batch_size=20, seed=seed)


def test_a_rise_of_swag_is_that_of_the_log_joint(monkeypatch):
    """The objective of an epoch that is one batch is the log joint at the weights before its step, but for the prior after it."""
    seen = []
    rise = SWAG.rise

    def kept(self, target, state):
        seen.append(state)
        return rise(self, target, state)

    monkeypatch.setattr(SWAG, "rise", kept)
    posterior = fit(SWAG(epochs=40, learning_rate=1e-4, check=False), temperature=2.0)
    target = Target(posterior.model, 80, temperature=2.0)
    assert len(seen[0].objective) == seen[0].collected == 20
    assert float(seen[0].objective[-1]) == pytest.approx(float(target.log_joint(seen[0].params, [(X, Y)])), rel=1e-2)


@pytest.mark.parametrize(
    "method",
    [MAP(epochs=100, check=False), Ensemble(MAP(epochs=100), 2, hold_out=0.2), SWAG(epochs=10, learning_rate=0.01, check=False)],
)
def test_it_says_nothing_on_request_and_where_training_stops_early(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(method)


def test_a_fit_that_a_callback_stops_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(MAP(epochs=100), callbacks=[lambda event: event.step == 3])


@pytest.mark.parametrize("method", [MAP(), Variational(), IVON(), SWAG()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("classes", [True, False])
def test_the_defaults_arrive(method, classes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(method, classes=classes, layers=True)
