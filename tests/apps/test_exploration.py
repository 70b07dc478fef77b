"""Exploration: a maze against its plan, values against dynamic programming, and an agent that stops and goes on to the same bits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito.apps.exploration import EpsilonGreedy, History, Maze, QLearning, Replay, Thompson
from dubito.apps.network import action_value_model, only_network
from dubito.posteriors import Point, Stochastic
from dubito.posteriors.predict.dropout import Dropout
from dubito.priors import Normal


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(inputs: int, actions: int = 4, rate: float = 0.1) -> dubito.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Dropout(rate), nn.Linear(32, actions))
    return dubito.Model(net, dubito.Gaussian(scale=0.1), Normal(scale=1.0))


METHODS = {
    "map": (dubito.MAP(learning_rate=0.01), EpsilonGreedy(1.0, 0.1, steps=80)),
    "dropout": (dubito.MCDropout(learning_rate=0.01), Thompson()),
    "variational": (dubito.Variational(learning_rate=0.01), Thompson(hold=3)),
    "ivon": (dubito.IVON(learning_rate=0.01, hessian_momentum=0.99), Thompson(hold=1)),
}


# -- the maze


def test_a_maze_follows_its_plan():
    maze = Maze("S.\n#.\n.G", cost=-0.1, limit=5)
    assert (len(maze), maze.shortest, maze.action_space.n) == (5, 3, 4)
    seen, info = maze.reset(seed=1)
    assert (seen.sum(), seen[maze.start], info) == (1, 1, {})
    assert maze.observation_space.shape == seen.shape
    stay, reward, over, cut, _ = maze.step(2)  # down, into the wall
    assert np.array_equal(seen, stay)
    assert (reward, over, cut) == (-0.1, False, False)
    for action in (1, 2):
        assert maze.step(action)[2] is False
    seen, reward, over, cut, _ = maze.step(2)
    assert (reward, over, cut, seen[maze.goal]) == (1.0, True, False, 1)
    maze.reset()
    assert [maze.step(0)[3] for _ in range(5)] == [False, False, False, False, True]


def test_a_maze_that_slips_is_as_random_as_it_says():
    maze = Maze("S....\n.....\n....G", slip=0.4, limit=10_000)
    maze.reset(seed=3)
    straight = 0
    for _ in range(2000):
        maze._cell = 7  # the middle
        maze.step(0)
        straight += maze._cell == 2
    assert straight / 2000 == pytest.approx(0.6 + 0.4 / 4, abs=0.04)


@pytest.mark.parametrize(("plan", "words"), [("S#G", "cannot be reached"), ("S..", "one 'G'"), ("S.G\n..", "equal length")])
def test_plans_that_are_none_are_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        Maze(plan)


def test_the_default_maze_has_a_way():
    assert Maze().shortest == 18


# -- replay, history, choice


def test_replay_keeps_the_last_and_draws_them_all():
    replay = Replay(10)
    for i in range(25):
        replay.add(torch.full((2,), float(i)), i % 3, i, torch.full((2,), i + 1.0), i % 5 == 0)
    rows = replay.sample(500, generator())
    assert set(rows.reward.tolist()) == set(range(15, 25))
    assert torch.equal(rows.next_observation, rows.observation + 1)
    assert torch.equal(rows.action, rows.reward.long() % 3)
    assert torch.equal(rows.terminated, (rows.reward % 5 == 0).float())


def test_curves_are_of_windows():
    history = History([1.0, 3.0, 5.0, 7.0], [5, 5, 20, 15])
    assert history.curve(10, 40) == [2.0, 2.0, 5.0, 7.0]
    late = History([-6.0], [25]).curve(10, 30)  # no return is not a return of 0, which would be a good one here
    assert np.isnan(late[:2]).all()
    assert late[2] == -6.0


def test_epsilon_is_the_share_of_random_choices():
    one = action_value_model(model(3))
    posterior = Point(one, one.parameters(), one.buffers())
    seen, explore = torch.ones(3), EpsilonGreedy(0.5, 0.5, steps=1)
    best = int(only_network(posterior, "")((seen.unsqueeze(0),))[0].argmax())
    chosen = [int(explore.values(posterior, seen, 0, episode=0, step=i, total=9).argmax()) for i in range(1000)]
    assert sum(action == best for action in chosen) / 1000 == pytest.approx(0.5 + 0.5 / 4, abs=0.06)


def test_a_function_is_held_as_long_as_it_should_be():
    one = action_value_model(model(3, rate=0.5))
    posterior = Stochastic(one, one.parameters(), one.buffers(), Dropout())

    def values(hold, episode, step):
        with torch.no_grad():
            return Thompson(hold).values(posterior, torch.ones(3), 0, episode=episode, step=step, total=0)

    assert torch.equal(values(None, 1, 0), values(None, 1, 50))
    assert not torch.equal(values(None, 1, 0), values(None, 2, 0))
    assert torch.equal(values(4, 1, 0), values(4, 1, 3))
    assert not torch.equal(values(4, 1, 3), values(4, 1, 4))


# -- learning


def test_values_are_those_of_dynamic_programming():
    """From all transitions of a corridor the network learns discount^(steps to the goal - 1)."""
    maze, discount = Maze("S..G"), 0.7
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
    flat = dubito.Model(net, dubito.Gaussian(scale=0.05), Normal(scale=10.0))
    agent = QLearning(flat, dubito.MAP(learning_rate=5e-3), 4, explore=EpsilonGreedy(), discount=discount, initial=12, sync=10)
    for _ in range(25):
        for cell in range(3):
            for action in range(4):
                after = int(maze.next[cell, action])
                agent.update(torch.eye(4)[cell], action, float(after == 3), torch.eye(4)[after], after == 3)
    with torch.no_grad():
        found = only_network(agent.posterior, "")((torch.eye(4)[:3],))
    best = torch.tensor([discount**2, discount, 1.0])
    torch.testing.assert_close(found[:, 1], best, atol=0.08, rtol=0)  # to the right
    torch.testing.assert_close(found[:, 0], discount * best, atol=0.08, rtol=0)  # against a wall: the same, a step later
    torch.testing.assert_close(found[1:, 3], discount * best[:2], atol=0.08, rtol=0)  # back
    assert agent.evaluate(maze, 1) == [1.0]


@pytest.mark.parametrize("double", [True, False])
def test_what_is_targets(double):
    """By the frozen network, which is renewed every `sync` steps; of the action that is the best by the present one, or by itself."""
    agent = QLearning(
        model(3), dubito.MCDropout(learning_rate=0.3), 4, explore=EpsilonGreedy(), discount=0.5, initial=5, sync=4, double=double,
        batch_size=32,
    )  # fmt: skip
    source, frozen = generator(1), []
    for _ in range(20):
        seen, after = torch.randn((2, 3), generator=source)
        agent.update(seen, int(torch.randint(4, (1,), generator=source)), float(seen.sum()), after, bool(after[0] > 0))
        frozen.append(None if agent._frozen is None else agent._frozen.params["0.weight"].clone())
    changed = [i for i in range(5, 20) if not torch.equal(frozen[i], frozen[i - 1])]
    assert changed == [8, 12, 16]  # the first learning step is the fifth step
    batch = agent.replay.rows
    with torch.no_grad():
        now, then = only_network(agent.posterior, "")((batch.next_observation,)), agent._frozen((batch.next_observation,))
    assert not torch.equal(now.argmax(1), then.argmax(1))
    rows = torch.arange(len(now))
    value = then[rows, now.argmax(1)] if double else then.amax(1)
    torch.testing.assert_close(agent._targets(batch), batch.reward + 0.5 * (1 - batch.terminated) * value)


def test_epsilon_falls_from_the_end_of_the_random_steps():
    totals = []

    class Noted(EpsilonGreedy):
        def values(self, posterior, seen, seed, *, episode, step, total):
            totals.append(total)
            return torch.zeros(4)

    QLearning(model(3), dubito.MAP(), 4, explore=Noted(), initial=7, batch_size=8).learn(Maze("S.G", limit=3), steps=12)
    assert totals[:3] == [0, 1, 2]


def test_an_episode_that_is_cut_off_is_not_over():
    """What comes after is worth something: it is only that nobody looks."""
    agent = QLearning(model(3), dubito.MAP(), 4, explore=EpsilonGreedy(), initial=1000)
    agent.learn(Maze("S.G", limit=1), steps=5)
    assert agent.history.lengths == [1] * 5
    assert agent.replay.rows.terminated.tolist() == [0.0] * 5


@pytest.mark.parametrize("name", list(METHODS))
def test_learning_that_was_broken_off_goes_on_to_the_same_bits(name, tmp_path):
    method, explore = METHODS[name]

    def made():
        return QLearning(model(5), method, 4, explore=explore, initial=20, sync=7, every=2, capacity=60, batch_size=16, seed=3)

    def maze():
        return Maze("S.\n#.\n.G", slip=0.2, limit=15)

    whole = made()
    before = torch.get_rng_state()
    whole.learn(maze(), steps=80)
    assert torch.equal(before, torch.get_rng_state())
    file = tmp_path / "agent.safetensors"
    made().learn(maze(), steps=45, file=file)
    again = made()
    again.load(file)
    assert 45 <= again.total < 80
    again.learn(maze(), steps=80, file=file)
    assert again.history == whole.history
    weights = [only_network(agent.posterior, "").params for agent in (whole, again)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    alike = dict(explore=explore, initial=20, sync=7, every=2, capacity=60, batch_size=16, seed=3)
    for change in (dict(seed=4), dict(discount=0.5), dict(capacity=50)):
        other = QLearning(model(5), method, 4, **{**alike, **change})
        with pytest.raises(ValueError, match=f"another {next(iter(change))}"):
            other.learn(maze(), steps=60, file=file)
    with pytest.raises(FileExistsError, match="has learned already"):
        whole.learn(maze(), steps=90, file=file)
    again.learn(maze(), steps=90, file=file)  # its own
    assert again.total >= 90


def test_the_network_of_the_user_stays_as_it_is():
    one = model(3)
    one.network.train()
    before = copy.deepcopy(one.network.state_dict())
    QLearning(one, dubito.MCDropout(learning_rate=0.01), 4, initial=10, batch_size=8).learn(Maze("S.G"), steps=30)
    assert one.network.training
    assert all(torch.equal(leaf, before[name]) for name, leaf in one.network.state_dict().items())
    assert all(p.grad is None for p in one.network.parameters())


def test_what_cannot_be_is_refused():
    one = model(3)
    with pytest.raises(ValueError, match="step by step"):
        QLearning(one, dubito.Laplace(), 4)
    with pytest.raises(ValueError, match="step by step"):
        QLearning(one, dubito.Ensemble(dubito.MAP(), 2), 4)
    with pytest.raises(ValueError, match="warmup"):
        QLearning(one, dubito.MAP(warmup=0.1), 4)
    with pytest.raises(ValueError, match="kl_warmup depends"):
        QLearning(one, dubito.Variational(kl_warmup=0.1), 4)
    with pytest.raises(ValueError, match="give hessian_momentum"):
        QLearning(one, dubito.IVON(), 4)
    with pytest.raises(ValueError, match="actions must be at least 2"):
        QLearning(one, dubito.MAP(), 1)
    with pytest.raises(ValueError, match="likelihood of rewards"):
        QLearning(dubito.Model(one.network, dubito.Categorical()), dubito.MAP(), 4)
    with pytest.raises(ValueError, match="no posterior yet"):
        QLearning(one, dubito.MAP(), 4).posterior  # noqa: B018
    with pytest.raises(ValueError, match="4 outputs for 3"):
        QLearning(one, dubito.MAP(), 3, initial=5).learn(Maze("S.G"), steps=10)
    with pytest.raises(ValueError, match="hold"):
        Thompson(hold=0)
    agent = QLearning(one, dubito.MCDropout(), 4)
    seen = torch.zeros(3)
    for step, words in (
        ((seen, 4, 0.0, seen, False), "0 to 3"),
        ((seen, 0, float("nan"), seen, False), "NaN"),
        ((seen, 0, 0.0, seen / 0, False), "NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            agent.update(*step)
    assert len(agent.replay) == agent.total == 0


@pytest.mark.parametrize("method", [dubito.MAP(), dubito.SWAG()])
def test_thompson_sampling_from_a_point_is_refused(method):
    """It would be greedy choice."""
    agent = QLearning(model(3), method, 4, explore=Thompson(), initial=5, batch_size=8)
    with pytest.raises(ValueError, match="greedy choice: use MCDropout"):
        agent.learn(Maze("S.G"), steps=10)
    QLearning(model(3), method, 4, explore=EpsilonGreedy(), initial=5, batch_size=8).learn(Maze("S.G"), steps=10)


def test_learning_that_runs_away_says_so():
    agent = QLearning(model(3), dubito.MAP(optimizer="sgd", learning_rate=1e30), 4, explore=EpsilonGreedy(), initial=5, sync=5)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        agent.learn(Maze("S.G", cost=-1.0), steps=60)


def test_environments_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("CartPole-v1")
    agent = QLearning(model(4, 2), dubito.MCDropout(learning_rate=1e-3), 2, explore=Thompson(), initial=40, batch_size=16)
    history = agent.learn(env, steps=80)
    assert sum(history.lengths) >= 80
    assert history.returns == [float(n) for n in history.lengths]  # a reward of 1 a step
    assert len(agent.evaluate(env, 2)) == 2
    assert int(env.action_space.n) == 2
