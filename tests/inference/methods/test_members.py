"""What sets the members of an ensemble apart: starts, anchors, and rows that each holds out."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dubito
from dubito import MAP, Ensemble, Gaussian, Model
from dubito.priors import Normal

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] - 2 * X[:, 1:2] + 0.3 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1))


def fit(method: Ensemble, net: nn.Module | None = None, **options):
    return dubito.fit(Model(net or network(), Gaussian(scale=0.3), Normal(1.0)), method, (X, Y), progress=False, **options)


def test_a_number_is_a_deep_ensemble_of_that_size():
    assert Ensemble(3) == Ensemble(size=3)
    assert Ensemble(3).method == MAP()
    assert Ensemble(3).hold_out == 0.2
    assert Ensemble().size == 5
    assert Ensemble(MAP(), 3).hold_out is None
    assert len(fit(Ensemble(3), validation=(X, Y), patience=1)) == 3


def test_kept_layers_are_those_of_the_network_and_others_are_new():
    net = network()
    posterior = fit(Ensemble(MAP(epochs=0), 3, keep=r"^0\."), net)
    assert torch.equal(posterior.params["0.weight"], net[0].weight.detach().expand(3, -1, -1))
    assert len({tuple(row.flatten().tolist()) for row in (*posterior.params["2.weight"], net[2].weight.detach())}) == 4
    with pytest.raises(ValueError, match="matches none"):
        fit(Ensemble(MAP(epochs=0), 3, keep="head"))


def test_members_begin_at_starts_of_their_own():
    nets = [nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1)) for _ in range(3)]
    wanted = torch.stack([net[0].weight.detach() for net in nets])
    for start in (nets, [dict(net.named_parameters()) for net in nets], fit(Ensemble(MAP(epochs=0), 3), start=nets)):
        assert torch.equal(fit(Ensemble(MAP(epochs=0), 3), start=start).params["0.weight"], wanted)
    with pytest.raises(ValueError, match="3 settings of the weights for 4"):
        fit(Ensemble(MAP(epochs=0), 4), start=nets)
    with pytest.raises(ValueError, match="give keep='pattern'"):
        fit(Ensemble(MAP(epochs=0), 3), start=nets[0])
    kept = fit(Ensemble(MAP(epochs=0), 3, keep=""), start=nets[0]).params["0.weight"]
    assert torch.equal(kept, wanted[:1].expand(3, -1, -1))


def test_perturbed_starts_lie_around_the_network():
    net = network()
    found = fit(Ensemble(MAP(epochs=0), 200, keep="", perturb=0.1), net).params["0.weight"]
    size = net[0].weight.detach().square().mean().sqrt()
    assert torch.allclose((found - net[0].weight.detach()).std(), 0.1 * size, rtol=0.05)


def test_a_trained_network_is_warned_of_and_a_new_one_is_not():
    with torch.no_grad():
        trained = network()
        trained[0].weight *= 4
    with pytest.warns(UserWarning, match=r"seems to be trained \(0.weight"):
        fit(Ensemble(MAP(epochs=0), 3), trained)
    normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    normed(X)
    with pytest.warns(UserWarning, match="num_batches_tracked"):
        fit(Ensemble(MAP(epochs=0), 3), normed)
    scaled = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    with torch.no_grad():
        scaled[1].bias += 1e-3
    with pytest.warns(UserWarning, match=r"1\.bias"):
        fit(Ensemble(MAP(epochs=0), 3), scaled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Ensemble(MAP(epochs=0), 3, keep=r"^0\."), trained)
        fit(Ensemble(MAP(epochs=0), 3), start=[trained] * 3)
        for seed in range(20):
            torch.manual_seed(seed)
            fresh = nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Linear(40, 1))
            fit(Ensemble(MAP(epochs=0), 3), fresh)


@pytest.mark.parametrize("vectorize", [True, False])
def test_members_hold_out_fifths_and_stop_where_they_predict_them_best(vectorize):
    """Pure noise: the longer a member trains, the worse it predicts what it has not seen; the best is near the prior mean."""
    noise = torch.randn(60, 1, generator=torch.Generator().manual_seed(2))
    model = Model(network(), Gaussian(scale=0.3), Normal(10.0))
    whole, stopped = (
        dubito.fit(
            model,
            Ensemble(MAP(epochs=150, learning_rate=0.03), 5, vectorize=vectorize, hold_out=share),
            (X, noise),
            batch_size=20,
        )
        for share in (None, 0.2)
    )
    sizes = [float(posterior.predict(X).f_mean.square().mean()) for posterior in (whole, stopped)]
    assert sizes[1] < 0.3 * sizes[0]


def test_early_stopping_is_the_same_in_one_pass_and_one_by_one():
    model = Model(network().double(), Gaussian(scale=0.3), Normal(10.0))
    data = (X.double(), Y.double())
    a, b = (
        dubito.fit(model, Ensemble(MAP(epochs=12, learning_rate=0.1), 3, vectorize=v, hold_out=0.2), data, batch_size=20)
        for v in (True, False)
    )
    for name, leaf in a.params.items():
        assert torch.allclose(leaf, b.params[name], atol=1e-9)


def test_what_cannot_be_anchored_or_held_out_is_told():
    with pytest.raises(ValueError, match="Gaussian prior and nothing learned"):
        dubito.fit(Model(network(), Gaussian()), Ensemble(MAP(epochs=1), 2, anchored=True), (X, Y))
    with pytest.raises(ValueError, match="hold_out stops"):
        Ensemble(MAP(), 2, start=MAP(), hold_out=0.2)
    with pytest.raises(ValueError, match="hold_out must be above 0 and at most 0.5; got 0.9"):
        Ensemble(MAP(), 2, hold_out=0.9)


@pytest.mark.parametrize("options", [{"anchored": True}, {"hold_out": 0.2}], ids=str)
def test_a_run_that_was_stopped_goes_on(options, tmp_path):
    method = Ensemble(MAP(epochs=10), 3, **options)
    whole = fit(method)
    fit(method, checkpoint=tmp_path, callbacks=[lambda event: event.step == 4])
    again = fit(method, checkpoint=tmp_path, resume=True)
    assert all(torch.equal(again.params[name], leaf) for name, leaf in whole.params.items())
