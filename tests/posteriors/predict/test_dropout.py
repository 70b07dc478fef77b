"""Dropout without touching the network: the right distribution, in the right places, tied in the right way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dubito
from dubito import Categorical, Gaussian, MCDropout, Model
from dubito.posteriors import Stochastic
from dubito.posteriors.predict.dropout import Dropout, Masks, hashed_uniform

N = 4000


def stochastic(net: nn.Module, *, at: str | None = None, rate: float = 0.3, recurrent="sequence", likelihood=None) -> Stochastic:
    model = Model(net, likelihood or Gaussian(scale=1.0))
    return Stochastic(model, model.parameters(), model.buffers(), Dropout.find(net, at, rate, recurrent), draws=N)


class Apply(nn.Module):
    """Some function of ones, with a parameter so that it is a model."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(1)), function

    def forward(self, x):
        return self.function(x) * self.w


def test_hashed_numbers_are_uniform_and_independent():
    seeds = torch.randint(2**62, (400,), generator=torch.Generator().manual_seed(0))
    u = torch.stack([hashed_uniform(s, "site", (50,)) for s in seeds])  # [400, 50]
    flat = u.flatten().sort().values
    n = flat.numel()
    assert (flat - (torch.arange(n) + 0.5) / n).abs().max() < 1.63 / n**0.5  # Kolmogorov-Smirnov at 1 %
    correlation = torch.corrcoef(u.mT) - torch.eye(50)
    assert correlation.abs().max() < 5 / 400**0.5
    between = torch.corrcoef(u) - torch.eye(400)
    assert between.abs().max() < 6.5 / 50**0.5
    assert not torch.equal(hashed_uniform(seeds[0], "other", (50,)), u[0])
    consecutive = torch.stack([hashed_uniform(torch.tensor(s), "site", (50,)) for s in range(400)])
    assert (torch.corrcoef(consecutive.mT) - torch.eye(50)).abs().max() < 5 / 400**0.5


KINDS = {
    "dropout": (lambda x: F.dropout(x, 0.3), (3, 5), (3, 5)),
    "dropout in eval mode": (lambda x: F.dropout(x, 0.3, training=False), (3, 5), (3, 5)),
    "channels 1d": (lambda x: F.dropout1d(x, 0.3), (3, 5, 4), (3, 5, 1)),
    "channels 2d": (lambda x: F.dropout2d(x, 0.3), (3, 5, 4, 2), (3, 5, 1, 1)),
    "channels 3d": (lambda x: F.dropout3d(x, 0.3), (3, 5, 2, 2, 2), (3, 5, 1, 1, 1)),
}


@pytest.mark.parametrize("consistent", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_dropout_has_the_right_moments_and_ties(kind, consistent):
    function, shape, tied = KINDS[kind]
    p = stochastic(Apply(function)).predict(torch.ones(shape), draws=N, consistent=consistent)
    f = p.means
    assert f.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (f.mean(0) - 1).abs().max() < 5 * (0.3 / 0.7 / N) ** 0.5
    one = f[0]
    assert torch.equal(one, one[tuple(slice(0, n) for n in tied)].expand(shape)), "positions of a channel share their fate"
    if consistent:
        assert torch.equal(f, f[:, :1].expand_as(f)), "one draw is one function of all inputs"
    else:
        assert not torch.equal(f, f[:, :1].expand_as(f))


@pytest.mark.parametrize("consistent", [True, False])
def test_alpha_dropout_keeps_mean_and_variance(consistent):
    x = torch.randn(1, 2000)
    p = stochastic(Apply(lambda x: F.alpha_dropout(x, 0.2))).predict(x, draws=500, consistent=consistent)
    assert p.means.mean() == pytest.approx(float(x.mean()), abs=0.03)
    assert p.means.std() == pytest.approx(float(x.std()), abs=0.03)
    q = stochastic(Apply(lambda x: F.feature_alpha_dropout(x, 0.2))).predict(
        torch.randn(2, 6, 9), draws=50, consistent=consistent
    )
    saturated = (q.means - q.means[..., :1]).abs().amax(-1) < 1e-6
    assert 0.1 < saturated.float().mean() < 0.3


def test_a_draw_of_a_placed_mask_is_a_draw_of_the_weights():
    """Consistent masks on the input of a layer are the same as zeroing columns of its weights, for every input alike."""
    for net, shape in [(nn.Linear(4, 3), (6, 4)), (nn.Linear(4, 3), (6, 5, 4)), (nn.Conv2d(4, 3, 2), (6, 4, 3, 3))]:
        posterior = stochastic(net, at="", likelihood=Gaussian(scale=1.0, dim=1 if isinstance(net, nn.Conv2d) else -1))
        x = torch.randn(shape)
        p = posterior.predict(x, draws=20)
        for s, seed in enumerate(posterior.sample(20, dubito.tensors.randomness.generator("cpu", 0, "masks"))["dropout:seed"]):
            keep = (hashed_uniform(seed, "", (4,)) >= 0.3) / 0.7
            columns = net.weight * (keep.reshape(1, 4, 1, 1) if isinstance(net, nn.Conv2d) else keep)
            f = torch.func.functional_call(net, {"weight": columns.detach(), "bias": net.bias.detach()}, (x,))
            f = f.movedim(1, -1) if isinstance(net, nn.Conv2d) else f
            assert torch.allclose(p.means[s], f, atol=1e-5)


class Sequence(nn.Module):
    def __init__(self, kind=nn.LSTM, *, batch_first=True, dropout=0.0):
        super().__init__()
        self.table, self.rnn = nn.Embedding(20, 6), kind(6, 7, 2, batch_first=batch_first, dropout=dropout)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(7, 2)

    def forward(self, ids):
        return self.head(self.drop(self.rnn(self.table(ids))[0]))


@pytest.mark.parametrize("recurrent", ["sequence", "batch"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_masks_are_shared_over_time(kind, batch_first, recurrent):
    """A constant input through a network without memory of its own shows the masks: they must not change from step to step."""

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.drop = kind(3, 4, batch_first=batch_first), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(torch.ones_like(self.rnn(x)[0]))

    posterior = stochastic(Probe(), at="rnn", recurrent=recurrent, likelihood=Gaussian(scale=1.0))
    x = torch.randn(5, 6, 3)
    for consistent in (True, False):
        f = posterior.predict(x, draws=30, consistent=consistent).means  # [S, B, T, 4] or [S, T, B, 4]
        time, batch = (2, 1) if batch_first else (1, 2)
        assert torch.equal(f, f.narrow(time, 0, 1).expand_as(f)), "the same mask at every time step"
        same = torch.equal(f, f.narrow(batch, 0, 1).expand_as(f))
        assert same == consistent


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_both_recurrent_forms_give_the_same_function_for_the_same_masks(kind):
    """Through the recurrent weights (fast) and step by step (one mask a sequence), by forcing the same masks."""
    net = Sequence(kind, dropout=0.2).double()
    ids = torch.randint(0, 20, (5, 6))
    out = []
    for recurrent in ("sequence", "batch"):
        posterior = stochastic(net, at="", recurrent=recurrent)
        weights = {**posterior.buffers, **posterior.params}

        class Forced(Masks):
            def keep(self, site, shape, rate, device, batch_axis=0):
                g = torch.Generator().manual_seed(dubito.tensors.randomness.derive_seed(site))
                shape = (*shape[:batch_axis], 1, *shape[batch_axis + 1 :])
                return torch.rand(shape, generator=g) >= rate

        with torch.no_grad(), Forced(posterior.dropout, weights):
            out.append(posterior.model.call(posterior.params, ids, posterior.buffers)[0])
    assert torch.allclose(out[0], out[1], atol=1e-10)
    with torch.no_grad():
        assert not torch.allclose(out[0], net.eval()(ids))


@pytest.mark.parametrize("batch_first", [True, False])
def test_words_are_dropped_by_type_not_by_position(batch_first):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rnn = nn.Embedding(20, 3), nn.RNN(3, 3, batch_first=batch_first)

        def forward(self, ids):
            self.rnn(self.table(ids))
            return self.table(ids)

    net = Words()
    nn.init.ones_(net.table.weight)
    posterior = stochastic(net, at="table")
    ids = torch.tensor([[3, 5, 3, 7], [3, 5, 5, 9]])
    ids = ids if batch_first else ids.mT.contiguous()
    f = posterior.predict(ids, draws=N, consistent=False).means[..., 0]  # [S, B, T]
    f = f if batch_first else f.mT
    assert torch.equal(f[:, 0, 0], f[:, 0, 2])
    assert torch.equal(f[:, 1, 1], f[:, 1, 2])
    assert not torch.equal(f[:, 0, 0], f[:, 1, 0]), "another sequence has another mask"
    assert not torch.equal(f[:, 0, 0], f[:, 0, 1]), "another word has another fate"
    assert f.mean() == pytest.approx(1.0, abs=0.03)
    shared = posterior.predict(ids, draws=200).means[..., 0]
    shared = shared if batch_first else shared.mT
    assert torch.equal(shared[:, 0, 0], shared[:, 1, 0]), "a consistent draw treats a word alike everywhere"


@pytest.mark.parametrize("place", ["words", "before", "behind", "nowhere"])
def test_dropout_where_sequences_stand_on_the_axis_of_time_is_refused(place):
    """Sequences first in the data and in an embedding, time first in the recurrent layer, as torch has it by default."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rnn, self.head = nn.Embedding(20, 3), nn.LSTM(3, 4), nn.Linear(4, 2)
            self.drop = nn.Dropout(0.5 if place in ("before", "behind") else 0.0)

        def forward(self, ids):  # [B, T]
            x = self.table(ids)
            x = self.drop(x) if place == "before" else x
            states = self.rnn(x.transpose(0, 1))[0]
            return self.head(self.drop(states.transpose(0, 1))[:, -1] if place == "behind" else states[-1])

    ids = torch.randint(0, 20, (8, 6))
    at = {"words": "", "nowhere": "rnn|head"}.get(place)
    method, data = MCDropout(epochs=1, at=at), (ids, ids[:, 0] % 2)
    if place == "nowhere":  # what is dropped stands as it should
        dubito.fit(Model(Turning(), Categorical()), method, data)
        return
    with pytest.raises(ValueError, match="batch_first=True"):
        dubito.fit(Model(Turning(), Categorical()), method, data)


@pytest.mark.parametrize("recurrent", ["sequence", "batch"])
@pytest.mark.parametrize("at", [None, ""])
def test_recurrent_networks_train_and_predict(at, recurrent):
    net = Sequence(dropout=0.2)
    ids = torch.randint(0, 20, (16, 6))
    model = Model(net, Categorical())
    posterior = dubito.fit(model, MCDropout(epochs=2, at=at, recurrent=recurrent, draws=5), (ids, ids % 2))
    for consistent in (True, False):
        p = posterior.predict(ids, consistent=consistent)
        assert p.mean.shape == (16, 6, 2)
        assert (p.uncertainty.epistemic > 0).any()
    assert not torch.equal(posterior.params["rnn.weight_hh_l0"], net.rnn.weight_hh_l0)


def test_packed_sequences():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][0][-1])

    x, lengths, y = torch.randn(6, 5, 3), torch.tensor([5, 3, 4, 1, 2, 5]), torch.tensor([0, 1, 0, 1, 0, 1])
    posterior = dubito.fit(Model(Packed(), Categorical()), MCDropout(epochs=2, at="rnn", draws=4), [((x, lengths), y)])
    p = posterior.predict((x, lengths))
    changed = x.clone()
    changed[1, 3:] = 100.0  # past the end of that sequence
    assert torch.allclose(p.means, posterior.predict((changed, lengths)).means)


def test_attention_and_transformers_keep_their_dropout_on():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    posterior = stochastic(nn.Sequential(layer, nn.Linear(8, 2)))
    p = posterior.predict(torch.randn(3, 5, 8), draws=20)
    assert (p.f_var > 0).all()
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    q = stochastic(Only()).predict(torch.randn(3, 5, 8), draws=400)
    assert (q.f_var > 0).all()


def test_batch_norm_stays_in_eval_mode_and_masks_match_training():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    posterior = stochastic(net)
    x = torch.randn(3, 2)
    a, b = posterior.predict(x, draws=10), posterior.predict(x[:1], draws=10)
    assert torch.allclose(a.means[:, :1], b.means, atol=1e-6), "a prediction does not depend on its neighbours"


def test_functional_dropout_is_found_and_none_is_refused_with_advice():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 4)

        def forward(self, x):
            return F.dropout(self.a(x), 0.5, self.training)

    x = torch.randn(8, 2)
    data = (x, torch.zeros(8, 4))
    posterior = dubito.fit(Model(Functional(), Gaussian(scale=1.0)), MCDropout(epochs=1), data)
    assert (posterior.predict(x).f_var > 0).all()
    for net in (nn.Linear(2, 4), nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.0))):
        with pytest.raises(ValueError, match=r"no dropout to keep on.*at="):
            dubito.fit(Model(net, Gaussian(scale=1.0)), MCDropout(epochs=1), data)
    with pytest.raises(ValueError, match="names no layer"):
        dubito.fit(Model(nn.Sequential(nn.Linear(2, 4), nn.ReLU()), Gaussian(scale=1.0)), MCDropout(at="1"), data)


def test_rates_of_zero_and_sites_of_the_root_module():
    p = stochastic(nn.Linear(3, 1), at="", rate=0.0).predict(torch.randn(4, 3), draws=5)
    assert (p.f_var < 1e-12).all()
