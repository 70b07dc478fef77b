"""What all chains promise: how they start, what they note of themselves, how they go on, and that what goes wrong is counted."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import HMC, MALA, MAMS, MAP, MCLMC, NUTS, ULA, Ensemble, Gaussian, Metropolis, Model, priors
from dubito.diagnostics import bfmi, ess_mean
from dubito.posteriors import Samples
from dubito.priors import Prior
from dubito.tensors import tree
from dubito.tensors.tree import Params
from inference.methods.regression import FIXED, MILD, SIGMAS, STIFF, by_chain, several, traced

# ---- what is noted


@pytest.mark.parametrize("name", FIXED)
def test_rejected_proposals_are_repeated_draws(name):
    """Exactly as often as is counted: acceptance is a probability, and "accepted" what became of it."""
    found = dubito.fit(MILD.model, replace(FIXED[name], chains=16, draws=40, burn_in=3), (MILD.x, MILD.y))
    changed = (by_chain(found).diff(dim=1) != 0).any(-1)
    if name in ("ula", "mclmc"):
        assert changed.all()
        return
    accepted = traced(found, "accepted")[:, 1:]
    assert torch.equal(changed.double(), accepted)
    assert 0 < float(accepted.mean()) < 1
    if name != "nuts":  # whose acceptance is a mean over a trajectory
        p = traced(found, "acceptance")[:, 1:]
        assert float((accepted - p).mean()) == pytest.approx(0, abs=SIGMAS * math.sqrt(float((p * (1 - p)).mean()) / p.numel()))


@pytest.mark.parametrize("name", FIXED)
def test_thinning_keeps_the_last_of_its_transitions_and_counts_them_all(name):
    every = dubito.fit(MILD.model, replace(FIXED[name], chains=5, draws=12, burn_in=0), (MILD.x, MILD.y))
    some = dubito.fit(MILD.model, replace(FIXED[name], chains=5, draws=4, burn_in=0, thin=3), (MILD.x, MILD.y))
    assert torch.equal(by_chain(every)[:, 2::3], by_chain(some))
    assert every.trace.keys() == some.trace.keys()
    for note in every.trace:
        single, thinned = traced(every, note).view(5, 4, 3), traced(some, note)
        if note in ("divergent", "gradients"):
            assert torch.equal(single.sum(2), thinned)
        elif note in ("acceptance", "accepted"):
            assert torch.allclose(single.mean(2), thinned)
        else:
            assert torch.equal(single[:, :, 2], thinned)


@pytest.mark.parametrize("name", ["mala", "hmc", "nuts"])
def test_step_sizes_are_each_chains_own_and_stay_after_the_burn_in(name):
    method = {"mala": MALA(thin=1), "hmc": HMC(jitter=0.0), "nuts": NUTS()}[name]
    found = dubito.fit(MILD.model, replace(method, chains=6, draws=12, burn_in=30), (MILD.x, MILD.y))
    steps = traced(found, "step_size")
    assert torch.equal(steps, steps[:, :1].expand(-1, 12)), "no tuning while draws are kept"
    assert len(steps[:, 0].unique()) == 6


def test_jitter_varies_the_path_of_hmc_by_its_share():
    method = HMC(0.01, path_length=1.0, jitter=0.2, tune=False, chains=2, draws=200, burn_in=0)
    steps = dubito.fit(MILD.model, method, (MILD.x, MILD.y)).trace["gradients"]
    assert 80 <= steps.min() < 85
    assert 115 < steps.max() <= 120
    assert steps.mean() == pytest.approx(100.5, abs=2)


@pytest.mark.parametrize("name", ["hmc", "nuts"])
def test_energies_are_those_of_the_hamiltonian_at_the_draw(name):
    """Its mean is P / 2 above the mean potential energy, at any temperature; and it is not lower than that at any draw."""
    n, temperature = 4000, 3.0
    method = several({"hmc": HMC(0.5, path_length=2.0), "nuts": NUTS(0.5)}[name], n, 2)
    start = MILD.draws(n, temperature)
    found = dubito.fit(MILD.model, method, (MILD.x, MILD.y), temperature=temperature, start=start)
    potential = -(found.trace["log_likelihood"] + found.trace["log_prior"]) / temperature
    moving = found.trace["energy"] - potential
    assert float(moving.min()) >= 0
    assert float(moving.mean()) == pytest.approx(1.5, abs=SIGMAS * math.sqrt(1.5 / n))


@pytest.mark.parametrize("name", ["hmc", "nuts"])
def test_what_gibbs_moves_draw_has_no_share_in_the_energy(name):
    """Of four weights and their four scales, the weights alone move: otherwise the BFMI would be that of noise nobody uses."""
    n, prior = 2000, priors.Hierarchical(priors.InverseGamma(3.0, 2.0), groups="weight")
    model = Model(nn.Linear(4, 1, bias=False).double(), Gaussian(scale=1.0), prior)
    generator = torch.Generator().manual_seed(0)
    drawn = [prior.sample(model.parameters(), generator) for _ in range(n)]  # the data say nothing
    method = several({"hmc": HMC(0.5, path_length=1.0), "nuts": NUTS(0.5)}[name], n, 1)
    found = dubito.fit(model, method, (torch.zeros(1, 4).double(), torch.zeros(1, 1).double()), start=tree.stack(drawn))
    moving = found.trace["energy"] + found.trace["log_likelihood"] + found.trace["log_prior"]
    assert float(moving.mean()) == pytest.approx(2.0, abs=SIGMAS * float(moving.std()) / math.sqrt(n))


@pytest.mark.parametrize(
    "method",
    [
        HMC(units="posterior", chains=32, draws=1, burn_in=80, max_steps=30),
        MCLMC(units="posterior", chains=8, draws=1, burn_in=80, thin=20),
    ],
    ids=["hmc", "mclmc"],
)
def test_units_of_length_become_the_posteriors_standard_deviations(method):
    """Also where a step holds many transitions: a window ends once, and not again in each of them."""
    states = []
    dubito.fit(STIFF.model, method, (STIFF.x, STIFF.y), temperature=3.0, callbacks=[lambda event: states.append(event.state)])
    ratio = states[-1].scale / (3.0 * STIFF.covariance.diag()).sqrt()
    assert float(ratio.log().abs().max()) < math.log(1.35)


# ---- what goes wrong is counted


@dataclass(frozen=True)
class Edge(Gaussian):
    """Beyond f = 1 the density is no number."""

    beyond: float = math.nan

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        inside = super().log_prob(f, y, params)
        return torch.where(f.squeeze(-1) > 1, torch.full_like(inside, self.beyond), inside)


@pytest.mark.parametrize("beyond", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FIXED)
def test_an_energy_that_is_not_finite_is_a_counted_divergence(name, beyond):
    """Neither a crash, nor a place to go to."""
    torch.manual_seed(0)
    model = Model(nn.Linear(2, 1, bias=False), Edge(scale=1.0, beyond=beyond))
    x, y = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 1)
    found = dubito.fit(model, replace(FIXED[name], chains=16, draws=30, burn_in=0), (x, y))
    weights = by_chain(found)
    assert weights.isfinite().all()
    assert (weights[..., 0] <= 1).all()
    assert found.trace["log_likelihood"].isfinite().all()
    diverged = found.trace["divergent"] > 0
    assert diverged.any()
    if "acceptance" in found.trace and name != "nuts":  # whose acceptance is a mean over a trajectory
        assert (found.trace["acceptance"][diverged] == 0).all()
    assert (weights.diff(dim=1) != 0).any(-1).any(1).all(), "chains go on"


def test_a_particle_that_runs_off_turns_round():
    """Under MCLMC, whose direction is kept from step to step: otherwise it would run off again."""
    torch.manual_seed(0)
    model, seen = Model(nn.Linear(2, 1, bias=False), Edge(scale=1.0)), []
    method = MCLMC(0.2, path_length=1e9, tune=False, chains=16, draws=30, burn_in=0, thin=1)
    data = (torch.tensor([[1.0, 0.0]]), torch.zeros(1, 1))
    dubito.fit(model, method, data, callbacks=[lambda event: seen.append((event.state.position, event.state.velocity))])
    positions, velocities = (torch.stack(leaves) for leaves in zip(*seen, strict=True))
    stayed = (positions[1:] == positions[:-1]).all(-1)
    assert stayed.any()
    assert torch.allclose(velocities[1:][stayed], -velocities[:-1][stayed], atol=1e-3)


def test_a_proposal_out_of_the_support_of_the_prior_is_no_divergence():
    """It is rejected, as it should be, and no smaller step is called for."""
    model = Model(nn.Linear(1, 1, bias=False), Gaussian(scale=1.0), priors.LogUniform(bounds=(0.5, 2.0)))
    method = Metropolis(1.0, tune=False, draws=50, burn_in=0, thin=2)
    found = dubito.fit(model, method, (torch.ones(1, 1), torch.ones(1, 1)), start={"weight": torch.ones(1, 1)})
    assert found.trace["acceptance"].min() == 0
    assert found.trace["divergent"].sum() == 0
    assert ((found.params["weight"].abs() > 0.5) & (found.params["weight"].abs() < 2.0)).all()


@pytest.mark.parametrize("name", FIXED)
def test_a_start_without_a_density_is_refused_in_words(name):
    model = Model(nn.Linear(2, 1, bias=False), Edge(scale=1.0))
    start = {"weight": torch.tensor([[2.0, 0.0]])}
    with pytest.raises(ValueError, match="not finite where 3 of 3 chains start"):
        dubito.fit(
            model,
            replace(FIXED[name], chains=3, draws=1, burn_in=0),
            (torch.tensor([[1.0, 0.0]]), torch.zeros(1, 1)),
            start=start,
        )


class Funnel(Prior):
    """Neal (2003): v ~ N(0, 3^2), and nine x ~ N(0, e^v)."""

    def log_prob(self, params: Params) -> Tensor:
        v, x = params["v"].sum(), params["x"]
        return -0.5 * v.square() / 9 - 0.5 * (x.square().sum() * (-v).exp() + 9 * v)

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        v = 3 * torch.randn(1, generator=generator, dtype=like["v"].dtype)
        return {"v": v, "x": (v / 2).exp() * torch.randn(9, generator=generator, dtype=like["x"].dtype)}


class Flat(nn.Module):
    """An output on which nothing depends."""

    def __init__(self):
        super().__init__()
        self.v, self.x = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * (self.v.sum() + self.x.sum())


@pytest.mark.parametrize("method", [HMC(0.8, path_length=3.0), NUTS(0.8, max_depth=5)], ids=["hmc", "nuts"])
def test_neals_funnel_fails_and_the_failure_is_reported(method):
    """No step size is right for all of it. The chains miss its neck, which independent draws reach, and this must show."""
    model = Model(Flat().double(), Gaussian(scale=1.0), Funnel())
    data = (torch.zeros(1, 1).double(), torch.zeros(1, 1).double())
    start = {"v": torch.zeros(1).double(), "x": torch.ones(9).double()}
    found = dubito.fit(model, replace(method, chains=32, draws=50, burn_in=50, tune=False), data, start=start)
    v = found.params["v"]
    expected = 3 * float(torch.special.ndtri(torch.tensor(1 / 1600, dtype=torch.float64)))  # of as many independent draws
    assert float(v.min()) > expected + 1, "the failure is there"
    assert found.trace["divergent"].sum() > 0
    assert float(bfmi(traced(found, "energy")).min()) < 0.3
    assert float(ess_mean(v.view(32, 50))) < 400
    assert "Do not trust these draws" in str(found.summary())


# ---- starts


STILL = HMC(1e-9, path_length=1e-9, tune=False, draws=1, burn_in=0)  # ends where it starts, to eight digits


def first(found: Any) -> Tensor:
    return by_chain(found)[:, 0]


def test_chains_start_where_they_are_told():
    network = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    model, data = Model(network, Gaussian(scale=0.5)), (MILD.x, MILD.y)
    point = dubito.fit(model, MAP(epochs=3), data)
    found = first(dubito.fit(model, replace(STILL, chains=3), data, start=point))
    assert torch.allclose(found, tree.flatten(point.params).expand(3, -1), atol=1e-7), "all at the one that is given"

    ensemble = dubito.fit(model, Ensemble(MAP(epochs=3), 3), data)
    members = tree.flatten(ensemble.params, stacked=True)
    assert isinstance(ensemble, Samples)
    assert torch.allclose(first(dubito.fit(model, replace(STILL, chains=3), data, start=ensemble)), members, atol=1e-7), (
        "one each"
    )

    stacked = {name: leaf[:2] for name, leaf in ensemble.params.items()}
    assert torch.allclose(first(dubito.fit(model, replace(STILL, chains=2), data, start=stacked)), members[:2], atol=1e-7)
    with pytest.raises(ValueError, match="2 settings of the weights for 3 chains"):
        dubito.fit(model, replace(STILL, chains=3), data, start=stacked)


def test_starts_with_statistics_of_their_own_are_refused():
    """A density has one set; with that of the network as it stands, the members would be other functions than they were."""
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1)).double()
    model, data = Model(network, Gaussian(scale=0.5)), (MILD.x, MILD.y)
    ensemble = dubito.fit(model, Ensemble(MAP(epochs=3), 2), data)
    with pytest.raises(
        ValueError, match=r"statistics of their own \(1.running_mean, 1.running_var\), and chains that see all data"
    ):
        dubito.fit(model, replace(STILL, chains=2), data, start=ensemble)
    found = dubito.fit(model, replace(STILL, chains=1), data, start=ensemble)
    assert torch.allclose(found.predict(MILD.x).means[0], ensemble.predict(MILD.x).means[0], atol=1e-5), "one has no others"


def test_without_a_start_the_first_chain_is_at_the_network_and_the_others_are_elsewhere():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    model = Model(network, Gaussian(scale=0.5))
    found = first(dubito.fit(model, replace(STILL, chains=4), (MILD.x, MILD.y)))
    assert torch.allclose(found[0], tree.flatten(model.parameters()), atol=1e-7)
    assert float(torch.cdist(found, found).add(10 * torch.eye(4)).min()) > 0.1


BOUNDED = {
    "bernoulli": priors.Bernoulli(temperature=0.5),
    "signs": priors.Bernoulli(0.3, values=(-1.0, 1.0), temperature=0.2),
    "log-uniform": priors.LogUniform(bounds=(1e-3, 3.0)),
}


@pytest.mark.parametrize("prior", BOUNDED.values(), ids=BOUNDED)
def test_chains_start_where_the_prior_has_a_density(prior):
    """Networks are initialised without regard to a prior's support: a start that nobody gave is drawn from the prior there."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    data = (torch.randn(12, 3), torch.randn(12, 1))
    model = Model(network, Gaussian(scale=0.5), priors.ByName({"0": prior, "": priors.Normal(scale=1.0)}))
    with torch.no_grad():
        network[0].weight.view(-1)[0] = 5.0
    found = dubito.fit(model, replace(STILL, chains=3), data)
    assert found.trace["log_prior"].isfinite().all()
    assert torch.allclose(found.params["2.weight"][0], network[2].weight, atol=1e-7), "the others stay"
    found = dubito.fit(model, NUTS(1e-4, max_depth=2, chains=2, draws=3, burn_in=0, tune=False), data)
    assert found.trace["log_prior"].isfinite().all()
    with pytest.raises(ValueError, match="the prior, ByName, has no density where 2 of 2 chains start: give a start within"):
        dubito.fit(model, replace(STILL, chains=2), data, start=model.parameters())


@pytest.mark.parametrize("name", FIXED)
def test_half_precision_is_refused(name):
    """A step of a sampler is smaller than the gap between two such numbers."""
    model = Model(nn.Linear(3, 1).bfloat16(), Gaussian(scale=0.5))
    with pytest.raises(ValueError, match='in half precision lose small steps.*precision="bfloat16"'):
        dubito.fit(model, FIXED[name], (MILD.x.bfloat16(), MILD.y.bfloat16()))


def test_more_starts_than_chains_are_taken_evenly():
    start = MILD.draws(9)
    found = first(dubito.fit(MILD.model, replace(STILL, chains=3), (MILD.x, MILD.y), start=start))
    assert torch.allclose(found, start["weight"][[0, 4, 8]].squeeze(1), atol=1e-7)


# ---- going on

TUNED: dict[str, Any] = {
    "metropolis": Metropolis(thin=2),
    "ula": ULA(0.3, thin=2),
    "mala": MALA(thin=2),
    "hmc": HMC(units="posterior"),
    "hmc, joint": HMC(gibbs=False),
    "nuts": NUTS(units="posterior"),
    "mclmc": MCLMC(units="posterior", thin=2),
    "mams": MAMS(units="posterior"),
}


@pytest.mark.parametrize("name", TUNED)
def test_a_run_that_goes_on_is_the_same_to_the_bit(name, tmp_path):
    """Stopped while it is tuned, stopped again while draws are kept."""
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), Gaussian())
    data, method = (MILD.x.float(), MILD.y.float()), replace(TUNED[name], chains=3, draws=8, burn_in=16)
    whole = dubito.fit(model, method, data, seed=4, batch_size=8)

    def stop(at: int):
        return lambda event: event.step == at

    found = None
    for at in (7, 19, None):
        callbacks = [] if at is None else [stop(at)]
        with suppress(ValueError) if at == 7 else nullcontext():  # no draws yet
            found = dubito.fit(
                model, method, data, seed=4, batch_size=8, checkpoint=tmp_path, resume=at != 7, callbacks=callbacks
            )
    assert found is not None
    for name, leaf in {**whole.params, **whole.trace}.items():
        other = {**found.params, **found.trace}[name]
        assert torch.equal(leaf.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0)), name
    assert (by_chain(whole).diff(dim=1) != 0).any(), "something has moved"


def test_a_proposal_is_known_again_though_its_function_is_another_object(tmp_path):
    """As it is in the process that goes on after a crash."""

    def proposal():
        def walk(position: Tensor, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
            noise = torch.empty_like(position).normal_(generator=generator)
            return position + step * noise, torch.zeros(len(position), dtype=torch.float64)

        return walk

    model, data = Model(nn.Linear(3, 1), Gaussian(scale=0.5)), (MILD.x.float(), MILD.y.float())
    for draws in (2, 3):
        method = Metropolis(0.1, proposal=proposal(), draws=draws, burn_in=2)
        found = dubito.fit(model, method, data, checkpoint=tmp_path, resume=True)
    assert len(found) == 12
    with pytest.raises(ValueError, match="belongs to another run; different: method"):
        dubito.fit(model, replace(method, proposal=torch.nn.functional.relu), data, checkpoint=tmp_path, resume=True)


# ---- arguments


@pytest.mark.parametrize("kind", [HMC, MALA, MAMS, MCLMC, Metropolis, NUTS])
def test_arguments_that_make_no_sense_are_refused_in_words(kind):
    for wrong in ({"chains": 0}, {"draws": 0}, {"thin": 0}, {"burn_in": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            kind(**wrong)
    with pytest.raises(ValueError, match="positive"):
        kind(step_size=0.0)
    if kind is not Metropolis:  # which has a step size that suits any number of weights
        with pytest.raises(ValueError, match="give step_size"):
            kind(tune=False)
    if kind in (HMC, MAMS, MCLMC, NUTS):
        with pytest.raises(ValueError, match="'prior', 'posterior'"):
            kind(units="inches")
    if kind is not MCLMC:
        with pytest.raises(ValueError, match="above 0 and below 1"):
            kind(target_acceptance=1.0)


@pytest.mark.parametrize("kind", [MCLMC, MAMS])
def test_one_weight_has_no_direction_to_turn(kind):
    model = Model(nn.Linear(1, 1, bias=False), Gaussian(scale=1.0))
    with pytest.raises(ValueError, match="use HMC"):
        dubito.fit(model, kind(draws=1, burn_in=10), (torch.ones(3, 1), torch.ones(3, 1)))
