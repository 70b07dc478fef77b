"""The contract's main points on a GPU: the same bits, going on after a stop, files that travel between devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from contract.methods import data
from contract.test_contract import build, snapshot, tensors
from dubito import Categorical, MCDropout, Model

pytestmark = pytest.mark.gpu


def test_fit_predict_save_and_load_between_devices(method, tmp_path):
    model, (x, y) = build(), data()
    before = snapshot(model)
    a, b = (dubito.fit(model, method, (x, y), batch_size=16, device="cuda") for _ in range(2))
    assert {leaf.device.type for leaf in tensors(a)} == {"cuda"}
    assert all(torch.equal(p, q) for p, q in zip(tensors(a), tensors(b), strict=True)), "the same seed gives the same bits"
    after = snapshot(model)
    assert before["modes"] == after["modes"]
    assert torch.equal(before["torch"], after["torch"])
    dubito.save(a, tmp_path / "p")
    here = dubito.load(tmp_path / "p", model)
    p, q = a.predict(x), here.predict(x)
    assert p.means.device.type == "cuda"
    assert all(torch.allclose(kept.cpu(), read, atol=1e-5) for kept, read in zip(tensors(a), tensors(here), strict=True))
    if torch.equal(p.means, a.predict(x, seed=1).means):  # draws of new weights are others on another device
        assert torch.allclose(p.means.cpu(), q.means, atol=1e-4)
    u = p.uncertainty
    assert torch.allclose(u.total, u.aleatoric + u.epistemic)
    assert torch.isfinite(p.log_prob(y.cuda())).all()
    assert a.sample(3, torch.Generator(device="cuda").manual_seed(0)).keys() == a.sample(3).keys()
    loaded, targets = a.predict_loader([(x[:20], y[:20]), (x[20:], y[20:])])
    assert loaded.means.device.type == targets.device.type == "cpu"


def test_stop_and_go_on(method, tmp_path):
    whole = dubito.fit(build(), method, data(), batch_size=16, device="cuda")
    stop = [lambda event: event.step == 2]
    dubito.fit(build(), method, data(), batch_size=16, device="cuda", checkpoint=tmp_path, callbacks=stop)
    resumed = dubito.fit(build(), method, data(), batch_size=16, device="cuda", checkpoint=tmp_path, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(tensors(whole), tensors(resumed), strict=True))


@pytest.mark.parametrize("recurrent", ["sequence", "batch"])
def test_recurrent_dropout(recurrent):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rnn, self.head = (
                nn.Embedding(20, 6),
                nn.LSTM(6, 7, 2, batch_first=True, dropout=0.2),
                nn.Linear(7, 2),
            )

        def forward(self, ids):
            return self.head(self.rnn(self.table(ids))[0])

    ids = torch.randint(0, 20, (16, 6))
    method = MCDropout(epochs=2, at="", recurrent=recurrent, draws=5, learn_rates=True)
    posterior = dubito.fit(Model(Sequence(), Categorical()), method, (ids, ids % 2), device="cuda", precision="bfloat16")
    for consistent in (True, False):
        assert (posterior.predict(ids, consistent=consistent).uncertainty.epistemic > 0).any()
