"""How predictions bear up as inputs move away from the training data: metrics at every level of a shift."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dubito.evaluation.judge import score
from dubito.evaluation.judge.stream import predict_in_batches, predictor
from dubito.evaluation.metrics import METRICS
from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.shift.attack import Bounds, Norm, Transform, fgsm, pgd
from dubito.evaluation.shift.attack import check as check_attack
from dubito.evaluation.shift.corruptions import COMMON, check, corrupt, rotate
from dubito.posteriors import Posterior
from dubito.tensors.checks import at_least, one_of, require

CLASSES = ("accuracy", "nll", "ece", "confidence", "epistemic")  # what is followed unless other metrics are named
NUMBERS = ("nll", "rmse", "coverage", "epistemic")


class Shift(ABC):
    """A family of ways to change inputs: kinds by name, each at several levels; level 0 is always the input as it is."""

    kinds: tuple[str, ...]
    levels: tuple[float, ...]
    axis: str  # what a level is, in words

    @abstractmethod
    def apply(
        self, x: Tensor, kind: str, level: float, *, y: Array, posterior: Posterior, transform: Transform | None, seed: int
    ) -> Tensor:
        """The inputs so changed."""

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Raise a ValueError before any work where some kind does not go with these inputs."""


@dataclass(frozen=True)
class Corruptions(Shift):
    """Common corruptions, the 15 by default, at severities 1 to 5; x are images in [0, 1]."""

    kinds: tuple[str, ...] = tuple(COMMON)
    levels: tuple[float, ...] = (1, 2, 3, 4, 5)
    axis: str = field(default="severity", kw_only=True)

    def check(self, x: Tensor) -> None:
        """Every corruption must be for these images at every severity."""
        for kind in self.kinds:
            for level in self.levels:
                check(x, kind, int(level) if level == int(level) else level)  # pyright: ignore[reportArgumentType]

    def apply(
        self, x: Tensor, kind: str, level: float, *, y: Array, posterior: Posterior, transform: Transform | None, seed: int
    ) -> Tensor:
        """The images at that severity."""
        return corrupt(x, kind, severity=int(level), seed=seed)


@dataclass(frozen=True)
class Rotations(Shift):
    """Images turned, by degrees; what comes in from outside is `fill`."""

    levels: tuple[float, ...] = (15, 30, 45, 60, 75, 90, 105, 120, 135, 150, 165, 180)
    fill: float = 0.0
    kinds: tuple[str, ...] = field(default=("rotation",), kw_only=True)
    axis: str = field(default="degrees", kw_only=True)

    def check(self, x: Tensor) -> None:
        """The inputs must be images."""
        rotate(x[:1], 0.0)

    def apply(
        self, x: Tensor, kind: str, level: float, *, y: Array, posterior: Posterior, transform: Transform | None, seed: int
    ) -> Tensor:
        """The images turned by `level` degrees."""
        return rotate(x, level, fill=self.fill)


@dataclass(frozen=True)
class Attacks(Shift):
    """FGSM and PGD of growing size against the posterior that is judged; see `fgsm` and `pgd` for the other fields."""

    levels: tuple[float, ...]  # sizes
    bounds: Bounds
    kinds: tuple[str, ...] = field(default=("fgsm", "pgd"), kw_only=True)
    norm: Norm = field(default="linf", kw_only=True)
    steps: int = field(default=10, kw_only=True)
    restarts: int = field(default=1, kw_only=True)
    how: str | None = field(default=None, kw_only=True)
    draws: int | None = field(default=None, kw_only=True)
    batch_size: int = field(default=256, kw_only=True)
    axis: str = field(default="size of the attack", kw_only=True)

    def __post_init__(self):
        for kind in self.kinds:
            one_of(("fgsm", "pgd"), kind=kind)

    def check(self, x: Tensor) -> None:
        """The inputs must lie within the bounds."""
        check_attack(x, min(self.levels), self.bounds, self.norm)

    def apply(
        self, x: Tensor, kind: str, level: float, *, y: Array, posterior: Posterior, transform: Transform | None, seed: int
    ) -> Tensor:
        """Inputs attacked with size `level`."""
        shared = {name: getattr(self, name) for name in ("bounds", "norm", "how", "draws", "batch_size")}
        shared |= {"size": level, "seed": seed, "transform": transform}
        if kind == "fgsm":
            return fgsm(posterior, x, y, **shared)
        return pgd(posterior, x, y, steps=self.steps, restarts=self.restarts, **shared)


@dataclass(frozen=True)
class Sweep:
    """What a posterior scores at every level of every kind of shift: `scores[kind, level][metric]`.

    The clean inputs are under every kind at level 0. `dubito.report.shift` makes tables and pictures of one or several.
    """

    axis: str
    kinds: tuple[str, ...]
    levels: tuple[float, ...]  # 0 first
    metrics: tuple[str, ...]
    scores: dict[tuple[str, float], dict[str, float]]

    def over_kinds(self, metric: str, level: float) -> list[float]:
        """The metric at a level, one for each kind."""
        return [self.scores[kind, level][metric] for kind in self.kinds]

    def mean(self, metric: str, level: float | None = None) -> float:
        """The mean over kinds at a level; or over all levels but 0: one number for a whole sweep."""
        levels = [level for level in self.levels if level] if level is None else [level]
        return statistics.fmean(value for level in levels for value in self.over_kinds(metric, level))

    @property
    def rows(self) -> list[dict[str, str | float]]:
        """Plain rows, for JSON or a data frame."""
        return [{"kind": kind, "level": level, **found} for (kind, level), found in self.scores.items()]


def sweep(
    posterior: Posterior,
    x: Tensor,
    y: Array,
    *,
    shift: Shift | Sequence[str] | Literal["corruptions", "rotations"] = "corruptions",
    transform: Transform | None = None,
    metrics: Sequence[str] | None = None,
    how: str | None = None,
    draws: int | None = None,
    seed: int = 0,
    batch_size: int = 500,
    memory: float | None = None,
) -> Sweep:
    """Metrics of a posterior on inputs x, y that are shifted further and further.

    `shift` is "corruptions" (the 15 common ones), "rotations", names of corruptions, or a `Corruptions`, `Rotations` or `Attacks` with
    levels of your own. The network is given transform(x): x are the inputs before they are normalized or flattened, and it is these
    that are shifted. By default accuracy, NLL, ECE, confidence and epistemic uncertainty for classes, and NLL, RMSE, coverage and
    epistemic uncertainty (a variance) else. `how`, `draws` and `seed` are those of `predict`; every posterior that is swept with
    the same seed sees the same corrupted inputs. Choose no threshold and no temperature by what comes out: these are test data.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), dubito.Categorical())
    >>> point = dubito.posteriors.Point(model, model.parameters(), model.buffers())
    >>> found = sweep(point, torch.rand(8, 1, 8, 8), torch.arange(8), shift=["contrast", "fog"])
    >>> found.levels, sorted(found.scores["fog", 5])
    ((0, 1, 2, 3, 4, 5), ['accuracy', 'confidence', 'ece', 'epistemic', 'nll'])
    """
    shifts = _shift(shift)
    usual = CLASSES if posterior.model.likelihood.discrete else NUMBERS
    names = usual if metrics is None else tuple(metrics)
    for name in names:
        one_of([*METRICS, "epistemic", "confidence"], metric=name)
    at_least(1, batch_size=batch_size)
    y = _targets(x, y)
    shifts.check(x)
    targets = y.cpu()
    predict = predictor(posterior, how=how, draws=draws, memory=memory, seed=seed)

    def scored(inputs: Tensor) -> dict[str, float]:
        """The metrics on inputs that are shifted so."""
        return score(predict_in_batches(predict, inputs, batch_size, transform), targets, names)

    levels = tuple(level for level in shifts.levels if level)
    clean = scored(x)
    scores: dict[tuple[str, float], dict[str, float]] = {}
    for kind in shifts.kinds:
        scores[kind, 0] = dict(clean)
        for level in levels:
            scores[kind, level] = scored(shifts.apply(x, kind, level, y=y, posterior=posterior, transform=transform, seed=seed))
    return Sweep(shifts.axis, shifts.kinds, (0, *levels), names, scores)


def _targets(x: Tensor, y: Array | None) -> Tensor:
    if not isinstance(x, Tensor) or y is None:
        given = "no targets" if y is None else f"a {type(x).__name__}"
        raise TypeError(f"x must be one tensor, and y the targets of all its rows; got {given}")
    y = torch.as_tensor(y)
    require(len(x) == len(y) and len(x), f"there are {len(x)} inputs for {len(y)} targets: give one for each, and at least one")
    return y


def _shift(shift: Shift | Sequence[str] | str) -> Shift:
    if isinstance(shift, str):
        require(
            shift in NAMED,
            f"shift is 'corruptions', 'rotations', a list of corruptions, or an object such as Attacks(...); got {shift!r}",
        )
        return NAMED[shift]()
    shifts = shift if isinstance(shift, Shift) else Corruptions(tuple(shift))
    require(shifts.kinds and any(shifts.levels), "a shift must have at least one kind, and one level other than 0")
    return shifts


NAMED = {"corruptions": Corruptions, "rotations": Rotations}
