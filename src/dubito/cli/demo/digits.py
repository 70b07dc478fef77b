"""Handwritten digits, two classes of which are left out of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dubito.cli.compare.grid import Fits, versions
from dubito.cli.compare.page import calibration, pool, unfamiliar
from dubito.cli.compare.result import Key, Result
from dubito.cli.compare.scoring import evaluate
from dubito.cli.compare.spec import parse_spec
from dubito.cli.compare.summary import by_method, departures_caption, scores, table
from dubito.cli.process import one_thread
from dubito.evaluation import data, measures
from dubito.evaluation.problems import DIGITS, Problem, Split, perceptron
from dubito.inference.presets import suiting
from dubito.inference.registry import METHODS
from dubito.model.likelihoods import Categorical
from dubito.posteriors.predictive import LatentMixture
from dubito.report import Figure, Picture, Section, Table
from dubito.report.canvas import BLUE, VERMILION
from dubito.report.images import card, scatter

FAMILIAR = 8  # classes in training; 8 and 9 are unfamiliar
STRANGE = "8 and 9"
SHOWN = "mc_dropout"  # the method of the images: it has any number of draws


class Outcome(NamedTuple):
    """The results of all methods, and the predictives of `SHOWN` (or of the first method) for known and for unknown test images."""

    results: tuple[Result, ...]
    label: str
    known: LatentMixture
    unknown: LatentMixture


def problem(*, seed: int = 0, effort: float = 1.0) -> Problem:
    """A quarter of the digits for training, since uncertainty matters with few data; all of the unknown classes for testing.

    >>> split = problem().split(0)
    >>> len(split.x_train), len(split.x_test), len(split.unfamiliar["8 and 9"]), int(split.y_train.max())
    (361, 1082, 354, 7)
    """
    whole = data.digits(seed=seed, test=0.75)
    seen, known = whole.y_train < FAMILIAR, whole.y_test < FAMILIAR
    strange = {STRANGE: torch.cat([whole.x_train[~seen], whole.x_test[~known]])}
    split = Split(whole.x_train[seen], whole.y_train[seen], whole.x_test[known], whole.y_test[known], None, None, strange)
    training = DIGITS._replace(epochs=max(1, round(effort * DIGITS.epochs)), members=10)
    names = tuple(str(c) for c in range(FAMILIAR))
    return Problem("digits 0 to 7", "classification", lambda _: split, training, perceptron((128, 128)), names)


@one_thread()
def run(*, seed: int = 0, effort: float = 1.0, say: Callable[[str], object] = str) -> tuple[Problem, Outcome]:
    """Fit every method that supports classification, and score it on both kinds of test images."""
    given = problem(seed=seed, effort=effort)
    split, fits, results, shown = given.split(seed), Fits(given, seed), [], {}
    fits(parse_spec("map,epochs=1", given), split)  # torch loads parts of itself at the first step; no method should pay for that
    for name in suiting(METHODS, Categorical):
        spec = parse_spec(name, given)
        posterior, _, seconds, *_ = fits(spec, split)
        evaluation = evaluate(posterior, given, split, seed=seed)
        results.append(
            Result(
                Key(spec.title, seed, spec.settings), evaluation.scores, seconds, arrays=evaluation.arrays, versions=versions()
            )
        )
        shown[name] = (spec.title, posterior)
        say(f"digits: {spec.title}, {seconds:.1f} s")
    label, posterior = shown.get(SHOWN) or next(iter(shown.values()))
    images = (posterior.predict(x) for x in (split.x_test, split.unfamiliar[STRANGE]))
    return given, Outcome(tuple(results), label, *images)


def sections(given: Problem, outcome: Outcome) -> tuple[Section, ...]:
    """The sections of the report on digits."""
    split, succeeded = given.split(0), by_method(outcome.results)
    pooled, strange = pool(succeeded), torch.ones(len(split.unfamiliar[STRANGE]), dtype=torch.bool)
    known = {label: (own["total"], own["wrong"].bool()) for label, own in pooled.items()}
    both = {
        label: (torch.cat([doubt, pooled[label][f"unfamiliar {STRANGE} total"]]), torch.cat([wrong, strange]))
        for label, (doubt, wrong) in known.items()
    }
    return (
        Section(
            "Scores",
            f"{len(split.x_train)} training images and {len(split.x_test)} test images of the digits 0 to {FAMILIAR - 1}, and "
            f"{len(strange)} unfamiliar images of {STRANGE}, which are in no training set.",
            tables=(_table(given, outcome.results),),
        ),
        # every answer to an unfamiliar digit is wrong, so a curve of the second panel stays high if those are rejected first
        calibration(pooled, {"Known digits only": known, "Known and unfamiliar digits": both}),
        *unfamiliar(given, [STRANGE], succeeded),
        Section(
            "Images",
            "The most and the least uncertain images, and the predictions of single draws.",
            figures=_images(split, outcome),
        ),
    )


def _table(given: Problem, results: Sequence[Result]) -> Table:
    main, _ = scores(results, given.kind)
    counts = {result.key.label: int(result.arrays["wrong"].sum()) for result in results}
    n = len(results[0].arrays["wrong"])
    rate = max(1, sum(counts.values())) / (len(counts) * n)
    departures = departures_caption([parse_spec(name, given) for name in suiting(METHODS, Categorical)])
    wrong = ", ".join(f"{label}: {count}" for label, count in counts.items())
    caption = (
        f"Marked: the best of each column. Wrong answers: {wrong}. One run: the standard error of an accuracy is about "
        f"{math.sqrt(rate * (1 - rate) / n):.3f}, and small differences are chance. AUROC: 0.5 is chance, 1 is perfect; errors are "
        "ranked by 1 - the largest probability, unfamiliar images by entropy. Laplace covers the last layer: with few images, the data "
        f"determine few of the other weights. {departures}"
    )
    return replace(table("Handwritten digits", results, main, seeds=1, caption=caption.strip()), sortable=False)


def _images(split: Split, o: Outcome) -> tuple[Figure, ...]:
    n = len(split.x_test)
    images = torch.cat([split.x_test, split.unfamiliar[STRANGE]])[:, 0]
    f, probs = torch.cat([o.known.means, o.unknown.means], 1), torch.cat([o.known.probs, o.unknown.probs], 1)  # [S, N, C]
    means = torch.cat([o.known.mean, o.unknown.mean])
    entropy = torch.cat([measures.predictive_entropy(p) for p in (o.known, o.unknown)])
    order, labels = entropy.argsort(stable=True).tolist(), split.y_test.tolist()
    names = [*(f"a {label}" for label in labels), *["an unfamiliar digit"] * (len(images) - n)]

    def _cards(which: Sequence[int]) -> tuple[Picture, ...]:
        drawn = [(i, f"entropy {entropy[i]:.2f}", labels[i] if i < n else -1) for i in which]
        return tuple(
            card(images[i], means[i], probs[:, i], title=names[i], subtitle=text, truth=truth) for i, text, truth in drawn
        )

    def _cloud(i: int, title: str) -> Picture:
        return scatter(images[i], f[:, i], probs[:, i], title=title, subtitle=f"{names[i]}: entropy {entropy[i]:.2f}")

    clouds = {
        "A clear image": int(entropy[:n].argmin()),
        "An ambiguous image": int(entropy[:n].argmax()),
        "An unfamiliar image": n + int(measures.mutual_information(o.unknown).argmax()),
    }
    return (
        Figure(
            f"The least certain images, by {o.label}",
            _cards(order[:-7:-1]),
            legend=((BLUE, "probability of a class"), (VERMILION, "of the true class, if it is known")),
            caption="The images of highest entropy among all test images. Thin lines reach from 10 to 90 % of the draws.",
        ),
        Figure(
            f"The most certain images, by {o.label}",
            _cards(order[:6]),
            caption="The images of lowest entropy. All draws agree, so the lines are too short to be seen.",
        ),
        Figure(
            f"What {len(probs)} draws say, by {o.label}",
            tuple(_cloud(i, title) for title, i in clouds.items()),
            legend=((BLUE, "softmax inputs, a dot for each draw and class"), (VERMILION, "softmax outputs")),
            caption=(
                "The inputs scatter for every image; what counts is whether the clouds overlap. Where one class is above all others in "
                "every draw, the outputs agree. Where clouds overlap, one draw is confident of one class and the next of another. A "
                "single network would show one dot per column, and none of this disagreement."
            ),
        ),
    )
