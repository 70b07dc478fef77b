"""`dubito diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from torch import Tensor
from tyro.conf import Positional, arg

import dubito
from dubito.cli.commands.errors import UsageError, check_not_overwritten
from dubito.cli.commands.fitted import Fitted, FittedTable, Reading
from dubito.cli.commands.flags import parse
from dubito.cli.commands.recipe import NAME as RECIPE
from dubito.evaluation.data import Table
from dubito.posteriors import Samples
from dubito.posteriors.diagnostics import log_scores, summarize
from dubito.report import check_writable
from dubito.report.diagnosis import diagnosis
from dubito.tensors.checks import require

NAME = "diagnosis.html"


@dataclass(frozen=True)
class Diagnose:
    """The fitted folder, the data, and the report to write."""

    folder: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """A folder that `dubito fit` wrote with a sampler."""
    data: Annotated[Path | None, Positional, arg(metavar="[DATA]", help_behavior_hint="")] = None
    """A CSV or NPZ file whose predictions are compared between chains. If it has targets, the log score is shown too."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint=f"(default: {NAME} in the folder)")] = None
    """The HTML file to write."""
    rows: int = 1000
    """Largest number of rows to predict; they are evenly spaced."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """The factory of your own network, if it was fitted with one. It is not read from the folder: files must not choose code to run."""
    device: str = "cpu"
    """Device to run on: cpu, cuda, cuda:1 ..."""

    def __post_init__(self):
        require(self.rows >= 1, f"--rows must be at least 1; got {self.rows}")


def diagnose(args: Sequence[str]) -> None:
    """Check whether the chains of a sampler have converged; draw traces, R-hat, energies and the log score.

    Example: dubito diagnose houses test.csv
    """
    options: Diagnose = parse(Diagnose, args, prog="dubito diagnose", about=diagnose.__doc__ or "")
    fitted = Reading(options.folder, options.data or Path(), network=options.network, device=options.device).open()
    posterior = fitted.posterior.in_memory()
    if (
        isinstance(fitted, FittedTable)
        or not isinstance(posterior, Samples)
        or not (posterior.sampler or posterior.trace or posterior.chains > 1)
    ):
        raise UsageError(
            f"{options.folder} was fitted by {_name(fitted)}, which has no chains to diagnose. "
            "To score its predictions, use dubito evaluate FOLDER DATA"
        )
    path = options.out or options.folder / NAME
    check_writable(path)
    check_not_overwritten(path.with_suffix(".json"), options.folder / RECIPE)  # where the report's numbers go
    found, why = (None, "") if options.data is None else _read(fitted, options.data)
    predictions = scores = None
    if found is not None:
        which = torch.linspace(0, len(found.x) - 1, min(options.rows, len(found.x))).round().long()
        p = fitted.predict(found.x[which])
        predictions = p.probs  # pyright: ignore[reportAttributeAccessIssue] (samples give a mixture)
        scores = None if found.y is None else log_scores(p, found.y[which])
    made = {"chains": posterior.chains, "trace": posterior.trace, "sampler": posterior.sampler}
    summary = summarize(posterior.params, predictions=predictions, **made)
    report = diagnosis(
        posterior,
        summary,
        title=f"The chains of {options.folder.resolve().name}",
        predictions=predictions,
        scores=scores,
        names=fitted.outputs,
        label="probability" if fitted.kind == "classification" else "mean",
        facts=_facts(fitted, options, predictions),
    )
    report.write(path)
    Console().print(summary)
    if why:
        print(f"No log score: the targets cannot be read. {why}")
    print(f"Wrote {path}")


def _read(fitted: Fitted, path: Path) -> tuple[Table, str]:
    """The data, with targets if they can be read, and otherwise the reason."""
    try:
        return fitted.read(path, targets=True), ""
    except UsageError as error:
        return fitted.read(path, targets=False), str(error)


def _facts(fitted: Fitted, options: Diagnose, predictions: Tensor | None) -> dict[str, str]:
    facts = {"dubito": dubito.__version__, "method": _name(fitted), "folder": str(options.folder)}
    if predictions is not None:
        facts["data"] = f"{options.data}, {predictions.shape[1]} rows"
    return facts


def _name(fitted: Fitted | FittedTable) -> str:
    return fitted.method
