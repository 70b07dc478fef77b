"""Which answers are wrong: maximum class probability, MC dropout and ConfidNet, beside the published figures (Corbière et al. 2019).

- `smallconv`: MNIST, conv32-conv64 3x3, pooling, dropout .25, 128 units, dropout .5, by SGD as there. FPR at 95 % TPR, AUPR-error,
  AUROC (and the oracle, the true class probability). Errors are those of the network without dropout, for MC dropout its own.
- `lenet-mnist`, `lenet-cifar10`: LeNet 6-16-120 with dropout; the same weights without it (their mean), and T = 50 draws of masks.

Training images are 55,000 of MNIST (45,000 of CIFAR-10); ConfidNet's epoch is chosen on the others. Nothing is chosen on test images.
Every case and seed is a process, `--jobs` at a time, and the result is written after each; cases of an earlier call stay.

    DUBITO_DATA=... python benchmarks/failure_mnist.py --device cuda --seeds 5 --jobs 10 --epochs 60 --head-epochs 60 --seconds 400
    DUBITO_DATA=... python benchmarks/failure_mnist.py --train 3000 --test 3000 --epochs 4 --head-epochs 10         # a trial, on a CPU
    python benchmarks/failure_mnist.py --picture docs/images/failure_mnist.png       # draws what results/failure_mnist.json holds
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, apart, earlier, mean_and_error, result, show, write
from torch import Tensor, nn

import dubito
from dubito import Categorical, MCDropout, Model
from dubito.apps.failure import ConfidNet, Failure, errors, failures, one_minus_true, scores
from dubito.apps.network import score_loader
from dubito.data import cifar10, mnist
from dubito.metrics import accuracy, ece, nll
from dubito.priors import Normal

HELD = 5000
DECAY = 1e-4
CASES = ("smallconv", "lenet-mnist", "lenet-cifar10")
HANDED = (
    "device",
    "epochs",
    "lenet_epochs",
    "learning_rate",
    "head_epochs",
    "head_rate",
    "tune_epochs",
    "train",
    "test",
    "draws",
)
PUBLISHED = {"mcp": "5.56, 35.05, 98.63", "mc dropout": "5.26, 38.50, 98.65", "confidnet": "3.33, 45.89, 98.82"}
SHOWN = {"mcp": "maximum class probability", "tcp": "true class probability", "confidnet": "ConfidNet"}
BINS = 25


def smallconv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 144, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def lenet(channels: int, side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=(32 - side) // 2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.5), nn.Linear(120, 10),
    )  # fmt: skip


def problem(case: str, args: argparse.Namespace) -> tuple[nn.Module, tuple, tuple, tuple, MCDropout]:
    """Network, training, held-out and test images, and how it is trained."""
    read = cifar10 if case == "lenet-cifar10" else mnist
    train, test = read("train"), read("test")
    centre, spread = (0.5, 0.25) if read is cifar10 else (0.1307, 0.3081)
    x, y = (train.x - centre) / spread, train.y
    most = min(args.train or len(y), len(y) - HELD)
    tested = ((test.x - centre) / spread)[: args.test], test.y[: args.test]
    if case == "smallconv":  # as published
        network, method = (
            smallconv(),
            MCDropout(epochs=args.epochs, optimizer="sgd", learning_rate=args.learning_rate, schedule="constant"),
        )
    else:
        network, method = lenet(x.shape[1], x.shape[-1]), MCDropout(epochs=args.lenet_epochs, optimizer="sgd", learning_rate=0.01)
    return network, (x[:most], y[:most]), (x[-HELD:][: args.test], y[-HELD:][: args.test]), tested, method


def histogram(score: Tensor, wrong: Tensor) -> dict[str, list[float]]:
    """How confidence, 1 - score, is spread over what is right and what is wrong."""
    confidence = (1 - score.double()).clamp(0, 1)
    return {
        name: torch.histogram(confidence[which], bins=BINS, range=(0.0, 1.0)).hist.tolist()
        for name, which in (("right", ~wrong), ("wrong", wrong))
    }


def figures_of(found: Failure) -> dict[str, float]:
    return {key: 100 * value for key, value in found._asdict().items()}


def run(case: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    began = time.time()
    torch.manual_seed(seed)
    network, data, held, (x, y), method = problem(case, args)
    data, held, network = tuple(t.to(args.device) for t in data), tuple(t.to(args.device) for t in held), network.to(args.device)
    # the prior that makes the weight decay, which is 1 / (N scale^2)
    model = Model(network, Categorical(), Normal(scale=1 / math.sqrt(len(data[1]) * DECAY)))
    posterior = dubito.fit(model, method, data, batch_size=128, seed=seed, progress=False)
    fitted = time.time() - began
    memory = 1.0 if args.device == "cpu" else 8.0
    p, _ = posterior.predict_loader(list(x.split(1000)), "point")
    q, _ = posterior.predict_loader(list(x.split(1000)), draws=args.draws, memory=memory)
    row: dict[str, Any] = {"images": len(data[1]), "errors": int(errors(p, y).sum()), "seconds to fit": fitted}
    for name, one in (("mean weights", p), ("mc dropout", q)):
        row[name] = {metric.__name__: float(metric(one, y)) for metric in (accuracy, nll, ece)}
    drawn = failures(q, y, names=["mcp", "entropy", "mutual_information", "variation_ratio"])
    row["failures"] = {f"mc dropout, {name}": figures_of(one) for name, one in drawn.items()}
    found = failures(p, y, names=["mcp", "entropy"], oracle=True)
    wrong = errors(p, y)
    row["histograms"] = {"mcp": histogram(scores(p, ["mcp"])["mcp"], wrong), "tcp": histogram(one_minus_true(p, y), wrong)}
    if case == "smallconv":
        start = time.time()
        settings = ConfidNet(epochs=args.head_epochs, learning_rate=args.head_rate, tune_epochs=args.tune_epochs)
        fit = settings.fit(posterior, data, validation=held, seed=seed, progress=False)
        row["seconds for ConfidNet"] = time.time() - start
        row["ConfidNet, held out"] = [one["aupr_error"] for one in fit.history]
        score = score_loader(fit, x.to(args.device), size=1000)
        found |= failures(p, y, names=[], others={"confidnet": score})
        row["histograms"]["confidnet"] = histogram(score, wrong)
    row["failures"] |= {name: figures_of(one) for name, one in found.items()}
    return row


def alone(case: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own."""
    settings = {key: getattr(args, key) for key in HANDED}
    found = apart("--case", case, "--seed", str(seed), settings=settings, until=args.until)
    print(f"{case} {seed}: {json.dumps(found)[:600]}", flush=True)
    return found


def told(runs: list[dict[str, Any]], *path: str) -> str:
    """Mean and standard error over seeds of a figure, by its path."""
    values = []
    for one in runs:
        value: Any = one
        for key in path:
            value = value[key]
        values.append(value)
    mean, spread = mean_and_error(values)
    return f"{mean:.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else "")


def report(runs: dict[str, list[dict[str, Any]]], args: argparse.Namespace, began: float, *, last: bool) -> None:
    headline: dict[str, list[Any]] = {}
    rows: list[list[object]] = []
    before, commands = earlier("failure_mnist", runs)
    runs = {**before, **runs}
    for case, found in runs.items():
        if not found:
            continue
        for name in found[0]["failures"]:
            short = "mc dropout" if name == "mc dropout, entropy" else name
            three = [told(found, "failures", name, key) for key in ("fpr95", "aupr_error", "auroc")]
            published = PUBLISHED.get(short, "") if case == "smallconv" else ""
            rows.append([case, name, *three, published])
            beside = f" (published: {published})" if published else ""
            headline[f"{case}, {name}: FPR95, AUPR-error, AUROC in %{beside}"] = [", ".join(three), ""]
        for name in ("mean weights", "mc dropout"):
            cells = [f"{mean_and_error([one[name][key] for one in found])[0]:.4f}" for key in ("accuracy", "nll", "ece")]
            headline[f"{case}, {name}: accuracy, NLL, ECE"] = [", ".join(cells), ""]
    if last:
        show("Failure prediction", ["case", "score", "FPR95", "AUPR-error", "AUROC", "published"], rows)
    settings = {key: value for key, value in vars(args).items() if key not in ("until", "case", "seed", "picture")}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    settings |= {"done": {case: len(found) for case, found in runs.items()}, "earlier": commands}
    write("failure_mnist", settings=settings, figures=runs, headline=headline, seconds=time.time() - began)


def draw(path: str) -> None:
    """Confidence over successes and errors, of all seeds together, as shares of each."""
    from dubito.report.canvas import BLUE, VERMILION, grid, render

    runs = json.loads((RESULTS / "failure_mnist.json").read_text())["figures"]["smallconv"]
    edges = [i / BINS for i in range(BINS + 1)]

    def panels(figure: Any) -> None:
        for axes, (name, title) in zip(figure.subplots(1, len(SHOWN), sharey=True), SHOWN.items(), strict=True):
            for kind, colour in (("right", BLUE), ("wrong", VERMILION)):
                counts = torch.tensor([one["histograms"][name][kind] for one in runs]).sum(0)
                share = (100 * counts / counts.sum()).numpy()
                axes.stairs(share, edges, fill=True, color=colour, alpha=0.35, linewidth=0)
                axes.stairs(share, edges, color=colour, linewidth=1.5, label=f"{kind} ({int(counts.sum()):,})")
            axes.set(title=title, xlabel="confidence", yscale="log", xlim=(0, 1))
            grid(axes, "y")
        figure.axes[0].set_ylabel("share of each in %")
        figure.axes[0].legend(loc="upper left")

    Path(path).write_bytes(render(panels, (9.6, 3.0), kind="png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, by commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="what is not done by then is left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=100, help="of smallconv")
    parser.add_argument("--lenet-epochs", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of smallconv")
    parser.add_argument("--head-epochs", type=int, default=100)
    parser.add_argument("--head-rate", type=float, default=1e-4)
    parser.add_argument("--tune-epochs", type=int, default=10)
    parser.add_argument("--train", type=int, help="training images; all but those held out")
    parser.add_argument("--test", type=int, help="test images at most; all")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--picture", help="where to draw the histograms")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    if args.case is not None:
        result(run(args.case, args.seed, args))
        return
    if args.picture is not None:
        draw(args.picture)
        return
    args.until = None if args.seconds is None else began + args.seconds
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in args.only.split(",")}
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(alone, case, seed, args): case for seed in range(args.seeds) for case in runs}
        for one in as_completed(waiting):
            if (found := one.result()) is not None:
                runs[waiting[one]].append(found)
                report(runs, args, began, last=False)
    report(runs, args, began, last=True)


if __name__ == "__main__":
    main()
