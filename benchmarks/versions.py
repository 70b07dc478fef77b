"""Two versions of the package against each other: a training step, a Laplace fit and its predictions, one pass, a leapfrog step.

    git worktree add ../before TAG && python benchmarks/versions.py ../before/src src --pairs 25

Each version runs in a process of its own, which prepares its cases once. A pair times the same case in both, in an order drawn at
random. Reported is the geometric mean of the ratios new / old with a 95 % interval (Student t of the log ratios).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

T_95 = {15: 2.145, 20: 2.093, 25: 2.064, 30: 2.045, 40: 2.023}  # two-sided quantiles of Student t, by the number of pairs


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def steps_of(
    dubito: Any, model: Any, method: Any, data: Any, first: int, last: int, device: str, **options: Any
) -> Callable[[], float]:
    """Seconds from step `first` to step `last` of a fit, without what comes before and after."""

    def run() -> float:
        times = {}

        def note(event: Any) -> None:
            if event.step in (first, last):
                finish(device)
                times[event.step] = time.perf_counter()

        dubito.fit(model, method, data, callbacks=[note], progress=False, **options)
        return times[last] - times[first]

    return run


def whole(run: Callable[[], object], repeats: int, device: str) -> Callable[[], float]:
    """Seconds of `repeats` calls."""

    def timed() -> float:
        finish(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        finish(device)
        return time.perf_counter() - start

    return timed


def cases(device: str) -> dict[str, Callable[[], float]]:
    """The cases of the version that this process imports."""
    import dubito

    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1)).to(device)
    conv = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    ).to(device)
    x, y = torch.randn(512, 10, device=device), torch.randn(512, 1, device=device)
    images, labels = torch.randn(512, 1, 16, 16, device=device), torch.randint(10, (512,), device=device)
    table = dubito.Model(mlp, dubito.Gaussian(scale=0.3), dubito.priors.Normal(scale=1.0))
    pictures = dubito.Model(conv, dubito.Categorical(), dubito.priors.Normal(scale=1.0))
    kron = dubito.fit(pictures, dubito.Laplace(), (images, labels), progress=False)
    dense = dubito.fit(table, dubito.Laplace("dense"), (x, y), progress=False)
    mean_field = dubito.fit(table, dubito.Variational(epochs=2), (x, y), progress=False)
    hmc = dubito.HMC(step_size=1e-4, path_length=5e-3, tune=False, burn_in=0, draws=60, chains=1)
    return {
        "training step, MLP": steps_of(dubito, table, dubito.MAP(epochs=150), (x, y), 40, 590, device, batch_size=128),
        "training step, CNN": steps_of(dubito, pictures, dubito.MAP(epochs=20), (images, labels), 8, 78, device, batch_size=128),
        "Laplace fit, CNN": whole(lambda: dubito.fit(pictures, dubito.Laplace(), (images, labels), progress=False), 2, device),
        "Laplace predict, CNN": whole(lambda: kron.predict(images[:128]), 3, device),
        "Laplace fit, MLP": whole(lambda: dubito.fit(table, dubito.Laplace("dense"), (x, y), progress=False), 10, device),
        "Laplace predict, MLP": whole(lambda: dense.predict(x), 40, device),
        "one pass, MLP": whole(lambda: mean_field.predict(x, how="streamlined"), 500, device),
        "leapfrog step, MLP": steps_of(dubito, table, hmc, (x, y), 5, 55, device),
    }


def serve(device: str) -> None:
    """Answer every case that is named on standard input by its seconds."""
    torch.set_num_threads(1)
    ready = cases(device)
    for case in ready.values():
        case()  # warm-up
    print(json.dumps(list(ready)), flush=True)
    for line in sys.stdin:
        print(ready[line.rstrip("\n")](), flush=True)


def start(source: Path, device: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{source.resolve()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "ignore", __file__, "--serve", "--device", device]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def version(source: Path) -> str:
    """The commit of a source tree, or its folder where git does not know it."""
    found = subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or source.resolve().parent.name


def ask(process: subprocess.Popen, case: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def interval(ratios: list[float]) -> dict[str, float]:
    """Geometric mean of the ratios and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    quantile = T_95[max(n for n in T_95 if n <= len(ratios))]
    middle, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(middle), "low": math.exp(middle - quantile * error), "high": math.exp(middle + quantile * error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", type=Path, help="the folder `src` of the old version")
    parser.add_argument("new", nargs="?", type=Path, help="the folder `src` of the new version")
    parser.add_argument("--pairs", type=int, default=25, help="at least 15")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.device)
        return
    if args.old is None:
        print("versions.py compares two source trees and is run by hand: give the folders `src` of both")
        return
    from measure import show, write

    begin = time.perf_counter()
    processes = {"old": start(args.old, args.device), "new": start(args.new, args.device)}
    names, _ = (json.loads(process.stdout.readline()) for process in processes.values() if process.stdout is not None)
    order = random.Random(0)
    result: dict[str, Any] = {}
    for name in names:
        ratios, seconds = [], []
        for _ in range(args.pairs):
            sides = order.sample(["old", "new"], 2)
            times = {side: ask(processes[side], name) for side in sides}
            ratios.append(times["new"] / times["old"])
            seconds.append(times["new"])
        result[name] = {**interval(ratios), "seconds": statistics.median(seconds)}
        print(
            f"{name:24} new / old {result[name]['ratio']:.3f} [{result[name]['low']:.3f}, {result[name]['high']:.3f}]", flush=True
        )
    for process in processes.values():
        process.terminate()
    suffix = "" if args.device == "cpu" else "_gpu"
    show(
        "new / old",
        ["case", "ratio", "low", "high"],
        [[name, row["ratio"], row["low"], row["high"]] for name, row in result.items()],
    )
    headline = {
        f"{name}, new / old": [f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})", "1.03"]
        for name, row in result.items()
    }
    settings = {"pairs": args.pairs, "device": args.device, "old": version(args.old), "new": version(args.new)}
    write(f"versions{suffix}", settings=settings, figures=result, headline=headline, seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
