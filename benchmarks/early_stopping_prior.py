"""How much weight the prior should have where the members of a deep ensemble are stopped early, in classifications.

`Ensemble(5)` stops each member where it predicts its own held-out fifth best, so the prior is not the only thing that keeps it from
overfitting. The default prior of a model is tried with its precision multiplied by several weights; 1 is the prior as it is. The figure
of a weight is its held-out negative log likelihood minus that of weight 1 on the same table, network and split. Tables are the units of
the standard error. The tables of `ASIDE` were looked at once, after the weight had been chosen on the others.

Besides: the share of the predictive entropy that is epistemic, of these ensembles and of `Ensemble(MAP(), 5)`, which is trained to the
end on all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from measure import RESULTS, mean_and_error, show, write
from torch import Tensor, nn

import dubito
from dubito.metrics import nll
from dubito.priors import Normal

ROWS, TEST = 500, 1000  # at most
CHOSEN_ON = ("iris", "wines", "cancer", "digits", "penguin-like", "moons", "noisy", "wine quality", "boston", "fashion-mnist")
ASIDE = ("concrete", "kin8nm", "flipped", "mnist")
WEIGHTS = (1.0, 0.3, 0.1, 0.01, 1e-4)
WIDTHS = {"1 x 50 ReLU": (50,), "2 x 64 ReLU": (64, 64)}
PENGUINS = {  # mean and standard deviation of the bill's length and depth, the flipper's length and the mass; rows
    "Adelie": ((38.8, 18.3, 190.0, 3700.0), (2.7, 1.2, 6.5, 459.0), 121),
    "Chinstrap": ((48.8, 18.4, 196.0, 3733.0), (3.3, 1.1, 7.1, 384.0), 55),
    "Gentoo": ((47.5, 15.0, 217.0, 5076.0), (3.1, 1.0, 6.5, 504.0), 99),
}
MODES = "modes"  # `Ensemble(MAP(), 5)`


class Case(NamedTuple):
    table: str
    network: str
    fit: str  # the weight of the prior, or `MODES`
    split: int


class Measured(NamedTuple):
    nll: float
    epistemic: float  # share of the entropy
    seconds: float


def penguins(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows with the moments of the Palmer penguins; sizes within a species correlate."""
    parts, y = [], []
    for k, (mean, scale, rows) in enumerate(PENGUINS.values()):
        size = generator.standard_normal((rows, 1))
        parts.append(mean + np.array(scale) * (0.7 * size + math.sqrt(1 - 0.49) * generator.standard_normal((rows, 4))))
        y += [k] * rows
    return np.concatenate(parts), np.array(y)


def numbers_as_classes(name: str, split: int) -> tuple[Tensor, Tensor]:
    """A UCI regression with thirds of the target as classes; of the wines, their grades up to 5, 6, and from 7."""
    raw = dubito.data.uci(name, split)
    x, y = torch.cat([raw.x_train, raw.x_test]), torch.cat([raw.y_train, raw.y_test]).flatten()
    cuts = torch.tensor([5.5, 6.5]) if name == "wine" else y.double().quantile(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    return x, torch.bucketize(y.double(), cuts.double())


def raw_table(name: str, split: int) -> tuple[Any, Any]:
    """Inputs and classes of a table."""
    from sklearn import datasets

    made = {
        "moons": lambda: datasets.make_moons(ROWS, noise=0.3, random_state=split),
        "noisy": lambda: datasets.make_classification(ROWS, 10, n_informative=5, n_classes=3, flip_y=0.05, random_state=split),
        "flipped": lambda: datasets.make_classification(1500, 20, n_informative=8, n_classes=4, flip_y=0.1, random_state=split),
        "penguin-like": lambda: penguins(np.random.default_rng(split)),
    }
    if name in made:
        return made[name]()
    if name in ("mnist", "fashion-mnist"):
        x, y = getattr(dubito.data, name.replace("-", "_"))("test")
        return F.adaptive_avg_pool2d(x.float(), 7).flatten(1), y
    if name in ("boston", "concrete", "kin8nm", "wine quality"):
        return numbers_as_classes(name.split()[0], split)
    load = {"iris": "iris", "wines": "wine", "cancer": "breast_cancer", "digits": "digits"}[name]
    return getattr(datasets, f"load_{load}")(return_X_y=True)


def table(name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardized (x_train, y_train, x_test, y_test) of one random split."""
    x, y = map(torch.as_tensor, raw_table(name, split))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(split))
    n = min(ROWS, int(0.75 * len(x)))
    train, test = order[:n], order[n : n + TEST]
    x = (x - x[train].mean(0)) / x[train].std(0).clamp_min(1e-6)
    return x[train].float(), y[train].long(), x[test].float(), y[test].long()


def network(features: int, widths: tuple[int, ...], classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, width in zip((features, *widths), widths, strict=False):
        layers += [nn.Linear(before, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def lighter(prior: Normal, net: nn.Module, weight: float) -> Normal:
    """The default prior with its precision multiplied by a weight."""
    assert prior.rule is not None
    scale, bias = (each / math.sqrt(weight) for each in prior.rule)
    return Normal.fan_in(net, scale, bias=bias)


def evaluate(case: Case) -> Measured:
    torch.set_num_threads(1)
    x, y, x_test, y_test = table(case.table, case.split)
    torch.manual_seed(case.split)
    net, began = network(x.shape[1], WIDTHS[case.network], int(y.max()) + 1), time.process_time()
    model = dubito.Model(net, dubito.Categorical())
    if case.fit == MODES:
        method = dubito.Ensemble(dubito.MAP(check=False), 5)
    else:
        method = dubito.Ensemble(5)
        model = dubito.Model(net, dubito.Categorical(), lighter(model.prior, net, float(case.fit)))
    p = dubito.fit(model, method, (x, y), progress=False, seed=case.split).predict(x_test)
    share = float(p.uncertainty.epistemic.mean() / p.uncertainty.total.mean())
    return Measured(float(nll(p, y_test)), share, time.process_time() - began)


def cases(tables: tuple[str, ...], splits: int) -> Iterator[Case]:
    """All cases, split by split."""
    for split in range(splits):
        for net in WIDTHS:
            for name in tables:
                for fit in (*map(str, WEIGHTS), MODES):
                    yield Case(name, net, fit, split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--tables", nargs="+", default=[*CHOSEN_ON, *ASIDE], choices=(*CHOSEN_ON, *ASIDE))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--add", action="store_true", help="to the cases of the result file, which are not run again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, and report what is done")
    options, began = parser.parse_args(), time.time()
    values = read() if options.add else {}
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    jobs = {pool.submit(evaluate, case): case for case in cases(tuple(options.tables), options.splits) if case not in values}
    try:
        for job in as_completed(jobs, timeout=None if options.seconds == math.inf else options.seconds):
            values[jobs[job]] = job.result()
    except TimeoutError:
        print(f"{len(values)} of {len(jobs)} cases are done in time")
        for process in list((pool._processes or {}).values()):  # what is still running is not waited for
            process.kill()
    report(values, options, began)


def read() -> dict[Case, Measured]:
    """The cases of the result file."""
    found = json.loads((RESULTS / "early_stopping_prior.json").read_text())["figures"]["cases"]
    names = {name: name.split(", ") for name in found}
    return {Case(*rest, int(split)): Measured(*found[name]) for name, (*rest, split) in names.items()}


def report(values: dict[Case, Measured], options: argparse.Namespace, began: float) -> None:
    """Differences to weight 1: averaged over networks and splits of a table, then over tables."""
    figures: dict[str, Any] = {}
    for group, names in {"chosen on": CHOSEN_ON, "kept aside": ASIDE}.items():
        for fit in (*map(str, WEIGHTS[1:]), MODES):
            by_table: dict[str, list[float]] = {}
            for case, value in values.items():
                base = values.get(case._replace(fit=str(WEIGHTS[0])))
                if case.fit == fit and case.table in names and base is not None:
                    by_table.setdefault(case.table, []).append(value.nll - base.nll)
            if by_table:
                means = {name: statistics.mean(each) for name, each in by_table.items()}
                figures[f"{group}: {fit}"] = {"mean and error": mean_and_error(list(means.values())), "tables": means}
    headline = {case: ["{:+.4f} ± {:.4f}".format(*value["mean and error"]), ""] for case, value in figures.items()}
    rows = [
        [case, headline[case][0], sum(difference < 0 for difference in value["tables"].values()), len(value["tables"])]
        for case, value in figures.items()
    ]
    show("Held-out NLL minus that of the default prior", ["weight of the prior", "nats a row", "better on", "tables"], rows)
    agree = {}
    for name in dict.fromkeys(case.table for case in values):
        agree[name] = {
            fit: [statistics.mean(each) for each in zip(*((v.nll, v.epistemic) for v in found), strict=True)]
            for fit in (*map(str, WEIGHTS), MODES)
            if (found := [value for case, value in values.items() if (case.table, case.fit) == (name, fit)])
        }
    rows = [[name, *(f"{loss:.3f}, {share:.1%}" for loss, share in by.values())] for name, by in agree.items()]
    show("Held-out NLL, and epistemic share of the entropy", ["table", *map(str, WEIGHTS), MODES], rows)
    figures |= {"NLL and epistemic share": agree}
    figures["cases"] = {", ".join(map(str, case)): list(value) for case, value in values.items()}
    settings = {"rows": ROWS, "splits": options.splits, "tables": list(agree), "networks": list(WIDTHS), "done": len(values)}
    write("early_stopping_prior", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
