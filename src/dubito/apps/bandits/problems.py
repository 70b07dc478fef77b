"""Bandits, and how agents play them.

Problems are generated as published (Riquelme, Tucker & Snoek 2018), or made from labelled data; nothing is downloaded. All rewards are
known in advance, so that regret can be computed. `simulate` plays one agent on one problem, in a run that is saved and resumed;
`compare` plays several, and tells their regret relative to uniform choice.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dubito._moved import renamed
from dubito.apps.bandits.agents import Agent, AgentState
from dubito.inference.progress import Progress
from dubito.tensors import store
from dubito.tensors.checks import between, require
from dubito.tensors.randomness import generator
from dubito.tensors.text import TextTable


@dataclass(frozen=True)
class Bandit:
    r"""T rounds, each with a context and the reward of each of K arms.

    An agent sees the context and the reward of the arm that it takes. Its regret in a round is
    :math:`\max_k E[r_k] - E[r_a]`, a difference of expected rewards, so it does not depend on luck.

    >>> bandit = Bandit(torch.zeros(2, 1), rewards=torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    >>> bandit.regret(torch.tensor([0, 0])), bandit.uniform
    (tensor([0., 3.], dtype=torch.float64), 2.0)
    """

    contexts: Tensor  # [T, d]
    rewards: Tensor  # [T, K], as they are paid
    expected: Tensor | None = None  # [T, K]; None: rewards have no noise
    name: str = ""

    def __post_init__(self):
        contexts, rewards, expected = self.contexts, self.rewards, self.rewards if self.expected is None else self.expected
        shape = list(rewards.shape)
        fits = contexts.ndim >= 2 and len(shape) == 2 and len(contexts) == len(rewards)
        require(fits, f"contexts must be [T, ...] and rewards [T, K]; got {list(contexts.shape)} and {shape}")
        require(shape[1] >= 2 and shape[0], f"a bandit needs at least one round and two arms; got rewards of shape {shape}")
        same = expected.shape == rewards.shape
        require(same, f"expected must have the shape of rewards, {shape}; got {list(expected.shape)}")
        finite = all(bool(torch.isfinite(leaf).all()) for leaf in (contexts, rewards, expected))
        require(finite, "contexts and rewards must be finite: remove the rounds with NaN or infinity")

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def arms(self) -> int:
        """The number of arms, K."""
        return self.rewards.shape[1]

    @property
    def gaps(self) -> Tensor:
        """The regret of every arm in every round, [T, K], in float64."""
        mean = (self.rewards if self.expected is None else self.expected).double()
        return mean.amax(1, keepdim=True) - mean

    @property
    def uniform(self) -> float:
        """The expected regret of uniform choice, summed over all rounds."""
        return float(self.gaps.mean(1).sum())

    def regret(self, actions: Tensor) -> Tensor:
        """The regret of one action for each of the first n rounds, [n]."""
        return self.gaps[: len(actions)].gather(1, actions.cpu().long().unsqueeze(1)).squeeze(1)

    def first(self, n: int) -> Bandit:
        """The first n rounds."""
        expected = None if self.expected is None else self.expected[:n]
        return Bandit(self.contexts[:n], self.rewards[:n], expected, self.name)

    @property
    def digest(self) -> str:
        """A checksum of contexts and rewards."""
        return store.checksum({"contexts": self.contexts, "rewards": self.rewards})


SAFE, BAD, GOOD, REFUSE = 5.0, -35.0, 5.0, 0.0  # rewards of eating (safe, harmful, lucky) and of not eating
HARM = 0.5  # the probability that poison harms
# number of values of each of the 22 attributes of the mushroom data: 117 columns, as published
ATTRIBUTES = (6, 4, 10, 2, 9, 2, 2, 2, 12, 2, 5, 4, 4, 9, 9, 1, 4, 3, 5, 9, 6, 7)
SPECIES = 23  # in the mushroom data


def wheel(rounds: int = 2000, *, delta: float = 0.95, seed: int = 0) -> Bandit:
    r"""The wheel: contexts uniform in the unit disc, five arms, and a large reward that is rare.

    Arms 0 to 3 pay N(1, .05^2), arm 4 N(1.2, .05^2). Where :math:`\lVert x \rVert \ge \delta` one of the first four, chosen by the
    quadrant, pays N(50, .01^2): a share of :math:`1 - \delta^2` of all contexts.

    >>> wheel(100, seed=0).rewards.shape
    torch.Size([100, 5])
    """
    between(0, 1, delta=delta, include="low")
    source = generator("cpu", seed, "wheel")
    radius, angle = torch.rand((2, rounds), generator=source)
    radius, angle = radius.sqrt(), 2 * torch.pi * angle
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.2]).repeat(rounds, 1)
    scale = torch.full_like(expected, 0.05)
    quadrant = 2 * (x[:, 0] <= 0).long() + (x[:, 1] <= 0).long()
    far = (radius >= delta).nonzero().squeeze(1)
    expected[far, quadrant[far]], scale[far, quadrant[far]] = 50.0, 0.01
    noise = torch.randn(expected.shape, generator=source)
    return Bandit(x, expected + scale * noise, expected, f"wheel {delta:g}")


def linear(rounds: int = 2000, *, width: int = 10, arms: int = 8, nonzero: int | None = None, seed: int = 0) -> Bandit:
    """Arm k pays x . beta_k + N(0, (k / 100)^2) with x ~ N(0, 1) and |beta_k| = 1; beta_k has `nonzero` nonzero entries (None: all).

    >>> linear(100, arms=7, nonzero=3).contexts.shape
    torch.Size([100, 10])
    """
    source = generator("cpu", seed, "linear")
    beta = 2 * torch.rand((width, arms), generator=source) - 1
    if nonzero is not None:
        between(1, width, nonzero=nonzero, include="both")
        rank = torch.rand(beta.shape, generator=source).argsort(0).argsort(0)
        beta = beta * (rank < nonzero)
    beta = beta / beta.norm(dim=0)
    x = torch.randn((rounds, width), generator=source)
    noise = 0.01 * torch.arange(1, arms + 1) * torch.randn((rounds, arms), generator=source)
    return Bandit(x, x @ beta + noise, x @ beta, "linear" if nonzero is None else "sparse linear")


def eating(x: Tensor, poisonous: Tensor, rounds: int | None = None, *, seed: int = 0, name: str = "eating") -> Bandit:
    """The mushroom game with any two classes: arm 0 (leave it) pays 0; arm 1 (eat it) pays 5 if it is safe, else 5 or -35.

    Rounds are rows of x drawn with replacement, as published; None takes every row once, in random order. The expected reward of
    eating a poisonous one is -15.

    >>> eating(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), 10).rewards.shape
    torch.Size([10, 2])
    """
    valid = len(x) == len(poisonous) and set(poisonous.unique().tolist()) <= {0, 1}
    require(valid, f"poisonous must be 0 or 1 for every row; got {len(poisonous)} values for {len(x)} rows")
    source, n = generator("cpu", seed, "eating"), len(x)
    rows = torch.randperm(n, generator=source) if rounds is None else torch.randint(n, (rounds,), generator=source)
    bad = poisonous[rows].bool()
    harmed = torch.rand(len(rows), generator=source) < HARM
    eaten = torch.where(bad & harmed, BAD, torch.where(bad, GOOD, SAFE))
    expected = torch.where(bad, HARM * BAD + (1 - HARM) * GOOD, SAFE)
    leave = torch.full_like(eaten, REFUSE)
    return Bandit(x[rows], torch.stack([leave, eaten], 1), torch.stack([leave, expected], 1), name)


def mushrooms(file: str | os.PathLike, rounds: int | None = 2000, *, seed: int = 0) -> Bandit:
    """The mushroom game as published, from a copy of UCI's `agaricus-lepiota.data`: lines of a class, "e" or "p", and 22 letters."""
    with open(file, newline="") as lines:
        table = [row for row in csv.reader(lines) if row]
    if not table or any(row[0] not in ("e", "p") or len(row) != len(table[0]) for row in table):
        raise ValueError(f"{file}: every line must be a class, e or p, and 22 letters, separated by commas")
    columns = []
    for values in list(zip(*table, strict=True))[1:]:
        letters = sorted(set(values))
        columns.append(one_hot(torch.tensor([letters.index(value) for value in values]), len(letters)))
    poisonous = torch.tensor([row[0] == "p" for row in table]).long()
    return eating(torch.cat(columns, 1).float(), poisonous, rounds, seed=seed, name="mushrooms")


def mushroom_like(rounds: int = 2000, *, concentration: float = 0.3, seed: int = 0) -> Bandit:
    """The mushroom game on generated data, where the file is not at hand: 22 attributes with 117 values in all, 23 species.

    Like the published data, these are samples of 23 species. Each species has its own frequencies of the values of each attribute,
    drawn from a Dirichlet distribution with the given `concentration`; every second species is poisonous.

    >>> mushroom_like(50).contexts.shape
    torch.Size([50, 117])
    """
    source = generator("cpu", seed, "mushroom")
    species = torch.randint(SPECIES, (rounds,), generator=source)
    columns = []
    for values in ATTRIBUTES:
        weights = torch._standard_gamma(torch.full((SPECIES, values), concentration), generator=source).clamp_min(1e-30)
        drawn = torch.multinomial(weights[species], 1, generator=source).squeeze(1)
        columns.append(one_hot(drawn, values))
    poisonous = torch.randperm(SPECIES, generator=source)[species] % 2
    return eating(torch.cat(columns, 1).float(), poisonous, None, seed=seed, name="mushroom-like")


def classification(x: Tensor, y: Tensor, rounds: int | None = None, *, seed: int = 0, name: str = "classification") -> Bandit:
    """Labelled data as a bandit: one arm for each class, which pays 1 if it is the label and 0 otherwise.

    Classes are the values that occur in y, in increasing order. Rows come in random order, at most `rounds` of them; contexts are
    standardized, as published.

    >>> classification(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])).rewards.sum(1)
    tensor([1., 1., 1., 1., 1., 1.])
    """
    require(len(x) == len(y) and y.ndim == 1, f"y must have one label for every row; got {list(y.shape)} for {len(x)} rows")
    rows = torch.randperm(len(x), generator=generator("cpu", seed, "rows"))[: len(x) if rounds is None else rounds]
    x = x[rows].flatten(1).float()
    spread = x.std(0, correction=0)
    x = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)
    right = y[rows].unsqueeze(1) == y.unique()  # labels need not begin at 0: those of shuttle are 1 to 7
    return Bandit(x, right.float(), name=name)


def _digits(rounds: int, seed: int) -> Bandit:
    from sklearn.datasets import load_digits

    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    return classification(x, y, rounds, seed=seed, name="digits")


def _tumours(rounds: int, seed: int) -> Bandit:
    from sklearn.datasets import load_breast_cancer

    x, benign = map(torch.from_numpy, load_breast_cancer(return_X_y=True))
    return eating(((x - x.mean(0)) / x.std(0)).float(), 1 - benign, rounds, seed=seed, name="tumours")


def _mnist(rounds: int, seed: int) -> Bandit:
    from dubito.evaluation.data import mnist

    train = mnist("train")
    return classification(train.x, train.y, rounds, seed=seed, name="mnist")


# name: (rounds, seed) -> Bandit. `tumours` is the mushroom game with breast cancer data of scikit-learn; `mnist` needs DUBITO_DATA
PROBLEMS: dict[str, Callable[[int, int], Bandit]] = {
    "mushroom_like": lambda rounds, seed: mushroom_like(rounds, seed=seed),
    "wheel": lambda rounds, seed: wheel(rounds, seed=seed),
    "wheel_0.5": lambda rounds, seed: wheel(rounds, delta=0.5, seed=seed),
    "linear": lambda rounds, seed: linear(rounds, seed=seed),
    "sparse_linear": lambda rounds, seed: linear(rounds, arms=7, nonzero=3, seed=seed),
    "digits": _digits,
    "tumours": _tumours,
    "mnist": _mnist,
}


# attributes of an agent that change its choices: a saved run is resumed only if they are the same
SETTINGS = ("arms", "width", "every", "initial", "members", "epsilon", "standardize", "batch_size", "prior")


@dataclass(frozen=True)
class Run:
    """The actions of one agent on one bandit, and their regret."""

    bandit: str
    actions: Tensor  # [T]
    regret: Tensor  # [T], of each round, in float64
    uniform: float  # the expected regret of uniform choice over all T rounds
    seconds: float

    @property
    def relative(self) -> float:
        """The regret over all rounds in percent of that of uniform choice."""
        return 100 * float(self.regret.sum()) / self.uniform if self.uniform else math.nan


class UnfinishedRun(Exception):
    """The time limit was reached before the last round; the file of the run holds what was done."""


def simulate(
    bandit: Bandit,
    agent: Agent,
    *,
    file: str | os.PathLike | None = None,
    save_every: float = 60.0,
    until: float | None = None,
    progress: bool | None = None,
) -> Run:
    """Play all rounds. With a `file` the run is saved every `save_every` seconds and at the end; the same call resumes it.

    At the time `until` (as `time.time()` counts) the run is saved and `UnfinishedRun` is raised.

    >>> from dubito.apps.bandits import Uniform, wheel
    >>> simulate(wheel(100), Uniform(5)).actions.shape
    torch.Size([100])
    """
    path = None if file is None else Path(file)
    actions, spent = _resume(path, bandit, agent) if path is not None and path.exists() else ([], 0.0)
    began = saved = time.monotonic()
    rounds = range(len(actions), len(bandit))

    def _save_now() -> float:
        seconds = spent + time.monotonic() - began
        if path is not None:
            _save(path, bandit, agent, actions, seconds)
        return seconds

    with Progress(f"{type(agent).__name__} on {bandit.name}", len(bandit), show=progress) as bar:
        for t in rounds:
            if until is not None and time.time() >= until:
                _save_now()
                raise UnfinishedRun(f"the time limit was reached after {t} of {len(bandit)} rounds")
            context = bandit.contexts[t]
            action = agent.act(context)
            agent.update(context, action, float(bandit.rewards[t, action]))
            actions.append(action)
            bar.update(t + 1, {})
            if time.monotonic() - saved > save_every:
                _save_now()
                saved = time.monotonic()
    seconds, chosen = _save_now() if rounds else spent, torch.tensor(actions)
    return Run(bandit.name, chosen, bandit.regret(chosen), bandit.uniform, seconds)


def _save(path: Path, bandit: Bandit, agent: Agent, actions: list[int], seconds: float) -> None:
    tensors: dict[str, Tensor] = {}
    complete = len(actions) == len(bandit)  # the agent is only needed to resume
    packed = store.pack({} if complete else agent.state(), tensors, "agent")
    tensors["actions"] = torch.tensor(actions, dtype=torch.long)
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"kind": "bandit run", "bandit": bandit.digest, "agent": packed, "seconds": seconds, **_identity(agent)}
    store.write(path, tensors, meta)


def _identity(agent: Agent) -> AgentState:
    """Name, seed and settings of an agent, as far as they can be compared: a function that chooses methods cannot."""
    settings = {name: getattr(agent, name) for name in SETTINGS if hasattr(agent, name)}
    model, method = getattr(agent, "model", None), getattr(agent, "method", None)
    if model is not None:
        shapes = {name: list(p.shape) for name, p in model.network.named_parameters()}
        settings |= {"network": shapes, "likelihood": repr(model.likelihood), "prior of the model": repr(model.prior)}
    if method is not None and (hasattr(method, "init") or not callable(method)):
        settings["method"] = store.describe(method)
    return {"name": type(agent).__name__, "seed": getattr(agent, "seed", None), "settings": settings}


def _resume(path: Path, bandit: Bandit, agent: Agent) -> tuple[list[int], float]:
    tensors, meta = store.read(path)
    identity = {"kind": "bandit run", "bandit": bandit.digest, **_identity(agent)}
    settings, stored = identity.pop("settings"), meta.get("settings", {})  # the oldest files have no settings
    if not identity.items() <= meta.items():
        raise ValueError(f"{path} holds another run, with other contexts, another agent or another seed: give another file")
    if different := [name for name, value in settings.items() if name in stored and stored[name] != value]:
        raise ValueError(f"{path} holds a run of an agent with another {', '.join(different)}: give another file or folder")
    actions = tensors["actions"].tolist()
    if len(actions) < len(bandit):
        agent.restore(store.unpack(meta["agent"], tensors))
    return actions, meta["seconds"]


@dataclass
class Standings:
    """Runs of several agents on the same bandits, by the name of the agent."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def relative(self, agent: str) -> tuple[float, float]:
        """Mean and standard error over runs of the regret in percent of that of uniform choice."""
        values = [run.relative for run in self.runs[agent]]
        require(values, f"no run of {agent!r} is complete yet")
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        return statistics.mean(values), error

    def curve(self, agent: str) -> Tensor:
        """Cumulative regret after each round, in percent of that of uniform choice over all rounds: [runs, T]."""
        return torch.stack([100 * run.regret.cumsum(0) / run.uniform for run in self.runs[agent]])

    def __str__(self) -> str:
        """A table of the agents, best first."""
        rows = sorted((*self.relative(name), len(runs), name) for name, runs in self.runs.items() if runs)
        cells = [(name, f"{mean:.2f} ± {error:.2f}", f"{n} runs") for mean, error, n, name in rows]
        return str(TextTable(cells, ("agent", "regret", ""), title="Regret in percent of that of uniform choice", right=[1]))


def compare(
    bandit: Callable[[int], Bandit],
    agents: Mapping[str, Callable[[Bandit, int], Agent]],
    *,
    runs: int = 10,
    folder: str | os.PathLike | None = None,
    until: float | None = None,
    progress: bool | None = None,
    told: Callable[[str, int, Run], object] | None = None,
) -> Standings:
    """Play every agent on the same `runs` bandits. `bandit(seed)` makes a bandit, `agents[name](bandit, seed)` an agent.

    With a `folder` each run is a file: complete runs are read, and interrupted ones are resumed. Runs that are not complete at the
    time `until` are left out. `told(name, seed, run)` is called after each run.

    >>> from dubito.apps.bandits import Linear, Uniform, linear
    >>> agents = {"linear": lambda b, seed: Linear(b.arms, 10, seed=seed), "uniform": lambda b, seed: Uniform(b.arms, seed=seed)}
    >>> standings = compare(lambda seed: linear(300, seed=seed), agents, runs=2)
    >>> standings.relative("linear")[0] < 50 < standings.relative("uniform")[0]
    True
    """
    standings = Standings({name: [] for name in agents})
    files = {name: re.sub(r"[^A-Za-z0-9_.-]+", "-", name) for name in agents}
    distinct = folder is None or len(set(files.values())) == len(files)
    require(distinct, f"agents need different file names, of letters, digits and _.-; got {', '.join(files.values())}")
    for seed in range(runs):
        problem = bandit(seed)
        for name, make in agents.items():
            file = None if folder is None else Path(folder) / f"{files[name]}-{seed}.safetensors"
            try:
                run = simulate(problem, make(problem, seed), file=file, until=until, progress=progress)
            except UnfinishedRun:
                continue
            standings.runs[name].append(run)
            if told is not None:
                told(name, seed, run)
    return standings


__getattr__ = renamed(__name__, {"Unfinished": "UnfinishedRun"})
