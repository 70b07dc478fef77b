"""The state of chains on all data, which several processes may divide, and what tunes their steps during the burn-in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.inference.integrators import Point, kinetic, leapfrog, rise
from dubito.inference.log_density import Density
from dubito.tensors.checks import positive, require
from dubito.tensors.processes import Processes
from dubito.tensors.shares import Share, draw_rows, sharing
from dubito.tensors.tree import Buffers, Params

ROWS = ("position", "gradient", "log_likelihood", "log_prior", "velocity")  # fields of a state with a row for every chain
COMMON = ("count", "seen", "windows", "mean", "squares")  # what is tuned for all chains together


class Spread(NamedTuple):
    """Which of all chains this process runs, where others run the rest on the same data."""

    processes: Processes
    share: Share

    def whole(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The rows of all chains, for leaves with those of this process."""
        rows = [self.share.alone(leaf) for leaf in leaves]
        self.processes.sum_(rows)
        return rows

    def align(self, generator: torch.Generator, taken: int = 0) -> None:
        """Have all processes draw on from where that one is which has taken most numbers, or the first of these."""
        places = self.processes.gather((taken, generator.get_state()))
        generator.set_state(max(places, key=lambda one: one[0])[1])


@dataclass
class ChainState:
    """Where C chains are, and all that their next transition needs. The names of the fields are in checkpoints."""

    position: Tensor  # [C, P]
    gradient: Tensor  # [C, P]
    log_likelihood: Tensor  # [C], float64
    log_prior: Tensor  # [C], float64
    velocity: Tensor  # [C, P]; of samplers that do not draw it anew for every transition
    buffers: Buffers
    scale: Tensor  # [P], the unit of length of every coordinate
    tuning: dict[str, Tensor]  # what adapts during the burn-in
    notes: dict[str, Tensor]  # what is noted of the transitions since the last draw, [C] each
    step: int
    like: Params = field(metadata={"transient": True})
    density: Density | None = field(default=None, metadata={"transient": True})
    spread: Spread | None = field(default=None, metadata={"transient": True})  # of a state that holds some of the chains

    @property
    def step_size(self) -> Tensor:
        """The step size of every chain, [C]."""
        return self.tuning["log_step"].exp().to(self.position.dtype)

    def noise(self, generator: torch.Generator) -> Tensor:
        """A velocity from N(0, I) for every chain, [C, P]."""
        return draw_rows(lambda shape: self.position.new_empty(shape).normal_(generator=generator), self.position.shape)

    def point(self, velocity: Tensor) -> Point:
        """Where the chains are, with a velocity."""
        return Point(self.position, velocity, self.gradient, self.log_likelihood, self.log_prior)

    def accept(self, point: Point, accepted: Tensor) -> None:
        """Chains that accept go to the new point; the others stay, and are counted again there."""
        wide = accepted.unsqueeze(1)
        self.position = torch.where(wide, point.position, self.position)
        self.gradient = torch.where(wide, point.gradient, self.gradient)
        self.log_likelihood = torch.where(accepted, point.log_likelihood, self.log_likelihood)
        self.log_prior = torch.where(accepted, point.log_prior, self.log_prior)

    @contextmanager
    def part(self, processes: Processes, generator: torch.Generator) -> Iterator[ChainState]:
        """The state of the chains that this process runs: all of them, or its share of those that `processes` have in common.

        Random numbers are drawn for all chains, and each process takes the rows of its own: a chain has the same wherever it runs.
        """
        if processes.size == 1:
            yield self
            return
        share = Share.of(len(self.position), processes.rank, processes.size)
        rows = {name: share.take(getattr(self, name)) for name in ROWS}
        tuning = {name: leaf if name in COMMON else share.take(leaf) for name, leaf in self.tuning.items()}
        spread = Spread(processes, share)
        own = replace(self, **rows, tuning=tuning, notes={}, spread=spread)
        with sharing(share):
            yield own
        self._join(own, spread)
        spread.align(generator)  # a proposal of the user's may draw more here than there

    def _join(self, own: ChainState, spread: Spread) -> None:
        """Become the state of all chains again, in one message from all processes."""
        leaves = {("", name): getattr(own, name) for name in ROWS}
        leaves |= {("tuning", name): leaf for name, leaf in own.tuning.items() if name not in COMMON}
        leaves |= {("notes", name): leaf for name, leaf in own.notes.items()}
        whole = dict(zip(leaves, spread.whole(list(leaves.values())), strict=True))
        for name in ROWS:
            setattr(self, name, whole["", name])
        self.tuning = {name: whole.get(("tuning", name), leaf) for name, leaf in own.tuning.items()}
        self.notes = {name: whole["notes", name] for name in own.notes}
        self.scale = own.scale

    def of_all(self, leaf: Tensor) -> Tensor:
        """The rows of all chains, where this state holds some of them."""
        return leaf if self.spread is None else self.spread.whole([leaf])[0]

    def padded(self, leaf: Tensor) -> Tensor:
        """As many rows as there are chains, those of this state in their places: for functions that draw a number for every row."""
        return leaf if self.spread is None else self.spread.share.pad(leaf)

    def own(self, leaf: Tensor) -> Tensor:
        """The rows of this state, of leaves with a row for every chain."""
        return leaf if self.spread is None else self.spread.share.take(leaf)


def start_average(step_size: float, state: ChainState) -> dict[str, Tensor]:
    """The start of dual averaging (Hoffman & Gelman 2014, section 3.2), for every chain on its own, and of the running variances."""
    log = torch.full_like(state.log_prior, math.log(step_size))
    zero, coordinates = torch.zeros_like(log), torch.zeros_like(state.scale, dtype=torch.float64)
    return {
        "log_step": log,
        "log_mean": log.clone(),
        "anchor": log + math.log(10),
        "error": zero,
        "count": zero[:1].clone(),
        "seen": zero[:1].clone(),
        "windows": zero[:1].clone(),
        "mean": coordinates,
        "squares": coordinates.clone(),
    }


def average(tuning: dict[str, Tensor], acceptance: Tensor, aim: float) -> None:
    """One more acceptance probability [C]: steps grow where it is above `aim`, and shrink where it is below."""
    count = tuning["count"] = tuning["count"] + 1
    tuning["error"] = tuning["error"] + (aim - acceptance - tuning["error"]) / (count + 10)
    tuning["log_step"] = tuning["anchor"] - count.sqrt() / 0.05 * tuning["error"]
    weight = count**-0.75
    tuning["log_mean"] = weight * tuning["log_step"] + (1 - weight) * tuning["log_mean"]


def restart_average(tuning: dict[str, Tensor], log_step: Tensor) -> None:
    """Begin to average anew from a step, since the units have changed."""
    tuning["anchor"] = log_step + math.log(10)
    tuning["log_step"], tuning["log_mean"] = log_step.clone(), log_step.clone()
    tuning["error"], tuning["count"] = torch.zeros_like(log_step), torch.zeros_like(tuning["count"])


def adapt_units(state: ChainState, burn_in: int) -> None:
    """Estimate the variance of every coordinate over all chains (Welford) in windows that double; at their ends it sets the units.

    The windows end at 1/8, 1/4, 1/2 and 9/10 of the burn-in; what comes before 1/16 is on its way from the start and does not count.
    """
    tuning, now = state.tuning, state.step + 1
    if now <= burn_in // 16:
        return
    rows = state.of_all(state.position).double()
    n, total = len(rows), tuning["seen"] + len(rows)
    away = rows.mean(0) - tuning["mean"]
    tuning["squares"] = tuning["squares"] + (rows - rows.mean(0)).square().sum(0) + away.square() * tuning["seen"] * n / total
    tuning["mean"], tuning["seen"] = tuning["mean"] + away * n / total, total
    due = sum(now >= end for end in (burn_in // 8, burn_in // 4, burn_in // 2, burn_in * 9 // 10))
    if due > int(tuning["windows"]) and float(total) > 20:  # once for each, however many transitions there are in a step
        variance = tuning["squares"] / (total - 1)
        shrunk = (total * variance + 5 * 1e-3 * state.scale.double().square()) / (total + 5)  # few draws say little
        old, moving = state.scale, state.scale > 0  # what a Gibbs move draws has no unit and keeps none
        state.scale = torch.where(moving, shrunk.sqrt().to(old), old)
        # a step of the same length in the directions that bind, which are the narrowest
        restart_average(tuning, tuning["log_mean"] + (old / state.scale)[moving].min().log().clamp(min=-2.0).double())
        tuning["seen"], tuning["mean"], tuning["squares"] = (torch.zeros_like(tuning[k]) for k in ("seen", "mean", "squares"))
        tuning["windows"] = torch.full_like(tuning["windows"], due)


def adapt(state: ChainState, acceptance: Tensor, aim: float, burn_in: int, *, posterior_units: bool = False) -> None:
    """In the burn-in, tune the step sizes to an acceptance of `aim` and, with `posterior_units`, the unit of every coordinate."""
    if state.step < burn_in:
        average(state.tuning, acceptance, aim)
        if posterior_units:
            adapt_units(state, burn_in)


def check_step_size(step_size: float | None, *, tune: bool, burn_in: int, least: int) -> None:
    """Raise for a step size that is not positive, or that is to be found without a burn-in."""
    positive(step_size=step_size)
    require(
        step_size is not None or (tune and burn_in >= least),
        f"a step size is found during the burn-in: give step_size=..., or tune=True and a burn_in of at least {least}; got "
        f"tune={tune} and burn_in={burn_in}",
    )


def metropolis(change: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The probability min(1, exp(-change)) to accept a rise of the energy [C], and whether it is accepted."""
    probability = (-torch.where(change.isnan(), torch.inf, change)).exp().clamp(max=1.0)
    return probability, dice(probability, generator) < probability


def dice(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in float64, one for each of `like`, [..., C]; or one for all chains, []."""

    def uniform(shape: Sequence[int]) -> Tensor:
        """So many of them."""
        return torch.rand(shape, dtype=torch.float64, device=like.device, generator=generator)

    return draw_rows(uniform, like.shape, like.ndim - 1) if like.ndim else uniform(())


def find_step(density: Density, state: ChainState, generator: torch.Generator) -> None:
    """A first step size for every chain: doubled or halved until one leapfrog step is accepted with a probability near 0.8."""
    log, direction = state.tuning["log_step"].clone(), None
    before = state.point(state.noise(generator))
    once = torch.ones(len(log), dtype=torch.int32, device=log.device)
    searching = torch.ones_like(log, dtype=torch.bool)
    for _ in range(40):
        after = leapfrog(density, before, step=log.exp().to(state.position.dtype), count=once, scale=state.scale)
        change = rise(density, before, after) + kinetic(after.velocity) - kinetic(before.velocity)
        way = torch.where(change.nan_to_num(nan=torch.inf) < -math.log(0.8), 1.0, -1.0)
        direction = way if direction is None else direction
        searching &= way == direction
        if not searching.any():
            break
        log = log + torch.where(searching, way * math.log(2), 0.0)
    state.tuning |= start_average(1.0, state)
    restart_average(state.tuning, log)


def langevin(density: Density, state: ChainState, generator: torch.Generator) -> tuple[Tensor, Point, Tensor]:
    """A Langevin step, one leapfrog step from a fresh velocity: its size, where it leads, and how far the energy rises, [C]."""
    step, before = state.step_size, state.point(state.noise(generator))
    once = torch.ones(len(step), dtype=torch.int32, device=step.device)
    after = leapfrog(density, before, step=step, count=once, scale=state.scale)
    return step, after, rise(density, before, after) + kinetic(after.velocity) - kinetic(before.velocity)
