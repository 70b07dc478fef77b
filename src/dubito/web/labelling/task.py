"""What is to be labelled: a pool of inputs, the classes, how a person sees the inputs, and a network for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from dubito.evaluation import data
from dubito.evaluation.data.sentences import CLASSES as OPINIONS
from dubito.evaluation.data.sentences import PADDING, Vocabulary
from dubito.evaluation.problems import IMAGES, TABLES, lenet, perceptron, problem, some
from dubito.inference.presets import Training

SMALL = 64  # pixels of the longer side of a thumbnail

Content = dict[str, Any]  # JSON


class Shown(Protocol):
    """How the inputs of a pool are shown, by their index."""

    def content(self, index: int) -> Content:
        """What the page needs to show an input, as JSON: its "kind", and the fields of that kind."""
        ...

    def png(self, index: int, *, small: bool = False) -> bytes | None:
        """The input as a PNG image; None if it is not an image."""
        return None

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


@dataclass(frozen=True)
class Rows(Shown):
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
class Lines(Shown):
    """Lines of text."""

    lines: tuple[str, ...]

    def content(self, index: int) -> Content:
        """The text."""
        return {"kind": "text", "text": self.lines[index]}

    def select(self, rows: Sequence[int]) -> Self:
        """Only some of the lines."""
        return replace(self, lines=tuple(self.lines[i] for i in rows))


FILES = (".npz", ".csv", ".txt")
NAMED = ("digits", "mnist", "fashion-mnist", "cifar10", "polarity")
GARMENTS = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
HEAD = (
    r"hidden([2-9]\d*)?$|output$"  # layers with dropout in our networks: late ones, so that many draws cost little more than one
)
SENTENCES = Training(epochs=100, learning_rate=1e-2, batch_size=64, prior_scale=None, dropout=0.5, walk=3e-3)


@dataclass(frozen=True)
class Task:
    """Inputs without labels, classes and a network. `pool` holds the inputs of the network, `shown` what a person sees."""

    name: str
    pool: Tensor = field(repr=False)
    classes: tuple[str, ...]
    shown: Shown = field(repr=False)
    build: Callable[[], nn.Module] = field(repr=False)
    training: Training = field(repr=False)
    held_out: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # to score the model
    rows: tuple[int, ...] | None = field(default=None, repr=False)  # row numbers in the source, if not all rows are here
    at: str | None = HEAD  # pattern of the layers with dropout on their inputs; None: the network has its own dropout


def task(
    source: str,
    *,
    classes: Sequence[str] = (),
    held_out: str | Path | None = None,
    target: str = "y",
    pool: int | None = None,
    test: int | None = 2000,
) -> Task:
    """The labelling task of a data set or file.

    Args:
        source: one of `NAMED`, whose published training labels are hidden; or a file: NPZ with the inputs in x (images may be
            [N, C, H, W], [N, H, W, C] or [N, H, W]), CSV with one input per row, or TXT with one input per line.
        classes: names of the classes, in their order; by default those that occur in the held-out part.
        held_out: a file of the same kind with labels; an NPZ file may also contain the arrays x_test and y_test.
        target: column or array of the labels in `held_out`; in a TXT file the label is the first word of a line.
        pool: largest number of inputs to label, drawn at random.
        test: largest number of held-out inputs, drawn at random.

    >>> digits = task("digits")
    >>> digits.pool.shape, len(digits.classes), digits.held_out[1].shape
    (torch.Size([899, 1, 8, 8]), 10, torch.Size([898]))
    """
    suffix = Path(source).suffix.lower()
    if suffix not in FILES:
        if classes or held_out is not None:
            raise ValueError(f"{source} has its own classes and test part: --classes and --held-out are for files")
        return _limited(_named(source), pool, test)
    path, other = Path(source), None if held_out is None else Path(held_out)
    for file in (path, other):
        if file is not None and not file.is_file():
            raise ValueError(f"{file}: there is no such file")
    made = (_text if suffix == ".txt" else _table)(path, other, target, tuple(classes))
    if len(set(made.classes)) < max(2, len(made.classes)):
        raise ValueError(f"give at least two different classes; got {', '.join(made.classes) or 'none'}")
    return _limited(made, pool, test)


def _named(name: str) -> Task:
    if name not in NAMED:
        raise ValueError(f"no data set is called {name!r}; choose from {', '.join(NAMED)}, or give an NPZ, CSV or TXT file")
    if name == "polarity":
        reviews = data.polarity(least=1)  # so that every word of the pool can be shown
        lines = tuple(reviews.vocabulary.decode(row) for row in reviews.x_train)
        held_out = reviews.x_test, reviews.y_test
        words = len(reviews.vocabulary)
        return Task(name, reviews.x_train, OPINIONS, Lines(lines), lambda: Bag(words, 2), SENTENCES, held_out)
    published = problem(name)
    part = published.split(0)
    names = GARMENTS if name == "fashion-mnist" else published.outputs
    build = _builder(published.build, tuple(part.x_train.shape[1:]), len(names))
    shown = Images(part.x_train, ink=name != "cifar10")
    return Task(name, part.x_train, names, shown, build, published.training, (part.x_test, part.y_test))


def _limited(task: Task, pool: int | None, test: int | None) -> Task:
    """The task with at most so many inputs, drawn at random, the same ones every time."""
    rows = some(len(task.pool), pool)
    if isinstance(rows, Tensor):
        chosen = rows.tolist()
        numbers = chosen if task.rows is None else [task.rows[i] for i in chosen]
        task = replace(task, pool=task.pool[rows], shown=task.shown.select(chosen), rows=tuple(numbers))
    if task.held_out is not None:
        kept = some(len(task.held_out[1]), test)
        task = replace(task, held_out=(task.held_out[0][kept], task.held_out[1][kept]))
    return task


def _table(path: Path, other: Path | None, target: str, classes: tuple[str, ...]) -> Task:
    """The inputs of an NPZ or CSV file."""
    inputs = data.table(path, (), dtype=torch.float64)  # columns far from zero are shifted before they are rounded
    if target in inputs.features and path.suffix.lower() == ".csv":
        raise ValueError(f"{path} has a column {target!r}, which would be an input: remove it, or give another name by --target")
    held_out, classes = _held_out(path, other, target, classes, inputs)
    if not classes:
        raise ValueError(f"{path}: name the classes, as in --classes cat dog, or give labelled inputs by --held-out FILE")
    if held_out is not None and held_out[0].shape[1:] != inputs.x.shape[1:]:
        shapes = list(inputs.x.shape[1:]), list(held_out[0].shape[1:])
        raise ValueError(f"held-out inputs must have the shape {shapes[0]} of the inputs in {path}; got {shapes[1]}")
    if inputs.x.ndim == 2:
        test = inputs.x if held_out is None else held_out[0].double()
        even = data.standardize(data.Split(inputs.x, inputs.x[:, :1], test, test[:, :1]))
        held_out = None if held_out is None else (even.x_test.float(), held_out[1])
        build = _builder(perceptron((64, 64)), (inputs.x.shape[1],), len(classes))
        return Task(path.name, even.x_train.float(), classes, Rows(inputs.x, inputs.features), build, TABLES, held_out)
    whole = bool(inputs.x.max() > 1)  # bytes, not shares; held-out images are taken in the same way
    x = _images(inputs.x.float(), path, whole)
    held_out = None if held_out is None else (_images(held_out[0].float(), other or path, whole), held_out[1])
    shape = tuple(x.shape[1:])
    large = min(shape[1:]) >= 16
    build = _builder(lenet if large else perceptron((128, 128)), shape, len(classes))
    return Task(path.name, x, classes, Images(x), build, IMAGES if large else TABLES._replace(learning_rate=3e-3), held_out)


def _held_out(
    path: Path, other: Path | None, target: str, classes: tuple[str, ...], inputs: data.Table
) -> tuple[tuple[Tensor, Tensor] | None, tuple[str, ...]]:
    """Held-out inputs with their classes, if there are any, and the names of the classes."""
    if other is not None:
        kind = {"kind": "classification", "classes": classes or None, "dtype": torch.float64}
        table = data.table(other, target, features=inputs.features or None, fill=inputs.fill, **kind)
        assert table.y is not None
        return (table.x, table.y), table.classes
    inner = _test_arrays(path) if path.suffix.lower() == ".npz" else None
    if inner is None:
        return None, classes
    x, labels = inner
    classes = classes or tuple(sorted(set(labels), key=lambda name: (len(name), name) if name.isdigit() else (10**6, name)))
    return (x, _encode(labels, classes, f"{path}, y_test")), classes


def _encode(labels: Sequence[str], classes: tuple[str, ...], place: str) -> Tensor:
    """The indices of labels among the classes."""
    unknown = sorted(set(labels) - set(classes))
    if unknown:
        raise ValueError(f"{place}: {unknown[0]!r} is not one of the classes {', '.join(classes)}")
    return torch.tensor([classes.index(name) for name in labels])


def _builder(make: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...], outputs: int) -> Callable[[], nn.Module]:
    return lambda: make(shape, outputs)


def _test_arrays(path: Path) -> tuple[Tensor, list[str]] | None:
    """The arrays x_test and y_test of an NPZ file, if it has them."""
    with np.load(path, allow_pickle=False) as file:
        if not {"x_test", "y_test"} <= set(file.files):
            return None
        x, y = file["x_test"], file["y_test"]
    if y.ndim != 1 or len(x) != len(y):
        raise ValueError(f"{path}: y_test must have the shape [{len(x)}], one class per input of x_test; got {list(y.shape)}")
    return torch.from_numpy(x.astype(np.float32)), [str(label) for label in y.tolist()]


def _images(x: Tensor, path: Path, whole: bool) -> Tensor:
    """Images as [N, C, H, W] in [0, 1], from any of the layouts of `task`; `whole` if they are bytes."""
    if x.ndim == 3:
        x = x.unsqueeze(1)
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.movedim(3, 1)
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ValueError(f"{path}: x must be rows [N, F] or images [N, C, H, W] with one or three channels; got {list(x.shape)}")
    x = x / 255 if whole else x
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise ValueError(f"{path}: pixels must lie between 0 and 1, or between 0 and 255")
    return x.contiguous()


def _text(path: Path, other: Path | None, _: str, classes: tuple[str, ...]) -> Task:
    """The lines of a file; the words of these lines are the vocabulary."""
    numbers, lines = zip(*_lines(path), strict=True)
    vocabulary = Vocabulary.of(lines, least=2 if len(lines) >= 1000 else 1)
    held_out = None
    if other is not None:
        labels, texts = zip(*_labelled_lines(other), strict=True)
        classes = classes or tuple(sorted(set(labels)))
        held_out = vocabulary.encode(list(texts)), _encode(labels, classes, str(other))
    if not classes:
        raise ValueError(f"{path}: name the classes, as in --classes good bad, or give labelled lines by --held-out FILE")
    words, outputs = len(vocabulary), len(classes)
    encoded = vocabulary.encode(lines)
    return Task(path.name, encoded, classes, Lines(lines), lambda: Bag(words, outputs), SENTENCES, held_out, rows=numbers)


def _labelled_lines(path: Path) -> list[tuple[str, str]]:
    """(class, text) of every line."""
    pairs = []
    for number, line in _lines(path):
        words = line.split(None, 1)
        if len(words) < 2:
            raise ValueError(f"{path}, line {number + 1}: write the class, a space, and the text")
        pairs.append((words[0], words[1]))
    return pairs


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 0."""
    try:
        # not `splitlines`, which also splits at rare characters where no editor does
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text: {error.reason}") from error
    lines = [(number, line) for number, line in enumerate(lines) if line]
    if not lines:
        raise ValueError(f"{path}: the file is empty")
    return lines


class Bag(nn.Module):
    """Logits of sentences [B, T] from the mean of their word embeddings: small, fast, and hard to beat with few labels."""

    def __init__(self, words: int, outputs: int, width: int = 64):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.hidden = nn.Linear(width, 64)
        self.output = nn.Linear(64, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, C] of word indices [B, T]."""
        known = ids.ne(PADDING).unsqueeze(-1)
        mean = (self.words(ids) * known).sum(1) / known.sum(1).clamp_min(1)
        return self.output(torch.relu(self.hidden(mean)))
