"""The Pi-model against what is known of it in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from dubito import MAP, Categorical, Gaussian, MCDropout, Model, PiModel
from dubito.augment import Noise
from dubito.priors import Normal


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_on_linear_regression_with_noise_it_is_ridge(temperature):
    r"""Noise e of scale s on the inputs makes the fit that of A + N s^2 / sigma^2 I, and two views of it differ by (e - e')^T w,
    whose mean square is 2 s^2 |w|^2: with the weight v the optimum is that of A + (N s^2 / sigma^2 + 4 N v s^2) I."""
    noise, scale, s, v = 0.5, 0.8, 0.3, 2.0
    source = torch.Generator().manual_seed(1)
    x = torch.randn(60, 3, generator=source, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + noise * torch.randn(60, 1, generator=source).double()
    eye = torch.eye(3, dtype=torch.float64)
    precision = x.mT @ x / noise**2 + eye / scale**2 + 60 * s**2 * (1 / noise**2 + 4 * v) * eye
    exact = torch.linalg.solve(precision, x.mT @ y / noise**2)
    model = Model(nn.Linear(3, 1, bias=False).double(), Gaussian(scale=noise), Normal(scale=scale))
    many = 60  # copies average over the noise within a step; what they stand for is still 60 examples
    method = PiModel(MAP(epochs=100, learning_rate=0.1), augment=Noise(s), weight=v, ramp_up=0.0)
    found = dubito.fit(
        model, method, (x.repeat(many, 1), y.repeat(many, 1)), n_data=60, batch_size=60 * many, temperature=temperature
    )
    assert torch.allclose(found.params["weight"].mT, exact, atol=0.02)
    plain = torch.linalg.solve(precision - 60 * s**2 * 4 * v * eye, x.mT @ y / noise**2)
    assert (plain - exact).abs().max() > 0.2, "the consistency is what makes the difference"


def test_two_passes_that_cannot_differ_are_refused():
    data = torch.randn(8, 2), torch.arange(8) % 3
    with pytest.raises(ValueError, match="cannot disagree"):
        dubito.fit(Model(nn.Linear(2, 3), Categorical()), PiModel(MAP(epochs=1)), data)
    # dropout that the method puts on makes them differ, and one labelled example is enough for BatchNorm beside others without
    dubito.fit(Model(nn.Linear(2, 3), Categorical()), PiModel(MCDropout(epochs=1, at="", rate=0.5)), data)
    network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    dubito.fit(Model(network, Categorical()), PiModel(MAP(epochs=1), unlabelled=data[0]), (data[0][:1], data[1][:1]))


def test_running_statistics_follow_one_pass_a_step():
    counts = []
    network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    method = PiModel(MAP(epochs=2), augment=Noise(0.1))
    data = torch.randn(16, 2), torch.arange(16) % 2
    dubito.fit(
        Model(network, Categorical()),
        method,
        data,
        batch_size=8,
        callbacks=[lambda event: counts.append(int(event.state.student.buffers["1.num_batches_tracked"]))],
    )
    assert counts == [1, 2, 3, 4]
