"""Gradients derived by hand against autograd, trajectories against the plain integrators, and what is not taken for known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.inference import integrators
from dubito.inference.full_batch import ChainState
from dubito.inference.integrators import Point, on_sphere
from dubito.inference.kernels import mlp_cpu
from dubito.inference.log_density import Density
from dubito.inference.method import Start
from dubito.model import Model, Target
from dubito.priors import Normal

N, C = 37, 5


def net(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [activation(), nn.Dropout(0.3)] if i else []
        layers.append(nn.Linear(widths[i], widths[i + 1], bias=bias))
    return nn.Sequential(*layers).double()


def data(outputs: int, classes: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=g, dtype=torch.float64)
    y = torch.randint(outputs, (N,), generator=g) if classes else torch.randn(N, outputs, generator=g, dtype=torch.float64)
    return x, y


def density(network: nn.Module, likelihood=None, temperature: float = 1.0, by_hand: bool = True) -> Density:
    likelihood = likelihood or dubito.Gaussian(scale=0.3)
    outputs = [m for m in network.modules() if isinstance(m, nn.Linear)][-1].out_features
    batch = data(outputs, isinstance(likelihood, dubito.Categorical))
    model = Model(network, likelihood, Normal(scale=0.7))
    found = Density(Target(model, N, temperature), [batch], model.parameters(batch[1]), model.buffers())
    if by_hand:
        found.fit_chunks(C)
    return found


def positions(held: Density) -> Tensor:
    return torch.randn(C, held.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


CASES: dict[str, Callable[[], tuple]] = {
    "rectified": lambda: (net(3, 6, 1), dubito.Gaussian(scale=0.3)),
    "rectified, learned noise": lambda: (net(3, 6, 1), dubito.Gaussian()),
    "rectified, no biases": lambda: (net(3, 6, 1, bias=False), dubito.Gaussian()),
    "tanh": lambda: (net(3, 6, 1, activation=nn.Tanh), dubito.Gaussian()),
    "SiLU, two layers": lambda: (net(3, 6, 5, 1, activation=nn.SiLU), dubito.Gaussian(scale=0.3)),
    "two outputs": lambda: (net(3, 6, 2), dubito.Gaussian(scale=0.3)),
    "two outputs, one noise": lambda: (net(3, 6, 2), dubito.Gaussian()),
    "two outputs, two noises": lambda: (net(3, 6, 4, 2, activation=nn.Tanh), dubito.Gaussian(outputs=2)),
    "classes": lambda: (net(3, 6, 4), dubito.Categorical()),
    "classes, two layers without biases": lambda: (net(3, 6, 5, 4, bias=False), dubito.Categorical()),
}


@pytest.mark.parametrize("cache", [mlp_cpu.CACHE, 700, 60], ids=["all at once", "chains in groups", "data in blocks"])
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_autograd_gives(name, cache, monkeypatch):
    monkeypatch.setattr(mlp_cpu, "CACHE", cache)
    held = density(*CASES[name]())
    assert held.hand is not None
    assert isinstance(held.hand, mlp_cpu.Rectified) == name.startswith("rectified")
    position = positions(held)
    for one in (position, position[:2], position):  # the memory that is used again holds nothing from before
        expected, found = held._likelihood(one, held.chunks[0]), held.hand(one)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    kept, _ = held(position), held(position + 1)
    torch.testing.assert_close(kept.gradient, held(position).gradient, rtol=0, atol=0)


def test_it_is_used_in_single_precision_too():
    network = net(3, 6, 1).float()
    x, y = (leaf.float() for leaf in data(1, False))
    model = Model(network, dubito.Gaussian(), Normal(scale=0.7))
    held = Density(Target(model, N), [(x[:20], y[:20]), (x[20:], y[20:])], model.parameters(y), model.buffers())
    held.fit_chunks(C)
    assert held.hand is not None
    position = positions(held).float()
    expected = held._likelihood(position, (x, y))
    found = held.hand(position)
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "an activation that is not known": lambda: nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 1)),
    "two activations": lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Tanh(), nn.Linear(6, 1)),
    "no activation": lambda: nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 1)),
    "one layer": lambda: nn.Sequential(nn.Linear(3, 1)),
    "a last activation": lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1), nn.ReLU()),
    "a class of its own": lambda: type("Own", (nn.Sequential,), {})(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_left_to_autograd(name):
    held = density(OTHERS[name]().double())
    assert held.hand is None
    assert held.kernel is None


def test_a_network_with_a_hook_or_a_frozen_layer_is_left_to_autograd():
    hooked = net(3, 6, 1)
    hooked[0].register_forward_hook(lambda module, args, output: 2 * output)
    assert density(hooked).hand is None
    frozen = net(3, 6, 1)
    frozen[0].weight.requires_grad_(False)
    assert density(frozen).hand is None
    shared = net(3, 3, 3, 1)
    shared[3].weight = shared[0].weight
    assert density(shared).hand is None
    held = density(net(3, 6, 1), by_hand=False)
    assert mlp_cpu.field(held.target, held.chunks[0], held.like) is not None
    for change in ({"around": lambda params: None}, {"weights": (torch.ones(N),)}, {"precision": torch.bfloat16}):
        assert mlp_cpu.field(replace(held.target, **change), held.chunks[0], held.like) is None


def test_what_differs_from_autograd_is_not_used(monkeypatch):
    right = mlp_cpu.Rectified.__call__
    monkeypatch.setattr(mlp_cpu.Rectified, "__call__", lambda self, *a: (right(self, *a)[0], right(self, *a)[1] * 1.01))
    held = density(net(3, 6, 1))
    assert held.hand is None
    assert held.kernel is None


GAMMA = torch.distributions.Gamma(torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
BELIEVED: dict[str, Callable[[], tuple]] = {
    "a noise with a prior": lambda: (net(3, 6, 1), dubito.Gaussian(prior=GAMMA)),
    "two noises with a prior": lambda: (net(3, 6, 2), dubito.Gaussian(outputs=2, prior=GAMMA)),
}


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", ["rectified", "rectified, learned noise", "tanh", "classes", *BELIEVED])
def test_a_trajectory_is_the_plain_one(name, temperature, monkeypatch):
    """Chains in groups, with different steps and counts, one of which does not move."""
    monkeypatch.setattr(mlp_cpu, "CACHE", 700)
    held = density(*(CASES | BELIEVED)[name](), temperature=temperature)
    kernel, held.kernel = held.kernel, None
    assert kernel is not None
    position = positions(held)
    start = Point(position, torch.randn_like(position), *held(position))
    step, scale = torch.linspace(0.001, 0.01, C).double(), torch.rand(held.size).double()
    options = {"step": step, "count": torch.tensor([5, 0, 9, 9, 7], dtype=torch.int32), "scale": scale}
    expected = integrators.leapfrog(held, start, **options)
    held.kernel = kernel
    found = integrators.leapfrog(held, start, **options)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
    assert torch.equal(found.position[1], position[1])


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", ["rectified", "rectified, learned noise", "tanh", *BELIEVED])
def test_every_point_of_a_path_is_the_plain_one(name, temperature, monkeypatch):
    monkeypatch.setattr(mlp_cpu, "CACHE", 700)
    held = density(*(CASES | BELIEVED)[name](), temperature=temperature)
    kernel, held.kernel = held.kernel, None
    position = positions(held)
    start = Point(position, torch.randn_like(position), *held(position))
    step, scale = torch.linspace(-0.01, 0.01, C).double(), torch.rand(held.size).double()
    options = {"step": step, "moves": torch.arange(C) != 1, "scale": scale, "steps": 6}
    expected = integrators.leapfrog_path(held, start, **options)
    held.kernel = kernel
    path = integrators.leapfrog_path(held, start, **options)
    for one, two in zip(path, expected, strict=True):
        assert one.shape[:2] == (6, C)
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
    for leaf, before in zip(path, start, strict=True):
        assert torch.equal(leaf[:, 1], before[1].expand_as(leaf[:, 1]))


def particles(held: Density) -> tuple[dubito.MCLMC, ChainState]:
    method = dubito.MCLMC(chains=C, draws=1, burn_in=0, thin=7, tune=False, step_size=0.02)
    model = held.target.model
    generator = torch.Generator().manual_seed(2)
    state = method.init(held.target, Start(model.parameters(), model.buffers()), held.chunks[0], generator, steps=1)
    state.position, state.density = positions(held), held
    state.gradient, state.log_likelihood, state.log_prior = held(state.position)
    state.velocity = on_sphere(torch.randn(C, held.size, generator=generator, dtype=torch.float64))
    return method, state


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("name", ["rectified", "tanh", "classes", *BELIEVED])
def test_microcanonical_steps_are_the_plain_ones(name, temperature, monkeypatch):
    monkeypatch.setattr(mlp_cpu, "CACHE", 700)
    held = density(*(CASES | BELIEVED)[name](), temperature=temperature)
    method, one = particles(held)
    _, two = particles(held)
    step = torch.linspace(0.001, 0.03, C).double()
    point = Point(one.position, one.velocity, one.gradient, one.log_likelihood, one.log_prior)
    quick, gain = integrators.minimal_norm(held, point, step=step, scale=one.scale)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    (noted,) = method.moves(held, one, generators[0])
    kernel, held.kernel = held.kernel, None
    plain, gained = integrators.minimal_norm(held, point, step=step, scale=one.scale)
    for a, b in zip((*quick, gain), (*plain, gained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    apart = list(method.moves(held, two, generators[1]))
    assert kernel is not None
    assert len(apart) == 7
    for name_ in ("position", "velocity", "gradient", "log_likelihood", "log_prior"):
        torch.testing.assert_close(getattr(one, name_), getattr(two, name_), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(noted["energy_error"], apart[-1]["energy_error"], rtol=1e-6, atol=1e-8)
    assert float(noted["gradients"][0]) == sum(float(one["gradients"][0]) for one in apart)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_chains_that_leave_what_numbers_hold_are_walked_one_step_at_a_time():
    held = density(*CASES["rectified"]())
    method, state = particles(held)
    state.tuning["log_step"] = state.tuning["log_step"] + 2000.0
    before, generator = state.position.clone(), torch.Generator().manual_seed(3)
    apart = list(method.moves(held, state, generator))
    assert len(apart) == 7
    assert all(bool((one["divergent"] == 1).all()) for one in apart)
    assert torch.equal(state.position, before)
