"""The trajectories of NUTS, against the recursion by which it is defined."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dubito
from dubito import NUTS
from dubito.inference.integrators import Point, kinetic, leapfrog, rise
from dubito.inference.log_density import Density
from dubito.inference.methods.nuts import LARGEST, SMALLEST
from dubito.model import Target
from dubito.tensors import randomness
from inference.methods.regression import MILD, by_chain


def straight(v: Tensor, *, across: bool = True) -> bool:
    """The criterion by its definition, for velocities [n, P] of neighbouring points: recursively, as it is published."""
    if len(v) == 1:
        return True
    one, two = v[: len(v) // 2], v[len(v) // 2 :]
    parts = [v, v[: len(one) + 1], v[len(one) - 1 :]] if across else [v]
    ends = all(bool(part[0] @ part.sum(0) > 0) and bool(part[-1] @ part.sum(0) > 0) for part in parts)
    return straight(one, across=across) and straight(two, across=across) and ends


@pytest.fixture(scope="module")
def gaussian() -> tuple[Density, Any, Point]:
    density = Density(Target(MILD.model, 20), [(MILD.x, MILD.y)], MILD.model.parameters(), MILD.model.buffers())
    position = MILD.draws(48)["weight"].squeeze(1)
    velocity = torch.randn(48, 3, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return density, SimpleNamespace(scale=torch.ones(3, dtype=torch.float64)), Point(position, velocity, *density(position))


@pytest.mark.parametrize("step", [0.1, -0.1, 0.06])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_a_branch_is_what_the_recursion_builds(gaussian, size, step):
    density, state, start = gaussian
    h, once = torch.full((48,), step, dtype=torch.float64), torch.ones(48, dtype=torch.int32)
    points = [start]
    for _ in range(size):
        points.append(leapfrog(density, points[-1], step=h, count=once, scale=state.scale))
    velocities = torch.stack([point.velocity for point in points[1:]], 1)  # [C, size, P]
    errors = torch.stack(
        [rise(density, start, point) + kinetic(point.velocity) - kinetic(start.velocity) for point in points[1:]], 1
    )
    growing = torch.arange(48) > 3
    branch = NUTS()._branch(density, state, start, start, h, growing, size, torch.Generator().manual_seed(0))
    expected = torch.tensor([straight(v) for v in velocities]) & growing
    assert torch.equal(branch.sound, expected)
    if size == 16:
        assert 0 < int(expected.sum()) < 44, "some turn and some do not"
    if size == 32:
        assert sum(straight(v) for v in velocities) < sum(straight(v, across=False) for v in velocities), (
            "turns between halves count"
        )
    on = branch.sound
    assert torch.allclose(branch.end.position[on], points[-1].position[on])
    assert torch.allclose(branch.stretch.total[on], velocities.sum(1)[on])
    assert torch.allclose(branch.weight[on], (-errors).logsumexp(1)[on])
    assert torch.allclose(branch.acceptance[on], (-errors).exp().clamp(max=1).sum(1)[on])
    assert (branch.points[on] == size).all()
    assert (branch.points[~growing] == 0).all()
    for c in torch.where(growing & ~on)[0].tolist():  # ends at the first stretch that turns
        ends = [n for n in range(1, size + 1) for k in range(6) if n % 2**k == 0 and not straight(velocities[c, n - 2**k : n])]
        assert int(branch.points[c]) == (size if size >= SMALLEST else min(ends))  # blocks of points are looked at together


def test_a_point_of_a_branch_is_drawn_by_its_weight(gaussian):
    density, state, start = gaussian
    many = 20_000
    point = Point(*(leaf[:1].expand(many, *leaf.shape[1:]).contiguous() for leaf in start))
    h, on = torch.full((many,), 0.15, dtype=torch.float64), torch.ones(many, dtype=torch.bool)
    branch = NUTS()._branch(density, state, point, point, h, on, 8, torch.Generator().manual_seed(0))
    values, counts = branch.error.round(decimals=9).unique(return_counts=True)
    assert len(values) == 8
    expected = many * (-values).softmax(0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3, "chi-square with 7 degrees of freedom, at 0.1 %"


@pytest.mark.parametrize("dice", [0.25, 0.75, 0.95])
def test_a_trajectory_is_the_recursions(gaussian, dice, monkeypatch):
    """With dice that always give one number, and so one direction: how far it goes, and which point is the draw."""
    density, _, start = gaussian
    monkeypatch.setattr("dubito.methods.nuts.dice", lambda like, generator: torch.full_like(like, dice))
    method = NUTS(0.2, tune=False, chains=48, draws=1, burn_in=0)
    found = dubito.fit(MILD.model, method, (MILD.x, MILD.y), start={"weight": start.position.unsqueeze(1)})
    velocity = torch.empty_like(start.velocity).normal_(generator=randomness.generator("cpu", 0, "method"))
    scale, once = torch.full((3,), MILD.model.prior.scale_of("weight"), dtype=torch.float64), torch.ones(48, dtype=torch.int32)
    step = torch.full((48,), 0.2 if dice < 0.5 else -0.2, dtype=torch.float64)
    points = [start._replace(velocity=velocity)]
    for _ in range(63):
        points.append(leapfrog(density, points[-1], step=step, count=once, scale=scale))
    risen = torch.stack([rise(density, points[0], point) + kinetic(point.velocity) - kinetic(velocity) for point in points], 1)
    halves_refused = 0
    for c, v in enumerate(torch.stack([point.velocity for point in points], 1)):
        depth, steps, grows, draw = 0, 0, True, 0
        while grows:
            reached = range(2**depth, 2 ** (depth + 1))
            new = v[reached.start : reached.stop]
            ends = [n for n in range(1, len(new) + 1) for k in range(6) if n % 2**k == 0 and not straight(new[n - 2**k : n])]
            block = min(len(new), LARGEST) if len(new) >= SMALLEST else 1
            steps += math.ceil(min([*ends, len(new)]) / block) * block
            weights = (-risen[c]).exp()
            if not ends:
                if float(weights[list(reached)].sum() / weights[: reached.start].sum()) > dice:
                    draw = chosen(weights, reached, block, dice)
                else:
                    halves_refused += 1
            grows = straight(v[: 2 ** (depth + 1)])
            depth += not ends
        assert int(found.trace["depth"][c]) == depth
        assert int(found.trace["gradients"][c]) == steps
        torch.testing.assert_close(by_chain(found)[c, 0], points[draw].position[c])
    assert len(found.trace["depth"].unique()) >= 2
    assert halves_refused > 0 or dice < 0.5


def chosen(weights: Tensor, reached: range, block: int, dice: float) -> int:
    """Which point of a doubling is drawn: every block takes the place of those before with its share of the weight up to it."""
    draw = reached.start
    for begin in range(reached.start, reached.stop, block):
        own = weights[begin : begin + block]
        if float(own.sum() / weights[reached.start : begin + block].sum()) > dice:
            draw = begin + int(own.argmax())  # the noise is the same for all of its points
    return draw


def test_max_depth_bounds_the_trajectories():
    found = dubito.fit(MILD.model, NUTS(1e-3, 3, tune=False, chains=5, draws=4, burn_in=0), (MILD.x, MILD.y))
    assert (found.trace["depth"] == 3).all()
    assert (found.trace["gradients"] == 7).all()
