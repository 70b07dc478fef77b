"""A covariance structure and a form of posterior that the package has never heard of, each written in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.posteriors import Gaussian, Posterior
from dubito.posteriors.io import FORMS
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.covariances import STRUCTURES, Covariance, Diagonal
from dubito.tensors.covariances.covariance import normal
from dubito.tensors.randomness import fresh_generator, generator
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True)
class Isotropic(Covariance):
    """s^2 times the identity."""

    sizes: dict[str, list[int]]
    variances: Tensor  # []

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self.sizes.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        return {
            name: self.variances.sqrt() * normal((n, *shape), self.variances, generator) for name, shape in self.shapes.items()
        }

    def product(self, v: Params) -> Params:
        return {name: self.variances * leaf for name, leaf in v.items()}

    def solve(self, v: Params) -> Params:
        return {name: leaf / self.variances for name, leaf in v.items()}

    def logdet(self) -> Tensor:
        return self.size * self.variances.double().log()

    def variance(self) -> Params:
        return {name: self.variances.expand(shape) for name, shape in self.shapes.items()}


@dataclass(frozen=True, repr=False)
class Coin(Posterior):
    """One of two settings of the weights, with probabilities 1 - p and p."""

    tails: Params
    heads: Params
    buffers: Buffers
    p: float

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        source = generator or fresh_generator(self.model.device)
        up = torch.rand(n, generator=source, device=source.device).to(self.model.device) < self.p
        return {name: torch.where(up.reshape(-1, *[1] * leaf.ndim), self.heads[name], leaf) for name, leaf in self.tails.items()}

    def predict(
        self, x: Any, how: str | None = None, *, draws: int | None = None, memory: float = 1.0, seed: int = 0
    ) -> LatentMixture:
        self._only(how, "sampled")
        stacked = self.sample(draws or 20, generator(self.model.device, seed, "weights"))
        return sampled(self.model, x, shared=self.buffers, stacked=stacked, memory=memory)


@pytest.fixture
def names(monkeypatch):
    """One line each, by which files know them."""
    monkeypatch.setitem(STRUCTURES, "isotropic", Isotropic)
    monkeypatch.setitem(FORMS, "coin", Coin)


def _model() -> dubito.Model:
    torch.manual_seed(0)
    return dubito.Model(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)), dubito.Categorical())


def _isotropic(model: dubito.Model) -> Gaussian:
    params = model.parameters()
    covariance = Isotropic({name: list(leaf.shape) for name, leaf in params.items()}, torch.tensor(0.02))
    return Gaussian(model, params, model.buffers(), covariance)


def _diagonal(model: dubito.Model) -> Gaussian:
    """The same Gaussian, in a structure of the package."""
    params = model.parameters()
    return Gaussian(model, params, model.buffers(), Diagonal.of({n: torch.full_like(p, 0.02) for n, p in params.items()}))


def _coin(model: dubito.Model) -> Coin:
    params = model.parameters()
    return Coin(model, params, {name: -leaf for name, leaf in params.items()}, model.buffers(), 0.3)


@pytest.mark.parametrize("how", ["linearized", "sampled", "streamlined", "adjoint", "point"])
def test_a_structure_predicts_in_every_way(how):
    model, x = _model(), torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    new, known = (make(model).predict(x, how) for make in (_isotropic, _diagonal))
    if how == "sampled":  # other draws of the same distribution
        new, known = (make(model).predict(x, how, draws=4000) for make in (_isotropic, _diagonal))
        torch.testing.assert_close(new.mean, known.mean, atol=0.01, rtol=0)
        return
    torch.testing.assert_close(new.mean, known.mean)
    torch.testing.assert_close(new.uncertainty.epistemic, known.uncertainty.epistemic, atol=1e-6, rtol=1e-4)


def test_a_structure_is_drawn_has_a_density_and_functions():
    model, x = _model(), torch.randn(4, 2)
    new, known = _isotropic(model), _diagonal(model)
    drawn = new.sample(3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(new.log_prob(drawn), known.log_prob(drawn))
    mean, covariance = new.joint(x)
    torch.testing.assert_close((mean, covariance), known.joint(x))
    for how in ("linearized", "sampled"):
        f, p = new.functions(how, draws=7, seed=2), new.predict(x, how, draws=7, seed=2)
        torch.testing.assert_close(f(x).means, p.means)
        assert f(x.clone().requires_grad_()).mean.requires_grad


def test_a_form_that_can_be_sampled_has_all_the_rest():
    model, x = _model(), torch.randn(4, 2)
    posterior = _coin(model)
    p = posterior.predict(x, draws=2000)
    one, other = (model.likelihood.mean(model.call(w, x, posterior.buffers)[0], {}) for w in (posterior.tails, posterior.heads))
    torch.testing.assert_close(p.mean, 0.7 * one + 0.3 * other, atol=0.04, rtol=0)
    f = posterior.functions(draws=9, seed=1)
    torch.testing.assert_close(f(x).means, posterior.predict(x, draws=9, seed=1).means)
    assert f(x.clone().requires_grad_()).mean.requires_grad
    single = posterior.function(torch.Generator().manual_seed(0))(x).means
    assert single.shape == (1, 4, 3)
    settings = posterior.settings(5)
    assert len(settings) == 5
    assert math.isclose(sum(setting.weight for setting in settings), 1.0)
    assert posterior.with_fixed_masks() is posterior
    assert repr(posterior).startswith("Coin(39 weights of Sequential")


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("make", [_isotropic, _coin])
def test_both_are_saved_loaded_and_judged(make, tmp_path):
    model, x = _model(), torch.randn(30, 2)
    y = torch.randint(0, 3, (30,))
    posterior = make(model)
    dubito.save(posterior, tmp_path / "posterior.safetensors")
    same = dubito.load(tmp_path / "posterior.safetensors", model)
    assert type(same) is type(posterior)
    assert torch.equal(same.predict(x).means, posterior.predict(x).means)
    judged, expected = (dubito.judge(one, (x, y)) for one in (same, posterior))
    assert str(judged) == str(expected)


def test_without_a_name_there_is_no_file(tmp_path):
    with pytest.raises(TypeError, match="no file format for a Coin posterior"):
        dubito.save(_coin(_model()), tmp_path / "posterior.safetensors")
