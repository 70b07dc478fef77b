"""Thompson sampling with exact posteriors of linear regressions, on the contexts or on the features of a network."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from dubito.apps.bandits.agent import AgentState, arm_to_try, check_reward
from dubito.apps.bandits.regressions import Regressions
from dubito.apps.bandits.thompson import Thompson
from dubito.apps.network import last_linear, only_network
from dubito.posteriors import Posterior
from dubito.tensors.checks import at_least, require
from dubito.tensors.randomness import generator


def _with_constant(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


@dataclass(eq=False, repr=False)
class Linear:
    """A Bayesian linear regression for each arm on the context and a constant, with the exact posterior after every reward.

    `precision`, `a0` and `b0` are the parameters of the prior, in the units of the rewards; see `Regressions`. An arm is chosen by a
    draw of all weights from their posteriors.

    >>> agent = Linear(2, 1)
    >>> for i in range(100):
    ...     x = torch.tensor([i / 100])
    ...     action = agent.act(x)
    ...     agent.update(x, action, float(x) if action else 1 - float(x))
    >>> agent.act(torch.tensor([0.0])), agent.act(torch.tensor([1.0]))
    (0, 1)
    """

    arms: int
    width: int
    _: KW_ONLY
    initial: int = 2
    precision: float = 0.25
    a0: float = 6.0
    b0: float = 6.0
    seed: int = 0

    def __post_init__(self):
        at_least(2, arms=self.arms)
        at_least(1, width=self.width)
        at_least(0, initial=self.initial)
        self.prior = dict(precision=self.precision, a0=self.a0, b0=self.b0)
        self.regressions = Regressions.prior(self.arms, self.width + 1, precision=self.precision, a0=self.a0, b0=self.b0)
        self.rounds = self.acts = self._waiting = 0  # rewards, choices, and choices since the last reward

    def act(self, context: Tensor) -> int:
        """The best arm by a draw of all weights, after each was taken `initial` times."""
        waiting, self.acts, self._waiting = self._waiting, self.acts + 1, self._waiting + 1
        # every reward adds 1/2 to the shape of the noise's posterior
        counts = (2 * (self.regressions.shape - self.a0)).round().long().tolist()
        if (arm := arm_to_try(counts, self.initial, waiting)) is not None:
            return arm
        weights = self.regressions.sample(generator("cpu", self.seed, "draw", self.acts))
        return int((weights @ _with_constant(torch.as_tensor(context).to(weights))).argmax())

    def update(self, context: Tensor, action: int, reward: float) -> None:
        """Update the posterior of one arm exactly, in O(d^2)."""
        context, action, reward = check_reward(context, action, reward, self.arms)
        require(context.shape == (self.width,), f"a context must have {self.width} numbers; got the shape {list(context.shape)}")
        self.rounds, self._waiting = self.rounds + 1, 0
        self.regressions.update(action, _with_constant(context.double()), reward)

    def state(self) -> AgentState:
        """The counters and the posteriors of all arms."""
        return {"rounds": self.rounds, "acts": self.acts, **{name: leaf.clone() for name, leaf in vars(self.regressions).items()}}

    def restore(self, state: AgentState) -> None:
        """Continue from a `state`."""
        self.rounds, self.acts = state["rounds"], state["acts"]
        self.regressions = Regressions(**{name: state[name].clone() for name in ("mean", "root", "shape", "rate")})


@dataclass(eq=False, repr=False)
class NeuralLinear(Thompson):
    """An exact Bayesian linear regression for each arm on the features of a network (Riquelme et al. 2018).

    The network is trained as in `Thompson`, by `method` (`MAP(...)`) after `every` rewards. The regressions are then fitted again, on
    the input of its last linear layer and a constant. Between two fits a reward updates them in O(d^2). Thompson sampling draws the
    weights of the last layer. As published, the regressions see rewards that are not standardized: choose `b0 / a0` near the variance
    of the noise.

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

    _: KW_ONLY
    precision: float = 0.25
    a0: float = 6.0
    b0: float = 6.0
    members: int = field(default=1, init=False)
    epsilon: float = field(default=0.0, init=False)

    def __post_init__(self):
        super().__post_init__()
        self.prior = dict(precision=self.precision, a0=self.a0, b0=self.b0)
        self.regressions: Regressions | None = None
        self.layer = ""

    def features(self, x: Tensor) -> Tensor:
        """The inputs of the last linear layer and a constant, [n, d] in float64, at contexts x."""
        if self.posterior is None:
            raise ValueError("the network is not trained yet: take each arm `initial` times, or call refit()")
        network = only_network(self.posterior, "NeuralLinear")
        x = self._ready(x)
        self.layer = self.layer or last_linear(network, (x[:1],))
        with torch.no_grad():
            return _with_constant(network.features((x,), self.layer)[0].double())

    def values(self, context: Tensor, source: torch.Generator) -> Tensor:
        """The rewards of all arms in a context by a draw of the last layer's weights, [K]."""
        phi = self.features(torch.as_tensor(context).unsqueeze(0))[0]
        assert self.regressions is not None
        return self.regressions.sample(source) @ phi

    def update(self, context: Tensor, action: int, reward: float) -> None:
        """Add a round to the log and to the regressions."""
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

    def restore(self, state: AgentState) -> None:
        """Fit again as in `Thompson`, then replay the rewards since that fit."""
        super().restore(state)
        if state["fitted"]:
            for i in range(state["fitted"], len(self.log)):
                self._learn(self.log.contexts[i], self.log.actions[i], self.log.rewards[i])
