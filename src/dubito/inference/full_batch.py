r"""What full-batch samplers share: several chains side by side, whose transitions the samplers define.

A step of the loop makes `thin` transitions of all chains and keeps one draw of each. Before that come `burn_in` steps, in which step
sizes and units of length are tuned, and nothing is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dubito.inference.chains import TRACE, check_precision, has_density, move_into_support, own_buffers, samples, starts, units
from dubito.inference.log_density import Density
from dubito.inference.method import Info, Start, Traits
from dubito.inference.tuning import ChainState as ChainState
from dubito.inference.tuning import adapt, check_step_size, find_step, start_average
from dubito.model import Target
from dubito.model.likelihoods import likelihood_params
from dubito.model.priors import prior_params
from dubito.model.priors.prior import PREFIX
from dubito.network.examples import Batch
from dubito.posteriors import Posterior
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, between, one_of, positive, require
from dubito.tensors.randomness import fresh_generator
from dubito.tensors.tree import Buffers, Params

AVERAGED = ("acceptance", "accepted")  # over the transitions of a step
SUMMED = (*AVERAGED, "divergent", "gradients")  # of the others the last counts


@dataclass(frozen=True)
class Chains(ABC):
    """A sampler that sees all data at every transition.

    Its draws are from p(theta | D)^(1/T), the posterior tempered by the temperature T of `fit`, which is the posterior itself at 1.
    """

    chains: int = field(default=4, kw_only=True)  # run side by side; several show whether they agree
    draws: int = field(default=1000, kw_only=True)  # kept of every chain
    burn_in: int = field(default=500, kw_only=True)  # steps before the first draw, in which the sampler is tuned
    thin: int = field(default=1, kw_only=True)  # transitions in a step, of which the last is kept
    compile: bool = field(default=False, kw_only=True)  # let torch compile the gradient: a minute that pays in long runs

    def __post_init__(self):
        at_least(1, chains=self.chains, draws=self.draws, thin=self.thin)
        at_least(0, burn_in=self.burn_in)

    @property
    def data(self) -> Literal["batches", "full"]:
        """All data a step."""
        return "full"

    @property
    def traits(self) -> Traits:
        """Chains that start at many places and can be made longer; with an accept step unless a sampler says otherwise."""
        return Traits(
            many_starts=True, draws_weights=True, takes_example_weights=False, adjusted=True, length_field="draws", alone=None
        )

    @property
    def parts(self) -> int:
        """Chains, which know nothing of each other but when units of length are tuned, may run on processes of their own."""
        return self.chains

    @abstractmethod
    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """One transition of all chains, in place; what is to be noted of it, [C] each."""

    def moves(self, density: Density, state: ChainState, generator: torch.Generator) -> Iterable[dict[str, Tensor]]:
        """The transitions of a step, one after another."""
        for _ in range(self.thin):
            yield self.move(density, state, generator)

    def initial_tuning(self, target: Target, state: ChainState) -> dict[str, Tensor]:
        """What adapts during the burn-in, at its start."""
        return {}

    def steps(self, n_batches: int) -> int:
        """The burn-in, and one step a draw."""
        return self.burn_in + self.draws

    @property
    def tunes(self) -> bool:
        """Whether step sizes are tuned during the burn-in."""
        return False

    @property
    def resamples(self) -> bool:
        """Whether quantities with a conditional in closed form are drawn from it between transitions."""
        return False

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> ChainState:
        """Chains at their starts; the density there is computed in the first step."""
        require(target.members is None, f"{type(self).__name__} runs chains of its own side by side: leave out `vectorize`")
        require(
            target.processes.exchange is None,
            f"exchange_dtype rounds gradients, and chains of {type(self).__name__} decide by them: leave it out",
        )
        check_precision(start.params)
        stacked = starts(target, start, self.chains, generator)
        _check_shared(own_buffers(start, self.chains))
        if not start.given:
            stacked = move_into_support(target.model.prior, stacked, generator)
        position = tree.flatten(stacked, stacked=True)
        zeros = torch.zeros(self.chains, dtype=torch.float64, device=position.device)
        state = ChainState(
            position,
            gradient=torch.zeros_like(position),
            log_likelihood=zeros,
            log_prior=zeros.clone(),
            velocity=torch.zeros_like(position),
            buffers=start.buffers,
            scale=units(target, start.params).to(position),
            tuning={},
            notes={},
            step=0,
            like=start.params,
        )
        if self.resamples and any(conjugate := self._conjugate(target, start, batch)):
            state.scale = state.scale * ~torch.tensor(conjugate, device=position.device)  # the gradient leaves these alone
        state.tuning = self.initial_tuning(target, state)
        return state

    def _conjugate(self, target: Target, start: Start, batch: Batch) -> list[bool]:
        """Which coordinates are drawn from their conditional between trajectories, given all others."""
        generator = fresh_generator(target.model.device)  # how many numbers this draw takes depends on the batch
        model, (x, y) = target.model, target.model.split(batch)
        with torch.no_grad():
            f, _ = model.forward(start.params, x, start.buffers)
        chain = tree.repeat(start.params, 1)
        drawn = {
            **model.likelihood.resample([(f.unsqueeze(0), y)], likelihood_params(chain), 1.0, 1.0, generator),
            **model.prior.resample(prior_params(chain), target.temperature, generator),
        }
        return [name in drawn for name, leaf in start.params.items() for _ in range(leaf.numel())]

    def step(
        self, target: Target, state: ChainState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[ChainState, Info]:
        """`thin` transitions of all chains; the means over chains of the log likelihood of an example, and of the acceptance."""
        if state.density is None:  # made here, since a run that goes on after a crash begins here too
            state.density = Density(target, data, state.like, state.buffers, compile=self.compile)
            state.density.fit_chunks(self.chains)
        with state.part(target.spread, generator) as own:
            if own.step == 0:
                self.begin(state.density, own, generator)
            own.notes = {}
            for notes in self.moves(state.density, own, generator):
                self._note(own, notes)
                if self.resamples:
                    self._resample(state.density, own, generator)
            state.density.check_alike()
        state.step += 1
        if state.step == self.burn_in and self.tunes and "log_mean" in state.tuning:
            state.tuning["log_step"] = state.tuning["log_mean"].clone()  # the mean of what was tried is kept from here on
        info = {name: state.notes[name].mean() for name in ("acceptance",) if name in state.notes}
        return state, {"log_likelihood": state.log_likelihood.mean() / target.n_data, **info}

    def _note(self, state: ChainState, notes: dict[str, Tensor]) -> None:
        """Sum, average or replace what is noted of the transitions of a step."""
        for name, value in notes.items():
            before = state.notes.get(name, 0.0) if name in SUMMED else 0.0
            state.notes[name] = before + value.double() / (self.thin if name in AVERAGED else 1)

    def begin(self, density: Density, state: ChainState, generator: torch.Generator) -> None:
        """Before the first transition: the density where the chains start, which must be finite."""
        state.gradient, state.log_likelihood, state.log_prior = density(state.position)
        lost = int((~(state.log_likelihood + state.log_prior).isfinite()).sum())
        if not lost:
            return
        prior, params = density.target.model.prior, density.unflatten(state.position)
        chains = len(state.position)
        outside = sum(not has_density(prior, tree.select(params, number)) for number in range(chains))
        require(
            not outside,
            f"the prior, {type(prior).__name__}, has no density where {outside} of {chains} chains start: give a start "
            "within its support, such as weights that `prior.sample` draws",
        )
        raise ValueError(
            f"the log posterior is not finite where {lost} of {chains} chains start: give a start that fits the "
            "data better, such as fit(..., start=map_posterior), or look for NaN in the data"
        )

    def draw(self, state: ChainState) -> Params | None:
        """The weights of all chains, and what is noted of them, after every step that follows the burn-in."""
        return self._noted(state) if state.step > self.burn_in else None

    def _noted(self, state: ChainState) -> Params:
        weights = {n: leaf.to(state.like[n].dtype) for n, leaf in tree.unflatten(state.position, state.like).items()}
        notes = {"log_likelihood": state.log_likelihood, "log_prior": state.log_prior, **state.notes}
        return {**weights, **{TRACE + name: value for name, value in notes.items()}}

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
        params, drawn = density.unflatten(state.padded(state.position)), {}
        if learned := likelihood_params(params):
            share = target.n_data / density.seen
            outputs = ((state.padded(f), y) for f, y in density.outputs(state.position))
            drawn |= model.likelihood.resample(outputs, learned, share, target.temperature, generator)
        if any(name.startswith(PREFIX) for name in params):
            drawn |= model.prior.resample(prior_params(params), target.temperature, generator)
        if drawn:
            state.position = state.own(tree.flatten({**params, **drawn}, stacked=True))
            state.gradient, state.log_likelihood, state.log_prior = density(state.position)


class Tuned(Chains):
    """What samplers share that tune a step size in the burn-in. Their own fields take the place of the defaults here."""

    step_size: float | None
    tune: bool
    target_acceptance: float = 0.8
    path_length: float = 1.0
    max_steps: int = 1
    units: Literal["prior", "posterior"] = "prior"
    gibbs: bool = False
    least: ClassVar[int | None] = 10  # steps of the burn-in in which a step size can be found; None: it need not be
    searches: ClassVar[bool] = True  # the first step size is found by doubling and halving

    def __post_init__(self):
        super().__post_init__()
        if self.least is not None:
            check_step_size(self.step_size, tune=self.tune, burn_in=self.burn_in, least=self.least)
        positive(step_size=self.step_size, path_length=self.path_length)
        at_least(1, max_steps=self.max_steps)
        between(0, 1, target_acceptance=self.target_acceptance)
        one_of(("prior", "posterior"), units=self.units)

    @property
    def tunes(self) -> bool:
        """Whether step sizes are tuned during the burn-in."""
        return self.tune

    @property
    def resamples(self) -> bool:
        """Whether a learned noise is drawn from its conditional between trajectories."""
        return self.gibbs

    def first_step(self, size: int) -> float:
        """The step size to begin with, for so many weights, where none is given."""
        return 0.01

    def initial_tuning(self, target: Target, state: ChainState) -> dict[str, Tensor]:
        """Dual averaging of the step size, from the one given."""
        return start_average(self.step_size or self.first_step(state.position.shape[1]), state)

    def begin(self, density: Density, state: ChainState, generator: torch.Generator) -> None:
        """The density at the start, and a first step size where none is given."""
        super().begin(density, state, generator)
        if self.step_size is None and self.searches:
            find_step(density, state, generator)

    def adapt(self, state: ChainState, acceptance: Tensor) -> None:
        """In the burn-in, tune the step sizes and, if wanted, the units."""
        if self.tunes:
            adapt(state, acceptance, self.target_acceptance, self.burn_in, posterior_units=self.units == "posterior")


def _check_shared(own: Buffers) -> None:
    """Raise for starts whose buffers differ: chains that see all data share one set."""
    apart = [name for name, leaf in own.items() if (leaf != leaf[:1]).any()]
    require(
        not apart,
        f"the settings in `start` have statistics of their own ({', '.join(apart[:2])}{', ...' if apart[2:] else ''}), "
        "and chains that see all data share one set, as a part of the model: start from one setting, such as "
        "start=map_posterior, use SGHMC, whose chains keep their own, or a network that keeps no statistics, with GroupNorm or "
        "LayerNorm",
    )
