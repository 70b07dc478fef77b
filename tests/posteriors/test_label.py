"""What is not the posterior of Bayes' rule says so, in its repr and in its files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from dubito.tensors import store

X = torch.linspace(-1, 1, 24).unsqueeze(1)
Y = X.sin()


def _fit(method, **options):
    torch.manual_seed(0)
    model = dubito.Model(nn.Linear(1, 1), dubito.Gaussian(scale=0.3))
    return dubito.fit(model, method, (X, Y), batch_size=8, **options)


@pytest.mark.parametrize(
    ("method", "options", "label"),
    [
        (dubito.MAP(epochs=1), {}, ""),
        (dubito.Laplace(check=False), {}, ""),
        (dubito.Laplace(check=False), {"temperature": 0.3}, "tempered (T = 0.3)"),
        (dubito.Laplace(check=False, damping=0.5), {}, "generalized (damping = 0.5)"),
        (dubito.Variational(epochs=1, kl_weight=0.1), {}, "tempered (kl_weight = 0.1)"),
        (dubito.IVON(epochs=1), {"temperature": 2.0}, "tempered (T = 2)"),
        (dubito.SWAG(epochs=4, rank=0), {"temperature": 0.5}, "tempered (T = 0.5)"),
        (dubito.Ensemble(dubito.Variational(epochs=1, kl_weight=0.1), 2), {}, "tempered (kl_weight = 0.1)"),
    ],
    ids=str,
)
def test_the_label_of_a_fit(method, options, label, tmp_path):
    posterior = _fit(method, **options)
    assert posterior.label == label
    assert repr(posterior).endswith(f", {label})" if label else "prior=None))")
    dubito.save(posterior, tmp_path / "posterior.safetensors")
    assert store.read(tmp_path / "posterior.safetensors")[1].get("label", "") == label
    assert dubito.load(tmp_path / "posterior.safetensors", posterior.model).label == label


def test_what_is_done_to_a_gaussian_afterwards():
    posterior = _fit(dubito.Laplace(check=False), temperature=0.3)
    assert posterior.with_prior(temperature=1.0).label == ""
    assert posterior.with_prior(temperature=2.0).label == "tempered (T = 2)"
    assert posterior.tuned((X, Y), precisions=(1.0,)).label == "generalized (T = 0.3, tuned on held-out rows)"
    calibrated = posterior.with_prior(temperature=1.0).calibrated((X, Y))
    assert calibrated.label == "generalized (variances scaled on held-out rows)"


def test_draws_that_stay_on_disk_keep_their_label(tmp_path):
    method = dubito.SGLD(draws=4, burn_in=2, learning_rate=0.1)
    posterior = _fit(method, temperature=0.5, checkpoint=tmp_path / "run")
    assert posterior.label == "tempered (T = 0.5)"
    opened = dubito.load(tmp_path / "run", posterior.model)
    assert opened.label == opened.in_memory().label == "tempered (T = 0.5)"
    dubito.save(opened, tmp_path / "copy")
    assert dubito.load(tmp_path / "copy", posterior.model).label == "tempered (T = 0.5)"
