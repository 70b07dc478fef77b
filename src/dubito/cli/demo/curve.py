"""Regression in one dimension, with a gap in the data and noise that depends on the input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dubito.cli.compare.grid import Fits
from dubito.cli.compare.spec import parse_spec
from dubito.cli.process import one_thread
from dubito.evaluation import metrics
from dubito.evaluation.problems import Problem, Split
from dubito.inference.presets import Training, suiting
from dubito.inference.registry import METHODS
from dubito.model.likelihoods import HeteroscedasticGaussian
from dubito.posteriors.predictive import Predictive
from dubito.report import Column, Figure, Section, Table
from dubito.report.functions import LEGEND, Curve, band, poster
from dubito.tensors import randomness

# Gradients are clipped, or a fit with learned noise may explain a whole stretch of the data as noise.
TRAINING = Training(
    epochs=350, learning_rate=5e-3, batch_size=40, prior_scale=3.0, dropout=0.05, walk=0.007, clip=1.0, members=10
)
ACTIVATIONS = {"ReLU": nn.ReLU, "tanh": nn.Tanh}
STRETCHES, GAP = ((-4.0, -1.2), (1.4, 4.0)), (-1.2, 1.4)
YLIM = (-5.2, 3.2)
COLUMNS = (
    Column("method"),
    Column("activation"),
    Column("NLL near data", digits=2, better="lower", meaning="mean negative log density of new points on the two stretches"),
    Column("coverage near data", digits=2, meaning="share of them inside the 90 % interval"),
    Column("NLL in the gap", digits=2, better="lower", meaning="mean negative log density of new points in the gap"),
    Column("coverage in the gap", digits=2, meaning="share of them inside the 90 % interval"),
)


class Outcome(NamedTuple):
    """The predictions of a method for the curve."""

    curve: Curve
    near: Predictive
    gap: Predictive


class Points(NamedTuple):
    """Training points, and test points near the data and in the gap; all [N, 1]."""

    x: Tensor
    y: Tensor
    x_near: Tensor
    y_near: Tensor
    x_gap: Tensor
    y_gap: Tensor


class Network(nn.Sequential):
    """An MLP with two hidden layers. Weights start from N(0, 1.5^2 / inputs) and biases from N(0, 1).

    From PyTorch's narrower distributions, members of an ensemble would start as nearly the same line.
    """

    def __init__(self, activation: type[nn.Module], outputs: int):
        super().__init__(nn.Linear(1, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; an ensemble calls this after it has reset the layers."""
        for name, leaf in self.named_parameters():
            nn.init.normal_(leaf, 0.0, 1.0 if name.endswith("bias") else 1.5 * leaf.shape[1] ** -0.5)


def truth(x: Tensor) -> Tensor:
    """The curve without noise."""
    return 0.5 * x * torch.sin(1.2 * x + 0.4)


def points(*, seed: int = 0) -> Points:
    """The data of a seed.

    >>> p = points()
    >>> len(p.x), len(p.x_gap)
    (120, 400)
    """
    generator = randomness.generator("cpu", seed, "curve")

    def draw(n: int, *stretches: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """n noisy points on each stretch."""
        x = torch.cat([low + (high - low) * torch.rand(n, 1, generator=generator) for low, high in stretches])
        noise = 0.05 + 0.25 * torch.sigmoid(2 * x)  # little on the left, much on the right
        return x, truth(x) + noise * torch.randn(x.shape, generator=generator)

    return Points(*draw(60, *STRETCHES), *draw(200, *STRETCHES), *draw(400, GAP))


@one_thread()
def run(
    methods: Iterable[str] = METHODS, *, seed: int = 0, effort: float = 1.0, say: Callable[[str], object] = str
) -> dict[str, dict[str, Outcome]]:
    """Fit the methods that support input-dependent noise, with every activation: label -> activation -> outcome."""
    given, grid, outcomes = points(seed=seed), torch.linspace(-5.5, 5.5, 221).unsqueeze(1), {}
    split = Split(given.x, given.y, given.x_near, given.y_near, None, None, {})
    training = TRAINING._replace(epochs=max(1, round(effort * TRAINING.epochs)))
    fits = {
        name: Fits(Problem("curve", "regression", lambda _: split, training, partial(_build, layer), ("y",)), seed)
        for name, layer in ACTIVATIONS.items()
    }
    for name in suiting(methods, HeteroscedasticGaussian):
        begin, by = time.monotonic(), {}
        spec = replace(parse_spec(name, fits["ReLU"].problem), noise="heteroscedastic")
        for activation in ACTIVATIONS:
            posterior = fits[activation](spec, split).posterior
            shown = Curve(grid[:, 0], posterior.predict(grid), truth(grid)[:, 0], (given.x[:, 0], given.y[:, 0]))
            by[activation] = Outcome(shown, posterior.predict(given.x_near), posterior.predict(given.x_gap))
        outcomes[spec.title] = by
        say(f"curve: {spec.title}, {time.monotonic() - begin:.1f} s")
    return outcomes


def _build(activation: type[nn.Module], shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Network(activation, outputs)


def section(outcomes: Mapping[str, Mapping[str, Outcome]], *, seed: int = 0) -> Section:
    """The section of the report on the curve; `seed` as in `run`."""
    each = [(label, activation, outcome) for label, by in outcomes.items() for activation, outcome in by.items()]
    return Section(
        "Regression",
        "The training data lie on two stretches of a curve, with little noise on the left and much on the right. The network predicts "
        "a mean and a noise level; the method adds the uncertainty about both.",
        tables=(_table(each, points(seed=seed)),),
        figures=(
            Figure(
                "Aleatoric and epistemic uncertainty",
                tuple(band(o.curve, title=f"{label}, {activation}", ylim=YLIM) for label, activation, o in each),
                legend=LEGEND,
                caption=(
                    "Near the data the band should be noise, wide on the right only; in the gap and beyond the data epistemic "
                    "uncertainty should grow. A single network (MAP) has none. ReLU networks extrapolate in straight lines, which fan "
                    "out; tanh networks level off, and so does their uncertainty. Laplace linearizes the network in its weights, so "
                    "its band has a step where a ReLU switches. The noise far from the data is an extrapolation, too."
                ),
            ),
        ),
    )


def _table(each: list[tuple[str, str, Outcome]], given: Points) -> Table:
    def _row(o: Outcome) -> tuple[float, ...]:
        pairs = ((o.near, given.y_near), (o.gap, given.y_gap))
        return tuple(float(metric(p, y)) for p, y in pairs for metric in (metrics.nll, metrics.coverage))

    return Table(
        "A curve with a gap",
        COLUMNS,
        tuple((label, activation, *_row(o)) for label, activation, o in each),
        caption=(
            "On 400 new points each. Coverage is the share of points inside the 90 % interval, so 0.90 is ideal. This is an "
            "illustration and not a benchmark: the network and its training were chosen by looking at such pictures."
        ),
    )


def picture(path: str | Path = "docs/images/regression.png", *, seed: int = 0) -> Path:
    """Draw the picture of the README: `python -c "from dubito.cli.demo.curve import picture; picture()"`."""
    outcomes = run(("mc_dropout", "ensemble"), seed=seed)
    return poster({label: {a: o.curve for a, o in by.items()} for label, by in outcomes.items()}, path, ylim=YLIM)
