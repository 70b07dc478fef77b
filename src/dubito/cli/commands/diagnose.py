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
from dubito.cli.commands.fitted import Fitted, Reading
from dubito.cli.commands.flags import parse
from dubito.cli.commands.recipe import NAME as RECIPE
from dubito.evaluation.data import Table
from dubito.posteriors import Samples
from dubito.posteriors.diagnostics import log_scores, summarize
from dubito.report import check_writable
from dubito.report.diagnosis import diagnosis

NAME = "diagnosis.html"


@dataclass(frozen=True)
class Diagnose:
    """What to look at, and what with."""

    folder: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """A folder that `dubito fit` wrote with a sampler."""
    data: Annotated[Path | None, Positional, arg(metavar="[DATA]", help_behavior_hint="")] = None
    """A CSV or NPZ file: the chains are compared in what they predict there. With targets, the log score is shown too."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint=f"(default: {NAME} in the folder)")] = None
    """The HTML file to write."""
    rows: int = 1000
    """How many rows to predict at most, evenly spaced."""
    network: Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")] = None
    """The factory of your own network, if it was fitted with one: a file must not choose code to run."""
    device: str = "cpu"
    """Where to run the network: cpu, cuda, cuda:1 ..."""

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"there is at least one row to predict; got --rows {self.rows}")


def diagnose(args: Sequence[str]) -> None:
    """Say whether the chains of a sampler can be trusted, and draw them: traces, R-hat, energies, and the log score.

    Example: dubito diagnose houses test.csv
    """
    options: Diagnose = parse(Diagnose, args, prog="dubito diagnose", about=diagnose.__doc__ or "")
    fitted = Reading(options.folder, options.data or Path(), network=options.network, device=options.device).open()
    posterior = fitted.posterior.in_memory()
    if not isinstance(posterior, Samples) or not (posterior.sampler or posterior.trace or posterior.chains > 1):
        raise UsageError(
            f"{options.folder}: it was fitted by {_name(fitted)}, which makes no chains: there is nothing to converge. "
            "dubito evaluate FOLDER DATA says how good its predictions are"
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
        names=fitted.recipe.outputs,
        label="probability" if fitted.recipe.kind == "classification" else "mean",
        facts=_facts(fitted, options, predictions),
    )
    report.write(path)
    Console().print(summary)
    if why:
        print(f"There is no log score, since the targets cannot be read. {why}")
    print(f"Wrote {path}")


def _read(fitted: Fitted, path: Path) -> tuple[Table, str]:
    """The data, with targets if they are there, and why not if they are not."""
    try:
        return fitted.read(path, targets=True), ""
    except UsageError as refusal:
        return fitted.read(path, targets=False), str(refusal)


def _facts(fitted: Fitted, options: Diagnose, predictions: Tensor | None) -> dict[str, str]:
    facts = {"dubito": dubito.__version__, "method": _name(fitted), "folder": str(options.folder)}
    if predictions is not None:
        facts["data"] = f"{options.data}, {predictions.shape[1]} rows"
    return facts


def _name(fitted: Fitted) -> str:
    return fitted.recipe.method.partition("(")[0]
