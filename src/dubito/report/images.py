"""Images and the predictions for them: class probabilities, draws as a scatter plot, and the training images that influenced one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.report.canvas import BLUE, INK, SOFT, VERMILION, Axes, Drawing, grid, picture, pixels
from dubito.report.content import Picture
from dubito.tensors.checks import at_least, require

NAME = 14  # letters of a class that fit under a small image


class Guess(NamedTuple):
    """An image [H, W], [1, H, W] or [3, H, W] in [0, 1], and the prediction for it."""

    image: Tensor
    said: str  # the predicted class
    truth: str
    confidence: float


def strip(guesses: Sequence[Guess], *, title: str) -> Picture:
    """Images side by side, each with the predicted class, its confidence and, where it is wrong, the true class.

    >>> strip([Guess(torch.rand(8, 8), "seven", "one", 0.9)], title="a mistake").alt
    'a mistake: seven (0.90), truly one.'
    """

    places = max(4, len(guesses))

    def _draw(figure: Drawing) -> None:
        # one pair of axes for all images: as many as there are images would take ten times as long to lay out
        axes = figure.subplots()
        axes.axis("off")
        axes.set_title(title)
        for i, guess in enumerate(guesses):
            left, wrong = 1.12 * i, guess.said != guess.truth
            _put(axes, guess.image, left, 0.0, SOFT)
            words = f"{_short(guess.said)}  {guess.confidence:.2f}" + (f"\ntruly {_short(guess.truth)}" if wrong else "")
            colour = VERMILION if wrong else INK
            axes.text(left + 0.5, -0.07, words, ha="center", va="top", fontsize=8.5, color=colour, linespacing=1.35)
        axes.set(xlim=(-0.02, 1.12 * places - 0.1), ylim=(-0.42, 1.02), aspect="equal")

    told = [f"{g.said} ({g.confidence:.2f})" + (f", truly {g.truth}" if g.said != g.truth else "") for g in guesses]
    return picture(_draw, (1.12 * places, 1.85), alt=f"{title}: {'; '.join(told) or 'none'}.")


def _short(name: str) -> str:
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def card(image: Tensor, mean: Tensor, probs: Tensor, *, title: str, subtitle: str, truth: int) -> Picture:
    """An image [H, W] and a bar for every class: the mean [C], and a line from 10 to 90 % of the draws [S, C]."""
    classes = range(len(mean))
    low, high = torch.quantile(probs.double(), torch.tensor([0.1, 0.9], dtype=torch.float64), dim=0).numpy()

    def _draw(figure: Drawing) -> None:
        top, bottom = figure.subplots(2, 1, height_ratios=[1.15, 1])
        _image(top, image)
        top.set_title(title, loc="center", fontsize=9, pad=13)
        top.text(0.5, 1.04, subtitle, transform=top.transAxes, ha="center", va="bottom", fontsize=8, color=SOFT)
        bottom.bar(classes, mean.numpy(), 0.75, color=[VERMILION if c == truth else BLUE for c in classes])
        if len(probs) > 1:
            bottom.vlines(classes, low, high, color=INK, linewidth=0.9)
        bottom.set_xticks(classes)
        bottom.tick_params(length=0, labelsize=8)
        bottom.set(ylim=(0, 1.04), yticks=[0, 0.5, 1])
        bottom.set_yticklabels(["0", "", "1"])

    alt = f"{title}, {subtitle}. The most probable class is {int(mean.argmax())}, with {float(mean.max()):.2f}."
    return picture(_draw, (1.75, 2.5), alt=alt)


def scatter(image: Tensor, f: Tensor, probs: Tensor, *, title: str, subtitle: str) -> Picture:
    """What every draw says about one image [H, W]: its softmax inputs f [S, C] and its softmax outputs [S, C]."""
    # random horizontal shifts, the same each time, so that equal dots do not hide each other
    aside = np.random.default_rng(0).uniform(-0.28, 0.28, tuple(f.shape))
    place = np.arange(f.shape[1]) + aside

    def _draw(figure: Drawing) -> None:
        axes = figure.subplot_mosaic(
            [["image", "name"], ["f", "f"], ["p", "p"]], height_ratios=[0.8, 1.45, 1.45], width_ratios=[1, 2.6]
        )
        _image(axes["image"], image)
        axes["name"].axis("off")
        axes["name"].text(0, 0.66, title, fontsize=10, fontweight="bold", va="center")
        axes["name"].text(0, 0.28, subtitle, fontsize=9, color=SOFT, va="center")
        for key, values, colour in (("f", f.numpy(), BLUE), ("p", probs.numpy(), VERMILION)):
            # one picture of all dots instead of thousands of elements
            axes[key].plot(
                place.ravel(), values.ravel(), "o", color=colour, alpha=0.3, markersize=3, markeredgewidth=0, rasterized=True
            )
            axes[key].set_xticks(range(f.shape[1]))
            axes[key].set_xlim(-0.6, f.shape[1] - 0.4)
            axes[key].tick_params(axis="x", length=0)
            grid(axes[key], "y")
        axes["f"].set_ylabel("softmax input")
        axes["p"].set(ylabel="softmax output", ylim=(-0.04, 1.04), xlabel="class")

    spread = float(probs.std(0).max()) if len(f) > 1 else 0.0
    alt = f"{title}, {subtitle}: the largest standard deviation of a class probability over {len(f)} draws is {spread:.2f}."
    return picture(_draw, (3.6, 4.4), alt=alt)


def _image(axes: Axes, image: Tensor, extent: tuple[float, float, float, float] | None = None) -> None:
    """Grey [H, W] or [1, H, W], dark on light, or in colour [3, H, W]."""
    axes.imshow(pixels(image), cmap="gray_r", interpolation="nearest", vmin=0, vmax=1, extent=extent)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)


def _put(axes: Axes, image: Tensor, left: float, bottom: float, colour: str) -> None:
    """An image in a frame, one unit wide and high."""
    _image(axes, image, extent=(left, left + 1, bottom, bottom + 1))
    axes.plot([left, left + 1, left + 1, left, left], torch.tensor([0, 0, 1, 1, 0]) + bottom, color=colour, linewidth=0.9)


def influential(values: Tensor, count: int = 5) -> tuple[Tensor, Tensor]:
    """Positions of the most helpful and of the most harmful examples, the strongest first, from influences [N] on a loss.

    Helpful ones have negative influences (`Influences.of`: with more of them the loss falls), harmful ones positive.

    >>> influential(torch.tensor([0.1, -0.5, 0.3, -0.2]), 2)
    (tensor([1, 3]), tensor([2, 0]))
    """
    at_least(1, count=count)
    require(values.ndim == 1, f"values must have the shape [N]; got {list(values.shape)}")
    order = values.argsort()
    helpful, harmful = order[:count], order.flip(0)[:count]
    return helpful[values[helpful] < 0], harmful[values[harmful] > 0]


def sheet(
    image: Tensor,
    said: str,
    images: Tensor,
    labels: Sequence[str],
    values: Tensor,
    *,
    count: int = 5,
    title: str = "",
    kind: str = "svg",
) -> Picture:
    """A test image beside the training images that helped and harmed most, with their labels and influences on its loss.

    `images` [N, H, W] or [N, C, H, W] are all training images, in [0, 1], `labels` and `values` [N] theirs; `said` is the
    caption of the test image.
    """
    lengths = len(images), len(labels), len(values)
    require(len(set(lengths)) == 1, f"images, labels and values must have the same length; got {lengths}")
    chosen = influential(values, count)
    places = max(1, *(len(one) for one in chosen))

    def _draw(figure: Drawing) -> None:
        axes = figure.subplots()  # one pair for all images: as many as there are images would take ten times as long to lay out
        axes.axis("off")
        if title:
            axes.set_title(title)
        _put(axes, image, 0.0, 0.7, INK)
        axes.text(0.5, 0.62, said, ha="center", va="top", fontsize=8.5)
        for row, (which, name, colour) in enumerate(zip(chosen, ("helpful", "harmful"), (BLUE, VERMILION), strict=True)):
            bottom = 1.5 * (1 - row)
            style = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 9.5, "fontweight": "bold"}
            axes.text(1.42, bottom + 0.5, name, color=colour, **style)
            for i, n in enumerate(which.tolist()):
                left = 1.5 + 1.12 * i
                _put(axes, images[n], left, bottom, colour)
                words = f"{labels[n]}   {float(values[n]):+.2g}"
                axes.text(left + 0.5, bottom - 0.06, words, ha="center", va="top", fontsize=8, color=SOFT)
        axes.set(xlim=(-0.05, 1.5 + 1.12 * places), ylim=(-0.3, 2.55), aspect="equal")

    told = [
        f"most {name} is example {int(which[0])}, labelled {labels[int(which[0])]} ({float(values[which[0]]):+.2g})"
        for which, name in zip(chosen, ("helpful", "harmful"), strict=True)
        if len(which)
    ]
    alt = f"{title or 'Influential training images'}: for {said}, the {'; '.join(told) or 'examples have no influence'}."
    return picture(_draw, (1.5 + 1.12 * places, 2.9), alt=alt, kind=kind)
