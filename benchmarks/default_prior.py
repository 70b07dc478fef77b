"""Which Gaussian prior over weights predicts best on held-out rows of small tables, whatever the method and the network.

Twelve tables of at most 500 training rows (standardized), three networks, MAP, an ensemble of five MAPs, mean field and HMC, all with
their default settings. The figure of a prior is its held-out negative log likelihood minus that of N(0, 1) on the same table, network,
method and split, cut to one nat on either side, since a MAP estimate that has learned to have no noise loses hundreds; tables are the
units of the standard error. Where the time does not suffice, first splits are complete.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from measure import mean_and_error, show, write
from torch import Tensor, nn

import dubito
from dubito.metrics import nll
from dubito.priors import Normal

ROWS, TEST = 500, 1000  # at most
UCI = ("boston", "concrete", "energy", "yacht", "wine", "kin8nm")
TABLES = ("diabetes", "friedman", *UCI, "iris", "wines", "cancer", "digits")
CLASSES = {"iris": 3, "wines": 3, "cancer": 2, "digits": 10}


def _network(features: int, outputs: int, *, width: int, depth: int, activation: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(features, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


NETWORKS = {
    "1 x 50 ReLU": dict(width=50, depth=1, activation=nn.ReLU),
    "2 x 64 ReLU": dict(width=64, depth=2, activation=nn.ReLU),
    "3 x 64 SiLU": dict(width=64, depth=3, activation=nn.SiLU),
}
PRIORS: dict[str, Callable[[nn.Module], Normal]] = {
    "N(0, 1)": lambda net: Normal(scale=1.0),
    "N(0, .3^2)": lambda net: Normal(scale=0.3),
    "fan-in, scale 1": lambda net: Normal.fan_in(net),
    "fan-in, scale 1.4": lambda net: Normal.fan_in(net, math.sqrt(2), bias=1.0),
    "fan-in, scale 2": lambda net: Normal.fan_in(net, 2.0, bias=1.0),
    "fan-in, scale 3": lambda net: Normal.fan_in(net, 3.0, bias=1.0),
    "fan-in, scale 5": lambda net: Normal.fan_in(net, 5.0, bias=1.0),
}
METHODS: dict[str, Callable[[], Any]] = {
    "MAP": dubito.MAP,
    "ensemble of MAP": lambda: dubito.Ensemble(dubito.MAP(), 5),
    "mean field": dubito.Variational,
    "HMC": lambda: dubito.HMC(draws=60, burn_in=60, max_steps=200),
}


def table(name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardized (x_train, y_train, x_test, y_test) of one random split."""
    from sklearn import datasets

    generator = torch.Generator().manual_seed(split)
    if name in UCI:
        raw = dubito.data.uci(name, split)
        x, y = torch.cat([raw.x_train, raw.x_test]), torch.cat([raw.y_train, raw.y_test])
    elif name == "friedman":
        x, y = map(torch.as_tensor, datasets.make_friedman1(ROWS + TEST, noise=1.0, random_state=split))
    else:
        load = {"diabetes": "diabetes", "iris": "iris", "wines": "wine", "cancer": "breast_cancer", "digits": "digits"}[name]
        x, y = map(torch.as_tensor, getattr(datasets, f"load_{load}")(return_X_y=True))
    order = torch.randperm(len(x), generator=generator)
    n = min(ROWS, int(0.75 * len(x)))
    train, test = order[:n], order[n : n + TEST]
    x = (x - x[train].mean(0)) / x[train].std(0).clamp_min(1e-6)
    if name in CLASSES:
        return x[train].float(), y[train].long(), x[test].float(), y[test].long()
    y = y.reshape(len(y), -1)
    y = (y - y[train].mean(0)) / y[train].std(0)
    return x[train].float(), y[train].float(), x[test].float(), y[test].float()


def evaluate(case: tuple[str, str, str, str, int]) -> float:
    """Held-out negative log likelihood."""
    name, network, prior, method, split = case
    torch.set_num_threads(1)
    x, y, x_test, y_test = table(name, split)
    torch.manual_seed(split)
    net = _network(x.shape[1], CLASSES.get(name, 1), **NETWORKS[network])
    likelihood = dubito.Categorical() if name in CLASSES else dubito.Gaussian()
    model = dubito.Model(net, likelihood, PRIORS[prior](net))
    return float(nll(dubito.fit(model, METHODS[method](), (x, y), progress=False, seed=split).predict(x_test), y_test))


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str, str, int]]:
    """All cases, split by split; HMC on the two smaller networks."""
    for split in range(options.splits):
        for name in options.tables:
            for network in NETWORKS:
                for method in METHODS:
                    for prior in PRIORS:
                        if method != "HMC" or network != "3 x 64 SiLU":
                            yield name, network, prior, method, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, and report what is done")
    options, began = parser.parse_args(), time.time()
    values: dict[tuple[str, str, str, str, int], float] = {}
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    jobs = {pool.submit(evaluate, case): case for case in cases(options)}
    try:
        for job in as_completed(jobs, timeout=None if options.seconds == math.inf else options.seconds):
            try:
                values[jobs[job]] = job.result()
            except Exception as problem:  # one case that fails, such as a diverged chain, does not end the others
                print(jobs[job], type(problem).__name__, str(problem)[:200], flush=True)
    except TimeoutError:
        print(f"{len(values)} of {len(jobs)} cases are done in time")
    for process in list((pool._processes or {}).values()):  # what is still running is not waited for
        process.kill()
    report(values, options, began)


def report(values: dict[tuple[str, str, str, str, int], float], options: argparse.Namespace, began: float) -> None:
    """Differences to N(0, 1): averaged over splits and networks of a table, then over tables."""
    figures: dict[str, Any] = {}
    for kind in ("numbers", "classes"):
        for method in (*METHODS, "all methods"):
            for prior in PRIORS:
                by_table: dict[str, list[float]] = {}
                for (name, network, one, how, split), value in values.items():
                    base = values.get((name, network, "N(0, 1)", how, split))
                    if (
                        one == prior
                        and method in (how, "all methods")
                        and base is not None
                        and (name in CLASSES) == (kind == "classes")
                    ):
                        by_table.setdefault(name, []).append(max(-1.0, min(1.0, value - base)))
                if by_table and prior != "N(0, 1)":
                    figures[f"{kind}, {method}: {prior}"] = mean_and_error([statistics.mean(v) for v in by_table.values()])
    headline = {case: [f"{mean:+.3f} ± {error:.3f}", ""] for case, (mean, error) in figures.items() if "all methods" in case}
    show(
        "Held-out NLL minus that of N(0, 1)",
        ["case", "nats a row"],
        [[case, f"{m:+.3f} ± {e:.3f}"] for case, (m, e) in figures.items()],
    )
    figures["cases"] = {", ".join(map(str, case)): value for case, value in values.items()}
    settings = {"rows": ROWS, "splits": options.splits, "tables": options.tables, "networks": list(NETWORKS), "done": len(values)}
    write("default_prior", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
