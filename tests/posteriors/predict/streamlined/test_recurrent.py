"""Recurrent layers, which are written out step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


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


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, pack: bool):
        super().__init__()
        self.first, self.inner, self.head, self.pack = nn.Linear(4, 4), kind(4, 6, batch_first=True), nn.Linear(6, 3), pack

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.first(x)
        if not self.pack:
            return self.head(self.inner(x)[0])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=x.shape[1])[0])


@pytest.mark.parametrize("options", [{"how": "streamlined", "rank": 0}, {"how": "adjoint"}], ids=["streamlined", "adjoint"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_are_as_each_on_its_own(kind, options, around):
    torch.manual_seed(0)
    network, x = Tagger(kind, pack=True), torch.randn(4, 5, 4)
    posterior, alone = around(network, variance=0.003), Tagger(kind, pack=False)
    alone.load_state_dict(network.state_dict())
    one_by_one = around(alone, variance=0.003)
    for lengths in (torch.tensor([2, 5, 1, 4]), torch.tensor([3, 3, 5, 1])):  # other lengths are another program
        p = posterior.predict((x, lengths), **options)
        for i, length in enumerate(lengths.tolist()):
            row = (x[i : i + 1, :length], torch.full((1,), length))
            exact = one_by_one.predict(row, **options)
            torch.testing.assert_close(p.f_mean[i, :length], exact.f_mean[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                p.f_var[i, :length], exact.f_var[0], atol=1e-6, rtol=0.03
            )  # steps share no layer of inputs
            assert torch.allclose(p.f_var[i, length:], torch.tensor(0.003), rtol=0.1)  # of the bias of the head alone


def test_lerp(check, noisy):
    check(torch.lerp, noisy(3, 4, sd=0.5), noisy(3, 4, sd=0.3), noisy(3, 4, sd=0.2))
    check(torch.lerp, noisy(3, 4, sd=0.5), torch.randn(3, 4), torch.rand(3, 4))
