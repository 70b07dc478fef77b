"""A covariance structure written outside the package needs its class and a name in the table; everything that uses one takes it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.posteriors import Gaussian
from dubito.tensors import tree
from dubito.tensors.covariances import STRUCTURES, Covariance, Dense
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Exchangeable(Covariance):
    """All weights have one variance and one correlation: v ((1 - r) I + r 1 1^T)."""

    leaves: dict[str, list[int]]
    v: Tensor
    r: Tensor

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self.leaves.items()}

    def _apply(self, v: Params, own: Tensor, shared: Tensor) -> Params:
        total = sum(v[name].reshape(len(v[name]), -1).sum(1) for name in self.leaves)
        return {n: own * v[n] + shared * total.view(-1, *[1] * len(shape)) for n, shape in self.shapes.items()}

    def sample(self, n, generator=None):
        shared = torch.randn(n, generator=generator)
        each = {name: torch.randn(n, *shape, generator=generator) for name, shape in self.shapes.items()}
        own, common = (self.v * (1 - self.r)).sqrt(), (self.v * self.r).sqrt()
        return {name: own * leaf + common * shared.view(-1, *[1] * (leaf.ndim - 1)) for name, leaf in each.items()}

    def product(self, v):
        return self._apply(v, self.v * (1 - self.r), self.v * self.r)

    def solve(self, v):
        inside = 1 - self.r + self.size * self.r
        return self._apply(v, 1 / (self.v * (1 - self.r)), -self.r / (self.v * (1 - self.r) * inside))

    def logdet(self):
        v, r = self.v.double(), self.r.double()
        return self.size * v.log() + (self.size - 1) * (1 - r).log() + (1 - r + self.size * r).log()

    def variance(self):
        return {name: self.v.expand(shape).clone() for name, shape in self.shapes.items()}


@pytest.fixture
def posteriors(monkeypatch):
    """The same Gaussian with the new structure, and with a dense matrix."""
    monkeypatch.setitem(STRUCTURES, "exchangeable", Exchangeable)
    torch.manual_seed(0)
    model = dubito.Model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)), dubito.Categorical())
    params = model.parameters()
    new = Exchangeable({name: list(leaf.shape) for name, leaf in params.items()}, torch.tensor(0.05), torch.tensor(0.3))
    nothing = {name: torch.zeros(()) for name in params}
    dense = Dense(new.leaves, torch.linalg.inv(new.dense()).unsqueeze(0), nothing, torch.ones(1))
    return [Gaussian(model, params, model.buffers(), covariance) for covariance in (new, dense)]


@pytest.mark.parametrize("how", ["linearized", "streamlined", "adjoint"])
def test_it_predicts_as_the_dense_matrix_does(posteriors, how):
    x = torch.randn(5, 2)
    new, dense = (posterior.predict(x, how) for posterior in posteriors)
    torch.testing.assert_close(new.f_mean, dense.f_mean)
    torch.testing.assert_close(new.probs, dense.probs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(new.covariances, dense.covariances, rtol=1e-3, atol=1e-5)


def test_it_is_sampled_and_its_density_known(posteriors):
    new, dense = (posterior.covariance for posterior in posteriors)
    draws = tree.flatten(new.sample(20_000, torch.Generator().manual_seed(0)), stacked=True)
    torch.testing.assert_close(torch.cov(draws.mT), dense.dense(), rtol=0.05, atol=3e-3)
    torch.testing.assert_close(new.logdet(), dense.logdet(), rtol=1e-4, atol=1e-4)
    v = {name: torch.randn(2, *shape) for name, shape in new.shapes.items()}
    torch.testing.assert_close(
        tree.flatten(new.solve(v), stacked=True), tree.flatten(dense.solve(v), stacked=True), rtol=1e-3, atol=1e-3
    )


def test_it_is_saved_and_loaded(posteriors, tmp_path):
    posterior, x = posteriors[0], torch.randn(5, 2)
    dubito.save(posterior, tmp_path / "posterior")
    again = dubito.load(tmp_path / "posterior", posterior.model)
    assert isinstance(again.covariance, Exchangeable)
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
