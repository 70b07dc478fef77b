"""Methods with and without a temperature, beside one that is tuned, all on the same held-out rows: the bundled digits.

Each seed cuts the 1,797 images at random into 600 to train on, 300 that are held out and 897 to score. A temperature is fitted to the
held-out rows for every method, and "Laplace, tuned" has the precisions of all its weights tuned on them. The methods are those of
`dubito compare`.

    OMP_NUM_THREADS=1 python benchmarks/temperatures.py                # a minute
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from measure import mean_and_error, show, write

import dubito
from dubito import Categorical, Laplace, Model, metrics
from dubito.data import digits
from dubito.evaluation.problems import DIGITS, perceptron
from dubito.inference.presets import configure
from dubito.posteriors import Posterior
from dubito.priors import Normal
from dubito.recalibrate import Temperature

METHODS = {"MAP": "map", "ensemble of 5": "ensemble", "MC dropout": "mc_dropout", "Laplace, last layer": "laplace"}
TUNED = "Laplace, all weights, tuned on the held-out rows"


def posteriors(train: Any, held: Any, seed: int) -> dict[str, Posterior]:
    torch.manual_seed(seed)
    model = Model(perceptron((128, 128))((1, 8, 8), 10), Categorical(), DIGITS.prior)
    options: Any = {"seed": seed, "batch_size": DIGITS.batch_size, "progress": False}
    fitted: dict[str, Posterior] = {}
    for label, name in METHODS.items():
        method, start, learns_prior = configure(name, DIGITS._replace(dropout_at="^(hidden2|output)$"))
        chosen = Model(model.network, Categorical(), Normal()) if learns_prior else model
        fitted[label] = dubito.fit(chosen, method, train, start=fitted["MAP"] if start else None, **options)
    free = Model(model.network, Categorical(), Normal())
    wide = dubito.fit(free, Laplace(check=False), train, start=fitted["MAP"], **options)
    fitted[TUNED] = wide.tuned(held, precisions=torch.logspace(0, 8, 33).tolist())  # pyright: ignore[reportAttributeAccessIssue]
    return fitted


def one_seed(args: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    split = digits(seed=seed, test=0.5)
    x, y = torch.cat([split.x_train, split.x_test]), torch.cat([split.y_train, split.y_test])
    train, held, test = ((x[rows], y[rows]) for rows in torch.arange(len(x)).tensor_split([args.train, args.train + args.held]))
    found = {}
    for name, posterior in posteriors(train, held, seed).items():
        p = posterior.predict(test[0])
        fix = Temperature().fit(posterior.predict(held[0]), held[1])
        for label, q in ((name, p), (f"{name}, temperature", fix(p))):
            found[label] = {"nll": float(metrics.nll(q, test[1])), "ece": float(metrics.ece(q, test[1]))}
        found[f"{name}, temperature"]["T"] = fix.temperature
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=600)
    parser.add_argument("--held", type=int, default=300, help="rows that temperatures and Laplace's precisions are fitted to")
    parser.add_argument("--seeds", type=int, default=10)
    args, began = parser.parse_args(), time.time()
    runs = [one_seed(args, seed) for seed in range(args.seeds)]
    found = {name: {key: mean_and_error([run[name][key] for run in runs]) for key in row} for name, row in runs[0].items()}
    told = {name: f"{row['nll'][0]:.4f} ± {row['nll'][1]:.4f}, {100 * row['ece'][0]:.2f}" for name, row in found.items()}
    show(f"digits, {args.seeds} seeds", ["", "NLL, ECE in %"], [[name, text] for name, text in told.items()])
    headline = {f"{name}: NLL, ECE in %": [text, ""] for name, text in told.items()}
    write("temperatures", settings=vars(args), figures=found, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
