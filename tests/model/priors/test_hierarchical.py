"""Priors with scales that are inferred along with the weights: their densities, and what every method makes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dubito.priors.scales import Flat
from scipy import integrate, stats
from torch import nn
from torch.func import vmap

import dubito
from dubito import HMC, MAP, NUTS, SGLD, Gaussian, Model
from dubito.diagnostics import ess_mean
from dubito.model import Target
from dubito.priors import (
    ARD,
    ByName,
    Gamma,
    Groups,
    HalfCauchy,
    Hierarchical,
    Horseshoe,
    InverseGamma,
    Jeffreys,
    Laplace,
    Normal,
    Prior,
)
from dubito.tensors import tree

DOUBLE, SOURCE = torch.float64, torch.Generator().manual_seed(0)
WEIGHTS = {
    "0.weight": torch.randn(4, 3, dtype=DOUBLE, generator=SOURCE),
    "0.bias": torch.randn(4, dtype=DOUBLE, generator=SOURCE),
    "conv.weight": torch.randn(2, 3, 2, 2, dtype=DOUBLE, generator=SOURCE),
}
SCALES = {
    "half-cauchy": (HalfCauchy(0.5), stats.halfcauchy(scale=0.5)),
    "gamma": (Gamma(3.0, 2.0), stats.gamma(3.0, scale=0.5)),
    "inverse-gamma": (InverseGamma(3.0, 2.0), None),
    "bounded": (Flat((0.1, 5.0)), stats.loguniform(0.1, 5.0)),
}
PRIORS = {
    "half-cauchy": Hierarchical(HalfCauchy(0.5)),
    "gamma by layer": Hierarchical(Gamma(3.0, 2.0), groups="layer"),
    "inverse-gamma for all": Hierarchical(InverseGamma(3.0, 2.0), groups="all"),
    "by row": Hierarchical(InverseGamma(3.0, 2.0), groups="row"),
    "by kernel": Hierarchical(Gamma(3.0, 2.0), groups="kernel"),
    "ard": ARD(),
    "horseshoe": Horseshoe(0.1),
    "group horseshoe": Horseshoe(0.1, groups="column"),
    "bounded jeffreys": Jeffreys((0.1, 5.0)),
    "by name": ByName({"bias": Normal(scale=2.0), "conv": Horseshoe(0.3, groups="row"), "": ARD()}),
}
every_prior = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)


def joint(prior: Prior, seed: int = 0) -> dict:
    like = {**WEIGHTS, **{name: leaf.double() for name, leaf in prior.parameters(WEIGHTS).items()}}
    return prior.sample(like, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("scale", "law"), SCALES.values(), ids=SCALES)
def test_densities_of_scales(scale, law):
    free = torch.linspace(-30, 30, 200_001, dtype=DOUBLE)
    density = scale.log_prob(free).exp()
    assert torch.trapezoid(density, free).item() == pytest.approx(1, abs=1e-6)
    drawn = scale.log_scale(scale.sample(torch.zeros(20_000, dtype=DOUBLE), torch.Generator().manual_seed(0))).exp()
    law = law or stats.invgamma(3.0, scale=2.0)
    assert stats.kstest(drawn.square() if isinstance(scale, InverseGamma) else drawn, law.cdf).pvalue > 1e-3
    if not isinstance(scale, Flat):
        tau = free[100_000:103_000:100].exp()
        expected = law.logpdf(tau**2) + (2 * tau**2).log().numpy() if isinstance(scale, InverseGamma) else law.logpdf(tau)
        expected = torch.as_tensor(expected) + (0 if isinstance(scale, InverseGamma) else tau.log())
        torch.testing.assert_close(scale.log_prob(tau.log()), expected)


@pytest.mark.parametrize("scale", [HalfCauchy(0.5), InverseGamma(3.0, 2.0)], ids=["half-cauchy", "inverse-gamma"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_given_the_weights_leave_the_conditional_as_it_is(scale, temperature):
    weights, generator = torch.tensor([0.3, -1.2, 0.8], dtype=DOUBLE), torch.Generator().manual_seed(0)
    free = torch.linspace(-6, 6, 20_001, dtype=DOUBLE)
    log = (scale.log_prob(free) + torch.distributions.Normal(0, free.exp().unsqueeze(1)).log_prob(weights).sum(1)) / temperature
    cdf = log.softmax(0).cumsum(0)
    chains = free[torch.searchsorted(cdf, torch.rand(5000, generator=generator, dtype=DOUBLE)).clamp(max=20_000)]
    moved = scale.conditional(chains, 3, weights.square().sum().expand(5000), temperature, generator)
    if isinstance(scale, HalfCauchy) and temperature != 1:
        assert moved is None
        return
    assert stats.kstest(moved.numpy(), lambda s: np.interp(s, free.numpy(), cdf.numpy())).pvalue > 1e-3
    assert (moved != chains).all()


@every_prior
def test_density_draws_and_slopes(prior):
    params = joint(prior)
    free = prior.parameters(WEIGHTS)
    assert all(name.startswith("prior:") for name in free)
    slopes = prior.gradient(params)
    assert list(slopes) == list(params)
    live = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    value = prior.log_prob(live)
    assert value.dtype == DOUBLE
    for found, expected in zip(slopes.values(), torch.autograd.grad(value, list(live.values())), strict=True):
        torch.testing.assert_close(found, expected)
    stacked = tree.stack([params, joint(prior, 1)])
    torch.testing.assert_close(vmap(prior.gradient)(stacked)["0.weight"][0], slopes["0.weight"])
    torch.testing.assert_close(joint(prior)["0.weight"], params["0.weight"])
    assert list(prior.sample(WEIGHTS)) == list(WEIGHTS)
    assert set(prior.units(params)) == set(params)
    with pytest.raises(ValueError, match="add `prior.parameters\\(weights\\)`"):
        prior.log_prob(WEIGHTS)


@pytest.mark.parametrize("name", ["half-cauchy", "horseshoe", "group horseshoe", "by row", "ard"])
def test_the_density_is_that_of_normals_given_the_scales(name):
    prior = PRIORS[name]
    params = joint(prior)
    scales = prior.scales(params)
    normals = sum(float(torch.distributions.Normal(0, scales[n]).log_prob(WEIGHTS[n]).sum()) for n in WEIGHTS)
    hyper = sum(float(prior._scale(n).log_prob(leaf).sum()) for n, leaf in params.items() if ":" in n)
    assert float(prior.log_prob({**params, **WEIGHTS})) == pytest.approx(normals + hyper)


@pytest.mark.parametrize("prior", [Horseshoe(0.3, groups="row"), Hierarchical(InverseGamma(2.0, 1.0), groups="layer")])
def test_gibbs_moves_leave_the_prior_as_it_is(prior):
    """Weights and scales drawn together, then the scales anew given the weights: the scales have the same law as before."""
    like, generator = (
        {"0.weight": torch.zeros(2, 3, dtype=DOUBLE), "0.bias": torch.zeros(2, dtype=DOUBLE)},
        torch.Generator().manual_seed(0),
    )
    like |= {name: leaf.double() for name, leaf in prior.parameters(like).items()}
    chains = tree.stack([prior.sample(like, generator) for _ in range(2000)])
    drawn = prior.resample(chains, 1.0, generator)
    assert list(drawn) == [name for name in like if ":" in name]
    for name, leaf in drawn.items():
        law = stats.halfcauchy(scale=0.3 if "overall" in name else 1.0).cdf
        values = leaf[:, 0].exp().numpy()
        values = values**2 if isinstance(prior, Hierarchical) else values
        assert stats.kstest(values, stats.invgamma(2.0).cdf if isinstance(prior, Hierarchical) else law).pvalue > 1e-3, name
        assert (leaf != chains[name]).all()


def test_inverse_gamma_scales_make_weights_student_t():
    prior, w = Hierarchical(InverseGamma(1.5, 0.6), groups="weight"), torch.tensor([0.0, 0.4, -3.0], dtype=DOUBLE)
    law = stats.t(df=3.0, scale=math.sqrt(0.6 / 1.5))
    for value in w:
        density = lambda s, value=value: float(  # noqa: E731
            prior.log_prob({"w": value.reshape(1), "prior:log_scale:w": torch.tensor([s], dtype=DOUBLE)}).exp()
        )
        assert integrate.quad(density, -8, 8)[0] == pytest.approx(law.pdf(float(value)), rel=1e-5)
    drawn = prior.sample({"w": torch.zeros(20_000, dtype=DOUBLE)}, torch.Generator().manual_seed(0))["w"]
    assert stats.kstest(drawn, law.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "prior",
    [ARD(), Hierarchical(Gamma(3.0, 2.0), groups="layer"), ByName({"bias": Laplace(0.3), "": ARD(InverseGamma(2.0, 1.0))})],
    ids=["ard", "gamma", "by name"],
)
def test_expectations_under_a_gaussian(prior):
    mean = {**WEIGHTS, **{name: leaf.double() for name, leaf in prior.parameters(WEIGHTS).items()}}
    variance = {name: torch.full_like(leaf, 0.1) for name, leaf in mean.items()}
    assert prior.expected_log_prob(mean, variance) is None, "under q the weights may know of their scales"
    exact = prior.expected_log_prob(mean, variance, independent=True)
    noise = {name: torch.randn(4000, *leaf.shape, dtype=DOUBLE) for name, leaf in mean.items()}
    draws = {name: mean[name] + variance[name].sqrt() * noise[name] for name in mean}
    values = vmap(prior.log_prob)(draws)
    assert float(exact) == pytest.approx(float(values.mean()), abs=5 * float(values.std()) / math.sqrt(4000))
    points = {name: leaf for name, leaf in variance.items() if ":" not in name}
    assert prior.expected_log_prob(mean, points) is not None, "scales that are points know nothing of the weights"


def test_a_half_cauchy_has_no_closed_expectation():
    prior = Horseshoe()
    params = joint(prior)
    assert prior.expected_log_prob(params, params, independent=True) is None


def test_improper_scales_say_so():
    prior = Jeffreys()
    params = {**WEIGHTS, **prior.parameters(WEIGHTS)}
    for call in (prior.log_prob, prior.sample):
        with pytest.raises(ValueError, match="Jeffreys' prior is improper"):
            call(params)
    # in expectation it is what any other is without the density of its scales
    other, spread = Hierarchical(Gamma(3.0, 2.0)), {name: torch.full_like(leaf, 0.1) for name, leaf in params.items()}
    scales = sum(Gamma(3.0, 2.0).expected_log_prob(params[n], spread[n]).sum() for n in params if ":" in n)
    found = prior.expected_log_prob(params, spread, independent=True)
    torch.testing.assert_close(found + scales, other.expected_log_prob(params, spread, independent=True))


def test_groups():
    leaf = torch.arange(24.0).reshape(2, 3, 2, 2)
    for by, shape in {"tensor": (1, 24), "row": (2, 12), "column": (3, 8), "kernel": (6, 4), "weight": (24, 1)}.items():
        groups = Groups(by)
        rows = groups.rows("conv.weight", leaf)
        assert rows.shape == shape
        spread = groups.spread("conv.weight", rows[:, 0], leaf)
        torch.testing.assert_close(groups.rows("conv.weight", spread), rows[:, :1].expand(shape))
    lstm = dict(nn.LSTM(3, 5).named_parameters())
    assert Groups("gate").rows("weight_ih_l0", lstm["weight_ih_l0"]).shape == (4, 15)
    torch.testing.assert_close(
        Groups("gate").rows("weight_hh_l0", lstm["weight_hh_l0"])[1], lstm["weight_hh_l0"][5:10].reshape(-1)
    )
    assert Groups("gate").rows("head.weight", leaf).shape == (1, 24)
    with pytest.raises(ValueError, match="are not 3 gates"):
        Groups("gate", gates=3).rows("weight_ih_l0", lstm["weight_ih_l0"])
    gru, projected = dict(nn.GRU(3, 8).named_parameters()), dict(nn.LSTM(3, 8, proj_size=6).named_parameters())
    with pytest.raises(ValueError, match="are not 4 gates"):
        Groups("gate").rows("weight_hh_l0", gru["weight_hh_l0"])  # 24 rows, which four would divide
    assert Groups("gate", gates=3).rows("weight_hh_l0", gru["weight_hh_l0"]).shape == (3, 64)
    assert Groups("gate").rows("weight_hh_l0", projected["weight_hh_l0"]).shape == (4, 48)
    with pytest.raises(ValueError, match="grouped by one of all, layer"):
        Groups("rows")


# --- what methods make of them ----------------------------------------------------------------------------------------


def problem(prior: Prior) -> tuple[Model, tuple]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 2, generator=generator, dtype=DOUBLE)
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=DOUBLE) + 0.5 * torch.randn(12, 1, generator=generator, dtype=DOUBLE)
    torch.manual_seed(0)
    return Model(nn.Linear(2, 1, bias=False).double(), Gaussian(scale=0.5), prior), (x, y)


def reference(scale, x, y, temperature: float) -> tuple[float, float]:
    """Mean and variance of the log scale of all weights, which are integrated out, on a grid."""
    grid, p = torch.linspace(-6, 6, 6001, dtype=DOUBLE), x.shape[1]
    u, d, _ = torch.linalg.svd(x, full_matrices=True)
    spread = torch.cat([d.square(), torch.zeros(len(y) - p, dtype=DOUBLE)])
    # N(w | 0, e^2s)^(1/T) is N(w | 0, T e^2s) but for its constant
    variance = temperature * (0.25 + (2 * grid).exp().unsqueeze(1) * spread)
    log = -0.5 * (variance.log() + (u.mT @ y).mT.square() / variance).sum(1) + p * grid - p * grid / temperature
    weights = (log + scale.log_prob(grid) / temperature).softmax(0)
    mean = (weights * grid).sum()
    return float(mean), float((weights * (grid - mean) ** 2).sum())


CASES = {
    "hmc, from the conditional": (HMC(units="posterior", chains=64, draws=15, burn_in=30), InverseGamma(2.0, 1.0), 2.0),
    "hmc, from the conditional of a half-cauchy": (HMC(units="posterior", chains=64, draws=15, burn_in=30), HalfCauchy(1.0), 1.0),
    "hmc, jointly": (HMC(units="posterior", chains=64, draws=15, burn_in=30, gibbs=False), InverseGamma(2.0, 1.0), 1.0),
    "nuts, jointly": (NUTS(units="posterior", chains=64, draws=8, burn_in=20), Gamma(2.0, 2.0), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_samplers_give_the_scale_its_posterior(name):
    method, scale, temperature = CASES[name]
    model, (x, y) = problem(Hierarchical(scale, groups="all"))
    found = dubito.fit(model, method, (x, y), temperature=temperature)
    s = found.params["prior:log_scale"].view(64, -1)
    mean, variance = reference(scale, x, y, temperature)
    for values, expected in ((s, mean), ((s - mean) ** 2, variance)):
        assert float(values.mean()) == pytest.approx(expected, abs=5 * float(values.std()) / math.sqrt(float(ess_mean(values))))


def test_sgld_map_and_files(tmp_path):
    model, data = problem(ByName({"weight": ARD(InverseGamma(2.0, 1.0))}))
    assert list(model.parameters()) == ["weight", "prior:weight:log_scale:weight"]
    found = dubito.fit(model, SGLD(burn_in=30, draws=250, learning_rate=0.1, chains=4), data)
    exact = dubito.fit(model, HMC(units="posterior", chains=32, draws=20, burn_in=25), data)
    for name, leaf in exact.params.items():
        ours = found.params[name]
        assert (ours.mean(0) - leaf.mean(0)).abs().max() < 0.3 * leaf.std(0).max(), name
    dubito.save(found, tmp_path / "hierarchical.safetensors")
    again = dubito.load(tmp_path / "hierarchical.safetensors", model)
    assert all(torch.equal(again.params[name], leaf) for name, leaf in found.params.items())
    assert again.predict(data[0]).mean.shape == data[1].shape

    mode = dubito.fit(model, MAP(epochs=200, learning_rate=0.2), data)
    slopes = Target(model, len(data[1])).gradient(mode.params, [data], {}).gradient
    assert max(float(slope.abs().max()) for slope in slopes.values()) < 1e-2
    members = dubito.fit(model, dubito.Ensemble(MAP(epochs=5), size=3, vectorize=True), data)
    assert members.predict(data[0]).mean.shape == data[1].shape


def test_stacked_members_have_each_their_own_prior():
    model, data = problem(Horseshoe(0.5, groups="row"))
    params = [model.prior.sample(model.parameters(), torch.Generator().manual_seed(i)) for i in range(2)]
    together = Target(model, 12, members=2).gradient(tree.stack(params), [data], {}).gradient
    for i, one in enumerate(params):
        for name, slope in Target(model, 12).gradient(one, [data], {}).gradient.items():
            torch.testing.assert_close(together[name][i], slope)
