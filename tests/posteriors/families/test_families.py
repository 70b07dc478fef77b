"""Every family against draws of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dubito
from dubito.families import FAMILIES, Binary, Factorized, Flow, Full, Grouped, Layerwise, LowRank, MatrixNormal, MeanField
from dubito.priors import Bernoulli, Normal
from dubito.tensors import tree
from dubito.tensors.packing import describe

NAMES = {"0.weight": (3, 2), "0.bias": (3,), "1.weight": (1, 3)}
GAUSSIAN = {
    "mean_field": MeanField(),
    "low_rank": LowRank(rank=2),
    "layerwise": Layerwise(),
    "full": Full(),
    "matrix_normal": MatrixNormal(pseudo=2),
}
OTHERS = {
    "laplace": Factorized("laplace"),
    "logistic": Factorized("logistic"),
    "flow": Flow(hidden=4),
    "normal_jeffreys": Grouped(),
    "horseshoe": Grouped("horseshoe", tau=0.5),
    "binary": Binary((-1.0, 1.0)),
}


def leaves_of(family, seed=0):
    """Parameters that are not at their start, so that everything plays its part."""
    generator = torch.Generator().manual_seed(seed)
    start = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in NAMES.items()}
    scale = {name: 0.2 + torch.rand(*shape, generator=generator, dtype=torch.float64) for name, shape in NAMES.items()}
    leaves = family.leaves(start, scale)
    return {name: leaf + 0.3 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for name, leaf in leaves.items()}


def drawn(family, leaves, n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return tree.stack([family.draw(leaves, family.noise(leaves, generator)) for _ in range(n)])


def test_all_are_here():
    assert {type(family) for family in (GAUSSIAN | OTHERS).values()} == set(FAMILIES.values())


@pytest.mark.parametrize("name", GAUSSIAN)
def test_moments_entropy_and_covariance(name):
    family = GAUSSIAN[name]
    leaves, n = leaves_of(family), 4000
    rows = tree.flatten(drawn(family, leaves, n), stacked=True)
    mean, variance = (tree.flatten(part) for part in family.moments(leaves))
    covariance = family.covariance(leaves)
    dense = covariance.dense().double()
    assert list(covariance.shapes) == list(NAMES)
    torch.testing.assert_close(dense.diagonal(), variance, rtol=1e-4, atol=1e-6)
    assert ((rows.mean(0) - mean).abs() < 5 * (variance / n).sqrt()).all()
    error = torch.outer(variance, variance).add(dense.square()).div(n).sqrt()
    assert ((torch.cov(rows.T) - dense).abs() < 5 * error).all()
    expected = 0.5 * (torch.logdet(dense) + len(mean) * (1 + math.log(2 * math.pi)))
    torch.testing.assert_close(family.entropy(leaves), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mean_field", "low_rank", "layerwise", "full"])
def test_density(name):
    family = GAUSSIAN[name]
    leaves = leaves_of(family)
    mean = tree.flatten(family.moments(leaves)[0])
    q = torch.distributions.MultivariateNormal(mean, family.covariance(leaves).dense())
    params = tree.select(drawn(family, leaves, 1), 0)
    torch.testing.assert_close(family.log_prob(leaves, params), q.log_prob(tree.flatten(params)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["laplace", "logistic"])
def test_inverse_distribution_functions(name):
    family = OTHERS[name]
    leaves = leaves_of(family)
    params = tree.select(drawn(family, leaves, 1), 0)
    scales = {key: torch.nn.functional.softplus(leaves[f"rho/{key}"]) for key in NAMES}
    away = {key: (params[key] - leaves[f"mean/{key}"]).abs() / scales[key] for key in NAMES}
    if name == "laplace":
        expected = sum((-away[key] - torch.log(2 * scales[key])).sum() for key in NAMES)
    else:
        expected = sum((-away[key] - scales[key].log() - 2 * torch.log1p(torch.exp(-away[key]))).sum() for key in NAMES)
    torch.testing.assert_close(family.log_prob(leaves, params), expected)
    # a quarter of the draws lie below the lower quartile
    rows = drawn(family, leaves, 2000)["0.weight"]
    quartile = leaves["mean/0.weight"] - scales["0.weight"] * (math.log(2) if name == "laplace" else math.log(3))
    assert ((rows < quartile).double().mean(0) - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 2000)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="derive from Factorized"):
        Factorized("triangle")


def test_the_name_of_version_0_1_still_works():
    """In code, with a warning; as the name of the family; and in the description of a method that checkpoints hold."""
    with pytest.warns(DeprecationWarning, match="Factorized"):
        assert dubito.families.Factorised is Factorized
    assert dubito.Variational("factorised").q == Factorized()
    assert describe(Factorized("cauchy")) == "Factorised(shape='cauchy')"


@pytest.mark.parametrize("name", ["normal_jeffreys", "horseshoe"])
def test_factors_of_units(name):
    family = OTHERS[name]
    leaves, n = leaves_of(family), 20_000
    mean, variance = family.weight_moments(leaves)
    if name == "normal_jeffreys":  # the fourth moment of a horseshoe's draws is too wild to test its variance by draws
        rows = drawn(family, leaves, n)
        for key in NAMES:
            assert ((rows[key].mean(0) - mean[key]).abs() < 5 * (variance[key] / n).sqrt()).all()
            torch.testing.assert_close(rows[key].var(0), variance[key], rtol=0.15, atol=0)
    else:
        noise = torch.randn(200_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        z, (first, second) = family.factors.draw(leaves, "0.weight", noise), family.factors.moments(leaves, "0.weight")
        torch.testing.assert_close(z.log().mean(0), family.factors.log_moments(leaves, "0.weight")[0], rtol=0.05, atol=0.01)
        assert (z.mean(0) - first).abs().div((second / 200_000).sqrt()).max() < 6
    assert {key: leaf.shape for key, leaf in family.units(leaves).items()} == {"0.weight": (2,), "1.weight": (3,)}


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(4, 3), (3, 4)), (nn.Linear(4, 3), (3, 5, 4)), (nn.Conv1d(4, 4, 3, groups=2), (3, 4, 5))]
)
def test_outputs_of_correlated_weights(layer, shape):
    """Drawn by themselves they have mean and covariance, over the outputs and positions of an example, as with drawn weights."""
    torch.manual_seed(0)
    q, x, generator, n = MatrixNormal(pseudo=2), torch.randn(shape), torch.Generator().manual_seed(0), 1500
    start = {name: leaf.detach() for name, leaf in layer.named_parameters()}
    leaves = q.leaves(start, {name: 0.1 + 0.3 * torch.rand_like(leaf) for name, leaf in start.items()})
    leaves["pseudo/weight"] *= 3
    rows = {"weights": [], "outputs": []}
    with torch.no_grad():
        for _ in range(n):
            rows["weights"].append(torch.func.functional_call(layer, q.draw(leaves, q.noise(leaves, generator)), x))
            means, drawing = q.outputs(leaves, {"weight": "bias"}, "auto", generator)
            with drawing:
                rows["outputs"].append(torch.func.functional_call(layer, means, x))
    flat = {name: torch.stack(each).flatten(2) for name, each in rows.items()}  # [n, B, outputs]
    error = (flat["weights"].var(0) / n).sqrt()
    assert ((flat["weights"] - flat["outputs"]).mean(0).abs() < 7 * error).all()
    for i in range(len(x)):
        one, other = (torch.cov(each[:, i].T) for each in flat.values())
        size = one.diagonal().sqrt()
        assert ((one - other).abs() / torch.outer(size, size)).max() < 0.2
    assert torch.corrcoef(flat["outputs"][:, :2, 0].T)[0, 1].abs() < 0.15, "and each example has its own"


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(3, 2, 1)])
def test_factors_leave_a_bias_that_is_not_bayesian(layer):
    nn.init.constant_(layer.bias, 5.0)
    x = torch.ones(4, 3) if isinstance(layer, nn.Linear) else torch.ones(4, 3, 1)
    q, weight = Grouped(), {"weight": layer.weight.detach()}
    leaves = q.leaves(weight, {"weight": torch.full_like(weight["weight"], 1e-4)})
    means, drawing = q.outputs(leaves, {"weight": None}, "auto", torch.Generator().manual_seed(0))
    with drawing:
        found = torch.func.functional_call(layer, means, x)
    torch.testing.assert_close(found, layer(x), rtol=0, atol=0.2)


def test_a_horseshoe_begins_near_its_prior():
    """The global factor where its prior is, and not at 1; all factors are one, which costs ln(1 / tau) nats for each unit."""
    family = Grouped("horseshoe")
    leaves = family.leaves({"w": torch.zeros(2, 3)}, {"w": torch.ones(2, 3)})
    torch.testing.assert_close(family.factors.moments(leaves, "w")[0], torch.ones(3), rtol=1e-3, atol=0)
    assert float(family.divergence(leaves, {}, Normal(), {})) < 120


def test_divergence_of_log_normals_from_the_horseshoe():
    """Of the gamma and inverse-gamma parts, by draws."""
    family = Grouped("horseshoe", tau=0.7)
    leaves = leaves_of(family)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for name in family.grouped(leaves):
        for part, tau in (("", 1.0), ("all_", 0.7)):
            for kind in ("gamma", "inverse"):
                mean, scale = leaves[f"{part}{kind}/{name}"], leaves[f"{part}{kind}_spread/{name}"].exp()
                q = torch.distributions.LogNormal(mean, scale)
                x = (mean + scale * torch.randn(400_000, len(mean), generator=generator, dtype=torch.float64)).exp()
                p = (
                    torch.distributions.Gamma(torch.tensor(0.5, dtype=torch.float64), 1 / tau**2)
                    if kind == "gamma"
                    else torch.distributions.InverseGamma(
                        torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
                    )
                )
                total += (q.log_prob(x) - p.log_prob(x)).mean(0).sum()
    weights = sum(
        (0.5 * (torch.nn.functional.softplus(leaves[f"rho/{k}"]).square() + leaves[f"mean/{k}"].square() - 1)
         - torch.nn.functional.softplus(leaves[f"rho/{k}"]).log()).sum() for k in NAMES
    )  # fmt: skip
    torch.testing.assert_close(family.divergence(leaves, {}, Normal(), {}), total + weights, rtol=0.01, atol=0.1)


def test_divergence_of_a_gaussian_from_the_log_uniform():
    """The fit of Molchanov et al. against the integral, E log|z| under N(1, alpha), up to a constant."""
    family = Grouped()
    generator = torch.Generator().manual_seed(0)
    eps = torch.randn(2_000_000, generator=generator, dtype=torch.float64)

    def exact(alpha):
        return float((1 + math.sqrt(alpha) * eps).abs().log().mean() - 0.5 * math.log(alpha))

    def fitted(alpha):
        leaves = {
            "mean/w": torch.zeros(1, 1, dtype=torch.float64),
            "rho/w": torch.full((1, 1), math.log(math.e - 1), dtype=torch.float64),  # N(0, 1), the prior: no divergence
            "factor/w": torch.ones(1, dtype=torch.float64),
            "spread/w": torch.tensor([0.5 * math.log(alpha)], dtype=torch.float64),
        }
        return float(family.divergence(leaves, {}, Normal(), {}))

    for alpha in (0.01, 0.1, 1.0, 10.0):
        assert abs(fitted(alpha) - fitted(1e8) - exact(alpha) + exact(1e8)) < 0.02


def test_the_flow_bounds_the_divergence_from_above():
    """With one unit, z and w are few enough for the density of w to be integrated."""
    family = Flow(steps=2, hidden=3)
    leaves = family.leaves(
        {"w": torch.full((1, 1), 0.8, dtype=torch.float64)}, {"w": torch.full((1, 1), 0.3, dtype=torch.float64)}
    )
    generator = torch.Generator().manual_seed(0)
    leaves = {name: leaf + 0.3 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for name, leaf in leaves.items()}
    with torch.no_grad():
        noises = [family.noise(leaves, generator) for _ in range(2000)]
        bound = torch.stack([family.divergence(leaves, noise, Normal(), {}) for noise in noises]).mean()
        w = torch.stack([family.draw(leaves, noise)["w"] for noise in noises]).flatten()
        given = torch.stack([family._conditional(leaves, noise)[0]["w"] for noise in noises]).flatten()
        scale = torch.nn.functional.softplus(leaves["rho/w"]).flatten()
        density = torch.distributions.Normal(given, scale).log_prob(w[:, None]).logsumexp(1) - math.log(len(given))
        exact = (density - torch.distributions.Normal(0.0, 1.0).log_prob(w)).mean()
    assert bound > exact - 0.05
    assert exact > 0


def test_log_q_of_the_flow_is_its_density():
    """Against the Jacobian of the whole flow."""
    family = Flow(steps=3, hidden=4)
    leaves = leaves_of(family)
    noise = family.noise(leaves, torch.Generator().manual_seed(3))
    eps = noise["unit/1.weight"]
    jacobian = torch.autograd.functional.jacobian(lambda e: family._factors(leaves, {"unit/1.weight": e}, "1.weight")[0], eps)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(eps).sum() - torch.linalg.slogdet(jacobian)[1]
    torch.testing.assert_close(family._factors(leaves, noise, "1.weight")[1], expected)


def test_a_matrix_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="low_rank"):
        Full().leaves({"w": torch.zeros(100, 100)}, {"w": torch.ones(100, 100)})


def test_noise_beside_the_diagonal_of_a_large_matrix_does_not_widen_it():
    """Adam moves every number by about a learning rate, and those of a row must not add up. Files of version 0.1 keep their units."""
    family, n = Full(), 400
    leaves = family.leaves({"w": torch.zeros(n)}, {"w": torch.ones(n)})
    noisy = {**leaves, "rows/": leaves["rows/"] + 0.1 * torch.randn(n, n, generator=torch.Generator().manual_seed(0)).tril(-1)}
    assert family.moments(noisy)[1]["w"].max() < 1.02
    before = {"mean/w": leaves["mean/w"], "factor/": noisy["rows/"]}
    assert family.moments(before)[1]["w"].max() > 3


def test_binary_weights():
    """The moments of discrete draws; the divergence by summing over the states; draws while training are in between."""
    family, prior = Binary((-1.0, 1.0), learn_scale=False), Bernoulli(0.3, values=(-1.0, 1.0))
    leaves = leaves_of(family)
    generator, n = torch.Generator().manual_seed(0), 4000
    rows = tree.stack([family.sample(leaves, family.noise(leaves, generator)) for _ in range(n)])
    mean, variance = family.weight_moments(leaves)
    for name in NAMES:
        assert set(rows[name].unique().tolist()) == {-1.0, 1.0}
        assert ((rows[name].mean(0) - mean[name]).abs() < 5 * (variance[name] / n).sqrt()).all()
    p = {name: torch.sigmoid(leaves[f"logit/{name}"]) for name in NAMES}
    expected = sum((q * (q / 0.3).log() + (1 - q) * ((1 - q) / 0.7).log()).sum() for q in p.values())
    torch.testing.assert_close(family.divergence(leaves, family.noise(leaves, generator), prior, {}), expected)
    relaxed = family.draw(leaves, family.noise(leaves, generator))["0.weight"]
    assert ((relaxed > -1) & (relaxed < 1)).all()
    with pytest.raises(ValueError, match="Bernoulli"):
        family.divergence(leaves, family.noise(leaves, generator), Normal(), {})
    with pytest.raises(ValueError, match="matches none"):
        Binary(at="head").leaves({"w": torch.zeros(1)}, {})
    for values in ((1.0, 0.0), (0.0, math.inf), (0.0, 1.0, 2.0)):
        with pytest.raises(ValueError, match="two finite numbers in increasing order; got"):
            Binary(values)


def test_binary_weights_have_a_scale_for_each_tensor():
    """It starts at 1 / sqrt(fan-in) for values of one and minus one, and multiplies draws and moments."""
    start = {"0.weight": torch.randn(3, 16, dtype=torch.float64), "0.bias": torch.zeros(3, dtype=torch.float64)}
    family = Binary((-1.0, 1.0))
    leaves = family.leaves(start, {})
    assert {name: leaf.exp().item() for name, leaf in leaves.items() if "log_size" in name} == {
        "log_size/0.weight": pytest.approx(0.25),
        "log_size/0.bias": pytest.approx(1.0),
    }
    noise = family.noise(leaves, torch.Generator().manual_seed(0))
    without = {name: leaf for name, leaf in leaves.items() if "log_size" not in name}
    for function in (family.sample, family.draw):
        torch.testing.assert_close(function(leaves, noise)["0.weight"], 0.25 * function(without, noise)["0.weight"])
    for mine, theirs, factor in zip(family.weight_moments(leaves), family.weight_moments(without), (0.25, 0.0625), strict=True):
        torch.testing.assert_close(mine["0.weight"], factor * theirs["0.weight"])


@pytest.mark.parametrize("family", ["mean_field", "low_rank", "layerwise", "full", "matrix_normal"])
def test_all_ways_to_predict_agree(family):
    """A matrix and its bias may be in blocks of their own, and weights in single precision."""
    torch.manual_seed(0)
    x = torch.randn(6, 2)
    for network in (nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)), nn.Sequential(nn.Linear(2, 2))):
        model = dubito.Model(network, dubito.Gaussian(scale=0.1))
        method = dubito.Variational(family, epochs=20, init_scale=0.05)
        posterior = dubito.fit(model, method, (x, x), progress=False)
        truth = posterior.predict(x, "sampled", draws=20_000).f_var
        for how in ("linearized", "streamlined", "adjoint"):
            torch.testing.assert_close(posterior.predict(x, how).f_var, truth, rtol=0.06, atol=1e-5)
        again = posterior.joint(x)[1].flatten(0, 1).flatten(1).diagonal().reshape(6, 2)
        torch.testing.assert_close(again, posterior.predict(x, "linearized").f_var, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["mean_field", "low_rank", "layerwise", "full", "matrix_normal"])
def test_each_can_be_the_prior_of_what_follows(family):
    torch.manual_seed(0)
    x, network = torch.randn(20, 2), nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    likelihood = dubito.Gaussian(scale=0.1)
    first = dubito.fit(dubito.Model(network, likelihood), dubito.Variational(family, epochs=2), (x, x[:, :1]))
    prior = first.as_prior()
    model = dubito.Model(network, likelihood, prior)
    for method in (dubito.MAP(epochs=1), dubito.HMC(draws=2, burn_in=10, chains=1)):
        dubito.fit(model, method, (x, x[:, :1]))
    second = dubito.fit(model, dubito.Variational(epochs=1), (x, x[:, :1]))
    assert math.isfinite(dubito.elbo(second, (x, x[:, :1]), draws=5).nats)
    part = dubito.Model(network, likelihood, prior, only="^2")
    if family == "mean_field":  # independent: the prior of some weights is known
        assert torch.isfinite(dubito.fit(part, dubito.MAP(epochs=1), (x, x[:, :1])).predict(x).mean).all()
    else:
        with pytest.raises(ValueError, match="leaves these out"):
            dubito.fit(part, dubito.MAP(epochs=1), (x, x[:, :1]))


def test_low_rank_takes_a_number():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.linear = nn.Parameter(torch.tensor(1.0)), nn.Linear(2, 1)

        def forward(self, x):
            return self.a * self.linear(x)

    x = torch.randn(10, 2)
    posterior = dubito.fit(
        dubito.Model(Scaled(), dubito.Gaussian(scale=1.0)), dubito.Variational("low_rank", epochs=1), (x, x[:, :1])
    )
    assert math.isfinite(float(posterior.log_prob(tree.select(posterior.sample(1), 0))))
    assert posterior.predict(x).mean.shape == (10, 1)
