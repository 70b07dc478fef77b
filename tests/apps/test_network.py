"""Posteriors as plain networks, and features that a hook sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from apps.networks import build
from dubito.apps import failure, ood
from dubito.apps.network import Network, examples, last_linear, networks, only_network, posterior_of, score_loader
from dubito.evaluation.reservoir import Reservoir
from dubito.posteriors import Drawn, Gaussian, Mixture, Point, Samples, Stored
from dubito.posteriors.predict.dropout import Dropout
from dubito.tensors import store


def point(network: nn.Module, likelihood=None) -> Network:
    model = dubito.Model(network, likelihood or dubito.Categorical())
    return networks(Point(model, model.parameters(), model.buffers()))[0]


def hooks(network: nn.Module) -> list:
    return [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in network.modules()]


def test_features_are_what_the_last_layer_multiplies():
    network, x = build("mlp")
    one = point(network.train())
    layer = last_linear(one, x)
    phi, f = one.features(x, layer)
    last = network.get_submodule(layer)
    torch.testing.assert_close(f, phi @ last.weight.T + last.bias)
    assert layer == "7"
    assert network.training
    assert not any(any(one) for one in hooks(network))


def test_weights_are_the_posteriors_and_not_the_modules():
    network, x = build("mlp")
    model = dubito.Model(network, dubito.Categorical())
    params = {name: leaf + 0.1 for name, leaf in model.parameters().items()}
    one = networks(Point(model, params, model.buffers()))[0]
    torch.testing.assert_close(one(x), torch.func.functional_call(network, params, (x,)))


def test_the_layer_that_runs_last_is_not_the_one_that_was_written_last():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.hidden = nn.Linear(4, 2), nn.Linear(3, 4)

        def forward(self, x):
            return self.out(torch.relu(self.hidden(x)))

    assert last_linear(point(Backwards()), torch.zeros(1, 3)) == "out"


def test_features_of_convolutions_are_averaged_over_positions():
    network, x = build("resnet")
    one = point(network)
    phi, _ = one.features(x, "blocks.1.second")
    seen = []
    with network.blocks[1].second.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        network(x)
    torch.testing.assert_close(phi, seen[0].mean((2, 3)))


def test_dense_outputs_have_features_at_every_position():
    network = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 3, 1))
    one = point(network, dubito.Categorical(dim=1))
    phi, f = one.features(torch.randn(2, 2, 4, 6), "2")
    assert phi.shape == (2, 4, 6, 5)
    assert f.shape == (2, 4, 6, 3)


def test_a_hook_is_removed_also_when_the_network_fails():
    network, _ = build("mlp")
    with pytest.raises(ValueError, match="does not take inputs of shape"):
        point(network).features(torch.zeros(2, 3), "7")
    assert not any(any(one) for one in hooks(network))


@pytest.mark.parametrize("form", ["point", "gaussian", "stochastic", "samples", "mixture"])
def test_every_form_is_some_networks(form):
    network, x = build("mlp")
    model = dubito.Model(network, dubito.Categorical())
    params, buffers = model.parameters(), model.buffers()
    stacked = {name: torch.stack([leaf, 2 * leaf, 3 * leaf]) for name, leaf in params.items()}
    posterior = {
        "point": lambda: Point(model, params, buffers),
        "gaussian": lambda: Gaussian.diagonal(model, params, {name: torch.ones_like(leaf) for name, leaf in params.items()}),
        "stochastic": lambda: dubito.posteriors.Stochastic(model, params, buffers, Dropout()),
        "samples": lambda: Samples(model, stacked, buffers, weights=torch.tensor([0.5, 0.25, 0.25])),
        "mixture": lambda: Mixture.equal([Samples(model, stacked, buffers), Point(model, params, buffers)]),
    }[form]()
    found = networks(posterior)
    assert len(found) == {"samples": 3, "mixture": 4}.get(form, 1)
    assert sum(one.weight for one in found) == pytest.approx(1)
    torch.testing.assert_close(found[0](x), network.eval()(x))
    if form == "samples":
        assert [one.weight for one in found] == [0.5, 0.25, 0.25]
        f = torch.stack([one(x) for one in found])
        torch.testing.assert_close(f, posterior.predict(x).means)


def test_draws_are_taken_evenly():
    model = dubito.Model(nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0))
    posterior = Samples(model, {"weight": torch.arange(101.0).reshape(-1, 1, 1)}, {})
    assert [float(one(torch.ones(1, 1))) for one in networks(posterior, draws=5)] == [0, 25, 50, 75, 100]


def test_draws_on_disk_and_families_that_are_drawn_from(tmp_path):
    model = dubito.Model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), dubito.Categorical())
    x, params = torch.randn(5, 2), model.parameters()
    with store.Draws(tmp_path) as draws:
        for factor in range(1, 4):
            draws.append({name: factor * leaf for name, leaf in params.items()})
        draws.flush()
        stored = Stored.of(model, draws, {})
    torch.testing.assert_close(torch.stack([one(x) for one in networks(stored)]), stored.predict(x).means)
    method = dubito.Variational(dubito.families.Grouped(), epochs=1)
    drawn = dubito.fit(model, method, (x, torch.arange(5) % 2), progress=False)
    assert isinstance(drawn, Drawn)
    found = networks(drawn, draws=3)
    assert len(found) == 3
    assert not torch.equal(found[0](x), found[1](x))
    assert torch.equal(found[0](x), networks(drawn, draws=3)[0](x))


def test_a_frozen_network_is_a_posterior():
    network, x = build("resnet")
    network.requires_grad_(False)
    torch.testing.assert_close(posterior_of(network).predict(x).f_mean, network(x))
    with pytest.raises(TypeError, match="a posterior, a dubito.Model or a classifier"):
        posterior_of("network")


def test_several_networks_are_not_one():
    model = dubito.Model(nn.Linear(1, 2), dubito.Categorical())
    stacked = {name: torch.stack([leaf] * 3) for name, leaf in model.parameters().items()}
    with pytest.raises(ValueError, match="one of them, as posteriors.Point"):
        only_network(Samples(model, stacked, {}), "ConfidNet")


def test_no_linear_layer():
    with pytest.raises(ValueError, match="name a layer with layer=..., such as '0'"):
        last_linear(point(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten())), torch.zeros(1, 1, 1, 1))


def test_examples_of_loaders_arrays_and_inputs_alone():
    model = dubito.Model(nn.Linear(3, 2), dubito.Categorical())
    x, y = torch.randn(7, 3), torch.arange(7) % 2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    before = torch.get_rng_state()
    for data in ((x, y), (x.numpy(), y.numpy()), loader, x, [x[:4], x[4:]]):
        found = list(examples(model, data, size=3))
        torch.testing.assert_close(torch.cat([batch[0] for batch in found]), x)
        assert found[0][1] is None or torch.equal(torch.cat([batch[1] for batch in found]), y)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(score_loader(lambda x: x.sum(-1), loader), x.sum(-1))


def test_weights_of_draws():
    model = dubito.Model(nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0))
    stacked, x = {"weight": torch.arange(50.0).reshape(-1, 1, 1)}, torch.ones(1, 1)
    weights = torch.zeros(50)
    weights[7], weights[30] = 0.25, 0.75
    found = networks(Samples(model, stacked, {}, weights=weights))
    assert [(float(one(x)), one.weight) for one in found] == [(7, 0.25), (30, 0.75)]
    slope = torch.arange(50.0) / torch.arange(50.0).sum()
    found = networks(Samples(model, stacked, {}, weights=slope), draws=20)
    assert len(found) <= 20
    assert sum(one.weight for one in found) == pytest.approx(1)
    mean = sum(one.weight * float(one(x)) for one in found)
    assert mean == pytest.approx(float(slope @ torch.arange(50.0)), rel=0.03)
    some = Point(model, {"weight": torch.ones(1, 1)}, {})
    assert len(networks(Mixture(model, (some, some), (1.0, 0.0)))) == 1


def test_a_layer_that_is_not_there():
    with pytest.raises(ValueError, match="has no layer 'head'; it has \\['0', '1'\\]"):
        point(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).features(torch.zeros(1, 2), "head")


def test_generators_are_given_back_where_something_is_raised(monkeypatch):
    network, (x, y) = nn.Linear(3, 4), (torch.randn(9, 3), torch.arange(9) % 4)

    def fails(*_):
        raise RuntimeError("no")

    def head(score):
        return failure.Selective(0.1, score).fit(network, (x, y))

    monkeypatch.setattr(ood.detectors._Sums, "add", fails)
    monkeypatch.setattr(ood.detectors.ODINScore, "direction", fails)
    monkeypatch.setattr(Reservoir, "add", fails)
    settings = failure.ConfidNet((4,), epochs=1)
    for attempt in (
        lambda: head(fails),
        lambda: ood.Mahalanobis().fit(network, (x, y)),
        lambda: ood.Neighbours().fit(network, (x, y)),
        lambda: ood.ODIN().fit(network, (x, y)),
        lambda: settings.fit(network, (x, y)),
    ):
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="no") as caught:
            attempt()
        assert torch.equal(before, torch.get_rng_state())
        del caught  # the traceback keeps the frames, and so a generator that nobody has closed


def test_loaders_of_scores():
    x, y = torch.randn(7, 3), torch.arange(7)
    data = torch.utils.data.TensorDataset(x, y)
    assert torch.equal(score_loader(lambda x: x.sum(-1), data, size=3), x.sum(-1))
    with pytest.raises(TypeError, match="give inputs alone"):
        score_loader(lambda x: x.sum(-1), (x, y))
