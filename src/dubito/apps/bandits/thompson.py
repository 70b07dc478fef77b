"""Thompson sampling from any posterior."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dubito.apps.action_values import check_width, taken
from dubito.apps.bandits.agent import Log, first
from dubito.apps.function import one_function
from dubito.apps.sequence import Methods, chain, fit_in_turn
from dubito.inference.method import traits_of
from dubito.inference.methods.neural_linear import NeuralLinear
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Mixture, Posterior, Samples
from dubito.tensors import tree
from dubito.tensors.randomness import derive, generator
from dubito.tensors.tree import Params


class Thompson:
    """Draw a function from the posterior, and take the arm that is best by it: arms are tried as often as they may be the best.

    `model` is a network from a context to one number for each arm, with a Gaussian likelihood; it learns from the arm that was taken
    only. `method` is any, or several that go one after the other (`[MAP(), Laplace()]`), or a function of the number of rewards
    seen. The posterior is fitted `every` so many rewards, each time from where the last fit had come, unless the method starts anew
    as `Ensemble` does. `members` chains of fits from random starts of their own are an ensemble that is trained further, and not
    anew. Of a `MAP` posterior there is one function: greedy choice, and with `epsilon` some random ones. An exact last layer is what
    the agent `bandits.NeuralLinear` has: the method of that name is for outputs that are all seen.

    Each arm is taken `initial` times before anything is fitted. With `standardize` the network sees rewards less their mean, divided
    by their standard deviation, both of those known at the fit; noise and prior of the model are in these units.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(20, 2))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.3), dubito.priors.Normal(scale=1.0))
    >>> agent = Thompson(model, dubito.MCDropout(epochs=100, learning_rate=0.01), 2, every=20)
    >>> x = torch.rand(60, 1, generator=torch.Generator().manual_seed(0))
    >>> for one in x:                                                    # arm 1 pays where x > 1/2
    ...     action = agent.act(one)
    ...     agent.update(one, action, float(action == int(one > 0.5)))
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
        members: int = 1,
        epsilon: float = 0.0,
        standardize: bool = True,
        batch_size: int = 512,
        seed: int = 0,
    ):
        if arms < 2 or every < 1 or initial < 1 or members < 1 or not 0 <= epsilon <= 1:
            raise ValueError(
                "there are at least two arms, every, initial and members are at least 1, and epsilon is in [0, 1]; got "
                f"{arms}, {every}, {initial}, {members} and {epsilon}"
            )
        if members > 1 and any(traits_of(one).starts_anew for one in chain(method, 1)):
            raise ValueError("this method has members of its own, that start anew: leave out `members`")
        if any(isinstance(one, NeuralLinear) for one in chain(method, 1)):
            raise ValueError(
                "the method NeuralLinear is for outputs that are all seen, and of arms only one is: use the agent "
                "bandits.NeuralLinear(model, MAP(), arms)"
            )
        self.model, self.method, self.arms = taken(model), method, arms
        self.every, self.initial, self.members, self.epsilon = every, initial, members, epsilon
        self.standardize, self.batch_size, self.seed = standardize, batch_size, seed
        self.log, self.acts, self._waiting = Log(), 0, 0  # choices so far, and since the last reward
        self.posterior: Posterior | None = None
        self._fitted, self._shift, self._scale = 0, 0.0, 1.0  # rewards at the last fit, and what they were standardised by
        self._before: list[Params] = []  # where the fits of the posterior began, and where the next begin
        self._after: list[Params] = self._starts()

    def _starts(self) -> list[Params]:
        if self.members == 1:
            return [{}]  # the network as it stands
        weights = {name: leaf for name, leaf in self.model.parameters().items() if ":" not in name}
        return [reinitialize(self.model.network, weights, derive(self.seed, "member", i)) for i in range(self.members)]

    def act(self, context: Tensor) -> int:
        self.acts, waiting, self._waiting = self.acts + 1, self._waiting, self._waiting + 1
        if (arm := first([self.log.taken[k] for k in range(self.arms)], self.initial, waiting)) is not None:
            return arm
        if self.posterior is None or len(self.log) - self._fitted >= self.every:
            self.refit()
        chance = generator("cpu", self.seed, "chance", self.acts)
        if self.epsilon and float(torch.rand((), generator=chance)) < self.epsilon:
            return int(torch.randint(self.arms, (1,), generator=chance))
        return int(self.values(context, generator(self.model.device, self.seed, "draw", self.acts)).argmax())

    def values(self, context: Tensor, source: torch.Generator) -> Tensor:
        """The arms' rewards in a context by a function drawn from the posterior, [K]."""
        if self.posterior is None:
            raise ValueError("there is no posterior yet: each arm is to be taken `initial` times, or call refit()")
        with torch.no_grad():
            x: Any = (self._ready(torch.as_tensor(context).unsqueeze(0)),)  # without an action: all
            f = one_function(self.posterior, source)(x).means
        return self._shift + self._scale * f.reshape(-1)

    def _ready(self, x: Tensor) -> Tensor:
        return x.to(next(self.model.network.parameters()))

    def update(self, context: Tensor, action: int, reward: float) -> None:
        self.log.add(context, action, reward, self.arms)
        self._waiting = 0

    def refit(self) -> Posterior:
        """Fit the posterior to all that is known."""
        self._before = self._after
        return self._fit(len(self.log))

    def _fit(self, n: int) -> Posterior:
        if not n:
            raise ValueError("there is no reward yet, and so nothing to fit: update(context, action, reward) first")
        x, action, reward = self.log.tensors(n)
        if self.posterior is None:
            check_width(self.model, self._ready(x[:1]), self.arms)
        self._fitted = n
        if self.standardize:
            spread = float(reward.std(correction=0))
            self._shift, self._scale = float(reward.mean()), spread if spread > 1e-8 * (1 + abs(float(reward.mean()))) else 1.0
        y = self._ready((reward - self._shift) / self._scale)
        data = ((self._ready(x), action.to(self.model.device)), y)
        options = FitOptions(batch_size=self.batch_size, progress=False)
        settings = [
            replace(options, start=start or None, seed=derive(self.seed, "fit", n, i)) for i, start in enumerate(self._before)
        ]
        fitted = [fit_in_turn(self.model, self.method, data, setting) for setting in settings]
        self._after = [self._end(posterior) for posterior in fitted]
        self.posterior = fitted[0] if len(fitted) == 1 else Mixture.equal(fitted)
        return self.posterior

    def _end(self, posterior: Posterior) -> Params:
        """The weights from which the next fit begins: the centre, the last draw of a sampler, or those of the network."""
        params, buffers = getattr(posterior, "params", None), getattr(posterior, "buffers", {})
        if not isinstance(params, dict):
            return {}
        if isinstance(posterior, Samples):
            return tree.clone({**buffers, **tree.select({**posterior.params, **posterior.own_buffers}, -1)})
        return tree.clone({**buffers, **params})

    def state(self) -> dict[str, Any]:
        return {
            "log": self.log.state(),
            "acts": self.acts,
            "fitted": self._fitted,
            "before": [tree.move(tree.clone(one), "cpu") for one in self._before],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The posterior is fitted again, from where its fit began: to the same bits on the same machine."""
        self.log, self.acts = Log.of(state["log"]), state["acts"]
        if state["fitted"]:
            self._before = [tree.move(one, self.model.device) for one in state["before"]]
            self._fit(state["fitted"])


def epochs(steps: int, n: int, *, batch_size: int = 512) -> int:
    """Passes over n examples that make so many steps: as many for few rewards as for many.

    >>> epochs(100, 50), epochs(100, 2000)
    (100, 25)
    """
    return math.ceil(steps / math.ceil(n / batch_size))
