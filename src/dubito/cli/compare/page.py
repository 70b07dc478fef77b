"""The comparison as one page: scores, pictures, images, and the command that makes each row again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dubito.cli.compare.grid import Grid, Outcome
from dubito.cli.compare.result import Result, versions
from dubito.cli.compare.scoring import SHIFTED
from dubito.cli.compare.summary import Mean, by_method, departures_caption, describe, scores, table, table_caption
from dubito.evaluation.metrics import QuantileCalibration
from dubito.evaluation.problems import Problem
from dubito.report import Column, Figure, Picture, Report, Section, Snippet, Table
from dubito.report.calibration import coverage, pit, quantiles, reliability
from dubito.report.canvas import BLUE, VERMILION
from dubito.report.comparison import Line, histograms, lines
from dubito.report.content import join_words
from dubito.report.images import Guess, strip

SHOWN = 8  # images in a strip
LEVELS = 19  # of the quantiles in a calibration curve
BINS = 20  # of a PIT histogram
ENTROPY = "predictive entropy in nats"
IMAGES = {
    "The most confident errors": "Wrong answers with the highest confidence.",
    "The most uncertain": "The highest entropy; red names are wrong.",
    "The least uncertain": "The lowest entropy.",
}

ByMethod = Mapping[str, Sequence[Result]]
Pooled = Mapping[str, Mapping[str, Tensor]]


def page(grid: Grid, outcome: Outcome, *, command: Callable[[str], str], facts: Mapping[str, str] | None = None) -> Report:
    """The report of all results so far. `command` gives the command line that makes the row of a spec again."""
    problem, results = grid.problem, _titled(grid, outcome.results)
    succeeded = by_method([result for result in results if result.error is None])
    sections = [_scores(grid, results)]
    if succeeded:
        sections += _quality(problem, pool(succeeded))
        names = list(problem.split(grid.seeds[0]).unfamiliar)
        sections += [*unfamiliar(problem, names, succeeded), *_shift(succeeded), *_images(grid, succeeded)]
    sections.append(_commands(grid, results, command))
    noun, n = "split" if problem.splits else "seed", len(grid.seeds)
    interrupted = " The run was interrupted; the same command continues it." if outcome.interrupted else ""
    return Report(
        f"Methods compared on {problem.name}",
        tuple(sections),
        summary=(
            f"{join_words([spec.title for spec in grid.specs])}, with the same network on the same data, "
            f"{f'{n} {noun}s' if n > 1 else f'one {noun}'}. A good method is accurate, calibrated, and uncertain about what it has not "
            f"seen.{interrupted}"
        ),
        facts={
            **(facts or {}),
            "Data": problem.source,
            "Versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
            "Folder": f"{grid.folder}: one JSON file per method and seed, with the predictions beside it",
        },
    )


def _titled(grid: Grid, results: Sequence[Result]) -> list[Result]:
    """The results under the titles of their rows, which say whether a row is tempered, generalized or tuned."""
    titles = {spec.label: spec.title for spec in grid.specs}
    return [replace(result, key=replace(result.key, label=titles[result.key.label])) for result in results]


def pool(succeeded: ByMethod) -> dict[str, dict[str, Tensor]]:
    """The arrays of each method, those of all seeds one after another."""
    pooled = {}
    for label, results in succeeded.items():
        names = [name for name in results[0].arrays if all(name in result.arrays for result in results)]
        pooled[label] = {name: torch.cat([result.arrays[name] for result in results]) for name in names}
    return pooled


def _scores(grid: Grid, results: Sequence[Result]) -> Section:
    problem, seeds = grid.problem, len(grid.seeds)
    main, more = scores(results, problem.kind)
    caption = " ".join([table_caption(results, seeds, splits=problem.splits is not None), departures_caption(grid.specs)]).strip()
    tables = [table(f"{problem.name}: scores", results, main, seeds=seeds, caption=caption)]
    if more:
        tables.append(table("More scores", results, more, seeds=seeds))
    failures = tuple((r.key.label, str(r.key.seed), str(r.error)) for r in results if r.error is not None)
    if failures:
        caption = "Means are over the other seeds of these methods. The same command tries the failed ones again."
        tables.append(Table("What failed", (Column("method"), Column("seed"), Column("reason")), failures, caption=caption))
    return Section(
        "Scores", " ".join([_data(grid), *_gaps(grid, results), "Click a header to sort by it."]), tables=tuple(tables)
    )


def _data(grid: Grid) -> str:
    """How many examples there are, and what a seed decides."""
    problem, seed = grid.problem, grid.seeds[0]
    split = problem.split(seed)
    rows = f"{len(split.x_train)} training and {len(split.x_test)} test examples"
    if problem.splits:
        return f"{rows}; a split is the number of a published split."
    same = torch.equal(problem.split(seed + 1).x_test, split.x_test)  # one test part for all seeds
    return f"{rows}; a seed decides the initialization and the batches{'' if same else ', and which examples are held out'}."


def _gaps(grid: Grid, results: Sequence[Result]) -> list[str]:
    """Sentences on results that are missing or were made with other versions."""
    total, now = len(grid.specs) * len(grid.seeds), versions()
    other = sum(any(result.versions.get(name) != now.get(name) for name in ("dubito", "torch")) for result in results)
    missing = f"{total - len(results)} of {total} results are still missing." if len(results) < total else ""
    old = f"{other} of the results were made with other versions of dubito or torch; the JSON below names them." if other else ""
    return [text for text in (missing, old) if text]


def calibration(pooled: Pooled, curves: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]) -> Section:
    """Reliability diagrams of class probabilities, and accuracy against coverage. `curves`: by title, then by label, (uncertainty [N],
    is wrong [N])."""
    diagrams = [replace(reliability(label, own["probs"], own["y"]), label=label) for label, own in pooled.items()]
    return Section(
        "Calibration",
        "Are predictions with a confidence of 90 % right nine times in ten?",
        figures=(
            Figure(
                "Reliability",
                tuple(diagrams),
                legend=((BLUE, "accuracy in a bin, with its 90 % interval"), (VERMILION, "gap between confidence and accuracy")),
                caption=(
                    "Dots on the dashed line are calibrated; below it the network is overconfident, above it underconfident. Bins with "
                    "fewer than five predictions are pale. The counts below are on a logarithmic scale."
                ),
            ),
            Figure(
                "Accuracy against coverage",
                tuple(coverage(title, scores) for title, scores in curves.items()),
                caption="Accuracy if the network answers only the share of inputs about which it is most confident.",
            ),
        ),
    )


def _quality(problem: Problem, pooled: Pooled) -> list[Section]:
    """Calibration and errors of class probabilities, or quantiles and PIT values of numbers."""
    if problem.kind == "classification":
        curves = {"All methods": {label: (own["doubt"], own["wrong"].bool()) for label, own in pooled.items()}}
        return [calibration(pooled, curves), _errors(pooled, len(problem.outputs))]
    levels = torch.arange(1, LEVELS + 1, dtype=torch.float64) / (LEVELS + 1)
    values = {label: own["pit"].double().flatten() for label, own in pooled.items()}
    calibrations = {
        label: QuantileCalibration(levels, (u.unsqueeze(1) <= levels).double().mean(0), len(u)) for label, u in values.items()
    }
    counts = {label: torch.histogram(u, bins=BINS, range=(0.0, 1.0)).hist for label, u in values.items()}
    quantile_figure = Figure(
        "Quantiles",
        (quantiles("All methods", calibrations),),
        caption=(
            "On the dashed line the observed share of targets equals the nominal level; deviations inside the band are chance. The "
            "numbers are mean distances from the line. Flat in the middle: intervals are too narrow. Steep there: too wide."
        ),
    )
    pit_figure = Figure(
        "The distribution function at the targets (PIT)",
        tuple(replace(pit(label, number), label=label) for label, number in counts.items()),
        caption=(
            "Flat is calibrated; deviations inside the grey band are chance. High in the middle: the predictive distributions are too "
            "wide. High at both ends: too narrow."
        ),
    )
    text = "Are nine targets in ten below the predicted 90 % quantile? All seeds together."
    return [Section("Calibration", text, figures=(quantile_figure, pit_figure))]


def _errors(pooled: Pooled, classes: int) -> Section:
    panels = {}
    for label, own in pooled.items():
        wrong = own["wrong"].bool()
        panels[label] = {"right": own["total"][~wrong], "wrong": own["total"][wrong]}
    figure = Figure(
        "Uncertainty of right and wrong answers",
        _labelled(histograms(panels, xlabel=ENTROPY, upper=math.log(classes)), list(panels)),
        legend=((BLUE, "right answers"), (VERMILION, "wrong answers")),
        caption="The less the two overlap, the better uncertainty finds errors. Errors at the left are confident ones.",
    )
    return Section("Successes and errors", "Is the network more uncertain where it is wrong?", figures=(figure,))


def unfamiliar(problem: Problem, names: Sequence[str], succeeded: ByMethod) -> list[Section]:
    """How uncertain the methods are about test inputs, and about each set of unfamiliar inputs."""
    pooled = pool(succeeded)
    figures = tuple(figure for name in names if (figure := _separation(problem, name, succeeded, pooled)) is not None)
    text = "Is the network more uncertain about inputs unlike its training data? No method was trained or tuned on these inputs."
    return [Section("The unfamiliar", text, figures=figures)] if figures else []


def _separation(problem: Problem, name: str, succeeded: ByMethod, pooled: Pooled) -> Figure | None:
    """Uncertainty of test inputs and of one set of unfamiliar inputs."""
    key = f"unfamiliar {name} total"
    labels = [label for label, own in pooled.items() if key in own]
    if not labels:
        return None
    classes, panels = problem.kind == "classification", {}
    for label in labels:
        value = Mean.of([result.scores[f"{name} auroc total"] for result in succeeded[label]]).value
        both = {"familiar": pooled[label]["total"], "unfamiliar": pooled[label][key]}
        panels[f"{label} · AUROC {value:.3f}"] = both if classes else {k: v.sqrt() for k, v in both.items()}
    top = max(float(v.max()) for own in panels.values() for v in own.values())
    upper, axis = (math.log(len(problem.outputs)), ENTROPY) if classes else (top or 1.0, "predicted standard deviation")
    return Figure(
        f"Uncertainty on {name}",
        _labelled(histograms(panels, xlabel=axis, upper=upper), labels),
        legend=((BLUE, "test inputs"), (VERMILION, f"inputs of {name}")),
        caption="The less the two overlap, the better uncertainty detects unfamiliar inputs.",
    )


def _labelled(pictures: Sequence[Picture], labels: Sequence[str]) -> tuple[Picture, ...]:
    return tuple(replace(picture, label=label) for picture, label in zip(pictures, labels, strict=True))


def _shift(succeeded: ByMethod) -> list[Section]:
    shifted = {label: own for label, every in succeeded.items() if (own := [result for result in every if result.shift])}
    if not shifted:
        return []
    first = next(iter(shifted.values()))[0].shift
    names = list(first)
    severities = sorted(map(int, first[names[0]]))
    figure = Figure(
        "Under corruption",
        tuple(_shift_picture(key, shifted, names, severities) for key in (*SHIFTED, "epistemic")),
        caption="Bands are one standard error to each side. All methods see the same corrupted images.",
    )
    return [Section("Shift", f"Scores on corrupted test images: means over {join_words(names)}.", figures=(figure,))]


def _shift_picture(key: str, shifted: ByMethod, names: Sequence[str], severities: Sequence[int]) -> Picture:
    """One score against the severity, a line for each method."""
    drawn = {}
    for label, own in shifted.items():
        means = [Mean.of([_mean_over(result, names, severity, key) for result in own]) for severity in severities]
        drawn[label] = Line(
            torch.tensor(severities, dtype=torch.float64),
            torch.tensor([mean.value for mean in means]),
            torch.tensor([mean.error for mean in means]) if len(own) > 1 else None,
        )
    name = f"{key} entropy" if key in ("aleatoric", "epistemic") else describe(key).name
    ticks = tuple(map(float, severities))
    return lines(name[0].upper() + name[1:], drawn, xlabel="severity; 0 is clean", ylabel=name, ticks=ticks)


def _mean_over(result: Result, names: Sequence[str], severity: int, key: str) -> float:
    """The mean of a score over the corruptions."""
    return sum(float(result.shift[name][str(severity)][key]) for name in names) / len(names)


def _images(grid: Grid, succeeded: ByMethod) -> list[Section]:
    problem = grid.problem
    x = problem.split(grid.seeds[0]).x_test
    if problem.kind != "classification" or x.ndim != 4 or x.shape[1] not in (1, 3):
        return []
    strips = {title: [] for title in IMAGES}
    for label, own in succeeded.items():
        for title, which in zip(IMAGES, _chosen_images(own[0]), strict=True):
            if len(which):
                strips[title].append(replace(strip(_guesses(problem, own[0], which), title=label), label=label))
    figures = tuple(Figure(title, tuple(pictures), caption=IMAGES[title]) for title, pictures in strips.items() if pictures)
    text = f"Test images of seed {grid.seeds[0]}, or of the first seed that is done."
    return [Section("Images", text, figures=figures)] if figures else []


def _chosen_images(result: Result) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the most confident errors, of the most and of the least uncertain images."""
    wrong = result.arrays["wrong"].bool().nonzero().flatten()
    worst = wrong[result.arrays["doubt"][wrong].argsort(stable=True)]
    order = result.arrays["total"].argsort(stable=True)
    return worst[:SHOWN], order.flip(0)[:SHOWN], order[:SHOWN]


def _guesses(problem: Problem, result: Result, which: Tensor) -> list[Guess]:
    """Images with the predicted and the true class."""
    images, names, y = problem.split(result.key.seed).x_test, problem.outputs, result.arrays["y"]
    confidence, predicted = result.arrays["probs"].max(-1)
    return [Guess(images[i], names[int(predicted[i])], names[int(y[i])], float(confidence[i])) for i in which.tolist()]


def _commands(grid: Grid, results: Sequence[Result], command: Callable[[str], str]) -> Section:
    """The command and the settings of every row."""
    texts = {spec.title: spec.text for spec in grid.specs}
    snippets = []
    for label, own in by_method(results).items():
        snippets.append(Snippet(label, command(texts[label]), label=label))
        snippets.append(Snippet(f"{label}: settings, versions and scores as JSON", _json(own), folded=True, label=label))
    text = (
        "Each command makes its row again with the same seeds and settings; with the same versions on the same machine the numbers are "
        "the same. Settings that are not on the command line have their defaults; the JSON lists all."
    )
    return Section("To reproduce", text, snippets=tuple(snippets))


def _json(results: Sequence[Result]) -> str:
    """Settings, versions and scores of one row; what all seeds share is listed once."""
    first = results[0]
    shared = {key: value for key, value in first.key.settings.items() if all(r.key.settings.get(key) == value for r in results)}
    same = all(result.versions == first.versions for result in results)
    seeds = [
        {
            "seed": result.key.seed,
            "cell": result.key.digest,
            **{key: value for key, value in result.key.settings.items() if key not in shared},
            **({"chosen": dict(result.choice)} if result.choice else {}),
            **({"error": result.error} if result.error else {}),
            "scores": {name: value if math.isfinite(value) else None for name, value in result.scores.items()},
            **({} if same else {"versions": dict(result.versions)}),
        }
        for result in results
    ]
    content = {"settings": shared, **({"versions": dict(first.versions)} if same else {}), "seeds": seeds}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
