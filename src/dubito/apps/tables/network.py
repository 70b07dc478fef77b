"""The network for tables: embedded numbers and an MLP, in neural-tangent parametrization."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PHASES = 16  # cosines of each number
WIDTH = 3  # what is made of them


class Linear(nn.Module):
    r"""A linear layer :math:`y = W x / \sqrt{n} + b` of n inputs: under N(0, 1) weights its outputs are as large as its inputs."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Standard normal weights and biases."""
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs."""
        return F.linear(x, self.weight / math.sqrt(self.weight.shape[-1]), self.bias)


class Embedding(nn.Module):
    r"""Each number x as itself and a few learned waves of it, :math:`V \cos(2\pi (w x + b)) + c` (Gorishniy et al. 2022).

    A plain MLP is slow to learn functions that change fast with one input, or jump between its few values; these can.
    """

    def __init__(self, numbers: int):
        super().__init__()
        self.frequency = nn.Parameter(torch.empty(numbers, PHASES))
        self.phase = nn.Parameter(torch.empty(numbers, PHASES))
        self.weight = nn.Parameter(torch.empty(numbers, PHASES, WIDTH))
        self.bias = nn.Parameter(torch.empty(numbers, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Standard normal weights and frequencies, and phases from a whole turn."""
        for leaf in (self.frequency, self.weight, self.bias):
            nn.init.normal_(leaf)
        nn.init.uniform_(self.phase, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] as [B, F * (1 + WIDTH)]."""
        waves = torch.cos(2 * math.pi * (x.unsqueeze(-1) * self.frequency + self.phase))  # [B, F, PHASES]
        mixed = torch.einsum("bfk,fko->bfo", waves, self.weight / math.sqrt(PHASES)) + self.bias
        return torch.cat([x.unsqueeze(-1), mixed], -1).flatten(1)


class TableNetwork(nn.Module):
    """An MLP over embedded numbers and indicators.

    Args:
        numbers: how many of the inputs, the first ones, are numbers.
        width: all inputs.
        outputs: of the network.
        hidden: units of each of three hidden layers.
        embed: whether numbers are embedded, or taken as they are.

    >>> TableNetwork(2, 5, 1)(torch.zeros(4, 5)).shape
    torch.Size([4, 1])
    """

    def __init__(self, numbers: int, width: int, outputs: int, *, hidden: int = 128, embed: bool = True):
        super().__init__()
        self.numbers = numbers
        self.embedding = Embedding(numbers) if embed and numbers else None
        inputs = width + WIDTH * numbers * (self.embedding is not None)
        self.scale = nn.Parameter(torch.ones(inputs))
        self.layers = nn.ModuleList(Linear(n, hidden) for n in (inputs, hidden, hidden))
        self.last = Linear(hidden, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The last layer starts at 0, every input counts alike."""
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to [B, outputs]."""
        if self.embedding is not None:
            x = torch.cat([self.embedding(x[:, : self.numbers]), x[:, self.numbers :]], -1)
        x = x * self.scale
        for layer in self.layers:
            x = F.silu(layer(x))
        return self.last(x)
