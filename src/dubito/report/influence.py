"""The most helpful and the most harmful training images for a prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.report.canvas import BLUE, INK, SOFT, VERMILION, Axes, Drawing, picture, pixels
from dubito.report.content import Picture
from dubito.tensors.checks import at_least, require


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


def _put(axes: Axes, image: Tensor, left: float, bottom: float, colour: str) -> None:
    """Grey [H, W] or [1, H, W], dark on light, or in colour [3, H, W], in a frame."""
    box = (left, left + 1, bottom, bottom + 1)
    axes.imshow(pixels(image), cmap="gray_r", interpolation="nearest", vmin=0, vmax=1, extent=box)
    axes.plot([left, left + 1, left + 1, left, left], torch.tensor([0, 0, 1, 1, 0]) + bottom, color=colour, linewidth=1.0)
