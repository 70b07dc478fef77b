"""A summary of draws and a verdict on them, as a table to print, and the draws as data of ArviZ (pip install dubito[arviz])."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dubito.posteriors.diagnostics.chains import RHAT_BAD, RHAT_GOOD, SHARE, Spread, Statistic, bfmi, energy_error_per_dimension
from dubito.tensors.text import TextTable, rich_text
from dubito.tensors.tree import Params

if TYPE_CHECKING:
    from rich.console import Group

ENOUGH = 400  # effective draws that 95 % of the quantities should have
DIVERGENT = 0.01  # share of divergent transitions above which the draws cannot be right
STUCK = 0.05  # share of accepted proposals below which a chain hardly moves
SLOW = 0.3  # BFMI below which the energy is explored slowly

Problem = tuple[str, str]  # what is wrong, and what to do about it


@dataclass(frozen=True)
class Summary:
    """What `posterior.summary()` returns: print it. `trusted` is the verdict as True, False, or None where it cannot be decided."""

    method: str
    chains: int
    draws: int  # of each chain
    weights: Spread
    predictions: Spread | None = None
    log_joint: Spread | None = None
    adjusted: bool | None = None  # whether there was an accept step, if known
    acceptance: tuple[float, ...] = ()  # one value for each chain, as in the next three
    step_size: tuple[float, ...] = ()
    bfmi: tuple[float, ...] = ()
    energy_error: tuple[float, ...] = ()  # variance per dimension
    divergences: int | None = None
    gradients: float | None = None  # gradient evaluations of all chains
    burnt_in: bool = True  # False: the run was stopped before the first draw, and these are its current weights
    step: str = field(default="step_size", repr=False)  # the name of the sampler's step size
    limit: int = field(default=ENOUGH, repr=False)

    @property
    def spread(self) -> Spread:
        """The spread that the verdict goes by: that of the predictions, if there are any, otherwise that of the weights."""
        return self.weights if self.predictions is None else self.predictions

    @property
    def per_gradient(self) -> float | None:
        """Effective draws of the median prediction per 1,000 gradient evaluations."""
        if not self.gradients or self.predictions is None:
            return None
        return 1000 * self.predictions.quantile("ess_bulk", 0.5) / self.gradients

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the draws, and what to do about it."""
        if not self.burnt_in:
            return (("the run was stopped in its burn-in, and these are its weights at that moment", "let it run to its end"),)
        return (*self._divergence(), *self._stuck_chains(), *self._disagreement())

    def _divergence(self) -> list[Problem]:
        """Quantities that are not finite, and too many divergences."""
        problems, total = [], self.chains * self.draws
        broken = sum(spread.broken for spread in (self.weights, self.predictions) if spread is not None)
        if broken:
            problems.append((f"{_count(broken, 'quantity', 'quantities')} became infinite or NaN", f"lower {self.step}"))
        elif self.log_joint is not None and self.log_joint.broken:
            todo = "start within the support of the prior, and use a sampler with an accept step"
            problems.append(("some draws have no density under the prior", todo))
        if (self.divergences or 0) > DIVERGENT * total:
            problems.append((f"{self.divergences} divergences in {total} draws", f"lower {self.step}"))
        return problems

    def _stuck_chains(self) -> list[Problem]:
        stuck = [i for i, rate in enumerate(self.acceptance, 1) if rate < STUCK]
        if not stuck or self.adjusted is False:
            return []
        share = f"{100 * min(self.acceptance):.1f} % of"
        one = f"chain {stuck[0]} accepts {share} its proposals"
        return [
            (one if len(stuck) == 1 else f"{len(stuck)} chains accept as little as {share} their proposals", f"lower {self.step}")
        ]

    def _disagreement(self) -> list[Problem]:
        spread = self.spread
        if self.draws < 4:
            return [(f"{_count(self.draws, 'draw', 'draws')} of a chain cannot be judged", "raise draws")]
        if math.isnan(spread.worst):
            return [(f"none of the {self._quantities} ever changes", f"lower {self.step}")]
        if spread.worst <= RHAT_BAD or self.predictions is None:
            return []
        who = "the chains disagree" if self.chains > 1 else "the chain drifts"
        share = f"{100 * (1 - spread.agree):.0f} % of them above {RHAT_GOOD}"
        todo = "raise burn_in and draws, or start the chains nearer to where they end"
        return [(f"{who}, with an R-hat of {self._quantities} of up to {_rhat(spread.worst)} and {share}", todo)]

    @property
    def _quantities(self) -> str:
        return "weights" if self.predictions is None else "predictions"

    @property
    def undecided(self) -> bool:
        """Whether only the weights disagree, which they may, and there are no predictions to decide by."""
        return not self.problems and self.predictions is None and self.weights.worst > RHAT_BAD

    @property
    def needs_more_draws(self) -> bool:
        """Whether the chains agree as far as can be seen, with too few draws to be sure."""
        enough = self.spread.agree >= SHARE and self.spread.fewest >= self.limit
        return not self.problems and not self.undecided and not enough

    @property
    def trusted(self) -> bool | None:
        """Whether the draws can be trusted; None if it cannot be decided, or not with so few draws."""
        return False if self.problems else None if self.undecided or self.needs_more_draws else True

    @property
    def verdict(self) -> str:
        """One or two sentences: whether to trust the draws, why, and what to do."""
        if self.problems:
            wrong, todo = zip(*self.problems, strict=True)
            return f"Do not trust these draws: {'; '.join(wrong)}. Do this: {'; '.join(dict.fromkeys(todo))}."
        if self.undecided:
            return (
                "It cannot be told yet whether the chains can be trusted: the R-hat of weights goes up to "
                f"{_rhat(self.weights.worst)}, but weights are symmetric, and chains that differ there may still predict the same. "
                "Do this: look at predictions, by giving inputs x."
            )
        spread, what, many = self.spread, self._quantities, self.chains > 1
        agree, share, worst = f"{100 * spread.agree:.0f} % of", f"{100 * SHARE:.0f} %", f"(the largest {_rhat(spread.worst)})"
        if self.needs_more_draws:
            factor = max(self.limit / max(1.0, spread.fewest), 1 if spread.agree >= SHARE else 2)
            return (
                f"The {'chains agree' if many else 'chain is steady'}, but there are few draws: R-hat is at most {RHAT_GOOD} for "
                f"{agree} the {what} {worst}, and {share} have {spread.fewest:.0f} effective draws or more, where {self.limit} are "
                f"good. Do this: raise draws from {self.draws} to about {_round_up(self.draws * factor)}."
            )
        sound = "The chains can be trusted" if many else "The chain looks sound"
        return (
            f"{sound}: the R-hat of {agree} {len(spread):,} {what} is at most {RHAT_GOOD} {worst}, "
            f"and {share} have at least {spread.fewest:.0f} effective draws."
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes that do not change the verdict."""
        divergences, slowest = self.divergences or 0, min(self.bfmi, default=math.inf)
        differ = self.predictions is not None and not self.problems and self.weights.worst > RHAT_BAD
        notes = [
            (
                self.chains == 1,
                "One chain cannot show that it is stuck: it may have seen one mode of several. Run chains=4 from different starts.",
            ),
            (
                self.adjusted is False,
                "No accept step was used: the draws have a bias that grows with the step size, which these figures cannot show. "
                f"Halve {self.step} and compare the predictions.",
            ),
            (
                0 < divergences <= DIVERGENT * self.chains * self.draws,
                f"{_count(divergences, 'divergence', 'divergences')}: a smaller {self.step} would be safer.",
            ),
            (
                slowest < SLOW,
                f"The BFMI is {slowest:.2f}, below {SLOW}: the energy changes slowly, and the tails are explored slowly. "
                'Use longer paths, units="posterior", or another prior.',
            ),
            (
                differ,
                f"The R-hat of weights goes up to {_rhat(self.weights.worst)}. That alone is no reason for doubt: hidden units may "
                "change places and signs, so chains can differ in weights and agree in all their predictions.",
            ),
            (
                self.weights.still > 0,
                f"{_count(self.weights.still, 'weight', 'weights')} of {len(self.weights):,} never changed.",
            ),
        ]
        return tuple(text for holds, text in notes if holds)

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """The table: (name, value, which values are good)."""
        accept = {True: ", with an accept step", False: ", without an accept step", None: ""}[self.adjusted]
        alone = "several would show if one is stuck" if self.chains == 1 else ""
        single = {
            "acceptance": (_range(self.acceptance), "" if self.adjusted is False else "near the sampler's target"),
            "divergences": ("" if self.divergences is None else f"{self.divergences}", "none"),
            "step size": (_range(self.step_size), "similar in all chains"),
            "BFMI": (_range(self.bfmi), f"above {SLOW}"),
            "energy error per dimension": (_range(self.energy_error), "its variance"),
            "gradient evaluations": (f"{self.gradients:,.0f}" if self.gradients else "", "since the burn-in, all chains"),
            "effective draws per 1,000 gradients": (
                "" if self.per_gradient is None else f"{self.per_gradient:.3g}",
                "of the median prediction",
            ),
        }
        return (
            ("sampler", f"{self.method}{accept}", ""),
            ("chains × draws", f"{self.chains} × {self.draws}", alone),
            *self._spread_rows("predictions", self.predictions, "; these matter"),
            *self._spread_rows("weights", self.weights, "; may differ where predictions agree"),
            *self._spread_rows("log joint", self.log_joint, ""),
            *((name, value, good) for name, (value, good) in single.items() if value),
        )

    def _spread_rows(self, name: str, spread: Spread | None, why: str) -> list[tuple[str, str, str]]:
        if spread is None:
            return []
        title = f"R-hat of {name}" if len(spread) <= 1 else f"R-hat of {len(spread):,} {name}"
        draws = [(f"  effective draws, {end}", _range_of(spread, stat), f"{self.limit} or more") for end, stat in ENDS.items()]
        return [(title, _rhats(spread), f"at most {RHAT_GOOD}{why}"), *draws]

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        color = {True: "bold green", False: "bold red", None: "bold yellow"}[self.trusted]
        table = TextTable(self.rows, ("", "value", "good"), styles={1: "bold", 2: "dim"})
        return Group(Text(self.verdict, style=color), table, *(Text(f"• {remark}") for remark in self.remarks))

    def __str__(self) -> str:
        return rich_text(self)


ENDS: dict[str, Statistic] = {"bulk": "ess_bulk", "tail": "ess_tail"}


def summarize(
    params: Params,
    *,
    chains: int,
    trace: Params | None = None,
    sampler: Mapping[str, Any] | None = None,
    predictions: Tensor | None = None,
) -> Summary:
    """Judge draws, leaves [S, ...] chain after chain, with the sampler's records of them, [S] each, and their predictions, [S, ...].

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> summary = summarize({"w": torch.randn(4000, 3, generator=g)}, chains=4, sampler={"method": "HMC", "adjusted": True})
    >>> summary.trusted
    True
    >>> print(summary.verdict)
    The chains can be trusted: the R-hat of 100 % of 3 weights is at most 1.01 (the largest 1.001), and 95 % have at least ...
    """
    sampler = {"method": "unknown sampler", "adjusted": None, "burnt_in": True, **(sampler or {})}
    records = {name: leaf.double().view(chains, -1) for name, leaf in (trace or {}).items()}
    joint = [records[name] for name in ("log_likelihood", "log_prior") if name in records]
    means = {name: tuple(leaf.mean(1).tolist()) for name, leaf in records.items()}
    totals = {name: float(records[name].sum()) for name in ("divergent", "gradients") if name in records}
    size = sum(leaf[0].numel() for leaf in params.values())
    errors = records.get("energy_error")
    return Summary(
        method=str(sampler["method"]),
        chains=chains,
        draws=len(next(iter(params.values()))) // chains,
        weights=Spread.of(*(_by_chain(leaf, chains) for leaf in params.values())),
        predictions=None if predictions is None else Spread.of(_by_chain(predictions, chains)),
        log_joint=Spread.of(sum(joint[1:], joint[0])) if joint else None,
        adjusted=sampler["adjusted"],
        acceptance=means.get("acceptance", ()),
        step_size=means.get("step_size", ()),
        bfmi=tuple(bfmi(records["energy"]).tolist()) if "energy" in records else (),
        energy_error=() if errors is None else tuple(energy_error_per_dimension(errors, size).tolist()),
        divergences=round(totals["divergent"]) if "divergent" in totals else None,
        gradients=totals.get("gradients"),
        burnt_in=bool(sampler["burnt_in"]),
        step="learning_rate" if "learning_rate" in sampler else "step_size",
    )


def _by_chain(leaf: Tensor, chains: int) -> Tensor:
    return leaf.detach().reshape(chains, -1, *leaf.shape[1:])


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _rhat(value: float) -> str:
    return f"{value:.3f}" if value < 2 else f"{value:.3g}"


def _rhats(spread: Spread) -> str:
    if len(spread) == 1:
        return _rhat(spread.worst)
    return f"max {_rhat(spread.worst)}, median {_rhat(spread.quantile('rhat', 0.5))}, {100 * spread.agree:.0f} % good"


def _range_of(spread: Spread, name: Statistic) -> str:
    low, middle = spread.quantile(name, 0.0), spread.quantile(name, 0.5)
    return f"{low:.0f}" if len(spread) == 1 else f"min {low:.0f}, median {middle:.0f}"


def _range(values: tuple[float, ...]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _round_up(value: float) -> int:
    """The next number with at most two significant digits."""
    scale = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / scale) * scale


# our names of a sampler's records: those of ArviZ; other names stay
NAMES = {"acceptance": "acceptance_rate", "divergent": "diverging", "gradients": "n_steps", "depth": "tree_depth"}


def to_arviz(params: Params, *, chains: int = 1, trace: Params | None = None, predictions: Tensor | None = None) -> Any:
    """Draws chain after chain, leaves [S, ...], as ArviZ's DataTree: groups `posterior` and `sample_stats`.

    `predictions` [S, ...] become the variable "f" of the posterior. Look at these rather than at weights, which are symmetric.
    """
    try:
        from arviz_base import from_dict  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("ArviZ is not installed: pip install dubito[arviz]") from None

    def _by_chain(leaf: Tensor) -> np.ndarray:
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf  # numpy has no bfloat16
        return leaf.reshape(chains, -1, *leaf.shape[1:]).numpy()

    trace = trace or {}
    stats = {NAMES.get(name, name): _by_chain(leaf) for name, leaf in trace.items()}
    if "diverging" in stats:
        stats["diverging"] = stats["diverging"] > 0
    if "log_likelihood" in trace and "log_prior" in trace:
        stats["lp"] = _by_chain(trace["log_likelihood"].double() + trace["log_prior"].double())
    posterior = {name: _by_chain(leaf) for name, leaf in params.items()}
    if predictions is not None:
        posterior["f"] = _by_chain(predictions)
    return from_dict({"posterior": posterior, **({"sample_stats": stats} if stats else {})})
