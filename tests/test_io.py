"""Posteriors on disk belong to a model, and say so when it is another."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, Gaussian, Laplace, Model, posteriors
from dubito.linalg import Blocks
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


STRUCTURES = {
    "dense": Laplace("dense"),
    "diagonal": Laplace("diagonal"),
    "kronecker": Laplace(),
    "corrected": Laplace(corrected=True),
    "lowrank": Laplace("lowrank", rank=4),
    "subnetwork": Laplace("dense", subnetwork=5),
    "last layer": Laplace(subset="last_layer"),
    "a prior for each": Laplace(prior_groups="parameter"),
    "with noise": Laplace("dense", optimize_noise=True),
    "hessian": Laplace("dense", "hessian", clip=True),
}


def same(a, b) -> None:
    """Bit for bit, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    elif isinstance(a, Blocks):
        same(list(a.blocks), list(b.blocks))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        [same(a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple):
        [same(x, y) for x, y in zip(a, b, strict=True)]
    elif hasattr(a, "__dataclass_fields__") and not isinstance(a, Model):
        [same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    elif not isinstance(a, Model):
        assert a == b


@pytest.mark.parametrize("outputs", [1, 3], ids=["one noise", "a noise each"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_covariance_round_trips(name, outputs, tmp_path):
    if name == "corrected" and outputs == 3:
        return
    m = model(likelihood=Gaussian(outputs=outputs))
    x, y = torch.randn(12, 2), torch.randn(12, 3)
    posterior = dubito.fit(m, replace(STRUCTURES[name], check=False), (x, y), temperature=0.5, start=m.parameters(y))
    dubito.save(posterior, tmp_path / "p")
    again = dubito.load(tmp_path / "p", m)
    same(again, posterior)
    assert torch.equal(again.predict(x).cov, posterior.predict(x).cov)
    assert torch.equal(again.log_evidence(), posterior.log_evidence())
    assert torch.equal(again.with_prior(3.0).covariance.dense(), posterior.with_prior(3.0).covariance.dense())
    assert torch.equal(
        again.sample(2, torch.Generator().manual_seed(0))["2.weight"],
        posterior.sample(2, torch.Generator().manual_seed(0))["2.weight"],
    )
    assert torch.equal(again.optimized().log_evidence(), posterior.optimized().log_evidence())


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "lowrank"])
def test_a_continued_posterior_round_trips(structure, tmp_path):
    """Its evidence holds the prior it continued from; and it can be continued again from the file."""
    m = model()
    x, y = torch.randn(12, 2), torch.randn(12, 3)
    method = Laplace(structure, check=False)
    start = m.parameters(y)
    first = dubito.fit(m, method, (x, y), start=start)
    later = replace(m, prior=first.as_prior())
    second = dubito.fit(later, method, (x + 1, y), start=start)
    dubito.save(second, tmp_path / "p")
    again = dubito.load(tmp_path / "p", later)
    same(again, second)
    assert torch.equal(again.log_evidence(), second.log_evidence())
    third = [
        dubito.fit(replace(m, prior=p.as_prior()), method, (x - 1, y), start=start).covariance.dense() for p in (again, second)
    ]
    assert torch.equal(*third)


def test_mixtures_of_gaussians_round_trip(tmp_path):
    m, data = model(), (torch.randn(12, 2), torch.randn(12, 3))
    members = [dubito.fit(m, replace(STRUCTURES[n], check=False), data) for n in ("kronecker", "dense")]
    mixture = posteriors.Mixture.equal(members)
    dubito.save(mixture, tmp_path / "p")
    again = dubito.load(tmp_path / "p", m)
    same(again.members, mixture.members)
    assert torch.equal(again.predict(data[0]).cov, mixture.predict(data[0]).cov)
