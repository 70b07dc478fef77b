"""Does MCLMC bear mini-batches? The variances of a posterior that is known exactly, beside SGHMC, at equal numbers of gradients.

Linear regression: 2,000 examples, 50 weights of which the data tell 1 to 100 times as much (in variance) as of others, unit noise and
prior. All samplers have the best of a grid of step sizes and of path lengths (or frictions), 16 chains from the posterior itself, and
as many gradients: a step of `MCLMC` takes two, each of a batch of its own. What is reported is the root mean square of the relative
errors of all variances along the posterior's axes, which counts bias and noise alike, and the least and the largest of them.

- `MCLMC`: as `dubito.MCLMC`, with the batch's gradient in the place of the whole one.
- `MCLMC, leapfrog`: one gradient a step, half a turn before and after the drift.
- `SGHMC`: Langevin dynamics with momentum, one gradient a step, no correction for the noise of the batches.

Lengths are measured in the exact standard deviation of every weight (`whitened`), in which the noise of a batch is the same in all
directions, or in one unit for all (`plain`), in which it is not.

    python benchmarks/minibatch_mclmc.py                                       # ten minutes of one core
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import show, write
from torch import Tensor

from dubito.inference.integrators import Point, minimal_norm, on_sphere, refresh_direction, turn
from dubito.inference.log_density import Value

SIZES = (2000, 200, 50)
STEPS = [0.6 * 0.5**i for i in range(8)]  # in units of each weight, or of the best known one
PATHS = (1.0, 4.0)  # over which a direction is forgotten, or the inverse of the friction, in the same


@dataclass
class Problem:
    """A Gaussian posterior and its gradient from a batch."""

    x: Tensor  # [N, P]
    y: Tensor  # [N]
    generator: torch.Generator

    @staticmethod
    def drawn(n: int, size: int) -> Problem:
        generator = torch.Generator().manual_seed(0)
        scales = torch.logspace(0, -1, size, dtype=torch.float64)
        x = torch.randn(n, size, dtype=torch.float64, generator=generator) * scales
        y = x @ torch.randn(size, dtype=torch.float64, generator=generator)
        return Problem(x, y + torch.randn(n, dtype=torch.float64, generator=generator), generator)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance."""
        covariance = (self.x.T @ self.x + torch.eye(self.x.shape[1], dtype=self.x.dtype)).inverse()
        return covariance @ (self.x.T @ self.y), covariance

    def density(self, batch: int) -> Any:
        n = len(self.y)

        def call(position: Tensor) -> Value:
            if batch == n:
                x, y = self.x, self.y
            else:
                rows = torch.randint(n, (batch,), generator=self.generator)
                x, y = self.x[rows], self.y[rows]
            return Value((y - position @ x.T) @ x * (n / batch) - position, nothing, nothing)

        nothing = torch.zeros(1, dtype=torch.float64)
        return type("Density", (), {"kernel": None, "__call__": staticmethod(call)})()


def mclmc(density: Any, point: Point, step: Tensor, path: float, scale: Tensor, generator: torch.Generator) -> Point:
    moved, _ = minimal_norm(density, point, step=step, scale=scale)
    noise = torch.randn(moved.velocity.shape, dtype=moved.velocity.dtype, generator=generator)
    return moved._replace(velocity=refresh_direction(moved.velocity, noise, step, path))


def mclmc_leapfrog(density: Any, point: Point, step: Tensor, path: float, scale: Tensor, generator: torch.Generator) -> Point:
    velocity, _ = turn(point.velocity, scale * point.gradient, 0.5 * step)
    position = torch.addcmul(point.position, step.unsqueeze(1) * scale, velocity)
    gradient, *rest = density(position)
    velocity, _ = turn(velocity, scale * gradient, 0.5 * step)
    noise = torch.randn(velocity.shape, dtype=velocity.dtype, generator=generator)
    return Point(position, refresh_direction(velocity, noise, step, path), gradient, *rest)


def sghmc(density: Any, point: Point, step: Tensor, path: float, scale: Tensor, generator: torch.Generator) -> Point:
    h = float(step[0])
    keep = math.exp(-h / path)
    noise = torch.randn(point.velocity.shape, dtype=point.velocity.dtype, generator=generator)
    velocity = keep * (point.velocity + 0.5 * h * scale * point.gradient) + math.sqrt(1 - keep**2) * noise
    velocity = velocity + 0.5 * h * scale * point.gradient
    position = point.position + h * scale * velocity
    gradient, *rest = density(position)
    return Point(position, velocity, gradient, *rest)


SAMPLERS: dict[str, tuple[Callable[..., Point], int]] = {
    "MCLMC": (mclmc, 2), "MCLMC, leapfrog": (mclmc_leapfrog, 1), "SGHMC": (sghmc, 1),
}  # fmt: skip


def errors(name: str, units: str, batch: int, step: float, path: float, args: argparse.Namespace) -> Tensor:
    """The relative errors of all variances, [P]."""
    problem = Problem.drawn(2000, 50)
    mean, covariance = problem.exact()
    values, axes = torch.linalg.eigh(covariance)
    move, gradients = SAMPLERS[name]
    generator, scale, density = torch.Generator().manual_seed(1), covariance.diagonal().sqrt(), problem.density(batch)
    scale = scale if units == "whitened" else scale.min().expand_as(scale)
    normal = torch.randn(2, args.chains, len(mean), dtype=torch.float64, generator=generator)
    position = mean + normal[0] * values.sqrt() @ axes.T
    velocity = on_sphere(normal[1]) if name != "SGHMC" else normal[1]
    point, steps = Point(position, velocity, *density(position)), torch.full((args.chains,), step, dtype=torch.float64)
    total, first = torch.zeros_like(mean), args.gradients // gradients // 10
    for i in range(args.gradients // gradients):
        point = move(density, point, steps, path, scale, generator)
        if i >= first:
            total += ((point.position - mean) @ axes).square().mean(0)
        if not point.position.isfinite().all():
            return torch.full_like(mean, math.inf)
    return total / (args.gradients // gradients - first) / values - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=int, default=4000, help="of a chain")
    parser.add_argument("--chains", type=int, default=16)
    args, began = parser.parse_args(), time.time()
    figures: dict[str, Any] = {}
    for units, batch, name in itertools.product(("whitened", "plain"), SIZES, SAMPLERS):
        grid = {key: errors(name, units, batch, *key, args) for key in itertools.product(STEPS, PATHS)}
        square = {key: float(value.square().mean().sqrt()) for key, value in grid.items()}
        best = min(square, key=lambda key: square[key])
        figures[f"{units}, {name}, batches of {batch}"] = one = {
            "error": square[best],
            "range": [float(grid[best].min()), float(grid[best].max())],
            "step": best[0],
            "path": best[1],
            "grid": [[*key, square[key], float(value.mean())] for key, value in grid.items()],
        }
        print(f"{units}, {name}, {batch}: {words(one)} at {best}", flush=True)
    headline = {f"{case}: relative error of variances, least and largest": [words(one), ""] for case, one in figures.items()}
    write("minibatch_mclmc", settings=vars(args), figures=figures, headline=headline, seconds=time.time() - began)
    show("Variances by mini-batches", ["case", "error; least, largest"], [[case, words(one)] for case, one in figures.items()])


def words(one: dict[str, Any]) -> str:
    return f"{100 * one['error']:.1f} %; {100 * one['range'][0]:.0f}, {100 * one['range'][1]:.0f} %"


if __name__ == "__main__":
    main()
