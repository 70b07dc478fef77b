"""Models of the values of actions: a network with one output for each action, trained at the actions that were taken."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dubito._moved import renamed
from dubito.model import Model
from dubito.model.likelihoods import Gaussian
from dubito.network.examples import pick_output, split_batch
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.checks import require


class ActionValues(nn.Module):
    """`network(x)` [B, K] at one action for each row, [B, 1]; without actions at all K.

    Layers and weights keep the names that they have in the network, so patterns of names in a prior, in `Model(only=...)` and in
    methods select the same weights.

    >>> [name for name, _ in ActionValues(nn.Sequential(nn.Linear(2, 3))).named_parameters()]
    ['0.weight', '0.bias']
    """

    def __init__(self, network: nn.Module, output: Callable[[Any], Tensor] = pick_output):
        super().__init__()
        self.network, self.output = network, output

    def forward(self, x: Tensor, action: Tensor | None = None) -> Tensor:
        """The values of the given actions, [B, 1], or of all actions, [B, K]."""
        f = self.output(self.network(x))
        return f if action is None else f.gather(-1, action.long().unsqueeze(-1))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """The modules of the network under their own names, after this one."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.network.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The module of the network with the given name."""
        return self.network.get_submodule(target)


def check_width(model: Model, x: Tensor, actions: int) -> None:
    """Raise unless the network of an `action_value_model` has one output for each action at inputs x, [B, ...]."""
    with torch.no_grad():
        width = model.forward(model.parameters(), (x,), model.buffers())[0].shape[-1]
    require(width == actions, f"the network must have one output for each action; got {width} outputs for {actions} actions")


def action_values(function: Callable[[Any], LatentMixture], x: Tensor) -> Tensor:
    """The values of all actions at one input x [...] by a function of an `action_value_model`, [K]."""
    return function((x.unsqueeze(0),)).means.reshape(-1)


def action_value_model(model: Model) -> Model:
    """The model of the rewards of the actions taken: inputs are (x, action) and targets [B]. Other actions do not enter the likelihood.

    >>> import dubito, torch
    >>> model = action_value_model(dubito.Model(nn.Linear(2, 3), dubito.Gaussian(scale=1.0)))
    >>> x, action = torch.zeros(4, 2), torch.tensor([0, 2, 1, 0])
    >>> model.forward(model.parameters(), (x, action), {})[0].shape, model.forward(model.parameters(), (x,), {})[0].shape
    (torch.Size([4, 1]), torch.Size([4, 3]))
    """
    likelihood = model.likelihood
    single = isinstance(likelihood, Gaussian) and not isinstance(likelihood.scale, tuple) and likelihood.outputs == 1
    require(single, f"the likelihood of rewards must be Gaussian(scale=s), or Gaussian() to learn the noise; got {likelihood!r}")
    # agents pass batches (x, action) of their own, so the user's `split` is not needed
    return replace(model, network=ActionValues(model.network, model.output), split=split_batch, output=pick_output)


__getattr__ = renamed(__name__, {"Taken": "ActionValues", "taken": "action_value_model"})
