"""The contract's main points on a GPU: the same bits, going on after a stop, files that travel between devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, Laplace, MCDropout, Model
from dubito.priors import Normal
from dubito.testing import small_data as data
from dubito.testing import small_model as build
from dubito.testing import snapshot, tensors

pytestmark = pytest.mark.gpu


def test_fit_predict_save_and_load_between_devices(method, tmp_path):
    model, (x, y) = build(), data()
    before = snapshot(model)
    a, b = (dubito.fit(model, method, (x, y), batch_size=16, device="cuda") for _ in range(2))
    assert {leaf.device.type for leaf in tensors(a)} == {"cuda"}
    assert all(torch.equal(p, q) for p, q in zip(tensors(a), tensors(b), strict=True)), "the same seed gives the same bits"
    after = snapshot(model)
    assert before["train or eval modes"] == after["train or eval modes"]
    assert torch.equal(before["torch's random state"][0], after["torch's random state"][0])
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


class Sequence(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(20, 6), kind(6, 7, batch_first=True, **options), nn.Linear(7, 2)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids))[0])


@pytest.mark.parametrize("recurrent", ["sequence", "batch"])
def test_recurrent_dropout(recurrent):
    ids = torch.randint(0, 20, (16, 6))
    method = MCDropout(epochs=2, at="", recurrent=recurrent, draws=5, learn_rates=True)
    model = Model(Sequence(num_layers=2, dropout=0.2), Categorical())
    posterior = dubito.fit(model, method, (ids, ids % 2), device="cuda", precision="bfloat16")
    for consistent in (True, False):
        assert (posterior.predict(ids, consistent=consistent).uncertainty.epistemic > 0).any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_curvature_of_recurrent_layers(kind):
    """In eval mode cuDNN refuses to differentiate them."""
    torch.manual_seed(0)
    model, ids = Model(Sequence(kind), Categorical(), Normal(scale=1.0)), torch.randint(0, 20, (16, 6))
    variances = []
    for device in ("cpu", "cuda"):
        posterior = dubito.fit(model, Laplace(check=False), (ids, ids % 2), start=model.parameters(), device=device)
        variances.append(posterior.predict(ids, how="linearized").f_var.cpu())
    assert torch.allclose(variances[0], variances[1], rtol=1e-3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_of_recurrent_layers_stay_where_they_are(kind):
    """Torch would lay them side by side elsewhere, under the feet of recorded steps."""
    torch.manual_seed(0)
    model, ids = Model(Sequence(kind).cuda(), Categorical()), torch.randint(0, 20, (16, 6)).cuda()
    params = model.parameters()
    before = [leaf.data_ptr() for leaf in params.values()]
    for train in (False, True):
        model.forward(params, ids, {}, train=train)
        with torch.no_grad():
            model.forward(params, ids, {}, train=train)
    assert before == [leaf.data_ptr() for leaf in params.values()]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recorded_steps_of_recurrent_layers_with_validation(kind):
    torch.manual_seed(0)
    model, ids = Model(Sequence(kind), Categorical(), Normal(scale=1.0)), torch.randint(0, 20, (64, 6))
    found = []
    for record in (True, False):
        method = MCDropout(epochs=10, at="", rate=0.25, draws=3, learning_rate=0.01, record=record)
        data = (ids, ids % 2)
        found.append(dubito.fit(model, method, data, validation=data, batch_size=16, device="cuda").params)
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-4) for name in found[0])
