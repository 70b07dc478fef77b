"""Posteriors on disk belong to a model, and say so when it is another."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, Gaussian, Laplace, Model, posteriors
from dubito.posteriors import identity
from dubito.posteriors.predict.dropout import Dropout
from dubito.tensors import store
from dubito.tensors.covariances import Blocks
from dubito.tensors.store import FileError, write


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


@pytest.mark.parametrize("index", range(4), ids=["point", "samples", "stochastic", "mixture"])
def test_the_base_may_be_left_out(index, tmp_path):
    m, x = model(width=400, only="^2"), torch.randn(5, 2)
    posterior = forms(m)[index]
    dubito.save(posterior, tmp_path / "whole")
    dubito.save(posterior, tmp_path / "slim", base=False)
    assert (tmp_path / "slim").stat().st_size < (tmp_path / "whole").stat().st_size - 400 * 3 * 4
    same = dubito.load(tmp_path / "slim", Model(copy.deepcopy(m.network), Gaussian(), only="^2"))
    assert torch.equal(same.predict(x).means, posterior.predict(x).means)
    with torch.no_grad():
        m.network[0].bias[3] += 1
    with pytest.raises(FileError, match="without its base network, and 0.bias differs"):
        dubito.load(tmp_path / "slim", m)


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


def _around(middle: nn.Module, dtype: torch.dtype = torch.float32) -> Model:
    return Model(nn.Sequential(nn.Linear(2, 4), middle, nn.Linear(4, 1)).to(dtype), Gaussian(scale=0.1))


ALIKE = {  # the same parameters, and yet another function
    "layers are 1 'Tanh' in the file and 'ReLU' here": (_around(nn.Tanh()), _around(nn.ReLU())),
    "torch .* layers are 1 'p=0.1, inplace=False' in the file and 'p=0.8": (_around(nn.Dropout(0.1)), _around(nn.Dropout(0.8))),
    "buffers are .*running_mean 'float32 .4.' in the file and absent": (
        _around(nn.BatchNorm1d(4, affine=False)),
        _around(nn.Identity()),
    ),
    "buffers are .*running_mean absent in the file": (_around(nn.Identity()), _around(nn.BatchNorm1d(4, affine=False))),
    "dtypes are 0.bias 'float32' in the file and 'float64' here": (_around(nn.Tanh()), _around(nn.Tanh(), torch.float64)),
}


@pytest.mark.parametrize("words", ALIKE)
def test_a_network_that_computes_something_else_is_refused(words, tmp_path):
    first, second = ALIKE[words]
    dubito.save(forms(first)[0], tmp_path / "p")
    with pytest.raises(FileError, match=f"another model; its {words}"):
        dubito.load(tmp_path / "p", second)
    with store.Draws(tmp_path / "draws") as draws:
        draws.append({**first.parameters(), "trace:energy": torch.zeros(())})
        draws.flush()
    folder = posteriors.Stored.open(tmp_path / "draws", first)
    dubito.save(folder, tmp_path / "draws")  # says of which model they are
    with pytest.raises(FileError, match=f"another model; its {words}"):
        dubito.load(tmp_path / "draws", second)
    assert len(dubito.load(tmp_path / "draws", first)) == 1


def test_an_older_file_is_read_as_far_as_it_tells(tmp_path):
    m = _around(nn.Tanh())
    posterior = forms(m)[0]
    dubito.save(posterior, tmp_path / "p")
    tensors, meta = store.read(tmp_path / "p")
    meta["model"] = {key: meta["model"][key] for key in ("parameters", "likelihood", "only")}
    write(tmp_path / "old", tensors, meta)
    x = torch.randn(5, 2)
    assert torch.equal(dubito.load(tmp_path / "old", _around(nn.Tanh())).predict(x).means, posterior.predict(x).means)


class Talkative(nn.Module):
    """A layer whose words differ from one of its kind to the next: they tell an address, a weight, or a number of a weight."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.function = how, lambda x: x
        self.scale, self.several = nn.Parameter(torch.rand(4)), nn.ParameterList([torch.rand(4)])

    def extra_repr(self) -> str:
        return {"address": f"{self.function}", "weight": f"{self.scale}", "number": f"{self.scale.sum().item()}"}[self.how]

    def forward(self, x):
        return self.function(x) * self.scale * self.several[0]


@pytest.mark.parametrize("how", ["address", "weight", "number"])
def test_a_fresh_network_of_the_same_kind_is_taken(how, tmp_path):
    posterior, x = forms(_around(Talkative(how)))[0], torch.randn(5, 2)
    dubito.save(posterior, tmp_path / "p")
    fresh = _around(Talkative(how))
    for network in (fresh.network, fresh.network.eval(), fresh.network.requires_grad_(True).train()):
        again = dubito.load(tmp_path / "p", replace(fresh, network=network))
        assert torch.equal(again.predict(x).means, posterior.predict(x).means)
    assert identity.network(fresh.network) == identity.network(copy.deepcopy(fresh.network).to("meta")), "whatever the device"


@pytest.mark.parametrize("within", [True, False], ids=["net.compile()", "torch.compile(net)"])
def test_a_compiled_network_is_the_same_network(within, tmp_path):
    def compiled() -> Model:
        m = _around(nn.Tanh())
        if within:
            m.network.compile(backend="eager")
            return m
        return replace(m, network=torch.compile(m.network, backend="eager"))

    posterior, x = forms(compiled())[0], torch.randn(5, 2)
    dubito.save(posterior, tmp_path / "p")
    kinds = [compiled(), *([_around(nn.Tanh())] if within else [])]
    for m in kinds:
        assert torch.equal(dubito.load(tmp_path / "p", m).predict(x).means, posterior.predict(x).means)


def test_an_unknown_form_asks_for_an_upgrade(tmp_path):
    write(
        tmp_path / "p", {}, {"kind": "posterior", "model": identity.belonging(model()), "posterior": {"form": "__import__('os')"}}
    )
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
