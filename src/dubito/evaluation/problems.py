"""What methods are compared on: data cut by a seed, a network that suits them, and how long to train it."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.evaluation import data
from dubito.evaluation.data.cifar10 import CLASSES
from dubito.evaluation.data.examples import Examples, Split
from dubito.evaluation.data.root import locate
from dubito.evaluation.data.uci import FOLDERS
from dubito.inference.presets import Training
from dubito.tensors import randomness, store
from dubito.tensors.checks import require

# Not tuned on test images: four-fold cross-validation on the training images (seed 0) is flat around these, but for `walk`, which
# is best here and too fast at twice this.
DIGITS = Training(epochs=60, learning_rate=3e-3, batch_size=64, prior_scale=3.0, dropout=0.2, damping=1000.0, walk=0.4)
# The training of images and of tables has the defaults that networks of this size are usually given; they were chosen on no test data.
IMAGES = Training(epochs=20, learning_rate=1e-3, batch_size=128, prior_scale=1.0, dropout=0.2, damping=100.0, walk=0.05)
TABLES = Training(epochs=100, learning_rate=1e-2, batch_size=64, prior_scale=1.0, dropout=0.05, damping=0.0, walk=3e-3, clip=1.0)
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

Build = Callable[[tuple[int, ...], int], nn.Module]  # (shape of an input, outputs) -> a network, from the global generator


class Part(NamedTuple):
    """What a method is given with one seed. A regression is trained on standardized targets and judged in their own units."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor  # in its own units
    shift: Tensor | None  # y = shift + scale * standardized, of a regression
    scale: Tensor | None
    unfamiliar: Mapping[str, Tensor]  # inputs of other kinds, by name

    @property
    def checksum(self) -> str:
        """A hash of all tensors."""
        tensors = {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}
        return store.checksum({**tensors, **{f"unfamiliar {name}": x for name, x in self.unfamiliar.items()}})


@dataclass(frozen=True)
class Problem:
    """A data set as methods are compared on it. `part(seed)` is the same for the same seed."""

    name: str
    kind: Literal["classification", "regression"]
    part: Callable[[int], Part] = field(repr=False)
    training: Training
    build: Build = field(repr=False)
    outputs: tuple[str, ...]  # classes, or targets
    source: str = field(default="", kw_only=True)  # where the data come from, in words
    splits: int | None = field(default=None, kw_only=True)  # how many published splits there are; a seed is the number of one
    people: Tensor | None = field(default=None, kw_only=True, repr=False)  # [N] entropy of people's answers to the test inputs
    hidden: tuple[int, ...] | None = field(default=None, kw_only=True)  # of the default network, where that is a perceptron

    @property
    def stackable(self) -> bool:
        """Whether fits of all splits can be run as one, since the splits are of one size and the networks small."""
        return self.splits is not None and self.hidden is not None

    def limited(self, train: int | None, test: int | None) -> Problem:
        """The same with at most so many examples, drawn at random, since rows often come sorted by their class: of the training part
        by the seed, of the test part (and of what is unfamiliar) the same with all seeds."""
        if train is None and test is None:
            return self

        def part(seed: int) -> Part:
            """The split of a seed, with fewer rows."""
            whole = self.part(seed)
            learn, rows = some(len(whole.x_train), train, seed), some(len(whole.x_test), test)
            return whole._replace(
                x_train=whole.x_train[learn],
                y_train=whole.y_train[learn],
                x_test=whole.x_test[rows],
                y_test=whole.y_test[rows],
                unfamiliar={name: x[some(len(x), test)] for name, x in whole.unfamiliar.items()},
            )

        return replace(self, part=part, people=None if self.people is None else self.people[some(len(self.people), test)])


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
    >>> given.kind, given.part(0).x_train.shape, len(given.outputs)
    ('classification', torch.Size([899, 1, 8, 8]), 10)
    """
    if name.startswith("uci:"):
        if unfamiliar:
            raise ValueError(
                f"{name} is a table, and {unfamiliar[0]} is none with its inputs: give an NPZ file of such inputs, or none"
            )
        return _uci(name)
    require(name in KNOWN, f"no data set is called {name!r}; there are {', '.join(KNOWN)}, and CSV and NPZ files of your own")
    if name == "digits":
        return _digits(unfamiliar)
    return _images(name, unfamiliar)


def _digits(unfamiliar: tuple[str, ...]) -> Problem:
    @lru_cache(maxsize=8)
    def part(seed: int) -> Part:
        """Half of the images to train on, by the seed."""
        split = data.digits(seed=seed, test=0.5)  # half, so that there are errors to look at
        return Part(*split, None, None, others(unfamiliar, tuple(split.x_train.shape[1:])))

    source = "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), CC BY 4.0, from scikit-learn"
    names = tuple(str(c) for c in range(10))
    return Problem("digits", "classification", part, DIGITS, perceptron((128, 128)), names, source=source, hidden=(128, 128))


def _images(name: str, unfamiliar: tuple[str, ...]) -> Problem:
    read = IMAGE_SETS[name]
    train, test = read("train"), read("test")
    strange = others(unfamiliar, tuple(train.x.shape[1:]))
    # one and the same split for all seeds, which then differ in the start and the course of the training
    whole = Part(*train, *test, None, None, strange)
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
        raise ValueError(
            f"{names[0]} holds images, and the inputs here are of the shape {list(shape)}: give a file of such inputs"
        )
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


def standardized(split: Split, unfamiliar: Mapping[str, Tensor] | None = None, *, classes: bool = False) -> Part:
    """A split of a table, shifted and scaled by its training part: inputs, and the targets of a regression.

    What the network sees is float32; the test targets and the way to their units keep their digits.
    """
    if classes:
        inputs = data.standardize(Split(split.x_train, split.x_train[:, :1], split.x_test, split.x_test[:, :1]))
        targets = (split.y_train, split.y_test, None, None)
    else:
        inputs = data.standardize(split)
        targets = (inputs.y_train.float(), split.y_test, inputs.y_mean, inputs.y_scale)
    y_train, y_test, shift, scale = targets
    strange = {}
    for name, x in (unfamiliar or {}).items():
        moved = data.standardize(Split(split.x_train, split.x_train[:, :1], x, x[:, :1]))
        strange[name] = moved.x_test.float()
    return Part(inputs.x_train.float(), y_train, inputs.x_test.float(), y_test, shift, scale, strange)


def of_table(name: str, found: data.Table, *, held_out: float = 0.2, unfamiliar: Mapping[str, Tensor] | None = None) -> Problem:
    """A user's own table. Which rows are held out for testing differs with the seed.

    >>> table = data.Table(torch.randn(10, 2), torch.arange(10) % 2, ("a", "b"), ("y",), ("no", "yes"))
    >>> of_table("mine.csv", table).part(0).x_test.shape
    torch.Size([2, 2])
    """
    y, classes, strange = found.y, bool(found.classes), unfamiliar or {}
    if y is None:
        raise ValueError("a table to compare methods on has targets: name the column to predict")
    held = round(held_out * len(y))
    both = f"a share of {len(y)} rows that leaves some on both sides is to be held out, such as 0.2; got {held_out:g}"
    require(0 < held < len(y), both)

    def part(seed: int) -> Part:
        """The split of a seed, standardized where x is a table."""
        order = torch.randperm(len(y), generator=randomness.generator("cpu", seed, "held out"))
        learn, test = order[held:].sort().values, order[:held].sort().values
        split = Split(found.x[learn], y[learn], found.x[test], y[test])
        if found.x.ndim == 2:
            return standardized(split, strange, classes=classes)
        return _as_it_is(split, strange, classes=classes)

    large = found.x.ndim == 4 and found.x.shape[1] in (1, 3) and min(found.x.shape[2:]) >= 16
    build, hidden = (lenet, None) if large else (perceptron((64, 64)), (64, 64))
    training = IMAGES if large else TABLES._replace(damping=100.0 if classes else 0.0)
    kind = "classification" if classes else "regression"
    outputs = found.classes or _output_names(found.targets[0], y.shape[1])
    return Problem(name, kind, part, training, build, outputs, source=f"{name}, {len(y)} rows", hidden=hidden)


def _as_it_is(split: Split, unfamiliar: Mapping[str, Tensor], *, classes: bool) -> Part:
    """A split of images and the like, which are not standardized; the targets of a regression are."""
    far = {name: x.float() for name, x in unfamiliar.items()}
    x_train, y_train, x_test, y_test = split.x_train.float(), split.y_train, split.x_test.float(), split.y_test
    if classes:
        return Part(x_train, y_train, x_test, y_test, None, None, far)
    flat = data.standardize(Split(y_train, y_train, y_test, y_test))
    return Part(x_train, flat.y_train.float(), x_test, y_test, flat.y_mean, flat.y_scale, far)


def _output_names(target: str, width: int) -> tuple[str, ...]:
    return (target,) if width == 1 else tuple(f"{target}{i}" for i in range(width))


def perceptron(hidden: tuple[int, ...]) -> Build:
    """Linear layers with ReLU between them, after flattening."""

    def build(shape: tuple[int, ...], outputs: int) -> nn.Module:
        """The network for inputs of a shape."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten()) if len(shape) > 1 else OrderedDict()
        before = math.prod(shape)
        for i, width in enumerate(hidden, 1):
            layers[f"hidden{i}"], layers[f"relu{i}"], before = nn.Linear(before, width), nn.ReLU(), width
        layers["output"] = nn.Linear(before, outputs)
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
