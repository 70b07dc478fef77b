"""`dubito fit`."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from torch import Tensor
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from dubito.cli.commands.errors import Refusal, refusing, told
from dubito.cli.commands.fitted import CHECKPOINT, POSTERIOR, Fitted, usable
from dubito.cli.commands.flags import parse, together
from dubito.cli.commands.network import Network, reason
from dubito.cli.commands.recipe import NAME, Recipe, Scaling
from dubito.cli.commands.scores import finite, scores, show
from dubito.evaluation.data import Table, detect, table
from dubito.inference.fit import Method, Start
from dubito.inference.fit import fit as run
from dubito.inference.methods import MAP, MCDropout, NeuralLinear, PiModel, Variational
from dubito.inference.registry import METHODS
from dubito.model import Model, Target
from dubito.posteriors import Posterior, io
from dubito.tensors import randomness, store
from dubito.tensors.covariances import Indefinite

STEPS = 3000  # of training, however few the rows: a learned noise, which begins at the spread of the targets, has far to go
RATE = 3e-3  # at its highest: inputs and targets are standardised
FIRST = "first"  # the checkpoint of the training that comes before a method which expects a trained network
ENOUGH = 50  # held-out rows, to judge intervals by
USUAL = (0.75, 0.99)  # what the intervals of 90 % cover unless something is wrong
ADVICE = {
    "epochs": "more --epochs",
    "learning_rate": "another --learning-rate",
    "step_size": "another --step-size",
    "burn_in": "a longer --burn-in",
}


@dataclass(frozen=True)
class Data:
    """What to learn, and where to keep it."""

    data: Annotated[Path, Positional, arg(metavar="DATA")]
    """A CSV file with a header (numbers, texts, and inputs that are missing here and there), or an NPZ file with the inputs in the
    array x."""
    target: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(required, repeatable)")]
    """The column to predict, or the array of an NPZ file; several make a regression with several targets. Others are inputs."""
    out: Annotated[Path, arg(metavar="FOLDER")]
    """The folder to write; it must be new."""
    kind: Literal["auto", "regression", "classification"] = "auto"
    """Detected by default: text, and a few different whole numbers, are classes; other numbers are not."""
    ignore: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="COLUMN", help_behavior_hint="(repeatable)")] = ()
    """A column of a CSV file that is no input, such as a key."""
    held_out: Annotated[float, arg(metavar="SHARE")] = 0.2
    """The share of the rows, taken at random, that is kept back to measure how good the predictions are; or 0."""


@dataclass(frozen=True)
class Training:
    """How the run goes."""

    prior_scale: Annotated[
        float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1, or learned by methods that can)")
    ] = None
    """Standard deviation of the Normal prior of every weight: smaller is smoother."""
    batch_size: int = 32
    """Rows a step."""
    patience: Annotated[int | None, arg(metavar="EPOCHS", help_behavior_hint="(default: run to the end)")] = None
    """Stop after so many epochs in which the held-out rows were not predicted better, and keep the best weights."""
    seed: int = 0
    """The same seed gives the same result."""
    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1 ..."""
    checkpoint_every: Annotated[float, arg(metavar="SECONDS")] = 60.0
    """How often to write down how far the run has come."""
    resume: Annotated[bool, FlagCreatePairsOff] = False
    """Go on with a run that was interrupted: the same command again, and this."""

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"a batch has at least one row; got --batch-size {self.batch_size}")
        if self.prior_scale is not None and not self.prior_scale > 0:
            raise ValueError(f"the prior's scale is a positive standard deviation; got --prior-scale {self.prior_scale}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience is at least one epoch; got --patience {self.patience}")


@dataclass(frozen=True)
class First(MAP):
    """The network is trained first, by MAP, and the method goes on from there."""

    # under another name than MAP's own: the method may have a flag of that name
    clip: Annotated[float | None, arg(name="clip-gradient")] = field(default=None, kw_only=True)
    """Largest norm of the gradient of the loss per example."""

    @property
    def map(self) -> MAP:
        return MAP(**{item.name: getattr(self, item.name) for item in fields(self)})


def fit(name: str, args: Sequence[str]) -> None:
    """Fit a network to a table, and keep its posterior in a folder.
      Inputs, and the targets of a regression, are standardised by the training
      rows; predictions and metrics are in the original units. The noise of a
      regression is learned. Where --epochs or --learning-rate are not given,
      methods that train (map, mc_dropout, variational, and what comes before
      laplace or neural_linear) take at least 3,000 steps, at a rate of 0.003.
      Of a CSV file, every text of a column is an input, 1 where it stands; so
      is whether a cell is missing. A missing number is the mean of the others.

    The folder is for `dubito predict` and `dubito evaluate`.
    """
    chain = methods(name)
    groups = {"data": Data, **chain, "network": Network, "training": Training}
    parts = parse(together(groups), args, prog=f"dubito fit {name}", about=fit.__doc__ or "")
    data, network, training = parts["data"], parts["network"], parts["training"]
    device = usable(training.device)
    found, kind = read(data)
    y = found.y
    assert y is not None
    learn, held = split(len(y), data.held_out, training)
    method, first = assembled([trained(parts[part], args, len(learn), training.batch_size) for part in chain])

    regression = kind == "regression"
    recipe = Recipe(
        kind=kind,
        shape=tuple(found.x.shape[1:]),
        features=found.features,
        fill=found.fill,
        targets=found.targets,
        outputs=names(found) if regression else found.classes,
        x=Scaling.of(found.x[learn]),
        y=Scaling.of(y[learn]) if regression else None,
        network=network,
        prior_scale=training.prior_scale,
        method=repr(method) if first is None else f"{method!r} after {first!r}",
        training={
            "rows": len(learn),
            "held_out_rows": len(held),
            "held_out": data.held_out,
            "batch_size": training.batch_size,
            "patience": training.patience,
            "seed": training.seed,
        },
    )
    with randomness.forked(randomness.derive(training.seed, "network")):
        model = recipe.model(network.network)
    check(model, recipe, method, training)
    weights = sum(p.numel() for p in model.network.parameters())
    print(f"{len(learn)} rows to learn from, {len(held)} held out")
    print(
        f"{network.describe(recipe.shape, len(recipe.outputs))}, {weights:,} weights, by {name}{' after map' if first else ''}",
        flush=True,
    )

    inputs, targets = recipe.x.apply(found.x), recipe.y.apply(y) if recipe.y else y
    if first is not None:
        rehearse(model, method, (inputs[learn[:2]], targets[learn[:2]]))

    def stage(method: Method, folder: Path, start: Posterior | None = None) -> Posterior:
        watched = training.patience if start is None else None  # what goes on from a trained network makes a pass or two
        return run(
            model,
            method,
            (inputs[learn], targets[learn]),
            start=start,
            device=device,
            seed=training.seed,
            batch_size=training.batch_size,
            validation=(inputs[held], targets[held]) if watched else None,
            patience=watched,
            checkpoint=folder,
            checkpoint_every=training.checkpoint_every,
            resume=training.resume,
        )

    with keeping(data.out, recipe, resume=training.resume):
        with refusing(ValueError, FloatingPointError), noted():
            start = None if first is None else stage(first, data.out / CHECKPOINT / FIRST)
            posterior = stage(method, data.out / CHECKPOINT, start)
        if len(held):
            with refusing(Indefinite):  # a covariance is factorised when it is first used
                measured = scores(Fitted(recipe, posterior).predict(found.x[held]), y[held])
            recipe = replace(recipe, metrics=finite(measured))
            show(measured, f"On the {len(held)} held-out rows")
            if training.patience:
                print("These rows also chose when to stop, so on new data expect a little less.")
            flags = {item.name for part in chain.values() for item in fields(part)}  # pyright: ignore[reportArgumentType]
            for text in remarks(measured, y[learn], y[held], flags):
                print(f"Note: {text}")
        with store.telling(data.out):
            io.save(posterior, data.out / POSTERIOR)
            recipe.write(data.out / NAME)  # the last to be written: a folder that has it is finished
        shutil.rmtree(data.out / CHECKPOINT)
    print(f"Wrote {data.out}. Predict with: dubito predict {data.out} DATA")


def trained(method: Any, args: Sequence[str], rows: int, batch_size: int) -> Any:
    """A method that trains a network, with enough steps for a table of so many rows, unless the command line says how many.

    >>> trained(MAP(), [], 100, 50).epochs, trained(MAP(), ["--epochs=7"], 100, 50).epochs
    (1500, 100)
    """
    if not isinstance(method, MAP | MCDropout | Variational):
        return method
    given = {word.split("=")[0] for word in args}
    if "--epochs" not in given:
        method = replace(method, epochs=max(method.epochs, math.ceil(STEPS / math.ceil(rows / batch_size))))
    return method if "--learning-rate" in given else replace(method, learning_rate=RATE)


def methods(name: str) -> dict[str, Method]:
    """The methods on a command line with their defaults, outermost first: `ensemble` wraps MAP, `ensemble:mc_dropout` the other.

    Where the innermost expects a trained network, the training comes last.
    """
    chain = name.split(":")
    if len(set(chain)) < len(chain):
        raise Refusal(f"{name}: a method cannot wrap itself")
    made: dict[str, Method] = {}
    for part in reversed(chain):
        wraps = wrapped(METHODS[part])
        if made and not wraps:
            raise Refusal(f"{name}: {part} does not wrap another method")
        if wraps and not made:
            made["map"] = MAP()
        inner = next(reversed(made.values()), None)
        made[part] = METHODS[part](**{wraps: inner}) if wraps else METHODS[part]()
    first: dict[str, Method] = {"map": First()} if post_hoc(next(iter(made.values()))) else {}
    return {**dict(reversed(made.items())), **first}


def post_hoc(method: Any) -> bool:
    """Whether a method expects a trained network."""
    return getattr(method, "post_hoc", False)


def wrapped(method: Any) -> str | None:
    """The field that holds another method, in a method such as Ensemble."""
    return next((name for name, hint in get_type_hints(method).items() if hint is Method), None)


def assembled(chain: list[Any]) -> tuple[Method, Method | None]:
    """Outermost first, every method put into the one that wraps it; and what is to be run before, if anything.

    A wrapper starts its members anew, so each of them is trained inside it.
    """
    first = chain[-1].map if isinstance(chain[-1], First) else None
    *outer, method = chain if first is None else chain[:-1]
    for wrapper in reversed(outer):
        start = {"start": first} if first is not None and post_hoc(method) else {}
        method = replace(wrapper, **{str(wrapped(type(wrapper))): method}, **start)
    return method, None if outer else first


@contextmanager
def noted() -> Iterator[None]:
    """What a method warns of is told as a remark, not as a line of code with a warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in told):
        print(f"Note: {text}")


def read(data: Data) -> tuple[Table, Literal["regression", "classification"]]:
    """The table, and what kind of problem it is; says on screen what was found."""
    if not data.target:
        raise Refusal("name the column to predict: --target COLUMN")
    targets, shown = data.target, ", ".join(data.target)
    twice = [name for name in targets if targets.count(name) > 1]
    if twice:
        raise Refusal(f"--target {twice[0]} is given twice: name each target once")
    with refusing(ValueError):
        if data.kind != "auto":
            kind, why = data.kind, "as asked"
        elif len(targets) == 1:
            kind, why = detect(data.data, targets[0])
            why += f"; otherwise give --kind {'regression' if kind == 'classification' else 'classification'}"
        else:
            kind, why = "regression", "several targets"
        found = table(data.data, targets, kind=kind, ignore=data.ignore, dtype=torch.float64)
    y = found.y
    assert y is not None
    if kind == "regression" and y.ndim != 2:
        raise Refusal(f"{data.data}: {shown} must be [N] or [N, C], its shape is {list(y.shape)}")
    if kind == "regression" and (y == y[0]).all(0).any():
        raise Refusal(f"{data.data}: every row has the same value of {shown}, so there is nothing to learn")
    size = "x".join(map(str, found.x.shape[1:]))
    print(f"{data.data}: {len(y)} rows, {size} input{'s' if size != '1' else ''}")
    made = [name for name in found.features if "=" in name]
    if made:
        print(f"of text and of what is missing: {', '.join(made[:20])}{f' and {len(made) - 20} more' if len(made) > 20 else ''}")
    listed = f" of {len(found.classes)} classes" if kind == "classification" else ""
    print(f"{shown}: {kind}{listed} ({why})")
    return found, kind


def names(found: Table) -> tuple[str, ...]:
    """A name for each output of a regression; an array of an NPZ file may hold several."""
    assert found.y is not None
    if len(found.targets) == found.y.shape[1]:
        return found.targets
    return tuple(f"{found.targets[0]}{i}" for i in range(found.y.shape[1]))


def split(rows: int, share: float, training: Training) -> tuple[Tensor, Tensor]:
    """The rows to learn from and those held out, at random."""
    held = round(share * rows)
    if not 0 <= share < 1 or (share > 0 and not 0 < held < rows):
        raise Refusal(f"--held-out {share:g}: a share of {rows} rows that leaves some on both sides is needed, such as 0.2, or 0")
    if training.patience and not held:
        raise Refusal("--patience watches the held-out rows: give --held-out 0.2 or so")
    order = torch.randperm(rows, generator=randomness.generator("cpu", training.seed, "held out"))
    return order[held:].sort().values, order[:held].sort().values


def check(model: Model, recipe: Recipe, method: Any, training: Training) -> None:
    """Find out before the run, and in words of the command line, what cannot work."""
    inner, parts = method, [method]
    while (name := wrapped(type(inner))) is not None:
        inner = getattr(inner, name)
        parts.append(inner)
    if isinstance(inner, NeuralLinear) and recipe.kind != "regression":
        raise Refusal("neural_linear is for numbers; for classes use laplace --subset last_layer --structure dense")
    if inner is not method and post_hoc(inner) and training.patience:
        raise Refusal("--patience might end the run while the members are still being trained: leave it out, and set --epochs")
    if recipe.network.network is None:
        if isinstance(inner, MCDropout) and inner.at is None and not recipe.network.dropout:
            raise Refusal("mc_dropout needs dropout in the network: give --dropout 0.1, or place it with --at")
        placed = isinstance(inner, MCDropout) and inner.at is not None
        if any(isinstance(part, PiModel) for part in parts) and not recipe.network.dropout and not placed:
            raise Refusal("pi_model needs dropout in the network: give --dropout 0.1")
        return
    needed = (2, len(recipe.outputs))
    try:
        with torch.no_grad():
            f, _ = model.forward(model.parameters(), torch.zeros(2, *recipe.shape), model.buffers())
    except Exception as error:
        raise Refusal(
            f"--network {recipe.network.network}: its network cannot take [2, {', '.join(map(str, recipe.shape))}]: {reason(error)}"
        ) from error
    if tuple(f.shape) != needed:
        raise Refusal(
            f"--network {recipe.network.network}: for 2 rows its output is {list(f.shape)}, where {list(needed)} is needed"
        )


def rehearse(model: Model, method: Method, batch: tuple[Tensor, Tensor]) -> None:
    """Have a method begin on a few rows: what it refuses is told before the network is trained for it."""
    start = Start(model.parameters(batch[1]), model.buffers())
    with refusing(ValueError), randomness.forked(0):
        method.init(Target(model, 2), start, batch, torch.Generator().manual_seed(0), steps=1)


def open_folder(folder: Path, recipe: Recipe, *, resume: bool) -> None:
    """A new folder, or one with the beginning of this very run."""
    started = folder / CHECKPOINT / NAME
    if resume and (folder / NAME).exists():
        raise Refusal(f"{folder}: this fit is finished; there is nothing to resume")
    if resume and started.exists():
        changed = recipe.difference(Recipe.read(started))
        if changed:
            raise Refusal(f"{folder} was begun by another command; different: {'; '.join(changed)}")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = ", or go on with the run in it by --resume" if started.exists() else ""
        raise Refusal(f"{folder} exists: give another folder for --out{hint}")
    try:
        recipe.write(started)
    except OSError:  # a full disk: leave no empty folder that a later run would stumble over
        shutil.rmtree(folder)
        raise


@contextmanager
def keeping(folder: Path, recipe: Recipe, *, resume: bool) -> Iterator[None]:
    """The folder is this run's alone. What cannot be written there is refused in words; who interrupts is told what is left."""
    open_folder(folder, recipe, resume=resume)
    with ExitStack() as held:
        with refusing(FileExistsError):  # another process is at work here, and its folder is not ours to tidy
            held.enter_context(store.locked(folder))
        try:
            yield
        except (Refusal, store.WriteError, KeyboardInterrupt) as end:
            left = close_folder(folder)
            held.close()  # the lock is a file in the folder
            with suppress(OSError):
                folder.rmdir()  # which does nothing where something is left
            if isinstance(end, KeyboardInterrupt):
                raise KeyboardInterrupt(left) from end
            if isinstance(end, store.WriteError):
                raise Refusal(told(end).replace("resume=True", "--resume")) from end
            raise


def close_folder(folder: Path) -> str:
    """After a run that was cut short: leave nothing behind, unless there is a checkpoint to go on from. Says in words which it was."""
    if (folder / NAME).exists():
        return f"but the fit in {folder} is finished"
    if any((folder / CHECKPOINT).rglob("*.safetensors")):
        return f"the same command with --resume goes on from the last checkpoint in {folder}"
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    return f"nothing was saved yet, so {folder} is removed (--checkpoint-every says how often to save)"


def remarks(measured: Mapping[str, float], learned: Tensor, held: Tensor, flags: Container[str]) -> Iterator[str]:
    """What a person should know of the scores on the held-out targets, in plain words; `flags` are those of the methods.

    >>> y = torch.tensor([[1.0], [3.0]])
    >>> next(remarks({"rmse": 1.2}, y, y, {"epochs"}))
    'on the held-out rows this is no better than always to predict the mean of the training rows (rmse 1): try more --epochs'
    """
    if "rmse" in measured:
        constant = float((held.double() - learned.double().mean(0)).square().mean().sqrt())
        better, known = measured["rmse"] < constant, f"the mean of the training rows (rmse {constant:.4g})"
    else:
        counts = learned.bincount()
        most = counts.argmax()
        constant = float((held == most).double().mean())
        shares = counts.double() / len(learned)
        guess = float(-shares.log()[held].mean()) if int(held.max()) < len(shares) else math.inf
        # who always says the most frequent class may still know well how sure to be of it
        gain = (measured["accuracy"] - constant) * len(held)  # in rows
        better = gain > 0.5 or (gain > -0.5 and measured["nll"] < guess)
        known = f"the most frequent class (accuracy {constant:.4g})"
    if not better:
        ways = [way for flag, way in ADVICE.items() if flag in flags and not (flag == "burn_in" and "epochs" in flags)]
        yield f"on the held-out rows this is no better than always to predict {known}" + (
            f": try {' or '.join(ways)}" if ways else ""
        )
    if "coverage" in measured and len(held) >= ENOUGH and not USUAL[0] <= measured["coverage"] <= USUAL[1]:
        share = measured["coverage"]
        yield f"the 90 % intervals hold {share:.0%} of the held-out targets: the uncertainty is not calibrated, it is too " + (
            "small" if share < 0.9 else "large"
        )
