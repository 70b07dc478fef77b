"""`dubito fit`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dubito.cli.commands.errors import UsageError, print_warnings, usage_errors
from dubito.cli.commands.fitted import CHECKPOINT, POSTERIOR, Fitted, find_device
from dubito.cli.commands.folder import fit_folder
from dubito.cli.commands.network import reason
from dubito.cli.commands.notes import notes
from dubito.cli.commands.options import FitOptions, parse_options
from dubito.cli.commands.recipe import NAME, Recipe, Scaling
from dubito.cli.commands.scores import show
from dubito.cli.commands.tables import Kind, Rows, output_names, read_table, split
from dubito.evaluation import judge
from dubito.evaluation.data import Table
from dubito.inference.fit import fit as run
from dubito.inference.method import Method, Start, traits_of
from dubito.inference.methods import MCDropout, NeuralLinear, PiModel
from dubito.inference.presets import wrapped_field
from dubito.model import Model, Target
from dubito.posteriors import Posterior, io
from dubito.tensors import randomness, store
from dubito.tensors.covariances import Indefinite
from dubito.tensors.processes import Processes, join_processes

START = "first"  # folder of the checkpoint of the training that comes before the method


def fit(name: str, args: Sequence[str]) -> None:
    """Fit a network to a table, and save its posterior in a folder.

      Inputs and the targets of a regression are standardized by the training
      rows; predictions and metrics are in the original units. The noise of a
      regression is learned. Text columns are one-hot encoded. A missing number
      is replaced by the mean of its column, and a 0/1 input says that it was
      missing. Where --epochs is not given, the network is trained for at least
      3,000 steps.

    `dubito predict` and `dubito evaluate` read the folder.
    """
    options = parse_options(name, args, about=fit.__doc__ or "")
    device = find_device(options.run.device)
    with join_processes(device=device) as processes, redirect_stdout(sys.stdout if processes.first else StringIO()):
        _fit(name, args, options, device, processes)


def _fit(name: str, args: Sequence[str], options: FitOptions, device: torch.device, processes: Processes) -> None:
    """Fit on one of the processes, of which the first writes and speaks."""
    table, y, kind = read_table(options.data)
    rows = split(len(y), options.data.held_out, seed=options.run.seed)
    outputs = output_names(table, y)
    training = options.training(len(rows.train), tuple(table.x.shape[1:]), len(outputs))
    options = parse_options(name, args, about=fit.__doc__ or "", training=training)
    recipe = make_recipe(options, table, y, kind, rows)
    with randomness.fork_rng(randomness.derive_seed(options.run.seed, "network")):
        model = recipe.model(options.network.network)
    check(model, recipe, options, rows)
    announce(name, model, recipe, options, rows)
    fitting = Fitting(model, recipe, options, rows, device, recipe.x.apply(table.x), recipe.y.apply(y) if recipe.y else y)
    fitting.rehearse()
    folder = options.data.out
    with fit_folder(folder, recipe, resume=options.run.resume) if processes.first else nullcontext():
        processes.barrier()  # the folder is there
        with usage_errors(ValueError, FloatingPointError), print_warnings():
            posterior = fitting.run()
        if len(rows.held_out):
            recipe = replace(recipe, metrics=score(posterior, recipe, options, table.x, y, rows))
        if processes.first:
            write(folder, posterior, recipe)
    print(f"Wrote {folder}. Predict with: dubito predict {folder} DATA")


def write(folder: Path, posterior: Posterior, recipe: Recipe) -> None:
    """Write what was fitted, and remove the checkpoint."""
    with store.describing_write_errors(folder):
        io.save(posterior, folder / POSTERIOR)
        recipe.write(folder / NAME)  # written last: a folder that has it is finished
    shutil.rmtree(folder / CHECKPOINT)


def make_recipe(options: FitOptions, table: Table, y: Tensor, kind: Kind, rows: Rows) -> Recipe:
    """What is written beside the posterior, apart from its scores."""
    method, start = options.configuration
    return Recipe(
        kind=kind,
        shape=tuple(table.x.shape[1:]),
        features=table.features,
        fill=table.fill,
        targets=table.targets,
        outputs=output_names(table, y),
        x=Scaling.of(table.x[rows.train]),
        y=Scaling.of(y[rows.train]) if kind == "regression" else None,
        network=options.network,
        prior_scale=options.run.prior_scale,
        default_prior=prior_of_run(options),
        method=repr(method) if start is None else f"{method!r} after {start!r}",
        training={
            "rows": len(rows.train),
            "held_out_rows": len(rows.held_out),
            "held_out": options.data.held_out,
            "batch_size": options.run.batch_size,
            "patience": options.run.patience,
            "seed": options.run.seed,
        },
    )


def prior_of_run(options: FitOptions) -> Literal["normal", "fan_in"]:
    """The prior where no scale is given. A run that version 0.1 began goes on with the one that it had then."""
    began = options.data.out / CHECKPOINT / NAME
    return Recipe.read(began).default_prior if options.run.resume and began.exists() else "fan_in"


def announce(name: str, model: Model, recipe: Recipe, options: FitOptions, rows: Rows) -> None:
    """Print what is about to be fitted."""
    weights = sum(p.numel() for p in model.network.parameters())
    network = options.network.describe(recipe.shape, len(recipe.outputs))
    after = " after map" if options.configuration[1] else ""
    print(f"{len(rows.train)} training rows, {len(rows.held_out)} held-out rows")
    print(f"{network}, {weights:,} weights, by {name}{after}", flush=True)


class Fitting:
    """The run itself, in one or two stages."""

    def __init__(
        self, model: Model, recipe: Recipe, options: FitOptions, rows: Rows, device: torch.device, inputs: Tensor, targets: Tensor
    ):
        self.model, self.recipe, self.options, self.device = model, recipe, options, device
        self.train = inputs[rows.train], targets[rows.train]
        self.held_out = inputs[rows.held_out], targets[rows.held_out]

    def rehearse(self) -> None:
        """Start the method on two rows, to report settings that it rejects before the network is trained for it."""
        method, first = self.options.configuration
        if first is None:
            return
        batch = self.train[0][:2], self.train[1][:2]
        start = Start(self.model.parameters(batch[1]), self.model.buffers())
        with usage_errors(ValueError), randomness.fork_rng(0):
            method.init(Target(self.model, 2), start, batch, torch.Generator().manual_seed(0), steps=1)

    def run(self) -> Posterior:
        """Fit the method, after the training that it starts from."""
        method, first = self.options.configuration
        folder = self.options.data.out / CHECKPOINT
        start = None if first is None else self._stage(first, folder / START)
        return self._stage(method, folder, start)

    def _stage(self, method: Method, folder: Path, start: Posterior | None = None) -> Posterior:
        options = self.options.run
        patience = None if traits_of(method).post_hoc else options.patience  # such methods make a pass or two
        return run(
            self.model,
            method,
            self.train,
            start=start,
            device=self.device,
            seed=options.seed,
            batch_size=options.batch_size,
            validation=self.held_out if patience else None,
            patience=patience,
            checkpoint=folder,
            checkpoint_every=options.checkpoint_every,
            resume=options.resume,
        )


def score(posterior: Posterior, recipe: Recipe, options: FitOptions, x: Tensor, y: Tensor, rows: Rows) -> dict[str, float | None]:
    """Score the held-out rows, and print the scores with notes on them."""
    with usage_errors(Indefinite):  # a covariance is factorized when it is first used
        p = Fitted(recipe, posterior).predict(x[rows.held_out])
        values = judge.score(p, y[rows.held_out])
    show(
        values,
        judge.standard_errors(p, y[rows.held_out], list(values)),
        f"On the {len(rows.held_out)} held-out rows",
        departure=posterior.label,
    )
    if options.run.patience:
        print("These rows also decided when to stop, so expect slightly worse scores on new data.")
    for text in notes(values, y[rows.train], y[rows.held_out], options.flags):
        print(f"Note: {text}")
    return judge.finite(values)


def check(model: Model, recipe: Recipe, options: FitOptions, rows: Rows) -> None:
    """Report before the run, in terms of the command line, what cannot work."""
    method, _ = options.configuration
    methods = unwrap(method)
    inner, patience = methods[-1], options.run.patience
    if patience and not len(rows.held_out):
        raise UsageError("--patience needs held-out rows: give --held-out 0.2 or so")
    if isinstance(inner, NeuralLinear) and recipe.kind != "regression":
        raise UsageError("neural_linear needs a regression; for classes use laplace --subset last_layer --structure dense")
    if inner is not method and traits_of(inner).post_hoc and patience:
        raise UsageError("--patience might end the run while members are still being trained: leave it out, and set --epochs")
    if recipe.network.network is not None:
        check_network(model, recipe)
        return
    own_dropout = isinstance(inner, MCDropout) and inner.at is not None
    if any(isinstance(part, PiModel) for part in methods) and not recipe.network.dropout and not own_dropout:
        raise UsageError("pi_model needs dropout in the network: give --dropout 0.1")


def unwrap(method: Method) -> list[Method]:
    """A method and those that it wraps, outermost first."""
    methods = [method]
    while (name := wrapped_field(type(methods[-1]))) is not None:
        methods.append(getattr(methods[-1], name))
    return methods


def check_network(model: Model, recipe: Recipe) -> None:
    """Run the user's network on two rows."""
    name, needed = recipe.network.network, (2, len(recipe.outputs))
    try:
        with torch.no_grad():
            f, _ = model.forward(model.parameters(), torch.zeros(2, *recipe.shape), model.buffers())
    except Exception as error:
        shape = ", ".join(map(str, recipe.shape))
        raise UsageError(f"--network {name}: the network fails on inputs of shape [2, {shape}]: {reason(error)}") from error
    if tuple(f.shape) != needed:
        raise UsageError(f"--network {name}: the output for 2 rows has the shape {list(f.shape)}; needed {list(needed)}")
