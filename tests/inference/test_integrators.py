"""The integrators by their definitions: they lead back, keep volumes (or say by how much not), and have the order they should."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from dubito import Gaussian, Model
from dubito.inference.integrators import (
    Point,
    kinetic,
    leapfrog,
    minimal_norm,
    on_sphere,
    potential,
    refresh_direction,
    rise,
    turn,
)
from dubito.inference.log_density import Density, Value
from dubito.model import Target


class Landscape:
    """A density that can be differentiated twice: a bent valley. It stands in for a `Density` wherever Jacobians are wanted."""

    def __init__(self, temperature: float = 1.0):
        self.target, self.kernel = SimpleNamespace(temperature=temperature), None

    @staticmethod
    def energy(q: Tensor) -> Tensor:
        return 0.25 * q.pow(4).sum(1) + (q[:, 0] * q[:, 1]).cos() + 0.5 * (q[:, 1:] - q[:, :-1].square()).square().sum(1)

    def __call__(self, position: Tensor) -> Value:
        with torch.enable_grad():
            q = position if position.requires_grad else position.detach().requires_grad_()
            energy = self.energy(q)
            (slope,) = torch.autograd.grad(energy.sum(), q, create_graph=True)
        value = Value(-slope / self.target.temperature, -energy, torch.zeros_like(energy))
        return value if position.requires_grad else Value(*(leaf.detach() for leaf in value))

    def loop(self, name: str, function: Any) -> Any:
        def repeat(state: Any, constants: Any, steps: int) -> Any:
            for _ in range(steps):
                state = function(*state, *constants)
            return state

        return repeat


SCALE = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
LANDSCAPE: Any = Landscape()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def place(density: Any, position: Tensor, velocity: Tensor) -> Point:
    return Point(position, velocity, *density(position))


def counts(*n: int) -> Tensor:
    return torch.tensor(n, dtype=torch.int32)


def steps(*h: float) -> Tensor:
    return torch.tensor(h, dtype=torch.float64)


@pytest.fixture(scope="module")
def network() -> Density:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
    model = Model(net, Gaussian(scale=0.3))
    return Density(Target(model, 6, 1.7), [(x, x.sin())], model.parameters(), model.buffers())


def test_leapfrog_is_kick_drift_kick():
    start = place(LANDSCAPE, noise(1, 3), noise(1, 3, seed=1))
    h = 0.07
    v = start.velocity + 0.5 * h * SCALE * start.gradient
    q = start.position + h * SCALE * v
    v = v + 0.5 * h * SCALE * LANDSCAPE(q).gradient
    found = leapfrog(LANDSCAPE, start, step=steps(h), count=counts(1), scale=SCALE)
    assert torch.allclose(found.position, q, rtol=1e-14)
    assert torch.allclose(found.velocity, v, rtol=1e-14)
    assert torch.allclose(found.gradient, LANDSCAPE(q).gradient, rtol=1e-14)


def test_leapfrog_leads_back(network):
    """Turn round and make the same steps, or make steps of a negative length."""
    scale = 0.5 + noise(network.size, seed=2).abs()
    start = place(network, noise(3, network.size), noise(3, network.size, seed=1))
    step, count = steps(0.02, 0.05, 0.1), counts(20, 7, 1)
    end = leapfrog(network, start, step=step, count=count, scale=scale)
    assert float((end.position - start.position).abs().amax(1).min()) > 0.05
    back = leapfrog(network, end._replace(velocity=-end.velocity), step=step, count=count, scale=scale)
    reverse = leapfrog(network, end, step=-step, count=count, scale=scale)
    for found, sign in ((back, -1), (reverse, 1)):
        assert torch.allclose(found.position, start.position, atol=1e-12)
        assert torch.allclose(sign * found.velocity, start.velocity, atol=1e-12)
        assert torch.allclose(found.log_likelihood, start.log_likelihood, rtol=1e-10)


def test_chains_that_have_made_their_steps_wait_where_they_are(network):
    scale = torch.ones(network.size, dtype=torch.float64)
    start = place(network, noise(3, network.size), noise(3, network.size, seed=1))
    step = steps(0.02, 0.05, 0.1)
    together = leapfrog(network, start, step=step, count=counts(9, 0, 4), scale=scale)
    for c, n in enumerate((9, 0, 4)):
        if n == 0:
            assert torch.equal(together.position[c], start.position[c])
            assert torch.equal(together.velocity[c], start.velocity[c])
            continue
        alone = leapfrog(network, Point(*(leaf[c : c + 1] for leaf in start)), step=step[c : c + 1], count=counts(n), scale=scale)
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a[c], b[0], rtol=1e-10)


def test_leapfrog_keeps_volumes():
    def flow(state: Tensor) -> Tensor:
        start = place(LANDSCAPE, state[None, :3], state[None, 3:])
        end = leapfrog(LANDSCAPE, start, step=steps(0.2), count=counts(3), scale=SCALE)
        return torch.cat([end.position[0], end.velocity[0]])

    matrix = jacobian(flow, torch.cat([noise(3), noise(3, seed=1)]))
    assert float((matrix - torch.eye(6)).abs().max()) > 0.5
    assert float(torch.linalg.det(matrix)) == pytest.approx(1.0, abs=1e-12)


def test_leapfrog_is_of_second_order(network):
    """Half the step, a quarter of the error of the energy over the same path; and the energy is that of the tempered density."""
    scale = torch.ones(network.size, dtype=torch.float64)
    start = place(network, noise(40, network.size), noise(40, network.size, seed=1))
    errors = []
    for n in (20, 40, 80):
        end = leapfrog(network, start, step=torch.full((40,), 0.4 / n).double(), count=counts(*[n] * 40), scale=scale)
        change = rise(network, start, end) + kinetic(end.velocity) - kinetic(start.velocity)
        whole = potential(network, end) + kinetic(end.velocity) - potential(network, start) - kinetic(start.velocity)
        assert torch.allclose(change, whole, atol=1e-9)
        errors.append(change.square().mean().sqrt())
    assert float(errors[0] / errors[1]) == pytest.approx(4, rel=0.1)
    assert float(errors[1] / errors[2]) == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_density_that_is_not_finite_is_infinitely_high(lost):
    """Also a log density of plus infinity: from there no chain would ever come back."""
    value = torch.zeros(1, dtype=torch.float64)
    here, there = Value(value, value, value), Value(value, torch.tensor([lost], dtype=torch.float64), value)
    assert float(rise(LANDSCAPE, here, there)) == math.inf


# ---- microcanonical


def tangents(v: Tensor) -> Tensor:
    """An orthonormal basis [d, d - 1] of the directions along the sphere at v."""
    return torch.linalg.svd(v.unsqueeze(0)).Vh[1:].mT


def test_directions_have_length_sqrt_p():
    v = on_sphere(noise(5, 7))
    assert torch.allclose(v.square().sum(1), torch.tensor(7.0).double())


@pytest.mark.parametrize("reach", [1e-3, 0.4, 3.0])
def test_a_turn_is_the_flow_of_its_equation_and_knows_its_volume(reach):
    """u' = (I - u u^T) g sqrt(d) / (d - 1) for |u| = 1 and the time in which v moves by `reach`; the rise is -log |det|."""
    v, force, d = on_sphere(noise(1, 4)), noise(1, 4, seed=1), 4
    turned, gain = turn(v, force, steps(reach))
    u, n = v[0] / math.sqrt(d), 2000
    for _ in range(n):  # the midpoint rule
        half = u + 0.5 * reach / n * (force[0] - u * (u @ force[0])) * math.sqrt(d) / (d - 1)
        u = u + reach / n * (force[0] - half * (half @ force[0])) * math.sqrt(d) / (d - 1)
        u = u / u.norm()
    assert torch.allclose(turned[0], u * math.sqrt(d), atol=1e-5)
    matrix = jacobian(lambda w: turn(w.unsqueeze(0), force, steps(reach))[0][0], v[0])
    along = tangents(turned[0]).mT @ matrix @ tangents(v[0])
    assert float(gain) == pytest.approx(-float(torch.linalg.slogdet(along).logabsdet), rel=1e-9, abs=1e-12)


def test_a_strong_force_turns_all_the_way_without_overflow():
    v, force = on_sphere(noise(2, 5)).float(), noise(2, 5, seed=1).float()
    turned, gain = turn(v, 1e6 * force, torch.full((2,), 10.0))
    along = force / force.norm(dim=1, keepdim=True)
    assert torch.allclose(turned, along * math.sqrt(5), atol=1e-5)
    delta = 10 * 1e6 * force.norm(dim=1) * math.sqrt(5) / 4
    assert torch.allclose(gain, 4 * delta.double(), rtol=1e-4)


def test_minimal_norm_leads_back():
    start = place(LANDSCAPE, noise(4, 3), on_sphere(noise(4, 3, seed=1)))
    step = steps(0.05, 0.1, 0.2, 0.3)
    end, gain = minimal_norm(LANDSCAPE, start, step=step, scale=SCALE)
    back, loss = minimal_norm(LANDSCAPE, end._replace(velocity=-end.velocity), step=step, scale=SCALE)
    assert float((end.position - start.position).abs().amax(1).min()) > 0.03
    assert torch.allclose(back.position, start.position, atol=1e-12)
    assert torch.allclose(-back.velocity, start.velocity, atol=1e-12)
    assert torch.allclose(gain, -loss, atol=1e-10)
    assert float(gain.abs().min()) > 1e-3


def test_the_rise_of_kinetic_energy_is_the_loss_of_volume():
    """Of positions and directions together, for a whole step: without it the accept step of MAMS would be wrong."""
    q, v = noise(3), on_sphere(noise(1, 3, seed=1))[0]

    def flow(state: Tensor) -> Tensor:
        start = place(LANDSCAPE, state[None, :3], state[None, 3:])
        end, _ = minimal_norm(LANDSCAPE, start, step=steps(0.4), scale=SCALE)
        return torch.cat([end.position[0], end.velocity[0]])

    end, gain = minimal_norm(LANDSCAPE, place(LANDSCAPE, q[None], v[None]), step=steps(0.4), scale=SCALE)
    into, out = torch.zeros(6, 5).double(), torch.zeros(6, 5).double()
    into[:3, :3] = out[:3, :3] = torch.eye(3)
    into[3:, 3:], out[3:, 3:] = tangents(v), tangents(end.velocity[0].detach())
    matrix = out.mT @ jacobian(flow, torch.cat([q, v])) @ into
    assert abs(float(gain)) > 0.05
    assert float(gain) == pytest.approx(-float(torch.linalg.slogdet(matrix).logabsdet), rel=1e-9)


def test_minimal_norm_is_of_second_order_and_better_than_its_number_of_gradients(network):
    """With half the step a quarter of the error; and less error than leapfrog's splitting with as many gradients."""
    scale = torch.ones(network.size, dtype=torch.float64)
    start = place(network, noise(40, network.size), on_sphere(noise(40, network.size, seed=1)))

    def error(n: int) -> float:
        point, total = start, torch.zeros(40, dtype=torch.float64)
        for _ in range(n):
            point, gain = minimal_norm(network, point, step=torch.full((40,), 0.4 / n).double(), scale=scale)
            total = total + gain
        return float((rise(network, start, point) + total).abs().median())

    def plain(n: int) -> float:
        point, total, h = start, torch.zeros(40, dtype=torch.float64), torch.full((40,), 0.4 / n).double()
        for _ in range(n):
            v, first = turn(point.velocity, point.gradient, 0.5 * h)
            q = point.position + h.unsqueeze(1) * v
            value = network(q)
            v, second = turn(v, value.gradient, 0.5 * h)
            point, total = Point(q, v, *value), total + first + second
        return float((rise(network, start, point) + total).abs().median())

    assert error(20) / error(40) == pytest.approx(4, rel=0.15)
    assert error(40) / error(80) == pytest.approx(4, rel=0.05)
    assert error(10) < plain(20) / 2


def test_a_step_of_zero_moves_nothing(network):
    start = place(network, noise(2, network.size), on_sphere(noise(2, network.size, seed=1)))
    end, gain = minimal_norm(network, start, step=steps(0.0, 0.0), scale=torch.ones(network.size).double())
    assert torch.equal(end.position, start.position)
    assert torch.allclose(end.velocity, start.velocity, rtol=1e-14)
    assert torch.allclose(gain, torch.zeros(2).double(), atol=1e-13)


@pytest.mark.parametrize("step", [0.1, 1.0, 1e3])
def test_a_direction_is_forgotten_over_its_length(step):
    """Its correlation with what it was falls to exp(-step / length), and it stays a direction."""
    v = on_sphere(noise(3, 20_000))
    new = refresh_direction(v, noise(3, 20_000, seed=1), torch.full((3,), step).double(), 2.0)
    assert torch.allclose(new.square().mean(1), torch.ones(3).double())
    assert torch.allclose((v * new).mean(1), torch.full((3,), math.exp(-step / 2)).double(), atol=5 / math.sqrt(20_000))
