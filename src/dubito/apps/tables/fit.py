"""From a table to calibrated predictions, without a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.apps.tables.calibration import Scales, log_density, mixture, temperature
from dubito.apps.tables.cells import Raw
from dubito.apps.tables.columns import Encoder
from dubito.apps.tables.frames import as_frame, with_targets
from dubito.apps.tables.model import Design, Kind, OutOfFold, TableModel
from dubito.apps.tables.process import LONGEST, WIDEST, Process
from dubito.apps.tables.targets import class_names, class_positions, detect, target_numbers
from dubito.apps.tables.training import CrossFit, best_weights
from dubito.evaluation import judge
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors.checks import one_of, require

FEWEST = 10  # rows
WIDE = 1000  # numbers beyond which they are not embedded
WORK = 2e12  # products of a training that are enough: fewer steps are made where each costs more
LEAST = 300  # steps
FAINT = 0.05  # weight below which the Gaussian process is left out
SMALL = 100  # rows below which a remark is made


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
    A Gaussian process stands beside the networks of a regression, with the weight that its own out-of-fold predictions deserve. So
    all rows are used for all purposes, and none is predicted by what learned from it.

    Args:
        table: a DataFrame, a dict of columns, an array [N, F], or the path of a file.
        target: the column to predict (several for a regression), or an array of values.
        kind: of the target; "auto": text and a few whole numbers are classes.
        ignore: columns that are no inputs.
        budget: seconds after which the training ends; None trains as long as the size of the table suggests.
        seed: of everything random.
        show: a progress bar; None: on a terminal.

    >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
    >>> model = fit_table(x, target=(3 * x).sin().flatten(), budget=2.0)
    >>> model.predict(torch.tensor([[0.5]])).mean.shape
    torch.Size([1, 1])
    """
    one_of(("auto", "regression", "classification"), kind=kind)
    inputs, targets = with_targets(as_frame(table), target)
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
    encoder = Encoder.fit(inputs)
    remarks += [f"column {name} was left out: {why}" for name, why in encoder.left_out.items()]
    remarks += [f"{len(y)} rows are few: the calibration is rough"] if len(y) < SMALL else []
    x = torch.from_numpy(encoder.encode(inputs).x)
    shift, scale = _units(y, chosen)
    standardized = y if classes else ((y - shift) / scale).float()
    design = Design(encoder.n_numbers, encoder.width, len(classes) or 2 * y.shape[1], embed=encoder.n_numbers <= WIDE)
    model = design.model(chosen)
    settings = CrossFit(budget=budget, seed=seed, show=show)
    fitted = replace(settings, steps=_steps(model.network, settings, len(x))).fit(model, x, standardized)
    if fitted.done < 1:
        remarks.append(
            f"the budget ended the training after {fitted.done:.0%} of its steps: a larger one may give better predictions"
        )
    before, process, share = fitted.predictive, None, 0.0
    if not classes and encoder.width <= WIDEST and len(x) <= LONGEST:
        process = Process.fit(x, standardized, seed)
        before, share = _joined(before, process.out_of_fold(x, fitted.fold), standardized)
    fix = temperature(before, y) if classes else Scales.fit(before, standardized)
    after = fix(before)
    known = OutOfFold(fitted.outputs, standardized, after.uncertainty.total)
    made = TableModel(chosen, tuple(targets), classes, encoder, design, fitted.posterior, fix, shift, scale, known, share=share)
    made = replace(made, process=process) if share else made
    return _scored(made, after, y, tuple(remarks))


def _joined(networks: LatentMixture, process: LatentMixture, y: Tensor) -> tuple[LatentMixture, float]:
    """The mixture of both out-of-fold predictives with the best log score, and the weight of the process; 0 where it hardly helps."""
    shares = best_weights(torch.stack([log_density(networks, y), log_density(process, y)])).tolist()
    return (networks, 0.0) if shares[1] < FAINT else (mixture([networks, process], shares), shares[1])


def _scored(model: TableModel, p: Predictive, y: Tensor, remarks: tuple[str, ...]) -> TableModel:
    """The model with the scores of its out-of-fold predictions."""
    p = model.original(p)
    scores = judge.score(p, y)
    errors = judge.standard_errors(p, y, list(scores))
    return replace(model, scores=scores, errors=errors, remarks=remarks)


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
    return [raw[i] for i in which] if isinstance(raw, list) else raw[which]  # pyright: ignore[reportCallIssue, reportArgumentType]


def _steps(network: torch.nn.Module, settings: CrossFit, rows: int) -> int:
    """As many as the settings say, or fewer where that would take too long."""
    weights = sum(p.numel() for p in network.parameters())
    batch = min(max(rows // 16, 32), 256)
    work = 6 * weights * batch * settings.folds * settings.repeats
    return int(min(settings.steps, max(LEAST, WORK / work)))
