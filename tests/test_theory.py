"""The experiments in examples/theory do what they say, at a small size."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "theory"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)

    def load(name):
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    yield load
    for name in ("record", "double_descent", "random_labels", "scattering"):
        sys.modules.pop(name, None)


def test_double_descent_has_its_peak_and_the_bayesian_average_has_none(example):
    double_descent = example("double_descent")
    args = argparse.Namespace(train=60, noise=0.2, draws=2)
    few, peak, many = (double_descent.run(width, 0, args) for width in (20, 60, 300))
    assert peak["error"] > max(few["error"], many["error"])
    assert peak["squares"] > 3 * max(few["squares"], many["squares"])
    assert many["train squares"] < 1e-12 < few["train squares"]  # past the peak every label is fitted
    assert peak["squares, Bayes"] < 1.2 * few["squares, Bayes"]
    assert peak["error, Bayes"] < peak["error"]


def test_random_labels_are_fitted_and_mean_nothing(example):
    random_labels = example("random_labels")
    source = torch.Generator().manual_seed(0)
    y = torch.arange(2000) % 10
    changed = (random_labels.noisy(y, 0.5, source) != y).double().mean()
    assert float(changed) == pytest.approx(0.45, abs=0.04)  # a tenth of the random ones are right
    x = torch.rand(60, 64, generator=source)
    y = torch.randint(0, 10, (60,), generator=source)
    args = argparse.Namespace(batch_size=30, learning_rate=5e-3)
    posterior, curve = random_labels.train(x, y, args, 0, hidden=256, epochs=60, likelihood=random_labels.Categorical())
    assert len(curve) == 60
    assert curve[-1] < 0.1 * curve[0]
    assert random_labels.accuracy(posterior, x, y) == 1.0


def test_warps_move_pixels_no_further_than_they_say(example):
    scattering = example("scattering")
    ramp = torch.arange(28.0).view(1, 1, 1, 28).expand(16, 1, 28, 28)  # its values are places
    moved = scattering.warped(ramp, 2.0, seed=1) - ramp
    inside = moved[:, :, 3:-3, 3:-3]  # at the edges zeros come in
    assert 0.5 < float(inside.abs().max()) <= 2.0 + 1e-4
    assert torch.equal(scattering.warped(ramp, 0.0), ramp)
    smooth = inside.diff(dim=-1).abs().max()
    assert float(smooth) < 0.8
