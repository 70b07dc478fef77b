"""What every registered method must show on Bayesian linear regression: the exact posterior, or its known bias.

`KNOWN` has an entry for each method of the registry, and a test compares the two lists. A case holds a method, the law that its
posterior must have, how near it must come, and how it is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import dubito
from dubito import (
    HMC,
    IVON,
    MALA,
    MAMS,
    MAP,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    ULA,
    Ensemble,
    Laplace,
    MCDropout,
    MeanTeacher,
    Metropolis,
    NeuralLinear,
    OnlineLaplace,
    PiModel,
    TemporalEnsembling,
    Variational,
)
from dubito.inference.augment import Noise
from dubito.testing.moments import check_functions, check_law, require
from dubito.testing.regression import (
    BATCH,
    NOISES,
    OUTPUTS,
    ROWS,
    SCALE,
    Law,
    Regression,
    epoch_law,
    langevin_law,
    sgd_step,
    sghmc_step,
    sgld_step,
)

TEMPERATURES = (0.3, 1.0, 2.0)


@dataclass(frozen=True)
class Case:
    """A method, the law that its posterior must have, and how they are compared.

    `law` maps the problem to the known mean and covariance. `tolerance` and `bias` are those of `check_law`. `from_mode` starts the
    fit at the mode, as methods for trained networks expect. `copies` repeats the data, which averages over a method's own noise
    within a step while the number of data stays. `learned_prior` and `learned_noise` leave the scales to the method. `further`
    checks what the law over the weights does not say.
    """

    method: Any
    law: Callable[[Regression], Law]
    tolerance: float = 1e-6
    bias: float = 0.0
    from_mode: bool = False
    copies: int = 1
    batch_size: int = BATCH
    learned_prior: bool = False
    learned_noise: bool = False
    temperatures: tuple[float, ...] = TEMPERATURES
    further: tuple[Callable[[Regression, Any], None], ...] = field(default=(check_functions,))

    def fit(self, problem: Regression) -> Any:
        """The posterior of this method on a problem."""
        return dubito.fit(
            problem.model,
            self.method,
            problem.batches(self.batch_size, self.copies),
            n_data=ROWS,
            temperature=problem.temperature,
            start=problem.params(problem.exact.mean) if self.from_mode else None,
        )

    def check(self, temperature: float = 1.0) -> None:
        """Fit, and compare with what is known."""
        problem = Regression(temperature, learned=self.learned_prior, noisy=self.learned_noise)
        posterior = self.fit(problem)
        check_law(posterior, self.law(problem), tolerance=self.tolerance, bias=self.bias)
        for check in self.further:
            check(problem, posterior)


# ---- laws


@lru_cache
def _best_scale(temperature: float) -> float:
    low, high = math.log(0.05), math.log(20.0)
    for _ in range(60):
        left, right = (low + share * (high - low) for share in (0.382, 0.618))
        here, there = (Regression(temperature, math.exp(log)).log_evidence for log in (left, right))
        better = here > there
        low, high = (low, right) if better else (left, high)
    return math.exp((low + high) / 2)


def exact(problem: Regression) -> Law:
    """The posterior."""
    return problem.exact


def mean_field(problem: Regression) -> Law:
    """The nearest factorized Gaussian."""
    return problem.mean_field


def empirical_bayes(problem: Regression) -> Law:
    """The posterior under the prior scale that maximizes the evidence, found by golden sections."""
    return replace(problem, scale=_best_scale(problem.temperature)).exact


def mode(problem: Regression) -> Law:
    """The mode, without spread."""
    return problem.mode


def mode_with_noise(problem: Regression) -> Law:
    """The mode of the weights and of the logarithms of both noises: ridge regression and the residuals' scales, in turn."""
    x, y = problem.data
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    scales, weights = y.std(0), torch.zeros(design.shape[1], OUTPUTS, dtype=x.dtype)
    for _ in range(200):
        for c, scale in enumerate(scales):
            precision = design.mT @ design + scale**2 / problem.scale**2 * torch.eye(len(weights), dtype=x.dtype)
            weights[:, c] = torch.linalg.solve(precision, design.mT @ y[:, c])
        scales = (y - design @ weights).square().mean(0).sqrt()
    mean = torch.cat([weights[:-1].mT.flatten(), weights[-1], scales.log()])
    return Law(mean, torch.zeros(len(mean), len(mean), dtype=x.dtype))


def at_rate(step: Callable[..., Any], rate: float, **options: Any) -> Callable[[Regression], Law]:
    """The law of a walk with noise on mini-batches: h = rate T / N."""

    def law(problem: Regression) -> Law:
        """The known law of the weights on this problem."""
        return epoch_law(problem, step(rate * problem.temperature / ROWS, **options), even=True)

    return law


def averaged_sgd(rate: float, momentum: float) -> Callable[[Regression], Law]:
    """The law that SWAG reports of a walk by SGD with covariance S: diag(S) / 2 + S / 2, whatever the temperature."""

    def law(problem: Regression) -> Law:
        """The known law of the weights on this problem."""
        walk = epoch_law(Regression(), sgd_step(rate / ROWS, momentum), even=False)
        return Law(walk.mean, 0.5 * torch.diag(walk.covariance.diagonal()) + 0.5 * walk.covariance)

    return law


def unadjusted(step_size: float) -> Callable[[Regression], Law]:
    """The law of unadjusted Langevin steps of a length in units of the prior's scale at the temperature."""

    def law(problem: Regression) -> Law:
        """The known law of the weights on this problem."""
        return langevin_law(problem, (step_size * SCALE) ** 2 * problem.temperature)

    return law


# ---- further checks


def evidence(problem: Regression, posterior: Any) -> None:
    """The evidence of a Laplace approximation is exact, where its covariance is."""
    gap = float(posterior.log_evidence() - problem.log_evidence)
    require(abs(gap) < 1e-7, f"the log evidence is off by {gap:.2g}")


def accepts(low: float, high: float) -> Callable[[Regression, Any], None]:
    """The accept step has something to do: with a step this long some proposals are rejected."""

    def check(problem: Regression, posterior: Any) -> None:
        """Compare the posterior with what is known."""
        share = float(posterior.trace["acceptance"].mean())
        require(low < share < high, f"{share:.2f} of the proposals are accepted, expected between {low} and {high}")

    return check


def travels(fewest: int, most: int) -> Callable[[Regression, Any], None]:
    """Trajectories have the lengths that path, step and jitter give: so many gradients, and both ends occur."""

    def check(problem: Regression, posterior: Any) -> None:
        """Compare the posterior with what is known."""
        counts = posterior.trace["gradients"]
        found = int(counts.min()), int(counts.max())
        require(found == (fewest, most), f"trajectories of {found[0]} to {found[1]} gradients, expected {fewest} to {most}")

    return check


def steady(problem: Regression, posterior: Any) -> None:
    """A step size that is tuned in the burn-in stays as it is while draws are made."""
    steps = posterior.trace["step_size"].view(posterior.chains, -1)
    require(torch.equal(steps, steps[:, :1].expand_as(steps)), "the step size still changes while draws are made")


def drawn_to_a_place(position: Tensor, step: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A proposal that is drawn to a place, for which q(new | old) is not q(old | new), with the logarithm of their ratio."""
    place, keep, spread = 0.0, 0.97, 0.05
    new = place + keep * (position - place) + spread * torch.empty_like(position).normal_(generator=generator)
    there = (new - place - keep * (position - place)).square().sum(1)
    back = (position - place - keep * (new - place)).square().sum(1)
    return new, (there - back) / (2 * spread**2)


def dropout(rate: float) -> Callable[[Regression, Any], None]:
    """With dropout on the inputs the function at x has the variance p / (1 - p) sum_j x_j^2 w_cj^2, masks being consistent or not."""

    def check(problem: Regression, posterior: Any) -> None:
        """Compare the posterior with what is known."""
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        weight, bias, n = posterior.params["weight"], posterior.params["bias"], 8000
        spread = rate / (1 - rate) * (x.square() @ weight.square().mT)
        for consistent in (True, False):
            p = posterior.predict(x, draws=n, consistent=consistent)
            gap = float(((p.f_mean - x @ weight.mT - bias).abs() / (spread / n).sqrt()).max())
            require(gap < 5, f"the mean over masks is off by {gap:.1f} standard errors")
            gap = float((p.uncertainty.epistemic / spread - 1).abs().max())
            require(gap < 0.08, f"the variance over masks is off by {gap:.2f} of itself")

    return check


MASKED = 0.3  # rate of dropout


def masked(problem: Regression) -> Law:
    """Dropout of the inputs adds p / (1 - p) diag(X^T X) / sigma_c^2 to the precision."""
    squares = problem.data[0].square().sum(0)
    noise = torch.tensor(NOISES, dtype=torch.float64)
    return problem.ridge(MASKED / (1 - MASKED) * squares / noise.square().unsqueeze(1))


def perturbed(noise: float, weight: float) -> Callable[[Regression], Law]:
    r"""Noise of scale s on the inputs adds N s^2 / sigma_c^2 to the precision; two views of them differ by (e - e')^T w, so that a
    consistency of weight v adds 4 N v s^2 / C."""

    def law(problem: Regression) -> Law:
        """The known law of the weights on this problem."""
        scales = torch.tensor(NOISES, dtype=torch.float64)
        return problem.ridge(ROWS * noise**2 * (scales**-2 + 4 * weight / OUTPUTS))

    return law


TRAINED = MAP(epochs=400, learning_rate=0.05)
NOISY: dict[str, Any] = {"chains": 16, "burn_in": 10, "draws": 270}  # chains that see the same batches
TUNED: dict[str, Any] = {"chains": 512, "burn_in": 30, "draws": 8}
LARGE = 20  # batches of 20 and 9 rows, for methods that see all data in a step
CHAINS: dict[str, Any] = {"chains": 512, "burn_in": 15, "draws": 8, "tune": False}

KNOWN: Mapping[str, Mapping[str, Case]] = {
    "map": {
        "all data": Case(TRAINED, mode, batch_size=ROWS),
        "batches": Case(MAP(epochs=200, learning_rate=0.03), mode, tolerance=0.02),
        "sgd": Case(MAP(epochs=200, learning_rate=0.05, optimizer="sgd"), mode, tolerance=0.02),
        "learned noise": Case(
            MAP(epochs=600, learning_rate=0.03), mode_with_noise, tolerance=1e-4, batch_size=ROWS, learned_noise=True, further=()
        ),
    },
    "mc_dropout": {
        "fixed rate": Case(
            MCDropout(epochs=150, learning_rate=0.05, at="", rate=MASKED),
            masked,
            tolerance=0.02,
            copies=60,
            batch_size=1000,
            further=(dropout(MASKED),),
        )
    },
    "ensemble": {
        "of map": Case(Ensemble(TRAINED, 3), mode, batch_size=ROWS),
        "one by one": Case(Ensemble(TRAINED, 2, vectorize=False), mode, batch_size=ROWS, temperatures=(1.0,)),
        "anchored": Case(Ensemble(TRAINED, 500, anchored=True), exact, batch_size=ROWS, temperatures=(0.3,)),
    },
    "laplace": {
        "kronecker": Case(Laplace(), exact, from_mode=True, further=(check_functions, evidence)),
        "dense": Case(Laplace("dense"), exact, from_mode=True, further=(check_functions, evidence)),
        "hessian": Case(Laplace("dense", "hessian"), exact, from_mode=True),
        "lowrank": Case(Laplace("lowrank", rank=6), exact, from_mode=True, further=(check_functions, evidence)),
        "corrected": Case(Laplace(corrected=True), exact, from_mode=True, further=(check_functions, evidence)),
        "subnetwork": Case(Laplace("dense", subnetwork=6), exact, from_mode=True),
        "last layer": Case(Laplace(subset="last_layer"), exact, from_mode=True),
        "diagonal": Case(Laplace("diagonal"), mean_field, from_mode=True),
    },
    "online_laplace": {
        "kronecker": Case(
            OnlineLaplace(epochs=300, learning_rate=0.05), empirical_bayes, tolerance=1e-3, batch_size=ROWS, learned_prior=True
        ),
    },
    "neural_linear": {"known noise": Case(NeuralLinear(), exact, temperatures=(1.0,))},
    "swag": {
        "full rank": Case(
            SWAG(epochs=520, learning_rate=0.15, collecting_rate=0.15, momentum=0.5, clip=None, collect_after=20 / 520, rank=500),
            averaged_sgd(0.15, 0.5),
            tolerance=0.25,
        )
    },
    "variational": {
        "mean field": Case(Variational(epochs=200, learning_rate=0.05), mean_field, tolerance=0.25),
        "full": Case(
            Variational("full", epochs=200, learning_rate=0.03, samples=2, path_only=True),
            exact,
            tolerance=0.25,
            temperatures=(1.0,),
        ),
    },
    "ivon": {"mean field": Case(IVON(epochs=150, samples=4), mean_field, tolerance=0.25)},
    "pi_model": {
        "noise": Case(
            PiModel(MAP(epochs=100, learning_rate=0.1), augment=Noise(0.3), weight=2.0, ramp_up=0.0),
            perturbed(0.3, 2.0),
            tolerance=0.02,
            copies=60,
            batch_size=1000,
        ),
        "no consistency": Case(
            PiModel(MAP(epochs=100, learning_rate=0.1), augment=Noise(0.3), weight=0.0, ramp_up=0.0),
            perturbed(0.3, 0.0),
            tolerance=0.02,
            copies=60,
            batch_size=1000,
            temperatures=(1.0,),
        ),
    },
    "temporal_ensembling": {
        "at rest": Case(TemporalEnsembling(MAP(epochs=120, learning_rate=0.05), weight=3.0), mode, tolerance=0.02)
    },
    "mean_teacher": {
        "at rest": Case(MeanTeacher(MAP(epochs=200, learning_rate=0.05), weight=3.0, decay=0.5), mode, tolerance=0.02)
    },
    "sgld": {"batches": Case(SGLD(learning_rate=0.15, **NOISY), at_rate(sgld_step, 0.15))},
    "sghmc": {"batches": Case(SGHMC(learning_rate=0.1, momentum=0.5, **NOISY), at_rate(sghmc_step, 0.1, momentum=0.5))},
    "metropolis": {
        "fixed step": Case(
            Metropolis(0.27, thin=30, **CHAINS), exact, batch_size=LARGE, further=(check_functions, accepts(0.2, 0.6))
        ),
        "asymmetric proposal": Case(
            Metropolis(proposal=drawn_to_a_place, thin=40, **CHAINS), exact, batch_size=ROWS, temperatures=(0.3,)
        ),
        "tuned": Case(Metropolis(thin=30, **TUNED), exact, batch_size=ROWS, temperatures=(0.3,), further=(steady,)),
    },
    "ula": {
        "fixed step": Case(
            ULA(0.21, thin=10, chains=512, burn_in=15, draws=8),
            unadjusted(0.21),
            batch_size=LARGE,
            further=(check_functions, accepts(0.7, 0.95)),
        )
    },
    "mala": {
        "fixed step": Case(MALA(0.24, thin=10, **CHAINS), exact, batch_size=LARGE, further=(check_functions, accepts(0.5, 0.9))),
        "tuned": Case(MALA(thin=10, **TUNED), exact, batch_size=ROWS, temperatures=(0.3,), further=(steady,)),
    },
    "hmc": {
        "fixed step": Case(
            HMC(0.26, path_length=1.0, **{**CHAINS, "chains": 256, "draws": 24}),
            exact,
            batch_size=LARGE,
            further=(check_functions, accepts(0.4, 0.9), travels(3, 5)),
        ),
        "tuned": Case(HMC(path_length=1.0, **TUNED), exact, batch_size=ROWS, temperatures=(0.3,), further=(steady,)),
    },
    "nuts": {
        "fixed step": Case(NUTS(0.26, **CHAINS), exact, batch_size=LARGE, further=(check_functions, accepts(0.4, 0.9))),
        "blocks": Case(NUTS(0.08, **CHAINS), exact, batch_size=ROWS, temperatures=(0.3,)),
    },
    "mclmc": {"fixed step": Case(MCLMC(0.18, thin=10, **CHAINS), exact, batch_size=LARGE, bias=0.05)},
    "mams": {
        "fixed step": Case(
            MAMS(0.45, path_length=1.2, **CHAINS),
            exact,
            batch_size=LARGE,
            further=(check_functions, accepts(0.4, 0.9), travels(2, 8)),
        )
    },
}
