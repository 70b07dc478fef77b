"""The report on the chains of a sampler: verdict, table, and pictures of traces, R-hat, energies and running scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dubito.posteriors import Samples
from dubito.posteriors.diagnostics import Summary
from dubito.posteriors.diagnostics.chains import RHAT_BAD, RHAT_GOOD
from dubito.posteriors.diagnostics.predictions import running_score
from dubito.report.canvas import BLUE, CYCLE, INK, ORANGE, SOFT, VERMILION, Drawing, grid, picture
from dubito.report.content import Column, Figure, Picture, Section, Table
from dubito.report.report import Report

POINTS = 500  # points of a line, at most
MANY = 8  # largest number of chains that get a colour each


def trace(values: Tensor, *, title: str = "", label: str = "") -> Picture:
    """The draws of one quantity [chains, n] in their order, and a histogram of their values."""
    values = values.detach().double().cpu()
    n = values.shape[1]
    at = np.unique(np.linspace(0, n - 1, min(n, POINTS)).round().astype(int))
    colours = chain_colours(len(values))
    finite = values[values.isfinite()]
    edges = np.histogram_bin_edges(finite.numpy(), bins=16) if len(finite) else None

    def _draw(figure: Drawing) -> None:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
        for chain, colour in zip(values, colours, strict=True):
            line = {"color": colour, "linewidth": 0.8, "alpha": 0.8}
            left.plot(at + 1, chain[at], rasterized=True, **line)
            if edges is not None:
                height, _ = np.histogram(chain[chain.isfinite()].numpy(), edges)
                right.stairs(height, edges, orientation="horizontal", color=colour, linewidth=1.1)
        left.set(title=title, xlabel="draw", ylabel=label, xlim=(1, max(2, n)))
        right.set(xticks=[])
        right.spines["bottom"].set_visible(False)
        right.tick_params(left=False)
        grid(left, "y")

    means = ", ".join(f"{float(mean):.4g}" for mean in values.mean(1)[:MANY])
    return picture(_draw, (4.6, 2.1), alt=f"{title or label}: trace of {len(values)} chains of {n} draws; means {means}.")


def chain_colours(chains: int) -> tuple[str, ...]:
    """A colour for each chain, or one for all if there are too many."""
    return tuple(CYCLE[i % len(CYCLE)] for i in range(chains)) if chains <= MANY else (BLUE,) * chains


def rhats(values: Tensor, *, title: str, good: float) -> Picture:
    """A histogram of R-hat, with counts on a logarithmic scale, so that a single bad one is visible."""
    known = values[~values.isnan()].double().cpu()
    finite = known[known.isfinite()]
    low = min(0.999, float(finite.min())) if len(finite) else 0.999
    high = max(1.02, float(finite.max())) if len(finite) else 1.02
    high = 2 * high if len(finite) < len(known) else high
    wide = high > 1.5
    # bins of equal width, one of whose edges is the limit of good values
    step = math.log(high / low) / 40 if wide else (high - low) / 40
    way = [math.log(end / good) if wide else end - good for end in (low, high)]
    at = step * np.arange(math.floor(way[0] / step), math.floor(way[1] / step) + 2)
    edges = good * np.exp(at) if wide else good + at
    count, _ = np.histogram(known.clamp(max=high).numpy(), edges)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        fine = 0.5 * (edges[1:] + edges[:-1]) <= good
        for part, colour in ((fine, BLUE), (~fine, VERMILION)):
            look = {"align": "edge", "color": colour, "edgecolor": "white", "linewidth": 0.4}
            axes.bar(edges[:-1][part], count[part], np.diff(edges)[part], **look)
        axes.axvline(good, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        if count.any():
            axes.set_yscale("log")
        if wide:
            axes.set_xscale("log")
            ticks = [t for t in (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000, 10000) if low <= t <= high]
            axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axes.minorticks_off()
        top = max(1, math.ceil(math.log10(max(1, count.max()) * 1.2)))
        ticks = [10**k for k in range(top + 1)]
        axes.set_yticks(ticks, [f"{t:,}" for t in ticks])
        axes.set_yticks([], minor=True)
        axes.set(title=title, xlabel="R-hat", ylabel="number", ylim=(0.7, 10**top), xlim=(edges[0], edges[-1]))
        grid(axes, "y")

    share = float((known <= good).double().mean()) if len(known) else math.nan
    worst = float(known.max()) if len(known) else math.nan
    alt = f"Histogram of R-hat, {title}: {100 * share:.0f} % of {len(known)} are at most {good}, the largest is {worst:.3g}."
    return picture(_draw, (4.6, 2.8), alt=alt)


def energies(energy: Tensor) -> Picture:
    """The energies [chains, n] around their mean, and their changes from draw to draw: equally wide if the chain mixes well."""
    energy = energy.detach().double().cpu()
    around = (energy - energy.mean(1, keepdim=True)).flatten()
    change = energy.diff(dim=1).flatten()
    parts = [(around[around.isfinite()], BLUE, "energies"), (change[change.isfinite()], ORANGE, "changes from draw to draw")]
    half = max([float(part.abs().quantile(0.999)) for part, _, _ in parts if len(part)] or [1.0]) or 1.0
    edges = np.linspace(-half, half, 41)

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        for part, colour, name in parts:
            height, _ = np.histogram(part.clamp(-half, half).numpy(), edges, density=len(part) > 0)
            axes.stairs(height, edges, fill=True, color=colour, alpha=0.3, linewidth=0)
            axes.stairs(height, edges, color=colour, linewidth=1.5, label=name)
        axes.set(xlabel="energy, less the mean of its chain", ylabel="density", yticks=[], xlim=(-half, half))
        axes.legend(loc="upper left", fontsize=8.5)
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])

    widths = ", ".join(f"{name} {float(part.std()):.3g}" for part, _, name in parts if len(part) > 1)
    return picture(_draw, (4.6, 2.8), alt=f"Distributions of energy; standard deviations: {widths}.")


def running_scores(together: Tensor, each: Sequence[Tensor], *, label: str) -> Picture:
    """The log score of the first k draws of all chains together [n], and of each chain alone."""
    n = len(together)
    at = np.unique(np.geomspace(1, n, min(n, POINTS)).round().astype(int)) - 1
    colours = chain_colours(len(each))

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()
        if len(each) > 1:
            for line, colour in zip(each, colours, strict=True):
                axes.plot(at + 1, line.cpu()[at], color=colour, linewidth=0.9, alpha=0.75)
        axes.plot(at + 1, together.cpu()[at], color=INK, linewidth=2)
        axes.set(xlabel="draws of each chain", ylabel=label)
        # the first draws would compress the scale
        lines = torch.stack([together, *each]).cpu()[:, n // 10 :]
        low, high = float(lines.min()), float(lines.max())
        margin = 0.08 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(1, max(2, n))
        if n > 20:
            axes.set_xscale("log")
            ticks = [t * 10**k for k in range(6) for t in (1, 2, 5) if t * 10**k <= n]
            axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
            axes.minorticks_off()
        grid(axes)

    alt = f"Log score against the number of draws: {float(together[0]):.4g} to {float(together[-1]):.4g}."
    return picture(_draw, (4.6, 2.8), alt=alt)


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
    rows = tuple((f"– {name.strip()}" if name.startswith(" ") else name.strip(), *values) for name, *values in summary.rows)
    return Table("", (Column("quantity"), Column("found"), Column("good")), rows)


def _convergence(summary: Summary, predictions: bool) -> Section:
    spreads = {"predictions": summary.predictions, "weights": summary.weights}
    known = {name: spread for name, spread in spreads.items() if spread is not None}
    pictures = tuple(rhats(spread.rhat, title=f"{len(spread):,} {name}", good=RHAT_GOOD) for name, spread in known.items())
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

        picked = [(flat[:, i], f"{_named(i)}: R-hat {rhat:.3f}") for i, rhat in _picked(summary.predictions.rhat)]
        pictures = tuple(trace(values.reshape(chains, -1), title=title, label=label) for values, title in picked)
        figures.append(Figure("Predictions: the one with the largest R-hat, and the median one", pictures))
    pictures = tuple(_weight_trace(posterior, i, rhat) for i, rhat in _picked(summary.weights.rhat))
    figures.append(Figure("Weights: the one with the largest R-hat, and the median one", pictures))
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
    values = leaf.reshape(len(leaf), -1)[:, index].reshape(posterior.chains, -1)
    return trace(values, title=f"{name}[{place}]: R-hat {rhat:.3f}")


def _legend(chains: int) -> tuple[tuple[str, str], ...]:
    return tuple((colour, f"chain {i + 1}") for i, colour in enumerate(chain_colours(chains)) if 1 < chains <= MANY)


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
