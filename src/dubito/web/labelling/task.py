"""What is to be labelled: a pool of inputs, the classes, how inputs are shown, and a network that suits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dubito.evaluation import data
from dubito.evaluation.data.polarity import CLASSES as OPINIONS
from dubito.evaluation.data.sentences import PADDING, Vocabulary
from dubito.evaluation.problems import IMAGES, TABLES, lenet, perceptron, problem, some
from dubito.inference.presets import Training
from dubito.web.labelling.rendering import Images, Lines, Rows, Shown

NAMED = ("digits", "mnist", "fashion-mnist", "cifar10", "polarity")
GARMENTS = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
HEAD = r"hidden([2-9]\d*)?$|output$"  # where our own networks drop: late, so that many draws cost little more than one
SENTENCES = Training(epochs=100, learning_rate=1e-2, batch_size=64, prior_scale=1.0, dropout=0.5, damping=0.0, walk=3e-3)


@dataclass(frozen=True)
class Task:
    """Inputs without labels, and what is known beside them. `pool` is as the network takes it, `shown` as a person does."""

    name: str
    pool: Tensor = field(repr=False)
    classes: tuple[str, ...]
    shown: Shown = field(repr=False)
    build: Callable[[], nn.Module] = field(repr=False)
    training: Training = field(repr=False)
    held_out: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # to see how good the model is
    rows: tuple[int, ...] | None = field(
        default=None, repr=False
    )  # the numbers of the inputs in the source, where not all are here
    at: str | None = HEAD  # the layers of the network before which there is dropout; None: it has its own


def task(
    source: str,
    *,
    classes: Sequence[str] = (),
    held_out: str | Path | None = None,
    target: str = "y",
    pool: int | None = None,
    test: int | None = 2000,
) -> Task:
    """What there is to label in a data set or file.

    `source` is one of `NAMED` (whose published labels are hidden, but for the test part), or a file: an NPZ file with the inputs in
    x, images [N, C, H, W], [N, H, W, C] or [N, H, W] among them; a CSV file, a row an input; or a TXT file, a line an input.
    `held_out` is a file of the same kind with labels, in the column or array `target` or, of text, before each line; of an NPZ file
    the arrays x_test and y_test do as well. `classes` names the classes in their order, if not all that are held out. At most `pool`
    and `test` inputs are taken, at random.

    >>> digits = task("digits")
    >>> digits.pool.shape, len(digits.classes), digits.held_out[1].shape
    (torch.Size([899, 1, 8, 8]), 10, torch.Size([898]))
    """
    suffix = Path(source).suffix.lower()
    if suffix not in (".npz", ".csv", ".txt"):
        if classes or held_out is not None:
            raise ValueError(f"{source} has classes and a test part of its own: --classes and --held-out are for files")
        return _named(source, pool, test)
    path, other = Path(source), None if held_out is None else Path(held_out)
    for one in (path, other):
        if one is not None and not one.is_file():
            raise ValueError(f"{one}: there is no such file")
    found = _text(path, other, tuple(classes)) if suffix == ".txt" else _table(path, other, target, tuple(classes))
    if len(set(found.classes)) < max(2, len(found.classes)):
        raise ValueError(f"there are at least two classes, with different names; got {', '.join(found.classes) or 'none'}")
    return _limited(found, pool, test)


def _named(name: str, pool: int | None, test: int | None) -> Task:
    if name not in NAMED:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(NAMED)}, and NPZ, CSV and TXT files of your own")
    if name == "polarity":
        reviews = data.polarity(least=1)  # so that every word of the pool can be shown
        lines = tuple(reviews.vocabulary.decode(row) for row in reviews.x_train)
        held = reviews.x_test, reviews.y_test
        words = len(reviews.vocabulary)
        found = Task(name, reviews.x_train, OPINIONS, Lines(lines), lambda: Bag(words, 2), SENTENCES, held)
        return _limited(found, pool, test)
    given = problem(name)
    part = given.part(0)
    names = GARMENTS if name == "fashion-mnist" else given.outputs
    shape = tuple(part.x_train.shape[1:])
    shown = Images(part.x_train, ink=name != "cifar10")
    held = part.x_test, part.y_test
    found = Task(name, part.x_train, names, shown, lambda: given.build(shape, len(names)), given.training, held)
    return _limited(found, pool, test)


def _limited(found: Task, pool: int | None, test: int | None) -> Task:
    """The same with at most so many inputs, drawn at random, the same ones every time."""
    rows = some(len(found.pool), pool)
    if isinstance(rows, Tensor):
        shown = found.shown
        if isinstance(shown, Lines):
            shown = Lines(tuple(shown.lines[i] for i in rows.tolist()))
        elif isinstance(shown, Images | Rows):
            shown = replace(shown, x=shown.x[rows])
        numbers = rows.tolist() if found.rows is None else [found.rows[i] for i in rows.tolist()]
        found = replace(found, pool=found.pool[rows], shown=shown, rows=tuple(numbers))
    if found.held_out is not None:
        kept = some(len(found.held_out[1]), test)
        found = replace(found, held_out=(found.held_out[0][kept], found.held_out[1][kept]))
    return found


def _table(path: Path, other: Path | None, target: str, classes: tuple[str, ...]) -> Task:
    """The inputs of an NPZ or CSV file, which need no labels."""
    inputs = data.table(path, (), dtype=torch.float64)  # columns far from zero are shifted before they are rounded
    features = inputs.features or None
    if features is not None and target in features and path.suffix.lower() == ".csv":
        raise ValueError(
            f"{path} has a column {target!r}, which would be an input: leave it out of the file, or give another name by --target"
        )
    held: tuple[Tensor, Tensor] | None = None
    if other is not None:
        found = data.table(
            other,
            target,
            kind="classification",
            features=features,
            fill=inputs.fill,
            classes=classes or None,
            dtype=torch.float64,
        )
        assert found.y is not None
        held, classes = (found.x, found.y), found.classes
    elif path.suffix.lower() == ".npz" and (inner := _inner(path)) is not None:
        x, labels = inner
        classes = classes or tuple(sorted(set(labels), key=lambda name: (len(name), name) if name.isdigit() else (10**6, name)))
        if unknown := sorted(set(labels) - set(classes)):
            raise ValueError(f"{path}, y_test: {unknown[0]!r} is not one of the classes {', '.join(classes)}")
        held = x, torch.tensor([classes.index(name) for name in labels])
    if not classes:
        raise ValueError(f"{path}: name the classes, as in --classes cat dog, or give labelled inputs by --held-out FILE")
    if held is not None and held[0].shape[1:] != inputs.x.shape[1:]:
        raise ValueError(f"inputs are {list(inputs.x.shape[1:])} in {path} and {list(held[0].shape[1:])} in the held-out part")
    if inputs.x.ndim == 2:
        test = inputs.x if held is None else held[0].double()
        even = data.standardize(data.Split(inputs.x, inputs.x[:, :1], test, test[:, :1]))
        held = None if held is None else (even.x_test.float(), held[1])
        build = _builder(perceptron((64, 64)), (inputs.x.shape[1],), len(classes))
        return Task(path.name, even.x_train.float(), classes, Rows(inputs.x, inputs.features), build, TABLES, held)
    whole = bool(inputs.x.max() > 1)  # or shares; held-out images are written as the others are
    x = _images(inputs.x.float(), path, whole)
    held = None if held is None else (_images(held[0].float(), other or path, whole), held[1])
    shape = tuple(x.shape[1:])
    large = min(shape[1:]) >= 16
    build = _builder(lenet if large else perceptron((128, 128)), shape, len(classes))
    return Task(path.name, x, classes, Images(x), build, IMAGES if large else TABLES._replace(learning_rate=3e-3), held)


def _builder(make: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...], outputs: int) -> Callable[[], nn.Module]:
    return lambda: make(shape, outputs)


def _inner(path: Path) -> tuple[Tensor, list[str]] | None:
    """The arrays x_test and y_test of an NPZ file, where it has them."""
    with np.load(path, allow_pickle=False) as file:
        if not {"x_test", "y_test"} <= set(file.files):
            return None
        x, y = file["x_test"], file["y_test"]
    if y.ndim != 1 or len(x) != len(y):
        raise ValueError(
            f"{path}: x_test has {len(x)} inputs, and y_test must have as many classes; its shape is {list(y.shape)}"
        )
    return torch.from_numpy(x.astype(np.float32)), [str(label) for label in y.tolist()]


def _images(x: Tensor, path: Path, whole: bool) -> Tensor:
    """Images as [N, C, H, W] in [0, 1], whichever way they were written; `whole`: as bytes."""
    if x.ndim == 3:
        x = x.unsqueeze(1)
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.movedim(3, 1)
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise ValueError(f"{path}: inputs are rows [N, F] or images [N, C, H, W] of one or three channels; x is {list(x.shape)}")
    x = x / 255 if whole else x
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise ValueError(f"{path}: the pixels of images are numbers from 0 to 1, or from 0 to 255; bring them there, to be seen")
    return x.contiguous()


def _text(path: Path, other: Path | None, classes: tuple[str, ...]) -> Task:
    """The lines of a file; the words of these lines are the vocabulary."""
    numbers, lines = zip(*_lines(path), strict=True)
    vocabulary = Vocabulary.of(lines, least=2 if len(lines) >= 1000 else 1)
    held = None
    if other is not None:
        pairs = [line.split(None, 1) for _, line in _lines(other)]
        if wrong := next((number for number, line in _lines(other) if len(line.split(None, 1)) < 2), None):
            raise ValueError(f"{other}, line {wrong + 1}: a labelled line is its class, a space, and the text")
        classes = classes or tuple(sorted({label for label, _ in pairs}))
        if unknown := sorted({label for label, _ in pairs} - set(classes)):
            raise ValueError(f"{other}: {unknown[0]!r} is not one of the classes {', '.join(classes)}")
        held = vocabulary.encode([text for _, text in pairs]), torch.tensor([classes.index(label) for label, _ in pairs])
    if not classes:
        raise ValueError(f"{path}: name the classes, as in --classes good bad, or give labelled lines by --held-out FILE")
    words, outputs = len(vocabulary), len(classes)
    encoded = vocabulary.encode(lines)
    return Task(path.name, encoded, classes, Lines(lines), lambda: Bag(words, outputs), SENTENCES, held, rows=numbers)


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 0."""
    try:
        # not `splitlines`, which also ends a line at rare characters where no editor does
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error.reason}") from error
    lines = [(number, line) for number, line in enumerate(lines) if line]
    if not lines:
        raise ValueError(f"{path}: there is no line in it")
    return lines


class Bag(nn.Module):
    """Logits of sentences [B, T] by the mean of their words: small, quick, and hard to beat with few labels."""

    def __init__(self, words: int, outputs: int, width: int = 64):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=PADDING)
        self.hidden = nn.Linear(width, 64)
        self.output = nn.Linear(64, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        known = ids.ne(PADDING).unsqueeze(-1)
        mean = (self.words(ids) * known).sum(1) / known.sum(1).clamp_min(1)
        return self.output(torch.relu(self.hidden(mean)))
