r"""What full-batch samplers share: several chains side by side, their starts, their tuning, their draws and what is noted of them.

A step of the loop makes `thin` transitions of all chains and keeps one draw of each. Before that come `burn_in` steps, in which step
sizes and units of length are tuned, and nothing is kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.inference.integrators import Point, kinetic, leapfrog, rise
from dubito.inference.log_density import Density
from dubito.inference.method import Info, Start, Traits
from dubito.model import Target
from dubito.model.likelihoods import own
from dubito.model.priors import Prior, concerned
from dubito.model.priors.prior import PREFIX
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.tree import Buffers, Params

TRACE, BUFFER = "trace:", "buffer:"
AVERAGED = ("acceptance", "accepted")  # over the transitions of a step
SUMMED = (*AVERAGED, "divergent", "gradients")  # of the others the last counts


@dataclass
class ChainState:
    """Where C chains are, and all that their next transition needs."""

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


@dataclass(frozen=True)
class Chains(ABC):
    """A sampler that sees all data at every transition."""

    chains: int = field(default=4, kw_only=True)  # run side by side; several show whether they agree
    draws: int = field(default=1000, kw_only=True)  # kept of every chain
    burn_in: int = field(default=500, kw_only=True)  # steps before the first draw, in which the sampler is tuned
    thin: int = field(default=1, kw_only=True)  # transitions in a step, of which the last is kept
    compile: bool = field(default=False, kw_only=True)  # let torch compile the gradient: a minute that pays in long runs

    def __post_init__(self):
        if self.chains < 1 or self.draws < 1 or self.burn_in < 0 or self.thin < 1:
            raise ValueError(
                "chains, draws and thin are at least 1 and burn_in at least 0; got "
                f"chains={self.chains}, draws={self.draws}, thin={self.thin}, burn_in={self.burn_in}"
            )
        if (units := getattr(self, "units", "prior")) not in ("prior", "posterior"):
            raise ValueError(f"units is 'prior' or 'posterior'; got {units!r}")

    @property
    def data(self) -> Literal["batches", "full"]:
        return "full"

    @property
    def traits(self) -> Traits:
        return Traits(many_starts=True, draws_weights=True, takes_example_weights=False, adjusted=True, length_field="draws")

    @abstractmethod
    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """One transition of all chains, in place; what is to be noted of it, [C] each."""

    def moves(self, density: Density, state: ChainState, generator: torch.Generator) -> Iterable[dict[str, Tensor]]:
        """The transitions of a step, one after another."""
        for _ in range(self.thin):
            yield self.move(density, state, generator)

    def tuned(self, target: Target, state: ChainState) -> dict[str, Tensor]:
        """What adapts during the burn-in, at its start."""
        return {}

    def steps(self, n_batches: int) -> int:
        return self.burn_in + self.draws

    def init(self, target: Target, start: Start, batch: Any, generator: torch.Generator, *, steps: int) -> ChainState:
        if target.members is not None:
            raise ValueError(f"{type(self).__name__} runs chains of its own side by side: leave out `vectorize`")
        if any(leaf.dtype.itemsize < 4 for leaf in start.params.values()):
            raise ValueError(
                "weights in half precision lose the small steps of a sampler: keep the network in float32, and give "
                'fit(precision="bfloat16") to run it in half precision'
            )
        stacked = starts(target, start, self.chains, generator)
        apart = [name for name, leaf in own_buffers(start, self.chains).items() if (leaf != leaf[:1]).any()]
        if apart:
            raise ValueError(
                f"the settings in `start` have statistics of their own ({', '.join(apart[:2])}{', ...' if apart[2:] else ''}), "
                "and chains that see all data share one set, as a part of the model: start from one setting, such as "
                "start=map_posterior, use SGHMC, whose chains keep their own, or a network that keeps no statistics, with GroupNorm or "
                "LayerNorm"
            )
        if not start.given:
            stacked = within(target.model.prior, stacked, generator)
        position = tree.flatten(stacked, stacked=True)
        nothing = torch.zeros(self.chains, dtype=torch.float64, device=position.device)
        state = ChainState(
            position,
            torch.zeros_like(position),
            nothing,
            nothing.clone(),
            torch.zeros_like(position),
            start.buffers,
            units(target, start.params).to(position),
            {},
            {},
            0,
            start.params,
        )
        if getattr(self, "gibbs", False) and any(conjugate := self._conjugate(target, start, batch, generator)):
            state.scale = state.scale * ~torch.tensor(conjugate, device=position.device)  # the gradient leaves these alone
        state.tuning = self.tuned(target, state)
        return state

    def _conjugate(self, target: Target, start: Start, batch: Any, generator: torch.Generator) -> list[bool]:
        """Which coordinates are drawn from their conditional between trajectories, given all others."""
        model, (x, y) = target.model, target.model.split(batch)
        with torch.no_grad():
            f, _ = model.forward(start.params, x, start.buffers)
        one = tree.repeat(start.params, 1)
        found = {
            **model.likelihood.resample([(f.unsqueeze(0), y)], own(one), 1.0, 1.0, generator),
            **model.prior.resample(concerned(one), target.temperature, generator),
        }
        return [name in found for name, leaf in start.params.items() for _ in range(leaf.numel())]

    def step(self, target: Target, state: ChainState, data: Iterable[Any], generator: torch.Generator) -> tuple[ChainState, Info]:
        if state.density is None:  # made here, since a run that goes on after a crash begins here too
            state.density = Density(target, data, state.like, state.buffers, compile=self.compile)
            state.density.fit_chunks(self.chains)
        if state.step == 0:
            self.begin(state.density, state, generator)
        state.notes = {}
        for noted in self.moves(state.density, state, generator):
            for name, value in noted.items():
                before = state.notes.get(name, 0.0) if name in SUMMED else 0.0
                state.notes[name] = before + value.double() / (self.thin if name in AVERAGED else 1)
            if getattr(self, "gibbs", False):
                self._resample(state.density, state, generator)
        state.step += 1
        if state.step == self.burn_in and "log_mean" in state.tuning and getattr(self, "tune", False):
            state.tuning["log_step"] = state.tuning["log_mean"].clone()  # the mean of what was tried is kept from here on
        info = {name: state.notes[name].mean() for name in ("acceptance",) if name in state.notes}
        return state, {"log_likelihood": state.log_likelihood.mean() / target.n_data, **info}

    def begin(self, density: Density, state: ChainState, generator: torch.Generator) -> None:
        """Before the first transition: the density where the chains start, which must be finite."""
        state.gradient, state.log_likelihood, state.log_prior = density(state.position)
        lost = ~(state.log_likelihood + state.log_prior).isfinite()
        if lost.any():
            prior, params = density.target.model.prior, density.unflatten(state.position)
            if outside := sum(not supported(prior, tree.select(params, number)) for number in range(self.chains)):
                raise ValueError(
                    f"the prior, {type(prior).__name__}, has no density where {outside} of {self.chains} chains start: give a start "
                    "within its support, such as weights that `prior.sample` draws"
                )
            raise ValueError(
                f"the log posterior is not finite where {int(lost.sum())} of {self.chains} chains start: give a start that fits the "
                "data better, such as fit(..., start=map_posterior), or look for NaN in the data"
            )

    def draw(self, state: ChainState) -> Params | None:
        return self._noted(state) if state.step > self.burn_in else None

    def _noted(self, state: ChainState) -> Params:
        weights = {n: leaf.to(state.like[n].dtype) for n, leaf in tree.unflatten(state.position, state.like).items()}
        noted = {"log_likelihood": state.log_likelihood, "log_prior": state.log_prior, **state.notes}
        return {**weights, **{TRACE + name: value for name, value in noted.items()}}

    def posterior(self, target: Target, state: ChainState, draws: store.Draws) -> Posterior:
        """The draws; of a run that was stopped before the first, the weights as they stand, and it says so."""
        sampler = {"method": type(self).__name__, "adjusted": self.traits.adjusted, "burnt_in": len(draws) > 0}
        if not len(draws):
            draws = store.Draws()
            draws.append(self._noted(state))
        return samples(target, draws, state.buffers, sampler)

    def _resample(self, density: Density, state: ChainState, generator: torch.Generator) -> None:
        """Draw what has a conditional in closed form from it, which is a Gibbs move: it is always accepted."""
        target, model = density.target, density.target.model
        params, drawn = density.unflatten(state.position), {}
        if learned := own(params):
            share = target.n_data / density.seen
            drawn |= model.likelihood.resample(density.outputs(state.position), learned, share, target.temperature, generator)
        if any(name.startswith(PREFIX) for name in params):
            drawn |= model.prior.resample(concerned(params), target.temperature, generator)
        if drawn:
            state.position = tree.flatten({**params, **drawn}, stacked=True)
            state.gradient, state.log_likelihood, state.log_prior = density(state.position)

    # ---- for those that follow the gradient

    def here(self, state: ChainState, velocity: Tensor) -> Point:
        return Point(state.position, velocity, state.gradient, state.log_likelihood, state.log_prior)

    def accept(self, state: ChainState, point: Point, accepted: Tensor) -> None:
        """Chains that accept go to the new point; the others stay, and are counted again there."""
        wide = accepted.unsqueeze(1)
        state.position = torch.where(wide, point.position, state.position)
        state.gradient = torch.where(wide, point.gradient, state.gradient)
        state.log_likelihood = torch.where(accepted, point.log_likelihood, state.log_likelihood)
        state.log_prior = torch.where(accepted, point.log_prior, state.log_prior)


def samples(target: Target, draws: store.Draws, buffers: Buffers, sampler: dict[str, Any]) -> Posterior:
    """Draws with leaves [chains, ...], and what was noted of them, as a posterior; its draws come chain after chain."""
    stacked = draws.stacked()  # [n, chains, ...]
    chains = next(iter(stacked.values())).shape[1]
    flat = {name: leaf.transpose(0, 1).flatten(0, 1) for name, leaf in stacked.items()}
    trace = {name.removeprefix(TRACE): leaf for name, leaf in flat.items() if name.startswith(TRACE)}
    apart = {name.removeprefix(BUFFER): leaf for name, leaf in flat.items() if name.startswith(BUFFER)}
    params = {name: leaf for name, leaf in flat.items() if not name.startswith((TRACE, BUFFER))}
    shared = {name: leaf for name, leaf in buffers.items() if name not in apart}
    return Samples(target.model, params, shared, apart, chains=chains, trace=trace, sampler=sampler)


def starts(target: Target, start: Start, chains: int, generator: torch.Generator) -> Params:
    """Where the chains begin, leaves [C, ...]: at the starts that were given, or all at the one; otherwise the first at the network's
    weights and the others at weights initialised anew, far apart, so that their agreement means something."""
    if start.draws is not None:
        found = tree.count(start.draws)
        if found < chains:
            raise ValueError(
                f"start holds {found} settings of the weights for {chains} chains: give one for each, or chains={found}"
            )
        return tree.select(start.draws, _evenly(found, chains))
    if start.given or chains == 1:
        return tree.repeat(start.params, chains)
    seeds = torch.randint(2**62, (chains - 1,), generator=generator, device=generator.device).tolist()
    try:
        others = [reinitialize(target.model.network, start.params, seed) for seed in seeds]
    except ValueError:  # some parameter has no initialisation of its own
        believed = concerned(start.params)
        others = [{**start.params, **target.model.prior.sample(believed, generator)} for _ in seeds]
    return tree.stack([start.params, *others])


def own_buffers(start: Start, chains: int) -> Buffers:
    """The buffers that the settings in `start` have for themselves, of those at which the chains begin, leaves [C, ...]."""
    return tree.select(start.own, _evenly(tree.count(start.own), chains)) if start.own else {}


def _evenly(found: int, chains: int) -> Tensor:
    """Which of the settings that were found are for the chains, [C]."""
    return torch.linspace(0, found - 1, chains).round().long()


def supported(prior: Prior, params: Params) -> bool:
    """Whether the prior has a density there."""
    with torch.no_grad():
        return not prior.log_prob(tree.apply(Tensor.double, concerned(params))).isneginf()


def within(prior: Prior, stacked: Params, generator: torch.Generator) -> Params:
    """Starts where the prior has a density: leaves of a chain that lie outside its support, since networks are initialised without
    regard to it, become draws of the prior, and all others stay as they are."""
    chains = [tree.select(stacked, number) for number in range(tree.count(stacked))]
    for chain in chains:
        for _ in range(10):  # a draw may be rounded to the edge of the support
            if supported(prior, chain):
                break
            try:
                drawn = prior.sample(concerned(chain), generator)
            except (NotImplementedError, ValueError):  # it cannot be drawn from: `begin` says what is wrong
                break
            if supported(prior, drawn):
                chain |= {name: leaf for name, leaf in drawn.items() if not supported(prior, {**drawn, name: chain[name]})}
    return tree.stack(chains)


def units(target: Target, params: Params) -> Tensor:
    """The prior's standard deviation of every coordinate, [P], at the target's temperature: the length in which steps are measured."""
    prior, scales = target.model.prior, {name: torch.ones_like(leaf) for name, leaf in params.items()}
    precision: Any = getattr(prior, "precision", None)
    if precision is not None:
        weights = {name: leaf for name, leaf in params.items() if ":" not in name}
        scales |= {name: leaf**-0.5 for name, leaf in precision(weights).items()}
    else:
        scales |= prior.units(concerned(params))
    return tree.flatten(scales) * math.sqrt(target.temperature)


# ---- tuning


def averaging(step_size: float, state: ChainState) -> dict[str, Tensor]:
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


def again(tuning: dict[str, Tensor], log_step: Tensor) -> None:
    """Begin to average anew from a step, since the units have changed."""
    tuning["anchor"] = log_step + math.log(10)
    tuning["log_step"], tuning["log_mean"] = log_step.clone(), log_step.clone()
    tuning["error"], tuning["count"] = torch.zeros_like(log_step), torch.zeros_like(tuning["count"])


def welford(state: ChainState, burn_in: int) -> None:
    """Follow the variance of every coordinate over all chains in windows that double, and measure lengths in its root at their ends.

    The windows end at 1/8, 1/4, 1/2 and 9/10 of the burn-in; what comes before 1/16 is on its way from the start and does not count.
    """
    tuning, now = state.tuning, state.step + 1
    if now <= burn_in // 16:
        return
    rows = state.position.double()
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
        again(tuning, tuning["log_mean"] + (old / state.scale)[moving].min().log().clamp(min=-2.0).double())
        tuning["seen"], tuning["mean"], tuning["squares"] = (torch.zeros_like(tuning[k]) for k in ("seen", "mean", "squares"))
        tuning["windows"] = torch.full_like(tuning["windows"], due)


def find_step(density: Density, state: ChainState, generator: torch.Generator, integrator: Callable[..., Point]) -> None:
    """A first step size for every chain: doubled or halved until one step is accepted with a probability near 0.8."""
    log, direction = state.tuning["log_step"].clone(), None
    velocity = torch.empty_like(state.position).normal_(generator=generator)
    before = Point(state.position, velocity, state.gradient, state.log_likelihood, state.log_prior)
    once = torch.ones(len(log), dtype=torch.int32, device=log.device)
    searching = torch.ones_like(log, dtype=torch.bool)
    for _ in range(40):
        after = integrator(density, before, step=log.exp().to(state.position.dtype), count=once, scale=state.scale)
        change = rise(density, before, after) + kinetic(after.velocity) - kinetic(before.velocity)
        way = torch.where(change.nan_to_num(nan=torch.inf) < -math.log(0.8), 1.0, -1.0)
        direction = way if direction is None else direction
        searching &= way == direction
        if not searching.any():
            break
        log = log + torch.where(searching, way * math.log(2), 0.0)
    state.tuning |= averaging(1.0, state)
    again(state.tuning, log)


def langevin(chains: Chains, density: Density, state: ChainState, generator: torch.Generator) -> tuple[Tensor, Point, Tensor]:
    """A Langevin step, one leapfrog step from a fresh velocity: its size, where it leads, and how far the energy rises, [C]."""
    step = state.tuning["log_step"].exp().to(state.position.dtype)
    before = chains.here(state, torch.empty_like(state.position).normal_(generator=generator))
    once = torch.ones(len(step), dtype=torch.int32, device=step.device)
    after = leapfrog(density, before, step=step, count=once, scale=state.scale)
    return step, after, rise(density, before, after) + kinetic(after.velocity) - kinetic(before.velocity)
