"""The recipe of a fitted folder: all that is needed to rebuild the model and to read further data in the same way.

It is a JSON file with a checksum. It never chooses code to run: if the network was the user's own, its name is recorded, but has to be
given again on the command line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import torch
from torch import Tensor

import dubito
from dubito.cli.commands.errors import UsageError
from dubito.cli.commands.network import Network
from dubito.inference.presets import with_prior
from dubito.model import Model
from dubito.model.likelihoods import Categorical, Gaussian
from dubito.model.priors import Normal
from dubito.posteriors.predictive import Predictive
from dubito.tensors.store import atomic_write

FORMAT = 1
NAME = "fit.json"
ROUNDING = 1e-14  # relative range below which a column counts as constant: 0.3 and 0.1 + 0.2


@dataclass(frozen=True)
class Scaling:
    """Mean and standard deviation of each column of the training rows."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]

    @staticmethod
    def of(values: Tensor) -> Scaling:
        """From values [N, K]; a constant column is only shifted. Images and the like have one mean and scale for all values."""
        wide = values.double().reshape(-1, 1) if values.ndim > 2 else values.double()
        low, high = wide.amin(0), wide.amax(0)
        constant = high - low <= ROUNDING * low.abs().maximum(
            high.abs()
        )  # rounding may make the deviation of a constant positive
        scale = wide.std(0, correction=0)
        scale = scale.masked_fill(constant | (scale == 0), 1.0)  # squares of tiny numbers underflow to 0
        return Scaling(tuple(wide.mean(0).tolist()), tuple(scale.tolist()))

    def apply(self, values: Tensor) -> Tensor:
        """Standardized values in float32. They are rounded after the shift, or Unix times would lose their minutes."""
        mean, scale = (torch.tensor(each, dtype=torch.float64, device=values.device) for each in (self.mean, self.scale))
        return ((values.double() - mean) / scale).float()

    def undo(self, p: Predictive) -> Predictive:
        """The predictive of standardized targets in the original units, in float64."""
        mean, scale = (torch.tensor(each, dtype=torch.float64, device=p.means.device) for each in (self.mean, self.scale))
        return _double(p).rescaled(mean, scale)


@dataclass(frozen=True)
class Recipe:
    """How a posterior was fitted."""

    kind: Literal["regression", "classification"]
    shape: tuple[int, ...]  # of one input
    features: tuple[str, ...]  # names of the input columns; empty if x is not a table
    targets: tuple[str, ...]
    outputs: tuple[str, ...]  # names of the outputs of the network: classes, or targets
    x: Scaling
    y: Scaling | None  # regression
    network: Network
    prior_scale: float | None  # of N(0, prior_scale^2) on all weights
    method: str
    training: dict[str, Any]
    metrics: dict[str, float | None] = field(default_factory=dict)  # on the held-out rows
    fill: dict[str, float] = field(default_factory=dict)  # replacement of missing numbers, by column
    default_prior: Literal["normal", "fan_in"] = (
        "normal"  # without a scale: N(0, 1), as in version 0.1, or the default of `Model`
    )

    def model(self, network: str | None) -> Model:
        """The model with new weights. `network` is the factory that the user allows to be imported."""
        if self.network.network is None and network is not None:
            raise UsageError(f"--network {network}: this folder holds an MLP: leave out --network")
        if self.network.network is not None and network is None:
            name = self.network.network
            raise UsageError(f"the network was made by {name}; files must not choose code to run, so give --network {name} again")
        spec = self.network if network is None else Network(network=network)
        regression = self.kind == "regression"
        likelihood = Gaussian(outputs=len(self.outputs)) if regression else Categorical()
        made = with_prior(spec.build(self.shape, len(self.outputs)), likelihood, self.prior_scale)
        return made if self.prior_scale or self.default_prior == "fan_in" else replace(made, prior=Normal())

    def write(self, path: Path) -> None:
        """Write the recipe as JSON with a checksum."""
        content = {"format": FORMAT, "dubito": dubito.__version__, **asdict(self)}
        with open_atomically(path) as file:
            json.dump({**content, "checksum": _checksum(content)}, file, indent=2)
            file.write("\n")

    @staticmethod
    def read(path: Path) -> Recipe:
        """Read and check a recipe."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            checksum = content.pop("checksum")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path}: damaged, or not written by `dubito fit`") from None
        if not isinstance(content.get("format"), int):
            raise UsageError(f"{path}: damaged, or not written by `dubito fit`")
        if content["format"] > FORMAT:
            raise UsageError(f"{path}: written by a newer dubito, {content.get('dubito')}; upgrade to read it")
        if checksum != _checksum(content):
            raise UsageError(f"{path}: the contents do not match their checksum; the file was changed or damaged after writing")
        values = {item.name: _tupled(content[item.name]) for item in fields(Recipe) if item.name in content}
        for name, kind in (("x", Scaling), ("y", Scaling), ("network", Network)):
            values[name] = values[name] and kind(**values[name])
        return Recipe(**values)

    def difference(self, other: Recipe) -> list[str]:
        """What is not the same in an earlier recipe, in words; other statistics are named only where nothing else explains them."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        changed = [key for key in mine if mine[key] != theirs.get(key)]
        causes = [key for key in changed if not key.startswith(("x.", "y."))]
        return [f"{key} ({_contrast(str(theirs.get(key)), str(mine[key]))})" for key in causes or changed]


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _tupled(value: Any) -> Any:
    """Lists of JSON as the tuples of the recipe."""
    if isinstance(value, dict):
        return {key: _tupled(item) for key, item in value.items()}
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _contrast(was: str, now: str) -> str:
    """Two texts that differ; long ones from the field in which they differ."""
    at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    begin = max((found.start() for found in re.finditer(r"\w+=", was) if found.start() <= at), default=0)
    begin = begin if at - begin < 40 else at - 20

    def _short(text: str) -> str:
        if len(text) <= 60:
            return text
        part = ("..." if begin else "") + text[begin:]
        return part if len(part) <= 60 else part[:57] + "..."

    return f"was {_short(was)}, is {_short(now)}"


def _double(p: Predictive) -> Predictive:
    """The same predictive with every number in float64."""
    values = {item.name: getattr(p, item.name) for item in fields(cast(Any, p))}
    wide = {name: _wide(value) for name, value in values.items() if isinstance(value, Tensor | dict)}
    return replace(cast(Any, p), **wide)


def _wide(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _wide(leaf) for name, leaf in value.items()}
    return value.double() if value.is_floating_point() else value


@contextmanager
def open_atomically(path: Path) -> Iterator[TextIO]:
    """A text file that is written completely or not at all."""
    with atomic_write(path) as scratch, open(scratch, "w", encoding="utf-8", newline="") as file:
        yield file
