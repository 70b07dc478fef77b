"""Few labels and many images: stability training on MNIST with 100 labels and CIFAR-10 with 4,000, beside the published errors.

- `digits`: scikit-learn's 8x8 images, 50 labels of 1,347; 64-128-128-10 with dropout, shifts by a pixel, noise of .15. For a CPU.
- `mnist`: conv32-conv64 5x5, 128 units, dropout; shifts by up to 2 pixels, noise of .15. The papers have no MNIST.
- `cifar10`: the ConvNet of 13 layers of Laine & Aila (2017), leaky ReLU, dropout .5; shifts by 2, mirror images, noise of .15. Other
  than there: plain BatchNorm (theirs is mean-only, with weight normalisation), no ZCA, far fewer steps unless --steps says so.

Arms: `supervised` (the labels alone, augmented in the same way), `pi`, `temporal`, `teacher`, with the weights of the papers. Labels
are balanced over the classes; all training images are given without labels. Nothing is chosen on test images: --tuning judges by
training images that are in neither part. An arm and seed is a process, `--jobs` at a time; with --seconds each measures its own steps
first and plans as many as fit into its share, so that learning rates have come down by the end. Where steps take longer later than they
did at first, a run is stopped before that: `steps` is then less than `planned`, and the headline says of how many. The result is
written after each, beside what an earlier call has found of other cases.

    DUBITO_DATA=... python benchmarks/semi_supervised.py --cases mnist --device cuda --seeds 3 --jobs 12 --seconds 150
    DUBITO_DATA=... python benchmarks/semi_supervised.py --cases cifar10 --device cuda --jobs 4 --seconds 420
    python benchmarks/semi_supervised.py --seeds 5 --steps 2000                                              # on a CPU, minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, apart, result, show, write
from torch import Tensor, nn

import dubito
from dubito import MAP, Categorical, MeanTeacher, Model, PiModel, TemporalEnsembling
from dubito.apps.active import balanced
from dubito.augment import Compose, Flip, Noise, Shift
from dubito.data import Examples, cifar10, digits, mnist
from dubito.metrics import accuracy, ece, nll
from dubito.priors import Normal

ARMS = ("supervised", "pi", "temporal", "teacher")
LABELS = {"digits": 50, "mnist": 100, "cifar10": 4000}
PUBLISHED = {  # errors in %, of the papers' own networks and hundreds of epochs
    ("cifar10", "supervised"): "34.85 ± 1.65 (Laine & Aila), 20.66 (Tarvainen & Valpola)",
    ("cifar10", "pi"): "12.36 ± .31, 13.20 (Tarvainen & Valpola)",
    ("cifar10", "temporal"): "12.16 ± .24",
    ("cifar10", "teacher"): "12.31 ± .28",
}
AUGMENT = {
    "digits": Compose((Shift(1), Noise(0.15))),
    "mnist": Compose((Shift(2), Noise(0.15))),
    "cifar10": Compose((Shift(2), Flip(), Noise(0.15))),
}
STEPS = {"digits": 2000, "mnist": 20_000, "cifar10": 150_000}  # at most, where --steps says nothing
HANDED = ("device", "pool", "test", "steps", "batch_size", "learning_rate", "scale")
TRIAL, SKIPPED, MARGIN = 100, 20, 0.7  # steps that are timed, but for the first; share of the time that is planned for


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 10),
    )  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def convnet() -> nn.Module:
    """13 layers: three of 128 channels, three of 256, 512-256-128, a mean and a linear layer."""

    def block(inputs: int, outputs: int, kernel: int, padding: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1),
        ]

    return nn.Sequential(
        *block(3, 128, 3, 1), *block(128, 128, 3, 1), *block(128, 128, 3, 1), nn.MaxPool2d(2), nn.Dropout(0.5),
        *block(128, 256, 3, 1), *block(256, 256, 3, 1), *block(256, 256, 3, 1), nn.MaxPool2d(2), nn.Dropout(0.5),
        *block(256, 512, 3, 0), *block(512, 256, 1, 0), *block(256, 128, 1, 0),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


NETWORKS = {"digits": perceptron, "mnist": small, "cifar10": convnet}


def images(case: str, seed: int, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All training images and some to judge by, normalised."""
    if case == "digits":
        split = digits(seed=seed)
        train = Examples(split.x_train.view(-1, 1, 8, 8), split.y_train)
        test = Examples(split.x_test.view(-1, 1, 8, 8), split.y_test)
    else:
        read = mnist if case == "mnist" else cifar10
        train, test = read("train"), read("test")
    order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(seed))
    rows = order[: args.pool]
    if args.tuning:
        held = min(2000, len(order) // 4)
        rows, rest = rows[: len(order) - held], order[-held:]
        test = type(test)(train.x[rest], train.y[rest])
    x = train.x[rows]
    centre, width = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)  # of a channel
    return (x - centre) / width, train.y[rows], (test.x[: args.test] - centre) / width, test.y[: args.test]


def method(case: str, arm: str, more: Tensor, steps: int, args: argparse.Namespace) -> Any:
    """As many epochs as make so many steps."""
    batches = -(-LABELS[case] // args.batch_size)
    if arm != "supervised":
        batches = max(batches, -(-len(more) // args.batch_size))
    inner = MAP(epochs=max(1, round(steps / batches)), learning_rate=args.learning_rate, warmup=0.02)
    common: dict[str, Any] = {"augment": AUGMENT[case]}
    if arm == "supervised":
        return PiModel(inner, weight=0.0, **common)
    common |= {"unlabelled": more, "unlabelled_size": args.batch_size}
    if arm == "pi":
        return PiModel(inner, weight=100.0, **common)
    if arm == "temporal":
        return TemporalEnsembling(inner, weight=30.0, **common)
    return MeanTeacher(inner, weight=100.0, decay=0.999 if steps > 5000 else 0.99, **common)


def run(case: str, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    began = time.time()
    x, y, x_test, y_test = images(case, seed, args)
    few = balanced(y, LABELS[case], seed=seed)
    torch.manual_seed(seed)
    network = NETWORKS[case]().to(args.device)
    more = x.to(args.device)
    if args.device != "cpu":  # convolutions are faster so
        network, more = network.to(memory_format=torch.channels_last), more.to(memory_format=torch.channels_last)
    model = Model(network, Categorical(), Normal(scale=args.scale))
    options = {"batch_size": args.batch_size, "seed": seed, "progress": False}
    options["precision"] = "bfloat16" if args.device != "cpu" else None
    steps = args.steps or STEPS[case]
    if args.until is not None:
        seconds = trial(model, method(case, arm, more, steps, args), (more[few], y[few]), options)
        steps = max(1, min(steps, int(MARGIN * (args.until - time.time() - 15) / seconds)))
    chosen = method(case, arm, more, steps, args)
    made, told = [0], []

    def watch(event: Any) -> bool:
        made[0] = event.step
        if event.step % max(1, event.steps // 10) == 0:
            told.append({key: float(event.info[key]) for key in ("log_likelihood", "consistency")})
        return args.until is not None and time.time() > args.until

    posterior = dubito.fit(model, chosen, (more[few], y[few].to(args.device)), callbacks=[watch], **options)
    p, _ = posterior.predict_loader(list(zip(x_test.split(500), y_test.split(500), strict=True)))
    return {
        "error": 100 * (1 - float(accuracy(p, y_test))),
        "nll": float(nll(p, y_test)),
        "ece": float(ece(p, y_test)),
        "steps": made[0],
        "planned": chosen.steps(-(-LABELS[case] // args.batch_size)),
        "passes": made[0] * args.batch_size / len(more),
        "told": told,
        "seconds": time.time() - began,
    }


def trial(model: Model, chosen: Any, data: tuple[Tensor, Tensor], options: dict[str, Any]) -> float:
    """Seconds a step, while the other processes do the same."""
    times: list[float] = []

    def note(event: Any) -> bool:
        if model.device.type == "cuda" and event.step in (SKIPPED, TRIAL):
            torch.cuda.synchronize()
        times.append(time.time())
        return event.step >= TRIAL

    dubito.fit(model, chosen, data, callbacks=[note], **options)
    if len(times) <= SKIPPED:
        return (times[-1] - times[0] + 1e-3) / len(times)
    return (times[-1] - times[SKIPPED - 1]) / (len(times) - SKIPPED)


def alone(case: str, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own."""
    until = args.until
    if until is not None and time.time() > until - 30:
        return None
    if until is not None and args.rounds > 1:  # processes that come after others have their share of the time
        until = min(until, time.time() + (until - args.began) / args.rounds)
    settings = {key: getattr(args, key) for key in (*HANDED, "tuning")} | {"until": until}
    found = apart("--run", case, arm, str(seed), settings=settings)
    if found is not None:
        told = {key: round(found[key], 4) for key in ("error", "nll", "ece", "steps", "planned", "passes", "seconds")}
        print(f"{case} {arm} {seed}: {json.dumps(told)}", flush=True)
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def merged(before: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call has found of other cases stays, with its settings."""
    return {key: {**before.get(key, {}), **figures[key]} for key in ("runs", "settings")}


def summary(figures: dict[str, Any]) -> tuple[list[list[object]], dict[str, list[Any]]]:
    """The rows of the table, and the headline."""
    rows: list[list[object]] = []
    headline: dict[str, list[Any]] = {}
    for case, arms in figures["runs"].items():
        where = figures["settings"][case].get("gpu", "CPU")  # cases may come from different machines
        for arm, found in arms.items():
            if found:
                error, beside = spread([one["error"] for one in found]), PUBLISHED.get((case, arm), "")
                steps = round(statistics.mean(one["steps"] for one in found))
                rows.append([case, arm, len(found), steps, error, spread([one["nll"] for one in found]), beside])
                short = sum(one["steps"] < one["planned"] for one in found)
                told = f"{len(found)} seeds, {steps:,} steps{f', {short} stopped early' if short else ''}, {where}"
                headline[f"{case}, {LABELS[case]:,} labels, {arm}: error in % ({told})"] = [error, beside]
    return rows, headline


def join(args: argparse.Namespace) -> None:
    """Add the cases of a result that was written elsewhere."""
    other, path = json.loads(args.join.read_text()), RESULTS / "semi_supervised.json"
    for own in other["figures"]["settings"].values():
        own |= {key: other[key] for key in ("date", "command", "machine", "versions")}
    figures = merged(json.loads(path.read_text())["figures"], other["figures"])
    write("semi_supervised", settings={}, figures=figures, headline=summary(figures)[1], seconds=other["seconds"])


def report(runs: dict[str, dict[str, list]], args: argparse.Namespace, *, last: bool) -> None:
    hidden = ("until", "run", "began", "rounds", "join")
    settings = {key: value for key, value in vars(args).items() if key not in hidden}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    path = RESULTS / "semi_supervised.json"
    before = json.loads(path.read_text())["figures"] if path.exists() else {}
    figures = merged(before, {"runs": runs, "settings": dict.fromkeys(args.cases.split(","), settings)})
    rows, headline = summary(figures)
    if last:
        try:
            show("Few labels", ["case", "arm", "seeds", "steps", "error %", "NLL", "published"], rows)
        except ImportError:  # rich is not everywhere
            for row in rows:
                print(" | ".join(map(str, row)))
    write("semi_supervised", settings=settings, figures=figures, headline=headline, seconds=time.time() - args.began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="digits", help="by commas: digits, mnist, cifar10")
    parser.add_argument("--arms", default=",".join(ARMS), help="by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="runs make as many steps as fit into their share of this")
    parser.add_argument("--steps", type=int, help="of a fit, at most")
    parser.add_argument("--pool", type=int, default=60_000, help="training images, labelled and not; all")
    parser.add_argument("--test", type=int, help="test images; all")
    parser.add_argument("--batch-size", type=int, default=100, help="labelled images a step, and as many without labels")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--scale", type=float, default=10.0, help="of the prior")
    parser.add_argument("--tuning", action="store_true", help="judge by training images that are in neither part")
    parser.add_argument("--join", type=Path, help="a result file of another machine: add its cases to ours, and do no more")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        result(run(args.run[0], args.run[1], int(args.run[2]), args))
        return
    if args.join is not None:
        join(args)
        return
    args.began = time.time()
    args.until = None if args.seconds is None else args.began + args.seconds
    runs: dict[str, dict[str, list]] = {case: {arm: [] for arm in args.arms.split(",")} for case in args.cases.split(",")}
    tasks = [(case, arm, seed) for case in reversed(runs) for seed in range(args.seeds) for arm in runs[case]]  # CIFAR-10 first
    args.rounds = -(-len(tasks) // args.jobs)
    with ThreadPoolExecutor(args.jobs) as threads:
        waiting = {threads.submit(alone, *task, args): task for task in tasks}
        for done in as_completed(waiting):
            case, arm, _ = waiting[done]
            if (found := done.result()) is not None:
                runs[case][arm].append(found)
                report(runs, args, last=False)
    report(runs, args, last=True)


if __name__ == "__main__":
    main()
