"""Agents on bandits: runs that are saved and go on, and regret relative to that of uniform choice."""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.apps.bandits.agent import Agent
from dubito.apps.bandits.bandit import Bandit
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.tensors import store

# of agents: what changes what they do
SETTINGS = ("arms", "width", "every", "initial", "members", "epsilon", "standardize", "batch_size", "prior")


@dataclass(frozen=True)
class Run:
    """One agent on one bandit: what it took, and what that cost."""

    bandit: str
    actions: Tensor  # [T]
    regret: Tensor  # [T], of each round, in float64
    uniform: float  # the expected regret over all T rounds of uniform choice
    seconds: float

    @property
    def relative(self) -> float:
        """The regret over all rounds in per cent of that of uniform choice."""
        return 100 * float(self.regret.sum()) / self.uniform if self.uniform else math.nan


class Unfinished(Exception):
    """Time was up before a run was over; what was done is in its file."""


def simulate(
    bandit: Bandit,
    agent: Agent,
    *,
    file: str | os.PathLike | None = None,
    save_every: float = 60.0,
    until: float | None = None,
    progress: bool | None = None,
) -> Run:
    """Play all rounds. With a `file` they are saved every so many seconds and at the end; the same call then goes on from there.

    At the time `until` (as `time.time()` counts) the run is saved, and `Unfinished` raised.

    >>> from dubito.apps.bandits import Uniform, wheel
    >>> simulate(wheel(100), Uniform(5)).actions.shape
    torch.Size([100])
    """
    path = None if file is None else Path(file)
    actions, spent = _resume(path, bandit, agent) if path is not None and path.exists() else ([], 0.0)
    began, saved, fresh = time.monotonic(), time.monotonic(), len(actions) < len(bandit)
    with Progress(f"{type(agent).__name__} on {bandit.name}", len(bandit), show=progress) as bar:
        for t in range(len(actions), len(bandit)):
            if until is not None and time.time() >= until:
                _save(path, bandit, agent, actions, spent + time.monotonic() - began)
                raise Unfinished(f"time was up after {t} of {len(bandit)} rounds")
            context = bandit.contexts[t]
            action = agent.act(context)
            agent.update(context, action, float(bandit.rewards[t, action]))
            actions.append(action)
            bar.update(t + 1, {})
            if time.monotonic() - saved > save_every:
                _save(path, bandit, agent, actions, spent + time.monotonic() - began)
                saved = time.monotonic()
    seconds = spent
    if fresh:
        seconds += time.monotonic() - began
        _save(path, bandit, agent, actions, seconds)
    taken = torch.tensor(actions)
    return Run(bandit.name, taken, bandit.regret(taken), bandit.uniform, seconds)


def _save(path: Path | None, bandit: Bandit, agent: Agent, actions: list[int], seconds: float) -> None:
    if path is None:
        return
    tensors: dict[str, Tensor] = {}
    done = len(actions) == len(bandit)  # of a run that is over nobody needs the agent
    described = store.pack({} if done else agent.state(), tensors, "agent")
    tensors["actions"] = torch.tensor(actions, dtype=torch.long)
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"kind": "bandit run", "bandit": bandit.digest, "agent": described, "seconds": seconds, **_about(agent)}
    store.write(path, tensors, meta)


def _about(agent: Agent) -> dict[str, Any]:
    """What tells an agent from others, as far as can be seen: of a function that chooses methods nothing can."""
    known = {name: getattr(agent, name) for name in SETTINGS if hasattr(agent, name)}
    model, method = getattr(agent, "model", None), getattr(agent, "method", None)
    if isinstance(model, Model):
        shapes = {name: list(p.shape) for name, p in model.network.named_parameters()}
        known |= {"network": shapes, "likelihood": repr(model.likelihood), "prior of the model": repr(model.prior)}
    if method is not None and (hasattr(method, "init") or not callable(method)):
        known["method"] = repr(method)
    return {"name": type(agent).__name__, "seed": getattr(agent, "seed", None), "settings": known}


def _resume(path: Path, bandit: Bandit, agent: Agent) -> tuple[list[int], float]:
    tensors, meta = store.read(path)
    about = {"bandit": bandit.digest, **_about(agent)}
    settings, were = about.pop("settings"), meta.get("settings", {})  # files of before have none
    if meta.get("kind") != "bandit run" or not about.items() <= meta.items():
        raise ValueError(f"{path} is of another run, with other contexts, another agent or another seed: give another file")
    if other := [name for name, value in settings.items() if name in were and were[name] != value]:
        raise ValueError(f"{path} is of an agent with another {', '.join(other)}: give another file or folder")
    actions = tensors["actions"].tolist()
    if len(actions) < len(bandit):
        agent.restore(store.unpack(meta["agent"], tensors))
    return actions, meta["seconds"]


@dataclass
class Standings:
    """Runs of several agents on the same bandits."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def relative(self, agent: str) -> tuple[float, float]:
        """Mean and standard error over runs of the regret relative to uniform choice, which is 100."""
        values = [run.relative for run in self.runs[agent]]
        if not values:
            raise ValueError(f"no run of {agent!r} is over yet")
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        return statistics.mean(values), error

    def curve(self, agent: str) -> Tensor:
        """Regret up to each round, in per cent of that of uniform choice over all rounds: [runs, T]."""
        return torch.stack([100 * run.regret.cumsum(0) / run.uniform for run in self.runs[agent]])

    def __str__(self) -> str:
        """The table, best first."""
        rows = sorted((*self.relative(name), len(runs), name) for name, runs in self.runs.items() if runs)
        lines = [f"{name:<20} {mean:8.2f} ± {error:5.2f}   {n} runs" for mean, error, n, name in rows]
        return "\n".join([f"{'agent':<20} {'regret':>8}   (uniform choice: 100)", *lines])


def compare(
    bandit: Callable[[int], Bandit],
    agents: Mapping[str, Callable[[Bandit, int], Agent]],
    *,
    runs: int = 10,
    folder: str | os.PathLike | None = None,
    until: float | None = None,
    progress: bool | None = None,
    told: Callable[[str, int, Run], Any] | None = None,
) -> Standings:
    """Every agent on the same `runs` bandits. `bandit(seed)` makes the problem of a run, `agents[name](bandit, seed)` the agent.

    With a `folder` each run is a file: what is there is not run again, and what was broken off goes on. Runs that are not over at the
    time `until` are left out. `told` hears of each run as it is done.

    >>> from dubito.apps.bandits import Linear, Uniform, linear
    >>> agents = {"linear": lambda b, seed: Linear(b.arms, 10, seed=seed), "uniform": lambda b, seed: Uniform(b.arms, seed=seed)}
    >>> found = compare(lambda seed: linear(300, seed=seed), agents, runs=2)
    >>> found.relative("linear")[0] < 50 < found.relative("uniform")[0]
    True
    """
    found = Standings({name: [] for name in agents})
    files = {name: re.sub(r"[^A-Za-z0-9_.-]+", "-", name) for name in agents}
    if folder is not None and len(set(files.values())) < len(files):
        raise ValueError(f"the names of the agents make file names that are the same: {', '.join(files.values())}")
    for seed in range(runs):
        problem = bandit(seed)
        for name, make in agents.items():
            file = None if folder is None else Path(folder) / f"{files[name]}-{seed}.safetensors"
            try:
                run = simulate(problem, make(problem, seed), file=file, until=until, progress=progress)
            except Unfinished:
                continue
            found.runs[name].append(run)
            if told is not None:
                told(name, seed, run)
    return found
