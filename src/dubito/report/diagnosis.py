"""The report on the chains of a sampler: verdict, table and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from dubito.posteriors import Samples
from dubito.posteriors.diagnostics import Summary
from dubito.posteriors.diagnostics.chains import RHAT_BAD, RHAT_GOOD
from dubito.posteriors.diagnostics.predictions import running_score
from dubito.report.canvas import INK
from dubito.report.chains import MANY, chain_colours, energies, rhats, running_scores, trace
from dubito.report.content import Column, Figure, Picture, Section, Table
from dubito.report.report import Report

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
    """A report on the chains of a posterior.

    Args:
        summary: their diagnostics, from `posterior.summary`.
        predictions: the predictions [S, B, C] that the summary was made of.
        scores: log scores [S, B] of every draw, if the targets are known.
        names: names [C] of the outputs.
        label: what the predictions are, for an axis.
    """
    chains = posterior.chains
    sections = [Section("Summary", " ".join(summary.remarks), tables=(_table(summary),))]
    sections.append(_convergence(summary, predictions is not None))
    sections.append(_traces(posterior, summary, predictions, names, label))
    extra = []
    if "energy" in posterior.trace:
        text = (
            "Every new momentum changes the energy. If these changes are as wide as the energies themselves, the chain explores all "
            "energies; if they are much narrower (a BFMI below 0.3), it explores them slowly."
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
        f"agree; values up to {RHAT_GOOD} are good, and values above {RHAT_BAD} are not chance. "
    )
    text += (
        "Look at the predictions. Weights have symmetries: hidden units can be permuted and change sign, so chains may differ in their "
        "weights and agree in their predictions."
        if predictions
        else "Weights have symmetries, so R-hat may be large although all chains predict the same: give data to see predictions."
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

        def _named(i: int) -> str:
            row, column = divmod(i, predictions.shape[-1])
            return f"row {row + 1}" + (f", {names[column]}" if len(names) == predictions.shape[-1] > 1 else "")

        pictures = [
            _one(flat[:, i], chains, f"{_named(i)}: R-hat {rhat:.3f}", label) for i, rhat in _picked(summary.predictions.rhat)
        ]
        figures.append(Figure("Predictions: the one with the largest R-hat, and the median one", tuple(pictures)))
    pictures = [_weight_trace(posterior, i, rhat) for i, rhat in _picked(summary.weights.rhat)]
    figures.append(Figure("Weights: the one with the largest R-hat, and the median one", tuple(pictures)))
    text = (
        "Draws in the order in which they were made, with histograms of their values. Chains that agree lie on top of each other and "
        "do not drift."
    )
    figures[0] = replace(figures[0], legend=_legend(chains))
    return Section("Traces", text, figures=tuple(figures))


def _weight_trace(posterior: Samples, index: int, rhat: float) -> Picture:
    """The trace of one weight, given by its index among all weights."""
    leaves = iter(posterior.params.items())
    name, leaf = next(leaves)
    while index >= leaf[0].numel():
        index -= leaf[0].numel()
        name, leaf = next(leaves)
    place = ", ".join(str(int(k)) for k in torch.unravel_index(torch.tensor(index), leaf.shape[1:])) if leaf.ndim > 1 else ""
    return _one(leaf.reshape(len(leaf), -1)[:, index], posterior.chains, f"{name}[{place}]: R-hat {rhat:.3f}")


def _legend(chains: int) -> tuple[tuple[str, str], ...]:
    return tuple((colour, f"chain {i + 1}") for i, colour in enumerate(chain_colours(chains)) if 1 < chains <= MANY)


def _one(values: Tensor, chains: int, title: str, label: str = "") -> Picture:
    return trace(values.reshape(chains, -1), title=title, label=label)


def _picked(rhat: Tensor) -> list[tuple[int, float]]:
    """Indices and values of the largest and of the median R-hat."""
    order = torch.where(rhat.isnan(), -1.0, rhat).argsort(descending=True)
    known = int((~rhat.isnan()).sum())
    places = dict.fromkeys(int(order[k]) for k in ((0, known // 2) if known else (0,))[:SHOWN])
    return [(i, float(rhat[i])) for i in places]


def _scores(scores: Tensor, chains: int) -> Figure:
    each = [running_score(part) for part in scores.view(chains, -1, *scores.shape[1:])]
    legend = ((INK, "all chains together"), *_legend(chains))
    text = (
        "The mean log probability of the targets under the average of the first draws. If it still rises at the end, more draws would "
        "predict better; if chains end at different heights, they have found different solutions."
    )
    shown = running_scores(running_score(scores, chains), each, label="log score, nats")
    return Figure("Log score", (shown,), caption=text, legend=legend)
