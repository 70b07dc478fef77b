"""How close is each approximate method to the posterior? Accuracy, agreement and total variation against reference HMC.

There is a row for every method of the registry. One that is not named below is run with its own defaults, for 200 epochs where it
counts in epochs, with the rate of MAP where it uses Adam; one that cannot be used for classes is listed with its reason, and so are
those that train on unlabelled data beside the labelled, for another aim than the posterior.
"""

import time
from dataclasses import fields, is_dataclass, replace
from typing import Any

from problem import Setting, closeness, load, report, setting

import dubito
from dubito.inference.registry import METHODS
from dubito.inference.semi_supervised import Consistency
from dubito.posteriors import Samples

Row = tuple[str, Any, Any]  # label, method, where it starts
PLAIN = dubito.MAP(epochs=200, learning_rate=3e-3)
OTHER_AIM = "is for unlabelled data, and adds a term to the log joint density: HMC is no reference for it"


def named(s: Setting, trained: Any) -> dict[str, list[Row]]:
    """By the name in the registry."""
    return {
        "map": [("MAP", PLAIN, None)],
        "ensemble": [("ensemble of 10", dubito.Ensemble(PLAIN, 10), None)],
        "mc_dropout": [("MC dropout", dubito.MCDropout(epochs=200, learning_rate=3e-3, at="", rate=0.1), None)],
        "laplace": [
            ("Laplace, Kronecker", dubito.Laplace(check=False), trained),
            ("Laplace, last layer", dubito.Laplace(subset="last_layer", check=False), trained),
        ],
        "online_laplace": [("online Laplace", dubito.OnlineLaplace(epochs=200, learning_rate=3e-3), None)],
        "swag": [
            ("SWAG", dubito.SWAG(epochs=100, collect_after=0.0), trained),
            ("SWAG, 5 modes", dubito.Ensemble(dubito.SWAG(epochs=200), 5), None),
        ],
        "sgld": [("SGLD", dubito.SGLD(learning_rate=0.6, burn_in=200, draws=100, thin=5), None)],
        "sghmc": [
            ("SGHMC", dubito.SGHMC(learning_rate=0.1, burn_in=200, draws=100, thin=5), None),
            ("cyclical SGHMC", dubito.SGHMC(learning_rate=0.3, cycles=10, burn_in=50, draws=100, thin=2), None),
        ],
        "metropolis": [("Metropolis", dubito.Metropolis(draws=s.draws, burn_in=s.burn_in, thin=30), trained)],
        "ula": [("ULA", dubito.ULA(0.003, draws=s.draws, burn_in=s.burn_in), trained)],
        "mala": [("MALA", dubito.MALA(draws=s.draws, burn_in=s.burn_in), trained)],
        "nuts": [("NUTS", dubito.NUTS(draws=max(4, s.draws // 4), burn_in=s.burn_in, max_depth=7), trained)],
        "mclmc": [("MCLMC", dubito.MCLMC(draws=s.draws, burn_in=s.burn_in), None)],
        "mams": [("MAMS", dubito.MAMS(draws=max(4, s.draws // 2), burn_in=s.burn_in, max_steps=120), None)],
        "hmc": [("HMC, another seed", dubito.HMC(draws=s.draws, burn_in=s.burn_in, max_steps=400), None)],
    }


def default(name: str) -> Row:
    method: Any = METHODS[name]()
    known = {field.name for field in fields(method)} if is_dataclass(method) else set()
    change = {"epochs": 200, "learning_rate": 3e-3} if getattr(method, "optimizer", None) == "adam" else {"epochs": 200}
    return name, replace(method, **change) if "epochs" in known else method, None


def compared(s: Setting, trained: Any) -> tuple[list[Row], dict[str, str]]:
    """What is to be run, and what is not, with its reason: together all of the registry."""
    found, rows, refused = named(s, trained), [], {}
    for name, kind in METHODS.items():
        if isinstance(kind, type) and issubclass(kind, Consistency):
            refused[name] = f"{kind.__name__} {OTHER_AIM}"
        else:
            rows += found.get(name) or [default(name)]
    return rows, refused


def main() -> None:
    s = setting()
    problem = load(s)
    start = time.perf_counter()
    # twice the draws of the others, so that less of what is between two rows is the noise of this one
    reference = load(replace(s, draws=2 * s.draws)).hmc(problem.model())
    exact = reference.predict(problem.x_test)
    rows = {"HMC, the reference": {**problem.scores(exact), "seconds": time.perf_counter() - start, **problem.trust(reference)}}
    methods, refused = compared(s, problem.trained(problem.model()))
    for label, method, begin in methods:
        start = time.perf_counter()
        model = (
            problem.model(dubito.priors.Normal()) if label == "online Laplace" else problem.model()
        )  # it learns the prior's scale
        size = 50 if method.data == "batches" else 10**6
        try:
            posterior = dubito.fit(model, method, problem.train, start=begin, seed=s.seed + 1, batch_size=size, progress=False)
        except ValueError as error:
            refused[label] = str(error)
            continue
        p = posterior.predict(problem.x_test)
        rows[label] = {**problem.scores(p), **closeness(p, exact), "seconds": time.perf_counter() - start}
        if isinstance(posterior, Samples) and posterior.trace and posterior.chains > 1:
            rows[label] |= problem.trust(posterior)
        print(label, rows[label], flush=True)
    report("closeness", s, rows, refused=refused)
    for label, why in refused.items():
        print(f"{label}: {why}")


if __name__ == "__main__":
    main()
