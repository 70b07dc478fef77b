"""The comparison as one page: the table, the pictures, images of mistakes, and how to make each row again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dubito.cli.compare.grid import Grid, Outcome
from dubito.cli.compare.judging import SHIFTED
from dubito.cli.compare.result import Cell, versions
from dubito.cli.compare.summary import Mean, by_method, described, scores, table, words
from dubito.evaluation.metrics import QuantileCalibration
from dubito.report import Column, Figure, Picture, Report, Section, Snippet, Table
from dubito.report.calibration import coverage, reliability
from dubito.report.canvas import BLUE, VERMILION
from dubito.report.comparison import Line, lines
from dubito.report.histogram import histograms
from dubito.report.images import Guess, strip
from dubito.report.quantiles import pit, quantiles
from dubito.report.words import join_words

SHOWN = 8  # images in a strip
LEVELS = 19  # of the quantiles in a calibration curve
BINS = 20  # of a PIT histogram
ENTROPY = "predictive entropy in nats"


def page(grid: Grid, outcome: Outcome, *, command: Callable[[str], str], facts: Mapping[str, str] | None = None) -> Report:
    """The report of all cells there are. `command` is the command line that makes the row of a method's spec again."""
    problem, cells = grid.problem, outcome.cells
    done = {label: own for label, every in by_method(cells).items() if (own := [cell for cell in every if cell.error is None])}
    pooled = {label: _pooled(own) for label, own in done.items()}
    classes = problem.kind == "classification"
    sections = [_scores(grid, outcome)]
    if pooled:
        sections += [_calibration(pooled, classes=classes)]
        sections += [_success(pooled, len(problem.outputs))] if classes else []
        sections += _unfamiliar(grid, done, pooled)
        sections += _shift(done)
        sections += _images(grid, done)
    sections.append(_again(grid, outcome, command))
    of = (
        f"{len(grid.seeds)} {'splits' if problem.splits else 'seeds'}"
        if len(grid.seeds) > 1
        else f"one {'split' if problem.splits else 'seed'}"
    )
    return Report(
        f"Methods compared on {problem.name}",
        tuple(sections),
        summary=(
            f"{join_words([entry.label for entry in grid.entries])}, with the same network on the same data, {of}. A good method is "
            "right, knows how often it is right, and doubts what it has not seen."
            + (
                " The run was interrupted: this is what was done by then, and the same command goes on."
                if outcome.interrupted
                else ""
            )
        ),
        facts={
            **(facts or {}),
            "Data": problem.source,
            "Versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
            "Folder": f"{grid.folder}: one JSON file a cell, with its predictions beside it",
        },
    )


def _pooled(cells: Sequence[Cell]) -> dict[str, Tensor]:
    """The arrays of all seeds, one after another."""
    names = [name for name in cells[0].arrays if all(name in cell.arrays for cell in cells)]
    return {name: torch.cat([cell.arrays[name] for cell in cells]) for name in names}


def _scores(grid: Grid, outcome: Outcome) -> Section:
    problem, cells, seeds, now = grid.problem, outcome.cells, len(grid.seeds), versions()
    main, more = scores(cells, problem.kind)
    part = problem.part(grid.seeds[0])
    rows = f"{len(part.x_train)} examples to train on and {len(part.x_test)} to test on"
    seed = grid.seeds[0]
    one = problem.splits is not None or torch.equal(problem.part(seed + 1).x_test, part.x_test)  # one test part for all seeds
    how = "a seed decides the start and the course of a training" + ("" if one else ", and which examples are held out")
    how = "a split is the number of a published one" if problem.splits else how
    tables = [
        table(f"{problem.name}: scores", cells, main, seeds=seeds, caption=words(cells, seeds, splits=problem.splits is not None))
    ]
    if more:
        tables.append(table("More scores", cells, more, seeds=seeds))
    failed = [cell for cell in cells if cell.error is not None]
    if failed:
        reasons = tuple((cell.key.label, str(cell.key.seed), str(cell.error)) for cell in failed)
        caption = "The other cells of these methods count without them. The same command tries them again."
        tables.append(Table("What failed", (Column("method"), Column("seed"), Column("reason")), reasons, caption=caption))
    missing = len(grid.entries) * seeds - len(cells)
    other = sum(any(cell.versions.get(name) != now.get(name) for name in ("dubito", "torch")) for cell in cells)
    old = (
        f" {other} of the cells were made with other versions of dubito or torch than are here now: the JSON below has them."
        if other
        else ""
    )
    left = f" {missing} of {len(grid.entries) * seeds} cells are still missing." if missing else ""
    return Section("Scores", f"{rows}; {how}.{left}{old} Click on a header to sort by it.", tables=tuple(tables))


def _calibration(pooled: Mapping[str, Mapping[str, Tensor]], *, classes: bool) -> Section:
    if classes:
        diagrams = [replace(reliability(label, own["probs"], own["y"]), label=label) for label, own in pooled.items()]
        curves = coverage("All methods", {label: (own["doubt"], own["wrong"].bool()) for label, own in pooled.items()})
        return Section(
            "Calibration",
            "Are predictions of 90 % right nine times in ten, and is the network sure where it is right? All seeds together.",
            figures=(
                Figure(
                    "Reliability",
                    tuple(diagrams),
                    legend=(
                        (BLUE, "accuracy in a bin, with its 90 % interval"),
                        (VERMILION, "gap between confidence and accuracy"),
                    ),
                    caption=(
                        "Dots on the dashed line are calibrated; below it the network is too sure of itself, above it too modest. Bins "
                        "with fewer than five predictions are pale. The counts below are on a logarithmic scale."
                    ),
                ),
                Figure(
                    "Accuracy against coverage",
                    (curves,),
                    caption="How often the network is right if it answers only the share of inputs of which it is most sure.",
                ),
            ),
        )
    at = torch.arange(1, LEVELS + 1, dtype=torch.float64) / (LEVELS + 1)
    values = {label: own["pit"].double().flatten() for label, own in pooled.items()}
    found = {label: QuantileCalibration(at, (u.unsqueeze(1) <= at).double().mean(0), len(u)) for label, u in values.items()}
    counts = {label: torch.histogram(u, bins=BINS, range=(0.0, 1.0)).hist for label, u in values.items()}
    return Section(
        "Calibration",
        "Is the target below the predicted 90 % quantile nine times in ten? All seeds together.",
        figures=(
            Figure(
                "Quantiles",
                (quantiles("All methods", found),),
                caption=(
                    "On the dashed line quantiles hold what they promise, and in the band they do but for chance; the numbers are mean "
                    "distances from the line. An S that is flat in the middle: too narrow. One that is steep there: too wide."
                ),
            ),
            Figure(
                "The distribution function at the targets (PIT)",
                tuple(replace(pit(label, number), label=label) for label, number in counts.items()),
                caption=(
                    "Flat is calibrated, and bars inside the grey band are flat but for chance. High in the middle: the predictives "
                    "are too wide. High at both ends: too narrow."
                ),
            ),
        ),
    )


def _labelled(pictures: Sequence[Picture], labels: Sequence[str]) -> tuple[Picture, ...]:
    return tuple(replace(picture, label=label) for picture, label in zip(pictures, labels, strict=True))


def _success(pooled: Mapping[str, Mapping[str, Tensor]], classes: int) -> Section:
    panels = {}
    for label, own in pooled.items():
        wrong = own["wrong"].bool()
        panels[label] = {"right": own["total"][~wrong], "wrong": own["total"][wrong]}
    return Section(
        "Successes and errors",
        "Does the network doubt where it errs?",
        figures=(
            Figure(
                "Uncertainty of right and wrong answers",
                _labelled(histograms(panels, xlabel=ENTROPY, upper=math.log(classes)), list(panels)),
                legend=((BLUE, "right answers"), (VERMILION, "wrong answers")),
                caption="The less the two overlap, the better errors are found. Errors at the left are those the network is sure of.",
            ),
        ),
    )


def _unfamiliar(grid: Grid, done: Mapping[str, Sequence[Cell]], pooled: Mapping[str, Mapping[str, Tensor]]) -> list[Section]:
    names = list(grid.problem.part(grid.seeds[0]).unfamiliar)
    figures = []
    for name in names:
        key = f"unfamiliar {name} total"
        panels, labels = {}, [label for label, own in pooled.items() if key in own]
        classes = grid.problem.kind == "classification"
        for label in labels:
            value = Mean.of([cell.scores[f"{name} auroc total"] for cell in done[label]]).value
            both = {"familiar": pooled[label]["total"], "unfamiliar": pooled[label][key]}
            panels[f"{label} · AUROC {value:.3f}"] = both if classes else {k: v.sqrt() for k, v in both.items()}
        if not panels:
            continue
        top = max(float(v.max()) for own in panels.values() for v in own.values())
        upper, axis = (math.log(len(grid.problem.outputs)), ENTROPY) if classes else (top or 1.0, "predicted standard deviation")
        figures.append(
            Figure(
                f"Told from {name}",
                _labelled(histograms(panels, xlabel=axis, upper=upper), labels),
                legend=((BLUE, "test inputs"), (VERMILION, f"inputs of {name}")),
                caption="The less the two overlap, the better the unfamiliar is told from the familiar.",
            )
        )
    text = "Is the network less sure of what it has never seen? No method was shown these inputs, and nothing was chosen on them."
    return [Section("The unfamiliar", text, figures=tuple(figures))] if figures else []


def _shift(done: Mapping[str, Sequence[Cell]]) -> list[Section]:
    shifted = {label: [cell for cell in own if cell.shift] for label, own in done.items()}
    shifted = {label: own for label, own in shifted.items() if own}
    if not shifted:
        return []
    names = list(next(iter(shifted.values()))[0].shift)
    severities = sorted(map(int, next(iter(shifted.values()))[0].shift[names[0]]))
    keys = (*SHIFTED, "epistemic")

    def panel(key: str) -> Picture:
        drawn = {}
        for label, own in shifted.items():
            means = [Mean.of([_over(cell, names, severity, key) for cell in own]) for severity in severities]
            drawn[label] = Line(
                torch.tensor(severities, dtype=torch.float64),
                torch.tensor([mean.value for mean in means]),
                torch.tensor([mean.error for mean in means]) if len(own) > 1 else None,
            )
        name = f"{key} entropy" if key in ("aleatoric", "epistemic") else described(key).name
        title = name[0].upper() + name[1:]
        return lines(title, drawn, xlabel="severity; 0 is clean", ylabel=name, ticks=tuple(map(float, severities)))

    return [
        Section(
            "Shift",
            f"What becomes of the scores when the test images are corrupted: means over {join_words(names)}.",
            figures=(
                Figure(
                    "Under corruption",
                    tuple(panel(key) for key in keys),
                    caption="Bands are a standard error to each side. All methods see the same corrupted images.",
                ),
            ),
        )
    ]


def _over(cell: Cell, names: Sequence[str], severity: int, key: str) -> float:
    return sum(float(cell.shift[name][str(severity)][key]) for name in names) / len(names)


def _images(grid: Grid, done: Mapping[str, Sequence[Cell]]) -> list[Section]:
    problem = grid.problem
    x = problem.part(grid.seeds[0]).x_test
    if problem.kind != "classification" or x.ndim != 4 or x.shape[1] not in (1, 3):
        return []
    names, figures = problem.outputs, {"worst": [], "least": [], "most": []}
    for label, own in done.items():
        cell = own[0]
        images, found = problem.part(cell.key.seed).x_test, cell.arrays
        probs, y, wrong = found["probs"], found["y"], found["wrong"].bool()
        confidence, said = probs.max(-1)

        def guesses(
            which: Tensor, images: Tensor = images, said: Tensor = said, y: Tensor = y, confidence: Tensor = confidence
        ) -> list[Guess]:
            return [Guess(images[i], names[int(said[i])], names[int(y[i])], float(confidence[i])) for i in which.tolist()]

        mistakes = wrong.nonzero().flatten()
        worst = mistakes[found["doubt"][mistakes].argsort(stable=True)][:SHOWN]
        order = found["total"].argsort(stable=True)
        for key, which in (("worst", worst), ("least", order.flip(0)[:SHOWN]), ("most", order[:SHOWN])):
            if len(which):
                figures[key].append(replace(strip(guesses(which), title=label), label=label))
    about = {
        "worst": ("The worst mistakes", "Wrong answers of which the network was surest, with its confidence."),
        "least": ("The least certain", "The highest entropy; red names are wrong."),
        "most": ("The most certain", "The lowest entropy."),
    }
    shown = tuple(Figure(title, tuple(figures[key]), caption=caption) for key, (title, caption) in about.items() if figures[key])
    return (
        [Section("Images", f"Test images of seed {grid.seeds[0]}, or of the first that is done.", figures=shown)] if shown else []
    )


def _again(grid: Grid, outcome: Outcome, command: Callable[[str], str]) -> Section:
    """The commands and the settings of every row."""
    rows, specs = by_method(outcome.cells), {entry.label: entry.spec for entry in grid.entries}
    snippets = []
    for label, cells in rows.items():
        snippets.append(Snippet(label, command(specs[label]), label=label))
        snippets.append(Snippet(f"{label}: settings, versions and scores as JSON", _json(cells), folded=True, label=label))
    text = (
        "Each command makes its row again, with the same seeds and settings, and with the same versions and machine the same numbers. "
        "Settings that are not on the command line are the defaults; the JSON has them all."
    )
    return Section("To reproduce", text, snippets=tuple(snippets))


def _json(cells: Sequence[Cell]) -> str:
    first = cells[0]
    shared = {key: value for key, value in first.key.settings.items() if all(c.key.settings.get(key) == value for c in cells)}
    seeds: list[dict[str, Any]] = []
    for cell in cells:
        own = {key: value for key, value in cell.key.settings.items() if key not in shared}
        told = {name: value if math.isfinite(value) else None for name, value in cell.scores.items()}
        more = {**({"chosen": dict(cell.choice)} if cell.choice else {}), **({"error": cell.error} if cell.error else {})}
        seeds.append(
            {"seed": cell.key.seed, "cell": cell.key.digest, **own, **more, "scores": told, "versions": dict(cell.versions)}
        )
    same = all(cell.versions == first.versions for cell in cells)
    if same:
        for seed in seeds:
            del seed["versions"]
    content = {"settings": shared, **({"versions": dict(first.versions)} if same else {}), "seeds": seeds}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
