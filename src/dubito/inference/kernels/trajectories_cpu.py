r"""Whole trajectories of many chains on a CPU, with the gradients of `mlp_cpu`.

Between two gradients a trajectory does little, but in many small operations; here they are as few as can be: rows stay in the layout of
the gradient from the first step to the last, two half kicks between leapfrog steps are one, and energies are computed at the end alone.
Groups of chains know nothing of each other: each core has its own, so that cores need not wait for one another within a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dubito.inference.kernels.kernel import Kernel, Moved, gamma
from dubito.inference.kernels.mlp_cpu import Field, Memory
from dubito.model import Target
from dubito.model.likelihoods import NOISE
from dubito.model.priors import Normal
from dubito.tensors.shares import draw_rows
from dubito.tensors.tree import Params

Result = TypeVar("Result")


class Prior(NamedTuple):
    """Independent normals, and a gamma distribution of the precision of a learned noise: shape and rate 0 is flat in its logarithm."""

    precision: Tensor  # [P], float64
    constant: float  # the log density where all that follows is 0
    noise: slice  # where the logarithms of the noise are
    shape: float
    rate: float

    @staticmethod
    def of(target: Target, like: Params) -> Prior | None:
        """The prior of a posterior, or None where it is another one."""
        prior, likelihood = target.model.prior, target.model.likelihood
        if type(prior) is not Normal:
            return None
        precision, constant, noise, at = [], 0.0, slice(0, 0), 0
        for name, leaf in like.items():
            if name == NOISE:
                precision.append(torch.zeros(leaf.numel(), dtype=torch.float64))
                noise = slice(at, at + leaf.numel())
            else:
                scale = prior.scale_of(name)
                precision.append(torch.full((leaf.numel(),), scale**-2, dtype=torch.float64))
                constant -= leaf.numel() * (math.log(scale) + 0.5 * math.log(2 * math.pi))
            at += leaf.numel()
        believed = getattr(likelihood, "prior", None)
        if (shape_and_rate := gamma(believed)) is None:
            return None
        shape, rate = shape_and_rate
        if believed is not None:
            constant += (noise.stop - noise.start) * (shape * math.log(rate) - math.lgamma(shape) + math.log(2))
        return Prior(torch.cat(precision), constant, noise, shape, rate)

    def log_prob(self, position: Tensor) -> Tensor:
        """Of weights [C, P]: [C], float64."""
        wide = position.double()
        total = self.constant - 0.5 * (wide.square() @ self.precision)
        if self.shape or self.rate:
            total = total - (2 * self.shape * (s := wide[:, self.noise]) + self.rate * (-2 * s).exp()).sum(1)
        return total


class Cores:
    """Threads for groups of chains, each with its own memory and torch's operations on one core."""

    def __init__(self, like: Tensor):
        self.memories = [Memory(like) for _ in range(torch.get_num_threads())]
        self.pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.memories)

    def run(self, tasks: Sequence[Callable[[Memory], Result]]) -> list[Result]:
        """The results of all tasks; task i always in the memory of core i modulo their number."""
        cores = min(len(self), len(tasks))
        if cores == 1:
            return self._some(tasks, 0)
        self.pool = self.pool or ThreadPoolExecutor(len(self) - 1, initializer=torch.set_num_threads, initargs=(1,))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            others = [self.pool.submit(self._some, tasks[i::cores], i) for i in range(1, cores)]
            results = [self._some(tasks[::cores], 0), *(other.result() for other in others)]
        finally:
            torch.set_num_threads(threads)
        return [results[i % cores][i // cores] for i in range(len(tasks))]

    def _some(self, tasks: Sequence[Callable[[Memory], Result]], core: int) -> list[Result]:
        with torch.no_grad():
            return [task(self.memories[core]) for task in tasks]


class Trajectories(Kernel):
    """Trajectories on the posterior of a field and a prior; see `dubito.inference.integrators` for what they are."""

    def __init__(self, field: Field, prior: Prior, temperature: float):
        self.field, self.prior, self.temperature = field, prior, temperature
        self.rate = -field.raise_(prior.precision.to(field.memory.like).unsqueeze(0))
        chosen = torch.zeros(1, field.network.size, dtype=torch.bool)
        chosen[:, prior.noise] = bool(prior.shape or prior.rate)
        self.noise = field.raise_(chosen.to(field.memory.like)).nonzero()[:, 1]  # where a row holds a noise with a prior
        self.units: tuple[Tensor, Tensor] | None = None  # the last scale, and its row
        self.cores = Cores(field.memory.like)
        self.walks: dict[tuple[int, int], Walk] = {}

    def leapfrog(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, left: Tensor, scale: Tensor, steps: int,
    ) -> None:  # fmt: skip
        """`min(left, steps)` steps of every chain, in place."""
        counts = left.clamp(max=steps)
        order = counts.argsort(descending=True, stable=True)  # chains that are done leave a group from its end
        order = order[: int((counts > 0).sum())]

        def task(which: Tensor) -> Callable[[Memory], None]:
            """The trajectories of some chains, as a task for a core."""

            def run(memory: Memory) -> None:
                """Run them in a core's own memory."""
                q, v, g = (leaf[which] for leaf in (position, velocity, gradient))
                reach = (step[which].unsqueeze(1) * scale).to(position)
                log_likelihood[which] = self._group(q, v, g, reach, counts[which].tolist(), memory)
                position[which], velocity[which], gradient[which] = q, v, g
                log_prior[which] = self.prior.log_prob(q)

            return run

        if len(order):
            self.cores.run([task(order[part]) for part in self.field.parts(len(order), len(self.cores))])

    def pull(self, q: Tensor, g: Tensor) -> Callable[[], object]:
        """A function that adds the gradient of the prior at rows q to g."""
        rate, shape, strength = self.rate, self.prior.shape, self.prior.rate
        if not len(self.noise):
            return lambda: g.addcmul_(rate, q)
        first, last = int(self.noise[0]), int(self.noise[-1]) + 1
        s, gs = q[:, first:last], g[:, first:last]

        def both() -> None:
            """Add the gradients of the weights' prior and of the noise's."""
            g.addcmul_(rate, q)
            gs.add_((-2 * s).exp_(), alpha=2 * strength).sub_(2 * shape)

        return both

    def _group(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, reach: Tensor, counts: list[int], memory: Memory
    ) -> Tensor:
        """Trajectories of chains whose `counts` fall; their log likelihoods at the end."""
        field, warmth = self.field, 1 / self.temperature
        q, (v, g, r) = field.lift(position), (field.raise_(leaf) for leaf in (velocity, gradient, reach))
        v.addcmul_(r, g, value=0.5)
        value, done, active = position.new_zeros(len(q), dtype=torch.float64), 0, len(counts)
        end: Tensor | None = None
        while active:
            until = counts[active - 1]
            here, speed, slope, by = q[:active], v[:active], g[:active], r[:active]
            climb, pull = field.climber(here, slope, memory), self.pull(here, slope)
            for number in range(done + 1, until + 1):
                here.addcmul_(by, speed)
                end = climb(number == until)
                pull()
                speed.addcmul_(by, slope, value=warmth)
            ending = slice(sum(count > until for count in counts), active)
            v[ending].addcmul_(r[ending], g[ending], value=-0.5 * warmth)
            assert end is not None
            value[ending], done, active = end[ending], until, ending.start
        position.copy_(field.lower(q))
        velocity.copy_(field.lower(v))
        gradient.copy_(field.lower(g) * warmth)
        return value

    def path(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, moves: Tensor, scale: Tensor, steps: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Every point of `steps` steps."""
        here = position, velocity, gradient, log_likelihood, log_prior
        points = tuple(leaf.expand(steps, *leaf.shape).clone() for leaf in here)
        chains = moves.nonzero().flatten()

        def task(which: Tensor) -> Callable[[Memory], None]:
            """The paths of some chains, as a task for a core."""

            def run(memory: Memory) -> None:
                """Run them in a core's own memory."""
                reach = (step[which].unsqueeze(1) * scale).to(position)
                path = self._path(position[which], velocity[which], gradient[which], reach, steps, memory)
                for leaf, new in zip(points, path, strict=True):
                    leaf[:, which] = new

            return run

        if len(chains):
            self.cores.run([task(chains[part]) for part in self.field.parts(len(chains), len(self.cores))])
        return points

    def _path(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, reach: Tensor, steps: int, memory: Memory
    ) -> tuple[Tensor, ...]:
        """The points of some chains, leaves [steps, C, ...]."""
        field, warmth = self.field, 1 / self.temperature
        q, (v, g, r) = field.lift(position), (field.raise_(leaf) for leaf in (velocity, gradient, reach))
        v.addcmul_(r, g, value=0.5)
        climb, pull = field.climber(q, g, memory), self.pull(q, g)
        rows = q.new_empty(3, steps, *q.shape)
        values: list[Tensor] = []
        for places, velocities, slopes in zip(*rows, strict=True):
            q.addcmul_(r, v)
            value = climb(True)
            assert value is not None
            values.append(value)
            pull()
            places.copy_(q)
            slopes.copy_(g)
            torch.addcmul(v, r, g, value=0.5 * warmth, out=velocities)
            v.addcmul_(r, g, value=warmth)
        positions, speeds, gradients = field.lower(rows.flatten(0, 2)).view(3, steps, len(q), -1)
        prior = self.prior.log_prob(positions.flatten(0, 1)).view(steps, -1)
        return positions, speeds, gradients * warmth, torch.stack(values), prior

    def minimal_norm(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, *, step: Tensor, scale: Tensor, share: float
    ) -> Moved:
        """One microcanonical step: the new point, and the rise of its kinetic energy [C]."""

        def task(number: int, part: slice) -> Callable[[Memory], tuple[Tensor, ...]]:
            """The step of some chains, as a task for a core."""

            def run(memory: Memory) -> tuple[Tensor, ...]:
                """Make it in a core's own memory."""
                walk = self._walk(number, part, memory, position, velocity, gradient, step, scale, share)
                gain, value = walk.step()
                return *walk.point(), value, self.prior.log_prob(walk.position()), torch.tensor(gain, dtype=torch.float64)

            return run

        *point, gain = self._joined([task(i, part) for i, part in enumerate(self._parts(position, scale))])
        return tuple(point), gain

    def langevin(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, scale: Tensor, share: float, length: float, steps: int, generator: torch.Generator,
    ) -> Moved | None:  # fmt: skip
        """`steps` microcanonical steps, after each of which the direction is partly drawn anew.

        The new point, and the error of the energy in the last step [C]; or nothing at all, and the generator as it was, where a chain
        leaves what numbers hold.
        """
        before = generator.get_state()

        def normals(shape: Sequence[int]) -> Tensor:
            """Noise of steps, one after another, as they would draw it on their own."""
            noise = position.new_empty(shape)
            for one in noise:
                one.normal_(generator=generator)
            return noise

        noise = draw_rows(normals, (steps, *position.shape), 1)
        fresh = torch.expm1(2 * step / length).sqrt().unsqueeze(1).to(position.dtype)

        def task(number: int, part: slice) -> Callable[[Memory], tuple[Tensor, ...]]:
            """The steps of some chains, as a task for a core."""

            def run(memory: Memory) -> tuple[Tensor, ...]:
                """Make them in a core's own memory."""
                walk = self._walk(number, part, memory, position, velocity, gradient, step, scale, share)
                value = log_likelihood[part]
                for kick in noise[:-1, part]:
                    _, value = walk.step()
                    walk.refresh(kick, fresh[part])
                old = value + self.prior.log_prob(walk.position())
                gain, value = walk.step()
                walk.refresh(noise[-1, part], fresh[part])
                prior = self.prior.log_prob(walk.position())
                error = (old - value - prior) / self.temperature + torch.tensor(gain, dtype=torch.float64)
                return *walk.point(), value, prior, error

            return run

        *point, error = self._joined([task(i, part) for i, part in enumerate(self._parts(position, scale))])
        if not bool(error.isfinite().all()):
            generator.set_state(before)
            return None
        return tuple(point), error

    def _parts(self, position: Tensor, scale: Tensor) -> list[slice]:
        if self.units is None or self.units[0] is not scale:
            self.units = scale, self.field.raise_(scale.unsqueeze(0))
        return self.field.parts(len(position), len(self.cores))

    def _joined(self, tasks: Sequence[Callable[[Memory], tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
        results = self.cores.run(tasks)
        return results[0] if len(results) == 1 else tuple(torch.cat(leaves) for leaves in zip(*results, strict=True))

    def _walk(
        self, number: int, part: slice, memory: Memory, position: Tensor, velocity: Tensor, gradient: Tensor,
        step: Tensor, scale: Tensor, share: float,
    ) -> Walk:  # fmt: skip
        """The particles of a group of chains, ready to go."""
        key, chains = (number, part.stop - part.start), part.stop - part.start
        if key not in self.walks:
            self.walks[key] = Walk(self, chains, memory)
        assert self.units is not None
        self.walks[key].start(position[part], velocity[part], gradient[part], self.units[1], step[part], share)
        return self.walks[key]


class Walk:
    """Particles of fixed speed whose directions turn, in the layout of a field.

    What is one number a chain is computed in Python: an operation on eight numbers takes as long to start as a hundred in Python.
    """

    def __init__(self, kernel: Trajectories, chains: int, memory: Memory):
        field = self.field = kernel.field
        self.temperature, self.size = kernel.temperature, field.network.size
        self.q, self.g = memory.like.new_empty(2, chains, field.size)
        self.climb, self.pull = field.climber(self.q, self.g, memory), kernel.pull(self.q, self.g)
        self.pair = self.q.new_empty(chains, 2, field.size)  # the direction, and the force
        self.v, self.force = self.pair.unbind(1)
        self.column = self.force.unsqueeze(2)

    def start(self, position: Tensor, velocity: Tensor, gradient: Tensor, scale: Tensor, step: Tensor, share: float) -> None:
        """Begin at a point, with a step size for every chain."""
        self.q.copy_(self.field.lift(position))
        self.v.copy_(self.field.raise_(velocity))
        torch.mul(self.field.raise_(gradient), self.temperature, out=self.g)
        self.scale, self.half = scale, scale * (0.5 * step).unsqueeze(1)
        lengths = [one / self.temperature for one in step.tolist()]
        self.outer, self.inner = [share * one for one in lengths], [(1 - 2 * share) * one for one in lengths]

    def position(self) -> Tensor:
        """Where the chains are, [C, P]."""
        return self.field.lower(self.q)

    def point(self) -> tuple[Tensor, Tensor, Tensor]:
        """Position, direction and the gradient over T, [C, P]."""
        lower = self.field.lower
        return lower(self.q), lower(self.v), lower(self.g).div_(self.temperature)

    def step(self) -> tuple[list[float], Tensor]:
        """Turn, drift, turn, drift, turn: the rise of the kinetic energy, and the log likelihood at the end."""
        first = self._turn(self.outer)
        self._drift(False)
        second = self._turn(self.inner)
        value = self._drift(True)
        third = self._turn(self.outer)
        assert value is not None
        return [sum(gains) for gains in zip(first, second, third, strict=True)], value

    def refresh(self, noise: Tensor, share: Tensor) -> None:
        """Add noise to the direction; its length is as before."""
        self.v.addcmul_(self.field.raise_(noise), share)
        self.v.mul_(self.size**0.5 / torch.linalg.vector_norm(self.v, dim=1, keepdim=True))

    def _drift(self, valued: bool) -> Tensor | None:
        self.q.addcmul_(self.half, self.v)
        value = self.climb(valued)
        self.pull()
        return value

    def _turn(self, reach: list[float]) -> list[float]:
        """The length of the new direction follows from the angle of the old one to the force, and need not be measured."""
        torch.mul(self.g, self.scale, out=self.force)
        dots = torch.bmm(self.pair, self.column).view(-1, 2).tolist()
        bent = [_bend(dot, square, one, self.size) for (dot, square), one in zip(dots, reach, strict=True)]
        old, new = torch.tensor([one[:2] for one in bent], dtype=self.v.dtype).unsqueeze(2).unbind(1)
        self.v.mul_(old).addcmul_(self.force, new)
        return [gain for _, _, gain in bent]


def _bend(dot: float, square: float, reach: float, size: int) -> tuple[float, float, float]:
    """The shares of the old direction and of the force in the new direction, and the rise of the kinetic energy, of one chain."""
    root, strength = size**0.5, max(square, 1e-60) ** 0.5
    cosine, delta = dot / (strength * root), reach * strength * root / max(1, size - 1)
    fade = math.exp(-delta)
    along, stay = (1 - fade) * (1 + fade + cosine * (1 - fade)), 2 * fade
    length = max(along * along + stay * stay + 2 * along * stay * cosine, 1e-60) ** 0.5
    gain = delta - math.log(2) + math.log1p(max(cosine + (1 - cosine) * fade * fade, 1e-16 - 1))
    return stay / length, along * root / (length * strength), (size - 1) * gain
