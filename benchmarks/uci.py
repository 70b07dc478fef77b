"""UCI regression on the standard splits: RMSE and log likelihood in the original units, mean +- standard error over splits.

One hidden layer of 50 ReLU units, inputs and targets standardised on the training part. All settings are fixed beforehand, the same
for all sets, but the dropout rate and, of the others, the number of steps: these are chosen for every split by the log likelihood of
a fifth of its training part (for ensembles with one member). The test part is seen once, at the end.

Laplace, the neural linear model and SWAG go on from the networks that MAP has trained: their settings are chosen on the one of the
inner split, and then applied to the one of the whole training part. Their seconds include MAP's.

The published figures beside ours: MC dropout of 4,000 epochs, of the repository yaringal/DropoutUncertaintyExps, and deep ensembles
(Lakshminarayanan et al. 2017) of 40 epochs.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from dubito.data.examples import Split
from measure import mean_and_error, show, write
from networks import mlp
from torch import Tensor

import dubito
from dubito.data import standardize, uci
from dubito.metrics import nll, rmse
from dubito.posteriors import Posterior

BATCH, LEARNING_RATE, DRAWS, MEMBERS = 64, 1e-2, 500, 5
RATES, SHARES = (0.01, 0.05), (0.1, 0.3, 1.0)  # what is chosen from, of dropout and of the training steps
SMALL, LARGE = ("boston", "concrete", "energy", "yacht"), ("wine", "kin8nm", "power")
AFTER_MAP: dict[str, list[dict[str, Any]]] = {  # and what is chosen from: the noise as it was trained, or as the evidence has it
    "Laplace": [
        {**part, "optimize_noise": noise}
        for part in ({"structure": "kronecker"}, {"structure": "dense", "subset": "last_layer"})
        for noise in (False, True)
    ],
    "neural linear": [{}],
    "SWAG": [{"walk": rate} for rate in (0.001, 0.003, 0.01)],
}
WALK = 100  # epochs of SWAG
METHODS = ("MAP", *AFTER_MAP, "MC dropout", "ensemble", "ensemble, heteroscedastic")
PUBLISHED = {  # RMSE and log likelihood of MC dropout, then of deep ensembles
    "boston": (2.904, 0.177, -2.402, 0.042, 3.28, -2.41),
    "concrete": (4.826, 0.161, -2.937, 0.025, 6.03, -3.06),
    "energy": (0.539, 0.014, -1.212, 0.005, 2.09, -1.38),
    "yacht": (0.666, 0.049, -1.250, 0.015, 1.58, -1.18),
    "wine": (0.622, 0.008, -0.928, 0.013, 0.64, -0.94),
    "kin8nm": (0.0789, 0.0006, 1.136, 0.007, 0.09, 1.20),
    "power": (4.014, 0.037, -2.808, 0.009, 4.11, -2.79),
}


def posterior(name: str, x: Tensor, y: Tensor, *, steps: int, rate: float = 0.0, members: int = MEMBERS) -> Posterior:
    epochs = math.ceil(steps / math.ceil(len(x) / BATCH))
    options = {"epochs": epochs, "learning_rate": LEARNING_RATE}
    torch.manual_seed(0)
    varying = name == "ensemble, heteroscedastic"
    network = mlp(x.shape[1], 50, 2 if varying else 1, dropout=rate)
    likelihood = dubito.HeteroscedasticGaussian() if varying else dubito.Gaussian()
    if name == "MC dropout":
        method = dubito.MCDropout(draws=DRAWS, **options)
    else:
        method = dubito.MAP(**options) if name == "MAP" else dubito.Ensemble(dubito.MAP(**options), members)
    return dubito.fit(dubito.Model(network, likelihood), method, (x, y), batch_size=BATCH, progress=False)


def after(name: str, trained: Posterior, x: Tensor, y: Tensor, settings: dict[str, Any]) -> Posterior:
    """A method that goes on from a network which is trained."""
    if name == "Laplace":
        method = dubito.Laplace(check=False, **settings)  # the networks are left early on purpose
    elif name == "SWAG":
        rate = settings["walk"]
        method = dubito.SWAG(epochs=WALK, learning_rate=rate, collecting_rate=rate, collect_after=0.0)
    else:
        method = dubito.NeuralLinear()
    return dubito.fit(trained.model, method, (x, y), start=trained, batch_size=BATCH, progress=False)


def inside(split: Split) -> Split:
    """A fifth of the training part in the place of the test part."""
    order = torch.randperm(len(split.x_train), generator=torch.Generator().manual_seed(0))
    held, kept = order.split([len(order) // 5, len(order) - len(order) // 5])
    return standardize(Split(split.x_train[kept], split.y_train[kept], split.x_train[held], split.y_train[held]))


def choose(name: str, inner: Split, steps: int) -> tuple[dict[str, Any], Posterior]:
    """The settings with the best log likelihood on a fifth of the training part, after training on the rest; and that training."""
    if name == "MC dropout":
        tried = [{"rate": rate, "steps": steps // 2} for rate in RATES]
    else:  # the noise is learned too: without other regularisation, small sets want to be left early
        tried = [{"steps": round(share * steps)} for share in SHARES]
    found = [posterior(name, inner.x_train, inner.y_train, members=1, **settings) for settings in tried]
    best = least(found, inner)
    return tried[best] | ({"steps": steps} if "rate" in tried[best] else {}), found[best]


def least(found: list[Posterior], inner: Split) -> int:
    """Which of some posteriors has the least negative log likelihood on held-out data."""
    scores = [float(nll(one.predict(inner.x_test), inner.y_test)) for one in found]
    return scores.index(min(scores))


def evaluate(name: str, index: int, steps: int) -> dict:
    """All methods on one split."""
    torch.set_num_threads(1)  # the splits share out the cores
    split = uci(name, index)
    s, inner = standardize(split), inside(split)
    result, scale = {}, float(s.y_scale)
    trained: dict[str, Posterior] = {}  # by MAP, of the inner split and of the whole
    for method in METHODS:
        start = time.perf_counter()
        if method in AFTER_MAP:
            tried = AFTER_MAP[method]
            found = [after(method, trained["inner"], inner.x_train, inner.y_train, settings) for settings in tried]
            settings = tried[least(found, inner)]
            final = after(method, trained["whole"], s.x_train, s.y_train, settings)
        else:
            settings, kept = choose(method, inner, steps)
            final = posterior(method, s.x_train, s.y_train, **settings)
            trained |= {"inner": kept, "whole": final} if method == "MAP" else {}
        p, seconds = final.predict(s.x_test), time.perf_counter() - start
        result[method] = {
            "rmse": float(rmse(p, s.y_test)) * scale,
            "log likelihood": -float(nll(p, s.y_test)) - math.log(scale),
            "seconds": seconds + (result["MAP"]["seconds"] if method in AFTER_MAP else 0.0),
            "settings": settings,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=[*SMALL, *LARGE], choices=list(PUBLISHED))
    parser.add_argument("--splits", type=int, help="splits of each set; by default 20, and 5 of the larger sets")
    parser.add_argument("--steps", type=int, default=3000, help="most training steps of a fit")
    args, began = parser.parse_args(), time.time()
    jobs = [(name, i) for name in args.sets for i in range(args.splits or (20 if name in SMALL else 5))]
    found: dict[str, dict[int, dict]] = {name: {} for name in args.sets}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = {pool.submit(evaluate, name, i, args.steps): (name, i) for name, i in jobs}
        for done, future in enumerate(as_completed(futures), 1):
            name, i = futures[future]
            found[name][i] = future.result()
            print(f"{time.time() - began:5.0f} s  {done}/{len(jobs)}  {name} split {i}", flush=True)

    figures, rows, headline = {}, [], {}
    for name, splits in found.items():
        figures[name] = {"splits": len(splits), "methods": {}, "by split": {str(i): splits[i] for i in sorted(splits)}}
        for method in METHODS:
            error, likelihood, seconds = (
                mean_and_error([split[method][key] for split in splits.values()]) for key in ("rmse", "log likelihood", "seconds")
            )
            figures[name]["methods"][method] = {"rmse": error, "log likelihood": likelihood, "seconds a split": seconds[0]}
            words = [f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in (error, likelihood)]
            rows.append([name, len(splits), method, *words, f"{seconds[0]:.1f}"])
            headline[f"{name}, {len(splits)} splits, {method}: RMSE; log likelihood"] = ["; ".join(words), ""]
        a, b, c, d, e, f = PUBLISHED[name]
        rows.append([name, "", "published MC dropout", f"{a} ± {b}", f"{c} ± {d}", ""])
        rows.append([name, "", "published ensemble", f"{e}", f"{f}", ""])
        figures[name]["published"] = {
            "MC dropout": {"rmse": (a, b), "log likelihood": (c, d)},
            "ensemble": {"rmse": e, "log likelihood": f},
        }
        headline[f"{name}, published MC dropout; ensemble"] = [f"{a}, {c}; {e}, {f}", ""]
    show("UCI regression", ["set", "splits", "method", "RMSE", "log likelihood", "s a split"], rows)
    settings = {
        "network": "1 x 50 ReLU", "batch": BATCH, "learning rate": f"{LEARNING_RATE}, cosine", "steps": args.steps,
        "prior": "Normal(scale=1)", "noise": "learned",
        "dropout rates": RATES, "shares of the steps": SHARES, "draws": DRAWS, "members": MEMBERS,
        "after MAP": AFTER_MAP, "epochs of SWAG": WALK,
    }  # fmt: skip
    write("uci", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
