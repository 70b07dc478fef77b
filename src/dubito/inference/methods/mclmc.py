"""Microcanonical Langevin Monte Carlo (Robnik, De Luca, Silverstein & Seljak 2023), without an accept step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dubito.inference.full_batch import ChainState, Tuned
from dubito.inference.integrators import MINIMAL_NORM, Point, minimal_norm, on_sphere, refresh_direction, rise
from dubito.inference.log_density import Density
from dubito.inference.method import Traits
from dubito.inference.tuning import adapt_units
from dubito.model import Target
from dubito.tensors.checks import positive, require

MEMORY = 150  # steps over which the error of the energy is averaged while the step size is tuned


@dataclass(frozen=True)
class MCLMC(Tuned):
    r"""A particle of fixed speed whose direction turns with the gradient, and is slowly forgotten.

    In the limit of small steps it samples the posterior exactly. With finite ones the energy is not quite kept, and the draws are
    biased, by an amount that the variance of its error per dimension bounds: during the burn-in each chain's step size is tuned to
    :math:`\mathrm{Var}[\Delta E] / P` = `energy_variance`. At .0005 no bias is visible in predictions; .1 is faster and makes them
    a few percent too narrow. It reaches about three times HMC's effective draws of predictions per gradient; effective draws say
    nothing of the bias, which more draws do not remove. `MAMS` is the same with an accept step.

    A step of the integrator takes two gradients. `path_length`, the distance over which the direction is forgotten, and the step
    size are in prior standard deviations, as for HMC: the particle's speed is sqrt(P). `units="posterior"` measures them in the
    posterior's.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 1), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.fit(model, MCLMC(draws=20, burn_in=20), (torch.zeros(8, 2), torch.zeros(8, 1)))
    >>> posterior.sampler["adjusted"]
    False
    """

    step_size: float | None = None  # in prior standard deviations; None finds one
    path_length: float = 1.0  # over which the direction is forgotten, in prior standard deviations
    tune: bool = field(default=True, kw_only=True)  # adapt the step size in the burn-in
    energy_variance: float = field(default=5e-4, kw_only=True)  # of the error of a step, per dimension
    units: Literal["prior", "posterior"] = field(default="prior", kw_only=True)  # whose standard deviations measure lengths
    thin: int = field(default=20, kw_only=True)  # integrator steps in a step, after which a draw is kept
    least: ClassVar[int | None] = 1
    searches: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        positive(energy_variance=self.energy_variance)

    @property
    def traits(self) -> Traits:
        """Those of chains without an accept step."""
        return replace(super().traits, adjusted=False)

    def first_step(self, size: int) -> float:
        """A tenth of the path, over the root of the number of weights."""
        return 0.1 * self.path_length / math.sqrt(size)

    def initial_tuning(self, target: Target, state: ChainState) -> dict[str, Tensor]:
        """The step size, from the one given, and sums of the errors of steps."""
        require(state.position.shape[1] > 1, "MCLMC turns a direction, and one weight has none to turn: use HMC")
        zero = torch.zeros_like(state.log_prior)
        return {**super().initial_tuning(target, state), "weight": zero, "sixth": zero.clone(), "limit": zero + math.inf}

    def begin(self, density: Density, state: ChainState, generator: torch.Generator) -> None:
        """The density at the start, and a random direction."""
        super().begin(density, state, generator)
        state.velocity = on_sphere(state.noise(generator))

    def moves(self, density: Density, state: ChainState, generator: torch.Generator) -> Iterable[dict[str, Tensor]]:
        """All of them at once where a kernel does that, and there is nothing to tune in between."""
        tuning, kernel = state.step < self.burn_in and self.tune, density.kernel
        step = state.step_size
        options = {"share": MINIMAL_NORM, "length": self.path_length, "steps": self.thin, "generator": generator}
        moved = None
        if kernel is not None and not tuning:
            moved = kernel.langevin(*state.point(state.velocity), step=step, scale=state.scale, **options)
        if moved is None:
            yield from super().moves(density, state, generator)
            return
        (state.position, state.velocity, state.gradient, state.log_likelihood, state.log_prior), error = moved
        yield {
            "divergent": torch.zeros_like(error),
            "energy_error": error,
            "step_size": step,
            "gradients": torch.full_like(error, 2.0 * self.thin),
        }

    def move(self, density: Density, state: ChainState, generator: torch.Generator) -> dict[str, Tensor]:
        """A step of the integrator, after which the direction is partly drawn anew."""
        step, before = state.step_size, state.point(state.velocity)
        after, gain = self._integrated(density, before, step, state.scale)
        error = rise(density, before, after) + gain
        sound = error.isfinite()
        state.accept(after, sound)
        noise = state.noise(generator)
        # a chain that has run off the edge of what numbers hold turns round
        velocity = torch.where(sound.unsqueeze(1), after.velocity, -before.velocity)
        state.velocity = refresh_direction(velocity, noise, step, self.path_length)
        if state.step < self.burn_in and self.tune:
            self._tune(state, error, sound)
        return {
            "divergent": (~sound).double(),
            "energy_error": torch.where(sound, error, torch.nan),
            "step_size": step,
            "gradients": torch.full_like(error, 2.0),
        }

    def _integrated(self, density: Density, before: Point, step: Tensor, scale: Tensor) -> tuple[Point, Tensor]:
        def once(position, velocity, gradient, likelihood, prior, gain, step, scale):
            """One step of all chains."""
            point, more = minimal_norm(density, Point(position, velocity, gradient, likelihood, prior), step=step, scale=scale)
            return *point, gain + more

        *moved, gain = density.loop("microcanonical", once)((*before, torch.zeros_like(before.log_prior)), (step, scale), 1)
        return Point(*moved), gain

    def _tune(self, state: ChainState, error: Tensor, sound: Tensor) -> None:
        """The error of a step grows as its third power, so each one tells which step would have had the error that is wanted."""
        tuning, step = state.tuning, state.tuning["log_step"].exp()
        wanted = error.square() / (state.position.shape[1] * self.energy_variance) + 1e-8
        # an error far from the wanted one says little of its neighborhood
        trust = (-0.5 * (wanted.log() / 6 / 1.5).square()).exp()
        keep = (MEMORY - 1) / (MEMORY + 1)
        tuning["sixth"] = torch.where(sound, keep * tuning["sixth"] + trust * wanted / step**6, tuning["sixth"])
        tuning["weight"] = torch.where(sound, keep * tuning["weight"] + trust, tuning["weight"])
        tuning["limit"] = torch.where(sound, tuning["limit"], torch.minimum(tuning["limit"], 0.8 * step))
        new = (tuning["sixth"] / tuning["weight"].clamp_min(1e-300)) ** (-1 / 6)
        new = torch.where(tuning["weight"] > 0, new, step)
        new = torch.minimum(new, tuning["limit"])
        tuning["log_step"] = torch.where(sound, new, torch.minimum(step * 0.5, new)).log()
        tuning["log_mean"] = tuning["log_step"].clone()
        if self.units == "posterior":
            scale = state.scale
            adapt_units(state, self.burn_in)
            if state.scale is not scale:  # errors in the old units say nothing of the new ones
                tuning["weight"], tuning["sixth"] = torch.zeros_like(tuning["weight"]), torch.zeros_like(tuning["sixth"])
                tuning["limit"] = torch.full_like(tuning["limit"], torch.inf)
