"""A row of the comparison: a method by its registered name, with options, as it is to be run on a problem."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dubito.evaluation.problems import Problem
from dubito.inference.method import Method
from dubito.inference.methods import MAP, Ensemble, MCDropout
from dubito.inference.presets import Training, configure, dropout_places, label, preset
from dubito.inference.registry import METHODS
from dubito.model import Model
from dubito.model.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.model.priors import Normal
from dubito.posteriors.families import FAMILIES, Family
from dubito.tensors import randomness

LENGTH_SCALE = 1e-2  # of MC dropout on UCI, as in the paper's experiments
RATES = (0.005, 0.01, 0.05, 0.1)
PRECISIONS = {  # of the noise, in the targets' own units: the grids of the published experiments
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
LONGER = 3  # so many times the epochs of other methods, for dropout on UCI
SHARES = (0.1, 0.3, 1.0)  # of the epochs, to choose from: with learned noise small sets want to be left early

Noise = Literal["shared", "heteroscedastic"]


@dataclass(frozen=True)
class Entry:
    """How one row is made. What `grid` holds is chosen among for every split, on a fifth of its training part."""

    label: str
    spec: str  # as it was asked for
    method: Method
    start: Method | None = field(default=None, kw_only=True)  # trains the network before, for methods that expect it trained
    learns_prior: bool = field(default=False, kw_only=True)
    noise: Noise = field(default="shared", kw_only=True)  # of a regression: one level for all inputs, or an output of the network
    grid: tuple[Mapping[str, float], ...] = field(default=(), kw_only=True)

    def likelihood(self, problem: Problem) -> Likelihood:
        if problem.kind == "classification":
            return Categorical()
        return HeteroscedasticGaussian() if self.noise == "heteroscedastic" else Gaussian(outputs=len(problem.outputs))

    def model(self, problem: Problem, shape: tuple[int, ...]) -> Model:
        """The model with fresh weights, by the global generator."""
        wide = 2 if problem.kind == "regression" and self.noise == "heteroscedastic" else 1
        network = problem.build(shape, wide * len(problem.outputs))
        return Model(network, self.likelihood(problem), Normal() if self.learns_prior else problem.training.prior)

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what comes out, in plain types."""
        return {
            "method": repr(self.method),
            "start": None if self.start is None else repr(self.start),
            "learns_prior": self.learns_prior,
            "noise": self.noise,
            "grid": [dict(point) for point in self.grid],
        }


def entry(spec: str, problem: Problem) -> Entry:
    """Read `name`, `name,option=value,...` or `ensemble:name,...`. Options are the fields of the method, of what it wraps, and
    with the prefix `start.` of the training that comes before it.

    >>> from dubito.evaluation.problems import problem
    >>> made = entry("mc_dropout,rate=0.3,epochs=5", problem("digits"))
    >>> made.label, made.method.rate, made.method.epochs
    ('MC dropout (rate=0.3, epochs=5)', 0.3, 5)
    """
    name, *words = [word.strip() for word in spec.split(",")]
    chain = [part.replace("-", "_") for part in name.split(":")]
    for part in chain:
        if part not in METHODS:
            near = difflib.get_close_matches(part, METHODS, n=1)
            raise ValueError(
                f"no method is called {part!r}; {f'did you mean {near[0]!r}? ' if near else ''}there are {', '.join(METHODS)}"
            )
    if len(set(chain)) < len(chain) or any(part != "ensemble" for part in chain[:-1]):
        raise ValueError(f"{name}: only ensemble wraps other methods, as in ensemble:laplace")
    name, way = ":".join(chain), preset(chain[-1])
    method: Any
    first: Any
    training = training_of(problem)
    if (
        chain[-1] == "mc_dropout" and problem.stackable
    ):  # dropout is slow to train; the paper's experiments take ten times as long
        training = training._replace(epochs=LONGER * training.epochs)
    method, first, learns_prior = configure(name, training)
    options = dict(_option(spec, word) for word in words)
    noise: Any = options.pop("noise", None)
    if noise not in (None, "shared", "heteroscedastic") or (noise and problem.kind != "regression"):
        raise ValueError(f"{spec}: noise is shared or heteroscedastic, and of a regression")
    grid = _grid(method, problem, options, noise)
    if noise == "heteroscedastic" and isinstance(method, Ensemble) and isinstance(method.method, MAP):
        method = unclipped(method)
    method, first = _set(spec, method, first, options)
    title = label(name, method) + (f" ({', '.join(words)})" if words else "")
    made = Entry(title, spec, method, start=first, learns_prior=learns_prior, noise=noise or "shared", grid=grid)
    if not isinstance(made.likelihood(problem), way.likelihoods or Likelihood):
        raise ValueError(f"{chain[-1]} is not for {problem.kind} with {type(made.likelihood(problem)).__name__}: leave it out")
    return made


def training_of(problem: Problem) -> Training:
    """The problem's training with the places of dropout in its network; on UCI these include the inputs, as in the paper."""
    with randomness.forked(0):
        network = problem.build(tuple(problem.part(0).x_train.shape[1:]), len(problem.outputs))
    return problem.training._replace(dropout_at=dropout_places(network, inputs=problem.stackable))


def unclipped(method: Ensemble) -> Ensemble:
    """Where a predicted noise is small its gradients are large, and must be: clipped, such members are left half trained."""
    return replace(method, method=replace(method.method, clip=None)) if isinstance(method.method, MAP) else method


def _grid(method: Any, problem: Problem, options: Mapping[str, str], noise: Noise | None) -> tuple[Mapping[str, float], ...]:
    """What is chosen among on the published splits. An option that is given is not chosen."""
    if not problem.stackable:
        return ()
    if isinstance(method, MCDropout) and not {"rate", "weight_decay", "length_scale", "learn_rates"} & set(options):
        precisions = PRECISIONS[problem.name.removeprefix("uci:")]
        return tuple({"rate": rate, "precision": precision} for rate in RATES for precision in precisions)
    descends = isinstance(method, MAP) or (isinstance(method, Ensemble) and isinstance(method.method, MAP))
    if descends and not {"epochs", "adversarial", "bagging", "initialize"} & set(options):
        epochs = [max(1, round(share * problem.training.epochs)) for share in SHARES]
        if (
            isinstance(method, Ensemble) and noise is None
        ):  # the paper's noise is an output of the network; not every set wants that
            return tuple({"epochs": n, "heteroscedastic": kind} for kind in (False, True) for n in epochs)
        return tuple({"epochs": n} for n in epochs)
    return ()


def _option(spec: str, word: str) -> tuple[str, str]:
    key, sign, text = word.partition("=")
    if not (sign and key and text):
        raise ValueError(f"{spec}: write options as name=value, not {word!r}")
    return key.strip().replace("-", "_"), text.strip()


def _set(spec: str, method: Any, first: Any, options: Mapping[str, str]) -> tuple[Any, Any]:
    """The method, what it wraps, and what comes before it, with the fields that were given."""
    inner: Any = method.method if isinstance(method, Ensemble) else None
    holders = {"": method, "inner": inner, "start": first}
    changes: dict[str, dict[str, str]] = {place: {} for place in holders}
    for key, text in options.items():
        if key.startswith("start."):
            if first is None:
                raise ValueError(f"{spec}: nothing is trained before this method, so it has no {key}")
            places = ["start"]
        else:
            places = [place for place, holder in holders.items() if holder is not None]
        name = key.removeprefix("start.")
        known = {place: [f.name for f in fields(holders[place])] for place in places}
        where = next((place for place in places if name in known[place]), None)
        if where is None:
            names = list(dict.fromkeys(one for found in known.values() for one in found))
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{spec}: no option is called {name!r}; {hint}there are {', '.join(names)}")
        changes[where][name] = text
    # all fields of a holder at once: some are allowed only together
    made = {place: _replaced(spec, holder, changes[place]) for place, holder in holders.items()}
    if changes["inner"]:
        made[""] = replace(made[""], method=made["inner"])
    return made[""], made["start"]


def _replaced(spec: str, holder: Any, changes: Mapping[str, str]) -> Any:
    if not changes:
        return holder
    hints = get_type_hints(type(holder))
    try:
        return replace(holder, **{name: typed(text, hints[name]) for name, text in changes.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{spec}: {error}") from None


def typed(text: str, hint: Any) -> Any:
    """A value of the type that a field has.

    >>> typed("0.5", float | None), typed("none", float | None), typed("yes", bool), typed("3", int)
    (0.5, None, True, 3)
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is type(None) and text.lower() == "none":
            return None
        if kind is bool and text.lower() in ("true", "yes", "false", "no"):
            return text.lower() in ("true", "yes")
        if get_origin(kind) is Literal and text in map(str, get_args(kind)):
            return next(value for value in get_args(kind) if str(value) == text)
        if kind is Family and text in FAMILIES:
            return FAMILIES[text]()
        if kind is str:
            return text
        if kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                continue
            if math.isfinite(value):
                return value
    names = " or ".join(
        "none" if k is type(None) else "/".join(map(str, get_args(k))) or getattr(k, "__name__", str(k)) for k in kinds
    )
    raise ValueError(f"{text!r} is no {names}")
