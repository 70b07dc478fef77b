"""Deep Q-learning by any method that descends, with exploration from its posterior."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dubito.apps.action_values import action_value_model, check_width
from dubito.apps.exploration.explore import Explore, Thompson
from dubito.apps.exploration.replay import Replay, Transitions
from dubito.apps.network import Network, only_network
from dubito.inference.method import Method, Start, traits_of
from dubito.inference.progress import Progress
from dubito.model import Model, Target
from dubito.posteriors import Point, Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.randomness import derive, forked, generator

FOREVER = 2**40  # steps of a learning rate that stays


class Environment(Protocol):
    """As much of gymnasium's interface as is used."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


def flat(seen: Any) -> Tensor:
    """What an environment shows as a vector of float32; for dicts and the like give `QLearning` a function of your own."""
    return torch.as_tensor(seen, dtype=torch.float32).flatten()


@dataclass
class History:
    """Episodes, in their order."""

    returns: list[float] = field(default_factory=list)  # rewards summed
    lengths: list[int] = field(default_factory=list)

    def curve(self, every: int, steps: int) -> list[float]:
        """The mean return of the episodes that ended in each window of so many steps; an empty window has that before it, and NaN where
        no episode has ended yet.

        >>> History([0.0, 1.0, 1.0], [10, 4, 4]).curve(10, 20)
        [0.0, 1.0]
        """
        windows: list[list[float]] = [[] for _ in range(-(-steps // every))]
        end = 0
        for value, length in zip(self.returns, self.lengths, strict=True):
            end += length
            windows[min(len(windows), -(-end // every)) - 1].append(value)
        found: list[float] = []
        for window in windows:
            found.append(sum(window) / len(window) if window else (found[-1] if found else math.nan))
        return found


class QLearning:
    r"""Deep Q-learning: a network from what is seen to the value of each action, fitted to what rewards and its own foresight say,

    .. math:: Q(s, a) \leftarrow r + \gamma \max_{a'} \bar Q(s', a'),

    with a replay of the last `capacity` steps and a frozen copy :math:`\bar Q`, renewed every `sync` learning steps. With `double`
    the action a' is the one that the present network would take (van Hasselt et al. 2016).

    `model` has a Gaussian likelihood, and learns from the action that was taken. `method` is one that takes mini-batches and always
    has a posterior with a centre: `MAP`, `MCDropout`, `Variational`, `IVON(hessian_momentum=...)`; its learning rate stays constant,
    and its epochs do not count. `explore` is `Thompson()`, for which the posterior has to be more than the point that `MAP` gives, or
    `EpsilonGreedy()`.

    The first `initial` steps are random; then there is a learning step `every` so many. `n_data`, for the prior's weight, is the
    capacity if not given. `observe` turns what the environment shows into a tensor.

    >>> import dubito
    >>> from dubito.apps.exploration import Maze
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1))
    >>> agent = QLearning(model, dubito.MCDropout(learning_rate=0.01), 4, explore=Thompson(hold=1), discount=0.8, initial=50, sync=20)
    >>> history = agent.learn(Maze("S.G"), steps=150)
    >>> agent.evaluate(Maze("S.G"), episodes=1)
    [1.0]
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        actions: int,
        *,
        explore: Explore = Thompson(),
        discount: float = 0.99,
        capacity: int = 10_000,
        batch_size: int = 64,
        initial: int = 100,
        every: int = 1,
        sync: int = 200,
        double: bool = True,
        n_data: int | None = None,
        observe: Callable[[Any], Tensor] = flat,
        seed: int = 0,
    ):
        if actions < 2 or min(capacity, batch_size, initial, every, sync) < 1 or not 0 <= discount <= 1:
            raise ValueError(
                "there are at least two actions, capacity, batch_size, initial, every and sync are at least 1, and discount is in "
                f"[0, 1]; got {actions}, {capacity}, {batch_size}, {initial}, {every}, {sync} and {discount}"
            )
        traits = traits_of(method)
        if method.data != "batches" or traits.post_hoc or traits.starts_anew:
            raise ValueError(
                f"{type(method).__name__} does not learn step by step from mini-batches at one setting of the weights: use MAP, "
                "MCDropout, Variational or IVON"
            )
        if traits.length_settings:
            setting = traits.length_settings[0]
            raise ValueError(
                f"{setting.partition('=')[0]} depends on the total number of steps, which is not known here: give {setting}, as in "
                f"{type(method).__name__}({setting})"
            )
        self.model, self.method, self.actions, self.explore = action_value_model(model), method, actions, explore
        self.discount, self.batch_size, self.initial, self.every = discount, batch_size, initial, every
        self.sync, self.double, self.observe, self.seed = sync, double, observe, seed
        self.target = Target(self.model, n_data or capacity)
        self.replay = Replay(capacity, self.model.device)
        self.history = History()
        self.total = self.learned = 0  # steps of the environment, and of learning
        self._state: Any = None
        self._frozen: Network | None = None
        self._posterior: Posterior | None = None
        self._file: Path | None = None  # where this very agent is saved
        self._draws = generator(self.model.device, seed, "method")

    @property
    def posterior(self) -> Posterior:
        """Over value functions, as it stands; the next learning step changes it."""
        if self._state is None:
            raise ValueError(f"nothing was learned yet: the first {self.initial} steps are random")
        if self._posterior is None:
            self._posterior = self.method.posterior(self.target, self._state, store.Draws())
            if isinstance(self._posterior, Samples):
                raise ValueError(
                    f"{type(self.method).__name__} has no centre from which to look ahead: use MCDropout or Variational"
                )
        return self._posterior

    def act(self, seen: Tensor, *, step: int = 0) -> int:
        """The action to try at the given step of the present episode."""
        episode = len(self.history.returns)
        if self.total < self.initial or self._state is None:
            source = generator("cpu", self.seed, "initial", episode, step)
            return int(torch.randint(self.actions, (1,), generator=source))
        with torch.no_grad():
            values = self.explore.values(
                self.posterior, self._ready(seen), self.seed, episode=episode, step=step, total=self.total - self.initial
            )
        return int(values.argmax())

    def _ready(self, seen: Tensor) -> Tensor:
        return seen.to(next(self.model.network.parameters()))

    def update(self, seen: Tensor, action: int, reward: float, after: Tensor, over: bool) -> None:
        """Take in a step of the environment, and learn if it is time."""
        if not 0 <= int(action) < self.actions:
            raise ValueError(f"the actions are 0 to {self.actions - 1}; got {action}")
        if not math.isfinite(reward) or not bool(torch.isfinite(after).all()):
            raise ValueError("the environment gives a reward, or shows something, that is NaN or infinite: it was not taken in")
        self.replay.add(seen, action, reward, after, over)
        self.total += 1
        if self.total >= self.initial and self.total % self.every == 0:
            self._learn()

    def _learn(self) -> None:
        batch = self.replay.sample(self.batch_size, generator("cpu", self.seed, "batch", self.learned))
        if self._state is not None and self.learned % self.sync == 0:
            self._freeze()
        y = self._foreseen(batch)
        data = ((self._ready(batch.seen), batch.action), y)
        with forked(derive(self.seed, "learn", self.learned)):  # dropout in training draws from the global generator
            if self._state is None:
                check_width(self.model, data[0][0], self.actions)
                start = Start(self.model.parameters(y), self.model.buffers())
                self.model.check(start.params, data, start.buffers)
                self._state = self.method.init(self.target, start, data, self._draws, steps=FOREVER)
                self._check_spread()
                self._freeze()
            self._state, _ = self.method.step(self.target, self._state, [data], self._draws)
        self.learned, self._posterior = self.learned + 1, None

    def _check_spread(self) -> None:
        """A point has one function: what was meant to be Thompson sampling would be greedy choice, and nobody would see it."""
        if isinstance(self.explore, Thompson) and isinstance(self.posterior, Point):
            self._state = self._posterior = None
            raise ValueError(
                f"the posterior of {type(self.method).__name__} is a point here, with one function, and Thompson sampling from it "
                "would be greedy choice: use MCDropout, Variational or IVON, or explore=EpsilonGreedy()"
            )

    def _freeze(self) -> None:
        centre = only_network(self.posterior, "Q-learning")
        if not all(bool(torch.isfinite(leaf).all()) for leaf in centre.params.values()):
            raise FloatingPointError(
                f"the weights are not finite after {self.learned} learning steps: lower the learning rate, set clip, or give the "
                "likelihood a larger noise"
            )
        self._frozen = Network(self.model, tree.clone(centre.params), tree.clone(centre.buffers))

    def _foreseen(self, batch: Transitions) -> Tensor:
        """r + discount * the value of what comes then, [B]."""
        after = (self._ready(batch.after),)
        with torch.no_grad():
            if self._frozen is None:  # before the first step there is nothing to foresee by
                return batch.reward.clone()
            frozen = self._frozen(after)
            if self.double:
                best = only_network(self.posterior, "Q-learning")(after).argmax(-1, keepdim=True)
                value = frozen.gather(-1, best).squeeze(-1)
            else:
                value = frozen.amax(-1)
        return batch.reward + self.discount * (1 - batch.over) * value

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
        """Episodes until there were so many steps in all, of this call and those before it; the last may end later.

        With a `file` it is saved between episodes, every so many seconds and at the end, and the same call on an agent that was made
        alike goes on from there. It stops after the episode in which the time `until` (as `time.time()` counts) has come.
        """
        path = None if file is None else Path(file).resolve()
        if path is not None and path.exists() and path != self._file:
            if self.total:
                raise FileExistsError(f"{path} holds an agent, and this one has learned already: give another file")
            self.load(path)
        saved = time.monotonic()
        with Progress(f"Q-learning, {type(self.explore).__name__}", steps, show=progress) as bar:
            while self.total < steps and (until is None or time.time() < until):
                self._episode(env)
                bar.update(self.total, {"return": self.history.returns[-1]})
                if path is not None and time.monotonic() - saved > save_every:
                    self.save(path)
                    saved = time.monotonic()
        if path is not None:
            self.save(path)
        return self.history

    def _episode(self, env: Environment) -> None:
        episode, step, earned, going = len(self.history.returns), 0, 0.0, True
        seen = self.observe(env.reset(seed=derive(self.seed, "episode", episode) % 2**31)[0])
        while going:
            action = self.act(seen, step=step)
            shown, reward, over, cut, _ = env.step(action)
            after = self.observe(shown)
            self.update(seen, action, float(reward), after, bool(over))
            seen, step, earned, going = after, step + 1, earned + float(reward), not (over or cut)
        self.history.returns.append(earned)
        self.history.lengths.append(step)

    def evaluate(self, env: Environment, episodes: int = 10) -> list[float]:
        """Returns of episodes in which the network at the posterior's centre does what it takes for best."""
        centre, found = only_network(self.posterior, "Q-learning"), []
        for episode in range(episodes):
            seen, going, earned = env.reset(seed=derive(self.seed, "evaluate", episode) % 2**31)[0], True, 0.0
            while going:
                with torch.no_grad():
                    action = int(centre((self._ready(self.observe(seen)).unsqueeze(0),)).argmax())
                seen, reward, over, cut, _ = env.step(action)
                earned, going = earned + float(reward), not (over or cut)
            found.append(earned)
        return found

    # -- files

    def save(self, file: str | os.PathLike) -> None:
        """All that is needed to go on with the next episode."""
        tensors: dict[str, Tensor] = {}
        frozen = None if self._frozen is None else {"params": self._frozen.params, "buffers": self._frozen.buffers}
        known = {
            "state": self._state, "frozen": frozen, "draws": self._draws, "count": self.replay.count,
            "replay": list(self.replay.rows) if len(self.replay) else [], "total": self.total, "learned": self.learned,
            "returns": self.history.returns, "lengths": self.history.lengths,
        }  # fmt: skip
        described = store.pack(known, tensors)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        store.write(file, tree.move(tensors, "cpu"), {"kind": "q-learning", "about": self._about(), "agent": described})
        self._file = Path(file).resolve()

    def _about(self) -> dict[str, Any]:
        shapes = {name: list(p.shape) for name, p in self.model.network.named_parameters()}
        settings = ("actions", "discount", "batch_size", "initial", "every", "sync", "double", "seed")
        return {
            "network": shapes, "likelihood": repr(self.model.likelihood), "prior": repr(self.model.prior), "only": self.model.only,
            "method": repr(self.method), "explore": repr(self.explore), "capacity": self.replay.capacity, "n_data": self.target.n_data,
            **{name: getattr(self, name) for name in settings},
        }  # fmt: skip

    def load(self, file: str | os.PathLike) -> None:
        """Go on where another agent, made alike, was saved."""
        tensors, meta = store.read(file)
        if meta.get("kind") != "q-learning" or meta["about"] != self._about():
            was = meta.get("about", {})
            other = [name for name, value in self._about().items() if was.get(name) != value]
            raise ValueError(f"{file} is of another agent, with another {', '.join(other) or 'kind of file'}: give another file")
        tensors, described = tree.move(tensors, self.model.device), meta["agent"]
        parts = dict(described["dict"])
        plain = {name: store.unpack(part, tensors) for name, part in parts.items() if name not in ("state", "draws")}
        self.total, self.learned = plain["total"], plain["learned"]
        self.history = History(plain["returns"], plain["lengths"])
        self.replay = Replay(self.replay.capacity, self.model.device, plain["count"])
        if plain["replay"]:
            rows = Transitions(*plain["replay"])
            room = [leaf.new_zeros(self.replay.capacity, *leaf.shape[1:]) for leaf in rows]
            for space, leaf in zip(room, rows, strict=True):
                space[: len(leaf)] = leaf
            self.replay.kept = Transitions(*room)
        if plain["frozen"] is not None:
            self._frozen = Network(self.model, plain["frozen"]["params"], plain["frozen"]["buffers"])
            batch = self.replay.sample(self.batch_size, generator("cpu", self.seed, "batch", 0))
            data = ((self._ready(batch.seen), batch.action), batch.reward)
            with forked(0):
                start = Start(self.model.parameters(batch.reward), self.model.buffers())
                template = self.method.init(self.target, start, data, self._draws, steps=FOREVER)
                self._state, _ = self.method.step(self.target, template, [data], self._draws)  # an optimiser that has its slots
            self._state = store.unpack(parts["state"], tensors, self._state)
        self._draws = store.unpack(parts["draws"], tensors, self._draws)
        self._posterior, self._file = None, Path(file).resolve()
