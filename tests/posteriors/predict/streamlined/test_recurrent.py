"""Recurrent layers, which are written out step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int, batch_first: bool):
        super().__init__()
        self.inner, self.head = kind(4, 6, layers, batch_first=batch_first), nn.Linear(6, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.inner(x)[0][:, -1])
        return self.head(self.inner(x.transpose(0, 1))[0][-1])


@pytest.mark.parametrize(("layers", "batch_first"), [(1, True), (2, False)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_classifiers(kind, layers, batch_first, around, ratio):
    posterior, x = around(Classifier(kind, layers, batch_first), variance=0.003), torch.randn(3, 4, 4)
    adjoint, forward = ratio(posterior, x, {"how": "adjoint"}, {"how": "streamlined", "rank": 0})
    assert adjoint == pytest.approx(1, abs=0.03)
    assert forward == pytest.approx(1, abs=0.2)  # weights that every step uses again


def test_lerp(check, noisy):
    check(torch.lerp, noisy(3, 4, sd=0.5), noisy(3, 4, sd=0.3), noisy(3, 4, sd=0.2))
    check(torch.lerp, noisy(3, 4, sd=0.5), torch.randn(3, 4), torch.rand(3, 4))
