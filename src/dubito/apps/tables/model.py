"""The fitted table: predictions in the user's units, notes on odd rows, and one file on disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.apps.tables.calibration import Scales, at_least, mixture
from dubito.apps.tables.columns import Encoder
from dubito.apps.tables.forest import Forest
from dubito.apps.tables.frames import Frame, Table, as_frame
from dubito.apps.tables.network import TableNetwork
from dubito.apps.tables.process import Process
from dubito.apps.tables.targets import class_positions, target_numbers
from dubito.apps.tables.training import gaussians
from dubito.apps.tables.trees import Trees
from dubito.evaluation import judge
from dubito.evaluation.recalibrate import Tempered
from dubito.model import Model
from dubito.model.likelihoods import Categorical, HeteroscedasticGaussian, HeteroscedasticStudentT
from dubito.model.priors import Normal
from dubito.posteriors import Samples
from dubito.posteriors.predictive import LatentMixture, Predictive, concatenate
from dubito.tensors import store, tree

PRIOR = 3.0  # standard deviation of the weights before they are divided by the root of a layer's inputs
ROWS = 4096  # predicted at a time
DOF = 4.0  # of a Student-t likelihood; how heavy the tails are, the map says
DOUBT = 0.9  # an odd row is at least as uncertain as this share of the rows in training

EXPERTS = {"process": Process, "trees": Trees, "forest": Forest}  # that may stand beside the networks
NAMES = {"process": "a Gaussian process", "trees": "boosted trees", "forest": "a forest of random trees"}

Kind = Literal["regression", "classification"]


@dataclass(frozen=True)
class Design:
    """The shape of the network."""

    numbers: int
    width: int
    outputs: int
    hidden: int = 128
    embed: bool = True
    tails: bool = False  # the noise of a regression is Student-t

    def model(self, kind: Kind) -> Model:
        """The model with new weights."""
        network = TableNetwork(self.numbers, self.width, self.outputs, hidden=self.hidden, embed=self.embed)
        noise = HeteroscedasticStudentT(dof=DOF) if self.tails else HeteroscedasticGaussian()
        return Model(network, noise if kind == "regression" else Categorical(), Normal(scale=PRIOR))


@dataclass(frozen=True)
class OutOfFold:
    """What the members that had not seen a row predicted for it: for abstention, drift, and conformal sets of one's own."""

    outputs: Tensor  # [R, N, C]: of the network, one of each repeat
    y: Tensor  # [N, T], standardized, or [N] classes
    uncertainty: Tensor  # [N, T] variances in standardized units, or [N] entropies, after calibration


@dataclass(frozen=True)
class TableModel:
    """A table fitted by `fit_table`.

    `predict(frame)` gives the calibrated predictive in the units of the target. `posterior` is what Bayes gave for the networks, before
    any map: `posterior.predict(model.inputs(frame))`, in standardized units. `before(model.inputs(frame))` has the other `experts` too:
    a Gaussian process ("process"), boosted trees ("trees") and random trees ("forest"). Trees have no posterior: that those of
    different folds disagree with each other, and with the other experts, counts as epistemic uncertainty, and the variance or the class
    probabilities that they predict as aleatoric.
    The map stretches the whole predictive, or tempers the class probabilities, so the split of the uncertainty in aleatoric and
    epistemic is that before the map: its shares are kept.

    `out_of_fold` and `scores` are of rows that the predicting members had not seen.
    """

    kind: Kind
    targets: tuple[str, ...]
    classes: tuple[str, ...]  # empty for a regression
    encoder: Encoder
    design: Design
    posterior: Samples
    map: Scales | Tempered
    shift: Tensor  # [T] float64: y = shift + scale * standardized
    scale: Tensor
    out_of_fold: OutOfFold
    scores: Mapping[str, float] = field(default_factory=dict)  # of the out-of-fold predictions, in the units of the target
    errors: Mapping[str, float] = field(default_factory=dict)  # standard errors of those that are means
    shares: Mapping[str, float] = field(default_factory=lambda: {"networks": 1.0})  # weights in the predictive before the map
    experts: Mapping[str, Any] = field(default_factory=dict)  # beside the networks, where the out-of-fold rows say that they help
    remarks: tuple[str, ...] = ()  # what a user should know: rows and columns that were left out, and the like

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the classes, or of the targets."""
        return self.classes or self.targets

    def inputs(self, frame: Table) -> Tensor:
        """A table as inputs of the network, [N, F]."""
        return torch.from_numpy(self.encoder.encode(self.read(frame)).x)

    def notes(self, frame: Table) -> list[str]:
        """What is odd about each row, "" for nothing: an empty cell or a word that training did not have, a number far outside."""
        return self.encoder.encode(self.read(frame)).notes

    def read(self, frame: Table) -> Frame:
        """The columns of a table, with its numbers written as those of the training rows were."""
        return as_frame(frame, self.encoder.commas)

    def predict(self, frame: Table) -> Predictive:
        """The calibrated predictive of every row, in the units of the target.

        A row with a note (see `notes`) is answered too, and is at least as uncertain as 90 % of the rows were in training.
        """
        return self.answer(frame)[0]

    def answer(self, frame: Table) -> tuple[Predictive, list[str]]:
        """The predictive of every row, and its note."""
        encoded = self.encoder.encode(self.read(frame))
        x, odd = torch.from_numpy(encoded.x), torch.from_numpy(encoded.odd)
        floor = self.out_of_fold.uncertainty.double().quantile(DOUBT, 0)
        parts = []
        for rows, strange in zip(x.split(ROWS), odd.split(ROWS), strict=True):
            p = at_least(self.map(self.before(rows)), floor, strange)
            parts.append(self.original(p))
        return concatenate(parts), encoded.notes

    def before(self, x: Tensor) -> LatentMixture:
        """The predictive before the map, in standardized units, for inputs of the network: that of the networks and the experts, each
        with its share. For numbers it is a mixture of Gaussians."""
        networks = self.posterior.predict(x) if self.classes else gaussians(self.posterior.predict(x))
        others = {name: expert.predict(x, networks.likelihood) for name, expert in self.experts.items()}
        parts = {"networks": networks, **others}
        return mixture(list(parts.values()), [self.shares[name] for name in parts])

    def original(self, p: Predictive) -> Predictive:
        """A predictive of standardized targets in the units of the target, in float64."""
        mixture = p.mixture
        if mixture is None or self.classes:
            return p
        spread = None if mixture.cov is None else mixture.cov.double()
        wide = replace(mixture, means=mixture.means.double(), cov=spread, weights=mixture.component_weights.double())
        return wide.rescaled(self.shift, self.scale)

    def encode_targets(self, columns: Mapping[str, Any]) -> Tensor:
        """Targets as numbers [N, T] in their own units, or as classes [N]; -1 for a class that training did not have."""
        return class_positions(columns[self.targets[0]], self.classes) if self.classes else target_numbers(columns, self.targets)

    def save(self, path: str | os.PathLike) -> None:
        """Write the model to one file, whole or not at all. It holds tensors and plain text, and no code."""
        assert self.posterior.weights is not None
        tensors = {"weights": self.posterior.weights, **{f"params.{name}": leaf for name, leaf in self.posterior.params.items()}}
        tensors |= {"out_of_fold.outputs": self.out_of_fold.outputs, "out_of_fold.y": self.out_of_fold.y}
        tensors |= {"out_of_fold.uncertainty": self.out_of_fold.uncertainty, "shift": self.shift, "scale": self.scale}
        tensors |= {f"{name}.{part}": leaf for name, one in self.experts.items() for part, leaf in one.tensors().items()}
        fitted = {"factors": self.map.factors, "weights": self.map.weights} if isinstance(self.map, Scales) else {}
        fitted = fitted or {"temperature": getattr(self.map, "temperature", 1.0)}
        meta = {
            "kind": "table", "target": self.kind, "targets": self.targets, "classes": self.classes, "encoder": self.encoder.to_json(),
            "design": vars(self.design), "map": {**fitted, "n": self.map.n}, "scores": list(judge.finite(self.scores).items()),
            "shares": dict(self.shares), "errors": list(judge.finite(self.errors).items()), "remarks": self.remarks,
        }  # fmt: skip
        store.write(path, tensors, meta)

    @staticmethod
    def load(path: str | os.PathLike) -> TableModel:
        """Read what `save` wrote."""
        tensors, meta = store.read(path)
        if meta.get("kind") != "table":
            raise store.FileError(f"{path}: written by dubito, but not a fitted table")
        design, kind = Design(**meta["design"]), meta["target"]
        params = tree.under(tensors, "params.")
        fitted: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in meta["map"].items()}
        chosen = Tempered(**fitted) if "temperature" in fitted else Scales(**fitted)
        return TableModel(
            kind=kind,
            targets=tuple(meta["targets"]),
            classes=tuple(meta["classes"]),
            encoder=Encoder.from_json(meta["encoder"]),
            design=design,
            posterior=Samples(design.model(kind), params, {}, weights=tensors["weights"]),
            map=chosen,
            shift=tensors["shift"],
            scale=tensors["scale"],
            out_of_fold=OutOfFold(*(tensors[f"out_of_fold.{name}"] for name in ("outputs", "y", "uncertainty"))),
            scores={name: math.nan if value is None else value for name, value in meta["scores"]},
            errors={name: math.nan if value is None else value for name, value in meta["errors"]},
            shares={name: meta["shares"][name] for name in ("networks", *EXPERTS) if name in meta["shares"]},
            experts={name: kind.of(tree.under(tensors, f"{name}.")) for name, kind in EXPERTS.items() if name in meta["shares"]},
            remarks=tuple(meta["remarks"]),
        )

    def summary(self) -> str:
        """What was fitted, and how good its out-of-fold predictions are, as text."""
        rows, members = len(self.out_of_fold.y), len(self.posterior)
        names = {"networks": f"{members} networks", **NAMES}
        weights = ", ".join(f"{names[name]} ({share:.0%})" for name, share in self.shares.items())
        lines = [f"{self.kind} of {', '.join(self.targets)} by {weights}, fitted to {rows} rows"]
        lines += [f"{len(self.encoder.columns)} columns as {self.encoder.width} inputs"]
        lines += [f"  {name:<10} {value:.4g}" for name, value in self.scores.items()]
        lines += [f"Note: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()
