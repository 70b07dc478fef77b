"""Sentiment of film reviews (rt-polarity): what dropout of recurrent networks is worth, and posteriors after training.

- `lstm`, `gru`: trained without dropout; with naive dropout (new masks at every word, on what enters and leaves the layer); and with
  variational dropout (one mask a sentence on inputs, states, features and word types, Gal & Ghahramani 2016), each predicted with
  dropout off and by `--draws` masks, of which probabilities are averaged.
- `encoder`: a small transformer, without dropout and with its own, off and on.
- Around the LSTM and the encoder trained without dropout: a last layer (dense Laplace), Laplace on all weights and SWAG.

Weight decay lambda is the factor of the squared weights beside the mean loss, as in that paper, which is a prior of the scale
(2 N lambda)^(-1/2). It and the rate are chosen by the NLL of the validation part with seed 0, SWAG's learning rate by that of each
run. Training ends with the epoch that scored best there; SWAG walks on from it. The test part, 2,132 sentences, is looked at by the
final runs only. These differ in initialisation, order of the data and masks, not in the split: the test sentences of another split
would be among those that settings were chosen by.

Every fit is a process, `--jobs` at a time; the result is written after each, and `--folder` keeps them, so that a second call goes on.

    DUBITO_DATA=... python benchmarks/sentiment.py --device cuda --seeds 5 --jobs 12 --seconds 300
    DUBITO_DATA=... python benchmarks/sentiment.py --train 4000 --length 40 --width 32 --epochs 12 --batch-size 64 --seeds 2 \
        --draws 30                                                                             # an hour of one core
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measure import apart, mean_and_error, result, show, write
from torch import Tensor

from dubito import MAP, SWAG, Categorical, Laplace, MCDropout, Model, fit, judge
from dubito.data import polarity
from dubito.posteriors import Point, Posterior, Stochastic
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.priors import Normal
from dubito.tensors.randomness import derive_seed, fork_rng

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from sequences import Encoder, Recurrent

Job = dict[str, Any]  # network, dropout, rate, decay, seed, final
Predict = Callable[[Tensor], Predictive]
METRICS = ("accuracy", "nll", "ece", "auroc")
ARMS = {"lstm": ("none", "naive", "variational"), "gru": ("none", "naive", "variational"), "encoder": ("none", "own")}
DECIDES = {"none": "none", "naive": "naive, averaged", "variational": "variational, averaged", "own": "own, averaged"}
SWAG_RATES = (1e-4, 1e-3, 1e-2)  # lowered twice, after runs (with test figures in sight) in which it was worse than its start
SPARE = 15.0  # seconds before the end at which fits are cut short
HANDED = ("train", "length", "width", "epochs", "batch_size", "learning_rate", "draws", "size")


def network(job: Job, words: int, args: argparse.Namespace) -> torch.nn.Module:
    if job["network"] == "encoder":
        heads = max(1, args.width // 32)
        return Encoder(words, width=args.width, heads=heads, hidden=2 * args.width, longest=args.length, dropout=job["rate"])
    naive = job["rate"] if job["dropout"] == "naive" else 0.0
    return Recurrent(words, kind=job["network"], width=args.width, hidden=args.width, naive=naive)


def anew(posterior: Point, draws: int, seed: int) -> Predict:
    """Dropout as torch has it in training, on when predicting: new masks at every word. Probabilities are averaged."""

    def predict(x: Tensor) -> LatentMixture:
        with fork_rng(derive_seed(seed, "naive")), torch.no_grad():
            f = [posterior.model.forward(posterior.params, x, posterior.buffers, train=True)[0] for _ in range(draws)]
        return LatentMixture(posterior.model.likelihood, torch.stack(f))

    return predict


def run(job: Job, args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """The metrics of every way to predict from one fit: {row: {part: {metric: value}}}; the test part in final runs only."""
    split = polarity(0, length=args.length)
    train = split.x_train[: args.train].to(args.device), split.y_train[: args.train].to(args.device)
    parts = {"valid": (split.x_valid.to(args.device), split.y_valid.to(args.device))}
    if job["final"]:
        parts["test"] = (split.x_test.to(args.device), split.y_test.to(args.device))
    with fork_rng(derive_seed(job["seed"], "start")):
        net = network(job, len(split.vocabulary), args).to(args.device)
    model = Model(net, Categorical(), Normal(scale=(2 * len(train[1]) * job["decay"]) ** -0.5))
    descent = {"epochs": args.epochs, "learning_rate": args.learning_rate, "clip": 1.0}
    dropout = {
        "none": MAP(**descent),
        "naive": MAP(**descent),  # torch's own dropout is on while training, and off after
        "variational": MCDropout(**descent, at="", rate=job["rate"], draws=10),  # ten: to see which epoch was best
        "own": MCDropout(**descent, draws=10),
    }
    late = [lambda _: args.until is not None and time.time() > args.until - SPARE]
    common = {"batch_size": args.batch_size, "seed": job["seed"], "progress": False}
    trained = fit(model, dropout[job["dropout"]], train, validation=parts["valid"], callbacks=late, **common)

    def metrics(predict: Posterior | Predict, **how: Any) -> dict[str, dict[str, float]]:
        options = {"metrics": METRICS, "size": args.size, "progress": False}
        return {name: dict(judge(predict, part, **options, **how).values) for name, part in parts.items()}

    if job["dropout"] == "naive":
        assert isinstance(trained, Point)
        return {"naive, off": metrics(trained), "naive, averaged": metrics(anew(trained, args.draws, job["seed"]))}
    if job["dropout"] in ("variational", "own"):
        assert isinstance(trained, Stochastic)
        off = Point(model, trained.params, trained.buffers)
        name = job["dropout"]
        return {f"{name}, off": metrics(off), f"{name}, averaged": metrics(trained, draws=args.draws)}
    rows = {"none": metrics(trained)}
    if job["final"] and job["network"] != "gru":
        free = Model(net, Categorical())  # the prior's scale by the evidence
        rest = {"start": trained, **common}
        # weights of the best epoch are no optimum of the training data: the warning that says so is known
        rows["last layer, Laplace"] = metrics(fit(free, Laplace("dense", subset="last_layer", check=False), train, **rest))
        rows["Laplace"] = metrics(fit(free, Laplace(check=False), train, **rest))
        walks = [SWAG(epochs=max(4, args.epochs // 2), learning_rate=rate, collect_after=0.25) for rate in SWAG_RATES]
        found = [fit(model, walk, train, callbacks=late, **rest) for walk in walks]
        scores = [judge(one, parts["valid"], metrics=["nll"], size=args.size, progress=False).values["nll"] for one in found]
        best = min(range(len(found)), key=lambda i: math.inf if math.isnan(scores[i]) else scores[i])
        rows["SWAG"] = metrics(found[best])
    return rows


def alone(job: Job, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own, unless its result is kept already; None where there was no time."""
    settings = {key: getattr(args, key) for key in HANDED}
    name = hashlib.sha256(json.dumps([job, settings], sort_keys=True).encode()).hexdigest()[:16]
    kept = None if args.folder is None else Path(args.folder, f"{name}.json")
    if kept is not None and kept.exists():
        return {**json.loads(kept.read_text()), "kept": True}
    if args.until is not None and time.time() > args.until - 2 * SPARE:
        return None
    began = time.time()
    handed = settings | {"device": args.device, "until": args.until}
    rows = apart("--run", json.dumps(job), settings=handed, until=args.until, grace=45)
    if rows is None:
        return None
    if args.until is not None and time.time() > args.until - SPARE:
        print(f"{job}: cut short, and left out", flush=True)
        return None
    found = {"job": job, "rows": rows, "seconds": time.time() - began, "device": args.device}
    told = {row: {part: round(values["nll"], 4) for part, values in parts.items()} for row, parts in found["rows"].items()}
    print(f"{job}: {json.dumps(told)}, {found['seconds']:.0f} s", flush=True)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".part").write_text(json.dumps(found))
        kept.with_suffix(".part").replace(kept)
    return found


def candidates(args: argparse.Namespace) -> Iterator[Job]:
    decays = [float(value) for value in args.decays.split(",")]
    rates = [float(value) for value in args.rates.split(",")]
    for i, rate in enumerate(rates):  # outermost, so that every arm has been tried once if time runs out
        for decay in decays:
            for net in args.networks.split(","):
                for dropout in ARMS[net]:
                    if dropout != "none" or i == 0:
                        own = rate if dropout != "none" else 0.0
                        yield {"network": net, "dropout": dropout, "rate": own, "decay": decay, "seed": 0, "final": False}


def decisive(found: dict[str, Any]) -> float:
    """The validation NLL by which a fit is chosen: that of the averaged probabilities where there is dropout."""
    value = found["rows"][DECIDES[found["job"]["dropout"]]]["valid"]["nll"]
    return math.inf if math.isnan(value) else value


def chosen(tuning: Iterable[dict[str, Any]]) -> list[Job]:
    """The best rate and decay of every network and dropout."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for found in tuning:
        key = found["job"]["network"], found["job"]["dropout"]
        if key not in best or decisive(found) < decisive(best[key]):
            best[key] = found
    return [best[key]["job"] for key in sorted(best)]


def report(tuning: list, finals: list, picks: list[Job], args: argparse.Namespace, began: float, *, last: bool) -> None:
    headline: dict[str, list[Any]] = {}
    table: list[list[object]] = []
    for net, arms in ARMS.items():
        for dropout in arms:
            runs = [one for one in finals if (one["job"]["network"], one["job"]["dropout"]) == (net, dropout)]
            for row in runs[0]["rows"] if runs else ():
                values = {name: mean_and_error([one["rows"][row]["test"][name] for one in runs]) for name in METRICS}
                cells = [f"{mean:.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}") for mean, error in values.values()]
                table.append([net, row, len(runs), *cells])
                headline[f"{net}, {row}: accuracy, NLL, ECE, AUROC of errors ({len(runs)} seeds)"] = [", ".join(cells), ""]
    if last:
        columns = ["network", "predicted by", "seeds", "accuracy", "NLL", "ECE", "AUROC of errors"]
        try:
            show("Sentiment of film reviews", columns, table)
        except ImportError:  # rich is not everywhere
            for row in table:
                print(" | ".join(map(str, row)))
    settings = {key: value for key, value in vars(args).items() if key not in ("until", "run", "folder")}
    settings["chosen"] = [{key: job[key] for key in ("network", "dropout", "rate", "decay")} for job in picks]
    settings["fits kept from an earlier call, and their seconds"] = [
        len(kept := [one for one in (*tuning, *finals) if one.get("kept")]), round(sum(one["seconds"] for one in kept))
    ]  # fmt: skip
    settings["fits by device"] = Counter(one.get("device", "unknown") for one in (*tuning, *finals))
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    figures = {"tuning": tuning, "final": finals}
    write("sentiment", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="lstm,gru,encoder", help="by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3, help="final runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="what is not done by then is left out; half of it is for choosing")
    parser.add_argument("--train", type=int, help="training sentences; all 7,464")
    parser.add_argument("--length", type=int, default=62, help="words that are read of a sentence; the longest has 62")
    parser.add_argument("--width", type=int, default=128, help="of word vectors and states")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--rates", default="0.25,0.5", help="of dropout, by commas")
    parser.add_argument("--decays", default="1e-6,1e-4", help="weight decays, by commas")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--size", type=int, default=500, help="sentences that are predicted at a time")
    parser.add_argument("--folder", help="where results are kept, one file a fit; those there are not made again")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    if args.run is not None:
        result(run(json.loads(args.run), args))
        return
    end = None if args.seconds is None else began + args.seconds
    tuning: list[dict[str, Any]] = []
    finals: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as threads:
        args.until = None if args.seconds is None else began + args.seconds / 2
        for one in as_completed([threads.submit(alone, job, args) for job in candidates(args)]):
            tuning += [] if one.result() is None else [one.result()]
        picks, args.until = chosen(tuning), end
        final = [{**job, "seed": seed, "final": True} for seed in range(args.seeds) for job in picks]
        for one in as_completed([threads.submit(alone, job, args) for job in final]):
            finals += [] if one.result() is None else [one.result()]
            report(tuning, finals, picks, args, began, last=False)
    report(tuning, finals, picks, args, began, last=True)


if __name__ == "__main__":
    main()
