"""What a bandit is played by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dubito.tensors.randomness import generator


class Agent(Protocol):
    """It is asked for an arm, and told what that arm paid. A draw depends on its seed and on how often it was asked.

    Contexts are tensors, or NumPy arrays."""

    def act(self, context: Tensor) -> int:
        """The arm to take in a context, [d]."""
        ...

    def update(self, context: Tensor, action: int, reward: float) -> None:
        """Take in what an arm paid; it need not be the one that `act` named."""
        ...

    def state(self) -> dict[str, Any]:
        """All it knows, as tensors, numbers, lists and dicts."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another, made alike, had come to when it gave its `state`."""
        ...


def first(counts: Sequence[int], initial: int, waiting: int = 0) -> int | None:
    """The arm to try while some arm was taken fewer than `initial` times: one that was taken least, or None.

    `waiting` choices were made whose rewards are not known yet: they go round.

    >>> first([2, 1, 1], 2), first([2, 1, 1], 2, waiting=1), first([2, 2, 2], 2)
    (1, 2, None)
    """
    least = min(counts)
    few = [arm for arm, count in enumerate(counts) if count == least]
    return few[waiting % len(few)] if least < initial else None


@dataclass
class Log:
    """What an agent was told, in its order."""

    contexts: list[Tensor] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.taken = Counter(self.actions)  # how often each arm was

    def __len__(self) -> int:
        return len(self.actions)

    def add(self, context: Tensor, action: int, reward: float, arms: int) -> None:
        action, reward, context = int(action), float(reward), torch.as_tensor(context)
        if not 0 <= action < arms:
            raise ValueError(f"the arms are 0 to {arms - 1}; got {action}")
        if not torch.isfinite(torch.tensor(reward)) or not bool(torch.isfinite(context).all()):
            raise ValueError("a context or a reward is NaN or infinite: nothing was taken in")
        if self.contexts and self.contexts[0].shape != context.shape:
            raise ValueError(f"contexts so far are {list(self.contexts[0].shape)}, and this one is {list(context.shape)}")
        self.contexts.append(context.detach().cpu())
        self.actions.append(action)
        self.taken[action] += 1
        self.rewards.append(reward)

    def tensors(self, n: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts [n, d], actions [n] and rewards [n] in float64, of the first n rounds."""
        return (
            torch.stack(self.contexts[:n]),
            torch.tensor(self.actions[:n]),
            torch.tensor(self.rewards[:n], dtype=torch.float64),
        )

    def state(self) -> dict[str, Any]:
        return dict(zip(("contexts", "actions", "rewards"), self.tensors(), strict=True)) if len(self) else {}

    @staticmethod
    def of(state: dict[str, Any]) -> Log:
        if not state:
            return Log()
        return Log(list(state["contexts"]), state["actions"].tolist(), state["rewards"].tolist())


class Uniform:
    """Any arm, each as likely as the others: what all are compared with.

    >>> agent = Uniform(3)
    >>> sorted({agent.act(torch.zeros(1)) for _ in range(50)})
    [0, 1, 2]
    """

    def __init__(self, arms: int, *, seed: int = 0):
        self.arms, self.seed, self.acts = arms, seed, 0

    def act(self, context: Tensor) -> int:
        self.acts += 1
        return int(torch.randint(self.arms, (1,), generator=generator("cpu", self.seed, "uniform", self.acts)))

    def update(self, context: Tensor, action: int, reward: float) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"acts": self.acts}

    def restore(self, state: dict[str, Any]) -> None:
        self.acts = state["acts"]
