"""Thompson sampling with exact posteriors: of linear arms, on contexts or on the features of a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.apps.bandits.agent import Log, first
from dubito.apps.bandits.regressions import Regressions
from dubito.apps.bandits.thompson import Thompson
from dubito.apps.network import last_linear, only_network
from dubito.apps.sequence import Methods
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.tensors.randomness import generator


def _with_one(x: Tensor) -> Tensor:
    """Features and a constant."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


class Linear:
    """A Bayesian linear regression for each arm on the context and a constant, with the exact posterior after every reward.

    `precision`, `a0` and `b0` are the prior's, in the units of the rewards; see `Regressions`.

    >>> agent = Linear(2, 1)
    >>> for i in range(100):
    ...     x = torch.tensor([i / 100])
    ...     action = agent.act(x)
    ...     agent.update(x, action, float(x) if action else 1 - float(x))
    >>> agent.act(torch.tensor([0.0])), agent.act(torch.tensor([1.0]))
    (0, 1)
    """

    def __init__(
        self,
        arms: int,
        width: int,
        *,
        initial: int = 2,
        precision: float = 0.25,
        a0: float = 6.0,
        b0: float = 6.0,
        seed: int = 0,
    ):
        if arms < 2 or width < 1 or initial < 0:
            raise ValueError(
                f"there are at least two arms and one feature, and initial is not negative; got {arms}, {width} and {initial}"
            )
        self.arms, self.width, self.initial, self.seed = arms, width, initial, seed
        self.prior = dict(precision=precision, a0=a0, b0=b0)
        self.regressions = Regressions.prior(arms, width + 1, precision=precision, a0=a0, b0=b0)
        self.a0, self.rounds, self.acts, self._waiting = a0, 0, 0, 0

    def act(self, context: Tensor) -> int:
        self.acts, waiting, self._waiting = self.acts + 1, self._waiting, self._waiting + 1
        counts = (2 * (self.regressions.shape - self.a0)).round().long().tolist()  # each reward adds 1/2 to the shape
        if (arm := first(counts, self.initial, waiting)) is not None:
            return arm
        weights = self.regressions.sample(generator("cpu", self.seed, "draw", self.acts))
        return int((weights @ _with_one(torch.as_tensor(context).to(weights))).argmax())

    def update(self, context: Tensor, action: int, reward: float) -> None:
        context = torch.as_tensor(context)
        Log().add(context, action, reward, self.arms)  # for its checks: nothing but the sums needs to be kept
        if context.shape != (self.width,):
            raise ValueError(f"a context has {self.width} numbers; got {list(context.shape)}")
        self.rounds, self._waiting = self.rounds + 1, 0
        self.regressions.update(int(action), _with_one(context.double()), float(reward))

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "acts": self.acts, **{name: leaf.clone() for name, leaf in vars(self.regressions).items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds, self.acts = state["rounds"], state["acts"]
        self.regressions = Regressions(**{name: state[name].clone() for name in ("mean", "root", "shape", "rate")})


class NeuralLinear(Thompson):
    """A network for its features, and for each arm an exact Bayesian linear regression on them.

    The network is trained as in `Thompson`, by `method` (`MAP(...)`) and `every` so many rewards; then the regressions are made anew,
    on the input of its last linear layer and a constant. Between two trainings a reward costs O(d^2), and none of the old ones is
    needed. What is drawn are the last layer's weights. Rewards are not standardised for the regressions, as published: `b0 / a0` is
    about the variance of the noise.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.3), dubito.priors.Normal(scale=1.0))
    >>> agent = NeuralLinear(model, dubito.MAP(epochs=100, learning_rate=0.01), 2, every=30, b0=0.1)
    >>> for x in torch.rand(100, 1, generator=torch.Generator().manual_seed(0)):
    ...     action = agent.act(x)
    ...     agent.update(x, action, float(action == int(x > 0.5)))
    >>> sum(agent.log.rewards[-20:]) > 14
    True
    """

    def __init__(
        self,
        model: Model,
        method: Methods,
        arms: int,
        *,
        every: int = 50,
        initial: int = 2,
        precision: float = 0.25,
        a0: float = 6.0,
        b0: float = 6.0,
        standardize: bool = True,
        batch_size: int = 512,
        seed: int = 0,
    ):
        super().__init__(
            model, method, arms, every=every, initial=initial, standardize=standardize, batch_size=batch_size, seed=seed
        )
        self.prior = dict(precision=precision, a0=a0, b0=b0)
        self.regressions: Regressions | None = None
        self.layer = ""

    def features(self, x: Tensor) -> Tensor:
        """Of contexts, [n, d], in float64."""
        if self.posterior is None:
            raise ValueError("there is no network yet: each arm is to be taken `initial` times, or call refit()")
        network = only_network(self.posterior, "NeuralLinear")
        x = self._ready(x)
        self.layer = self.layer or last_linear(network, (x[:1],))
        with torch.no_grad():
            return _with_one(network.features((x,), self.layer)[0].double())

    def values(self, context: Tensor, source: torch.Generator) -> Tensor:
        phi = self.features(torch.as_tensor(context).unsqueeze(0))[0]
        assert self.regressions is not None
        return self.regressions.sample(source) @ phi

    def update(self, context: Tensor, action: int, reward: float) -> None:
        super().update(context, action, reward)
        self._learn(context, int(action), float(reward))

    def _learn(self, context: Tensor, action: int, reward: float) -> None:
        if self.regressions is not None:
            self.regressions.update(action, self.features(torch.as_tensor(context).unsqueeze(0))[0], reward)

    def _fit(self, n: int) -> Posterior:
        posterior = super()._fit(n)
        x, action, reward = self.log.tensors(n)
        phi = self.features(x)
        self.regressions = Regressions.prior(self.arms, phi.shape[1], **self.prior, device=phi.device)
        self.regressions.observe(phi, action.to(phi.device), reward.to(phi.device))
        return posterior

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if state["fitted"]:
            for i in range(state["fitted"], len(self.log)):
                self._learn(self.log.contexts[i], self.log.actions[i], self.log.rewards[i])
