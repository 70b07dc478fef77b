"""The kernels against autograd in float64.

Without a GPU they run in Triton's interpreter: `pip install triton` beside torch for CPUs, and `TRITON_INTERPRET=1`. (The interpreter
of Triton 3.6 needs a NumPy below 2.4; that of 3.9 does not.)
"""

from __future__ import annotations

import copy
import importlib.util
import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, LogNormal

import dubito
from dubito.inference.integrators import MINIMAL_NORM, on_sphere, turn
from dubito.inference.kernels import mlp
from dubito.inference.log_density import Density, same
from dubito.model import Target
from dubito.priors import MultivariateNormal, Normal
from dubito.tensors import tree

# what Triton's interpreter does with NumPy's arrays of one element
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without TRITON_INTERPRET=1 Triton needs a GPU")
    return request.param


def network(*widths: int, activation=nn.ReLU, bias: tuple[bool, ...] = (True, True, True)) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(widths, [*widths[1:], 1], strict=True)):
        layers += [nn.Linear(a, b, bias=bias[i]), activation()]
    return nn.Sequential(*layers[:-1])


def problem(net: nn.Module, likelihood=None, *, n=40, chains=2, device="cpu", temperature=1.0):
    """Target, data, the tree of a chain, and the weights of some chains, [C, P]."""
    prior = Normal(scale={"0.weight": 0.5, "bias": 2.0, "": 0.3})
    model = dubito.Model(net.to(device), likelihood or dubito.Gaussian(scale=0.3), prior=prior)
    x, y = torch.randn(n, next(net.parameters()).shape[1]).to(device), torch.randn(n, 1).to(device)
    like = model.parameters(y if n > 1 else None)
    q = tree.flatten(like) + 0.3 * torch.randn(chains, tree.size(like)).to(device)
    return Target(model, n, temperature=temperature), (x, y), like, q


def exact(target: Target, batch, like, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, log likelihood and log prior by autograd in float64."""
    target = replace(target, model=replace(target.model, network=copy.deepcopy(target.model.network).double()))
    batch = tuple(part.double() for part in batch)
    rows = []
    for row in q.double():
        params = tree.unflatten(row, like)
        found = target.gradient(params, [batch], {})
        rows.append((tree.flatten(found.gradient), found.log_likelihood * len(batch[0]), target.log_prior(params)))
    g, log_likelihood, log_prior = zip(*rows, strict=True)
    return torch.stack(g), torch.stack(log_likelihood), torch.stack(log_prior)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def leapfrog(target, batch, like, q, v, g, step, scale, steps) -> tuple[Tensor, Tensor, Tensor]:
    q, v, g, step, scale = (t.double() for t in (q, v, g, step.unsqueeze(1), scale))
    for _ in range(steps):
        v = v + step / 2 * scale * g
        q = q + step * scale * v
        g = exact(target, batch, like, q)[0]
        v = v + step / 2 * scale * g
    return q, v, g


@pytest.mark.parametrize("case", range(24))
def test_gradient_is_that_of_autograd(device, case):
    choose = random.Random(case)
    depth, activation = choose.choice([1, 1, 2]), [nn.ReLU, nn.Tanh, nn.SiLU, nn.GELU][case % 4]
    inputs, n = choose.choice([1, 3, 13, 15, 16, 32]), choose.choice([1, 7, 127, 200])
    widths = [choose.choice([1, 5, 16, 50, 100 if depth == 1 else 64]) for _ in range(depth)]
    noise = choose.choice([dubito.Gaussian(scale=0.3), dubito.Gaussian(), dubito.Gaussian(prior=Gamma(1.5, 0.7))])
    bias = tuple(choose.random() < 0.7 for _ in range(3))
    net, temperature = network(inputs, *widths, activation=activation, bias=bias), choose.choice([1.0, 0.3, 10.0])
    target, batch, like, q = problem(net, noise, n=n, device=device, temperature=temperature)
    plan = mlp.recognize(replace(target, members=2), batch, like)
    assert plan is not None
    found, wanted = plan.gradient(*batch, q), exact(target, batch, like, q)
    assert apart(found[0], wanted[0]) < 5e-6
    assert (found[0] - wanted[0]).abs().max() < 1e-4 * wanted[0].abs().max()  # no weight left out
    assert found[1].dtype == found[2].dtype == torch.float64
    assert apart(found[1], wanted[1]) < 5e-6
    assert apart(found[2], wanted[2]) < 1e-6


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "net", [lambda: network(5, 20), lambda: network(5, 6, 7, activation=nn.Tanh)], ids=["relu", "two layers"]
)
def test_leapfrog_goes_where_float64_goes(device, net, shared):
    target, batch, like, q = problem(net(), dubito.Gaussian(), chains=4, device=device, temperature=2.0)
    plan = mlp.recognize(target, batch, like)
    assert plan is not None
    step, left = torch.tensor([1e-3, 2e-3, 3e-3, 1e-3]).to(device), torch.tensor([5, 2, 9, 0], dtype=torch.int32).to(device)
    scale = (0.5 + torch.rand(q.shape[1:] if shared else q.shape)).to(device)
    v, (g, log_likelihood, log_prior) = torch.randn_like(q), plan.gradient(*batch, q)
    new = [t.clone() for t in (q, v, g)]
    log_likelihood.fill_(torch.nan)
    plan.leapfrog(*batch, *new, log_likelihood, log_prior, step=step, left=left, scale=scale, steps=5)
    for chain, steps in enumerate([5, 2, 5, 0]):
        one = slice(chain, chain + 1)
        start = (q[one], v[one], g[one], step[one], scale if shared else scale[one])
        for found, wanted in zip(new, leapfrog(target, batch, like, *start, steps), strict=True):
            assert apart(found[one], wanted) < 1e-5
    assert all(torch.equal(now[3], before[3]) for now, before in zip(new, (q, v, g), strict=True))  # it had no steps left
    wanted = exact(target, batch, like, new[0])
    assert apart(log_likelihood, wanted[1]) < 5e-6
    assert apart(log_prior, wanted[2]) < 1e-6


def microcanonical(target, batch, like, q, v, g, step, scale, kicks, fresh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn, drift, turn, drift, turn, and a kick, in float64, with all that `integrators` has of it."""
    q, v, g, step, scale, kicks, fresh = (t.double() for t in (q, v, g, step, scale, kicks, fresh))
    gain = torch.zeros_like(step)
    for kick in kicks:
        for reach in (MINIMAL_NORM, 1 - 2 * MINIMAL_NORM):
            v, more = turn(v, scale * g, reach * step)
            q, gain = q + 0.5 * step.unsqueeze(1) * scale * v, gain + more
            g = exact(target, batch, like, q)[0]
        v, more = turn(v, scale * g, MINIMAL_NORM * step)
        v, gain = on_sphere(v + fresh.unsqueeze(1) * kick), gain + more
    return q, v, g, gain


@pytest.mark.parametrize("kicked", [True, False])
@pytest.mark.parametrize(
    "net", [lambda: network(5, 20), lambda: network(5, 6, 7, activation=nn.Tanh)], ids=["relu", "two layers"]
)
def test_microcanonical_steps_go_where_float64_goes(device, net, kicked):
    target, batch, like, q = problem(net(), dubito.Gaussian(), chains=4, device=device, temperature=2.0)
    plan = mlp.recognize(target, batch, like)
    assert plan is not None
    step, left = torch.tensor([1e-2, 2e-2, 3e-2, 1e-2]).to(device), torch.tensor([3, 2, 9, 0], dtype=torch.int32).to(device)
    scale, kicks = (0.5 + torch.rand(q.shape)).to(device), torch.randn(3, *q.shape).to(device)
    fresh = torch.tensor([0.1, 0.5, 2.0, 0.3]).to(device) if kicked else torch.zeros(4).to(device)
    v, (g, log_likelihood, log_prior) = on_sphere(torch.randn_like(q)), plan.gradient(*batch, q)
    new = [t.clone() for t in (q, v, g)]
    log_likelihood.fill_(torch.nan)
    noise = {"kicks": kicks, "fresh": fresh} if kicked else {}
    gain = plan.microcanonical(
        *batch, *new, log_likelihood, log_prior, step=step, left=left, scale=scale, steps=3, share=MINIMAL_NORM, **noise
    )
    for chain, steps in enumerate([3, 2, 3, 0]):
        one = slice(chain, chain + 1)
        start = (q[one], v[one], g[one], step[one], scale[one], kicks[:steps, one], fresh[one])
        *point, risen = microcanonical(target, batch, like, *start)
        for found, wanted in zip(new, point, strict=True):
            assert apart(found[one], wanted) < 1e-5
        assert abs(gain[chain] - risen) < 1e-4 * (1 + abs(risen))
    wanted = exact(target, batch, like, new[0])
    assert apart(log_likelihood, wanted[1]) < 5e-6
    assert apart(log_prior, wanted[2]) < 1e-6


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, where a chain is lost
def test_langevin_tells_the_error_of_its_last_step(device):
    target, batch, like, q = problem(network(4, 9), chains=3, device=device, temperature=2.0)
    plan = mlp.recognize(target, batch, like)
    assert plan is not None
    kernel = mlp.Trajectories(plan, *batch, 2.0)
    v, step, ones = on_sphere(torch.randn_like(q)), torch.tensor([1e-2, 2e-2, 3e-2]).to(device), torch.ones(q.shape[1]).to(device)
    found = plan.gradient(*batch, q)
    start, options = (q, v, *found), {"scale": ones, "share": MINIMAL_NORM, "length": 1.0}

    def generator() -> torch.Generator:
        return torch.Generator(device).manual_seed(1)

    def run(steps: int, start=start, generator=generator):
        return kernel.langevin(*start, step=step, steps=steps, generator=generator(), **options)

    before = [leaf.clone() for leaf in start]
    point, error = run(4)
    assert all(torch.equal(a, b) for a, b in zip(start, before, strict=True))
    kicks = torch.empty(4, *q.shape, device=device).normal_(generator=generator())
    fresh = torch.expm1(2 * step.double()).sqrt()
    *wanted, total = microcanonical(target, batch, like, q, v, found[0], step, ones, kicks, fresh)
    assert all(apart(a, b) < 1e-5 for a, b in zip(point, wanted, strict=False))
    third = microcanonical(target, batch, like, q, v, found[0], step, ones, kicks[:3], fresh)
    old, new = (exact(target, batch, like, at)[1:] for at in (third[0], wanted[0]))
    assert torch.allclose(error, (sum(old) - sum(new)) / 2.0 + total - third[3], atol=2e-3)
    lost = kernel.langevin(q * torch.inf, *start[1:], step=step, steps=2, generator=generator(), **options)
    assert lost is None
    (moved, turned, *_), gain = kernel.minimal_norm(*start[:3], step=step, scale=ones, share=MINIMAL_NORM)
    *one, risen = microcanonical(target, batch, like, q, v, found[0], step, ones, 0 * kicks[:1], 0 * step)
    assert apart(moved, one[0]) < 1e-5
    assert apart(turned, one[1]) < 1e-5
    assert torch.allclose(gain, risen, atol=1e-4)


def test_a_trajectory_can_be_run_back_and_in_parts(device):
    target, batch, like, q = problem(network(3, 12), device=device)
    plan = mlp.recognize(target, batch, like)
    assert plan is not None
    chains, ones = len(q), torch.ones(q.shape[1]).to(device)
    step, left = torch.full((chains,), 1e-3).to(device), torch.full((chains,), 100, dtype=torch.int32).to(device)

    def run(q, v, *parts: int):
        q, v, (g, *energies) = q.clone(), v.clone(), plan.gradient(*batch, q)
        for steps in parts:
            plan.leapfrog(*batch, q, v, g, *energies, step=step, left=left, scale=ones, steps=steps)
        return q, v, energies

    v = torch.randn_like(q)
    there, speed, energies = run(q, v, 12)
    assert apart(run(q, v, 5, 7)[0], there) < 1e-6
    back, _, _ = run(there, -speed, 12)
    assert apart(back, q) < 1e-5
    before = plan.gradient(*batch, q)

    def energy(found, v):
        return 0.5 * v.double().square().sum(1) - found[0] - found[1]

    went = (energies[0] - before[1]).abs()
    assert went.max() > 1
    assert ((energy(energies, speed) - energy(before[1:], v)).abs() < 0.02 * went.max()).all()  # the step is small


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, in the interpreter
def test_one_chain_that_diverges_leaves_the_others_alone(device):
    target, batch, like, q = problem(network(3, 12), dubito.Gaussian(), chains=3, device=device)
    plan = mlp.recognize(target, batch, like)
    assert plan is not None
    step, left = torch.tensor([1e-3, 1e15, 1e-3]).to(device), torch.full((3,), 6, dtype=torch.int32).to(device)
    g, *energies = plan.gradient(*batch, q)
    here, v = q.clone(), torch.randn_like(q)
    speed, slope = v.clone(), g.clone()
    plan.leapfrog(*batch, here, speed, slope, *energies, step=step, left=left, scale=torch.ones_like(q), steps=6)
    assert not torch.isfinite(energies[0][1])
    start = (q[[0, 2]], v[[0, 2]], g[[0, 2]], step[[0, 2]], torch.ones_like(q[:1]))
    assert apart(here[[0, 2]], leapfrog(target, batch, like, *start, 6)[0]) < 1e-5


def test_data_that_changed_are_read_anew(device):
    target, (x, y), like, q = problem(network(3, 12), device=device)
    plan = mlp.recognize(target, (x, y), like)
    assert plan is not None
    plan.gradient(x, y, q)
    y += 1
    assert apart(plan.gradient(x, y.squeeze(1), q)[0], exact(target, (x, y), like, q)[0]) < 5e-6
    fewer = x[:9].clone(), y[:9].clone()
    assert apart(plan.gradient(*fewer, q)[0], exact(replace(target, n_data=9), fewer, like, q)[0]) < 5e-6


def test_wrong_shapes_are_said(device):
    target, batch, like, q = problem(network(3, 12), device=device)
    plan = mlp.recognize(target, batch, like)
    assert plan is not None
    g, *energies = plan.gradient(*batch, q)
    step, left, scale = torch.ones(2).to(device), torch.ones(2, dtype=torch.int32).to(device), torch.ones_like(q)
    with pytest.raises(ValueError, match="left is a contiguous"):
        plan.leapfrog(*batch, q, q.clone(), g, *energies, step=step, left=left.long(), scale=scale, steps=1)
    with pytest.raises(ValueError, match="scale is a contiguous"):
        plan.leapfrog(*batch, q, q.clone(), g, *energies, step=step, left=left, scale=scale[:, :-1], steps=1)
    with pytest.raises(ValueError, match="the plan is for"):
        plan.gradient(*batch, q[:, :-1])


class Own(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnLinear(nn.Linear):
    pass


def changed(net: nn.Module, change) -> nn.Module:
    change(net)
    return net


def tied() -> nn.Module:
    net = network(3, 3, 3)
    net[2].weight = net[0].weight
    return net


OTHERS = {
    "another activation": lambda: network(3, 4, activation=nn.LeakyReLU),
    "tanh GELU": lambda: network(3, 4, activation=lambda: nn.GELU(approximate="tanh")),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)),
    "two activations": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
    "no hidden layer": lambda: nn.Sequential(nn.Linear(3, 1)),
    "three hidden layers": lambda: nn.Sequential(*network(3, 4, 4), nn.ReLU(), nn.Linear(1, 1)),
    "activation last": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.ReLU()),
    "two outputs": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "wide": lambda: network(3, 129),
    "many inputs": lambda: network(64, 4),
    "own forward": lambda: Own(*network(3, 4)),
    "own layer": lambda: nn.Sequential(OwnLinear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
    "hook": lambda: changed(network(3, 4), lambda net: net[1].register_forward_hook(lambda m, x, f: 2 * f)),
    "hook before": lambda: changed(network(3, 4), lambda net: net.register_forward_pre_hook(lambda m, x: None)),
    "frozen": lambda: changed(network(3, 4), lambda net: net[0].bias.requires_grad_(False)),
    "tied": tied,
    "float64": lambda: network(3, 4).double(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_not_recognised(monkeypatch, name):
    monkeypatch.setattr(mlp, "available", lambda device: True)
    net = OTHERS[name]()
    model = dubito.Model(net, dubito.Gaussian(scale=1.0))
    x, y = torch.randn(9, net[0].in_features).to(net[0].weight.dtype), torch.randn(9, 1)
    assert mlp.recognize(Target(model, 9), (x, y), model.parameters()) is None


def test_what_is_recognised_and_what_else_must_hold(monkeypatch):
    monkeypatch.setattr(mlp, "available", lambda device: True)
    target, (x, y), like, _ = problem(network(3, 4), dubito.Gaussian())
    plan = mlp.recognize(target, (x, y), like)
    assert plan is not None
    assert plan.places == (0, 12, -1, -1, 16, 20, 21)
    assert plan.precision.tolist() == pytest.approx([4.0] * 12 + [0.25] * 4 + [0.3**-2] * 4 + [0.25, 0.0])
    assert mlp.recognize(replace(target, members=5), (x, y.squeeze(1)), like) is not None
    model = target.model
    no = [
        (replace(target, n_data=99), (x, y)),  # a part of the data
        (replace(target, weights=(torch.ones(40),)), (x, y)),
        (replace(target, adversary=torch.ones(3)), (x, y)),
        (replace(target, precision=torch.bfloat16), (x, y)),
        (target, (x.double(), y)),
        (target, (x, y.double())),
        (target, (x.unsqueeze(1), y)),
        (target, ((x, x), y)),
        (replace(target, model=replace(model, output=lambda f: 2 * f)), (x, y)),
        (replace(target, model=replace(model, likelihood=dubito.Gaussian(outputs=2))), (x, y)),
        (replace(target, model=replace(model, likelihood=dubito.Gaussian(prior=LogNormal(0.0, 1.0)))), (x, y)),
        (replace(target, model=replace(model, likelihood=dubito.Gaussian(scale=1.0))), (x, y)),  # `like` has a noise
        (replace(target, model=replace(model, prior=MultivariateNormal(torch.zeros(21), torch.eye(21)))), (x, y)),
        (replace(target, model=replace(model, only="weight")), (x, y)),
    ]
    for i, (other, batch) in enumerate(no):
        assert mlp.recognize(other, batch, other.model.parameters() if i == len(no) - 1 else like) is None, i
    monkeypatch.undo()
    if importlib.util.find_spec("triton") is None:
        assert mlp.recognize(target, (x, y), like) is None


def test_the_kernel_takes_over_where_the_gradient_cancels(device):
    """Of a fit that goes on with a small noise, the terms of the gradient are thousands of times larger than their sum."""
    torch.manual_seed(0)
    target, batch, like, _ = problem(network(5, 20), dubito.Gaussian(), n=60, device=device)
    x = batch[0]
    with torch.no_grad():
        y = target.model.network(x) + 1e-3 * torch.randn_like(batch[1])
    like = {**like, "likelihood:log_scale": torch.full((1,), -6.9, device=device)}
    density = Density(target, [(x, y)], like, {})
    density.fit_chunks(2)
    assert isinstance(density.kernel, mlp.Trajectories) or device == "cpu"  # the interpreter's tensors are the CPU's
    plan = mlp.recognize(target, (x, y), like)
    assert plan is not None
    assert same(plan.gradient(x, y, density._near()), density(density._near()))
