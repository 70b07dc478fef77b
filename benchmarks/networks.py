"""The networks that several benchmarks run."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def mlp(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """A ReLU network; `dropout` is on the inputs of every layer."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layers += [nn.ReLU()] if i else []
        layers += [nn.Dropout(dropout)] if dropout else []
        layers.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(*layers)


def lenet(*, dropout: float = 0.0) -> nn.Sequential:
    """LeNet-5 for 28 x 28 images with ReLU and max pooling; `dropout` is on the inputs of the last layer."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        *([nn.Dropout(dropout)] if dropout else []), nn.Linear(84, 10),
    )  # fmt: skip
