"""A contextual bandit whose answers are all known beforehand, so that regret can be counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.tensors import store


@dataclass(frozen=True)
class Bandit:
    r"""T rounds: a context, and what each of K arms would pay in it.

    An agent sees the context and the reward of the arm that it takes. Its regret in a round is
    :math:`\max_k E[r_k] - E[r_a]`, of expected rewards, so that luck has no part in it.

    >>> bandit = Bandit(torch.zeros(2, 1), rewards=torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    >>> bandit.regret(torch.tensor([0, 0])), bandit.uniform
    (tensor([0., 3.], dtype=torch.float64), 2.0)
    """

    contexts: Tensor  # [T, d]
    rewards: Tensor  # [T, K], as they are paid
    expected: Tensor | None = None  # [T, K]; None: rewards have no noise
    name: str = ""

    def __post_init__(self):
        if self.contexts.ndim < 2 or self.rewards.ndim != 2 or len(self.contexts) != len(self.rewards):
            raise ValueError(
                "a bandit has contexts [T, ...] and rewards [T, K], one for each arm; got "
                f"{list(self.contexts.shape)} and {list(self.rewards.shape)}"
            )
        if self.rewards.shape[1] < 2 or not len(self.contexts):
            raise ValueError(f"a bandit has at least one round and two arms; got rewards of shape {list(self.rewards.shape)}")
        if self.expected is not None and self.expected.shape != self.rewards.shape:
            raise ValueError(
                f"expected rewards have the shape of the rewards, {list(self.rewards.shape)}; got {list(self.expected.shape)}"
            )
        for what in (self.contexts, self.rewards, *([] if self.expected is None else [self.expected])):
            if not bool(torch.isfinite(what).all()):
                raise ValueError("contexts and rewards are finite numbers: remove the rounds with NaN")

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def arms(self) -> int:
        return self.rewards.shape[1]

    @property
    def gaps(self) -> Tensor:
        """The regret of every arm in every round, [T, K], in float64."""
        mean = (self.rewards if self.expected is None else self.expected).double()
        return mean.amax(1, keepdim=True) - mean

    @property
    def uniform(self) -> float:
        """The expected regret over all rounds of one who chooses at random: what others are measured by."""
        return float(self.gaps.mean(1).sum())

    def regret(self, actions: Tensor) -> Tensor:
        """The regret of the actions of the first rounds, one for each, [n]."""
        return self.gaps[: len(actions)].gather(1, actions.cpu().long().unsqueeze(1)).squeeze(1)

    def first(self, n: int) -> Bandit:
        """Its first n rounds."""
        expected = None if self.expected is None else self.expected[:n]
        return Bandit(self.contexts[:n], self.rewards[:n], expected, self.name)

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return store.checksum({"contexts": self.contexts, "rewards": self.rewards})
