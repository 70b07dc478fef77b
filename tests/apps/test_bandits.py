"""Bandits: exact posteriors against the batch formula, draws against their distribution, problems against their definition, and runs
that forget nothing."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import dubito
from dubito.apps.bandits import (
    PROBLEMS,
    Bandit,
    Linear,
    NeuralLinear,
    Regressions,
    Standings,
    Thompson,
    UnfinishedRun,
    Uniform,
    classification,
    compare,
    eating,
    epochs,
    linear,
    mushroom_like,
    mushrooms,
    simulate,
    wheel,
)
from dubito.apps.bandits.problems import Run
from dubito.apps.network import action_value_model
from dubito.posteriors import Gaussian, Mixture, Point, Samples, Stochastic, Stored
from dubito.posteriors.predict.dropout import Dropout
from dubito.priors import Centered, Normal


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(width: int = 2, arms: int = 3, rate: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Dropout(rate), nn.Linear(8, arms))


def model(width: int = 2, arms: int = 3, rate: float = 0.0) -> dubito.Model:
    return dubito.Model(network(width, arms, rate), dubito.Gaussian(scale=0.3), Normal(scale=1.0))


# -- exact regressions


def batch_posterior(phi, y, precision, a0, b0):
    """Normal-inverse-gamma by the textbook, with explicit inverses."""
    full = phi.mT @ phi + precision * torch.eye(phi.shape[1], dtype=phi.dtype)
    mean = torch.linalg.solve(full, phi.mT @ y)
    return mean, torch.linalg.inv(full), a0 + len(y) / 2, b0 + 0.5 * (y @ y - mean @ full @ mean)


@pytest.mark.parametrize("how", ["one by one", "at once", "at twice", "both"])
def test_regressions_are_the_batch_posterior(how):
    source = generator(1)
    phi = torch.randn(600, 7, generator=source, dtype=torch.float64) * torch.logspace(-2, 1, 7, dtype=torch.float64)
    action = torch.randint(3, (600,), generator=source)
    y = phi.sum(1) + action + 0.3 * torch.randn(600, generator=source, dtype=torch.float64)
    arms = Regressions.prior(4, 7, precision=0.25, a0=6.0, b0=2.0)
    cut = {"one by one": 0, "both": 250}.get(how, 600)
    for rows in (slice(0, 250), slice(250, 600)) if how == "at twice" else (slice(0, cut),):
        arms.observe(phi[rows], action[rows], y[rows])
    for i in range(cut, 600):
        arms.update(int(action[i]), phi[i], float(y[i]))
    for k in range(3):
        rows = action == k
        mean, covariance, shape, rate = batch_posterior(phi[rows], y[rows], 0.25, 6.0, 2.0)
        torch.testing.assert_close(arms.mean[k], mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(arms.root[k] @ arms.root[k].mT, covariance, rtol=1e-8, atol=1e-8)
        assert float(arms.shape[k]) == pytest.approx(shape, rel=1e-12)
        assert float(arms.rate[k]) == pytest.approx(float(rate), rel=1e-8)
    untouched = Regressions.prior(1, 7, precision=0.25, a0=6.0, b0=2.0)
    assert torch.equal(arms.root[3], untouched.root[0])
    assert float(arms.rate[3]) == 2.0


def test_draws_of_regressions_have_their_distribution():
    """The marginal of the weights is a Student-t: mean m, covariance b / (a - 1) R R^T."""
    source = generator(2)
    phi, y = torch.randn(30, 2, generator=source, dtype=torch.float64), torch.randn(30, generator=source, dtype=torch.float64)
    arms = Regressions.prior(2, 2, a0=3.0, b0=3.0)  # of few observations, so that the noise is not known
    arms.observe(phi, torch.zeros(30, dtype=torch.long), y)
    draws = torch.stack([arms.sample(source) for _ in range(4000)])  # [n, K, d]
    for k in range(2):
        covariance = arms.rate[k] / (arms.shape[k] - 1) * arms.root[k] @ arms.root[k].mT
        spread = covariance.diagonal().sqrt()
        assert bool(((draws[:, k].mean(0) - arms.mean[k]).abs() < 5 * spread / 4000**0.5).all())
        found = torch.cov(draws[:, k].mT)
        torch.testing.assert_close(found, covariance, rtol=0.15, atol=0.05 * float(covariance.diagonal().max()))


def test_a_prior_of_regressions_that_is_none_is_refused():
    with pytest.raises(ValueError, match="positive"):
        Regressions.prior(2, 3, precision=0.0)


# -- one function of any posterior


def forms() -> dict[str, dubito.posteriors.Posterior]:
    torch.manual_seed(0)
    one = model(rate=0.4)
    params, buffers = one.parameters(), one.buffers()
    stacked = {name: torch.stack([leaf, leaf + 0.3, -leaf]) for name, leaf in params.items()}
    small = {name: torch.full_like(leaf, 0.1) for name, leaf in params.items()}
    samples = Samples(one, stacked, buffers)
    weighted = Samples(one, stacked, buffers, weights=torch.tensor([0.0, 0.7, 0.3]))
    dropout = Stochastic(one, params, buffers, Dropout(), consistent=False)
    linearized = Gaussian.diagonal(one, params, small)
    return {
        "point": Point(one, params, buffers),
        "samples": samples,
        "weighted": weighted,
        "dropout": dropout,
        "linearized": linearized,
        "sampled": Gaussian(one, params, buffers, linearized.covariance, how="sampled"),
        "mixture": Mixture(one, (Point(one, params, buffers), dropout), (0.5, 0.5)),
    }


@pytest.mark.parametrize("name", list(forms()))
def test_a_drawn_function_is_one_of_the_posterior(name):
    """Its moments over many draws are those of the predictive, and it is the same function wherever it is asked."""
    posterior, x = forms()[name], torch.randn(5, 2, generator=generator(3))
    source = generator(4)
    drawn = [posterior.function(source) for _ in range(300)]
    with torch.no_grad():
        values = torch.stack([f(x).means[0] for f in drawn])  # [n, B, K]
        again = torch.cat([drawn[0](part).means[0] for part in x.split(2)])
    torch.testing.assert_close(values[0], again)
    # a linearised Gaussian and a few draws are predicted exactly; of masks and weights there are many
    p = posterior.predict(x, draws=None if name in ("samples", "weighted", "linearized") else 2000)
    mean, variance = p.f_mean, p.f_var
    error = (variance / 300).sqrt()
    assert bool(((values.mean(0) - mean).abs() <= 6 * error + 0.02).all())
    if name != "point":
        torch.testing.assert_close(values.var(0).sum(), variance.sum(), rtol=0.3, atol=1e-6)


def test_a_function_of_draws_on_disk_is_one_of_them(tmp_path, monkeypatch):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))  # with buffers
    data = torch.randn(20, 2, generator=generator()), torch.randn(20, 3, generator=generator(1))
    one = dubito.Model(net, dubito.Gaussian(scale=3.0))
    dubito.fit(one, dubito.SGLD(burn_in=1, draws=4), data, batch_size=10, checkpoint=tmp_path)
    stored, x = Stored.open(tmp_path, one), data[0][:3]
    every = stored.load().predict(x).means  # [S, B, C]
    monkeypatch.setattr(Stored, "load", None)  # all at once may be more than there is memory
    source = generator(2)
    with torch.no_grad():
        found = [stored.function(source)(x).means[0] for _ in range(40)]
    which = [[int(torch.allclose(f, known, atol=1e-6)) for known in every] for f in found]
    assert all(sum(row) == 1 for row in which)
    assert all(sum(column) > 0 for column in zip(*which, strict=True))


def test_draws_with_weights_are_drawn_by_them():
    posterior = forms()["weighted"]
    x, source = torch.randn(1, 2, generator=generator(5)), generator(6)
    first = Point(posterior.model, {n: leaf[0] for n, leaf in posterior.params.items()}, posterior.buffers).predict(x).means[0]
    with torch.no_grad():
        values = torch.stack([posterior.function(source)(x).means[0] for _ in range(100)])
    assert not bool((values == first).all(-1).any())  # its weight is 0


def test_only_the_arm_that_was_taken_is_learned_from():
    one = action_value_model(dubito.Model(network(), dubito.Gaussian(scale=1.0), dubito.priors.Normal(), only=r"^3\."))
    x, action, y = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 0]), torch.randn(6)
    target = dubito.model.Target(one, 6)
    params = one.parameters()
    assert list(params) == ["3.weight", "3.bias"]  # `only` means the same weights
    gradient = target.gradient(params, [((x, action), y)], one.buffers()).gradient["3.weight"]
    prior = -params["3.weight"]
    assert bool((gradient[:2] != prior[:2]).any())
    torch.testing.assert_close(gradient[2], prior[2])


@pytest.mark.parametrize("net", [network(), nn.Linear(2, 3)], ids=["layers", "one layer"])
def test_names_are_those_of_the_network(net):
    """A prior by patterns or around pretrained weights is the same prior of the same weights."""
    one = dubito.Model(net, dubito.Gaussian(scale=0.3), Normal.fan_in(net, 0.1))
    pretrained = replace(one, prior=Centered(net, Normal(scale=0.1)))
    names = [name for name, _ in net.named_parameters()]
    for before in (one, pretrained):
        after = action_value_model(before)
        assert list(after.parameters()) == names
        assert float(after.prior.log_prob(after.parameters())) == float(before.prior.log_prob(before.parameters()))
    again = copy.deepcopy(after.network)
    assert [name for name, _ in again.named_parameters()] == names
    x, action = torch.randn(4, 2), torch.tensor([0, 2, 1, 1])
    doubled = {name: 2 * leaf for name, leaf in after.parameters().items()}
    with torch.no_grad():
        expected = one.forward(doubled, x, {})[0]
    found = after.forward(doubled, (x, action), {})[0]
    torch.testing.assert_close(found[:, 0], expected[torch.arange(4), action])
    at = dubito.MCDropout(epochs=1, at=f"^{names[-1].rpartition('.')[0]}$", learn_rates=True)
    agent = Thompson(replace(one, prior=Normal(scale=1.0)), at, 3, every=8)
    simulate(small(10), agent)
    assert isinstance(agent.posterior, Stochastic)


def test_a_model_with_its_own_reading_of_batches_and_outputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return {"rewards": self.inner(x)}

    plain = Thompson(model(), dubito.MAP(epochs=2), 3, every=8)
    own = dubito.Model(
        Named(),
        dubito.Gaussian(scale=0.3),
        Normal(scale=1.0),
        split=lambda batch: (batch["x"], batch["y"]),
        output=lambda out: out["rewards"],
    )
    agent = Thompson(own, dubito.MAP(epochs=2), 3, every=8)
    assert torch.equal(simulate(small(), agent).actions, simulate(small(), plain).actions)


def test_a_likelihood_that_is_not_of_rewards_is_refused():
    with pytest.raises(ValueError, match="likelihood of rewards"):
        Thompson(dubito.Model(network(), dubito.Categorical()), dubito.MAP(), 3)


# -- problems


def test_wheel_as_published():
    bandit = wheel(20_000, delta=0.8, seed=3)
    radius = bandit.contexts.norm(dim=1)
    assert float(radius.max()) <= 1
    assert float((radius < 0.5).float().mean()) == pytest.approx(0.25, abs=0.02)  # uniform in the disc
    near, far = radius < 0.8, radius >= 0.8
    assert bool((bandit.expected[near].argmax(1) == 4).all())
    best = bandit.expected[far].argmax(1)
    x, y = bandit.contexts[far].T
    assert torch.equal(best, 2 * (x <= 0).long() + (y <= 0).long())
    assert float(bandit.expected[far].amax(1).min()) == 50
    noise = bandit.rewards - bandit.expected
    assert float(noise[near].std()) == pytest.approx(0.05, rel=0.05)
    assert bandit.uniform == pytest.approx(
        float(near.sum()) * (0.2 * 0.8) + float(far.sum()) * (50 - (50 + 3 + 1.2) / 5), rel=1e-5
    )


def test_linear_bandits_are_linear():
    bandit = linear(500, arms=7, nonzero=3, seed=1)
    beta = torch.linalg.lstsq(bandit.contexts, bandit.expected).solution
    torch.testing.assert_close(beta.norm(dim=0), torch.ones(7), rtol=1e-4, atol=1e-4)
    assert (beta.abs() > 1e-4).sum(0).tolist() == [3] * 7
    assert (bandit.rewards - bandit.expected).std(0).tolist() == pytest.approx([0.01 * i for i in range(1, 8)], rel=0.2)


def test_eating_and_mushrooms(tmp_path):
    poisonous = torch.tensor([0, 1])
    bandit = eating(torch.tensor([[0.0], [1.0]]), poisonous, 4000, seed=0)
    bad = bandit.contexts[:, 0] == 1
    assert sorted(bandit.rewards[bad, 1].unique().tolist()) == [-35, 5]
    assert float(bandit.rewards[bad, 1].mean()) == pytest.approx(-15, abs=2)
    assert bandit.expected[bad].unique(dim=0).tolist() == [[0, -15]]
    assert bandit.rewards[~bad].unique(dim=0).tolist() == [[0, 5]]
    with pytest.raises(ValueError, match="0 or 1"):
        eating(torch.zeros(2, 1), torch.tensor([1, 2]))

    file = tmp_path / "agaricus-lepiota.data"
    file.write_text("p,x,s\ne,x,y\ne,b,s\n")
    bandit = mushrooms(file, None)
    assert bandit.contexts.shape == (3, 4)
    assert bandit.contexts.sum(1).tolist() == [2, 2, 2]
    assert sorted(bandit.expected[:, 1].tolist()) == [-15, 5, 5]
    file.write_text("q,x\n")
    with pytest.raises(ValueError, match="e or p"):
        mushrooms(file)


def test_mushrooms_that_are_generated():
    bandit = mushroom_like(400, seed=2)
    assert bandit.contexts.shape == (400, 117)
    assert bandit.contexts.sum(1).unique().tolist() == [22]
    assert 0.3 < float((bandit.expected[:, 1] < 0).float().mean()) < 0.7


def test_classification_pays_for_the_right_class():
    y = torch.tensor([0, 1, 2, 1])
    x = torch.arange(4.0).unsqueeze(1)
    bandit = classification(x, y, seed=1)
    order = bandit.contexts[:, 0].argsort()
    assert bandit.rewards[order].argmax(1).tolist() == y.tolist()
    assert bandit.uniform == pytest.approx(4 * 2 / 3)
    assert torch.equal(classification(x, 2 * y + 1, seed=1).rewards, bandit.rewards)  # labels 1, 3 and 5: three arms
    with pytest.raises(ValueError, match="for every row"):
        classification(x, y[:3])
    with pytest.raises(ValueError, match="3 values for 4 rows"):
        eating(x, y[:3] % 2)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "mnist"])
def test_problems_depend_on_their_seed(name):
    first, again, other = PROBLEMS[name](60, 0), PROBLEMS[name](60, 0), PROBLEMS[name](60, 1)
    assert len(first) == 60
    assert first.digest == again.digest != other.digest


def test_bandits_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="contexts"):
        Bandit(torch.zeros(3, 1), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="two arms"):
        Bandit(torch.zeros(3, 1), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="NaN"):
        Bandit(torch.zeros(1, 1), torch.tensor([[0.0, torch.nan]]))


# -- agents

AGENTS = {
    "uniform": lambda seed: Uniform(3, seed=seed),
    "linear": lambda seed: Linear(3, 2, seed=seed),
    "neural linear": lambda seed: NeuralLinear(model(), dubito.MAP(epochs=3), 3, every=8, seed=seed),
    "greedy": lambda seed: Thompson(model(), dubito.MAP(epochs=3), 3, every=8, epsilon=0.1, seed=seed),
    "dropout": lambda seed: Thompson(model(rate=0.2), dubito.MCDropout(epochs=3), 3, every=8, seed=seed),
    "members": lambda seed: Thompson(model(), dubito.MAP(epochs=3), 3, every=8, members=2, seed=seed),
    "ensemble": lambda seed: Thompson(model(), dubito.Ensemble(dubito.MAP(epochs=3), 2), 3, every=8, seed=seed),
    "variational": lambda seed: Thompson(model(), dubito.Variational(epochs=3), 3, every=8, seed=seed),
    "laplace": lambda seed: Thompson(
        model(), lambda n: [dubito.MAP(epochs=3), dubito.Laplace(check=False)], 3, every=8, seed=seed
    ),
    "sampler": lambda seed: Thompson(model(), dubito.SGLD(burn_in=1, draws=2), 3, every=8, seed=seed),
}


def small(rounds: int = 24) -> Bandit:
    bandit = linear(rounds, width=2, arms=3, seed=0)
    return bandit


@pytest.mark.parametrize("name", list(AGENTS))
def test_a_run_that_was_broken_off_goes_on_to_the_same(name, tmp_path):
    """Also within the rounds between two fits, and the global generator is nobody's."""
    bandit = small()
    agent = AGENTS[name](5)
    before = torch.get_rng_state()
    whole = simulate(bandit, agent)
    assert torch.equal(before, torch.get_rng_state())
    file = tmp_path / "run.safetensors"
    part = AGENTS[name](5)
    with pytest.raises(UnfinishedRun, match="of 24 rounds"):  # time is up after 17 rounds
        simulate(bandit, Interrupted(part, 17), file=file, until=1e12)
    rest, nothing = Interrupted(AGENTS[name](5)), Interrupted(AGENTS[name](5))
    resumed = simulate(bandit, rest, file=file)
    assert torch.equal(whole.actions, resumed.actions)
    assert simulate(bandit, nothing, file=file).relative == resumed.relative  # from the file
    assert (rest.acts, nothing.acts) == (7, 0)
    with pytest.raises(ValueError, match="another run"):
        simulate(small(30), Interrupted(AGENTS[name](5)), file=file)
    with pytest.raises(ValueError, match="another seed"):
        simulate(bandit, Interrupted(AGENTS[name](6)), file=file)


class Interrupted:
    """An agent for which the clock strikes after so many rounds."""

    def __init__(self, agent, after: int | None = None):
        self.agent, self.after, self.acts = agent, after, 0

    @property
    def seed(self):
        return self.agent.seed

    def act(self, context):
        self.acts += 1
        if self.after is not None:
            self.after -= 1
            if self.after == 0:
                clock[0] = 2e12
        return self.agent.act(context)

    def update(self, context, action, reward):
        self.agent.update(context, action, reward)

    def state(self):
        return self.agent.state()

    def restore(self, state):
        self.agent.restore(state)


clock = [0.0]


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    clock[0] = 0.0
    monkeypatch.setattr(time, "time", lambda: clock[0])


def test_the_network_of_the_user_stays_as_it_is():
    net = network(rate=0.2)
    net.train()
    before = {name: leaf.clone() for name, leaf in net.state_dict().items()}
    agent = Thompson(dubito.Model(net, dubito.Gaussian(scale=0.3)), dubito.MCDropout(epochs=2), 3, every=5)
    simulate(small(), agent)
    assert net.training
    assert all(torch.equal(leaf, before[name]) for name, leaf in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("name", ["linear", "greedy"])
def test_every_arm_is_tried_at_first(name):
    """In turn; also where rewards come late, or are told of arms that others have taken."""
    x = torch.zeros(2)
    agent = AGENTS[name](0)
    assert [agent.act(x) for _ in range(4)] == [0, 1, 2, 0]  # nothing is known of the first yet
    agent = AGENTS[name](0)
    for _ in range(6):
        agent.update(x, 0, 1.0)
    found = []
    for _ in range(4):
        found.append(agent.act(x))
        agent.update(x, found[-1], 0.0)
    assert found == [1, 2, 1, 2]


def test_epsilon_is_the_share_of_random_arms():
    agent = Thompson(model(), dubito.MAP(epochs=1), 3, initial=1, every=1000, epsilon=0.6)
    for i in range(3):
        agent.update(torch.zeros(2), i, float(i))
    chosen = [agent.act(torch.zeros(2)) for _ in range(400)]
    best = max(set(chosen), key=chosen.count)
    assert chosen.count(best) / 400 == pytest.approx(0.4 + 0.6 / 3, abs=0.1)
    assert len(set(chosen)) == 3


def test_members_start_apart_and_are_trained_further():
    agent = Thompson(model(), dubito.MAP(epochs=1, learning_rate=1e-6), 3, initial=1, members=2, seed=1)
    for i in range(3):
        agent.update(torch.zeros(2), i, float(i))
    first, second = ([member.params["0.weight"] for member in agent.refit().members] for _ in range(2))
    assert not torch.allclose(first[0], first[1], atol=0.01)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, second, strict=True))


def test_fits_go_on_from_where_the_last_has_come():
    """Twice as many steps in two fits as in one: the second begins at the end of the first."""
    agent = Thompson(model(), dubito.MAP(epochs=2), 3, initial=1)
    bandit = small()
    for i in range(6):
        agent.update(bandit.contexts[i], i % 3, float(bandit.rewards[i, i % 3]))
    first = agent.refit().params
    again = agent.refit()
    assert not torch.equal(again.params["0.weight"], first["0.weight"])
    assert torch.equal(agent._before[0]["0.weight"], first["0.weight"])


def test_neural_linear_is_the_exact_posterior_on_the_features_of_now():
    bandit = small(60)
    agent = NeuralLinear(model(), dubito.MAP(epochs=3), 3, every=25, a0=3.0, b0=0.5, precision=0.1)
    simulate(bandit, agent)
    x, action, y = agent.log.tensors()
    phi = agent.features(x)
    for k in range(3):
        rows = action == k
        mean, covariance, _, rate = batch_posterior(phi[rows], y[rows], 0.1, 3.0, 0.5)
        torch.testing.assert_close(agent.regressions.mean[k], mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(agent.regressions.root[k] @ agent.regressions.root[k].mT, covariance, rtol=1e-8, atol=1e-8)
        assert float(agent.regressions.rate[k]) == pytest.approx(float(rate), rel=1e-7)


def test_laplace_of_linear_arms_is_their_exact_posterior():
    """Each arm has learned from its own rewards only, and is drawn with the spread that these leave."""
    x, source = torch.randn(60, 2, generator=generator(1)), generator(2)
    action = torch.tensor([0] * 35 + [1] * 20 + [2] * 5)
    y = x.sum(1) * action + 0.3 * torch.randn(60, generator=source)
    methods = [dubito.MAP(epochs=300, learning_rate=0.05), dubito.Laplace(structure="dense")]
    one = dubito.Model(nn.Linear(2, 3), dubito.Gaussian(scale=0.3), Normal(scale=1.0))
    agent = Thompson(one, methods, 3, standardize=False)
    for i in range(60):
        agent.update(x[i], int(action[i]), float(y[i]))
    agent.refit()
    values = torch.stack([agent.values(torch.tensor([0.5, -1.0]), source) for _ in range(400)])
    phi, at = torch.cat([x, torch.ones(60, 1)], 1), torch.tensor([0.5, -1.0, 1.0])
    for k in range(3):
        rows = phi[action == k]
        covariance = torch.linalg.inv(rows.mT @ rows / 0.09 + torch.eye(3))
        mean, spread = at @ covariance @ rows.mT @ y[action == k] / 0.09, float((at @ covariance @ at).sqrt())
        assert abs(float(values[:, k].mean() - mean)) < 5 * spread / 400**0.5 + 0.01
        assert float(values[:, k].std()) == pytest.approx(spread, rel=0.15)


def test_standardised_rewards_change_nothing_but_their_units():
    """Rewards of another unit and origin: the same arms, and values in that unit."""
    bandit = small()
    other = Bandit(bandit.contexts, 1000 + 50 * bandit.rewards)
    agents = [Thompson(model(), dubito.MAP(epochs=10), 3, every=8) for _ in range(2)]
    first, second = (simulate(b, agent) for b, agent in zip((bandit, other), agents, strict=True))
    assert torch.equal(first.actions, second.actions)
    values = [agent.values(bandit.contexts[0], generator()) for agent in agents]
    torch.testing.assert_close(1000 + 50 * values[0], values[1], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [(dict(epsilon=2.0), "epsilon"), (dict(every=0), "every"), (dict(arms=1), "arms must be at least 2")],
)
def test_settings_that_cannot_be_are_refused(change, words):
    arms = change.pop("arms", 3)
    with pytest.raises(ValueError, match=words):
        Thompson(model(), dubito.MAP(), arms, **change)


def test_what_cannot_be_learned_from_is_refused():
    agent = Thompson(model(), dubito.MAP(epochs=1), 3)
    with pytest.raises(ValueError, match="nothing to fit"):
        agent.refit()
    with pytest.raises(ValueError, match="arms are 0 to 2"):
        agent.update(torch.zeros(2), 3, 0.0)
    with pytest.raises(ValueError, match="NaN"):
        agent.update(torch.zeros(2), 0, float("nan"))
    agent.update(torch.zeros(2), 0, 0.0)
    with pytest.raises(ValueError, match="contexts so far"):
        agent.update(torch.zeros(3), 0, 0.0)
    assert len(agent.log) == 1
    with pytest.raises(ValueError, match="leave out members"):
        Thompson(model(), dubito.Ensemble(dubito.MAP(), 2), 3, members=2)
    wrong = Thompson(model(arms=2), dubito.MAP(epochs=1), 3, initial=1)
    with pytest.raises(ValueError, match="2 outputs for 3"):
        simulate(small(), wrong)
    with pytest.raises(ValueError, match="must have 2 numbers"):
        Linear(3, 2).update(torch.zeros(3), 0, 0.0)


# -- comparisons


def test_relative_regret_and_its_error():
    bandit = Bandit(torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    runs = [
        Run("", torch.tensor(actions), bandit.regret(torch.tensor(actions)), bandit.uniform, 0.0) for actions in ([0, 0], [0, 1])
    ]
    standings = Standings({"a": runs})
    assert [run.relative for run in runs] == [150, 0]
    assert standings.relative("a") == (75, pytest.approx(75))
    assert standings.curve("a").tolist() == [[0, 150], [0, 0]]
    assert "75.00" in str(standings)


def test_uniform_choice_has_a_regret_of_100():
    found = compare(
        lambda seed: wheel(500, delta=0.5, seed=seed), {"uniform": lambda b, seed: Uniform(b.arms, seed=seed)}, runs=6
    )
    mean, error = found.relative("uniform")
    assert abs(mean - 100) < 5 * error + 1


def test_a_comparison_runs_nothing_twice(tmp_path):
    made = []

    def make(bandit, seed):
        made.append(seed)
        return Counted(bandit.arms, seed=seed)

    class Counted(Uniform):
        acted = 0

        def act(self, context):
            Counted.acted += 1
            return super().act(context)

    for runs in (2, 3):
        found = compare(lambda seed: wheel(20, seed=seed), {"a b/c": make}, runs=runs, folder=tmp_path)
    assert Counted.acted == 60
    assert len(found.runs["a b/c"]) == 3
    clock[0] = 10.0
    late = compare(lambda seed: wheel(20, seed=seed), {"other": make}, runs=1, folder=tmp_path, until=5.0)
    assert late.runs["other"] == []
    with pytest.raises(ValueError, match="no run of 'other'"):
        late.relative("other")
    with pytest.raises(ValueError, match="different file names"):
        compare(lambda seed: wheel(20, seed=seed), {"a b": make, "a/b": make}, runs=1, folder=tmp_path)


def test_thompson_finds_what_is_best():
    """Neural linear on a wheel, which a linear agent cannot model: far below uniform choice."""
    bandit = wheel(300, delta=0.3, seed=0)
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 5))
    one = dubito.Model(wide, dubito.Gaussian(scale=0.3), Normal(scale=1.0))
    agent = NeuralLinear(one, lambda n: dubito.MAP(epochs=epochs(40, n), learning_rate=0.02), 5, seed=1)
    assert simulate(bandit, agent).relative < 60


def test_the_method_for_outputs_that_are_all_seen_is_refused_at_once():
    model = dubito.Model(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), dubito.Gaussian(scale=0.3))
    with pytest.raises(ValueError, match=r"bandits\.NeuralLinear"):
        Thompson(model, [dubito.MAP(), dubito.NeuralLinear()], 3)


def test_runs_of_an_agent_with_other_settings_are_not_taken_for_its_own(tmp_path):
    def agents(rate: float, precision: float):
        net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 5))
        model = dubito.Model(net, dubito.Gaussian(scale=0.3))
        method = dubito.MCDropout(epochs=1, at="2", rate=rate)
        return (
            lambda b, seed: Thompson(model, method, b.arms, initial=1, seed=seed),
            lambda b, seed: Linear(b.arms, 2, precision=precision, seed=seed),
        )

    for number, name in ((0, "method"), (1, "prior")):
        made = {"agent": agents(0.1, 0.25)[number]}
        runs = [compare(lambda seed: wheel(12, seed=seed), made, runs=1, folder=tmp_path / name) for _ in range(2)]
        assert torch.equal(runs[0].runs["agent"][0].actions, runs[1].runs["agent"][0].actions)
        with pytest.raises(ValueError, match=f"another {name}"):
            compare(lambda seed: wheel(12, seed=seed), {"agent": agents(0.5, 0.5)[number]}, runs=1, folder=tmp_path / name)


def test_contexts_of_numpy():
    bandit = wheel(14, seed=0)
    for kind in ("linear", "thompson", "neural linear"):
        chosen = []
        for contexts in (bandit.contexts, bandit.contexts.double().numpy()):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 5))
            model = dubito.Model(net, dubito.Gaussian(scale=0.3))
            agent = {
                "linear": lambda: Linear(5, 2),
                "thompson": lambda model=model: Thompson(model, dubito.MCDropout(epochs=1, at="2"), 5, initial=1),
                "neural linear": lambda model=model: NeuralLinear(model, dubito.MAP(epochs=1), 5, initial=1),
            }[kind]()
            for context, rewards in zip(contexts, bandit.rewards, strict=True):
                chosen.append(agent.act(context))
                agent.update(context, chosen[-1], float(rewards[chosen[-1]]))
        assert chosen[:14] == chosen[14:]
