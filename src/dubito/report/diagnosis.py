"""The report on a sampler's chains: the verdict, the table, and the pictures behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dubito.posteriors import Samples
from dubito.posteriors.diagnostics import Summary
from dubito.posteriors.diagnostics.predictions import running_score
from dubito.posteriors.diagnostics.spread import RHAT_BAD, RHAT_GOOD
from dubito.report.canvas import INK
from dubito.report.chains import MANY, chain_colours, energies, rhats, running_scores, trace
from dubito.report.report import Column, Figure, Picture, Report, Section, Table

SHOWN = 2  # quantities of each kind: the one with the largest R-hat, and the one in the middle


def diagnosis(
    posterior: Samples,
    summary: Summary,
    *,
    title: str,
    predictions: Tensor | None = None,
    scores: Tensor | None = None,
    names: tuple[str, ...] = (),
    label: str = "",
    facts: Mapping[str, str] | None = None,
) -> Report:
    """What `summary` says of a posterior, in pictures too.

    `predictions` [S, B, C] are what it was given; `scores` [S, B] log scores by draw, if the targets are known; `names` [C] are what
    the outputs are called, and `label` what the predictions are.
    """
    chains = posterior.chains
    sections = [Section("Summary", " ".join(summary.remarks), tables=(_table(summary),))]
    sections.append(_convergence(summary, predictions is not None))
    sections.append(_traces(posterior, summary, predictions, names, label))
    extra = []
    if "energy" in posterior.trace:
        text = (
            "Every new momentum changes the energy. Where these changes are as wide as the energies themselves, the chain reaches all "
            "of them; where they are much narrower, with a BFMI below 0.3, it creeps."
        )
        extra.append(Figure("Energy", (energies(posterior.trace["energy"].view(chains, -1)),), caption=text))
    if scores is not None:
        extra.append(_scores(scores, chains))
    if extra:
        sections.append(Section("Energy and score" if len(extra) > 1 else extra[0].title, figures=tuple(extra)))
    return Report(title, tuple(sections), summary=summary.verdict, facts=facts or {})


def _table(summary: Summary) -> Table:
    rows = tuple(
        (what.strip() if not what.startswith(" ") else f"– {what.strip()}", found, good) for what, found, good in summary.rows
    )
    return Table("", (Column("quantity"), Column("found"), Column("good")), rows)


def _convergence(summary: Summary, predictions: bool) -> Section:
    spreads = {"predictions": summary.predictions, "weights": summary.weights}
    pictures = tuple(
        rhats(spread.rhat, title=f"{len(spread):,} {name}", good=RHAT_GOOD)
        for name, spread in spreads.items()
        if spread is not None
    )
    text = (
        "R-hat compares the spread between the chains with the spread inside them, for one quantity at a time. It is 1 where they "
        f"agree, up to {RHAT_GOOD} is good, and above {RHAT_BAD} it is not chance. "
    )
    text += (
        "Predictions count. Weights are symmetric: hidden units may change places and signs, so that chains differ in weights and "
        "agree in all they predict."
        if predictions
        else "Weights are symmetric, so that these may be large although all chains predict the same: give data to see predictions."
    )
    return Section("Do the chains agree?", text, figures=(Figure("R-hat", pictures),))


def _traces(posterior: Samples, summary: Summary, predictions: Tensor | None, names: tuple[str, ...], label: str) -> Section:
    chains, figures = posterior.chains, []
    joint = [posterior.trace[name].double() for name in ("log_likelihood", "log_prior") if name in posterior.trace]
    if joint:
        shown = trace(sum(joint[1:], joint[0]).view(chains, -1), label="log joint, nats")
        figures.append(Figure("Log joint density", (shown,)))
    if predictions is not None and summary.predictions is not None:
        flat = predictions.flatten(1)

        def named(i: int) -> str:
            row, column = divmod(i, predictions.shape[-1])
            return f"row {row + 1}" + (f", {names[column]}" if len(names) == predictions.shape[-1] > 1 else "")

        pictures = [
            _one(flat[:, i], chains, f"{named(i)}: R-hat {rhat:.3f}", label) for i, rhat in _picked(summary.predictions.rhat)
        ]
        figures.append(Figure("Predictions: the one with the largest R-hat, and one in the middle", tuple(pictures)))
    leaves = list(posterior.params.items())
    sizes = [leaf[0].numel() for _, leaf in leaves]
    pictures = []
    for i, rhat in _picked(summary.weights.rhat):
        which = 0
        while i >= sizes[which]:
            i, which = i - sizes[which], which + 1
        name, leaf = leaves[which]
        place = ", ".join(str(int(k)) for k in torch.unravel_index(torch.tensor(i), leaf.shape[1:])) if leaf.ndim > 1 else ""
        pictures.append(_one(leaf.flatten(1)[:, i] if leaf.ndim > 1 else leaf, chains, f"{name}[{place}]: R-hat {rhat:.3f}"))
    figures.append(Figure("Weights: the one with the largest R-hat, and one in the middle", tuple(pictures)))
    text = (
        "Draws in the order they were made, and how often each value was drawn. Chains that agree lie on top of each other, and none "
        "of them drifts."
    )
    figures[0] = replace(figures[0], legend=_legend(chains))
    return Section("Traces", text, figures=tuple(figures))


def _legend(chains: int) -> tuple[tuple[str, str], ...]:
    return tuple((colour, f"chain {i + 1}") for i, colour in enumerate(chain_colours(chains)) if 1 < chains <= MANY)


def _one(values: Tensor, chains: int, title: str, label: str = "") -> Picture:
    return trace(values.reshape(chains, -1), title=title, label=label)


def _picked(rhat: Tensor) -> list[tuple[int, float]]:
    """Places and values of the largest R-hat and of the one in the middle."""
    order = torch.where(rhat.isnan(), -1.0, rhat).argsort(descending=True)
    known = int((~rhat.isnan()).sum())
    places = dict.fromkeys(int(order[k]) for k in ((0, known // 2) if known else (0,))[:SHOWN])
    return [(i, float(rhat[i])) for i in places]


def _scores(scores: Tensor, chains: int) -> Figure:
    each = [running_score(part) for part in scores.view(chains, -1, *scores.shape[1:])]
    legend = ((INK, "all chains together"), *_legend(chains))
    text = (
        "The mean log probability of the targets under the average of the first draws. Where it still rises at the end, more draws "
        "would predict better; where chains end at different heights, they have found different solutions."
    )
    shown = running_scores(running_score(scores, chains), each, label="log score, nats")
    return Figure("Log score", (shown,), caption=text, legend=legend)
