"""Handwritten digits, two classes of which are left out of the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dubito.cli.demo.fits import Fits, Perceptron
from dubito.cli.threads import one_thread
from dubito.evaluation import data, measures
from dubito.evaluation.judge import rank, score, separation
from dubito.evaluation.problems import DIGITS
from dubito.inference.fit import fit
from dubito.inference.methods import MAP
from dubito.inference.presets import suiting
from dubito.inference.registry import METHODS
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.report import Column, Figure, Picture, Section, Table
from dubito.report.calibration import coverage, reliability
from dubito.report.canvas import BLUE, VERMILION
from dubito.report.comparison import histograms
from dubito.report.content import join_words
from dubito.report.images import card, scatter

TRAINING = DIGITS._replace(members=10)
FAMILIAR = 8  # classes in training; 8 and 9 are unfamiliar
SHOWN = "mc_dropout"  # the method of the images: it has any number of draws
COLUMNS = (
    Column("method"),
    Column("accuracy", better="higher", meaning="share of the test images of known classes that are classified correctly"),
    Column("NLL", better="lower", meaning="mean negative log probability of the true class"),
    Column("ECE", better="lower", meaning="mean gap between confidence and accuracy"),
    Column("AUROC errors", better="higher", meaning="how well 1 - the largest probability detects errors"),
    Column("AUROC unfamiliar", better="higher", meaning="how well the entropy detects the classes left out of the training"),
    Column("seconds", digits=1, better="lower", meaning="time to fit, including the training of the network it starts from"),
)


class Problem(NamedTuple):
    """Training images and labels, and test images of known and of unknown classes."""

    x: Tensor
    y: Tensor
    x_known: Tensor
    y_known: Tensor
    x_unknown: Tensor
    y_unknown: Tensor

    @property
    def classes(self) -> list[str]:
        """Names of the known classes."""
        return [str(c) for c in range(FAMILIAR)]

    @property
    def unfamiliar(self) -> str:
        """Names of the unknown classes, in words."""
        return join_words([str(c) for c in self.y_unknown.unique().tolist()])


class Outcome(NamedTuple):
    """The predictions of a method for the test images."""

    label: str
    known: Predictive
    unknown: Predictive
    seconds: float

    def both(self, measure: Callable[[Predictive], Tensor]) -> Tensor:
        """A measure of all test images, the known ones first."""
        return torch.cat([measure(self.known), measure(self.unknown)])

    def wrong(self, y: Tensor) -> Tensor:
        """Which known test images are classified wrongly, [N]."""
        return self.known.mean.argmax(-1) != y


def problem(*, seed: int = 0) -> Problem:
    """A quarter of the digits for training, since uncertainty matters with few data; all of the unknown classes for testing.

    >>> p = problem()
    >>> len(p.x), len(p.x_known), len(p.x_unknown), int(p.y.max()), int(p.y_unknown.min())
    (361, 1082, 354, 7, 8)
    """
    split = data.digits(seed=seed, test=0.75)
    seen, known = split.y_train < FAMILIAR, split.y_test < FAMILIAR
    return Problem(
        split.x_train[seen],
        split.y_train[seen],
        split.x_test[known],
        split.y_test[known],
        torch.cat([split.x_train[~seen], split.x_test[~known]]),
        torch.cat([split.y_train[~seen], split.y_test[~known]]),
    )


@one_thread()
def run(*, seed: int = 0, effort: float = 1.0, say: Callable[[str], object] = str) -> tuple[Problem, dict[str, Outcome]]:
    """Fit every method that supports classification, and predict both kinds of test images."""
    given, outcomes = problem(seed=seed), {}
    network = Perceptron((64, 128, FAMILIAR), nn.ReLU, nn.Flatten(), seed=seed)
    model = Model(network, Categorical(), TRAINING.prior)
    fit(
        model, MAP(epochs=1), (given.x[:64], given.y[:64])
    )  # torch loads parts of itself at the first step; no method should pay for that
    fits = Fits(model, (given.x, given.y), TRAINING, seed=seed, effort=effort)
    for name in suiting(METHODS, Categorical):
        label, (posterior, seconds) = fits.label(name), fits(name)
        outcomes[name] = Outcome(label, posterior.predict(given.x_known), posterior.predict(given.x_unknown), seconds)
        say(f"digits: {label}, {seconds:.1f} s")
    return given, outcomes


def scores(outcome: Outcome, y: Tensor) -> dict[str, float]:
    """What the table shows of a method; y are the labels of the known images."""
    known = outcome.known
    found = score(known, y, ("accuracy", "nll", "ece"))
    entropies = measures.predictive_entropy(known), measures.predictive_entropy(outcome.unknown)
    return {
        "accuracy": found["accuracy"],
        "NLL": found["nll"],
        "ECE": found["ece"],
        "AUROC errors": rank(measures.one_minus_max(known), outcome.wrong(y))["auroc"],
        "AUROC unfamiliar": separation(*entropies)["auroc"],
        "seconds": outcome.seconds,
    }


def sections(given: Problem, outcomes: Mapping[str, Outcome]) -> tuple[Section, ...]:
    """The sections of the report on digits."""
    every = list(outcomes.values())
    return (
        Section(
            "Scores",
            f"{len(given.x)} training images and {len(given.x_known)} test images of the digits 0 to {FAMILIAR - 1}, and "
            f"{len(given.x_unknown)} unfamiliar images of {given.unfamiliar}, which are in no training set.",
            tables=(_table(given, every),),
        ),
        Section(
            "Calibration",
            "Are predictions with a confidence of 90 % right nine times in ten?",
            figures=_calibration(given, every),
        ),
        Section(
            "The unfamiliar",
            "Is the network more uncertain about classes that it has never seen?",
            figures=(_unfamiliar(given, every),),
        ),
        Section(
            "Images",
            "The most and the least uncertain images, and the predictions of single draws.",
            figures=_images(given, outcomes.get(SHOWN) or every[0]),
        ),
    )


def _table(given: Problem, outcomes: Sequence[Outcome]) -> Table:
    y, rows = given.y_known, []
    for outcome in outcomes:
        found = scores(outcome, y)
        rows.append((outcome.label, *(found[column.name] for column in COLUMNS[1:])))
    counts = [(outcome.label, int(outcome.wrong(y).sum())) for outcome in outcomes]
    rate = max(1, sum(count for _, count in counts)) / (len(counts) * len(y))
    caption = (
        f"Marked: the best of each column. Wrong answers: {', '.join(f'{label}: {count}' for label, count in counts)}. One run: "
        f"the standard error of an accuracy is about {math.sqrt(rate * (1 - rate) / len(y)):.3f}, and small differences are chance. "
        "AUROC: 0.5 is chance, 1 is perfect; errors are ranked by 1 - the largest probability, unfamiliar images by entropy. "
        f"Generalized: Laplace has damping = {TRAINING.damping:g}, so it is not the posterior of Bayes' rule."
    )
    return Table("Handwritten digits", COLUMNS, tuple(rows), caption=caption)


def _calibration(given: Problem, outcomes: Sequence[Outcome]) -> tuple[Figure, ...]:
    y, strange = given.y_known, torch.ones(len(given.x_unknown), dtype=torch.bool)
    known = {o.label: (measures.one_minus_max(o.known), o.wrong(y)) for o in outcomes}
    both = {o.label: (o.both(measures.one_minus_max), torch.cat([o.wrong(y), strange])) for o in outcomes}
    return (
        Figure(
            "Reliability",
            tuple(reliability(o.label, o.known.mean, y) for o in outcomes),
            legend=((BLUE, "accuracy in a bin, with its 90 % interval"), (VERMILION, "gap between confidence and accuracy")),
            caption=(
                "Dots on the dashed line are calibrated; below it the network is overconfident, above it underconfident. Bins with "
                "fewer than five predictions are pale. The counts below are on a logarithmic scale."
            ),
        ),
        Figure(
            "Accuracy against coverage",
            (coverage("Known digits only", known), coverage("Known and unfamiliar digits", both)),
            caption=(
                "Accuracy if the network answers only the share of images about which it is most confident. In the second panel "
                "every answer to an unfamiliar digit is wrong, so a curve stays high if those are rejected first."
            ),
        ),
    )


def _unfamiliar(given: Problem, outcomes: Sequence[Outcome]) -> Figure:
    panels = {
        f"{o.label} · AUROC {scores(o, given.y_known)['AUROC unfamiliar']:.3f}": {
            "known": measures.predictive_entropy(o.known),
            "unfamiliar": measures.predictive_entropy(o.unknown),
        }
        for o in outcomes
    }
    return Figure(
        "Uncertainty of known and unfamiliar digits",
        histograms(panels, xlabel="predictive entropy in nats", upper=math.log(FAMILIAR)),
        legend=((BLUE, "test images of known classes"), (VERMILION, f"images of {given.unfamiliar}, not in the training")),
        caption=(
            "The less the two overlap, the better uncertainty detects unfamiliar images. Unfamiliar images at the left are those about "
            f"which the network is wrongly confident. The axis ends at ln {FAMILIAR}, the entropy of a uniform guess."
        ),
    )


def _images(given: Problem, o: Outcome) -> tuple[Figure, ...]:
    assert isinstance(o.known, LatentMixture)
    assert isinstance(o.unknown, LatentMixture)
    images, labels = torch.cat([given.x_known, given.x_unknown])[:, 0], torch.cat([given.y_known, given.y_unknown]).tolist()
    f, probs = torch.cat([o.known.means, o.unknown.means], 1), torch.cat([o.known.probs, o.unknown.probs], 1)  # [S, N, C]
    n, entropy, ignorance = len(given.x_known), o.both(measures.predictive_entropy), measures.mutual_information(o.unknown)
    order = entropy.argsort(stable=True).tolist()
    names = [f"{'an' if label == 8 else 'a'} {label}{', unfamiliar' if label >= FAMILIAR else ''}" for label in labels]
    clear, ambiguous, strange = int(entropy[:n].argmin()), int(entropy[:n].argmax()), n + int(ignorance.argmax())

    def _cards(which: Sequence[int]) -> tuple[Picture, ...]:
        means = torch.cat([o.known.mean, o.unknown.mean])
        return tuple(
            card(images[i], means[i], probs[:, i], title=names[i], subtitle=f"entropy {entropy[i]:.2f}", truth=labels[i])
            for i in which
        )

    def _cloud(i: int, title: str) -> Picture:
        return scatter(images[i], f[:, i], probs[:, i], title=title, subtitle=f"{names[i]}: entropy {entropy[i]:.2f}")

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
            (_cloud(clear, "A clear image"), _cloud(ambiguous, "An ambiguous image"), _cloud(strange, "An unfamiliar image")),
            legend=((BLUE, "softmax inputs, a dot for each draw and class"), (VERMILION, "softmax outputs")),
            caption=(
                "The inputs scatter for every image; what counts is whether the clouds overlap. Where one class is above all others in "
                "every draw, the outputs agree. Where clouds overlap, one draw is confident of one class and the next of another. A "
                "single network would show one dot per column, and none of this disagreement."
            ),
        ),
    )
