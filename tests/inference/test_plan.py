"""Plans against what fits really take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dubito
from dubito import MAP, SWAG, Categorical, Ensemble, Gaussian, Laplace, MCDropout, Model, NeuralLinear, OnlineLaplace
from dubito.curvature import memory
from dubito.inference.method import least_memory
from dubito.inference.plan import Plan, _bytes, _Tracked, plan
from dubito.posteriors import Mixture, Posterior
from dubito.priors import Normal
from dubito.testing import check_same, snapshot


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, outputs))


def classes(n: int = 16):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)


def held(posterior: Posterior) -> int:
    """Bytes of all that a posterior keeps. The evidence's few numbers and the weights it repeats are not counted."""
    if isinstance(posterior, Mixture):
        return sum(held(member) for member in posterior.members)
    return _bytes(replace(posterior, fitted=None) if hasattr(posterior, "fitted") else posterior)  # pyright: ignore


STRUCTURES = [
    Laplace("diagonal"),
    Laplace("kronecker"),
    Laplace("kronecker", prior_groups="parameter"),
    Laplace("kronecker", corrected=True),
    Laplace("dense"),
    Laplace("dense", prior_groups="one"),
    Laplace("dense", subset="last_layer"),
    Laplace("kronecker", subset="last_layer"),
    Laplace("dense", subnetwork=25),
    Laplace("dense", subnetwork=25, subnetwork_by="magnitude"),
    Laplace("lowrank", rank=4),
    Laplace("dense", "hessian", clip=True),
    Laplace("diagonal", "hessian", clip=True),
    OnlineLaplace("kronecker", epochs=3),
    OnlineLaplace("diagonal", epochs=3),
]
OTHERS = [
    MAP(epochs=2),
    MCDropout(epochs=2, at="", rate=0.1),
    SWAG(epochs=12, rank=4),
    SWAG(epochs=8, rank=20),
    SWAG(epochs=6, rank=0),
    Ensemble(MAP(epochs=2), 3),
    Ensemble(Laplace(check=False), 2, start=MAP(epochs=2)),
]


@pytest.mark.parametrize("method", [*STRUCTURES, *OTHERS], ids=lambda m: repr(m)[:60])
@pytest.mark.filterwarnings("ignore:the weights are not at an optimum")
def test_the_size_of_the_posterior_is_as_planned(method):
    few = getattr(method, "curvature", "") == "hessian"  # which takes a pass for every weight
    model, data = Model(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)) if few else mlp(), Categorical()), classes()
    found = plan(model, method, data, n_data=16)
    posterior = dubito.fit(model, method, data)
    assert found.posterior == held(posterior)
    assert found.parameters == sum(p.numel() for p in model.network.parameters())
    assert found.peak >= found.posterior - 100
    assert found.steps == method.steps(1)
    assert found.step is not None
    assert found.fits
    found.check()


@pytest.mark.parametrize("method", [Laplace("diagonal"), Laplace("kronecker"), Laplace("dense"), NeuralLinear()])
@pytest.mark.parametrize("likelihood", [Gaussian(), Gaussian(scale=0.1), Gaussian(outputs=3)])
@pytest.mark.filterwarnings("ignore:the weights are not at an optimum")
def test_with_a_noise_for_each_output_it_is_larger(method, likelihood):
    model, x = Model(mlp().double(), likelihood), classes()[0].double()
    found = plan(model, method, (x, x[:, :3]))
    posterior = dubito.fit(model, method, (x, x[:, :3]))
    assert found.posterior is not None
    assert abs(held(posterior) - found.posterior) <= 8 * 3 * 5  # but for the noises themselves, noted in each block
    assert found.steps is found.total is None


def test_draws_with_batchnorm_have_their_own_statistics():
    model = Model(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), Categorical())
    method = SWAG(epochs=6, draws=7)
    assert plan(model, method, classes()).posterior == held(dubito.fit(model, method, classes()))


WIDE = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))


@pytest.mark.parametrize(
    "method",
    [
        MAP(epochs=2),
        SWAG(epochs=12, rank=10),
        Laplace("dense"),
        Laplace("dense", prior_groups="one"),
        Laplace("kronecker"),
        Laplace("diagonal"),
        Laplace("lowrank", rank=10),
        Laplace("kronecker", corrected=True),
        Laplace("dense", subnetwork=50),
        OnlineLaplace(epochs=3),
        Ensemble(MAP(epochs=2), 4, vectorize=False),
    ],
    ids=lambda m: repr(m)[:60],
)
@pytest.mark.filterwarnings("ignore:the weights are not at an optimum")
def test_the_peak_is_within_a_factor_of_two_of_the_true_one(method):
    model, data = Model(WIDE, Categorical()), classes(64)
    found, tracked = plan(model, method, data), _Tracked()
    with tracked:
        dubito.fit(model, method, data)
    assert tracked.peak / 2 < found.peak < tracked.peak * 2


def test_the_tracker_counts_what_is_there_at_once():
    old, tracked = torch.zeros(1000), _Tracked()
    with tracked:
        a = torch.zeros(1000)
        b = a.view(10, 100)
        old.add_(1)
        for _ in range(3):
            c = a + 1  # of which one at a time, and the next before the last is gone
        del c
        assert tracked.now == 4000
        del a, b
    assert (tracked.now, tracked.peak) == (0, 12000)


def bottleneck(inputs: int, width: int, stride: int) -> nn.Module:
    """The convolutions of a block of ResNet-50, in a row."""
    return nn.Sequential(
        nn.Conv2d(inputs, width, 1), nn.ReLU(), nn.Conv2d(width, width, 3, stride, padding=1), nn.ReLU(),
        nn.Conv2d(width, 4 * width, 1), nn.ReLU(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def large() -> Model:
    """As large as ResNet-50, whose blocks it has: 23 million weights."""
    blocks, inputs = [], 64
    for width, n in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(n):
            blocks.append(bottleneck(inputs, width, 2 if i == 0 else 1))
            inputs = 4 * width
    net = nn.Sequential(nn.Conv2d(3, 64, 7, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return Model(net, Categorical())


IMAGES = (torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]))


def test_a_dense_structure_of_a_large_network_is_refused_with_advice(large):
    found = plan(large, Laplace("dense"), IMAGES, memory=4)
    assert found.parameters > 22e6
    assert not found.fits
    assert found.step is None
    with pytest.raises(MemoryError, match="structure='dense' over .* weights needs .* PB and 4 GB are free") as told:
        found.check()
    assert "structure='diagonal' " in str(told.value)
    assert "subset='last_layer' " in str(told.value)
    assert str(found).endswith(str(told.value))


def test_a_diagonal_or_the_last_layer_of_a_large_network_fits(large):
    for method in (Laplace("diagonal"), Laplace("kronecker", subset="last_layer")):
        found = plan(large, method, IMAGES, memory=4, n_data=1_281_167)
        found.check()
        assert found.fits
        assert found.peak < 4e9
        assert found.total is not None
        assert found.step is not None
        assert found.total == pytest.approx(found.step * 640_584)


def test_fit_refuses_before_the_pass_what_cannot_fit(large):
    for method in (Laplace("dense"), OnlineLaplace("dense"), Laplace("dense", subnetwork=10**7)):
        with pytest.raises(MemoryError, match="structure='dense' .*there would be room for"):
            dubito.fit(large, method, IMAGES)


def test_what_is_free_decides(monkeypatch):
    model, data = Model(mlp(), Categorical()), classes()
    monkeypatch.setattr(memory, "available", lambda device: 10_000)
    with pytest.raises(
        MemoryError, match="structure='dense' over 423 weights needs 1.43 MB and 10 kB are free, 1.42 MB too little"
    ):
        dubito.fit(model, Laplace("dense"), data)
    dubito.fit(model, Laplace("kronecker", subset="last_layer", check=False), data)
    monkeypatch.setattr(memory, "available", lambda device: 100)
    with pytest.raises(MemoryError, match="name fewer weights"):
        dubito.fit(model, Laplace("dense"), data)
    monkeypatch.setattr(memory, "available", lambda device: None)
    dubito.fit(model, Laplace("dense", check=False), data)


def test_advice_for_methods_without_a_structure():
    model, data = Model(mlp(), Categorical()), classes()
    for method, match in (
        (MAP(), "smaller batches"),
        (SWAG(), "a smaller rank"),
        (Ensemble(MAP(), 3), "MAP of 423 weights needs"),
    ):
        found = plan(model, method, data, memory=1e-6)
        with pytest.raises(MemoryError, match=match):
            found.check()


def test_the_container_has_a_word(monkeypatch, tmp_path):
    whole = memory.available(torch.device("cpu"))
    assert whole is None or whole > 0
    for name, text in (("memory.max", "5000000"), ("memory.current", "3000000"), ("memory.stat", "anon 1\ninactive_file 500000")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    if whole is not None:
        assert memory.available(torch.device("cpu")) == 2_500_000
        (tmp_path / "memory.max").write_text("max")
        found = memory.available(torch.device("cpu"))
        assert found is not None
        assert found > 5_000_000


@pytest.mark.parametrize("method", [MAP(), Laplace(), OnlineLaplace(), MCDropout(at=""), Ensemble(MAP(), 2), SWAG()])
def test_nothing_of_the_users_changes(method):
    model = Model(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 3)), Categorical())
    before = snapshot(model)
    plan(model, method, classes())
    check_same(before, snapshot(model))


def test_a_plan_reads_well():
    found = Plan("Laplace", 25_557_032, 102_400_000, 3_100_000_000, 10, 50_000, 0.25, 40_000, 10_000.0, 14_000_000_000)
    assert str(found).splitlines() == [
        "Laplace",
        "  parameters       25,557,032",
        "  posterior        102 MB",
        "  peak of the fit  3.1 GB, of 14 GB that are free",
        "  prediction       50 kB an input",
        "  step             250 ms",
        "  all steps        2.78 h, 40,000 steps",
    ]


def test_samplers_are_timed_and_their_draws_not_counted():
    from contract.methods import ULA

    model, data = Model(mlp(1), Gaussian(scale=0.5), Normal(scale=1.0)), (classes()[0], classes()[0][:, :1])
    found: Any = plan(model, ULA(n_draws=10, burn_in=0), data, n_data=160)
    assert found.posterior is None
    assert found.total == pytest.approx(10 * 10 * found.step)
    assert "grows with the draws" in str(found)


@pytest.mark.parametrize(
    "method", [dubito.SWAG(), dubito.MAP(), dubito.Variational(), dubito.IVON(), dubito.Ensemble(3)], ids=str
)
def test_a_fit_that_cannot_have_its_memory_is_refused_before_it_begins(method, monkeypatch):
    model = dubito.Model(torch.nn.Linear(100, 10), dubito.Categorical())
    data = torch.randn(8, 100), torch.arange(8)
    needed = least_memory(method, 4040)
    monkeypatch.setattr("dubito.curvature.memory.available", lambda device: needed - 1)
    with pytest.raises(MemoryError, match="of 1,010 weights needs"):
        dubito.fit(model, method, data)


@pytest.mark.parametrize(
    ("method", "numbers"),
    [(MAP(), 1), (dubito.IVON(samples=3), 3), (dubito.SGHMC(), 1), (dubito.Variational(), 2), (SWAG(), 1)],
    ids=lambda value: repr(value)[:30],
)
def test_what_a_step_exchanges_is_what_the_page_on_several_processes_says(method, numbers):
    """Four bytes for each number, and for the log likelihood that goes with each sum."""
    model, data = Model(mlp(), Categorical()), classes()
    count = sum(p.numel() for p in model.network.parameters())
    found = plan(model, method, data, n_data=16, processes=4)
    sums = 3 if numbers == 3 else 1
    assert found.exchanged == 4 * (numbers * count + sums)
    assert "by each of 4 processes" in str(found)
    assert plan(model, method, data).exchanged == 0


def test_batch_norm_has_sums_of_its_own_and_samplers_are_refused():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    count = sum(p.numel() for p in net.parameters())
    assert plan(Model(net, Categorical()), MAP(), classes(), processes=2).exchanged == 4 * (count + 1) + 4 * (4 * 4 + 2)
    for method in (dubito.Metropolis(), Ensemble(MAP(epochs=2), 3)):
        with pytest.raises(ValueError, match="spread over the processes"):
            plan(Model(mlp(), Categorical()), method, classes(), processes=2)
