"""Prediction by sampling: right, in bounded memory, and without doing anything twice."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Categorical, Gaussian, Model
from dubito.posteriors import Mixture, Point, Samples, Stochastic
from dubito.posteriors.predict.dropout import Dropout, Folding
from dubito.posteriors.predict.sampled import _KNOWN


def stacked(model: Model, n: int, scale: float = 0.3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {k: v + scale * torch.randn(n, *v.shape, generator=g, dtype=v.dtype) for k, v in model.parameters().items()}


def loop(model: Model, posterior: Samples, x) -> torch.Tensor:
    """One draw after another, by hand."""
    out = []
    for i in range(len(posterior)):
        params = {**posterior.buffers, **{n: leaf[i] for n, leaf in {**posterior.params, **posterior.own_buffers}.items()}}
        with torch.no_grad():
            out.append(model.forward(params, x, {})[0])
    return torch.stack(out)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (5, 6)),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), (5, 6)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        (5, 2, 8, 8),
    ),
    "gru": (lambda: nn.Sequential(nn.GRU(6, 7, 2, batch_first=True, bidirectional=True), First(), nn.Linear(14, 3)), (5, 4, 6)),
    "lstm": (lambda: nn.Sequential(nn.LSTM(6, 7), First(), nn.Linear(7, 3)), (4, 5, 6)),
    "attention": (lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Linear(6, 3)), (5, 4, 6)),
    "control flow": (lambda: Branching(), (5, 6)),
}


class First(nn.Module):
    def forward(self, out):
        return out[0]


class Branching(nn.Module):
    """Asks for a value, which no batched pass can answer: the fallback takes one draw at a time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum().item() > 0 else -y


@pytest.mark.parametrize("memory", [1.0, 1e-6])
@pytest.mark.parametrize("name", NETWORKS)
def test_all_draws_at_once_equal_one_after_another(name, memory):
    build, shape = NETWORKS[name]
    model = Model(build().double(), Gaussian())
    posterior = Samples(model, stacked(model, 7), model.buffers())
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(posterior.predict(x, memory=memory).means, loop(model, posterior, x), atol=1e-10)


@pytest.mark.parametrize("memory", [1.0, 1e-6], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("kind", ["dropout in the head", "draws of the head"])
def test_what_is_not_random_is_computed_once(kind, memory):
    net = nn.Sequential(nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 13), nn.Dropout(0.5), nn.Linear(13, 3))
    model = Model(net, Categorical(), only="" if kind == "dropout in the head" else "^4")
    if kind == "dropout in the head":
        posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(net, None, 0.5), draws=20)
    else:
        posterior = Samples(model, stacked(model, 20), model.buffers())
    x = torch.randn(9, 31)
    with Spy() as spy:
        p = posterior.predict(x, memory=memory)
    assert p.means.shape == (20, 9, 3)
    assert spy.inputs[31] == 1, "the first layer ran once for all draws"
    assert spy.inputs[17] == 1
    assert (spy.inputs[13] > 2) == (memory < 1)
    assert p.means.std(0).min() > 0


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the matrix products that really run, by their inner size."""

    def __init__(self):
        super().__init__()
        self.inputs: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            matrix = args[1] if func is torch.ops.aten.addmm.default else args[0]
            self.inputs[matrix.shape[-1]] += 1
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    """A branch around the random layer: its deterministic side must be neither repeated nor mixed up between chunks."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.relu(self.a(x))
        z = self.drop(self.b(h))
        h += 1.0  # in place, after a random call has seen other things
        return self.c(z + h)


@pytest.mark.parametrize("consistent", [True, False])
def test_residual_and_in_place_networks_are_right_in_chunks(consistent):
    model = Model(Residual(), Gaussian(scale=1.0))
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(model.network, None, 0.1), draws=2000)
    x = torch.randn(3, 4)
    whole, chunks = (posterior.predict(x, memory=m, consistent=consistent) for m in (1.0, 1e-4))
    if consistent:
        assert torch.allclose(whole.means, chunks.means, atol=1e-6), "masks do not depend on the chunks"
    with torch.no_grad():
        mean = model.network.eval()(x)
    for p in (whole, chunks):
        assert torch.allclose(p.f_mean, mean, atol=6 * float(p.f_var.max() / 2000) ** 0.5)


def folding_of(net: nn.Module) -> Folding:
    return next(iter(_KNOWN[net].values())).folding


@pytest.mark.parametrize("hooked", [False, True])
def test_masks_are_put_on_the_next_layers_weights_and_change_nothing(hooked):
    net = nn.Sequential(nn.Linear(31, 17), nn.ReLU(), nn.Dropout(0.5), nn.Linear(17, 3)).double()
    model, x = Model(net, Gaussian(scale=1.0)), torch.randn(9, 31).double()
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(net, None, 0.1), draws=50)
    plain = posterior.predict(x, memory=1.0).means  # cheap: one pass, which only learns what feeds what
    _KNOWN.clear()
    seen = []
    if hooked:  # somebody wants to see what dropout gives, so it must be given
        net[2].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    folded = posterior.predict(x, memory=2e-3).means
    assert torch.allclose(plain, folded, atol=1e-12)
    assert bool(folding_of(net).calls) == (not hooked)
    assert bool(seen) == hooked
    assert torch.allclose(plain, posterior.predict(x, memory=2e-3).means, atol=1e-12), "also when it is known beforehand"


def test_a_mask_that_is_left_over_is_noticed():
    """Should a network take another way than it did when the folding was learned."""
    net = nn.Sequential(nn.Linear(31, 17), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, 3)).double()
    model, x = Model(net, Gaussian(scale=1.0)), torch.randn(9, 31).double()
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(net, None, 0.1), draws=50)
    right = posterior.predict(x).means
    folding = folding_of(net)
    assert folding.calls == {1: "4.weight"}
    folding.calls[0] = "4.weight"
    assert torch.allclose(posterior.predict(x).means, right, atol=1e-12)
    assert not folding_of(net).layers


def test_memory_is_bounded_and_the_callers_to_set():
    """With a small budget no intermediate holds more draws than fit."""
    net = nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
    model = Model(net, Gaussian(scale=1.0))
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(net, None, 0.1), draws=64)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.size = max(self.size, out.untyped_storage().nbytes())
            return out

    x, budget = torch.randn(50, 10), 2**22
    with Largest() as unbounded:
        posterior.predict(x, memory=100.0)
    with Largest() as bounded:
        posterior.predict(x, memory=budget / 2**30)
    assert unbounded.size >= 64 * 50 * 1000 * 4
    assert bounded.size <= budget


def test_networks_loaders_and_batches_see_the_same_functions():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    model = Model(net, Categorical())
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(net, None, 0.5), draws=6)
    x, y = torch.randn(10, 3), torch.randint(0, 2, (10,))
    whole = posterior.predict(x)
    p, targets = posterior.predict_loader(DataLoader(TensorDataset(x, y), batch_size=4))
    assert torch.allclose(p.means, whole.means, atol=1e-6)
    assert torch.equal(targets, y)
    inputs_only, none = posterior.predict_loader(DataLoader(TensorDataset(x), batch_size=3))
    assert none is None
    assert torch.allclose(inputs_only.means, whole.means, atol=1e-6)
    assert torch.allclose(posterior.predict_loader([x[:5], x[5:]])[0].means, whole.means, atol=1e-6)
    assert sum(len(part.mean) for part, _ in posterior.predict_batches([(x, y)])) == 10
    assert not torch.equal(posterior.predict(x, seed=1).means, whole.means)
    independent = posterior.predict_loader(DataLoader(TensorDataset(x, y), batch_size=4), seed=0)[0]
    assert independent.mean.shape == (10, 2)
    with pytest.raises(ValueError, match="no batch"):
        posterior.predict_loader([])


def test_samples_can_be_thinned_and_weighted():
    model = Model(nn.Linear(2, 1), Gaussian(scale=0.1))
    posterior = Samples(model, stacked(model, 9), model.buffers())
    x = torch.randn(4, 2)
    assert torch.equal(posterior.predict(x, draws=3).means, posterior.predict(x).means[[0, 4, 8]])
    weights = torch.tensor([1.0] + [0.0] * 8)
    heavy = Samples(model, posterior.params, model.buffers(), weights=weights)
    assert torch.allclose(heavy.predict(x).mean, posterior.predict(x).means[0])
    assert torch.equal(heavy.sample(5)["weight"], posterior.params["weight"][:1].expand(5, 1, 2))
    with pytest.raises(ValueError, match="unequal weights"):
        heavy.predict(x, draws=2)


def test_a_mixture_is_the_average_of_its_members():
    model = Model(nn.Linear(2, 3), Categorical())
    params, buffers = model.parameters(), model.buffers()
    a = Point(model, params, buffers)
    b = Samples(model, stacked(model, 4), buffers)
    x = torch.randn(5, 2)
    mixture = Mixture(model, (a, b), (0.3, 0.7))
    assert torch.allclose(mixture.predict(x).mean, 0.3 * a.predict(x).mean + 0.7 * b.predict(x).mean, atol=1e-6)
    drawn = mixture.sample(4000, torch.Generator().manual_seed(0))["weight"]
    share = (drawn == params["weight"]).flatten(1).all(1).float().mean()
    assert share == pytest.approx(0.3, abs=0.04)


def test_ways_to_predict_that_do_not_exist_are_named():
    model = Model(nn.Linear(2, 3), Categorical())
    point = Point(model, model.parameters(), model.buffers())
    with pytest.raises(ValueError, match="'sampled' or 'point'; got 'linearised'"):
        point.predict(torch.zeros(1, 2), how="linearised")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "control flow"])
def test_on_a_gpu_all_draws_at_once_equal_one_after_another(name):
    build, shape = NETWORKS[name]
    model = Model(build().double().cuda(), Gaussian())
    posterior = Samples(model, {k: v.cuda() for k, v in stacked(Model(build().double(), Gaussian()), 7).items()}, model.buffers())
    x = torch.randn(shape, dtype=torch.float64, device="cuda")
    assert torch.allclose(posterior.predict(x).means, loop(model, posterior, x), atol=1e-9)


@pytest.mark.gpu
def test_consistent_masks_are_the_same_on_every_device():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    here = dubito.fit(Model(net, Categorical()), dubito.MCDropout(epochs=0), (torch.zeros(4, 3), torch.zeros(4).long()))
    there = dubito.fit(
        Model(net, Categorical()), dubito.MCDropout(epochs=0), (torch.zeros(4, 3), torch.zeros(4).long()), device="cuda"
    )
    x = torch.randn(5, 3)
    assert torch.allclose(here.predict(x).means, there.predict(x).means.cpu(), atol=1e-5)


def test_a_prediction_leaves_room_on_a_gpu_that_is_nearly_full(monkeypatch):
    from dubito.posteriors.predict import sampled as module

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    for free, expected in ((70, 10.0), (4, 2.0)):
        monkeypatch.setattr(module, "available", lambda device, free=free: free * 2**30)
        assert module.room(None, gpu) == expected
        assert module.room(0.5, gpu) == 0.5
    assert module.room(None, torch.device("cpu")) == 1.0
