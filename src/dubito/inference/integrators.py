r"""Steps through the space of weights that follow the gradient of the log posterior, for all chains at once.

Positions are [C, P], and every coordinate has a unit of length `scale`, [P] (the prior's standard deviation, or the posterior's once it
is known): velocities are in these units, so that N(0, I) velocities are at home in all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dubito._moved import renamed
from dubito.inference.log_density import Density, Value


class Point(NamedTuple):
    """A place in phase space, for C chains: where it is, how it moves, and what the density is there."""

    position: Tensor  # [C, P]
    velocity: Tensor  # [C, P]
    gradient: Tensor  # [C, P], of the log density over T
    log_likelihood: Tensor  # [C], float64
    log_prior: Tensor  # [C], float64


def potential(density: Density, point: Point | Value) -> Tensor:
    """-log density over T, up to a constant, [C]; infinite where it is not a number."""
    energy = -(point.log_likelihood + point.log_prior) / density.target.temperature
    return torch.where(energy.isnan(), torch.inf, energy)


def rise(density: Density, before: Point | Value, after: Point | Value) -> Tensor:
    """The potential energy after less the one before, [C]: likelihood and prior apart, so that float64 sums lose nothing.

    Infinite where it is not a number, and also where it has fallen without end: nobody would come back from there.
    """
    likelihood, prior = after.log_likelihood - before.log_likelihood, after.log_prior - before.log_prior
    change = -(likelihood + prior) / density.target.temperature
    return torch.where(change.isfinite(), change, torch.inf)


def kinetic(velocity: Tensor) -> Tensor:
    """|v|^2 / 2 of every chain, in float64."""
    return 0.5 * velocity.double().square().sum(1)


def leapfrog(density: Density, point: Point, *, step: Tensor, count: Tensor, scale: Tensor) -> Point:
    r"""`count` [C] steps of length `step` [C] (in units of `scale`): half a kick, a drift, the other half.

    .. math:: v \mathrel{+}= \tfrac{h}{2} s \nabla \log p(q), \quad q \mathrel{+}= h s v, \quad
              v \mathrel{+}= \tfrac{h}{2} s \nabla \log p(q)

    It is reversible (turn v round and the same steps lead back) and keeps volumes, so that a Metropolis test on the change of energy
    makes it exact. Chains that have made their steps wait for the others.
    """

    def once(position, velocity, gradient, likelihood, prior, left, step, scale):
        """One step of all chains that have steps left."""
        reach = (step * (left > 0)).unsqueeze(1) * scale
        velocity = torch.addcmul(velocity, reach, gradient, value=0.5)
        position = torch.addcmul(position, reach, velocity)
        gradient, likelihood, prior = density(position)
        return position, torch.addcmul(velocity, reach, gradient, value=0.5), gradient, likelihood, prior, left - 1

    steps = int(count.max())
    if density.kernel is not None:
        moved = Point(*(leaf.clone() for leaf in point))
        density.kernel.leapfrog(*moved, step=step, left=count, scale=scale, steps=steps)
        return moved
    *moved, _ = density.loop("leapfrog", once)((*point, count), (step, scale), steps)
    return Point(*moved)


def leapfrog_path(density: Density, point: Point, *, step: Tensor, moves: Tensor, scale: Tensor, steps: int) -> Point:
    """Every point of `steps` leapfrog steps of the chains that move [C], leaves [steps, C, ...]; the others stay."""
    if density.kernel is not None and steps > 1:
        path = density.kernel.path(*point, step=step, moves=moves, scale=scale, steps=steps)
        if path is not None:
            return Point(*path)
    points = []
    for _ in range(steps):
        point = leapfrog(density, point, step=step, count=moves.int(), scale=scale)
        points.append(point)
    return Point(*(torch.stack(leaves) for leaves in zip(*points, strict=True)))


# ---- microcanonical: the speed is fixed, and only the direction turns (Robnik, De Luca, Silverstein & Seljak 2023)

MINIMAL_NORM = 0.1931833275037836  # the share of the outer kicks that makes the error of a step smallest (McLachlan 1995)


def on_sphere(noise: Tensor) -> Tensor:
    """Directions of length sqrt(P), so that a step of length h moves every coordinate by about h, as a velocity from N(0, I) does."""
    return noise * (noise.shape[1] ** 0.5 / torch.linalg.vector_norm(noise, dim=1, keepdim=True))


def turn(velocity: Tensor, force: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    r"""Turn the direction towards a constant force for a time `reach` [C]; the new one, and the rise of kinetic energy [C], float64.

    The exact flow of :math:`\dot u = (I - u u^T) g / (d - 1)` for a unit vector u; its energy rises by
    :math:`(d - 1) \log(\cosh \delta + e \cdot u \sinh \delta)`, with e the direction of the force and
    :math:`\delta = |g| h / (d - 1)`, written so that a strong force does not overflow.
    """
    size = velocity.shape[1]
    strength = torch.linalg.vector_norm(force, dim=1, keepdim=True)
    along = force / strength.clamp_min(torch.finfo(force.dtype).tiny)
    unit = velocity / size**0.5
    delta = (reach.unsqueeze(1) * strength * size**0.5 / max(1, size - 1)).to(force.dtype)
    cosine = (along * unit).sum(1, keepdim=True)
    fade = (-delta).exp()
    turned = along * ((1 - fade) * (1 + fade + cosine * (1 - fade))) + unit * (2 * fade)
    gain = delta.double() - math.log(2) + torch.log1p(cosine.double() + (1 - cosine.double()) * fade.double() ** 2)
    return on_sphere(turned), (size - 1) * gain.squeeze(1)


def minimal_norm(density: Density, point: Point, *, step: Tensor, scale: Tensor) -> tuple[Point, Tensor]:
    """One microcanonical step of length `step` [C]: turn, drift, turn, drift, turn. The new point and the rise of its kinetic energy.

    Two gradients a step, with an error some ten times smaller than the leapfrog's. Chains with a step of 0 stay where they are.
    """
    if density.kernel is not None:
        moved, risen = density.kernel.minimal_norm(*point[:3], step=step, scale=scale, share=MINIMAL_NORM)
        return Point(*moved), risen
    velocity, first = turn(point.velocity, scale * point.gradient, MINIMAL_NORM * step)
    position = torch.addcmul(point.position, (0.5 * step).unsqueeze(1) * scale, velocity)
    velocity, second = turn(velocity, scale * density(position).gradient, (1 - 2 * MINIMAL_NORM) * step)
    position = torch.addcmul(position, (0.5 * step).unsqueeze(1) * scale, velocity)
    gradient, likelihood, prior = density(position)
    velocity, third = turn(velocity, scale * gradient, MINIMAL_NORM * step)
    return Point(position, velocity, gradient, likelihood, prior), first + second + third


def refresh_direction(velocity: Tensor, noise: Tensor, step: Tensor, length: Tensor | float) -> Tensor:
    """The direction partly drawn anew, so that it is forgotten over a path of `length`."""
    share = torch.expm1((2 * step / length).clamp(max=60.0)).sqrt().unsqueeze(1).to(velocity.dtype)  # beyond, nothing is left
    return on_sphere(velocity + share * noise)


__getattr__ = renamed(__name__, {"refreshed": "refresh_direction"})
