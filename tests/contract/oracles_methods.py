"""Definitions of methods that their law on linear regression does not show."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Gaussian, MeanTeacher, Model


def teacher_average() -> None:
    """The teacher follows the student by a_s = min(decay, 1 - 1 / (s + 1)), from the weights at the start."""
    torch.manual_seed(0)
    network, data = nn.Linear(2, 1), (torch.randn(20, 2), torch.randn(20, 1))
    expected: dict[str, Tensor] = {name: leaf.detach().clone() for name, leaf in network.named_parameters()}

    def follow(event) -> None:
        keep = min(0.7, 1 - 1 / (event.step + 1))
        for name, leaf in event.state.student.params.items():
            expected[name] = keep * expected[name] + (1 - keep) * leaf

    method = MeanTeacher(MAP(epochs=3, learning_rate=0.3), weight=1.0, decay=0.7)
    posterior = dubito.fit(Model(network, Gaussian(scale=1.0)), method, data, batch_size=8, callbacks=[follow], progress=False)
    torch.testing.assert_close(posterior.params, expected)


FURTHER: dict[str, Callable[[], None]] = {"teacher average": teacher_average}
