"""Samplers that see all data, on posteriors that are known: exact moments, known biases, and what they must report of themselves.

Two kinds of proof. Chains from anywhere, after their burn-in, have the exact moments within the error that their effective sample
size allows. And chains that start at exact draws are still exact draws after a few transitions of any step size, without tuning: there
each chain is a draw of its own, and the errors are those of independent draws.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dubito
from dubito import HMC, MALA, MAMS, MCLMC, NUTS, ULA, Metropolis
from dubito.diagnostics import ess_mean
from dubito.model import Target
from inference.methods.regression import MILD, SIGMAS, STIFF, Problem, assert_moments, by_chain, moments, several


def test_the_problems_are_as_hard_as_they_say():
    assert torch.linalg.cond(MILD.covariance) < 10
    assert 5e3 < torch.linalg.cond(STIFF.covariance) < 2e4
    correlations = STIFF.covariance / STIFF.covariance.diag().outer(STIFF.covariance.diag()).sqrt()
    assert float((correlations - torch.eye(4)).abs().max()) > 0.3


# ---- moments

CHAINS: dict[str, tuple[Problem, Any]] = {
    "metropolis": (MILD, Metropolis(chains=128, draws=60, burn_in=40, thin=5)),
    "mala": (MILD, MALA(chains=128, draws=40, burn_in=40, thin=3)),
    "hmc": (STIFF, HMC(units="posterior", chains=128, draws=20, burn_in=80, max_steps=30)),
    "nuts": (STIFF, NUTS(units="posterior", chains=128, draws=12, burn_in=60, max_depth=5)),
    "mams": (STIFF, MAMS(units="posterior", chains=128, draws=25, burn_in=80, max_steps=30)),
}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_from_anywhere_have_the_exact_moments(name, temperature):
    known, method = CHAINS[name]
    found = dubito.fit(known.model, method, (known.x, known.y), temperature=temperature, batch_size=8)
    assert_moments(by_chain(found), known.mean, temperature * known.covariance)
    assert found.sampler["method"] == type(method).__name__
    assert found.sampler["adjusted"] is True
    aimed = pytest.approx(method.target_acceptance, abs=0.18)
    assert float(found.trace["acceptance"].mean()) == aimed, "tuned to what was aimed at"
    assert float(found.trace["divergent"].sum()) == 0
    # the trace holds the two parts of the log density at every draw, not tempered
    params = {name: leaf[7] for name, leaf in found.params.items()}
    joint = Target(known.model, 20).log_joint(params, [(known.x, known.y)])
    assert float(found.trace["log_likelihood"][7] + found.trace["log_prior"][7]) == pytest.approx(float(joint), rel=1e-9)


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_ula_finds_a_step_at_which_its_bias_is_small(temperature):
    """From weights initialised anew; at the step of 1e-3 that it had, it would hardly have moved."""
    known, method = MILD, ULA(chains=256, draws=12, burn_in=40, thin=5)
    found = dubito.fit(known.model, method, (known.x, known.y), temperature=temperature)
    away = (by_chain(found) - known.mean) @ torch.linalg.inv(torch.linalg.cholesky(temperature * known.covariance)).mT
    assert float(away.mean((0, 1)).abs().max()) < 0.05
    ratio = away.square().mean((0, 1))
    assert float(ratio.min()) > 0.95, "too wide rather than too narrow"
    assert float(ratio.max()) < 1.3
    assert float(found.trace["acceptance"].mean()) == pytest.approx(0.95, abs=0.04)
    assert found.sampler["adjusted"] is False
    later = found.trace["step_size"].view(256, -1)
    assert (later == later[:, :1]).all(), "it stays after the burn-in"


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_mclmc_is_right_up_to_its_bias(temperature):
    """Its step is such that the bias is a few percent of a standard deviation at most, which the tolerance leaves room for."""
    method = MCLMC(units="posterior", chains=64, draws=60, burn_in=60, thin=10, path_length=2.0)
    found = dubito.fit(STIFF.model, method, (STIFF.x, STIFF.y), temperature=temperature, batch_size=8)
    errors, spread = moments(by_chain(found), STIFF.mean, temperature * STIFF.covariance)
    assert float(ess_mean(errors).min()) > 500
    assert float((errors.mean((0, 1)) / spread).abs().max()) < 0.05 + SIGMAS / math.sqrt(float(ess_mean(errors).min()))
    assert not found.sampler["adjusted"]


# Steps that reject a good deal: what an accept step must correct is large.
LEAVING: dict[str, Any] = {
    "metropolis": Metropolis(0.8),
    "mala": MALA(0.6),
    "hmc": HMC(0.62, path_length=1.6, jitter=0.2),
    "nuts": NUTS(0.65),
    "mams": MAMS(1.1, path_length=2.0),
}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", LEAVING)
def test_the_posterior_is_left_as_it_is_at_any_step_size(name, temperature):
    n, method = 8000, several(LEAVING[name], 8000, 3)
    start = MILD.draws(n, temperature)
    found = dubito.fit(MILD.model, method, (MILD.x, MILD.y), temperature=temperature, start=start, seed=2)
    draws, first = by_chain(found), start["weight"].squeeze(1)
    assert_moments(draws, MILD.mean, temperature * MILD.covariance)
    assert 0.2 < float(found.trace["acceptance"].mean()) < 0.9, "the accept step has something to do"
    moved = ((draws[:, 0] - first).square().mean(0) / (2 * temperature * MILD.covariance.diag())).min()
    assert float(moved) > 0.2, "and the chains move"


def known_bias(step: float) -> Tensor:
    """The covariance of chains of leapfrog steps that nothing corrects: A^-1 (I - h^2 s A s / 4)^-1, for the prior's scale s."""
    precision, s = torch.linalg.inv(MILD.covariance), MILD.model.prior.scale_of("weight")
    return torch.linalg.inv(precision @ (torch.eye(3, dtype=torch.float64) - (step * s) ** 2 / 4 * precision))


@pytest.mark.parametrize("temperature", [0.3, 3.0])
@pytest.mark.parametrize("method", [ULA(0.6), HMC(0.6, path_length=1.0, jitter=0.0, adjusted=False)], ids=["ula", "hmc"])
def test_without_an_accept_step_the_bias_is_the_known_one(method, temperature):
    n = 8000
    method = replace(method, chains=n, draws=1, burn_in=0, thin=40, **({} if isinstance(method, ULA) else {"tune": False}))
    found = dubito.fit(MILD.model, method, (MILD.x, MILD.y), temperature=temperature, start=MILD.draws(n, temperature))
    assert_moments(by_chain(found), MILD.mean, temperature * known_bias(0.6))
    with pytest.raises(AssertionError, match="off by"):
        assert_moments(by_chain(found), MILD.mean, temperature * MILD.covariance)
    assert found.sampler["adjusted"] is False
    assert found.trace.get("accepted", torch.ones(1)).min() == pytest.approx(1)


def pulled(position: Tensor, step: Tensor, generator: torch.Generator, *, right: bool = True) -> tuple[Tensor, Tensor]:
    """A proposal that is drawn to a place: q(new | old) is not q(old | new)."""
    place, keep, spread = 0.5, 0.6, 0.4
    noise = torch.empty_like(position).normal_(generator=generator)
    new = place + keep * (position - place) + spread * noise
    there = (new - place - keep * (position - place)).square().sum(1)
    back = (position - place - keep * (new - place)).square().sum(1)
    ratio = (there - back) / (2 * spread**2)
    return new, ratio if right else torch.zeros_like(ratio)


@pytest.mark.parametrize("right", [True, False])
def test_an_asymmetric_proposal_needs_its_hastings_ratio(right):
    def proposal(position: Tensor, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return pulled(position, step, generator, right=right)

    method = several(Metropolis(proposal=proposal), 8000, 20)
    found = dubito.fit(MILD.model, method, (MILD.x, MILD.y), start=MILD.draws(8000))
    if right:
        assert_moments(by_chain(found), MILD.mean, MILD.covariance)
    else:
        with pytest.raises(AssertionError, match="off by"):
            assert_moments(by_chain(found), MILD.mean, MILD.covariance)


@pytest.mark.parametrize("chains", [1, 2, 4])
@pytest.mark.parametrize(
    "proposal",
    [lambda p, s, g: p, lambda p, s, g: (p, 0.0), lambda p, s, g: (p, p), lambda p, s, g: (p[:, :1], p[:, 0])],
    ids=["no ratio", "a number", "positions twice", "one weight"],
)
def test_a_proposal_that_returns_something_else_is_refused_in_words(proposal, chains):
    """With two chains, positions alone would be taken apart into a position and a ratio."""
    method = Metropolis(proposal=proposal, chains=chains, draws=1, burn_in=0)
    with pytest.raises(ValueError, match=rf"new positions \({chains}, 3\) and the logarithm of the Hastings ratio \({chains},\)"):
        dubito.fit(MILD.model, method, (MILD.x, MILD.y))
