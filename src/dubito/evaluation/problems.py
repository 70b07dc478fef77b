"""What methods are compared on: data cut by a seed, a network that suits them, and how long to train it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito._moved import renamed, renamed_fields
from dubito.evaluation import data
from dubito.evaluation.data.examples import Examples, locate
from dubito.evaluation.data.images import CLASSES
from dubito.evaluation.data.uci import FOLDERS
from dubito.inference.presets import Training, table_training
from dubito.tensors import randomness, store
from dubito.tensors.checks import require

# Not tuned on test images: four-fold cross-validation on the training images (seed 0) is flat around these, but for `walk`, which
# is best here and too fast at twice this. A few hundred images for tens of thousands of weights: Laplace covers the last layer.
DIGITS = Training(
    epochs=60,
    learning_rate=3e-3,
    batch_size=64,
    prior_scale=3.0,
    dropout=0.2,
    walk=0.4,
    laplace_subset="last_layer",
    sghmc_rate=None,
)
# The training of images and of tables has the defaults that networks of this size are usually given; they were chosen on no test data.
IMAGES = DIGITS._replace(epochs=20, learning_rate=1e-3, batch_size=128, prior_scale=None, walk=0.05)
TABLES = Training(epochs=100, learning_rate=1e-2, batch_size=64, prior_scale=None, dropout=0.05, walk=3e-3, clip=1.0)
UCI_STEPS = 3000  # of a fit on a UCI set, whatever its size
IMAGE_SETS: dict[str, Callable[..., Examples]] = {
    "mnist": data.mnist,
    "fashion-mnist": data.fashion_mnist,
    "kmnist": data.kmnist,
    "notmnist": data.notmnist,
    "cifar10": data.cifar10,
}
TRAINABLE = ("mnist", "fashion-mnist", "cifar10")  # of the others only the test part is read
KNOWN = ("digits", *TRAINABLE, *(f"uci:{name}" for name in FOLDERS))

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}
Build = Callable[[tuple[int, ...], int], nn.Module]  # (shape of an input, outputs) -> a network, from the global generator


class Rows(NamedTuple):
    """Which rows of a user's table are in which part of a split."""

    train: Tensor  # numbers of rows
    test: Tensor
    unfamiliar: Mapping[str, Tensor]  # those of other files, which stand below, by name


class Columns(NamedTuple):
    """A user's table as it is in the file, with the rows of unfamiliar files below."""

    cells: Mapping[str, Any]  # a column of text or numbers by its name
    targets: tuple[str, ...]


class Split(NamedTuple):
    """The training and test rows of one seed. A regression is trained on standardized targets and judged in their own units."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor  # in its own units
    shift: Tensor | None  # y = shift + scale * standardized, of a regression
    scale: Tensor | None
    unfamiliar: Mapping[str, Tensor]  # inputs of other kinds, by name
    rows: Rows | None = None  # of a user's table

    @property
    def checksum(self) -> str:
        """A hash of all tensors."""
        tensors = {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}
        return store.checksum({**tensors, **{f"unfamiliar {name}": x for name, x in self.unfamiliar.items()}})


@renamed_fields(part="split")
@dataclass(frozen=True)
class Problem:
    """A data set as methods are compared on it. `split(seed)` is the same for the same seed."""

    name: str
    kind: Literal["classification", "regression"]
    split: Callable[[int], Split] = field(repr=False)
    training: Training
    build: Build = field(repr=False)
    outputs: tuple[str, ...]  # classes, or targets
    source: str = field(default="", kw_only=True)  # where the data come from, in words
    splits: int | None = field(default=None, kw_only=True)  # how many published splits there are; a seed is the number of one
    people: Tensor | None = field(default=None, kw_only=True, repr=False)  # [N] entropy of people's answers to the test inputs
    hidden: tuple[int, ...] | None = field(default=None, kw_only=True)  # of the default network, where that is a perceptron
    columns: Callable[[], Columns] | None = field(default=None, kw_only=True, repr=False)  # of a user's table

    @property
    def stackable(self) -> bool:
        """Whether fits of all splits can be run as one, since the splits are of one size and the networks small."""
        return self.splits is not None and self.hidden is not None

    def limited(self, train: int | None, test: int | None) -> Problem:
        """The same with at most so many examples, drawn at random, since rows often come sorted by their class: of the training part
        by the seed, of the test part (and of what is unfamiliar) the same with all seeds."""
        if train is None and test is None:
            return self

        def split(seed: int) -> Split:
            """The split of a seed, with fewer rows."""
            whole = self.split(seed)
            learn, judge = some(len(whole.x_train), train, seed), some(len(whole.x_test), test)
            far = {name: some(len(x), test) for name, x in whole.unfamiliar.items()}
            rows = whole.rows
            return whole._replace(
                x_train=whole.x_train[learn],
                y_train=whole.y_train[learn],
                x_test=whole.x_test[judge],
                y_test=whole.y_test[judge],
                unfamiliar={name: x[far[name]] for name, x in whole.unfamiliar.items()},
                rows=rows
                and Rows(rows.train[learn], rows.test[judge], {name: x[far[name]] for name, x in rows.unfamiliar.items()}),
            )

        return replace(self, split=split, people=None if self.people is None else self.people[some(len(self.people), test)])


def some(n: int, most: int | None, seed: int = 0) -> Tensor | slice:
    """Which of n rows are taken, in their order: all, or `most` of them at random.

    >>> some(3, 5), len(some(10, 4))
    (slice(None, None, None), 4)
    """
    if most is None or most >= n:
        return slice(None)
    return torch.randperm(n, generator=randomness.generator("cpu", seed, "limit"))[:most].sort().values


def problem(name: str, *, unfamiliar: tuple[str, ...] = ()) -> Problem:
    """A data set by its name: digits, mnist, fashion-mnist, cifar10, or uci:yacht and its siblings.

    `unfamiliar` names image sets to be told from it; they are resized to its images.

    >>> given = problem("digits")
    >>> given.kind, given.split(0).x_train.shape, len(given.outputs)
    ('classification', torch.Size([899, 1, 8, 8]), 10)
    """
    if name.startswith("uci:"):
        if unfamiliar:
            raise ValueError(
                f"{name} is a table, and {unfamiliar[0]} has other inputs: give an NPZ file of such inputs, or leave it out"
            )
        return _uci(name)
    require(name in KNOWN, f"no data set is called {name!r}; there are {', '.join(KNOWN)}, and CSV and NPZ files of your own")
    if name == "digits":
        return _digits(unfamiliar)
    return _images(name, unfamiliar)


def _digits(unfamiliar: tuple[str, ...]) -> Problem:
    @lru_cache(maxsize=8)
    def split(seed: int) -> Split:
        """Half of the images to train on, by the seed."""
        whole = data.digits(seed=seed, test=0.5)  # half, so that there are errors to look at
        return Split(*whole, None, None, others(unfamiliar, tuple(whole.x_train.shape[1:])))

    source = "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), CC BY 4.0, from scikit-learn"
    names = tuple(str(c) for c in range(10))
    return Problem("digits", "classification", split, DIGITS, perceptron((128, 128)), names, source=source, hidden=(128, 128))


def _images(name: str, unfamiliar: tuple[str, ...]) -> Problem:
    read = IMAGE_SETS[name]
    train, test = read("train"), read("test")
    strange = others(unfamiliar, tuple(train.x.shape[1:]))
    # one and the same split for all seeds, which then differ in the start and the course of the training
    whole = Split(*train, *test, None, None, strange)
    human = data.label_entropy(data.cifar10h()) if name == "cifar10" and _has_people() else None
    names = CLASSES if name == "cifar10" else tuple(str(c) for c in range(10))
    return Problem(name, "classification", lambda seed: whole, IMAGES, lenet, names, source=f"the published {name}", people=human)


def _has_people() -> bool:
    try:
        data.cifar10h()
    except FileNotFoundError:
        return False
    return True


def others(names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The test images of other sets, in the shape of the familiar ones."""
    unknown = [name for name in names if name not in IMAGE_SETS]
    if unknown:
        raise ValueError(f"no image set is called {unknown[0]!r}; there are {', '.join(IMAGE_SETS)}")
    if names and len(shape) != 3:
        raise ValueError(f"{names[0]} holds images, and the inputs here have the shape {list(shape)}: give a file of such inputs")
    return {name: resized(IMAGE_SETS[name]("test").x, shape) for name in names}


def resized(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images [N, C, H, W] with another number of channels, height and width.

    >>> resized(torch.ones(2, 3, 32, 32), (1, 8, 8)).shape
    torch.Size([2, 1, 8, 8])
    """
    channels, *size = shape
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if list(x.shape[2:]) != size:
        x = F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
    return x.contiguous()


def _uci(name: str) -> Problem:
    key = name.removeprefix("uci:")
    first = data.uci(key, 0)  # which refuses what is not there
    folder = locate("uci", FOLDERS[key], "data")
    splits = len(list(folder.glob("index_train_*.txt")))
    epochs = max(1, round(UCI_STEPS / math.ceil(len(first.x_train) / TABLES.batch_size)))
    hidden = (100,) if key == "protein" else (50,)
    return Problem(
        name,
        "regression",
        lru_cache(maxsize=32)(lambda seed: standardized(data.uci(key, seed))),
        TABLES._replace(epochs=epochs),
        perceptron(hidden),
        ("y",),
        source=f"UCI {key} with the standard splits of Hernandez-Lobato and Adams (2015)",
        splits=splits,
        hidden=hidden,
    )


def standardized(
    split: data.Split, unfamiliar: Mapping[str, Tensor] | None = None, *, classes: bool = False, inputs: bool = True
) -> Split:
    """A split shifted and scaled by its training rows: its inputs, unless `inputs` is False, and the targets of a regression.

    What the network sees is float32; the test targets and the way to their units keep their digits.
    """
    mean, deviation = data.moments(split.x_train) if inputs else (0.0, 1.0)
    x_train, x_test, *strange = (
        ((x - mean) / deviation).float() for x in (split.x_train, split.x_test, *(unfamiliar or {}).values())
    )
    far = dict(zip(unfamiliar or (), strange, strict=True))
    if classes:
        return Split(x_train, split.y_train, x_test, split.y_test, None, None, far)
    shift, scale = data.moments(split.y_train)
    return Split(x_train, ((split.y_train - shift) / scale).float(), x_test, split.y_test, shift, scale, far)


def of_table(
    name: str,
    table: data.Table,
    *,
    held_out: float = 0.2,
    unfamiliar: Mapping[str, Tensor] | None = None,
    batch_size: int = 32,
    columns: Callable[[], Columns] | None = None,
) -> Problem:
    """A user's own table, with the training of `dubito fit`. Which rows are held out for testing differs with the seed.

    `columns` reads the table as it is in the file, for `dubito.fit_table`, which encodes it in its own way.

    >>> table = data.Table(torch.randn(10, 2), torch.arange(10) % 2, ("a", "b"), ("y",), ("no", "yes"))
    >>> of_table("mine.csv", table).split(0).x_test.shape
    torch.Size([2, 2])
    """
    x, y, classes = table.x, table.y, bool(table.classes)
    if y is None:
        raise ValueError("the table has no targets: name the column to predict")
    held = round(held_out * len(y))
    both = f"a held-out share of {held_out:g} of {len(y)} rows must leave both training and test rows; give another, such as 0.2"
    require(0 < held < len(y), both)

    def split(seed: int) -> Split:
        """The split of a seed; the inputs are standardized where x is a table."""
        order = torch.randperm(len(y), generator=randomness.generator("cpu", seed, "held out"))
        train, test = order[held:].sort().values, order[:held].sort().values
        made = standardized(data.Split(x[train], y[train], x[test], y[test]), unfamiliar, classes=classes, inputs=x.ndim == 2)
        return made._replace(rows=Rows(train, test, dict(zip(unfamiliar or (), below, strict=True))))

    sizes = [len(far) for far in (unfamiliar or {}).values()]
    below = torch.arange(len(y), len(y) + sum(sizes)).split(sizes)
    large = x.ndim == 4 and x.shape[1] in (1, 3) and min(x.shape[2:]) >= 16
    build, hidden = (lenet, None) if large else (perceptron((64, 64)), (64, 64))
    training = IMAGES if large else table_training(len(y) - held, batch_size=batch_size)
    width = 1 if classes else y.shape[1]
    outputs = table.classes or (
        table.targets if len(table.targets) == width else tuple(f"{table.targets[0]}{i}" for i in range(width))
    )
    kind = "classification" if classes else "regression"
    return Problem(name, kind, split, training, build, outputs, source=f"{name}, {len(y)} rows", hidden=hidden, columns=columns)


def perceptron(hidden: tuple[int, ...], *, activation: str = "relu", dropout: float = 0.0, head: str = "output") -> Build:
    """Linear layers with an activation, and dropout if its rate is above 0, between them, after flattening; `head` names the last."""

    def build(shape: tuple[int, ...], outputs: int) -> nn.Module:
        """The network for inputs of a shape."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten()) if len(shape) > 1 else OrderedDict()
        before = math.prod(shape)
        for i, width in enumerate(hidden, 1):
            layers[f"hidden{i}"], layers[f"{activation}{i}"], before = nn.Linear(before, width), ACTIVATIONS[activation](), width
            if dropout:
                layers[f"dropout{i}"] = nn.Dropout(dropout)
        layers[head] = nn.Linear(before, outputs)
        return nn.Sequential(layers)

    return build


def lenet(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions and two linear layers, for images."""
    channels, height, width = shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 20, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            hidden=nn.Linear(50 * (height // 4) * (width // 4), 128),
            relu3=nn.ReLU(),
            output=nn.Linear(128, outputs),
        )
    )


__getattr__ = renamed(__name__, {"Part": "Split"})
