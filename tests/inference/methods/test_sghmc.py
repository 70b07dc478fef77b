"""SGHMC: its stationary variance at a finite step, to the letter, and SGD with momentum underneath."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dubito.methods.sghmc import SGHMC
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import dubito
from dubito import Categorical, Gaussian, Model
from dubito.priors import Normal
from inference.methods.gaussians import Levels, reshuffled


def variance(levels: Levels, found) -> Tensor:
    return (found.params["level"] - levels.mean).square().mean(0)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 4.0])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_with_all_data_the_variance_is_exact_at_any_step(momentum, temperature):
    levels = Levels(24, temperature)
    method = SGHMC(learning_rate=0.3, momentum=momentum, burn_in=30, draws=400, thin=3)
    found = dubito.fit(levels.model, method, levels.data, batch_size=24, temperature=temperature, start=levels.start())
    assert method.factor(levels.step(method)) ** 2 * levels.precision > 1.5, "a step that is felt; 4 is unstable"
    assert float(variance(levels, found).mean()) == pytest.approx(1 / levels.precision, rel=0.03)
    away = (found.params["level"].mean(0) - levels.mean) * math.sqrt(400 * levels.precision)
    assert away.square().mean() < 2


@pytest.mark.parametrize("temperature", [1.0, 0.1, 4.0])
@pytest.mark.parametrize(("n", "size"), [(24, 4), (96, 32), (400, 50)])
def test_mini_batches_add_the_noise_of_their_gradients(n, size, temperature):
    levels, method = Levels(n, temperature), SGHMC(learning_rate=0.1, momentum=0.5, burn_in=20, draws=150)
    found = dubito.fit(levels.model, method, levels.data, batch_size=size, temperature=temperature, start=levels.start())
    mu, epsilon = method.momentum, method.factor(levels.step(method))
    transition = torch.tensor(
        [
            [1 - epsilon**2 * levels.precision * (1 + mu) / 2, epsilon * (1 + mu) / 2],
            [-mu * epsilon * levels.precision, mu],
        ],
        dtype=torch.float64,
    )
    kick = torch.tensor([epsilon**2 * (1 + mu) / 2, mu * epsilon], dtype=torch.float64)
    heat = math.sqrt(1 - mu**2) * torch.tensor([epsilon / 2, 1.0], dtype=torch.float64)
    exact = reshuffled(levels, size, transition, kick, heat)
    assert float((variance(levels, found) / exact).mean()) == pytest.approx(1.0, abs=0.05)


def test_the_formula_of_the_docstring_where_batches_are_independent():
    levels, method = Levels(96), SGHMC(learning_rate=0.05, momentum=0.7, burn_in=20, draws=250)
    dataset = TensorDataset(*levels.data)
    loader = DataLoader(dataset, batch_size=16, sampler=RandomSampler(dataset, replacement=True))
    found = dubito.fit(levels.model, method, loader, start=levels.start())
    mu, epsilon, precision = method.momentum, method.factor(levels.step(method)), levels.precision
    noise = levels.gradient_noise(16, replacement=True)
    exact = (1 + (1 + mu) / (1 - mu) * epsilon**2 * noise / (4 - epsilon**2 * precision)) / precision
    assert float((variance(levels, found) / exact).mean()) == pytest.approx(1.0, abs=0.05)
    assert float((exact * precision).mean()) > 1.5, "the noise of the gradients is felt"


def test_a_preconditioner_is_a_change_of_coordinates_that_leaves_the_law_exact():
    levels = Levels(24)
    method = SGHMC(preconditioner="rmsprop", learning_rate=0.02, momentum=0.6, burn_in=200, draws=300, thin=4)
    found = dubito.fit(levels.model, method, levels.data, batch_size=24, start=levels.start())
    assert float(variance(levels, found).mean()) == pytest.approx(1 / levels.precision, rel=0.04)


def test_the_velocity_is_standard_normal_whatever_the_step():
    """So that a step that changes in a cycle leaves it as it is."""
    levels = Levels(24, 0.5)
    method = SGHMC(learning_rate=0.01, momentum=0.5, burn_in=40, draws=1)
    speeds: list[Tensor] = []

    def watch(event: dubito.inference.method.Event) -> None:
        if event.step > 20:
            speeds.append(event.state.velocity["level"].clone())

    dubito.fit(levels.model, method, levels.data, batch_size=24, temperature=0.5, start=levels.start(), callbacks=[watch])
    assert float(torch.stack(speeds).var()) == pytest.approx(1.0, abs=0.1)


def test_without_noise_it_is_sgd_with_momentum(monkeypatch):
    monkeypatch.setattr(SGHMC, "explores", lambda *_: True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = torch.randn(32, 3).double(), torch.randint(2, (32,))
    model = Model(net, Categorical(), Normal(scale=0.5))
    method = SGHMC(learning_rate=0.1, momentum=0.9, burn_in=19, draws=1)
    found = dubito.fit(model, method, (x, y), batch_size=32, temperature=0.3)
    by_hand = copy.deepcopy(net)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9, weight_decay=1 / (32 * 0.5**2))
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
    for name, p in by_hand.named_parameters():
        assert torch.allclose(found.params[name][0], p, rtol=1e-10, atol=1e-12)


def test_a_learned_noise_level_is_sampled_too():
    """Of the level and the noise of many numbers: the log scale has variance 1 / (2 N) near enough."""
    generator = torch.Generator().manual_seed(0)
    y = 0.7 * torch.randn(400, 1, generator=generator, dtype=torch.float64)
    model = Model(nn.Linear(1, 1).double(), Gaussian(), only="bias")
    method = SGHMC(learning_rate=0.05, momentum=0.5, burn_in=100, draws=500, thin=3)
    found = dubito.fit(model, method, (torch.zeros_like(y), y), batch_size=400)
    log_scale = found.params["likelihood:log_scale"]
    assert float(log_scale.mean()) == pytest.approx(float(y.std().log()), abs=0.01)
    assert float(log_scale.var()) == pytest.approx(1 / 800, rel=0.25)
    assert float(found.params["bias"].var()) == pytest.approx(float(y.var()) / 400, rel=0.25)


def test_momentum_is_checked():
    for momentum in (1.0, -0.1):
        with pytest.raises(ValueError, match="momentum must be at least 0 and below 1"):
            SGHMC(momentum=momentum)
