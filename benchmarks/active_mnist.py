"""Active learning on MNIST: labels until a test accuracy of 90 and 95 %, beside the published figures.

- `gal`: conv32-conv32 4x4, pooling, dropout .25, 128 units, dropout .5 (Gal, Islam & Ghahramani 2017), 10 labels at a time. An arm
  with `:softmax` trains the same and asks by the one network without dropout, as in the comparison there.
- `batchbald`: conv32-conv64 5x5 with dropout of channels, 128 units, dropout (Kirsch, van Amersfoort & Gal 2019), 10 at a time.
- `repeated`: the same net where every image is in the pool five times, with noise of .1: BALD asks for copies.
- `cost`: seconds to score all images with 50 draws, as a ratio to one plain pass.

20 labels to begin with, two of each class, count as labels. Every fit starts anew and makes `--steps` steps of Adam; there is no
validation set, and nothing is chosen on test images. Every arm and seed is a process, `--jobs` at a time, and the result is written
after each.

    DUBITO_DATA=... python benchmarks/active_mnist.py --device cuda --seeds 3 --jobs 12 --seconds 300
    DUBITO_DATA=... python benchmarks/active_mnist.py --cases gal --acquisitions variation_ratio,random --pool 3000 --test 1000 \
        --labels 100 --steps 80 --draws 20                                                              # a trial, on a CPU
    python benchmarks/active_mnist.py --picture docs/images/active_mnist.png           # draws what results/active_mnist.json holds
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, apart, interleaved, result, show, write
from torch import Tensor, nn

from dubito import Categorical, MCDropout, Model
from dubito.apps.active import ActiveLearning, BatchBALD, Measured, Pool, View, acquisition, balanced
from dubito.data import mnist
from dubito.posteriors import Point, Stochastic
from dubito.posteriors.predict.dropout import Dropout
from dubito.priors import Normal

ARMS = {
    "gal": (
        "bald",
        "variation_ratio",
        "entropy",
        "mean_std",
        "random",
        "bald:softmax",
        "least_confidence:softmax",
        "entropy:softmax",
    ),
    "batchbald": ("batchbald", "bald", "power_bald", "epig", "random"),
    "repeated": ("batchbald", "bald", "power_bald", "random"),
}
PUBLISHED = {
    ("gal", "random"): "255 / 835",
    ("gal", "mean_std"): "230 / 695",
    ("gal", "bald"): "145 / 335",
    ("gal", "entropy"): "165 / 355",
    ("gal", "variation_ratio"): "120 / 295",
    ("batchbald", "bald"): "155 / 260 (3 of 6)",
    ("batchbald", "batchbald"): "105 / 225",
    ("repeated", "bald"): "250 (3 of 6) / none",
    ("repeated", "random"): "155 / none",
    ("repeated", "batchbald"): "110 / 270",
}
GOALS = (0.9, 0.95)
COPIES, NOISE = 5, 0.1
HANDED = (
    "device", "pool", "repeated_pool", "test", "labels", "batch", "steps", "batch_size", "learning_rate", "scale", "draws", "most",
    "size", "stop",
)  # fmt: skip


def gal() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4), nn.ReLU(), nn.Conv2d(32, 32, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(32 * 121, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def channels() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 5), nn.Dropout2d(0.5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def head() -> nn.Module:
    """Gal's network with dropout in its head only."""
    return nn.Sequential(*[layer for layer in gal() if not (isinstance(layer, nn.Dropout) and layer.p == 0.25)])


NETWORKS = {"gal": gal, "batchbald": channels, "repeated": channels}


def images(case: str, seed: int, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pool and test images, on the device, normalised."""
    train, test = mnist("train"), mnist("test")
    source = torch.Generator().manual_seed(seed)
    most = args.repeated_pool if case == "repeated" else args.pool
    rows = torch.randperm(len(train.y), generator=source)[:most]
    x, y = ((train.x[rows] - 0.1307) / 0.3081).to(args.device), train.y[rows]
    if case == "repeated":
        x, y = x.repeat(COPIES, 1, 1, 1), y.repeat(COPIES)
        x = x + NOISE * torch.randn(x.shape, generator=source).to(x)
    if args.tuning:  # images that are neither in the pool nor of the test
        rest = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(seed))[most:]
        test = type(test)(train.x[rest], train.y[rest])
    x_test = ((test.x[: args.test] - 0.1307) / 0.3081).to(args.device)
    return x, y, x_test, test.y[: args.test].to(args.device)


def method(args: argparse.Namespace) -> Any:
    """As many steps for few labels as for many."""

    def of(n: int) -> MCDropout:
        epochs = math.ceil(args.steps / math.ceil(n / args.batch_size))
        return MCDropout(epochs=epochs, learning_rate=args.learning_rate, draws=args.draws)

    return of


def run(case: str, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    began = time.time()
    name, _, off = arm.partition(":")
    x, y, x_test, y_test = images(case, seed, args)
    torch.manual_seed(seed)
    model = Model(NETWORKS[case]().to(args.device), Categorical(), Normal(scale=args.scale))
    memory = 1.0 if args.device == "cpu" else 8.0
    learning = ActiveLearning(
        model, method(args), x, acquisition=BatchBALD(memory=memory) if name == "batchbald" else acquisition(name),
        oracle=lambda i: y[i], held_out=(x_test, y_test), start="anew", bayesian=not off, draws=None if off else args.draws,
        most=args.most, memory=memory, size=args.size, batch_size=args.batch_size, seed=seed,
    )  # fmt: skip
    first = balanced(y, 20, seed=seed)
    learning.tell(first, y[first])
    reached = False
    while not reached and len(learning.labelled) < args.labels and (args.until is None or time.time() < args.until):
        learning.step(args.batch)
        reached = learning.history[-1].held_out["accuracy"] >= args.stop
    if not reached:
        learning.refit()
    rounds = learning.history
    labels, accuracy = learning.curve()
    means = {key: statistics.mean([one.seconds.get(key, 0.0) for one in rounds]) for key in ("fit", "ask")}
    classes = torch.bincount(y[learning.labelled[20:]], minlength=10).tolist()
    return {
        "seed": seed,
        "labels": labels,
        "accuracy": accuracy,
        "nll": [one.held_out["nll"] for one in rounds],
        "epistemic": [one.pool.get("epistemic") for one in rounds],
        "goals": {str(goal): next((n for n, a in zip(labels, accuracy, strict=True) if a >= goal), None) for goal in GOALS},
        "asked by class": classes,
        "seconds a round": means,
        "seconds": time.time() - began,
    }


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Scoring by 50 draws, as a ratio to one plain pass over the same images, of the fastest rounds."""
    x = images("gal", 0, args)[0]
    found = {}
    for name, build in (("dropout in the head only", head), ("dropout .25 and .5 (Gal)", gal), ("dropout of channels", channels)):
        torch.manual_seed(0)
        model = Model(build().to(args.device), Categorical())
        weights = model.parameters(), model.buffers()
        pool, rows = Pool(x), torch.arange(len(x))
        memory = 1.0 if args.device == "cpu" else 8.0

        def plain(model: Model = model, weights: Any = weights) -> None:
            point = Point(model, *weights)
            for part in x.split(args.size):
                point.predict(part).mean  # noqa: B018
            if args.device != "cpu":
                torch.cuda.synchronize()

        def score(
            model: Model = model, weights: Any = weights, pool: Pool = pool, rows: Tensor = rows, memory: float = memory
        ) -> None:
            posterior = Stochastic(model, *weights, Dropout(), draws=50)
            view = View(posterior, pool, rows, memory=memory, size=args.size)
            Measured("bald").choose(view, 10, torch.Generator())

        seconds = interleaved({"plain pass": plain, "50 draws": score}, 3 if args.device == "cpu" else 5)
        best = {key: min(values) for key, values in seconds.items()}
        found[name] = {"images": len(x), **best, "ratio": best["50 draws"] / best["plain pass"]}
        print(f"cost, {name}: {found[name]}", flush=True)
    return found


def alone(case: str, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own; out of time, it hands in what it has."""
    if args.until is not None and time.time() > args.until - 10:
        return None
    settings = {key: getattr(args, key) for key in (*HANDED, "tuning", "until")}
    found = apart("--run", case, arm, str(seed), settings=settings, until=args.until, grace=60)
    if found is not None:
        told = {key: found[key] for key in ("goals", "seconds a round", "seconds")}
        print(f"{case} {arm} {seed}: {found['labels'][-1]} labels, {found['accuracy'][-1]:.4f}, {json.dumps(told)}", flush=True)
    return found


def reached(runs: list[dict[str, Any]], goal: float) -> str:
    """The median over seeds of the labels that were needed, and the range; of those that never came there it is known only that."""
    values = sorted(math.inf if one["goals"][str(goal)] is None else one["goals"][str(goal)] for one in runs)
    got = [int(value) for value in values if value < math.inf]
    if not got:
        return f"none by {max(one['labels'][-1] for one in runs)}"
    middle = statistics.median_low(values)
    median = f"{int(middle)}" if middle < math.inf else f"> {got[-1]}"
    share = "" if len(got) == len(values) else f", {len(got)} of {len(values)}"
    return f"{median} [{got[0]}, {got[-1]}]{share}" if len(values) > 1 else median


def report(
    runs: dict[str, dict[str, list]],
    costs: dict[str, Any],
    commands: dict[str, Any],
    args: argparse.Namespace,
    began: float,
    *,
    last: bool,
) -> None:
    headline: dict[str, list[Any]] = {}
    rows: list[list[object]] = []
    for case, arms in runs.items():
        for arm, found in arms.items():
            if found:
                cells = [reached(found, goal) for goal in GOALS]
                beside = PUBLISHED.get((case, arm), "")
                rows.append([case, arm, len(found), *cells, beside])
                headline[f"{case}, {arm}: labels to 90 / 95 % ({len(found)} seeds)"] = [" / ".join(cells), beside]
    for name, one in costs.items():
        headline[f"{one['images']:,} images by 50 draws, {name}: times a plain pass"] = [one["ratio"], ""]
    if last:
        try:
            show("Active learning on MNIST", ["case", "arm", "seeds", "90 %", "95 %", "published"], rows)
        except ImportError:  # rich is not everywhere
            for row in rows:
                print(" | ".join(map(str, row)))
    hidden = ("until", "run", "picture")
    settings = {key: value for key, value in vars(args).items() if key not in hidden} | {"earlier": commands}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write(
        "active_mnist", settings=settings, figures={"runs": runs, "cost": costs}, headline=headline, seconds=time.time() - began
    )


def kept(again: dict[str, list[str]]) -> tuple[dict[str, dict[str, list]], dict[str, Any], dict[str, Any]]:
    """What the result file has, but for the arms `again`, in the order of ARMS; its costs; and how each arm was made."""
    content = json.loads((RESULTS / "active_mnist.json").read_text())
    now = {key: content[key] for key in ("date", "command", "machine", "versions")}
    before, known = content["figures"]["runs"], content["settings"].get("earlier", {})
    runs = {
        case: {arm: before[case][arm] for arm in arms if before.get(case, {}).get(arm) and arm not in again.get(case, ())}
        for case, arms in ARMS.items()
    }
    made = {f"{case}, {arm}": known.get(f"{case}, {arm}", now) for case, arms in runs.items() for arm in arms}
    return runs, content["figures"]["cost"], made


def seeds(found: list[dict[str, Any]]) -> set[int]:
    """Those an arm has; runs that do not tell theirs were the first, all of them handed in."""
    return {one.get("seed", i) for i, one in enumerate(found)}


def middle(found: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """The median over runs at every number of labels; one that has come to its goal stays there, one that was cut short is left out."""
    goal = [one for one in found if one["accuracy"][-1] >= GOALS[-1]]
    labels = sorted({n for one in found for n in one["labels"]})
    values = []
    for n in labels:
        here = [one["accuracy"][one["labels"].index(n)] for one in found if n in one["labels"]]
        values.append(statistics.median([*here, *(one["accuracy"][-1] for one in goal if one["labels"][-1] < n)]))
    return labels, values


def draw(path: str) -> None:
    """Accuracy over labels, one panel a case: every run a thin line, the median thick; lines end at the goal or out of time."""
    from dubito.report.canvas import grid, render

    runs = {
        case: arms for case, arms in json.loads((RESULTS / "active_mnist.json").read_text())["figures"]["runs"].items() if arms
    }
    names = list(dict.fromkeys(arm.split(":")[0] for arms in runs.values() for arm in arms))  # one colour in all panels

    def panels(figure: Any) -> None:
        from matplotlib import colormaps

        for axes, (case, arms) in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0], runs.items(), strict=True):
            for arm, found in arms.items():
                name, _, off = arm.partition(":")
                how = {"color": colormaps["tab10"](names.index(name)), "linestyle": "--" if off else "-"}
                for one in found:
                    axes.plot(one["labels"], one["accuracy"], **how, linewidth=0.6, alpha=0.35)
                axes.plot(*middle(found), **how, linewidth=1.6, label=name.replace("_", " ") + (", softmax" if off else ""))
            axes.set(title=case, xlabel="labels", ylim=(0.7, 0.97), xlim=(0, 600))
            axes.legend(loc="lower right", fontsize=7)
            grid(axes, "y")
        figure.axes[0].set_ylabel("test accuracy")

    Path(path).write_bytes(render(panels, (4.2 * len(runs), 3.8), kind="png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="gal,batchbald,repeated", help="by commas")
    parser.add_argument("--acquisitions", help="by commas, of the arms that a case has")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="runs that are not done by then hand in what they have")
    parser.add_argument("--labels", type=int, default=1000, help="at most")
    parser.add_argument("--stop", type=float, default=0.95, help="a run ends at this accuracy")
    parser.add_argument("--batch", type=int, default=10, help="labels at a time")
    parser.add_argument("--pool", type=int, default=60_000, help="images in the pool")
    parser.add_argument("--repeated-pool", type=int, default=12_000, help=f"images that are there {COPIES} times")
    parser.add_argument("--most", type=int, help="random candidates that are scored at a time; all")
    parser.add_argument("--test", type=int, help="test images; all")
    parser.add_argument("--steps", type=int, default=400, help="of a fit")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--scale", type=float, default=3.0, help="of the prior")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--size", type=int, help="images at a time; 500, on a GPU 4000")
    parser.add_argument("--tuning", action="store_true", help="judge by training images outside the pool, to choose settings")
    parser.add_argument("--no-cost", action="store_true", help="leave out the cost of scoring")
    parser.add_argument("--resume", action="store_true", help="keep the runs that results/active_mnist.json has")
    parser.add_argument("--again", action="store_true", help="with --resume: all chosen arms are run anew")
    parser.add_argument("--picture", help="where to draw the curves")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    args.size = args.size or (500 if args.device == "cpu" else 4000)
    if args.run is not None:
        result(run(args.run[0], args.run[1], int(args.run[2]), args))
        return
    if args.picture is not None:
        draw(args.picture)
        return
    args.until = None if args.seconds is None else began + args.seconds
    chosen = None if args.acquisitions is None else args.acquisitions.split(",")
    arms = {case: [arm for arm in ARMS[case] if chosen is None or arm in chosen] for case in args.cases.split(",")}
    costs: dict[str, Any] = {} if args.no_cost else cost(args)  # before the others take the device
    commands: dict[str, Any] = {}
    runs: dict[str, dict[str, list]] = {}
    if args.resume:
        runs, before, commands = kept(arms if args.again else {})
        costs = costs or before
    runs = {case: runs.get(case, {}) for case in ARMS if case in runs or case in arms}
    for case, names in arms.items():
        runs[case] = {arm: runs[case].get(arm, []) for arm in ARMS[case] if arm in runs[case] or arm in names}
    wanted = [
        (case, arm, seed)
        for seed in range(args.seeds)
        for case, names in arms.items()
        for arm in names
        if seed not in seeds(runs[case][arm])
    ]
    with ThreadPoolExecutor(args.jobs) as threads:
        waiting = {threads.submit(alone, case, arm, seed, args): (case, arm) for case, arm, seed in wanted}
        for one in as_completed(waiting):
            if (found := one.result()) is not None:
                case, arm = waiting[one]
                runs[case][arm].append(found)
                report(runs, costs, commands, args, began, last=False)
    report(runs, costs, commands, args, began, last=True)


if __name__ == "__main__":
    main()
