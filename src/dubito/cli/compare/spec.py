"""A row of the comparison: a registered method, with options, as it is fitted to a problem."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dubito.cli.compare.recipe import TableRecipe, columns_of
from dubito.evaluation.problems import Problem
from dubito.inference.method import Method, inexact_settings
from dubito.inference.methods import MAP, Ensemble, MCDropout
from dubito.inference.presets import Training, configure, dropout_places, label, preset, with_prior
from dubito.inference.registry import METHODS
from dubito.model import Model
from dubito.model.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.posteriors.families import FAMILIES, Family
from dubito.posteriors.posterior import departure_label
from dubito.tensors import randomness
from dubito.tensors.checks import require, suggestion

Noise = Literal["shared", "heteroscedastic"]
LATER = ("keep=None", "perturb=None", "anchored=False", "hold_out=None", "draws_per_rank=False")  # fields since version 0.1
TABLE, TEMPERATURE = "table", "temperature"  # the recipe of `dubito fit TABLE`, and what may follow a method, as map+temperature
START = "start."  # prefix of the options of the training that comes before a method


@dataclass(frozen=True)
class Spec:
    """How one row is made. If `grid` has several points, one is chosen for every split on a fifth of its training part."""

    label: str
    text: str  # as the user wrote it
    method: Method | TableRecipe
    start: Method | None = field(default=None, kw_only=True)  # trains the network first
    learns_prior: bool = field(default=False, kw_only=True)
    noise: Noise = field(default="shared", kw_only=True)  # of a regression: one level for all inputs, or an output of the network
    grid: tuple[Mapping[str, float], ...] = field(default=(), kw_only=True)
    recalibrated: bool = field(default=False, kw_only=True)  # by a temperature, or a scale of the noise, chosen on the same fifth

    @property
    def tuned(self) -> bool:
        """Whether something is chosen on held-out training rows."""
        return len(self.grid) > 1 or self.recalibrated or isinstance(self.method, TableRecipe)

    @property
    def title(self) -> str:
        """The label in tables, which says whether the row is tempered, generalized or tuned."""
        words = [self.departure.partition(" ")[0], "tuned" if self.tuned else ""]
        return self.label + "".join(f" [{word}]" for word in words if word)

    @property
    def departure(self) -> str:
        """In what the method departs from the posterior of Bayes' rule, as "generalized (damping = 10)"; empty if it does not."""
        return departure_label(inexact_settings(self.method))

    def likelihood(self, problem: Problem) -> Likelihood:
        """The likelihood of the problem's targets."""
        if problem.kind == "classification":
            return Categorical()
        return HeteroscedasticGaussian() if self.noise == "heteroscedastic" else Gaussian(outputs=len(problem.outputs))

    def model(self, problem: Problem, shape: tuple[int, ...]) -> Model:
        """The model with weights drawn from the global generator."""
        width = 2 if problem.kind == "regression" and self.noise == "heteroscedastic" else 1
        network = problem.build(shape, width * len(problem.outputs))
        return with_prior(network, self.likelihood(problem), None if self.learns_prior else problem.training.prior_scale)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, in plain types."""
        return {
            "method": _stated(self.method),
            "start": None if self.start is None else _stated(self.start),
            "learns_prior": self.learns_prior,
            "noise": self.noise,
            "grid": [dict(point) for point in self.grid],
            **({"recalibrated": True} if self.recalibrated else {}),
        }


def _stated(method: Method | TableRecipe) -> str:
    """The method with all its settings, less the defaults of fields that came later: results of earlier versions still count."""
    text = repr(method)
    for default in LATER:
        text = text.replace(f", {default}", "")
    return text


def parse_spec(text: str, problem: Problem) -> Spec:
    """Parse `name`, `name,option=value,...`, `ensemble:name,...`, `name+temperature,...` or `table`.

    Options are fields of the method, of the method that it wraps and, with the prefix `start.`, of the training before it.

    >>> from dubito.evaluation.problems import problem
    >>> spec = parse_spec("mc_dropout,rate=0.3,epochs=5", problem("digits"))
    >>> spec.label, spec.method.rate, spec.method.epochs
    ('MC dropout (rate=0.3, epochs=5)', 0.3, 5)
    """
    name, *words = [word.strip() for word in text.split(",")]
    name, plus, ending = name.replace("-", "_").partition("+")
    options = dict(_option(text, word) for word in words)
    require(ending == TEMPERATURE or not plus, f"{text}: only +{TEMPERATURE} can follow a method; got +{ending}")
    title = f" ({', '.join(words)})" if words else ""
    if name == TABLE:
        require(not plus, f"{text}: the recipe for tables is calibrated already")
        recipe, _ = _with_options(text, TableRecipe(), None, options)
        columns_of(problem, problem.split(0))  # which refuses what is no table
        return Spec("Table recipe" + title, text, recipe)
    innermost = _check_name(name)
    noise = _noise(text, options.pop("noise", None), problem)
    training = training_of(problem)
    if innermost == "mc_dropout" and problem.stackable:
        training = training._replace(epochs=LONGER * training.epochs)
    method, start, learns_prior = configure(name, training)
    grid = published_grid(method, problem, options, noise)
    if noise == "heteroscedastic":
        method = unclipped(method)
    method, start = _with_options(text, method, start, options)
    fix = (" + temperature" if problem.kind == "classification" else " + noise scale") if plus else ""
    more = {"start": start, "learns_prior": learns_prior, "noise": noise or "shared", "grid": grid, "recalibrated": bool(plus)}
    spec = Spec(label(name, method) + fix + title, text, method, **more)
    if not isinstance(spec.likelihood(problem), preset(innermost).likelihoods or Likelihood):
        raise ValueError(
            f"{innermost} does not support {problem.kind} with {type(spec.likelihood(problem)).__name__}: leave it out"
        )
    return spec


def training_of(problem: Problem) -> Training:
    """The problem's training with the places of dropout in its network; for UCI these include the inputs, as in the paper."""
    with randomness.fork_rng(0):
        network = problem.build(tuple(problem.split(0).x_train.shape[1:]), len(problem.outputs))
    return problem.training._replace(dropout_at=dropout_places(network, inputs=problem.stackable))


def unclipped(method: Method) -> Method:
    """An ensemble of MAP without clipping: where the predicted noise is small, gradients must be large."""
    if isinstance(method, Ensemble) and isinstance(method.method, MAP):
        return replace(method, method=replace(method.method, clip=None))
    return method


def _check_name(name: str) -> str:
    """Check the name of a method or chain; returns the name of the innermost method."""
    chain = name.split(":")
    for part in chain:
        if part not in METHODS:
            raise ValueError(f"no method is called {part!r}; {suggestion(part, (*METHODS, TABLE))}")
    if len(set(chain)) < len(chain) or any(part != "ensemble" for part in chain[:-1]):
        raise ValueError(f"{name}: only ensemble wraps other methods, as in ensemble:laplace")
    return chain[-1]


def _noise(text: str, value: str | None, problem: Problem) -> Noise | None:
    require(value is None or problem.kind == "regression", f"{text}: only a regression has the option noise")
    if value in (None, "shared", "heteroscedastic"):
        return value  # pyright: ignore[reportReturnType]
    raise ValueError(f"{text}: noise must be shared or heteroscedastic; got {value}")


def _option(text: str, word: str) -> tuple[str, str]:
    key, sign, value = word.partition("=")
    if not (sign and key and value):
        raise ValueError(f"{text}: write options as name=value; got {word!r}")
    return key.strip().replace("-", "_"), value.strip()


def _with_options(text: str, method: Any, start: Method | None, options: Mapping[str, str]) -> tuple[Any, Method | None]:
    """The method, what it wraps, and the training before it, with the options set."""
    inner = method.method if isinstance(method, Ensemble) else None
    holders = {name: holder for name, holder in (("", method), ("inner", inner), ("start", start)) if holder is not None}
    changes: dict[str, dict[str, str]] = {name: {} for name in holders}
    for key, value in options.items():
        changes[_holder(text, key, holders)][key.removeprefix(START)] = value
    # all fields of a holder at once: some are allowed only together
    changed: dict[str, Any] = {name: _replace(text, holder, changes[name]) for name, holder in holders.items()}
    if changes.get("inner"):
        changed[""] = replace(changed[""], method=changed["inner"])
    return changed[""], changed.get("start")


def _holder(text: str, key: str, holders: Mapping[str, Any]) -> str:
    """Which of the holders has the field that an option names."""
    if key.startswith(START):
        require("start" in holders, f"{text}: nothing is trained before this method, so it has no option {key}")
        holders = {"start": holders["start"]}
    name = key.removeprefix(START)
    known = {place: [item.name for item in fields(holder)] for place, holder in holders.items()}
    for place, names in known.items():
        if name in names:
            return place
    names = dict.fromkeys(name for names in known.values() for name in names)
    raise ValueError(f"{text}: no option is called {name!r}; {suggestion(name, names)}")


def _replace(text: str, holder: Any, changes: Mapping[str, str]) -> Any:
    if not changes:
        return holder
    hints = get_type_hints(type(holder))
    try:
        return replace(holder, **{name: convert(value, hints[name]) for name, value in changes.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{text}: {error}") from None


def convert(text: str, hint: Any) -> Any:
    """Convert a text to the type of a field.

    >>> convert("0.5", float | None), convert("none", float | None), convert("yes", bool), convert("3", int)
    (0.5, None, True, 3)
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        values = _readings(text, kind)
        if values:
            return values[0]
    names = " or ".join(
        "none" if kind is type(None) else "/".join(map(str, get_args(kind))) or getattr(kind, "__name__", str(kind))
        for kind in kinds
    )
    raise ValueError(f"{text!r} is not of type {names}")


def _readings(text: str, kind: Any) -> list[Any]:
    """The text as a value of one type, in a list; empty if it is none."""
    words = {type(None): {"none": None}, bool: {"true": True, "yes": True, "false": False, "no": False}}
    if kind in words:
        return [value for word, value in words[kind].items() if word == text.lower()]
    if get_origin(kind) is Literal:
        return [value for value in get_args(kind) if str(value) == text]
    if kind is Family:
        return [FAMILIES[text]()] if text in FAMILIES else []
    if kind is str:
        return [text]
    try:
        value = kind(text) if kind in (int, float) else math.nan
    except ValueError:
        return []
    return [value] if math.isfinite(value) else []


# ---- the published experiments on UCI regression

LENGTH_SCALE = 1e-2  # of MC dropout
RATES = (0.005, 0.01, 0.05, 0.1)  # of MC dropout
PRECISIONS = {  # of the noise, in the original units of the targets
    "boston": (0.1, 0.15, 0.2),
    "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75),
    "kin8nm": (150.0, 200.0, 250.0),
    "naval": (30000.0, 40000.0, 50000.0),
    "power": (0.05, 0.1, 0.15),
    "protein": (0.025, 0.05, 0.075),
    "wine": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
}
LONGER = 3  # MC dropout trains for this many times the epochs of other methods; in the paper ten times
SHARES = (0.1, 0.3, 1.0)  # of the epochs, to choose from: with learned noise, small data sets need early stopping
DROPOUT_OPTIONS = {"rate", "weight_decay", "length_scale", "learn_rates"}
TRAINING_OPTIONS = {"epochs", "adversarial", "bagging", "initialize"}


def published_grid(
    method: Method, problem: Problem, options: Mapping[str, str], noise: str | None
) -> tuple[Mapping[str, float], ...]:
    """The points that are chosen among on the published splits. An option that the user gives is not chosen."""
    if not problem.stackable:
        return ()
    if isinstance(method, MCDropout) and not DROPOUT_OPTIONS & set(options):
        precisions = PRECISIONS[problem.name.removeprefix("uci:")]
        return tuple({"rate": rate, "precision": precision} for rate in RATES for precision in precisions)
    ensemble = isinstance(method, Ensemble) and isinstance(method.method, MAP)
    if not (ensemble or isinstance(method, MAP)) or TRAINING_OPTIONS & set(options):
        return ()
    epochs = [max(1, round(share * problem.training.epochs)) for share in SHARES]
    if ensemble and noise is None:  # in the paper the noise is an output of the network, which does not suit every data set
        return tuple({"epochs": n, "heteroscedastic": kind} for kind in (False, True) for n in epochs)
    return tuple({"epochs": n} for n in epochs)
