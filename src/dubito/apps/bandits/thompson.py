"""Thompson sampling from any posterior."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from dubito.apps.action_values import action_value_model, action_values, check_width
from dubito.apps.bandits.agent import AgentState, Log, arm_to_try
from dubito.apps.sequence import Methods, chain, fit_in_turn
from dubito.inference.method import traits_of
from dubito.inference.methods.neural_linear import NeuralLinear
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Mixture, Posterior, Samples
from dubito.tensors import tree
from dubito.tensors.checks import at_least, between, require
from dubito.tensors.randomness import derive_seed, generator
from dubito.tensors.tree import Params


@dataclass(eq=False, repr=False)
class Thompson:
    """Thompson sampling: draw a function from the posterior and take the arm that it rates best.

    Each arm is thus taken with the probability that it is the best one.

    `model` is a network from a context to one number for each arm, with a Gaussian likelihood; it learns only from the arms that were
    taken. `method` is a method, a list of methods that run one after another (`[MAP(), Laplace()]`), or a function of the number of
    known rewards that returns either. The posterior is fitted again after `every` rewards, from the weights of the last fit, unless the
    method initializes its own members, as `Ensemble` does. `members` > 1 trains that many networks from different random weights and
    continues each at every fit. The posterior of `MAP` has one function, so the choice is greedy; `epsilon` is then the probability of
    a random arm. For an exact last layer use the agent `bandits.NeuralLinear`, not the method of that name.

    Each arm is taken `initial` times before the first fit. With `standardize` the network is fitted to rewards minus their mean,
    divided by their standard deviation, both computed at each fit; noise and prior of the model are in these units.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(20, 2))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.3), dubito.priors.Normal(scale=1.0))
    >>> agent = Thompson(model, dubito.MCDropout(epochs=100, learning_rate=0.01), 2, every=20)
    >>> x = torch.rand(60, 1, generator=torch.Generator().manual_seed(0))
    >>> for context in x:                                                # arm 1 pays where x > 1/2
    ...     action = agent.act(context)
    ...     agent.update(context, action, float(action == int(context > 0.5)))
    >>> sum(agent.log.rewards[-20:]) > 14
    True
    """

    model: Model
    method: Methods
    arms: int
    _: KW_ONLY
    every: int = 50
    initial: int = 2
    members: int = 1
    epsilon: float = 0.0
    standardize: bool = True
    batch_size: int = 512
    seed: int = 0

    def __post_init__(self):
        at_least(2, arms=self.arms)
        at_least(1, every=self.every, initial=self.initial, members=self.members)
        between(0, 1, epsilon=self.epsilon, include="both")
        sequence = chain(self.method, 1)
        require(
            self.members == 1 or not any(traits_of(step).starts_anew for step in sequence),
            f"this method initializes its own members: leave out members={self.members}",
        )
        require(
            not any(isinstance(step, NeuralLinear) for step in sequence),
            "the method NeuralLinear needs the rewards of all arms, and only one is known in each round: use the agent "
            "bandits.NeuralLinear(model, MAP(), arms)",
        )
        self.model = action_value_model(self.model)
        self.log, self.acts, self._waiting = Log(), 0, 0  # rewards, choices, and choices since the last reward
        self.posterior: Posterior | None = None
        self._fitted, self._shift, self._scale = 0, 0.0, 1.0  # rewards at the last fit, their mean and standard deviation
        self._before: list[Params] = []  # the weights from which the last fits began
        self._after: list[Params] = self._starts()  # those from which the next begin

    def _starts(self) -> list[Params]:
        if self.members == 1:
            return [{}]  # the weights of the network
        weights = {name: leaf for name, leaf in self.model.parameters().items() if ":" not in name}
        return [reinitialize(self.model.network, weights, derive_seed(self.seed, "member", i)) for i in range(self.members)]

    def act(self, context: Tensor) -> int:
        """The best arm by a drawn function, or a random one with probability epsilon; fits first where a fit is due."""
        waiting, self.acts, self._waiting = self._waiting, self.acts + 1, self._waiting + 1
        counts = [self.log.counts[arm] for arm in range(self.arms)]
        if (arm := arm_to_try(counts, self.initial, waiting)) is not None:
            return arm
        if self.posterior is None or len(self.log) - self._fitted >= self.every:
            self.refit()
        chance = generator("cpu", self.seed, "chance", self.acts)
        if self.epsilon and float(torch.rand((), generator=chance)) < self.epsilon:
            return int(torch.randint(self.arms, (1,), generator=chance))
        return int(self.values(context, generator(self.model.device, self.seed, "draw", self.acts)).argmax())

    def values(self, context: Tensor, source: torch.Generator) -> Tensor:
        """The rewards of all arms in a context by a function drawn from the posterior, [K]."""
        if self.posterior is None:
            raise ValueError("there is no posterior yet: take each arm `initial` times, or call refit()")
        with torch.no_grad():
            f = action_values(self.posterior.function(source), self._ready(torch.as_tensor(context)))
        return self._shift + self._scale * f

    def _ready(self, x: Tensor) -> Tensor:
        return x.to(next(self.model.network.parameters()))

    def update(self, context: Tensor, action: int, reward: float) -> None:
        """Add a round to the log."""
        self.log.add(context, action, reward, self.arms)
        self._waiting = 0

    def refit(self) -> Posterior:
        """Fit the posterior to all known rewards now."""
        self._before = self._after
        return self._fit(len(self.log))

    def _fit(self, n: int) -> Posterior:
        require(n, "there is nothing to fit before the first reward: call update(context, action, reward)")
        x, action, reward = self.log.tensors(n)
        if self.posterior is None:
            check_width(self.model, self._ready(x[:1]), self.arms)
        self._fitted = n
        if self.standardize:
            self._shift, spread = float(reward.mean()), float(reward.std(correction=0))
            self._scale = spread if spread > 1e-8 * (1 + abs(self._shift)) else 1.0
        y = self._ready((reward - self._shift) / self._scale)
        data = ((self._ready(x), action.to(self.model.device)), y)
        options = FitOptions(batch_size=self.batch_size, progress=False)
        members = []
        for i, start in enumerate(self._before):
            setting = replace(options, start=start or None, seed=derive_seed(self.seed, "fit", n, i))
            members.append(fit_in_turn(self.model, self.method, data, setting))
        self._after = [_end(member) for member in members]
        self.posterior = members[0] if len(members) == 1 else Mixture.equal(members)
        return self.posterior

    def state(self) -> AgentState:
        """The log, and the weights from which the last fit began."""
        before = [tree.move(tree.clone(start), "cpu") for start in self._before]
        return {"log": self.log.state(), "acts": self.acts, "fitted": self._fitted, "before": before}

    def restore(self, state: AgentState) -> None:
        """Continue from a `state`. The posterior is fitted again from the same weights: on the same machine to the same bits."""
        self.log, self.acts = Log.of(state["log"]), state["acts"]
        if state["fitted"]:
            self._before = [tree.move(start, self.model.device) for start in state["before"]]
            self._fit(state["fitted"])


def _end(posterior: Posterior) -> Params:
    """The weights from which the next fit begins: the center, the last draw of a sampler, or else those of the network."""
    params, buffers = getattr(posterior, "params", None), getattr(posterior, "buffers", {})
    if not isinstance(params, dict):
        return {}
    if isinstance(posterior, Samples):
        params = tree.select({**posterior.params, **posterior.own_buffers}, -1)
    return tree.clone({**buffers, **params})


def epochs(steps: int, n: int, *, batch_size: int = 512) -> int:
    """The number of epochs over n examples that gives at least `steps` training steps, whatever n is.

    >>> epochs(100, 50), epochs(100, 2000)
    (100, 25)
    """
    return math.ceil(steps / math.ceil(n / batch_size))
