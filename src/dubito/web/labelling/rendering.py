"""Inputs as a person looks at them: images, rows of a table, lines of text."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

SMALL = 64  # pixels of a thumbnail's longer side


class Shown(Protocol):
    """How the inputs of a pool are shown, by number."""

    def content(self, index: int) -> dict[str, Any]:
        """What a page needs to show one, as JSON: its "kind", and what is of that kind."""
        ...

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        """The image, where it is one."""
        ...


@dataclass(frozen=True)
class Images:
    """Images [N, 1, H, W] or [N, 3, H, W] in [0, 1]; `ink` shows grey ones dark on light, as what is written is meant.

    >>> import torch
    >>> Images(torch.rand(5, 1, 8, 12)).content(3)
    {'kind': 'image', 'width': 12, 'height': 8}
    """

    x: Tensor
    ink: bool = False

    def content(self, index: int) -> dict[str, Any]:
        return {"kind": "image", "width": self.x.shape[3], "height": self.x.shape[2]}

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        from PIL import Image

        image = self.x[index].cpu()
        image = 1 - image if self.ink and len(image) == 1 else image
        pixels = image.clamp(0, 1).mul(255).round().byte().movedim(0, -1).numpy()  # [H, W, C]
        made = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        if small and max(made.size) > SMALL:
            made.thumbnail((SMALL, SMALL))
        file = io.BytesIO()
        made.save(file, "PNG")
        return file.getvalue()


@dataclass(frozen=True)
class Rows:
    """Rows of a table [N, F], in their own units, under the names of their columns."""

    x: Tensor
    names: tuple[str, ...]

    def content(self, index: int) -> dict[str, Any]:
        cells = [[name, f"{value:.10g}"] for name, value in zip(self.names, self.x[index].tolist(), strict=True)]
        return {"kind": "row", "cells": cells}

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        return None


@dataclass(frozen=True)
class Lines:
    """Lines of text."""

    lines: tuple[str, ...]

    def content(self, index: int) -> dict[str, Any]:
        return {"kind": "text", "text": self.lines[index]}

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        return None
