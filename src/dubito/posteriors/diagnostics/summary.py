"""The state of a sampler's chains in one table, with a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.energy import bfmi, energy_error_per_dimension
from dubito.posteriors.diagnostics.ess import effective, tails
from dubito.posteriors.diagnostics.quantities import each, halves
from dubito.posteriors.diagnostics.rhat import ranked
from dubito.tensors.text import TextTable, rich_text
from dubito.tensors.tree import Params

GOOD, BAD = 1.01, 1.05  # R-hat: of a quantity that has converged; of the worst of many, above which it is not chance any more
AGREE = 0.95  # the share of quantities that should be good
ENOUGH = 400  # effective draws, of all but the worst twentieth
DIVERGENT = 0.01  # share of divergent transitions above which the draws cannot be right
STUCK = 0.05  # share of accepted proposals below which a chain hardly moves
SLOW = 0.3  # BFMI


class Convergence(NamedTuple):
    """Of every quantity, [...]."""

    rhat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def convergence(draws: Tensor) -> Convergence:
    """`rhat`, `ess_bulk` and `ess_tail` of draws [chains, n, ...] together, in two thirds of the time.

    >>> found = convergence(torch.randn(4, 100, 3, 5, generator=torch.Generator().manual_seed(0)))
    >>> found.rhat.shape, bool((found.rhat < 1.1).all())
    (torch.Size([3, 5]), True)
    """

    def all_three(x: Tensor) -> tuple[Tensor, ...]:
        found, scores = ranked(halves(x))
        return found, effective(scores), tails(x)

    return Convergence(*each(all_three, draws, answers=3))


@dataclass(frozen=True, eq=False)
class Spread:
    """R-hat and effective draws of many quantities, [Q] each; `still` of them are the same in all draws, `broken` are not finite."""

    rhat: Tensor = field(repr=False)
    ess_bulk: Tensor = field(repr=False)
    ess_tail: Tensor = field(repr=False)
    still: int = 0
    broken: int = 0

    @staticmethod
    def of(*leaves: Tensor) -> Spread:
        """Of draws [chains, n, ...]; the quantities of all leaves in one row."""
        found, still, broken = [], 0, 0
        for leaf in leaves:
            one = Convergence(*(value.flatten().cpu() for value in convergence(leaf)))
            lost = one.rhat.isnan().to(leaf.device)
            if lost.any():
                finite = leaf.reshape(*leaf.shape[:2], -1)[..., lost].isfinite().all(0).all(0)
                broken += int((~finite).sum())
                still += int(finite.sum()) if leaf.shape[1] >= 4 else 0
            found.append(one)
        return Spread(*(torch.cat(parts) for parts in zip(*found, strict=True)), still=still, broken=broken)

    def __len__(self) -> int:
        return len(self.rhat)

    def quantile(self, name: Literal["rhat", "ess_bulk", "ess_tail"], level: float) -> float:
        """Of the quantities that have an answer, and nan where there is none; the value at or beyond the level, for the worse."""
        values = getattr(self, name)
        values = values[~values.isnan()]
        if not len(values):
            return math.nan
        place = (len(values) - 1) * level
        return float(values.sort().values[math.ceil(place) if name == "rhat" else math.floor(place)])

    @property
    def worst(self) -> float:
        """The largest R-hat."""
        return self.quantile("rhat", 1.0)

    @property
    def agree(self) -> float:
        """The share of quantities with an R-hat of at most 1.01."""
        known = self.rhat[~self.rhat.isnan()]
        return float((known <= GOOD).double().mean()) if len(known) else math.nan

    @property
    def fewest(self) -> float:
        """Effective draws, in the bulk or the tails, that 95 % of the quantities have."""
        found = [self.quantile(name, 1 - AGREE) for name in ("ess_bulk", "ess_tail")]
        return min((value for value in found if not math.isnan(value)), default=math.nan)


@dataclass(frozen=True)
class Summary:
    """What `posterior.summary()` gives: print it. `trusted` is the verdict in one word: True, False, or None where nobody can tell."""

    method: str
    chains: int
    draws: int  # of each chain
    weights: Spread
    predictions: Spread | None = None
    log_joint: Spread | None = None
    adjusted: bool | None = None
    acceptance: tuple[float, ...] = ()  # of each chain, as all that follows
    step_size: tuple[float, ...] = ()
    bfmi: tuple[float, ...] = ()
    energy_error: tuple[float, ...] = ()  # its variance for each dimension
    divergences: int | None = None
    gradients: float | None = None  # evaluations, over all chains
    burnt_in: bool = True  # otherwise there is no draw yet, and what stands here are the weights on their way
    step: str = field(default="step_size", repr=False)  # what the sampler calls it
    limit: int = field(default=ENOUGH, repr=False)

    @property
    def spread(self) -> Spread:
        """The one that counts: of predictions if there are any."""
        return self.weights if self.predictions is None else self.predictions

    @property
    def per_gradient(self) -> float | None:
        """Effective draws of the median prediction for a thousand gradients."""
        if not self.gradients or self.predictions is None:
            return None
        return 1000 * self.predictions.quantile("ess_bulk", 0.5) / self.gradients

    @property
    def problems(self) -> tuple[tuple[str, str], ...]:
        """What is wrong with the draws, and what to do about it."""
        found, what = [], "predictions" if self.predictions is not None else "weights"
        if not self.burnt_in:
            return (("the run was stopped in its burn-in, and these are the weights as they stood", "let it run to its end"),)
        broken = self.weights.broken + (self.predictions.broken if self.predictions is not None else 0)
        if broken:
            found.append((f"{_count(broken, 'quantity', 'quantities')} became infinite or NaN", f"lower {self.step}"))
        elif self.log_joint is not None and self.log_joint.broken:
            found.append(
                ("some draws have no density", "start within the support of the prior, and use a sampler with an accept step")
            )
        total = self.chains * self.draws
        if self.divergences and self.divergences > DIVERGENT * total:
            found.append((f"{self.divergences} divergences in {total} draws", f"lower {self.step}"))
        stuck = [i for i, rate in enumerate(self.acceptance) if rate < STUCK]
        if stuck and self.adjusted is not False:
            rate = f"{100 * min(self.acceptance):.1f} % of {'its' if len(stuck) == 1 else 'their'} proposals"
            which = f"chain {stuck[0] + 1} accepts" if len(stuck) == 1 else f"{len(stuck)} chains accept as little as"
            found.append((f"{which} {rate}", f"lower {self.step}"))
        if self.draws < 4:
            found.append((f"{_count(self.draws, 'draw', 'draws')} of a chain cannot be judged", "raise draws"))
        elif not len(self.spread) or math.isnan(self.spread.worst):
            found.append((f"none of the {what} ever changes", f"lower {self.step}"))
        elif self.spread.worst > BAD and self.predictions is not None:
            who = "the chains disagree" if self.chains > 1 else "the chain drifts"
            share = f"{100 * (1 - self.spread.agree):.0f} % of them above {GOOD}"
            todo = "raise burn_in and draws, or start the chains nearer to where they end"
            found.append((f"{who}, with an R-hat of {what} of up to {_rhat(self.spread.worst)} and {share}", todo))
        return tuple(found)

    @property
    def undecided(self) -> bool:
        """Nothing is wrong but that the weights disagree, which they may, and there are no predictions to look at."""
        return not self.problems and self.predictions is None and self.weights.worst > BAD

    @property
    def few(self) -> bool:
        """The chains agree as far as so few draws can tell."""
        enough = self.spread.agree >= AGREE and self.spread.fewest >= self.limit
        return not self.problems and not self.undecided and not enough

    @property
    def trusted(self) -> bool | None:
        return False if self.problems else None if self.undecided or self.few else True

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        what = "weights" if self.predictions is None else "predictions"
        if self.problems:
            wrong, todo = zip(*self.problems, strict=True)
            return f"Do not trust these draws: {'; '.join(wrong)}. Do this: {'; '.join(dict.fromkeys(todo))}."
        if self.undecided:
            return (
                "It cannot be told yet whether the chains can be trusted: the R-hat of weights goes up to "
                f"{_rhat(self.weights.worst)}, but weights are symmetric, and chains that differ there may still predict the same. "
                "Do this: look at predictions, by giving inputs x."
            )
        chains = "chains agree" if self.chains > 1 else "chain is steady"
        if self.few:
            factor = max(self.limit / max(1.0, self.spread.fewest), 1 if self.spread.agree >= AGREE else 2)
            return (
                f"The {chains}, but there are few draws: R-hat is at most {GOOD} for {100 * self.spread.agree:.0f} % of the {what} "
                f"(the largest {_rhat(self.spread.worst)}), and {100 * AGREE:.0f} % have {self.spread.fewest:.0f} effective draws or "
                f"more, where {self.limit} are good. Do this: raise draws from {self.draws} to about {_rounded(self.draws * factor)}."
            )
        can = "The chains can be trusted" if self.chains > 1 else "The chain looks sound"
        return (
            f"{can}: the R-hat of {100 * self.spread.agree:.0f} % of {len(self.spread):,} {what} is at most {GOOD} "
            f"(the largest {_rhat(self.spread.worst)}), and {100 * AGREE:.0f} % have at least {self.spread.fewest:.0f} effective draws."
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else there is to say."""
        said = []
        if self.chains == 1:
            said.append(
                "One chain cannot show that it is stuck: it may have seen one mode of several. Run chains=4 from different starts."
            )
        if self.adjusted is False:
            said.append(
                "No accept step was used: the draws have a bias that grows with the step size and that nothing here shows. "
                f"Halve {self.step} and compare the predictions."
            )
        if self.divergences and self.divergences <= DIVERGENT * self.chains * self.draws:
            said.append(f"{_count(self.divergences, 'divergence', 'divergences')}: a smaller {self.step} would be safer.")
        if self.bfmi and min(self.bfmi) < SLOW:
            said.append(
                f"The BFMI is {min(self.bfmi):.2f}, below {SLOW}: the energy changes slowly, and the tails are explored slowly. "
                'Use longer paths, units="posterior", or another prior.'
            )
        if self.predictions is not None and not self.problems and self.weights.worst > BAD:
            said.append(
                f"The R-hat of weights goes up to {_rhat(self.weights.worst)}. That alone is no reason for doubt: hidden units may "
                "change places and signs, so chains can differ in weights and agree in all they predict."
            )
        if self.weights.still:
            said.append(f"{_count(self.weights.still, 'weight', 'weights')} of {len(self.weights):,} never changed.")
        return tuple(said)

    @property
    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """(what, its value, how to read it)."""
        rows = [("sampler", f"{self.method}{_accept(self.adjusted)}", "")]
        rows.append(
            ("chains × draws", f"{self.chains} × {self.draws}", "" if self.chains > 1 else "several would show if one is stuck")
        )
        for name, spread in (("predictions", self.predictions), ("weights", self.weights), ("log joint", self.log_joint)):
            if spread is None:
                continue
            why = {"predictions": "the ones that matter", "weights": "may differ where predictions agree"}.get(name, "")
            number = f"{len(spread):,}" if len(spread) > 1 else ""
            rows.append(
                (f"R-hat of {number} {name}".replace("  ", " "), _rhats(spread), f"at most {GOOD}" + (f"; {why}" if why else ""))
            )
            rows += [
                (f"  effective draws, {part}", _draws(spread, f"ess_{part}"), f"{self.limit} or more")
                for part in ("bulk", "tail")
            ]
        if self.acceptance:
            rows.append(
                ("acceptance", _range(self.acceptance), "" if self.adjusted is False else "near what the sampler aims at")
            )
        if self.divergences is not None:
            rows.append(("divergences", f"{self.divergences}", "none"))
        if self.step_size:
            rows.append(("step size", _range(self.step_size), "alike in all chains"))
        if self.bfmi:
            rows.append(("BFMI", _range(self.bfmi), f"above {SLOW}"))
        if self.energy_error:
            rows.append(("energy error per dimension", _range(self.energy_error), "its variance"))
        if self.gradients:
            rows.append(("gradient evaluations", f"{self.gradients:,.0f}", "since the burn-in, all chains"))
        if self.per_gradient is not None:
            rows.append(("effective draws per 1,000 gradients", f"{self.per_gradient:.3g}", "of the median prediction"))
        return tuple(rows)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        colour = {True: "bold green", False: "bold red", None: "bold yellow"}[self.trusted]
        table = TextTable(self.rows, ("", "found", "good"), styles={1: "bold", 2: "dim"})
        return Group(Text(self.verdict, style=colour), table, *(Text(f"• {remark}") for remark in self.remarks))

    def __str__(self) -> str:
        return rich_text(self)


def summarize(
    params: Params,
    *,
    chains: int,
    trace: Params | None = None,
    sampler: Mapping[str, Any] | None = None,
    predictions: Tensor | None = None,
) -> Summary:
    """Of draws chain after chain, leaves [S, ...], what a sampler noted of them, [S] each, and what they predict, [S, ...].

    >>> g = torch.Generator().manual_seed(0)
    >>> found = summarize({"w": torch.randn(4000, 3, generator=g)}, chains=4, sampler={"method": "HMC", "adjusted": True})
    >>> found.trusted
    True
    >>> print(found.verdict)
    The chains can be trusted: the R-hat of 100 % of 3 weights is at most 1.01 (the largest 1.001), and 95 % have at least ...
    """
    trace, sampler = trace or {}, sampler or {}
    by_chain = {name: leaf.double().view(chains, -1) for name, leaf in trace.items()}
    joint = [by_chain[name] for name in ("log_likelihood", "log_prior") if name in by_chain]

    def mean(name: str) -> tuple[float, ...]:
        return tuple(by_chain[name].mean(1).tolist()) if name in by_chain else ()

    def total(name: str) -> float | None:
        return float(by_chain[name].sum()) if name in by_chain else None

    divergences = total("divergent")
    size = sum(leaf[0].numel() for leaf in params.values())
    errors = by_chain.get("energy_error")
    return Summary(
        method=str(sampler.get("method", "unknown sampler")),
        chains=chains,
        draws=len(next(iter(params.values()))) // chains,
        weights=Spread.of(*(_by_chain(leaf, chains) for leaf in params.values())),
        predictions=None if predictions is None else Spread.of(_by_chain(predictions, chains)),
        log_joint=Spread.of(sum(joint[1:], joint[0])) if joint else None,
        adjusted=sampler.get("adjusted"),
        acceptance=mean("acceptance"),
        step_size=mean("step_size"),
        bfmi=tuple(bfmi(by_chain["energy"]).tolist()) if "energy" in by_chain else (),
        energy_error=() if errors is None else tuple(energy_error_per_dimension(errors, size).tolist()),
        divergences=None if divergences is None else round(divergences),
        gradients=total("gradients"),
        burnt_in=bool(sampler.get("burnt_in", True)),
        step="learning_rate" if "learning_rate" in sampler else "step_size",
    )


def _by_chain(leaf: Tensor, chains: int) -> Tensor:
    return leaf.detach().reshape(chains, -1, *leaf.shape[1:])


def _accept(adjusted: bool | None) -> str:
    return {True: ", with an accept step", False: ", without an accept step", None: ""}[adjusted]


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _rhat(value: float) -> str:
    return f"{value:.3f}" if value < 2 else f"{value:.3g}"


def _rhats(spread: Spread) -> str:
    if len(spread) == 1:
        return _rhat(spread.worst)
    return f"max {_rhat(spread.worst)}, median {_rhat(spread.quantile('rhat', 0.5))}, {100 * spread.agree:.0f} % good"


def _draws(spread: Spread, name: Any) -> str:
    low, middle = spread.quantile(name, 0.0), spread.quantile(name, 0.5)
    return f"{low:.0f}" if len(spread) == 1 else f"min {low:.0f}, median {middle:.0f}"


def _range(values: tuple[float, ...]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _rounded(value: float) -> int:
    """Up, to two digits."""
    scale = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / scale) * scale
