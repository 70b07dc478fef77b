"""A Gaussian over weights: draws, densities, ways to predict, and going on with more data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal as TorchNormal

import dubito
from curvature.networks import DOUBLE, build, numbers, targets
from curvature.test_evidence import STRUCTURES, Linear, every, fitted, problem
from dubito import Categorical, Gaussian, Laplace, Model
from dubito.model import Target
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.linearized import sweep
from dubito.priors import MultivariateNormal, Normal
from dubito.tensors import tree
from dubito.tensors.covariances import Diagonal


@every
def test_draws_and_density(name):
    model, data = problem(Categorical())
    posterior = fitted(model, STRUCTURES[name], data)
    shapes = posterior.covariance.shapes
    draws = posterior.sample(20_000, torch.Generator().manual_seed(0))
    assert list(draws) == list(posterior.params)
    rows = tree.flatten({n: draws[n] for n in shapes}, stacked=True)
    mean, cov = tree.flatten({n: posterior.params[n] for n in shapes}), posterior.covariance.dense()
    moves = cov.diag() > 0
    deviation = cov.diag().sqrt()
    assert ((rows.mean(0) - mean).abs() <= 5 * deviation / 20_000**0.5 + 1e-12).all()
    inner = deviation[moves]
    error = (torch.cov(rows.mT)[moves][:, moves] - cov[moves][:, moves]) / inner / inner.unsqueeze(1)
    assert error.abs().max() < 0.05
    still = {n for n in posterior.params if n not in shapes}
    assert all(torch.equal(draws[n][7], posterior.params[n]) for n in still)
    assert (rows[:, ~moves] == mean[~moves]).all()
    law = TorchNormal(mean[moves], cov[moves][:, moves])
    few = tree.select(draws, slice(0, 5))
    torch.testing.assert_close(posterior.log_prob(few), law.log_prob(rows[:5][:, moves]))
    torch.testing.assert_close(posterior.log_prob(tree.select(draws, 3)), law.log_prob(rows[3][moves]))
    torch.testing.assert_close(posterior.logdet(), torch.linalg.slogdet(cov[moves][:, moves])[1])


def test_draws_follow_the_generator_and_leave_the_global_one_alone():
    model, data = problem(Categorical())
    posterior = fitted(model, STRUCTURES["kronecker"], data)
    state = torch.get_rng_state()
    first, again, other = (posterior.sample(3, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    posterior.sample(2)
    posterior.sample_functions(data[0], 2)
    posterior.predict(data[0], how="sampled")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    x = data[0]
    a, b, c = (posterior.sample_functions(x, 2, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    a, b, c = (posterior.predict(x, "sampled", draws=4, seed=s).means for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_for_a_linear_network_all_ways_to_predict_agree():
    problem = Linear(n=30)
    start = problem.start(torch.ones(2, 4, dtype=DOUBLE), torch.full((2,), 0.4, dtype=DOUBLE))
    posterior = fitted(Model(problem.net(), Gaussian(scale=0.4)), STRUCTURES["dense"], (problem.x, problem.y), start=start)
    x = numbers(4, 3)
    exact, sampled, drawn = posterior.predict(x), posterior.predict(x, "sampled", draws=4000), posterior.predict(x, draws=2000)
    for p in (sampled, drawn):
        torch.testing.assert_close(p.mean, exact.mean, rtol=0, atol=5 * (exact.f_var.max() / 2000) ** 0.5)
        torch.testing.assert_close(p.f_var, exact.f_var, rtol=0.2, atol=0)
    assert replace(posterior, how="sampled", draws=7).predict(x).means.shape == (7, 4, 2)
    with pytest.raises(ValueError, match="'linearized' or 'sampled' or 'streamlined' or 'adjoint' or 'point'; got 'linearised'"):
        posterior.predict(x, how="linearised")


def test_links():
    model, (x, _) = problem(Categorical())
    posterior = fitted(model, STRUCTURES["dense"], problem(Categorical())[1])
    means = {link: posterior.predict(x, link=link).mean for link in ("nodes", "mc", "pairwise", "probit", "bridge")}
    assert all(torch.allclose(m.sum(-1), torch.ones(10, dtype=DOUBLE)) for m in means.values())
    for link in ("mc", "pairwise", "probit"):
        torch.testing.assert_close(means[link], means["nodes"], rtol=0, atol=0.1)
        assert not torch.equal(means[link], means["nodes"])
    with pytest.raises(ValueError, match="link must be one of 'nodes', 'mc', 'pairwise', 'probit', 'bridge'; got 'logit'"):
        posterior.predict(x, link="logit")


def test_by_hand():
    model = Model(nn.Linear(2, 1).double(), Gaussian())
    mean = {"weight": torch.tensor([[1.0, 2.0]], dtype=DOUBLE)}
    posterior = Posterior.diagonal(model, mean, {"weight": torch.tensor([[0.1, 0.2]], dtype=DOUBLE)})
    x = numbers(3, 2)
    p = posterior.predict(x)
    bias = model.network.bias.detach()
    torch.testing.assert_close(p.mean, x @ mean["weight"].mT + bias)
    torch.testing.assert_close(p.f_var, x**2 @ torch.tensor([[0.1], [0.2]], dtype=DOUBLE))
    assert torch.equal(posterior.sample(3)["bias"], bias.expand(3, 1)), "what has no variance is a point"


# --- going on with more data -----------------------------------------------------------------------------------------


def closed_form(first: Linear, second: Linear) -> Linear:
    both = Linear()
    both.x, both.y = torch.cat([first.x, second.x]), torch.cat([first.y, second.y])
    both.design = torch.cat([first.design, second.design])
    return both


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "lowrank"])
def test_data_in_two_parts_are_as_good_as_at_once(structure, apart, temperature):
    early, late = Linear(n=6), Linear(n=11)
    both = closed_form(early, late)
    precision, noise = torch.full((2, 4), 1.5**-2, dtype=DOUBLE), torch.full((2,), 0.4, dtype=DOUBLE)
    prior = Normal(scale={"weight": 1.5, "bias": 0.5}) if apart else Normal(scale=1.5)
    if apart:
        precision[:, 3] = 0.5**-2
    net, method = early.net(), Laplace(structure, rank=8)
    model = Model(net, Gaussian(scale=0.4), prior)
    options = {"temperature": temperature, "batch_size": 4}
    whole = fitted(model, method, (both.x, both.y), start=both.start(precision, noise), **options)
    first = fitted(model, method, (early.x, early.y), start=early.start(precision, noise), **options)
    later = Model(net, Gaussian(scale=0.4), first.as_prior())
    slope = Target(later, 11, temperature).gradient(both.start(precision, noise), [(late.x, late.y)], {}).gradient
    assert all((leaf.abs() < 1e-9).all() for leaf in slope.values()), "the mode is that of all data"
    second = dubito.fit(later, replace(method, check=True), (late.x, late.y), start=both.start(precision, noise), **options)
    torch.testing.assert_close(second.covariance.dense(), whole.covariance.dense(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(first.log_evidence() + second.log_evidence(), whole.log_evidence(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(second.predict(both.x).f_var, whole.predict(both.x).f_var, rtol=1e-7, atol=1e-9)


def test_training_goes_on_to_the_mode_of_all_data():
    early, late = Linear(n=6), Linear(n=11)
    precision, noise = torch.ones(2, 4, dtype=DOUBLE), torch.full((2,), 0.4, dtype=DOUBLE)
    model = Model(early.net(), Gaussian(scale=0.4), Normal(scale=1.0))
    first = fitted(model, Laplace(), (early.x, early.y), start=early.start(precision, noise))
    later = Model(model.network, Gaussian(scale=0.4), first.as_prior())
    found = dubito.fit(later, dubito.MAP(epochs=600, learning_rate=0.05), (late.x, late.y), batch_size=11)
    for name, leaf in closed_form(early, late).start(precision, noise).items():
        torch.testing.assert_close(found.params[name], leaf, rtol=1e-4, atol=1e-4)


def test_data_in_three_parts():
    parts = [Linear(n=n) for n in (5, 7, 4)]
    both = closed_form(closed_form(parts[0], parts[1]), parts[2])
    precision, noise = torch.ones(2, 4, dtype=DOUBLE), torch.tensor([0.4, 0.8], dtype=DOUBLE)
    for structure, likelihood in (("dense", Gaussian(outputs=2)), ("kronecker", Gaussian(scale=(0.4, 0.8)))):
        prior = Normal(scale=1.0)
        start = dict(both.start(precision, noise))
        if structure == "dense":
            start["likelihood:log_scale"] = noise.log()
        for part in parts:
            posterior = fitted(Model(part.net(), likelihood, prior), Laplace(structure), (part.x, part.y), start=start)
            prior = posterior.as_prior()
        torch.testing.assert_close(posterior.covariance.dense(), both.dense(both.posterior(precision, noise)[1]))


def test_a_continued_prior_is_not_to_be_changed():
    early, late = Linear(), Linear()
    first = fitted(Model(early.net(), Gaussian(), Normal(scale=1.0)), Laplace("dense"), (early.x, early.y))
    second = fitted(Model(early.net(), Gaussian(), first.as_prior()), Laplace("dense"), (late.x, late.y))
    for call in (
        lambda: second.with_prior(2.0),
        lambda: second.log_evidence(2.0),
        lambda: second.log_evidence(noise=0.1),
        lambda: second.log_evidence(temperature=0.5),
        second.optimized,
    ):
        with pytest.raises(ValueError, match="the prior is an earlier posterior: change it there"):
            call()
    assert torch.isfinite(second.log_evidence())


def test_what_cannot_be_continued_is_told():
    model, data = problem(Categorical())
    net = model.network
    dense = fitted(model, Laplace("dense"), data)
    with pytest.raises(ValueError, match="another structure"):
        fitted(Model(net, Categorical(), dense.as_prior()), Laplace(), data)
    head = fitted(model, Laplace(subset="last_layer"), data)
    with pytest.raises(ValueError, match="over other weights: use the same `only` and `subset`"):
        fitted(Model(net, Categorical(), head.as_prior()), Laplace(), data)
    with pytest.raises(ValueError, match="over other weights"):
        fitted(Model(net, Categorical(), fitted(model, Laplace(), data).as_prior()), Laplace(subset="last_layer"), data)
    with pytest.raises(ValueError, match="cannot be continued with corrected=True"):
        fitted(Model(net, Categorical(), fitted(model, Laplace(), data).as_prior()), Laplace(corrected=True), data)
    with pytest.raises(ValueError, match=r"the prior says nothing of \['0.weight', .* set `only`"):
        dubito.fit(Model(net, Categorical(), head.as_prior()), dubito.MAP(epochs=1), data)


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "subnetwork"])
def test_as_a_prior_it_has_its_own_density(name):
    model, data = problem(Categorical())
    posterior = fitted(model, STRUCTURES[name], data)
    prior = posterior.as_prior()
    assert isinstance(prior, MultivariateNormal)
    weights = {n: posterior.params[n] + 0.1 for n in posterior.covariance.shapes}
    torch.testing.assert_close(prior.log_prob(weights), posterior.log_prob(weights))


def test_kronecker_goes_on_with_other_data_of_a_network():
    """KFAC's own approximation: the statistics of both data sets together."""
    net, x = build("perceptron")
    model = Model(net, Categorical(), Normal(scale=1.0))
    y = targets(model, model.parameters(), x)
    first = fitted(model, Laplace(), (x[:2], y[:2]))
    second = fitted(Model(net, Categorical(), first.as_prior()), Laplace(), (x[2:], y[2:]))
    whole = fitted(model, Laplace(), (x, y))
    torch.testing.assert_close(second.covariance.dense(), whole.covariance.dense())


def test_the_entropy_of_a_posterior_shrinks_with_data():
    early, late = Linear(), Linear()
    first = fitted(Model(early.net(), Gaussian(scale=0.4), Normal(scale=1.0)), Laplace("dense"), (early.x, early.y))
    second = fitted(Model(early.net(), Gaussian(scale=0.4), first.as_prior()), Laplace("dense"), (late.x, late.y))
    assert second.logdet() < first.logdet() < 0
    assert math.isfinite(second.log_prob(second.params))
    assert Diagonal.of({"w": torch.ones(3)}).logdet() == 0


# --- tuned on held-out data --------------------------------------------------------------------------------------------

TUNED = {name: method for name, method in STRUCTURES.items() if name not in ("hessian", "subnetwork")}


@pytest.mark.filterwarnings("ignore:the held-out data like")
@pytest.mark.parametrize("name", TUNED)
def test_the_tuned_precision_is_the_best_of_the_grid(name):
    """Against a new prior and a prediction at every grid point."""
    model, (x, y) = problem(Categorical())
    posterior, grid = fitted(model, TUNED[name], (x[:6], y[:6])), [10**i for i in (-2, -1, 0, 1, 2)]
    prior, held_out = posterior.prior_precision, [(x[6:8], y[6:8]), (x[8:], y[8:])]
    found = posterior.tuned(held_out, precisions=grid)
    scores = {}
    for p in grid:
        at = posterior.with_prior({n: leaf * p for n, leaf in prior.items()})
        scores[p] = float(sum(at.predict(a, "linearized").log_prob(b).sum() for a, b in held_out))
    best = max(scores, key=lambda p: scores[p])
    assert all(float(found.prior_precision[n] / leaf) == pytest.approx(best) for n, leaf in prior.items())


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("only", ["", r"^3\."])
def test_a_sweep_gives_what_a_new_prior_would(name, only):
    """At every multiple of the prior's precision, to rounding; over all weights, and of the output layer alone."""
    model, (x, y) = problem(Categorical())
    model = replace(model, only=only)
    posterior = fitted(model, STRUCTURES[name], (x, y))
    factors = [0.01, 1.0, 30.0]
    found = sweep(model, x, params=posterior.params, buffers=posterior.buffers, covariance=posterior.covariance, factors=factors)
    for factor, p in zip(factors, found, strict=True):
        at = posterior.with_prior({n: leaf * factor for n, leaf in posterior.prior_precision.items()})
        expected = at.predict(x, "linearized")
        torch.testing.assert_close(p.f_mean, expected.f_mean)
        torch.testing.assert_close(p.covariances, expected.covariances)
        torch.testing.assert_close(posterior.covariance.times(factor).dense(), at.covariance.dense())


def test_tuned_noise_and_temperature_are_those_of_the_grid():
    line = Linear(outputs=2)
    model = Model(line.net(), Gaussian(outputs=2), Normal(scale=1.0))
    start = {**model.parameters(), "likelihood:log_scale": torch.zeros(2, dtype=DOUBLE)}
    posterior = dubito.fit(model, Laplace("dense", check=False), (line.x, line.y), start=start)
    found = posterior.tuned([(line.x, line.y)], precisions=[1.0], temperatures=[0.5, 1.0], noises=[0.5, 1.0, 2.0])
    scores = {}
    for s in (0.5, 1.0, 2.0):
        for t in (0.5, 1.0):
            at = posterior.with_prior(noise=posterior.params["likelihood:log_scale"].exp() * s, temperature=t)
            scores[s, t] = float(at.predict(line.x).log_prob(line.y).sum())
    s, t = max(scores, key=lambda key: scores[key])
    assert found.temperature == t
    ratio = (found.params["likelihood:log_scale"] - posterior.params["likelihood:log_scale"]).exp()
    torch.testing.assert_close(ratio, torch.full_like(ratio, s))


def test_a_grid_that_is_none_is_refused():
    model, data = problem(Categorical())
    posterior = fitted(model, Laplace(), data)
    for wrong in ({"precisions": []}, {"precisions": [0.0]}, {"temperatures": [-1.0]}, {"noises": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="positive multipliers"):
            posterior.tuned([data], **wrong)


def test_what_says_nothing_of_some_weights_is_no_prior_of_all():
    model, data = problem(Categorical())
    with pytest.raises(ValueError, match="this posterior covers a subnetwork only"):
        fitted(model, STRUCTURES["subnetwork"], data).as_prior()
    x, y = numbers(20, 2), numbers(20, 1)
    walk = dubito.fit(Model(nn.Linear(2, 1).double(), Gaussian()), dubito.SWAG(epochs=6), (x, y))
    with pytest.raises(ValueError, match="includes a learned noise"):
        walk.as_prior()


def test_what_makes_no_sense_is_refused_in_words():
    model, data = problem(Categorical())
    posterior = fitted(model, Laplace(), data)
    for wrong, words in (
        (lambda: posterior.with_prior({"nonsense": 9.0}), "match none of the weights"),
        (lambda: posterior.with_prior(temperature=-1.0), "temperature must be positive"),
        (lambda: posterior.log_evidence(noise=0.1), "the noise is not learned"),
        (lambda: posterior.predict(data[0], "sampled", link="xyz"), "link must be one of"),
        (lambda: posterior.tuned([]), "there is no held-out data"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


@pytest.mark.filterwarnings("ignore:the held-out data like")
def test_tuning_leaves_the_global_generator_alone():
    from torch.utils.data import DataLoader, TensorDataset

    model, data = problem(Categorical())
    posterior, loader = fitted(model, Laplace(), data), DataLoader(TensorDataset(*data), batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    found = posterior.tuned(loader)
    assert torch.equal(before, torch.get_rng_state())
    assert found.prior_precision == posterior.tuned(data).prior_precision


def test_no_inputs_give_no_outputs():
    model, (x, y) = problem(Categorical())
    p = fitted(model, Laplace(), (x, y)).predict(x[:0])
    assert p.mean.shape == (0, p.means.shape[-1])


def test_draws_of_many_weights_come_in_groups_that_fit_the_memory(monkeypatch):
    """All inputs see the same functions, and no more weights are drawn at a time than a portion has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 1))
    model = Model(net, Gaussian(scale=0.1))
    mean = model.parameters()
    posterior = Posterior.diagonal(model, mean, {name: torch.full_like(leaf, 0.01) for name, leaf in mean.items()})
    held, sample = [], type(posterior.covariance).sample
    monkeypatch.setattr("dubito.tensors.covariances.covariance.DRAWN", 5 * 181)

    class Watched(type(posterior.covariance)):
        def sample(self, n, generator=None):
            held.append(n)
            return sample(self, n, generator)

    watched = replace(posterior, covariance=Watched(**vars(posterior.covariance)))
    x, small = torch.randn(5, 4), 3 * 4 * 181 * 10 / 2**30  # ten draws of 181 weights
    p = watched.predict(x, "sampled", draws=25, memory=small)
    assert held == [5] * 5, "in portions of five, so that any memory gives the same weights"
    assert p.means.shape == (25, 5, 1)
    assert torch.allclose(watched.predict(x[:2], "sampled", draws=25, memory=small).means, p.means[:, :2], atol=1e-6)
    assert torch.allclose(p.f_var, posterior.predict(x, "linearized").f_var, rtol=0.9)
