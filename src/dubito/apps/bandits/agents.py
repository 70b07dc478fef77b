"""Agents: Thompson sampling from any posterior, or from the exact posteriors of linear regressions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from dubito.apps.network import (
    Methods,
    action_value_model,
    action_values,
    chain,
    check_width,
    fit_in_turn,
    last_linear,
    only_network,
)
from dubito.inference.method import traits_of
from dubito.inference.methods.neural_linear import NeuralLinear as NeuralLinearMethod
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Mixture, Posterior, Samples
from dubito.tensors import tree
from dubito.tensors.checks import at_least, between, positive, require
from dubito.tensors.randomness import derive_seed, generator
from dubito.tensors.tree import Params

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
    require(finite, f"contexts and rewards must be finite; got the reward {reward}, or a context with NaN or infinity")
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


@dataclass
class Regressions:
    r"""K Normal-inverse-gamma posteriors over d weights each. For one arm:

    .. math:: y = \phi^T w + \epsilon, \quad \epsilon \sim N(0, \sigma^2), \quad w \mid \sigma^2 \sim N(0, \sigma^2 / \lambda), \quad
        \sigma^2 \sim \mathrm{InvGamma}(a_0, b_0).

    The covariance is kept as a root, :math:`\Lambda^{-1} = R R^T`. An observation changes it by a rank-one matrix: with
    :math:`v = R^T \phi`, :math:`s = 1 + v^T v` and :math:`e = y - \phi^T m`,

    .. math:: R' = R - \frac{(R v) v^T}{s + \sqrt s}, \quad m' = m + \frac{R v}{s} e, \quad a' = a + \tfrac12, \quad
        b' = b + \frac{e^2}{2 s}.

    Both an update and a draw :math:`m + \sigma R z` cost :math:`O(d^2)`. :math:`R R^T` stays positive semi-definite however many
    observations are added. All tensors are in float64.

    >>> arms = Regressions.prior(2, 3)
    >>> for _ in range(100):
    ...     arms.update(0, torch.tensor([1.0, 0.0, 0.0]), 2.0)
    >>> arms.mean[0].round(decimals=1), arms.mean[1]
    (tensor([2., 0., 0.], dtype=torch.float64), tensor([0., 0., 0.], dtype=torch.float64))
    """

    mean: Tensor  # m, [K, d]
    root: Tensor  # R, [K, d, d]
    shape: Tensor  # a, [K]
    rate: Tensor  # b, [K]

    @staticmethod
    def prior(
        arms: int, width: int, *, precision: float = 0.25, a0: float = 6.0, b0: float = 6.0, device: torch.device | str = "cpu"
    ) -> Regressions:
        """The prior: `precision` is :math:`\\lambda`, in units of the noise's precision. The defaults are the published ones."""
        positive(precision=precision, a0=a0, b0=b0)
        root = torch.eye(width, dtype=torch.float64, device=device).div(precision**0.5).repeat(arms, 1, 1)
        return Regressions(root.new_zeros(arms, width), root, root.new_full((arms,), a0), root.new_full((arms,), b0))

    def update(self, arm: int, phi: Tensor, y: float) -> None:
        """Add one observation y of one arm at features phi [d], in place."""
        phi, mean, root = phi.to(self.mean), self.mean[arm], self.root[arm]
        v = phi @ root  # [d]
        gain, s, error = root @ v, 1 + v @ v, y - mean @ phi
        mean.add_(gain * (error / s))
        root.addr_(gain, v / (s + s.sqrt()), alpha=-1.0)
        self.shape[arm] += 0.5
        self.rate[arm] += 0.5 * error * error / s

    def observe(self, phi: Tensor, action: Tensor, y: Tensor) -> None:
        """Add many observations in place: features [n, d], arms [n] and values [n]. Costs O(n d^2 + d^3) for each arm."""
        phi, y = phi.to(self.mean), y.to(self.mean)
        for arm in action.unique().tolist():
            rows = action == arm
            x, target = phi[rows], y[rows]
            inverse = torch.linalg.inv(self.root[arm])  # R^-1; the precision so far is R^-T R^-1
            pull = inverse.mT @ (inverse @ self.mean[arm])  # the precision times the mean
            old = self.mean[arm] @ pull
            precision = inverse.mT @ inverse + x.mT @ x
            lower = torch.linalg.cholesky(precision)
            mean = torch.cholesky_solve((pull + x.mT @ target).unsqueeze(1), lower).squeeze(1)
            self.rate[arm] += 0.5 * (target @ target + old - mean @ (precision @ mean)).clamp_min(0)
            self.shape[arm] += 0.5 * len(x)
            self.mean[arm] = mean
            unit = torch.eye(len(mean), dtype=lower.dtype, device=lower.device)
            self.root[arm] = torch.linalg.solve_triangular(lower, unit, upper=False).mT

    def sample(self, generator: torch.Generator) -> Tensor:
        """A draw of the weights of all arms, [K, d]: :math:`\\sigma^2` from its inverse gamma, then w given :math:`\\sigma^2`."""
        device = generator.device
        unit = torch.randn(self.mean.shape, generator=generator, dtype=torch.float64, device=device).to(self.mean)
        precision = torch._standard_gamma(self.shape.to(device), generator=generator).to(self.rate)
        scale = (self.rate / precision).sqrt().unsqueeze(-1)
        return self.mean + scale * (self.root @ unit.unsqueeze(-1)).squeeze(-1)


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
        anew = any(traits_of(step).starts_anew for step in sequence)
        require(self.members == 1 or not anew, f"this method initializes its own members: leave out members={self.members}")
        all_arms = any(isinstance(step, NeuralLinearMethod) for step in sequence)
        require(not all_arms, "the method NeuralLinear needs the rewards of all arms: use the agent bandits.NeuralLinear")
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
