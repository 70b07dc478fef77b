"""Steps in which processes differ on purpose, against the same step written out."""

import math

import pytest
import torch
from torch import nn

import dubito
from distributed_ranks import on_ranks
from dubito import priors
from dubito.inference.method import Start
from dubito.model import Target
from dubito.tensors.processes import ALONE, join_processes
from dubito.tensors.randomness import derive_seed
from dubito.tensors.shares import Share

N, SCALE = 11, 0.5
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, generator=GENERATOR), torch.randn(N, 1, generator=GENERATOR)


def model():
    torch.manual_seed(1)
    return dubito.Model(nn.Linear(3, 1, bias=False), dubito.Gaussian(scale=SCALE), priors.Normal(scale=2.0))


def step(method, processes):
    """One step of a method on all data, and the generator as it was before."""
    own = Share.of(N, processes.rank, processes.size)
    shares = (own,) if processes.size > 1 else None
    target, generator = Target(model(), N, processes=processes), torch.Generator().manual_seed(5)
    start = Start(target.model.parameters(), target.model.buffers())
    state = method.init(target, start, (X, Y), generator, steps=100)
    before = generator.get_state()
    target = Target(target.model, N, processes=processes, shares=shares)
    state, _ = method.step(target, state, [(own.take(X), own.take(Y))], generator)
    return state, before


def own_generators(before, size):
    """The generators of the processes."""
    common = torch.Generator()
    common.set_state(before)
    seed = int(torch.randint(2**62, (), generator=common))
    return [torch.Generator().manual_seed(derive_seed(seed, "process", rank)) for rank in range(size)]


def slope(weights, rank, size):
    """The gradient of minus the log likelihood of a process's examples, divided by N."""
    own = Share.of(N, rank, size)
    x, y = own.take(X), own.take(Y)
    return (x.mT @ (x @ weights.mT - y)).mT / SCALE**2 / N


def test_variational_averages_over_the_draws_of_all_processes():
    method = dubito.Variational(
        epochs=1, learning_rate=0.1, estimator="weights", optimizer="sgd", momentum=0.0, draws_per_rank=True
    )

    def work(rank):
        with join_processes() as processes:
            state, before = step(method, processes)
            return state.params, before

    (first, before), (second, _) = on_ranks(2, work)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    mean, sigma = model().parameters()["weight"], method.init_scale
    slopes, products = 0.0, 0.0
    for rank, generator in enumerate(own_generators(before, 2)):
        noise = torch.empty(1, 3).normal_(generator=generator)
        own = slope(mean + sigma * noise, rank, 2)
        slopes, products = slopes + own, products + own * noise
    expected = mean - 0.1 * (slopes + mean / 4 / N)
    torch.testing.assert_close(first["mean/weight"], expected)
    rho = {name: leaf for name, leaf in first.items() if name != "mean/weight"}
    scale = method.q.constrain(first)["scale/weight"] - sigma
    assert len(rho) == 1
    wanted = -0.1 * (products + sigma / 4 / N - 1 / sigma / N)
    start = method.q.leaves({"weight": mean}, {"weight": torch.full_like(mean, sigma)})
    gradient = method.q.unconstrain_gradient(start, {"mean/weight": slopes, "scale/weight": -wanted / 0.1})
    moved = {name: leaf - 0.1 * gradient[name] for name, leaf in start.items() if name != "mean/weight"}
    torch.testing.assert_close(rho, moved)
    assert scale.abs().max() > 0


@pytest.mark.parametrize("samples", [1, 2])
def test_ivon_adds_up_gradients_and_hessians_of_the_draws_of_all_processes(samples):
    method = dubito.IVON(epochs=1, samples=samples, clip=None, hessian_momentum=0.9, draws_per_rank=True)

    def work(rank):
        with join_processes() as processes:
            state, before = step(method, processes)
            return state.params, state.spread, state.drawn, before

    (params, spread, drawn, before), (others, other_spread, other_drawn, _) = on_ranks(2, work)
    torch.testing.assert_close((params, spread, drawn), (others, other_spread, other_drawn), rtol=0, atol=0)
    mean, h, delta, rho = model().parameters()["weight"], method.initial_hessian, 1 / (N * 4), 0.1
    slopes, products = 0.0, 0.0
    for rank, generator in enumerate(own_generators(before, 2)):
        away = torch.empty(3).normal_(0.0, math.sqrt(1 / N), generator=generator) / math.sqrt(h + delta)
        for sign in (1, -1)[:samples]:
            own = slope(mean + sign * away, rank, 2) / samples
            slopes, products = slopes + own, products + own * sign * away
    estimate = products * N * (h + delta)
    hessian = h + rho * (estimate - h) + 0.5 * rho**2 * (estimate - h) ** 2 / (h + delta)
    torch.testing.assert_close(spread["weight"], 1 / (hessian + delta))
    rate = method.learning_rate * (h + delta)
    torch.testing.assert_close(params["weight"], mean - rate * (slopes + delta * mean) / (hessian + delta))


@pytest.mark.parametrize("method", [dubito.IVON, dubito.Variational])
def test_one_process_has_the_same_draws_with_and_without(method):
    with_own, _ = step(method(epochs=1, draws_per_rank=True), ALONE)
    without, _ = step(method(epochs=1), ALONE)
    torch.testing.assert_close(with_own.params, without.params, rtol=0, atol=0)


def test_gradients_in_half_the_bytes_are_rounded_to_eight_bits():
    def work(rank):
        with join_processes() as processes:
            gradient = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
            exact, number = gradient.clone(), torch.tensor(1.0 + 2**-20)
            processes.sum_([exact])
            sent = processes.bytes
            processes.exchange = torch.bfloat16
            processes.sum_gradient_([gradient], number)
            return gradient, exact, number, processes.bytes - sent

    for gradient, exact, number, sent in on_ranks(2, work):
        error = (gradient - exact).norm() / exact.norm()
        assert 2**-11 < error < 2**-8
        assert number == 2 + 2**-19
        assert sent == 2 * 1000 + 4


@pytest.mark.parametrize(
    "method", [dubito.MAP(epochs=10), dubito.Variational(epochs=10), dubito.IVON(epochs=10, draws_per_rank=True)]
)
def test_a_fit_with_rounded_gradients_is_near_the_exact_one(method):
    def work(rank):
        exact, rounded = (
            dubito.fit(model(), method, (X, Y), batch_size=6, progress=False, exchange_dtype=dtype).center[0]["weight"]
            for dtype in (None, "bfloat16")
        )
        return exact, rounded

    for exact, rounded in on_ranks(2, work):
        assert 0 < (exact - rounded).norm() / exact.norm() < 0.01
