"""Inputs as a person sees them: images, rows of a table, lines of text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from torch import Tensor

SMALL = 64  # pixels of the longer side of a thumbnail

Content = dict[str, Any]  # JSON


class Shown(Protocol):
    """How the inputs of a pool are shown, by their index."""

    def content(self, index: int) -> Content:
        """What the page needs to show an input, as JSON: its "kind", and the fields of that kind."""
        ...

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        """The input as a PNG image; None if it is not an image."""
        ...

    def select(self, rows: Sequence[int]) -> Self:
        """Only some of the inputs, in this order."""
        ...


@dataclass(frozen=True)
class Images:
    """Images [N, 1, H, W] or [N, 3, H, W] in [0, 1]; `ink` inverts grey ones, so that handwriting is dark on light.

    >>> import torch
    >>> Images(torch.rand(5, 1, 8, 12)).content(3)
    {'kind': 'image', 'width': 12, 'height': 8}
    """

    x: Tensor
    ink: bool = False

    def content(self, index: int) -> Content:
        """The size of the image; the page loads the pixels by itself."""
        return {"kind": "image", "width": self.x.shape[3], "height": self.x.shape[2]}

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        """The image as a PNG file."""
        from PIL import Image

        image = self.x[index].cpu()
        image = 1 - image if self.ink and len(image) == 1 else image
        pixels = image.clamp(0, 1).mul(255).round().byte().movedim(0, -1).numpy()  # [H, W, C]
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        if small and max(picture.size) > SMALL:
            picture.thumbnail((SMALL, SMALL))
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()

    def select(self, rows: Sequence[int]) -> Self:
        """Only some of the images."""
        return replace(self, x=self.x[list(rows)])


class _NoImage:
    """Inputs that are not images."""

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        """None: there is no image."""
        return None


@dataclass(frozen=True)
class Rows(_NoImage):
    """Rows of a table [N, F], in their original units, with the names of the columns."""

    x: Tensor
    names: tuple[str, ...]

    def content(self, index: int) -> Content:
        """The names and values of the columns."""
        cells = [[name, f"{value:.10g}"] for name, value in zip(self.names, self.x[index].tolist(), strict=True)]
        return {"kind": "row", "cells": cells}

    def select(self, rows: Sequence[int]) -> Self:
        """Only some of the rows."""
        return replace(self, x=self.x[list(rows)])


@dataclass(frozen=True)
class Lines(_NoImage):
    """Lines of text."""

    lines: tuple[str, ...]

    def content(self, index: int) -> Content:
        """The text."""
        return {"kind": "text", "text": self.lines[index]}

    def select(self, rows: Sequence[int]) -> Self:
        """Only some of the lines."""
        return replace(self, lines=tuple(self.lines[i] for i in rows))
