"""Priors as priors of functions: the wide limit, what leaves it, and scales that match a process."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.priors.matching import energy_distance, wasserstein_distance
from scipy import stats
from torch import nn
from torch.func import vmap

import dubito
from dubito import Gaussian, Model, prior_predictive
from dubito.priors import NNGP, RBF, ByName, GaussianProcess, Laplace, LogUniform, Normal, StudentT, matching
from dubito.report.functions import functions


class Erf(nn.Module):
    def forward(self, x):
        return torch.erf(x)


def perceptron(width: int, depth: int = 1, activation: type[nn.Module] = nn.ReLU, inputs: int = 2) -> nn.Sequential:
    layers, size = [], inputs
    for _ in range(depth):
        layers += [nn.Linear(size, width), activation()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, 1))


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_wide_networks_approach_their_process(activation):
    x, kernel = torch.tensor([[1.0, 0.0], [0.6, -0.8], [2.0, 1.0]]), NNGP(2, activation, scale=1.3, bias=0.4)
    net = perceptron(128, 2, {"relu": nn.ReLU, "erf": Erf}[activation])
    model = Model(net, Gaussian(scale=0.1), Normal.fan_in(net, 1.3, bias=0.4))
    f = prior_predictive(model, x, draws=1000, seed=1).means[..., 0]
    exact = kernel(x)
    deviation = exact.diagonal().sqrt()
    unit = deviation.unsqueeze(1) * deviation
    assert ((torch.cov(f.mT) - exact) / unit).abs().max() < 0.15
    assert (f.mean(0) / deviation).abs().max() < 0.12
    assert stats.kstest((f[:, 2] / deviation[2]).numpy(), stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_the_recursion_against_monte_carlo(activation):
    x, phi = torch.randn(3, 4, dtype=torch.float64), {"relu": torch.relu, "erf": torch.erf}[activation]
    first = NNGP(0, activation, scale=1.3, bias=0.4)(x)
    u = torch.randn(400_000, 3, dtype=torch.float64) @ torch.linalg.cholesky(first).mT
    expected = 0.16 + 1.69 * phi(u).mT @ phi(u) / len(u)
    torch.testing.assert_close(NNGP(1, activation, scale=1.3, bias=0.4)(x), expected, rtol=0.02, atol=0.01)
    torch.testing.assert_close(NNGP(3, activation)(x, x[:2]), NNGP(3, activation)(x)[:, :2])


def test_gaussian_process_regression():
    x, y, at = torch.randn(6, 2).double(), torch.randn(6).double(), torch.randn(3, 2).double()
    kernel = NNGP(2)
    process = GaussianProcess(kernel, noise=0.3).given(x, y)
    noisy = kernel(x) + 0.09 * torch.eye(6).double()
    mean, cov = process.moments(at)
    torch.testing.assert_close(mean, kernel(at, x) @ torch.linalg.solve(noisy, y))
    torch.testing.assert_close(cov, kernel(at) - kernel(at, x) @ torch.linalg.solve(noisy, kernel(x, at)))
    law = torch.distributions.MultivariateNormal(torch.zeros(6).double(), noisy)
    torch.testing.assert_close(process.log_evidence(), law.log_prob(y))
    drawn = process.sample(at, 20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(torch.cov(drawn.mT), cov, rtol=0, atol=0.05)
    both = GaussianProcess(kernel, noise=0.3).given(x, torch.stack([y, 2 * y], 1))
    torch.testing.assert_close(both.moments(at)[0], torch.stack([mean, 2 * mean], 1))
    with pytest.raises(ValueError, match="use `given"):
        GaussianProcess(RBF()).log_evidence()


def kurtosis(f: torch.Tensor) -> float:
    return float((f - f.mean()).pow(4).mean() / f.var().square())


def test_functions_given_observations_with_hardly_any_noise():
    x, at = torch.linspace(-2, 2, 30).unsqueeze(1), torch.linspace(-2, 2, 50).unsqueeze(1)
    process = GaussianProcess(RBF(), noise=1e-4).given(x, torch.sin(x[:, 0]))
    drawn = process.sample(at, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, torch.sin(at[:, 0]).expand(3, 50), rtol=0, atol=1e-3)


def test_heavy_tails_leave_the_process():
    """Scales of 1 / sqrt(width) make a process of weights with a variance; of Cauchy weights a single one still decides."""
    x, width, excess = torch.tensor([[1.0, 0.5]]), 400, {}
    for name, wide in {"normal": Normal(scale=width**-0.5), "student": StudentT(width**-0.5, df=2.1)}.items():
        prior = ByName({"^2.weight": wide, "": Normal(scale=1.0)})
        f = prior_predictive(Model(perceptron(width), Gaussian(scale=0.1), prior), x, draws=3000).means.flatten()
        excess[name] = kurtosis(f) - 3
    assert abs(excess["normal"]) < 0.5
    assert excess["student"] > 5

    # the largest step between neighbouring inputs, as a share of all the way the function goes: jumps
    line, jumps = torch.linspace(-2, 2, 200).unsqueeze(1), {}
    for name, wide in {"normal": Normal(scale=0.05), "cauchy": StudentT(1 / 400, df=1.0)}.items():
        prior = ByName({"^2.weight": wide, "^0": Normal(scale=20.0), "": Normal(scale=1.0)})
        model = Model(perceptron(400, activation=nn.Sigmoid, inputs=1), Gaussian(scale=0.1), prior)
        steps = prior_predictive(model, line, draws=200).means[..., 0].diff(dim=1).abs()
        jumps[name] = float((steps.max(1).values / steps.sum(1)).median())
    assert jumps["cauchy"] > 1.5 * jumps["normal"]


def test_an_outlier_has_bounded_influence_under_heavy_tails():
    """w ~ prior, y = w + noise: what E[w | y] falls short of y by grows with y under normal weights, and vanishes under Student-t."""
    grid = torch.linspace(-60, 60, 6_001, dtype=torch.float64)
    short = {}
    for name, prior in {"normal": Normal(scale=1.0), "student": StudentT(1.0, df=3.0), "laplace": Laplace(1.0)}.items():
        log = vmap(prior.log_prob)({"w": grid})
        for y in (4.0, 20.0):
            p = (log - 0.5 * (y - grid) ** 2).softmax(0)
            short[name, y] = y - float((p * grid).sum())
    assert short["normal", 20.0] == pytest.approx(10.0, rel=1e-3)
    assert short["laplace", 20.0] == pytest.approx(math.sqrt(2), rel=1e-2), "bounded, but it stays"
    assert short["student", 20.0] < 0.3 < short["student", 4.0], "it is let go"


@pytest.mark.parametrize("distance", ["energy", "wasserstein"])
def test_matching_moves_a_wrong_scale_to_the_right_one(distance):
    x = torch.linspace(-2, 2, 40).unsqueeze(1)
    net = perceptron(30, inputs=1)
    right = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 1 / math.sqrt(30), "2.bias": 1.0}
    process = GaussianProcess(NNGP(1), noise=0.1)  # of which a network with these scales is nearly a draw
    model = Model(net, Gaussian(scale=0.1), Normal(scale={"2.weight": 2.0, "": 0.3}))
    found = matching(model, process, x, steps=150, draws=96, points=8, learning_rate=0.1, distance=distance)
    # of finite draws a Wasserstein distance is far from zero also where both laws are one
    assert found.distances[-20:].mean() < (0.15 if distance == "energy" else 0.6) * found.distances[:5].mean()
    wide = prior_predictive(Model(net, Gaussian(scale=0.1), found.prior), x, draws=600).means[..., 0].std(0)
    assert ((wide / process.moments(x)[1].diagonal().sqrt()).log().abs() < 0.25).all()
    ratio = {name: found.prior.scale_of(name) / scale for name, scale in right.items()}
    product = ratio["0.weight"] * ratio["2.weight"]  # functions know of the two layers' scales together only
    assert 0.6 < product < 1.6
    assert ratio["2.weight"] < 8, "it began at 11 times what is right"


def test_matching_of_other_families_and_refusals():
    x, net = torch.linspace(-2, 2, 10).unsqueeze(1), perceptron(5, inputs=1)
    for prior in (Laplace(0.3), StudentT(0.3)):
        model = Model(net, Gaussian(scale=0.1), prior)
        found = matching(model, GaussianProcess(RBF()), x, steps=2, draws=8)
        assert found.prior.log_prob(model.parameters()).isfinite()
    with pytest.raises(ValueError, match="can be matched; got a LogUniform"):
        matching(Model(net, Gaussian(scale=0.1), LogUniform()), GaussianProcess(RBF()), x)
    with pytest.raises(ValueError, match="distance must be one of 'energy', 'wasserstein'; got 'total'"):
        matching(Model(net, Gaussian(scale=0.1), Normal()), GaussianProcess(RBF()), x, distance="total")  # pyright: ignore


def test_energy_distances():
    x = torch.randn(3000, 2)
    assert abs(float(energy_distance(x, torch.randn(3000, 2)))) < 0.01
    assert float(energy_distance(x, 2 * torch.randn(3000, 2))) > 0.1


def test_wasserstein_distances():
    x = torch.randn(500, 1)
    y = 2 * torch.randn(500, 1) + 1
    wanted = (x.sort(0).values - y.sort(0).values).abs().mean()  # in one dimension the best pairs are in order
    assert float(wasserstein_distance(x, y)) == pytest.approx(float(wanted), rel=1e-5)
    x.requires_grad_()
    moved = torch.autograd.grad(wasserstein_distance(x, x.detach() + 100.0), x)[0]
    assert torch.allclose(moved, torch.full_like(x, -1 / 500), atol=1e-7)
    with pytest.raises(ValueError, match="as many of both"):
        wasserstein_distance(x, y[1:])


def test_prior_predictives():
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    model = Model(net, dubito.Categorical(), dubito.priors.Horseshoe(0.3, groups="row"))
    before = {name: p.clone() for name, p in net.named_parameters()}
    x = torch.randn(5, 2)
    p, again, other = (prior_predictive(model, x, draws=40, seed=seed) for seed in (0, 0, 1))
    assert p.means.shape == (40, 5, 3)
    assert torch.equal(p.means, again.means)
    assert not torch.equal(p.means, other.means)
    chunked = prior_predictive(model, x, draws=40, memory=1e-6)
    torch.testing.assert_close(chunked.means, p.means)
    assert (p.uncertainty.epistemic > 0).all()
    assert all(torch.equal(before[name], leaf) for name, leaf in net.named_parameters())
    with pytest.raises(ValueError, match="improper: it cannot be sampled"):
        prior_predictive(Model(net, dubito.Categorical(), LogUniform()), x)
    with pytest.raises(ValueError, match="draws are at least 1"):
        prior_predictive(model, x, draws=0)


def test_a_picture_of_functions():
    x, model = torch.linspace(-1, 1, 20), Model(perceptron(10, inputs=1), Gaussian(), Normal(scale=1.0))
    made = functions(x, prior_predictive(model, x.unsqueeze(1), draws=10), title="a prior", ylim=(-3, 3))
    assert made.image.startswith("<svg")
    with pytest.raises(ValueError, match="predictive of the 5 inputs x"):
        functions(x[:5], prior_predictive(model, x.unsqueeze(1), draws=3), title="a prior")
