"""The No-U-Turn sampler (Hoffman & Gelman 2014), with multinomial draws from each trajectory (Betancourt 2017)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.integrators import Point, kinetic, leapfrog_path, potential, rise
from dubito.inference.log_density import Density
from dubito.inference.tuning import dice
from dubito.tensors.checks import at_least

DIVERGED = 1000.0  # a change of energy that no sound trajectory makes
SMALLEST, LARGEST = 8, 32  # points of a doubling from which on blocks are looked at together, and of a block
NUMBERS = 2**22  # of positions in a block: more would take too much memory


class Stretch(NamedTuple):
    """Neighbouring points of a trajectory, for C chains: the velocities at its two ends and the sum of all, [C, P] each."""

    first: Tensor
    last: Tensor
    total: Tensor


class Branch(NamedTuple):
    """What one doubling adds to a trajectory, for C chains."""

    end: Point  # where it has come to
    stretch: Stretch
    chosen: Point  # one of its points, drawn by their weights
    error: Tensor  # [C], the energy there less the energy at the start of the trajectory
    weight: Tensor  # [C], log sum of exp(-error) over its points
    sound: Tensor  # [C], neither turned back nor diverged
    acceptance: Tensor  # [C], sum over its points of min(1, exp(-error))
    points: Tensor  # [C], how many there are
    diverged: Tensor  # [C]


@dataclass(frozen=True)
class NUTS(Tuned):
    r"""HMC whose trajectories end where they begin to turn back, so that no path length has to be chosen: asymptotically exact.

    From a fresh velocity a trajectory of leapfrog steps is doubled, forwards or backwards in time at random, until it turns: until the
    velocity at one of its ends points against the sum :math:`\rho` of all its velocities, :math:`v \cdot \rho < 0`. The same is
    asked of every half, quarter and so on of the doubling, and of every two neighbors among these, each with the first point of the
    other, which finds turns that fall between them. The next draw is one of the trajectory's points, with probability proportional to
    :math:`e^{-H}` but with a bias for the later doublings; no point is drawn from a doubling that turned on its way. At most
    :math:`2^{\texttt{max\_depth}} - 1` steps are made.

    Lengths and the tuning of the step size are as for HMC, and "acceptance" is the mean of :math:`\min(1, e^{-\Delta H})` over all
    points of a trajectory. A point of which the energy is not finite, or more than 1,000 above the first, is a divergence: it ends
    the trajectory, and is counted. Chains run side by side, and wait for the longest trajectory; "gradients" are each chain's own.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, NUTS(draws=20, burn_in=20), (torch.zeros(8, 1), torch.zeros(8, 1)))
    >>> len(posterior), int(posterior.trace["depth"].max()) <= 10
    (80, True)
    """

    step_size: float | None = None  # in prior standard deviations; None finds one
    max_depth: int = 10  # doublings of a trajectory
    tune: bool = field(default=True, kw_only=True)  # adapt the step size in the burn-in
    target_acceptance: float = field(default=0.8, kw_only=True)
    units: Literal["prior", "posterior"] = field(default="prior", kw_only=True)  # whose standard deviations measure lengths
    gibbs: bool = field(default=True, kw_only=True)  # draw a learned noise from its conditional, if it has one

    def __post_init__(self):
        super().__post_init__()
        at_least(1, max_depth=self.max_depth)

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A trajectory that is doubled until it turns, and one of its points."""
        step = state.step_size
        # coordinates without a unit of length do not move, and have no say in whether a trajectory turns
        start = state.point(state.noise(generator) * (state.scale > 0))
        back, front, total = start, start, start.velocity
        chosen, error, weight = start, torch.zeros_like(state.log_prior), torch.zeros_like(state.log_prior)
        acceptance, points, depth = torch.zeros_like(error), torch.zeros_like(error), torch.zeros_like(error)
        growing = torch.ones_like(error, dtype=torch.bool)
        moved, diverged = torch.zeros_like(growing), torch.zeros_like(growing)
        for doubling in range(self.max_depth):
            forward = dice(error, generator) < 0.5
            near, far = _where(forward, front, back), _where(forward, back, front)
            directed = torch.where(forward, step, -step)
            branch = self._branch(density, state, start, near, directed, growing, 2**doubling, generator)
            acceptance, points = acceptance + branch.acceptance, points + branch.points
            diverged, depth = diverged | branch.diverged, depth + branch.sound
            # the new half is preferred to the old one, which keeps the distribution and goes further
            taken = branch.sound & (dice(error, generator).log() < branch.weight - weight)
            chosen, error = _where(taken, branch.chosen, chosen), torch.where(taken, branch.error, error)
            weight, moved = torch.logaddexp(weight, branch.weight), moved | taken
            back, front = _where(forward, back, branch.end), _where(forward, branch.end, front)
            (*_, total), straight = _joined(Stretch(far.velocity, near.velocity, total), branch.stretch)
            growing = branch.sound & straight
            if not growing.any():
                break
        if state.spread is not None:  # how many numbers are taken depends on the longest trajectory
            state.spread.align(generator, int(points.max()))
        state.accept(chosen, moved)
        probability = acceptance / points
        self.adapt(state, probability)
        return {
            "acceptance": probability,
            "accepted": moved.double(),
            "divergent": diverged.double(),
            "energy": potential(density, start) + kinetic(start.velocity) + error,
            "energy_error": error,
            "step_size": step,
            "gradients": points,
            "depth": depth,
        }

    def _branch(
        self,
        density: Density,
        state: ChainState,
        start: Point,
        end: Point,
        step: Tensor,
        growing: Tensor,
        size: int,
        generator: torch.Generator,
    ) -> Branch:
        """`size` more points beyond `end`, for the chains that are `growing`; the others, and those that turn or diverge, wait.

        All chains are at the same point of the same doubling, so whichever stretches end there end there for all of them. `halves` are
        the stretches that wait for a neighbor of their length, as the ones in the binary number of blocks so far. Of a long doubling a
        block of points is looked at together; a turn within it is found when the block is complete.
        """
        sound, chosen, before = growing, end, kinetic(start.velocity)
        nothing = torch.zeros_like(before)
        error, weight, acceptance, points = nothing, nothing - torch.inf, nothing, nothing
        diverged, halves = torch.zeros_like(sound), []
        block = min(size, LARGEST) if size >= SMALLEST and end.position.numel() * LARGEST <= NUMBERS else 1
        for number in range(size // block):
            path = leapfrog_path(density, end, step=step, moves=sound, scale=state.scale, steps=block)
            end = Point(*(leaf[-1] for leaf in path))
            risen = rise(density, start, path) + kinetic(path.velocity.flatten(0, 1)).view(block, -1) - before
            risen = torch.where(risen.isfinite(), risen, torch.inf)
            shares = (-risen).exp().clamp(max=1.0).sum(0)
            acceptance, points = acceptance + torch.where(sound, shares, 0.0), points + block * sound
            lost = sound & (risen > DIVERGED).any(0)
            stretch, straight = _ascend(path.velocity)
            diverged, sound = diverged | lost, sound & ~lost & straight
            # a point of the block, by its weight, takes the place of the one before with the block's share of the weight up to here
            own = torch.logsumexp(-risen, 0)
            weight = torch.logaddexp(weight, own)
            taken = sound & (dice(error, generator).log() < own - weight)
            which = _drawn(-risen, generator) if block > 1 else torch.zeros_like(lost, dtype=torch.long)
            point = Point(*(leaf[which, torch.arange(len(lost), device=which.device)] for leaf in path))
            error = torch.where(taken, risen.gather(0, which.unsqueeze(0)).squeeze(0), error)
            chosen, left = _where(taken, point, chosen), number
            while left & 1:
                stretch, straight = _joined(halves.pop(), stretch)
                sound, left = sound & straight, left >> 1
            halves.append(stretch)
            if not sound.any():
                break
        return Branch(end, halves[0], chosen, error, weight, sound, acceptance, points, diverged)


def _drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Which of the points is drawn by its weight, [C], for log weights [n, C]: the largest after Gumbel noise."""
    return (logits - (-dice(logits, generator).log()).log()).argmax(0)


def _ascend(velocity: Tensor) -> tuple[Stretch, Tensor]:
    """Points [n, C, P], n a power of 2, as one stretch, and whether every two neighbors of one length in it go straight on, [C]."""
    straight = torch.ones(velocity.shape[1], dtype=torch.bool, device=velocity.device)
    if len(velocity) == 1:
        (point,) = velocity
        return Stretch(point, point, point), straight
    parts = Stretch(velocity, velocity, velocity)
    while len(parts.total) > 1:
        one, two = (Stretch(*(leaf[half::2] for leaf in parts)) for half in (0, 1))
        parts, onwards = _joined(one, two, single=len(parts.total) == len(velocity))
        straight &= onwards.all(0)
    return Stretch(*(leaf[0] for leaf in parts)), straight


def _joined(one: Stretch, two: Stretch, *, single: bool = False) -> tuple[Stretch, Tensor]:
    """Two neighbors as one stretch, and whether it goes straight on; so must each with the first point of the other, unless both are
    single points."""
    whole = Stretch(one.first, two.last, one.total + two.total)
    straight = _straight(whole)
    if not single and one.first is not one.last:
        straight &= _straight(Stretch(one.first, two.first, one.total + two.first))
        straight &= _straight(Stretch(one.last, two.last, one.last + two.total))
    return whole, straight


def _straight(stretch: Stretch) -> Tensor:
    """Whether the velocities at both ends point along the sum of all."""
    return ((stretch.first * stretch.total).sum(-1) > 0) & ((stretch.last * stretch.total).sum(-1) > 0)


def _where(chains: Tensor, this: Point, other: Point) -> Point:
    """The one point for some chains, and the other for the rest."""
    wide = chains.unsqueeze(1)
    return Point(*(torch.where(wide if a.ndim > 1 else chains, a, b) for a, b in zip(this, other, strict=True)))
