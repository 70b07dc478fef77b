"""A contextual bandit whose rewards are all known in advance, so that regret can be computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.tensors import store
from dubito.tensors.checks import require


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
        require(
            contexts.ndim >= 2 and len(shape) == 2 and len(contexts) == len(rewards),
            f"contexts must be [T, ...] and rewards [T, K]; got {list(contexts.shape)} and {shape}",
        )
        require(shape[1] >= 2 and shape[0], f"a bandit needs at least one round and two arms; got rewards of shape {shape}")
        require(
            expected.shape == rewards.shape,
            f"expected must have the shape of rewards, {shape}; got {list(expected.shape)}",
        )
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
