"""Priors over the weights: densities, slopes, draws and patterns."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.likelihoods import Gaussian, HeteroscedasticGaussian
from dubito.posteriors.predictive import LatentMixture, StudentT
from dubito.priors import Centered, Laplace, MultivariateNormal, Normal, Prior
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Dense, Diagonal, Kronecker, LowRank

PARAMS = {"0.weight": torch.randn(4, 3), "0.bias": torch.randn(4), "head.weight": torch.randn(2, 4)}
PATTERNS = {"head": 0.5, "weight$": 0.1, "": 3.0}
SCALES = {"0.weight": 0.1, "0.bias": 3.0, "head.weight": 0.5}  # what the first pattern found gives

priors = pytest.mark.parametrize(
    ("prior", "scales"),
    [
        (Normal(), dict.fromkeys(PARAMS, 1.0)),
        (Normal(scale=2), dict.fromkeys(PARAMS, 2.0)),
        (Normal(scale=PATTERNS), SCALES),
    ],
)


@priors
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_density_and_slope(prior, scales, dtype):
    params = {name: leaf.to(dtype) for name, leaf in PARAMS.items()}
    expected = sum(torch.distributions.Normal(0.0, scales[name]).log_prob(leaf).sum() for name, leaf in params.items())
    value = prior.log_prob(params)
    torch.testing.assert_close(value, expected)
    assert value.dtype == dtype
    closed, autograd = prior.gradient(params), Prior.gradient(prior, params)
    assert list(closed) == list(params)
    for name in params:
        torch.testing.assert_close(closed[name], autograd[name])
        torch.testing.assert_close(prior.precision(params)[name], torch.full_like(params[name], scales[name] ** -2))


@priors
def test_slopes_of_stacked_weights_are_those_of_each_draw(prior, scales):
    stacked = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in PARAMS.items()}
    slopes = prior.gradient(stacked)
    for name, leaf in prior.gradient(PARAMS).items():
        torch.testing.assert_close(slopes[name], torch.stack([leaf, 2 * leaf]))


@priors
def test_draws(prior, scales):
    like = {name: torch.zeros(40_000, dtype=torch.float64) for name in PARAMS}
    first, again, other = (prior.sample(like, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    for name in like:
        assert first[name].dtype == torch.float64
        assert first[name].std().item() == pytest.approx(scales[name], rel=0.02)
        assert first[name].mean().item() == pytest.approx(0, abs=0.02 * scales[name])
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    assert {name: leaf.shape for name, leaf in prior.sample(PARAMS).items()} == {n: p.shape for n, p in PARAMS.items()}


@given(st.floats(0.01, 100), st.integers(1, 20), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=25, deadline=None)
def test_the_density_at_zero_and_its_fall(scale, size, dtype):
    prior, zero = Normal(scale=scale), {"w": torch.zeros(size, dtype=dtype)}
    assert prior.log_prob(zero).item() == pytest.approx(-size * math.log(scale * math.sqrt(2 * math.pi)), rel=1e-4, abs=1e-4)
    away = {"w": torch.full((size,), scale, dtype=dtype)}
    assert (prior.log_prob(zero) - prior.log_prob(away)).item() == pytest.approx(size / 2, rel=1e-4)


def test_half_precision_sums_in_single():
    many = {"w": torch.ones(100_000, dtype=torch.bfloat16)}
    expected = -50_000 - 100_000 * 0.5 * math.log(2 * math.pi)
    assert Normal().log_prob(many).item() == pytest.approx(expected, rel=1e-5)
    assert Normal().gradient(many)["w"].dtype == torch.bfloat16


def test_no_weights():
    assert Normal().log_prob({}) == 0
    assert Normal().gradient({}) == Normal().sample({}) == {}


def test_slopes_do_not_remember_how_they_came_about():
    leaf = torch.randn(3, requires_grad=True)
    assert not Normal(scale=2.0).gradient({"w": leaf})["w"].requires_grad
    assert Normal(scale=2.0).log_prob({"w": leaf}).requires_grad


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, {}, {"w": 0.0}, {"w": 1.0, "b": -1.0}, "1", [1.0]])
def test_scales_that_make_no_sense(scale):
    with pytest.raises(ValueError, match="positive standard deviation"):
        Normal(scale=scale)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
def test_scales_may_be_numbers_of_numpy_or_torch(number):
    """They are kept as plain numbers: priors can be compared, and fields cannot change from outside."""
    assert Normal(scale=number) == Normal(scale=0.5)
    assert type(Normal(scale=number).scale) is float
    assert Normal(scale={"w": number, "": 1}).scale == {"w": 0.5, "": 1}
    assert Normal(scale=np.int64(2)) == Normal(scale=2)


def test_a_scale_that_is_to_be_trained_is_no_constant():
    with pytest.raises(ValueError, match="requires_grad"):
        Normal(scale=torch.tensor(0.5, requires_grad=True))


def test_a_parameter_without_a_pattern():
    prior = Normal(scale={"weight": 1.0})
    for call in (prior.log_prob, prior.gradient, prior.sample, prior.precision):
        with pytest.raises(ValueError, match=r"no pattern of the prior, \['weight'\], matches the parameter '0.bias'"):
            call(PARAMS)


# --- an earlier posterior --------------------------------------------------------------------------------------------

DOUBLE = torch.float64
SHAPES = {"w": [3, 2], "b": [3]}


def covariance(kind: str):
    one, prior = torch.ones(1, dtype=DOUBLE), {name: torch.tensor(0.8, dtype=DOUBLE) for name in SHAPES}
    root, like = torch.randn(9, 5, dtype=DOUBLE), {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    if kind == "diagonal":
        return Diagonal.of({name: torch.rand(shape, dtype=DOUBLE) + 0.1 for name, shape in SHAPES.items()})
    if kind == "dense":
        return Dense(SHAPES, (root @ root.mT).unsqueeze(0), prior, one)
    if kind == "lowrank":
        return LowRank.of(
            {name: torch.rand(shape, dtype=DOUBLE) + 0.1 for name, shape in SHAPES.items()}, tree.unflatten(root.mT, like)
        )
    a, b = root[:3] @ root[:3].mT, root[3:6] @ root[3:6].mT
    return Blocks((Kronecker.of("w", "b", [3, 2], b.unsqueeze(0), a, prior, scale=one),))


@pytest.mark.parametrize("kind", ["diagonal", "dense", "lowrank", "kronecker"])
def test_a_multivariate_normal_prior(kind):
    mean = {name: torch.randn(*shape, dtype=DOUBLE) for name, shape in SHAPES.items()}
    prior = MultivariateNormal(mean, covariance(kind))
    params = {name: torch.randn(*shape, dtype=DOUBLE) for name, shape in SHAPES.items()}
    law = torch.distributions.MultivariateNormal(tree.flatten(mean), prior.covariance.dense())
    torch.testing.assert_close(prior.log_prob(params), law.log_prob(tree.flatten(params)))
    closed, autograd = prior.gradient(params), Prior.gradient(prior, params)
    assert list(closed) == list(params)
    for name in params:
        torch.testing.assert_close(closed[name], autograd[name])
    stacked = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in params.items()}
    for name, leaf in prior.gradient(stacked).items():
        torch.testing.assert_close(leaf[0], closed[name])
    gradient = {name: torch.ones_like(leaf) for name, leaf in params.items()}
    prior.add_gradient(gradient, params, 0.5)
    torch.testing.assert_close(gradient["w"], 1 + 0.5 * closed["w"])
    backwards = {name: params[name] for name in reversed(params)}
    torch.testing.assert_close(prior.log_prob(backwards), prior.log_prob(params))
    draws = [prior.sample(params, g) for g in [torch.Generator().manual_seed(0)] for _ in range(4000)]
    rows = torch.stack([tree.flatten(draw) for draw in draws])
    deviation = law.variance.sqrt()
    assert ((rows.mean(0) - law.mean).abs() < 5 * deviation / 4000**0.5).all()
    torch.testing.assert_close(
        torch.cov(rows.mT) / deviation / deviation.unsqueeze(1),
        law.covariance_matrix / deviation / deviation.unsqueeze(1),
        rtol=0,
        atol=0.12,
    )
    again, other = prior.sample(params, torch.Generator().manual_seed(0)), prior.sample(params, torch.Generator().manual_seed(1))
    assert torch.equal(again["w"], draws[0]["w"])
    assert not torch.equal(again["w"], other["w"])


def test_weights_that_an_earlier_posterior_does_not_know():
    prior = MultivariateNormal({"w": torch.zeros(2)}, Diagonal.of({"w": torch.ones(2)}))
    for call in (prior.log_prob, prior.gradient):
        with pytest.raises(ValueError, match=r"says nothing of \['v'\]: the model it is for has only \['w'\]; set `only`"):
            call({"w": torch.zeros(2), "v": torch.zeros(1)})


def test_priors_likelihoods_and_predictives_say_what_they_are():
    normal, earlier = Normal(), MultivariateNormal({"w": torch.zeros(2)}, Diagonal.of({"w": torch.ones(2)}))
    assert (normal.normal, normal.joint) == (normal, None)
    assert earlier.normal is None
    assert earlier.joint is earlier
    assert (Centered({}, normal).normal, Laplace().joint) == (None, None)
    noise = Gaussian(scale=0.1)
    assert (noise.gaussian, HeteroscedasticGaussian().gaussian) == (noise, None)
    mixture = LatentMixture(noise, torch.zeros(1, 1, 1))
    assert mixture.mixture is mixture
    assert StudentT(noise, torch.zeros(1, 1, 1), *torch.ones(3, 1, 1)).mixture is None
