"""A network with an output for each action, seen at the action that was taken: only there is a reward known."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dubito.model import Model
from dubito.model.likelihoods import Gaussian
from dubito.network.examples import pick_output, split_batch


class Taken(nn.Module):
    """`network(x)` [B, K] at one action for each row, [B, 1]; without actions all K.

    Its layers and weights have the names that they have in the network, so that patterns of a prior, of `Model(only=...)` and of
    methods mean here what they mean there.

    >>> [name for name, _ in Taken(nn.Sequential(nn.Linear(2, 3))).named_parameters()]
    ['0.weight', '0.bias']
    """

    def __init__(self, network: nn.Module, output: Callable[[Any], Tensor] = pick_output):
        super().__init__()
        self.network, self.output = network, output

    def forward(self, x: Tensor, action: Tensor | None = None) -> Tensor:
        f = self.output(self.network(x))
        return f if action is None else f.gather(-1, action.long().unsqueeze(-1))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.network.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        return self.network.get_submodule(target)


def check_width(model: Model, x: Tensor, actions: int) -> None:
    """Raise, in words, unless the network of a model that is `taken` gives a number for each action at inputs x, [B, ...]."""
    with torch.no_grad():
        width = model.forward(model.parameters(), (x,), model.buffers())[0].shape[-1]
    if width != actions:
        raise ValueError(f"the network gives {width} numbers for {actions} actions: one for each, please")


def taken(model: Model) -> Model:
    """The model of the rewards of actions that were taken: inputs are (x, action), targets [B], and other actions have no part in it.

    >>> import dubito, torch
    >>> model = taken(dubito.Model(nn.Linear(2, 3), dubito.Gaussian(scale=1.0)))
    >>> x, action = torch.zeros(4, 2), torch.tensor([0, 2, 1, 0])
    >>> model.forward(model.parameters(), (x, action), {})[0].shape, model.forward(model.parameters(), (x,), {})[0].shape
    (torch.Size([4, 1]), torch.Size([4, 3]))
    """
    if not isinstance(model.likelihood, Gaussian) or isinstance(model.likelihood.scale, tuple) or model.likelihood.outputs != 1:
        raise ValueError(
            "rewards are numbers of which one is seen at a time: use dubito.Gaussian(scale=s), or Gaussian() to learn the noise"
        )
    # what an agent hands to it are pairs of ours, and never the batches of the user
    return replace(model, network=Taken(model.network, model.output), split=split_batch, output=pick_output)
