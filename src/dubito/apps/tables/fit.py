"""From a table to calibrated predictions, without a setting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.apps.tables import process, trees
from dubito.apps.tables.calibration import Scales, log_density, mixture, temperature
from dubito.apps.tables.cells import Raw, is_numeric
from dubito.apps.tables.columns import Encoder
from dubito.apps.tables.forest import Forest
from dubito.apps.tables.frames import as_frame, with_targets
from dubito.apps.tables.model import NAMES, Design, Kind, OutOfFold, TableModel
from dubito.apps.tables.process import Process
from dubito.apps.tables.targets import class_names, class_positions, detect, target_numbers
from dubito.apps.tables.training import CrossFit, CrossFitted, best_weights, deal
from dubito.apps.tables.trees import Trees
from dubito.evaluation import judge
from dubito.evaluation.recalibrate import Tempered
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors.checks import one_of, require
from dubito.tensors.randomness import generator

FEWEST = 10  # rows
FOLDS = 10  # of the experts beside the networks
WIDE = 1000  # numbers beyond which they are not embedded
WORK = 2e12  # products of a training that are enough: fewer steps are made where each costs more
LEAST = 300  # steps
HEAVY = 2.0  # kurtosis, in units of a Gaussian's, from which errors have heavy tails
FAINT = 0.05  # weight below which a Gaussian process or trees are left out
SMALL = 100  # rows below which a remark is made
TRAINING = 0.6  # of a budget, for the networks


def fit_table(
    table: Any,
    target: Any = "y",
    *,
    kind: Literal["auto", "regression", "classification"] = "auto",
    ignore: tuple[str, ...] = (),
    budget: float | None = None,
    seed: int = 0,
    show: bool | None = None,
) -> TableModel:
    """Fit a table, and calibrate its predictions, without a setting.

    Ten networks are trained, each of which holds out another fifth of the rows and is stopped where these are predicted best. Every
    row is thus predicted by two networks that have not seen it, and with these out-of-fold predictions the predictive is calibrated.
    Boosted trees, and in a regression a Gaussian process, stand beside the networks, with the weights that their own out-of-fold
    predictions deserve. So all rows are used for all purposes, and none is predicted by what learned from it. Where the errors have
    heavy tails, the networks are trained again with a Student-t likelihood, and the better ones are kept.

    Args:
        table: a DataFrame, a dict of columns, an array [N, F], or the path of a file.
        target: the column to predict (several for a regression), or an array of values.
        kind: of the target; "auto": text and a few whole numbers are classes.
        ignore: columns that are no inputs.
        budget: seconds that the fit may take: networks train for three fifths of them at the most, and the Gaussian process and the
            trees are left out where the rest does not suffice. None takes as long as the size of the table suggests.
        seed: of everything random.
        show: a progress bar; None: on a terminal.

    >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
    >>> model = fit_table(x, target=(3 * x).sin().flatten(), budget=2.0)
    >>> model.predict(torch.tensor([[0.5]])).mean.shape
    torch.Size([1, 1])
    """
    one_of(("auto", "regression", "classification"), kind=kind)
    require(budget is None or isinstance(budget, int | float), f"budget is a number of seconds; got {budget!r}")
    started = time.monotonic()
    data = prepare(table, target, kind, ignore)
    end = math.inf if budget is None else started + budget
    training = None if budget is None else TRAINING * budget
    settings = CrossFit(budget=training, seed=seed, show=show)
    # classes are mostly smooth in the numbers, and where they are not, trees stand beside the networks
    embed = data.kind == "regression" and data.encoder.n_numbers <= WIDE
    design = Design(data.encoder.n_numbers, data.encoder.width, data.outputs, embed=embed)
    fitted = _networks(design, data, settings)
    if data.kind == "regression" and _heavy(fitted.gaussians, data.standardized):
        left = None if training is None else training - (time.monotonic() - started)
        if left is None or left > 0.5 * (training or 0.0):
            other = replace(design, tails=True)
            refitted = _networks(other, data, replace(settings, budget=left))
            if _calibrated_score(refitted.gaussians, data) > _calibrated_score(fitted.gaussians, data):
                design, fitted = other, refitted
    return _calibrated(data, design, fitted, seed, end)


class Prepared(NamedTuple):
    """A table as inputs and targets."""

    kind: Kind
    targets: tuple[str, ...]
    classes: tuple[str, ...]
    encoder: Encoder
    x: Tensor  # [N, F]
    y: Tensor  # [N, T] in the units of the target, or [N] classes
    standardized: Tensor  # [N, T], or [N] classes
    shift: Tensor
    scale: Tensor
    remarks: tuple[str, ...]

    @property
    def outputs(self) -> int:
        """Of the network: classes, or a mean and a log variance for each target."""
        return len(self.classes) or 2 * self.y.shape[1]


def prepare(table: Any, target: Any, kind: str, ignore: Sequence[str]) -> Prepared:
    """Read a table, leave out what is of no use, and encode the rest."""
    frame = as_frame(table)
    inputs, targets = with_targets(frame, target)
    for name in ignore:
        require(name in inputs, f"ignore: the table has no column {name!r}")
    inputs = {name: raw for name, raw in inputs.items() if name not in ignore}
    require(inputs, "no column is left for the inputs")
    chosen = _kind(targets, kind)
    y, classes = _targets(targets, chosen)
    kept = (y >= 0) if classes else y.isfinite().all(1)
    remarks = [] if bool(kept.all()) else [f"{int((~kept).sum())} rows without a target were left out"]
    y, inputs = y[kept], {name: _select(raw, kept) for name, raw in inputs.items()}
    require(len(y) >= FEWEST, f"at least {FEWEST} rows with a target are needed; got {len(y)}")
    encoder = replace(Encoder.fit(inputs), commas=dict(frame.commas))
    remarks += [f"column {name} was left out: {why}" for name, why in encoder.left_out.items()]
    remarks += [f"{len(y)} rows are few: the calibration is rough"] if len(y) < SMALL else []
    x = torch.from_numpy(encoder.encode(inputs).x)
    shift, scale = _units(y, chosen)
    standardized = y if classes else ((y - shift) / scale).float()
    return Prepared(chosen, tuple(targets), classes, encoder, x, y, standardized, shift, scale, tuple(remarks))


def _networks(design: Design, data: Prepared, settings: CrossFit) -> CrossFitted:
    model = design.model(data.kind)
    return replace(settings, steps=_steps(model.network, settings, len(data.x))).fit(model, data.x, data.standardized)


def _heavy(p: LatentMixture, y: Tensor) -> bool:
    """Whether the out-of-fold errors have heavier tails than a Gaussian of the predicted width: then a Student-t is worth a try."""
    fix = Scales.fit(p, y)
    second, fourth = (sum(w * s**k for s, w in zip(fix.factors, fix.weights, strict=True)) for k in (2, 4))
    return fourth > HEAVY * second**2


def _calibrated_score(p: LatentMixture, data: Prepared) -> float:
    """The mean log score of out-of-fold predictions after their calibration."""
    return float(log_density(Scales.fit(p, data.standardized)(p), data.standardized).mean())


def _calibrated(data: Prepared, design: Design, fitted: CrossFitted, seed: int, end: float) -> TableModel:
    """The model: networks, other experts beside them where these help, and the map that the out-of-fold predictions give."""
    y, remarks = data.standardized, data.remarks
    if fitted.done < 1:
        done = f"the budget ended the training after {fitted.done:.0%} of its steps"
        remarks = (*remarks, f"{done}: a larger one may give better predictions")
    experts, late = _experts(data, fitted, seed, end)
    if late:
        left_out = ", ".join(NAMES[name] for name in late)
        remarks = (*remarks, f"the budget left no time for {left_out}: a larger one may give better predictions")
    shares = _shares({name: expert.out_of_fold for name, expert in experts.items()}, y)
    before = mixture([experts[name].out_of_fold for name in shares], list(shares.values()))
    fix = _map(before, y)
    after = fix(before)
    model = TableModel(
        kind=data.kind,
        targets=data.targets,
        classes=data.classes,
        encoder=data.encoder,
        design=design,
        posterior=fitted.posterior,
        map=fix,
        shift=data.shift,
        scale=data.scale,
        out_of_fold=OutOfFold(fitted.outputs, y, after.uncertainty.total),
        shares=shares,
        experts={name: experts[name].fitted for name in shares if name != "networks"},
        remarks=remarks,
    )
    return _scored(model, after, data.y)


class Expert(NamedTuple):
    """What predicts, and its predictive of every row in training, by what has not seen the row."""

    fitted: Any
    out_of_fold: LatentMixture


def _experts(data: Prepared, fitted: CrossFitted, seed: int, end: float) -> tuple[dict[str, Expert], list[str]]:
    """The networks, those that are worth a try beside them and are ready in time, and the names of those that are not."""
    networks = fitted.predictive if data.classes else fitted.gaussians
    experts = {"networks": Expert(fitted.posterior, networks)}
    rows, width = data.x.shape
    fold = deal(data.standardized, FOLDS, generator("cpu", seed, "experts"))
    candidates: dict[str, Callable[[], tuple[Any, LatentMixture]]] = {}
    x, y, classes = data.x, data.standardized, len(data.classes)
    if not classes and width <= process.WIDEST and rows <= process.LONGEST:
        candidates["process"] = lambda: Process.fit(x, y, fold, seed, end)
    if rows * width <= trees.LARGEST and all(len(data.y[fold != k].unique()) >= classes for k in range(FOLDS)):
        candidates["trees"] = lambda: Trees.fit(x, y, fold, classes, seed, end)
        candidates["forest"] = lambda: Forest.fit(x, y, fold, classes, seed, end)
    late = []
    for name, fit in candidates.items():
        try:
            experts[name] = Expert(*fit())
        except TimeoutError:
            late.append(name)
    return experts, late


def _shares(experts: Mapping[str, LatentMixture], y: Tensor) -> dict[str, float]:
    """The weights of the mixture of experts with the best log score out of fold, each calibrated; without those that hardly help."""
    scores = {name: _log_scores(_map(p, y)(p), y) for name, p in experts.items()}
    while True:
        shares = dict(zip(scores, best_weights(torch.stack(list(scores.values()))).tolist(), strict=True))
        faintest = min(shares, key=lambda name: math.inf if name == "networks" else shares[name])
        if faintest == "networks" or shares[faintest] >= FAINT:
            return shares
        del scores[faintest]


def _map(p: LatentMixture, y: Tensor) -> Scales | Tempered:
    """The map that calibrates a predictive of numbers or classes, by out-of-fold predictions."""
    return temperature(p, y) if y.ndim == 1 else Scales.fit(p, y)


def _log_scores(p: Any, y: Tensor) -> Tensor:
    """The log scores of a calibrated predictive."""
    return p.log_forecasts.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1) if y.ndim == 1 else log_density(p, y)


def _scored(model: TableModel, p: Predictive, y: Tensor) -> TableModel:
    """The model with the scores of its out-of-fold predictions."""
    p = model.original(p)
    scores = judge.score(p, y)
    errors = judge.standard_errors(p, y, list(scores))
    return replace(model, scores=scores, errors=errors)


def _kind(targets: Mapping[str, Raw], kind: str) -> Kind:
    require(targets, "name the column to predict")
    if kind != "auto":
        require(kind == "regression" or len(targets) == 1, f"classification takes one target, not {len(targets)}")
        return kind  # pyright: ignore[reportReturnType]
    return "regression" if len(targets) > 1 else detect(next(iter(targets.values())))[0]


def _targets(targets: Mapping[str, Raw], kind: Kind) -> tuple[Tensor, tuple[str, ...]]:
    """Targets in their own units, and the classes."""
    if kind == "regression":
        return target_numbers(targets, list(targets)), ()
    ((name, raw),) = targets.items()
    classes = class_names(raw, name)
    return class_positions(raw, classes), classes


def _units(y: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the targets."""
    if kind == "classification":
        return torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    constant = (y == y[0]).all(0)
    require(not constant.any(), "all rows have the same target, so there is nothing to learn")
    return y.mean(0), y.std(0)


def _select(raw: Raw, kept: Tensor) -> Raw:
    if bool(kept.all()):
        return raw
    which = kept.nonzero().flatten().tolist()
    return raw[which] if is_numeric(raw) else [raw[i] for i in which]  # pyright: ignore[reportReturnType]


def _steps(network: torch.nn.Module, settings: CrossFit, rows: int) -> int:
    """As many as the settings say, or fewer where that would take too long."""
    weights = sum(p.numel() for p in network.parameters())
    batch = min(max(rows // 16, 32), 256)
    work = 6 * weights * batch * settings.folds * settings.repeats
    return int(min(settings.steps, max(LEAST, WORK / work)))
