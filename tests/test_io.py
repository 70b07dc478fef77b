"""Posteriors on disk belong to a model, and say so when it is another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, Gaussian, Model, posteriors
from dubito.predict.dropout import Dropout
from dubito.store import FileError, write


def model(width: int = 4, **options) -> Model:
    net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    return Model(net, options.pop("likelihood", Gaussian()), **options)


def forms(m: Model) -> list[posteriors.Posterior]:
    params, buffers = m.parameters(), m.buffers()
    point = posteriors.Point(m, params, buffers)
    stacked = {name: torch.stack([leaf, leaf + 1]) for name, leaf in params.items()}
    samples = posteriors.Samples(m, stacked, buffers, weights=torch.tensor([0.25, 0.75]))
    stochastic = posteriors.Stochastic(m, params, buffers, Dropout({"0": 0.2}, "batch", True), draws=7, consistent=False)
    return [point, samples, stochastic, posteriors.Mixture(m, (point, samples, stochastic), (0.5, 0.25, 0.25))]


@pytest.mark.parametrize("index", range(4), ids=["point", "samples", "stochastic", "mixture"])
@pytest.mark.parametrize("only", ["", "^2"])
def test_every_form_round_trips(index, only, tmp_path):
    m = model(only=only)
    posterior = forms(m)[index]
    dubito.save(posterior, tmp_path / "p.safetensors")
    same = dubito.load(tmp_path / "p.safetensors", m)
    x = torch.randn(5, 2)
    assert type(same) is type(posterior)
    assert torch.equal(posterior.predict(x).means, same.predict(x).means)
    assert torch.equal(posterior.predict(x).mean, same.predict(x).mean)
    if index < 3:
        assert list(same.params) == list(posterior.params), "flattening depends on the order of the names"


def test_weights_that_are_not_bayesian_come_along(tmp_path):
    """A posterior over the head, loaded into a fresh network, predicts with the body it was fitted with."""
    m, x = model(only="^2"), torch.randn(5, 2)
    posterior = forms(m)[0]
    dubito.save(posterior, tmp_path / "p")
    assert torch.equal(dubito.load(tmp_path / "p", model(only="^2")).predict(x).means, posterior.predict(x).means)


def test_another_model_is_refused_and_told_apart(tmp_path):
    dubito.save(forms(model())[0], tmp_path / "p")
    with pytest.raises(FileError, match=r"0.weight \[4, 2\] in the file and \[8, 2\] here"):
        dubito.load(tmp_path / "p", model(8))
    with pytest.raises(FileError, match="likelihood is 'Gaussian"):
        dubito.load(tmp_path / "p", model(likelihood=Categorical()))
    with pytest.raises(FileError, match="only is '' in the file and 'weight' here"):
        dubito.load(tmp_path / "p", model(only="weight"))
    write(tmp_path / "other", {}, {"kind": "something"})
    with pytest.raises(FileError, match="not a posterior"):
        dubito.load(tmp_path / "other", model())


def test_an_unknown_form_asks_for_an_upgrade(tmp_path):
    from dubito.io import _describe

    write(tmp_path / "p", {}, {"kind": "posterior", "model": _describe(model()), "posterior": {"form": "__import__('os')"}})
    with pytest.raises(FileError, match="unknown form"):
        dubito.load(tmp_path / "p", model())


def test_a_posterior_of_ones_own_has_no_format():
    class Mine(posteriors.Point):
        pass

    m = model()
    with pytest.raises(TypeError, match="Mine"):
        dubito.save(Mine(m, m.parameters(), m.buffers()), "nowhere")
