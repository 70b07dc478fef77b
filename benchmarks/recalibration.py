"""What recalibration does on real data, fitted to one part of it and judged by another, over random cuts into the two.

- `cifar10`: the 10,000 test images with a given ResNet-20 (91.7 % accurate), the same after a Laplace approximation of its last layer,
  and the published HMC posterior of another ResNet-20 (class probabilities). Every cut takes 5,000 images to fit maps and conformal
  sets to, and judges by the rest; `few`, the same with 500 to fit them to.
- `uci`: regression on concrete and kin8nm; MAP with learned noise on two thirds of the training data of a standard split, maps and
  conformal intervals fitted to the last third, judged by the test data.

    DUBITO_DATA=... OMP_NUM_THREADS=1 python benchmarks/recalibration.py                # minutes, most of them for the images
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from dubito.data.examples import locate
from dubito.data.uci import standardize
from measure import mean_and_error, show, write
from networks import CIFAR_MEAN, CIFAR_STD, resnet20
from safetensors.torch import load_file
from torch import Tensor, nn

import dubito
from dubito import MAP, Categorical, Gaussian, Laplace, Model, metrics
from dubito.data import cifar10, uci
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.priors import Normal
from dubito.recalibrate import (
    ConformalIntervals,
    ConformalSets,
    Histogram,
    Isotonic,
    MatrixScaling,
    Quantiles,
    Temperature,
    Variance,
    VectorScaling,
)

MEAN, STD = torch.tensor(CIFAR_MEAN).view(3, 1, 1), torch.tensor(CIFAR_STD).view(3, 1, 1)
MAPS = {
    "temperature": Temperature(),
    "vector": VectorScaling(),
    "matrix, ODIR": MatrixScaling(),
    "isotonic": Isotonic(),
    "histogram": Histogram(),
}
SETS = {
    "LAC": ConformalSets("lac"),
    "APS": ConformalSets("aps"),
    "RAPS": ConformalSets("raps", penalty=0.1, free=2),
    "LAC by class": ConformalSets("lac", by_class=True),
    "APS by class": ConformalSets("aps", by_class=True),
}
INTERVALS = {name: ConformalIntervals(name) for name in ("absolute", "scaled", "quantile")}
CLASSES = ("nll", "ece", "ece_mass", "classwise_ece", "brier", "accuracy")
NUMBERS = ("nll", "crps", "quantile_error", "coverage", "width")
Row = dict[str, float]


def images(args: argparse.Namespace) -> tuple[dict[str, LatentMixture], Tensor]:
    """Predictives of the test images, as log probabilities, and their classes."""
    network = resnet20()
    network.load_state_dict(load_file(locate("weights", "resnet20_cifar10.safetensors")), strict=False)
    model, train, test = Model(network.eval(), Categorical(), Normal()), cifar10("train"), cifar10("test")
    x, found = (test.x[: args.test] - MEAN) / STD, {}
    for name, method in {"ResNet-20": MAP(epochs=0), "last-layer Laplace": Laplace(subset="last_layer")}.items():
        data = (train.x[: args.train] - MEAN) / STD, train.y[: args.train]
        posterior = dubito.fit(model, method, data, n_data=50_000, batch_size=250, progress=False)
        parts = [posterior.predict(part) for part in x.split(250)]
        found[name] = as_probs(torch.cat([p.mean for p in parts]).log())
        print(name, "predicted", flush=True)
    published = np.load(locate("cifar10", "hmc_reference_cifar10_standard_order.npz"))["probs"]
    found["HMC (published)"] = as_probs(torch.from_numpy(published).double().clamp_min(1e-30).log()[: args.test])
    return found, test.y[: args.test]


def as_probs(logs: Tensor) -> LatentMixture:
    return LatentMixture(Categorical(), logs.unsqueeze(0))


def cut(p: LatentMixture, y: Tensor, rows: Tensor) -> tuple[LatentMixture, Tensor]:
    return LatentMixture(p.likelihood, p.means[:, rows], params=p.params), y[rows]


def judged(p: Predictive, y: Tensor, names: tuple[str, ...]) -> Row:
    row = {}
    for name in names:
        if name == "crps" and hasattr(p, "crps"):
            row[name] = float(p.crps(p.likelihood.target(y, p.means[0])).mean())  # pyright: ignore[reportAttributeAccessIssue]
        else:
            row[name] = float(metrics.METRICS[name].function(p, y))
    return row


def on_classes(p: LatentMixture, y: Tensor, *, seed: int, held: int) -> dict[str, Row]:
    """One cut: every map's metrics, and every kind of sets' coverage."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    (known, answers), (new, truth) = cut(p, y, order[:held]), cut(p, y, order[max(held, len(y) // 2) :])
    rows = {"none": judged(new, truth, CLASSES)}
    for name, method in MAPS.items():
        start = time.process_time()
        fix = method.fit(known, answers)
        rows[name] = {"seconds": time.process_time() - start, **judged(fix(new), truth, CLASSES)}
        if name == "temperature":
            rows[name]["T"] = fix.temperature
    source = torch.Generator().manual_seed(seed)
    for name, method in SETS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class with few images among 500 is then in every set
            rule = method.fit(known, answers, level=0.95, generator=source)
        found = rule.judge(new, truth, generator=source)
        worst = float(found.by_class.min())
        rows[f"sets, {name}"] = {"coverage": found.coverage, "size": found.size, "worst class": worst}
    return rows


def on_numbers(name: str, split: int) -> dict[str, Row]:
    data = standardize(uci(name, split))
    torch.manual_seed(split)
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(split))
    train, held = order[len(order) // 3 :], order[: len(order) // 3]
    network = nn.Sequential(nn.Linear(data.x_train.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
    model = Model(network, Gaussian(), Normal(scale=1.0))
    epochs = max(40, 40_000 // len(train))
    pair = data.x_train[train], data.y_train[train]
    posterior = dubito.fit(model, MAP(epochs=epochs, learning_rate=0.01), pair, batch_size=64, seed=split, progress=False)
    known, answers = posterior.predict(data.x_train[held]), data.y_train[held]
    new, truth = posterior.predict(data.x_test), data.y_test
    rows = {"none": judged(new, truth, NUMBERS)}
    stretch = Variance().fit(known, answers)
    level = Quantiles().fit(stretch(known), answers)
    maps: dict[str, Callable[[Predictive], Predictive]] = {
        "variance": stretch,
        "variance, quantiles": lambda p: level(stretch(p)),
    }
    for label, fix in maps.items():
        rows[label] = judged(fix(new), truth, NUMBERS)
    rows["variance"]["factor"] = float(stretch.factor)
    for label, method in INTERVALS.items():
        found = method.fit(known, answers, level=0.9).judge(new, truth)
        rows[f"intervals, {label}"] = {"coverage": found.coverage, "width": found.width}
    return rows


def summary(runs: list[dict[str, Row]]) -> dict[str, dict[str, tuple[float, float]]]:
    return {name: {key: mean_and_error([run[name][key] for run in runs]) for key in row} for name, row in runs[0].items()}


def table(title: str, found: dict[str, dict[str, tuple[float, float]]]) -> None:
    for kind in (False, True):
        rows = {name: row for name, row in found.items() if name.startswith(("sets", "intervals")) == kind}
        keys = list(dict.fromkeys(key for row in rows.values() for key in row))
        show(
            title,
            ["", *keys],
            [[n, *(f"{r[k][0]:.4f} ± {r[k][1]:.4f}" if k in r else "" for k in keys)] for n, r in rows.items()],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=5000, help="training images for the Laplace approximation")
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--held", type=int, default=5000, help="images that maps are fitted to")
    parser.add_argument("--few", type=int, default=500, help="the same, once more")
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--splits", type=int, default=10, help="of UCI sets")
    args, began = parser.parse_args(), time.time()
    figures: dict[str, Any] = {}
    headline: dict[str, list[Any]] = {}
    for name in ("concrete", "kin8nm"):
        found = summary([on_numbers(name, split) for split in range(args.splits)])
        figures[name] = found
        table(f"{name}, {args.splits} splits", found)
        for key in ("none", "variance", "variance, quantiles"):
            row = found[key]
            what = f"{row['nll'][0]:.3f}, {row['quantile_error'][0]:.4f}, {row['crps'][0]:.4f}"
            headline[f"{name}, {key}: NLL, quantile error, CRPS"] = [what, ""]
        for label in INTERVALS:
            row = found[f"intervals, {label}"]
            headline[f"{name}, conformal {label}: coverage at 0.9, width"] = [
                f"{row['coverage'][0]:.3f}, {row['width'][0]:.3f}",
                "",
            ]
    predictives, y = images(args)
    for name, p in predictives.items():
        for held in (args.held, args.few):
            found = summary([on_classes(p, y, seed=seed, held=held) for seed in range(args.cuts)])
            figures[f"{name}, {held}"] = found
            table(f"{name}, fitted to {held} images, {args.cuts} cuts", found)
            for key in ("none", *MAPS):
                row = found[key]
                told = f"{row['nll'][0]:.4f}, {100 * row['ece'][0]:.2f} ± {100 * row['ece'][1]:.2f}"
                told += f", T = {row['T'][0]:.2f}" if "T" in row else ""
                headline[f"{name}, {key}, fitted to {held}: NLL, ECE in %"] = [told, ""]
            if held == args.held:
                for key in SETS:
                    row = found[f"sets, {key}"]
                    told = f"{row['coverage'][0]:.4f}, {row['size'][0]:.3f}, {row['worst class'][0]:.3f}"
                    headline[f"{name}, {key}: coverage at 0.95, set size, coverage of the worst class"] = [told, ""]
    write("recalibration", settings=vars(args), figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
