"""The settings of the published experiments on UCI regression, and what is chosen among on its splits."""

from __future__ import annotations

from collections.abc import Mapping

from dubito.evaluation.problems import Problem
from dubito.inference.fit import Method
from dubito.inference.methods import MAP, Ensemble, MCDropout

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

Grid = tuple[Mapping[str, float], ...]


def published_grid(method: Method, problem: Problem, options: Mapping[str, str], noise: str | None) -> Grid:
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
