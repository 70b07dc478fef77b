"""The interface of an agent, the log of its rewards, and the agent that chooses at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from dubito.tensors.checks import require
from dubito.tensors.randomness import generator

AgentState: TypeAlias = dict[str, Any]  # tensors, numbers, lists and dicts, as `tensors.store.pack` writes them


class Agent(Protocol):
    """An agent chooses an arm in a context and learns from the reward of that arm. Contexts are tensors or NumPy arrays.

    Its random numbers depend on its seed and on the number of calls of `act` so far.
    """

    def act(self, context: Tensor) -> int:
        """The arm to take in a context [d]."""
        ...

    def update(self, context: Tensor, action: int, reward: float) -> None:
        """Learn from the reward of an arm, which need not be the arm that `act` returned."""
        ...

    def state(self) -> AgentState:
        """Everything the agent has learned."""
        ...

    def restore(self, state: AgentState) -> None:
        """Continue from the `state` of an agent with the same settings."""
        ...


def arm_to_try(counts: Sequence[int], initial: int, waiting: int = 0) -> int | None:
    """The next arm while some arm was taken fewer than `initial` times: one of those taken least often. Otherwise None.

    `waiting` is the number of choices whose rewards are not known yet; the least taken arms are then cycled through.

    >>> arm_to_try([2, 1, 1], 2), arm_to_try([2, 1, 1], 2, waiting=1), arm_to_try([2, 2, 2], 2)
    (1, 2, None)
    """
    least = min(counts)
    arms = [arm for arm, count in enumerate(counts) if count == least]
    return arms[waiting % len(arms)] if least < initial else None


def check_reward(context: Tensor, action: int, reward: float, arms: int) -> tuple[Tensor, int, float]:
    """The arguments of `Agent.update` as a tensor on the CPU, an int and a float; raises unless the arm exists and all is finite."""
    context, action, reward = torch.as_tensor(context).detach().cpu(), int(action), float(reward)
    require(0 <= action < arms, f"arms are 0 to {arms - 1}; got {action}")
    finite = torch.tensor(reward).isfinite() & context.isfinite().all()
    require(
        finite, f"contexts and rewards must be finite; got the reward {reward} and a context with NaN or infinity in one of them"
    )
    return context, action, reward


@dataclass
class Log:
    """The contexts, actions and rewards that an agent was given, in order."""

    contexts: list[Tensor] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.counts = Counter(self.actions)

    def __len__(self) -> int:
        return len(self.actions)

    def add(self, context: Tensor, action: int, reward: float, arms: int) -> None:
        """Append a round, after checking it."""
        context, action, reward = check_reward(context, action, reward, arms)
        shape = self.contexts[0].shape if self.contexts else context.shape
        require(shape == context.shape, f"contexts so far have the shape {list(shape)}; got {list(context.shape)}")
        self.contexts.append(context)
        self.actions.append(action)
        self.rewards.append(reward)
        self.counts[action] += 1

    def tensors(self, n: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts [n, d], actions [n] and rewards [n] in float64, of the first n rounds."""
        rewards = torch.tensor(self.rewards[:n], dtype=torch.float64)
        return torch.stack(self.contexts[:n]), torch.tensor(self.actions[:n]), rewards

    def state(self) -> AgentState:
        """The three tensors by name; empty for an empty log."""
        return dict(zip(("contexts", "actions", "rewards"), self.tensors(), strict=True)) if len(self) else {}

    @staticmethod
    def of(state: AgentState) -> Log:
        """The log with the given `state`."""
        return Log(list(state["contexts"]), state["actions"].tolist(), state["rewards"].tolist()) if state else Log()


class Uniform:
    """Takes every arm with the same probability: the reference of relative regret.

    >>> agent = Uniform(3)
    >>> sorted({agent.act(torch.zeros(1)) for _ in range(50)})
    [0, 1, 2]
    """

    def __init__(self, arms: int, *, seed: int = 0):
        self.arms, self.seed, self.acts = arms, seed, 0

    def act(self, context: Tensor) -> int:
        """A random arm."""
        self.acts += 1
        return int(torch.randint(self.arms, (1,), generator=generator("cpu", self.seed, "uniform", self.acts)))

    def update(self, context: Tensor, action: int, reward: float) -> None:
        """Does nothing."""

    def state(self) -> AgentState:
        """The number of choices so far."""
        return {"acts": self.acts}

    def restore(self, state: AgentState) -> None:
        """Continue after as many choices as `state` says."""
        self.acts = state["acts"]
