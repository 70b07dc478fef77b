import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from kernels.recorded_target import Recorded
from torch import nn

import dubito
from dubito import MAP, SWAG, Categorical, Ensemble, MCDropout, Model, OnlineLaplace, Variational
from dubito.families import Grouped
from dubito.inference.method import Start
from dubito.model import Target
from dubito.priors import Normal, ScaleMixture


def problem(device: str):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    batches = [(torch.randn(16, 4, device=device), torch.randint(3, (16,), device=device)) for _ in range(3)]
    return Model(network, Categorical()), batches


def same(model, batches):
    """Gradients as the weights move in place, and over batches of another size."""
    plain, recorded = Target(model, 100), Recorded(model, 100)
    params = model.parameters()
    for x, y in [*batches, (batches[0][0][:7], batches[0][1][:7])]:
        expected = plain.gradient(params, [(x, y)], {}, factor=0.3)
        found = recorded.gradient(params, [(x, y)], {}, factor=0.3)
        torch.testing.assert_close(found.gradient, expected.gradient)
        torch.testing.assert_close(found.log_likelihood, expected.log_likelihood)
        torch._foreach_add_(list(params.values()), list(found.gradient.values()), alpha=0.01)
    return recorded


def test_ordinary_way_on_a_cpu():
    assert not same(*problem("cpu")).recordings


@pytest.mark.gpu
def test_played_back():
    recorded = same(*problem("cuda"))
    assert len(recorded.recordings) == 2
    assert all(recording is not None for recording in recorded.recordings.values())


@pytest.mark.gpu
def test_a_network_that_looks_at_values_goes_the_ordinary_way():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    _, batches = problem("cuda")
    same(Model(Looks(4, 3).cuda(), Categorical()), batches)
    torch.rand((), device="cuda")  # the user's generator is not left waiting for the end of a recording


@pytest.mark.gpu
def test_a_recording_is_of_one_number_of_data():
    model, batches = problem("cuda")
    params, recorded = model.parameters(), Recorded(model, 100)
    for n in (100, 50, 100):
        found = dataclasses.replace(recorded, n_data=n).gradient(params, batches[:1], {})
        torch.testing.assert_close(found.gradient, Target(model, n).gradient(params, batches[:1], {}).gradient)


# ---- whole steps


def network(*, dropout: bool = False, norm: bool = False, layer: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(16)] if norm else [nn.Dropout(0.3)] if dropout else []
    return nn.Sequential(nn.Linear(4, 16), *between, nn.Tanh(), layer or nn.Linear(16, 3))


def both_ways(net: nn.Module, method, prior=None, *, plays: bool = True, n: int = 96, size: int = 16, device: str = "cuda"):
    """A fit with and without recordings: the same weights and buffers."""
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))
    model, found, played = Model(net.to(device), Categorical(), prior or Normal(scale=1.0)), [], []

    def look(event):
        state = event.state.stages[0].members[0] if hasattr(event.state, "stages") else event.state
        played.append(len(state.recorded.played))

    for record in (True, False):
        own = dataclasses.replace(method, record=record) if hasattr(method, "record") else replaced(method, record)
        with mock.patch(
            "dubito.network.cuda_graphs.time", SimpleNamespace(perf_counter=lambda: 0.0)
        ):  # others may keep the GPU busy
            posterior = dubito.fit(model, own, data, batch_size=size, callbacks=[look], seed=1)
        found.append({**(getattr(posterior, "params", None) or posterior.leaves), **posterior.buffers})
    assert (max(played[: len(played) // 2]) > 0) is plays
    assert not any(played[len(played) // 2 :])
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)


def replaced(method, record: bool):
    return dataclasses.replace(method, method=dataclasses.replace(method.method, record=record))


def test_nothing_is_recorded_on_a_cpu():
    both_ways(network(), MAP(epochs=3), plays=False, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("net", "method"),
    [
        (network(), MAP(epochs=8)),
        (network(), MAP(epochs=8, optimizer="sgd", warmup=0.3, clip=0.1)),
        (network(norm=True), MAP(epochs=8)),
        (network(dropout=True), MCDropout(epochs=8)),
        (network(), MCDropout(at="", rate=0.2, learn_rates=True, epochs=8)),
        (network(), Ensemble(MAP(epochs=8), 3)),
        (network(norm=True), Ensemble(MAP(epochs=8), 2, vectorize=False)),
        (network(), Variational(epochs=8, kl_warmup=0.5)),
        (network(), Variational("flow", epochs=8)),
        (network(), Variational("matrix_normal", epochs=8)),
        (network(), Variational(estimator="flipout", epochs=8, learning_rate=0.01)),
        (network(), Variational(estimator="weights", samples=2, epochs=8)),
        (network(), Variational(estimator="weights", epochs=8, kl_weight=0.5)),
        (network(norm=True), SWAG(epochs=8)),
        (network(), OnlineLaplace(epochs=8)),
    ],
    ids=lambda value: "" if isinstance(value, nn.Module) else repr(value)[:60],
)
def test_steps_are_played_back(net, method):
    both_ways(net, method, Normal() if isinstance(method, OnlineLaplace) else None)


@pytest.mark.gpu
def test_batches_of_several_shapes_and_other_priors():
    both_ways(network(), MAP(epochs=12), n=90, size=16)
    both_ways(network(), Variational(epochs=8, estimator="weights"), ScaleMixture(0.5, scales=(1.0, 0.1)))
    both_ways(network(), Variational(Grouped("horseshoe"), epochs=8))


class Looks(nn.Linear):
    """Reads a value of a tensor, so that Python waits for the GPU, and draws from the GPU's generator."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.2, self.training) * (2.0 if x.sum().item() > 0 else 1.0))


class Draws(nn.Linear):
    """Draws from the CPU's generator in training. In eval mode it is deterministic: `fit` warns of networks that are not."""

    def forward(self, x):
        return super().forward(x) * (2.0 if self.training and float(torch.rand(())) > 0.5 else 1.0)


@pytest.mark.parametrize("layer", [Looks, Draws])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_cannot_be_recorded_goes_the_ordinary_way(layer, device):
    """On the CPU nothing is recorded: there the test shows that the two layers are fitted without a warning."""
    both_ways(network(layer=layer(16, 3)), MAP(epochs=8), plays=False, device=device)
    both_ways(network(layer=layer(16, 3)), Variational(epochs=8, estimator="weights"), plays=False, device=device)


@pytest.mark.gpu
def test_weights_that_have_moved_are_recorded_anew():
    model, batches = problem("cuda")
    found = []
    for record in (True, False):
        method, target, generator = MAP(epochs=1, record=record), Target(model, 100), torch.Generator("cuda").manual_seed(0)
        state = method.init(target, Start(model.parameters(), {}), batches[0], generator, steps=20)
        for i in range(20):
            if i == 10:
                for leaf in state.params.values():
                    leaf.set_(leaf.clone())
            state, _ = method.step(target, state, [batches[0]], generator)
        found.append(state.params)
    torch.testing.assert_close(found[0], found[1])
