"""Diagnostics against ArviZ, against what is known, and in the cases that have no answer."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import dubito
from dubito import Categorical, Gaussian, diagnostics, metrics
from dubito.diagnostics import (
    agreement,
    bfmi,
    convergence,
    energy_error_per_dimension,
    ess_bulk,
    ess_mean,
    ess_tail,
    log_scores,
    mcse_mean,
    nested_rhat,
    rhat,
    rhat_classic,
    running_log_score,
    total_variation,
)
from dubito.posteriors import Samples
from dubito.posteriors.diagnostics.chains import NUMBERS
from dubito.posteriors.predictive import LatentMixture

FUNCTIONS = [rhat, rhat_classic, ess_bulk, ess_tail, ess_mean, mcse_mean]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autoregressive(chains: int, n: int, quantities: int, rho: float, seed: int = 0) -> torch.Tensor:
    """Chains with the correlation rho^t at lag t, stationary from the first draw on."""
    x = normal(chains, n, quantities, seed=seed)
    for t in range(1, n):
        x[:, t] = rho * x[:, t - 1] + math.sqrt(1 - rho**2) * x[:, t]
    return x


def repeated(x: torch.Tensor, share: float) -> torch.Tensor:
    """As if so many proposals were rejected."""
    stay = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(1)) < share
    for t in range(1, x.shape[1]):
        x[stay[:, t], t] = x[stay[:, t], t - 1]
    return x


def shifted(x: torch.Tensor) -> torch.Tensor:
    x[0] += 1
    return x


KINDS = {
    "independent": lambda m, n: normal(m, n, 5),
    "sticky": lambda m, n: autoregressive(m, n, 5, 0.9),
    "alternating": lambda m, n: autoregressive(m, n, 5, -0.5),
    "shifted": lambda m, n: shifted(normal(m, n, 5)),
    "cauchy": lambda m, n: normal(m, n, 5) / normal(m, n, 5, seed=1),
    "rejected": lambda m, n: repeated(normal(m, n, 5), 0.4),
}


# Against ArviZ


def oracle(name: str, draws: np.ndarray) -> float:
    """ArviZ's answer for one quantity, [chains, n]."""
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    return float(
        {
            "rhat": lambda: array_stats.rhat(draws, **axes),
            "rhat_classic": lambda: array_stats.rhat(draws, method="identity", **axes),
            "ess_bulk": lambda: array_stats.ess(draws, method="bulk", **axes),
            "ess_tail": lambda: array_stats.ess(draws, method="tail", prob=(0.05, 0.95), **axes),
            "ess_mean": lambda: array_stats.ess(draws, method="mean", **axes),
            "mcse_mean": lambda: array_stats.mcse(draws, method="mean", **axes),
        }[name]()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chains", "n"), [(2, 40), (4, 101), (4, 250), (7, 9)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_against_arviz(function, chains, n, kind):
    draws = KINDS[kind](chains, n)
    expected = [oracle(function.__name__, draws[..., k].numpy()) for k in range(5)]
    np.testing.assert_allclose(function(draws).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("function", [ess_bulk, ess_tail, ess_mean, mcse_mean], ids=lambda f: f.__name__)
def test_one_chain_against_arviz(function):
    draws = autoregressive(1, 300, 1, 0.5)
    assert float(function(draws)) == pytest.approx(oracle(function.__name__, draws[..., 0].numpy()), rel=1e-12)


def test_energies_against_arviz():
    from arviz_stats.base import array_stats

    energy = autoregressive(4, 200, 1, 0.8).squeeze(-1)
    np.testing.assert_allclose(bfmi(energy).numpy(), array_stats.bfmi(energy.numpy()), rtol=1e-12)


# What is known


def test_independent_draws():
    draws = normal(4, 1000, 200)
    assert float((rhat(draws) - 1).abs().max()) < 0.01
    for function in (ess_bulk, ess_mean):
        assert float(function(draws).mean()) == pytest.approx(4000, rel=0.03)
    assert float(ess_tail(draws).mean()) == pytest.approx(4000, rel=0.07)  # the smaller of two
    assert float(mcse_mean(draws).mean()) == pytest.approx(1 / math.sqrt(4000), rel=0.03)


@pytest.mark.parametrize("rho", [0.3, 0.7, 0.9, -0.3])
def test_autoregressive_chains_have_the_known_number_of_effective_draws(rho):
    chains, n = 4, 4000
    draws = autoregressive(chains, n, 100, rho)
    known = chains * n * (1 - rho) / (1 + rho)
    assert float(ess_mean(draws).mean()) == pytest.approx(known, rel=0.06)
    assert float(ess_bulk(draws).mean()) == pytest.approx(known, rel=0.06)
    spread = draws.mean((0, 1)).std()  # of the mean, over a hundred repetitions
    assert float(mcse_mean(draws).mean()) == pytest.approx(float(spread), rel=0.2)


def test_chains_that_are_elsewhere_are_caught():
    """By location, by scale, by drift; the classic R-hat sees only the first."""
    elsewhere, wider, drifting = normal(4, 500), normal(4, 500), normal(4, 500)
    elsewhere[0] += 1
    wider[0] *= 3
    drifting += torch.linspace(0, 3, 500)
    for draws in (elsewhere, wider, drifting):
        assert float(rhat(draws)) > 1.05
    assert float(rhat_classic(elsewhere)) > 1.05
    assert float(rhat_classic(wider)) < 1.01
    assert float(rhat_classic(drifting)) < 1.01
    assert float(ess_bulk(elsewhere)) < 100


def test_heavy_tails_blind_the_classic_rhat():
    """Cauchy chains of which one is shifted (Vehtari et al. 2021, section 4): a variance that is infinite hides it."""
    caught, missed = [], []
    for seed in range(20):
        draws = normal(4, 1000, seed=seed) / normal(4, 1000, seed=100 + seed)
        draws[0] += 2.0
        caught.append(float(rhat(draws)))
        missed.append(float(rhat_classic(draws)))
    assert min(caught) > 1.04
    assert max(missed) < 1.005


def test_nested_rhat_by_hand():
    draws = normal(6, 5, 1)
    means = draws.squeeze(-1).mean(1)
    within = draws.squeeze(-1).var(1)
    groups = [means[:3], means[3:]]
    between = torch.stack([g.mean() for g in groups]).var()
    inside = torch.stack([groups[0].var() + within[:3].mean(), groups[1].var() + within[3:].mean()]).mean()
    expected = (1 + between / inside).sqrt()
    torch.testing.assert_close(nested_rhat(draws, 2)[0], expected)
    shuffled = torch.tensor([0, 3, 1, 4, 2, 5])
    torch.testing.assert_close(nested_rhat(draws[shuffled], torch.tensor([7, 9, 7, 9, 7, 9]))[0], expected)


def test_nested_rhat_needs_no_long_chains():
    """512 chains of one draw: it sees whether they have forgotten where they began; R-hat has no answer."""
    start = normal(8).repeat_interleave(64).view(512, 1, 1)
    forgot, remembers = normal(512, 1, 1), start + 0.3 * normal(512, 1, 1)
    assert float(nested_rhat(forgot, 8)) < 1.03
    assert float(nested_rhat(remembers, 8)) > 1.5
    assert rhat(forgot).isnan().all()


@pytest.mark.parametrize(
    ("shape", "superchains", "message"),
    [
        ((6, 3), 4, "4 superchains for 6 chains"),
        ((6, 3), 1, "at least two"),
        ((4, 1), 4, "one chain with one draw have no variance"),
        ((4, 3), torch.tensor([0, 0, 0, 1]), r"same number of chains each; got \[3, 1\]"),
        ((4, 3), torch.tensor([0, 1]), "superchain of each of 4 chains"),
    ],
)
def test_superchains_that_are_none(shape, superchains, message):
    with pytest.raises(ValueError, match=message):
        nested_rhat(normal(*shape), superchains)


def test_energy_error():
    errors = torch.tensor([[1.0, 3.0, 1.0, 3.0], [0.0, math.nan, 0.0, 0.0]])
    assert energy_error_per_dimension(errors, 10).tolist() == pytest.approx([4 / 30, math.inf])
    assert energy_error_per_dimension(errors[:, :1], 10).isnan().all()


# Cases without an answer


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_no_answer(function):
    draws = normal(4, 50, 5)
    draws[2, 3, 0], draws[0, 0, 1], draws[..., 2] = math.nan, math.inf, 0.1
    found = function(draws)
    assert found.isnan().tolist() == [True, True, True, False, False]
    torch.testing.assert_close(found[3:], function(draws[..., 3:]))  # the others do not suffer
    assert function(normal(4, 1, 2)).isnan().tolist() == [True, True]
    assert function(normal(4, 50, 0, 3)).shape == (0, 3)


def test_too_few_draws():
    for function in (rhat, ess_bulk, ess_tail, ess_mean, mcse_mean):
        assert function(normal(4, 3)).isnan()
        assert not function(normal(4, 4)).isnan()
    assert rhat_classic(normal(1, 50)).isnan()
    assert not rhat(normal(1, 50)).isnan()  # of its two halves


def test_chains_that_stand_still_apart_are_infinitely_bad():
    draws = torch.arange(4.0).view(4, 1).expand(4, 20) * 0.1 + 0.3
    assert rhat(draws) == math.inf
    assert rhat_classic(draws) == math.inf
    draws = draws.clone()
    draws[0] = normal(20)  # one of them moves
    assert 1.5 < float(rhat(draws)) < math.inf


def test_two_values():
    """Of a coin the folded values are constant, and one of the tails is."""
    coin = (normal(4, 200, 3) > 0).double()
    assert float(rhat(coin).max()) < 1.05
    assert (ess_tail(coin) > 400).all()


def test_shapes_and_kinds():
    draws = normal(3, 20, 2, 4).float()
    for function in FUNCTIONS:
        assert function(draws).shape == (2, 4)
        assert function(draws).dtype == torch.float64
        torch.testing.assert_close(function(draws), function(draws.double()), rtol=0, atol=0)
        torch.testing.assert_close(function(draws)[1, 2], function(draws[..., 1, 2]), rtol=1e-14, atol=0)
    assert rhat(draws.bfloat16()).shape == (2, 4)
    assert rhat((draws > 0).int()).shape == (2, 4)
    with pytest.raises(ValueError, match=r"draws must be \[chains, n, ...\]"):
        rhat(normal(20))
    with pytest.raises(ValueError, match="real numbers"):
        rhat(draws.to(torch.complex64))


def test_pieces_make_no_difference(monkeypatch):
    draws = repeated(normal(4, 30, 50), 0.3)
    whole = convergence(draws)
    monkeypatch.setitem(NUMBERS, "cpu", 7 * 120)
    for one, other in zip(whole, convergence(draws), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_together_as_one_by_one():
    draws = autoregressive(4, 51, 20, 0.5)
    for found, function in zip(convergence(draws), (rhat, ess_bulk, ess_tail), strict=True):
        torch.testing.assert_close(found, function(draws), rtol=0, atol=0)


def test_draws_are_left_as_they_are():
    draws = normal(4, 50, 3)
    before = draws.clone()
    convergence(draws)
    assert torch.equal(draws, before)


@pytest.mark.gpu
def test_on_a_gpu():
    draws = repeated(autoregressive(4, 101, 50, 0.5), 0.3)
    for found, same in zip(convergence(draws.cuda()), convergence(draws), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), same, rtol=1e-9, atol=0)


# Predictives


def mixture(draws: int = 12, inputs: int = 5) -> tuple[LatentMixture, torch.Tensor]:
    return LatentMixture(Categorical(), normal(draws, inputs, 3).float()), torch.tensor([0, 1, 2, 0, 1])[:inputs]


def test_agreement_and_total_variation():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]), torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.1, 0.3]])
    assert float(agreement(p, q)) == 0.5
    assert float(total_variation(p, q)) == pytest.approx((0.3 + 0.5) / 2)
    predictive, _ = mixture()
    assert float(agreement(predictive, predictive.mean)) == 1
    assert float(total_variation(predictive, predictive)) == 0
    labels = LatentMixture(dubito.Bernoulli(), torch.tensor([[[20.0]], [[-20.0]]]))
    sure = LatentMixture(dubito.Bernoulli(), torch.tensor([[[20.0]]]))
    assert float(total_variation(labels, sure)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        (torch.ones(2, 3) / 3, torch.ones(3, 3) / 3, "the same inputs"),
        (torch.randn(2, 3), torch.ones(2, 3) / 3, "are these logits"),
        (torch.ones(2) / 2, torch.ones(2) / 2, r"\[B, C\]"),
        (LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1)), torch.ones(2, 1), "predicts numbers"),
    ],
)
def test_probabilities_that_are_none(p, q, message):
    with pytest.raises(ValueError, match=message):
        agreement(p, q)


def test_running_log_score():
    p, y = mixture()
    found = running_log_score(p, y)
    first = dataclasses.replace(p, means=p.means[:4])
    assert float(found[3]) == pytest.approx(float(first.log_prob(y).mean()), rel=1e-5)
    assert float(found[-1]) == pytest.approx(-float(metrics.nll(p, y)), rel=1e-5)
    chains = running_log_score(p, y, chains=3)  # of every chain the first two, say
    two = dataclasses.replace(p, means=p.means[[0, 1, 4, 5, 8, 9]])
    assert len(chains) == 4
    assert float(chains[1]) == pytest.approx(float(two.log_prob(y).mean()), rel=1e-5)
    with pytest.raises(ValueError, match="5 chains for 12 draws"):
        running_log_score(p, y, chains=5)


def test_log_scores_know_the_noise_of_each_draw():
    p = LatentMixture(Gaussian(), torch.zeros(2, 3, 1), params={"likelihood:log_scale": torch.tensor([[0.0], [1.0]])})
    y = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.stack([torch.distributions.Normal(0.0, math.exp(s)).log_prob(y) for s in (0.0, 1.0)])
    torch.testing.assert_close(log_scores(p, y), expected)
    with pytest.raises(ValueError, match='how="sampled"'):
        log_scores(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 3, 1), torch.ones(1, 3, 1)), y)


# The summary


def chains_of(
    draws: int = 300, chains: int = 4, *, sign: bool = False, away: float = 0.0, trace: dict | None = None, **sampler
) -> Samples:
    """Independent draws of a little network's weights; `sign` flips the hidden unit of some chains, which changes no prediction."""
    network = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh(), torch.nn.Linear(1, 1, bias=False))
    model = dubito.Model(network, Gaussian(scale=0.1))
    params = {
        name: 2 + 0.3 * normal(chains * draws, *leaf.shape, seed=i) for i, (name, leaf) in enumerate(model.parameters().items())
    }
    params = {name: leaf.float() for name, leaf in params.items()}
    flip = torch.ones(chains).index_fill(0, torch.arange(1, chains, 2), -1.0) if sign else torch.ones(chains)
    params = {name: leaf * flip.repeat_interleave(draws).view(-1, 1, 1) for name, leaf in params.items()}
    params["2.weight"][:draws] += away
    noted = {"energy": normal(chains * draws, seed=9), **(trace or {})}
    made = {"method": "HMC", "adjusted": True, **sampler}
    return Samples(model, params, model.buffers(), chains=chains, trace=noted, sampler=made)


X = torch.linspace(-1, 1, 20).unsqueeze(1)


def test_sound_chains_are_trusted():
    constant = torch.ones(1200)
    trace = {
        "acceptance": 0.8 * constant,
        "divergent": 0 * constant,
        "step_size": 0.1 * constant,
        "gradients": 10 * constant,
        "log_likelihood": normal(1200, seed=5),
        "log_prior": normal(1200, seed=6),
        "energy_error": normal(1200, seed=7),
    }
    found = chains_of(trace=trace).summary(X)
    assert found.trusted is True
    assert found.verdict.startswith("The chains can be trusted: the R-hat of ")
    assert found.remarks == ()
    assert (found.chains, found.draws, found.divergences, found.gradients) == (4, 300, 0, 12000)
    assert found.acceptance == pytest.approx((0.8,) * 4)
    assert found.per_gradient == pytest.approx(found.predictions.quantile("ess_bulk", 0.5) / 12)
    assert len(found.predictions) == 20
    assert len(found.weights) == 2
    text = str(found)
    for word in ("4 × 300", "HMC, with an accept step", "R-hat of 20 predictions", "BFMI", "0.8", "12,000", "energy error"):
        assert word in text
    assert found.log_joint is not None


def test_weights_may_differ_where_predictions_agree():
    posterior = chains_of(sign=True)
    found = posterior.summary(X)
    assert found.trusted is True
    assert found.weights.worst > 1.5  # ranks of two groups that lie apart
    assert found.predictions.worst < 1.02
    assert "hidden units may change places and signs" in " ".join(found.remarks)
    blind = posterior.summary()
    assert blind.trusted is None
    assert "cannot be told yet" in blind.verdict
    assert "giving inputs x" in blind.verdict


def test_chains_that_predict_differently_are_not_trusted():
    found = chains_of(away=1.0).summary(X)
    assert found.trusted is False
    assert found.verdict.startswith("Do not trust these draws: the chains disagree")
    assert "raise burn_in and draws" in found.verdict


def test_few_draws():
    found = chains_of(40).summary(X)
    assert found.trusted is None
    assert "few draws" in found.verdict
    assert "raise draws from 40 to about" in found.verdict
    assert chains_of(3).summary(X).verdict.startswith("Do not trust these draws: 3 draws of a chain cannot be judged")


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"divergent": torch.ones(1200)}, "1200 divergences in 1200 draws"),
        (
            {"acceptance": torch.cat([torch.full((300,), 0.01), torch.full((900,), 0.8)])},
            "chain 1 accepts 1.0 % of its proposals",
        ),
        ({"acceptance": torch.full((1200,), 0.02)}, "4 chains accept as little as 2.0 %"),
    ],
)
def test_sampling_that_went_wrong(trace, message):
    found = chains_of(trace=trace).summary(X)
    assert found.trusted is False
    assert message in found.verdict
    assert "lower step_size" in found.verdict


def test_remarks():
    once = torch.zeros(1200)
    once[7] = 1
    slow = normal(4, 300, seed=3).cumsum(1).flatten()
    said = " ".join(chains_of(trace={"divergent": once, "energy": slow}, adjusted=False).summary(X).remarks)
    assert "No accept step was used" in said
    assert "1 divergence:" in said
    assert "The BFMI is 0.0" in said
    alone = chains_of(1200, 1).summary(X)
    assert "One chain cannot show that it is stuck" in alone.remarks[0]
    assert alone.verdict.startswith("The chain looks sound")


def test_weights_on_their_way_are_no_draws():
    model = dubito.Model(torch.nn.Linear(1, 1), Gaussian(scale=0.5))
    for method in (dubito.HMC(draws=5, burn_in=20, chains=2), dubito.SGLD(draws=5, burn_in=20)):
        found = dubito.fit(model, method, (X, X), callbacks=[lambda event: event.step == 3]).summary(X)
        assert found.trusted is False
        assert found.verdict.startswith("Do not trust these draws: the run was stopped in its burn-in")


def test_advice_is_in_the_words_of_the_sampler():
    model = dubito.Model(torch.nn.Linear(1, 1), Gaussian(scale=0.5))
    found = dubito.fit(model, dubito.SGLD(draws=6, burn_in=2), (X, X)).summary(X)
    assert "Halve learning_rate and compare" in " ".join(found.remarks)
    assert "step_size" not in found.verdict + " ".join(found.remarks)


def test_draws_out_of_the_support_of_the_prior_are_not_trusted():
    trace = {"log_likelihood": torch.zeros(1200), "log_prior": torch.randn(1200)}
    trace["log_prior"][7] = -math.inf
    found = chains_of(trace=trace).summary(X)
    assert found.trusted is False
    assert "some draws have no density" in found.verdict


def test_weights_that_break_or_stand_still():
    posterior = chains_of()
    posterior.params["0.weight"][5] = math.nan
    found = posterior.summary()
    assert found.weights.broken == 1
    assert "1 quantity became infinite or NaN" in found.verdict
    posterior.params["0.weight"][:] = 1.0
    assert "1 weight of 2 never changed" in " ".join(posterior.summary(X).remarks)
    posterior.params["2.weight"][:] = 1.0
    assert "none of the weights ever changes" in posterior.summary().verdict


def test_draws_without_chains_have_no_summary():
    model = dubito.Model(torch.nn.Linear(1, 1), Gaussian(scale=0.1))
    members = Samples(model, {name: torch.stack([leaf] * 3) for name, leaf in model.parameters().items()}, model.buffers())
    with pytest.raises(ValueError, match="summary is for chains of a sampler; these 3 draws were made one by one"):
        members.summary()


def test_class_probabilities_are_what_is_compared():
    """A constant added to all logits changes nothing."""
    model = dubito.Model(torch.nn.Linear(1, 2), Categorical())
    params = {"weight": 0.1 * normal(1600, 2, 1).float(), "bias": normal(1600, 2, seed=2).float()}
    params["bias"] += 10 * torch.arange(4.0).repeat_interleave(400).unsqueeze(1)
    found = Samples(model, params, model.buffers(), chains=4).summary(X)
    assert found.weights.worst > 2.5
    assert found.trusted is True
    assert found.method == "unknown sampler"


def test_several_tasks_are_compared_together():
    likelihood = dubito.MultiTask({"a": (Gaussian(scale=1.0), 1), "b": (Categorical(), 2)})
    model = dubito.Model(torch.nn.Linear(1, 3), likelihood)
    params = {name: normal(1600, *leaf.shape, seed=i).float() for i, (name, leaf) in enumerate(model.parameters().items())}
    found = Samples(model, params, model.buffers(), chains=4).summary(X)
    assert found.predictions is not None
    assert len(found.predictions) == 60


def test_a_real_sampler():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(30, 1, generator=g)
    model = dubito.Model(torch.nn.Linear(2, 1), Gaussian(scale=0.5), dubito.priors.Normal())
    posterior = dubito.fit(model, dubito.HMC(draws=500, burn_in=50, path_length=0.15), (x, y))
    assert isinstance(posterior, Samples)
    found = posterior.summary(x)
    assert found.trusted is True
    assert found.divergences == 0
    assert found.gradients
    assert min(found.bfmi) > 0.5


def test_quantiles_are_rounded_for_the_worse():
    spread = diagnostics.Spread(
        torch.tensor([1.0, 1.2, math.nan]), torch.tensor([10.0, 20.0, math.nan]), torch.tensor([30.0, 5.0, 7.0])
    )
    assert spread.quantile("rhat", 0.5) == pytest.approx(1.2)
    assert spread.quantile("ess_bulk", 0.5) == 10
    assert spread.fewest == 5
    assert spread.agree == 0.5


# ArviZ


def test_to_arviz():
    pytest.importorskip("arviz_base", reason="ArviZ is an extra: pip install dubito[arviz]")
    trace = {name: torch.ones(1200) for name in ("acceptance", "divergent", "log_likelihood", "log_prior")}
    posterior = chains_of(trace=trace)
    tree = posterior.to_arviz(X)
    assert tree["posterior"]["2.weight"].shape == (4, 300, 1, 1)
    assert tree["posterior"]["f"].shape == (4, 300, 20, 1)
    np.testing.assert_array_equal(tree["posterior"]["0.weight"].values[2, 7], posterior.params["0.weight"][607])
    assert set(tree["sample_stats"].data_vars) >= {"energy", "acceptance_rate", "diverging", "lp"}
    assert tree["sample_stats"]["diverging"].dtype == bool
    assert float(tree["sample_stats"]["lp"][0, 0]) == 2


def test_arviz_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"pip install dubito\[arviz\]"):
        chains_of().to_arviz()
