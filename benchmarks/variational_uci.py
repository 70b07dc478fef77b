"""Variational methods on the standard UCI splits, beside MAP: RMSE and log likelihood in the original units, over splits.

One hidden layer of 50 ReLU units (protein 100), inputs and targets standardised on the training part, a learned noise, the standard
normal prior, the same settings for all sets; large ones are trained for fewer epochs, `--steps` at most. Those of IVON were chosen
among a few on a fifth of the training part of the first splits of energy, yacht and boston. `uci.py` has the other methods, with
settings chosen for every split.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import earlier, mean_and_error, show, write
from networks import mlp

import dubito
from dubito.data import standardize, uci
from dubito.metrics import nll, rmse

BATCH, DRAWS = 64, 200
WIDTHS = {"protein": 100}  # as published
METHODS: dict[str, Callable[[int], Any]] = {  # one row each, for so many epochs
    "MAP": lambda epochs: dubito.MAP(epochs=epochs, learning_rate=0.01),
    "mean field": lambda epochs: dubito.Variational(epochs=epochs, learning_rate=0.01, draws=DRAWS),
    "matrix normal": lambda epochs: dubito.Variational("matrix_normal", epochs=epochs, learning_rate=0.01, draws=DRAWS),
    "IVON": lambda epochs: dubito.IVON(epochs=epochs, samples=2, initial_hessian=1.0, draws=DRAWS),
}
# log likelihoods of variational matrix Gaussians (Louizos & Welling 2016), as uncertainty-baselines lists them
MATRIX = {
    "boston": -2.46, "concrete": -3.01, "energy": -1.06, "yacht": -1.30, "wine": -0.95, "kin8nm": 1.10, "power": -2.82, "naval": 2.46,
    "protein": -2.84,
}  # fmt: skip


def evaluate(label: str, name: str, index: int, options: argparse.Namespace) -> tuple[float, float]:
    """RMSE and log likelihood on the test part of one split."""
    split = standardize(uci(name, index))
    method = METHODS[label](min(options.epochs, math.ceil(options.steps / math.ceil(len(split.x_train) / BATCH))))
    torch.manual_seed(0)
    model = dubito.Model(mlp(split.x_train.shape[1], WIDTHS.get(name, 50), 1), dubito.Gaussian())
    p = dubito.fit(model, method, (split.x_train, split.y_train), batch_size=BATCH, progress=False).predict(split.x_test)
    scale = float(split.y_scale)
    return scale * float(rmse(p, split.y_test)), -float(nll(p, split.y_test)) - math.log(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=12_000, help="at most: of large sets, fewer epochs")
    parser.add_argument("--sets", nargs="+", default=list(MATRIX), choices=list(MATRIX))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--resume", action="store_true", help="keep what the result file has of other sets and methods")
    options, began = parser.parse_args(), time.time()
    cases = [f"{name}, {label}" for name in options.sets for label in options.methods]
    figures, commands = earlier("variational_uci", cases) if options.resume else ({}, {})
    for name in options.sets:
        for label in options.methods:
            found = [evaluate(label, name, index, options) for index in range(options.splits)]
            error, score = (mean_and_error(list(column)) for column in zip(*found, strict=True))
            figures[f"{name}, {label}"] = {"rmse": error, "log likelihood": score, "splits": found}
            print(f"{name}, {label}: {words(figures[f'{name}, {label}'])}", flush=True)
        report(figures, commands, options, began)
    show("UCI regression", ["case", "RMSE; log likelihood"], [[case, words(one)] for case, one in figures.items()])


def report(figures: dict[str, Any], commands: dict[str, Any], options: argparse.Namespace, began: float) -> None:
    """Write what there is."""
    figures = {case: figures[case] for name in MATRIX for label in METHODS if (case := f"{name}, {label}") in figures}
    headline = {
        f"{case}, {len(one['splits'])} splits: RMSE; log likelihood": [
            words(one),
            f"published log likelihood {MATRIX[case.split(',')[0]]}" if case.endswith("matrix normal") else "",
        ]
        for case, one in figures.items()
    }
    settings = {
        "epochs": options.epochs, "steps at most": options.steps, "batch": BATCH, "network": "one hidden layer of 50 ReLU, protein 100",
        "draws": DRAWS, "earlier": commands,
    }  # fmt: skip
    write("variational_uci", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


def words(one: dict[str, Any]) -> str:
    return "; ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in (one["rmse"], one["log likelihood"]))


if __name__ == "__main__":
    main()
