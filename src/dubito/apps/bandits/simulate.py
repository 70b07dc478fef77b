"""Play agents on bandits: runs that are saved and resumed, and regret relative to uniform choice."""

from __future__ import annotations

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

from dubito._moved import renamed
from dubito.apps.bandits.agents import Agent, AgentState
from dubito.apps.bandits.problems import Bandit
from dubito.inference.progress import Progress
from dubito.tensors import store
from dubito.tensors.checks import require
from dubito.tensors.text import TextTable

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
        settings["method"] = repr(method)
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
