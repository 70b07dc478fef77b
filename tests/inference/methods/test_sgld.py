"""SGLD: its stationary variance at a finite step, to the letter, with and without a preconditioner."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dubito.methods.sgld import SGLD
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import dubito
from dubito import Categorical, Model
from dubito.priors import Normal
from inference.methods.gaussians import Levels, reshuffled


def variance(levels: Levels, found) -> Tensor:
    """About the exact mean, [D]."""
    return (found.params["level"] - levels.mean).square().mean(0)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 4.0])
def test_with_all_data_the_variance_is_that_of_the_step(temperature):
    """1 / (lambda (1 - h lambda / 2)); the mean is exact."""
    levels, method = Levels(24, temperature), SGLD(learning_rate=0.15, burn_in=20, draws=400, thin=3)
    found = dubito.fit(levels.model, method, levels.data, batch_size=24, temperature=temperature, start=levels.start())
    inflated = levels.step(method) * levels.precision / 2
    exact = 1 / (levels.precision * (1 - inflated))
    assert 0.3 < inflated < 0.4, "a step that is felt"
    assert float(variance(levels, found).mean()) == pytest.approx(exact, rel=0.03)
    away = (found.params["level"].mean(0) - levels.mean) / math.sqrt(exact / 400)
    assert away.abs().max() < 6
    assert away.square().mean() < 1.5


@pytest.mark.parametrize("temperature", [1.0, 0.1, 4.0])
@pytest.mark.parametrize(("n", "size"), [(24, 4), (96, 32), (400, 50)])
def test_mini_batches_add_the_noise_of_their_gradients(n, size, temperature):
    """By 2 to 20 times at these; a factor of N, of B or of T that is wrong anywhere shows."""
    levels, method = Levels(n, temperature), SGLD(learning_rate=0.1, burn_in=20, draws=150)
    found = dubito.fit(levels.model, method, levels.data, batch_size=size, temperature=temperature, start=levels.start())
    h = torch.tensor([levels.step(method)], dtype=torch.float64)
    exact = reshuffled(levels, size, (1 - h * levels.precision).reshape(1, 1), h, (2 * h).sqrt())
    assert float((variance(levels, found) / exact).mean()) == pytest.approx(1.0, abs=0.05)


def test_the_formula_of_the_docstring_where_batches_are_independent():
    levels, method = Levels(96), SGLD(learning_rate=0.1, burn_in=20, draws=200)
    dataset = TensorDataset(*levels.data)
    loader = DataLoader(dataset, batch_size=16, sampler=RandomSampler(dataset, replacement=True))
    found = dubito.fit(levels.model, method, loader, start=levels.start())
    h, precision = levels.step(method), levels.precision
    exact = (1 + h * levels.gradient_noise(16, replacement=True) / 2) / (precision * (1 - h * precision / 2))
    assert float((variance(levels, found) / exact).mean()) == pytest.approx(1.0, abs=0.05)
    assert float((exact * precision).mean()) > 1.5, "the noise of the gradients is felt"


def test_chains_have_the_same_law_and_noise_of_their_own():
    levels = Levels(24)
    for vectorize in (True, False):
        method = SGLD(learning_rate=0.15, burn_in=20, draws=150, thin=3, chains=3, vectorize=vectorize)
        found = dubito.fit(levels.model, method, levels.data, batch_size=24, start=levels.start())
        chains = (found.params["level"] - levels.mean).reshape(3, 150, -1)
        exact = 1 / (levels.precision * (1 - levels.step(method) * levels.precision / 2))
        covariance = torch.einsum("ind,jnd->ij", chains, chains) / chains[0].numel()
        assert torch.allclose(covariance, exact * torch.eye(3).double(), atol=0.05 * exact)


def test_a_preconditioner_is_held_while_draws_are_made_and_the_law_is_that_of_its_steps():
    """With a metric R^2 that does not change, the variance is (1 + h R^2 s^2 / 2) / (lambda (1 - h R^2 lambda / 2))."""
    levels = Levels(96)
    method = SGLD(preconditioner="rmsprop", learning_rate=0.05, burn_in=20, draws=300)
    seen: list[tuple[int, Tensor]] = []

    def watch(event: dubito.inference.method.Event) -> None:
        seen.append((event.step, event.state.root["level"][0].clone()))

    dataset = TensorDataset(*levels.data)
    loader = DataLoader(dataset, batch_size=16, sampler=RandomSampler(dataset, replacement=True))
    found = dubito.fit(levels.model, method, loader, start=levels.start(), callbacks=[watch])
    burnt, root = 20 * 6, seen[-1][1]
    assert not torch.equal(seen[burnt - 2][1], root)
    assert all(torch.equal(later, root) for step, later in seen if step >= burnt)
    assert root.std() > 0.01 * root.mean(), "every weight has a step of its own"
    h, precision = levels.step(method) * root.square(), levels.precision
    exact = (1 + h * levels.gradient_noise(16, replacement=True) / 2) / (precision * (1 - h * precision / 2))
    assert (h * precision / 2 < 1).all()
    assert (h * precision / 2).mean() > 0.05, "the step is felt"
    assert float((variance(levels, found) / exact).mean()) == pytest.approx(1.0, abs=0.05)


def test_the_metric_is_that_of_rmsprop():
    """1 / (1 / N + the root mean square of the gradient of the loss per example); the mean does not lean to the zero it starts at."""
    levels, rate = Levels(24), 1e-9  # it stays where it is, so that all gradients are the same
    method = SGLD(preconditioner="rmsprop", learning_rate=rate, burn_in=3, draws=1)
    roots: list[Tensor] = []
    dubito.fit(
        levels.model, method, levels.data, batch_size=24, callbacks=[lambda e: roots.append(e.state.root["level"].clone())]
    )
    slope = (levels.data[1].sum(0) / 0.25) / 24  # at zero
    assert all(torch.allclose(root[0] ** -2, slope.abs() + 1 / 24, rtol=1e-4) for root in roots)


def test_without_noise_it_is_sgd(monkeypatch):
    monkeypatch.setattr(SGLD, "explores", lambda *_: True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(32, 3).double(), torch.randint(2, (32,))
    model = Model(net, Categorical(), Normal(scale=0.5))
    method = SGLD(learning_rate=0.3, burn_in=19, draws=1)
    found = dubito.fit(model, method, (x, y), batch_size=32, temperature=0.3)  # the path does not depend on the temperature
    by_hand = copy.deepcopy(net)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.3, weight_decay=1 / (32 * 0.5**2))
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
    for name, p in by_hand.named_parameters():
        assert torch.allclose(found.params[name][0], p, rtol=1e-10, atol=1e-12)


def test_large_networks_in_single_precision_have_the_same_noise():
    """More than 20,000 weights take their normals from another generator."""
    net = nn.Linear(300, 100, bias=False)
    x, y = torch.zeros(10, 300), torch.zeros(10, 100)  # only the prior has a say in the weights
    model = Model(net, dubito.Gaussian(scale=1.0), Normal(scale=1.0))
    method = SGLD(learning_rate=4.0, burn_in=30, draws=30, thin=2)
    found = dubito.fit(model, method, (x, y), batch_size=10, start={"weight": torch.zeros(100, 300)})
    assert float(found.params["weight"].var()) == pytest.approx(1 / (1 - 0.4 / 2), rel=0.01)
