"""Deep Q-learning with any method that learns from mini-batches, and exploration by its posterior."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dubito.apps.network import Network, action_value_model, action_values, check_width, only_network
from dubito.inference.method import Method, Start, traits_of, with_budget
from dubito.inference.progress import Progress
from dubito.model import Model, Target
from dubito.posteriors import Posterior
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, require
from dubito.tensors.randomness import derive_seed, fork_rng, generator


@dataclass(frozen=True)
class Thompson:
    """The best action by a function drawn from the posterior, which is kept for `hold` steps; None keeps it for an episode.

    An agent that keeps its function follows a plan over many steps. With a new function at every step it changes its mind wherever
    it is uncertain.
    """

    hold: int | None = None
    needs_spread: ClassVar[bool] = True  # whether a posterior with a single function is a mistake

    def __post_init__(self):
        at_least(1, hold=self.hold)

    def values(self, posterior: Posterior, observation: Tensor, seed: int, *, episode: int, step: int, total: int) -> Tensor:
        """The values of the actions, [K]. The same seed gives the same mask, member or noise, at the current weights."""
        period = 0 if self.hold is None else step // self.hold
        source = generator(posterior.model.device, seed, "function", episode, period)
        return action_values(posterior.function(source), observation)


@dataclass(frozen=True)
class EpsilonGreedy:
    """The best action by the network at the center of the posterior (dropout off), or a random one with probability epsilon.

    Epsilon falls linearly from `first` to `last` over `steps` steps of the environment.

    >>> [EpsilonGreedy(1.0, 0.1, steps=100).epsilon(n) for n in (0, 50, 1000)]
    [1.0, 0.55, 0.1]
    """

    first: float = 1.0
    last: float = 0.05
    steps: int = 2000
    needs_spread: ClassVar[bool] = False

    def __post_init__(self):
        ordered = 0 <= self.last <= self.first <= 1
        require(ordered, f"first and last must satisfy 0 <= last <= first <= 1; got first={self.first} and last={self.last}")
        at_least(1, steps=self.steps)

    def epsilon(self, total: int) -> float:
        """The probability of a random action after `total` steps."""
        return max(self.last, self.first - (self.first - self.last) * total / self.steps)

    def values(self, posterior: Posterior, observation: Tensor, seed: int, *, episode: int, step: int, total: int) -> Tensor:
        """The values of the actions, [K]: those of the network, or random numbers with probability `epsilon(total)`."""
        source = generator("cpu", seed, "chance", episode, step)
        f = only_network(posterior, "EpsilonGreedy")((observation.unsqueeze(0),)).reshape(-1)
        if float(torch.rand((), generator=source)) < self.epsilon(total):
            return torch.rand(f.shape, generator=source).to(f.device)
        return f


Explore = Thompson | EpsilonGreedy


class Transitions(NamedTuple):
    """Steps of an environment."""

    observation: Tensor  # [B, ...]
    action: Tensor  # [B]
    reward: Tensor  # [B]
    next_observation: Tensor  # [B, ...]
    terminated: Tensor  # [B], 1 where the episode ended there; 0 also where it was only cut off


@dataclass
class Replay:
    """The last `capacity` transitions, in memory that is allocated once, on a device.

    >>> replay = Replay(2)
    >>> for reward in (1.0, 2.0, 3.0):
    ...     replay.add(torch.zeros(4), 0, reward, torch.ones(4), False)
    >>> len(replay), sorted(replay.rows.reward.tolist())
    (2, [2.0, 3.0])
    """

    capacity: int
    device: torch.device | str = "cpu"
    count: int = 0  # transitions ever added
    memory: Transitions | None = None

    def __len__(self) -> int:
        return min(self.count, self.capacity)

    def add(self, observation: Tensor, action: int, reward: float, next_observation: Tensor, terminated: bool) -> None:
        """Store a transition in the place of the oldest one."""
        if self.memory is None:
            shown = observation.new_zeros(self.capacity, *observation.shape).to(self.device)
            number = torch.zeros(self.capacity, device=self.device)
            self.memory = Transitions(shown, number.long(), number, shown.clone(), number.clone())
        values = (observation, action, reward, next_observation, float(terminated))
        for leaf, value in zip(self.memory, values, strict=True):
            leaf[self.count % self.capacity] = value
        self.count += 1

    def fill(self, rows: Transitions, count: int) -> None:
        """Replace the content by `rows`, the last of `count` transitions, as `Replay.rows` returned them."""
        self.memory = Transitions(*(leaf.new_zeros(self.capacity, *leaf.shape[1:]) for leaf in rows))
        for space, leaf in zip(self.memory, rows, strict=True):
            space[: len(leaf)] = leaf
        self.count = count

    @property
    def rows(self) -> Transitions:
        """All stored transitions, in no particular order."""
        require(self.memory is not None, "the replay memory is empty: add a transition first")
        return Transitions(*(leaf[: len(self)] for leaf in self.memory or ()))

    def sample(self, n: int, generator: torch.Generator) -> Transitions:
        """n random transitions, drawn with replacement."""
        which = torch.randint(len(self), (n,), generator=generator, device=generator.device).to(self.device)
        return Transitions(*(leaf[which] for leaf in self.rows))


FOREVER = 2**40  # a number of steps over which a learning rate does not change noticeably


Observation: TypeAlias = Any  # whatever the environment shows; `observe` turns it into a tensor
Data: TypeAlias = tuple[tuple[Tensor, Tensor], Tensor]  # ((observations, actions), values)


class Environment(Protocol):
    """The part of gymnasium's interface that is used."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode: the first observation, and a dict that is ignored."""
        ...

    def step(self, action: Any) -> tuple[Observation, Any, bool, bool, dict[str, Any]]:
        """Act: the observation, the reward, whether the episode terminated, whether it was truncated, and a dict that is ignored."""
        ...


def flat(observation: Observation) -> Tensor:
    """An observation as a vector in float32. For dicts and the like give `QLearning` another function."""
    return torch.as_tensor(observation, dtype=torch.float32).flatten()


@dataclass
class History:
    """The episodes so far, in order."""

    returns: list[float] = field(default_factory=list)  # the sum of the rewards of each episode
    lengths: list[int] = field(default_factory=list)

    def curve(self, every: int, steps: int) -> list[float]:
        """The mean return of the episodes that ended in each window of `every` steps. An empty window repeats the one before it, or is
        NaN before the end of the first episode.

        >>> History([0.0, 1.0, 1.0], [10, 4, 4]).curve(10, 20)
        [0.0, 1.0]
        """
        windows: list[list[float]] = [[] for _ in range(-(-steps // every))]
        end = 0
        for value, length in zip(self.returns, self.lengths, strict=True):
            end += length
            windows[min(len(windows), -(-end // every)) - 1].append(value)
        means, mean = [], math.nan
        for window in windows:
            mean = sum(window) / len(window) if window else mean
            means.append(mean)
        return means


@dataclass(eq=False, repr=False)
class QLearning:
    r"""Deep Q-learning: a network from observations to the value of each action, trained towards

    .. math:: Q(s, a) \leftarrow r + \gamma \max_{a'} \bar Q(s', a'),

    with a replay memory of the last `capacity` steps and a target network :math:`\bar Q`, a copy that is renewed after every `sync`
    learning steps. With `double` the action a' is the best one by the current network (van Hasselt et al. 2016).

    `model` has a Gaussian likelihood and learns from the actions that were taken. `method` learns from mini-batches and has at every
    step a posterior with a center: `MAP`, `MCDropout`, `Variational`, `IVON(hessian_momentum=...)`. Its learning rate stays constant,
    and its epochs are ignored. `explore` is `EpsilonGreedy()`, or `Thompson()`, which needs a posterior other than the point of `MAP`.

    The first `initial` steps are random; after that, a learning step follows every `every` steps. `n_data` sets the weight of the prior
    and is by default the capacity. `observe` turns an observation of the environment into a tensor.

    >>> import dubito
    >>> from dubito.apps.exploration import Maze
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1))
    >>> agent = QLearning(model, dubito.MCDropout(learning_rate=0.01), 4, explore=Thompson(hold=1), discount=0.8, initial=50, sync=20)
    >>> history = agent.learn(Maze("S.G"), steps=150)
    >>> agent.evaluate(Maze("S.G"), episodes=1)
    [1.0]
    """

    model: Model
    method: Method
    actions: int
    _: KW_ONLY
    explore: Explore = Thompson()
    discount: float = 0.99
    capacity: int = 10_000
    batch_size: int = 64
    initial: int = 100
    every: int = 1
    sync: int = 200
    double: bool = True
    n_data: int | None = None
    observe: Callable[[Observation], Tensor] = flat
    seed: int = 0

    def __post_init__(self):
        at_least(2, actions=self.actions)
        at_least(1, capacity=self.capacity, batch_size=self.batch_size, initial=self.initial, every=self.every, sync=self.sync)
        between(0, 1, discount=self.discount, include="both")
        name, traits = type(self.method).__name__, traits_of(self.method)
        stepwise = self.method.data == "batches" and not traits.post_hoc and not traits.starts_anew
        require(stepwise, f"{name} does not learn step by step from mini-batches: use MAP, MCDropout, Variational or IVON")
        for setting in traits.length_settings[:1]:
            word = setting.partition("=")[0]
            raise ValueError(
                f"{word} depends on the number of steps, which is not known here: give {setting}, as in {name}({setting})"
            )
        self.model = action_value_model(self.model)
        self.target = Target(self.model, self.n_data or self.capacity)
        self.replay = Replay(self.capacity, self.model.device)
        self.history = History()
        self.total = self.learned = 0  # steps in the environment, and learning steps
        self._state: Any = None
        self._frozen: Network | None = None
        self._posterior: Posterior | None = None
        self._file: Path | None = None  # where this agent was saved
        self._draws = generator(self.model.device, self.seed, "method")

    @property
    def posterior(self) -> Posterior:
        """The posterior over value functions now; the next learning step changes it."""
        require(self._state is not None, f"there is no posterior yet: the first {self.initial} steps are random")
        if self._posterior is None:
            self._posterior = self.method.posterior(self.target, self._state, store.Draws())
            name = type(self.method).__name__
            way_out = f"the posterior of {name} has no center, which Q-learning needs: use MCDropout or Variational"
            require(self._posterior.center is not None, way_out)
        return self._posterior

    def act(self, observation: Tensor, *, step: int = 0) -> int:
        """The action to try at the given step of the current episode."""
        episode = len(self.history.returns)
        if self.total < self.initial or self._state is None:
            source = generator("cpu", self.seed, "initial", episode, step)
            return int(torch.randint(self.actions, (1,), generator=source))
        observed, total = self._ready(observation), self.total - self.initial
        with torch.no_grad():
            return int(self.explore.values(self.posterior, observed, self.seed, episode=episode, step=step, total=total).argmax())

    def _ready(self, observation: Tensor) -> Tensor:
        return observation.to(next(self.model.network.parameters()))

    def update(self, observation: Tensor, action: int, reward: float, next_observation: Tensor, terminated: bool) -> None:
        """Store a step of the environment, and learn where a learning step is due."""
        require(0 <= int(action) < self.actions, f"actions are 0 to {self.actions - 1}; got {action}")
        finite = math.isfinite(reward) and bool(torch.isfinite(next_observation).all())
        require(finite, f"rewards and observations must be finite; got the reward {reward}, or an observation with NaN")
        self.replay.add(observation, action, reward, next_observation, terminated)
        self.total += 1
        if self.total >= self.initial and self.total % self.every == 0:
            self._learn()

    def _learn(self) -> None:
        batch = self.replay.sample(self.batch_size, generator("cpu", self.seed, "batch", self.learned))
        if self._state is not None and self.learned % self.sync == 0:
            self._freeze()
        data = self._data(batch, self._targets(batch))
        with fork_rng(derive_seed(self.seed, "learn", self.learned)):  # dropout in training draws from the global generator
            if self._state is None:
                check_width(self.model, data[0][0], self.actions)
                self._state = self._initial_state(data, check=True)
                self._check_spread()
                self._freeze()
            self._state, _ = self.method.step(self.target, self._state, [data], self._draws)
        self.learned, self._posterior = self.learned + 1, None

    def _data(self, batch: Transitions, values: Tensor) -> Data:
        return (self._ready(batch.observation), batch.action), values

    def _initial_state(self, data: Data, *, check: bool) -> Any:
        start = Start(self.model.parameters(data[1]), self.model.buffers())
        if check:
            self.model.check(start.params, data, start.buffers)
        return self.method.init(self.target, start, data, self._draws, steps=FOREVER)

    def _check_spread(self) -> None:
        """Refuse Thompson sampling from a point, which would be greedy choice without anyone noticing."""
        if self.explore.needs_spread and self.posterior.certain:
            self._state = self._posterior = None
            way_out = "use MCDropout, Variational or IVON, or explore=EpsilonGreedy()"
            raise ValueError(
                f"Thompson sampling from a point, here that of {type(self.method).__name__}, is greedy choice: {way_out}"
            )

    def _freeze(self) -> None:
        """Copy the current network into the target network."""
        center = only_network(self.posterior, "Q-learning")
        if not all(bool(torch.isfinite(leaf).all()) for leaf in center.params.values()):
            way_out = "lower the learning rate, set clip, or give the likelihood a larger noise"
            raise FloatingPointError(f"the weights are not finite after {self.learned} learning steps: {way_out}")
        self._frozen = Network(self.model, tree.clone(center.params), tree.clone(center.buffers))

    def _targets(self, batch: Transitions) -> Tensor:
        """The values to learn, r + discount * Q(s', a'), [B]; r before the first learning step."""
        if self._frozen is None:
            return batch.reward.clone()
        inputs = (self._ready(batch.next_observation),)
        with torch.no_grad():
            values = self._frozen(inputs)
            chooser = only_network(self.posterior, "Q-learning")(inputs) if self.double else values
            value = values.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        return batch.reward + self.discount * (1 - batch.terminated) * value

    def learn(
        self,
        env: Environment,
        steps: int,
        *,
        file: str | os.PathLike | None = None,
        save_every: float = 60.0,
        until: float | None = None,
        progress: bool | None = None,
    ) -> History:
        """Run episodes until there were `steps` steps in all, earlier calls included; the last episode is completed.

        With a `file` the agent is saved between episodes, every `save_every` seconds and at the end, and the same call on an agent with
        the same settings continues from there. It stops after the episode during which the time `until` (as `time.time()` counts) came.
        """
        path = self._open(file)
        saved = time.monotonic()
        with Progress(f"Q-learning, {type(self.explore).__name__}", steps, show=progress) as bar:
            while self.total < steps and (until is None or time.time() < until):
                seed = derive_seed(self.seed, "episode", len(self.history.returns))
                total, length = self._play(env, seed, lambda observation, step: self.act(observation, step=step), self.update)
                self.history.returns.append(total)
                self.history.lengths.append(length)
                bar.update(self.total, {"return": self.history.returns[-1]})
                if path is not None and time.monotonic() - saved > save_every:
                    self.save(path)
                    saved = time.monotonic()
        if path is not None:
            self.save(path)
        return self.history

    def _open(self, file: str | os.PathLike | None) -> Path | None:
        """The path of a file to save to, whose agent is loaded if there is one."""
        if file is None:
            return None
        path = Path(file).resolve()
        if path.exists() and path != self._file:
            if self.total:
                raise FileExistsError(f"{path} holds an agent, and this one has learned already: give another file")
            self.load(path)
        return path

    def _play(
        self, env: Environment, seed: int, act: Callable[[Tensor, int], int], update: Callable[..., object] | None = None
    ) -> tuple[float, int]:
        """Run an episode: its return and its length."""
        observation, step, total, done = self.observe(env.reset(seed=seed % 2**31)[0]), 0, 0.0, False
        while not done:
            action = act(observation, step)
            shown, reward, terminated, truncated, _ = env.step(action)
            following = self.observe(shown)
            if update is not None:
                update(observation, action, float(reward), following, bool(terminated))
            observation, step, total, done = following, step + 1, total + float(reward), terminated or truncated
        return total, step

    def evaluate(self, env: Environment, episodes: int = 10) -> list[float]:
        """The returns of episodes in which the network at the center of the posterior acts greedily."""
        center = only_network(self.posterior, "Q-learning")

        def best(observation: Tensor, _: int) -> int:
            """The best action by the network."""
            with torch.no_grad():
                return int(center((self._ready(observation).unsqueeze(0),)).argmax())

        return [self._play(env, derive_seed(self.seed, "evaluate", episode), best)[0] for episode in range(episodes)]

    # -- files

    def save(self, file: str | os.PathLike) -> None:
        """Write everything that the next episode depends on."""
        tensors: dict[str, Tensor] = {}
        frozen = None if self._frozen is None else {"params": self._frozen.params, "buffers": self._frozen.buffers}
        content = {
            "state": self._state, "frozen": frozen, "draws": self._draws, "count": self.replay.count,
            "replay": list(self.replay.rows) if len(self.replay) else [], "total": self.total, "learned": self.learned,
            "returns": self.history.returns, "lengths": self.history.lengths,
        }  # fmt: skip
        packed = store.pack(content, tensors)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        store.write(file, tree.move(tensors, "cpu"), {"kind": "q-learning", "about": self._settings(), "agent": packed})
        self._file = Path(file).resolve()

    def _settings(self) -> dict[str, Any]:
        shapes = {name: list(p.shape) for name, p in self.model.network.named_parameters()}
        settings = ("actions", "discount", "batch_size", "initial", "every", "sync", "double", "seed")
        return {
            "network": shapes, "likelihood": repr(self.model.likelihood), "prior": repr(self.model.prior), "only": self.model.only,
            "method": store.describe(with_budget(self.method, FOREVER)), "explore": repr(self.explore),
            "capacity": self.replay.capacity, "n_data": self.target.n_data,
            **{name: getattr(self, name) for name in settings},
        }  # fmt: skip

    def load(self, file: str | os.PathLike) -> None:
        """Continue from a file that an agent with the same settings has saved."""
        tensors, meta = store.read(file)
        stored, settings = meta.get("about", {}), self._settings()
        if meta.get("kind") != "q-learning" or stored != settings:
            different = [name for name, value in settings.items() if stored.get(name) != value]
            raise ValueError(f"{file} holds an agent with another {', '.join(different) or 'kind of file'}: give another file")
        tensors, packed = tree.move(tensors, self.model.device), dict(meta["agent"]["dict"])
        plain = {name: store.unpack(value, tensors) for name, value in packed.items() if name not in ("state", "draws")}
        self.total, self.learned = plain["total"], plain["learned"]
        self.history = History(plain["returns"], plain["lengths"])
        self.replay = Replay(self.replay.capacity, self.model.device)
        if plain["replay"]:
            self.replay.fill(Transitions(*plain["replay"]), plain["count"])
        if plain["frozen"] is not None:
            self._frozen = Network(self.model, **plain["frozen"])
            batch = self.replay.sample(self.batch_size, generator("cpu", self.seed, "batch", 0))
            data = self._data(batch, batch.reward)
            with fork_rng(0):  # a step allocates the buffers of the optimizer
                state = self._initial_state(data, check=False)
                template, _ = self.method.step(self.target, state, [data], self._draws)
            self._state = store.unpack(packed["state"], tensors, template)
        self._draws = store.unpack(packed["draws"], tensors, self._draws)
        self._posterior, self._file = None, Path(file).resolve()
