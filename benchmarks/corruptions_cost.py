"""What the corruptions cost: seconds for each of the 19 over the 10,000 test images of CIFAR-10 at one severity.

    DUBITO_DATA=folder python benchmarks/corruptions_cost.py

Without the data, as many random images take its place; the work hardly depends on what the images show. "The suite" is the 15 common
ones, one after the other. Also what an attack costs over plain predictions, for a small convolutional network with ten draws.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from measure import interleaved, ratio, show, write
from torch import Tensor, nn

import dubito
from dubito.data import cifar10
from dubito.posteriors import Gaussian
from dubito.shift import COMMON, CORRUPTIONS, corrupt, fgsm, pgd

TARGET = 180.0  # seconds for the suite: "at most a few minutes on two cores"


def images(number: int) -> tuple[Tensor, str]:
    try:
        return cifar10("test").x[:number], "CIFAR-10 test images"
    except FileNotFoundError:
        return torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(0)), "random images"


def attacks(x: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Times over a prediction with the same draws."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16 * 64, 10)]
    model = dubito.Model(nn.Sequential(*layers), dubito.Categorical())
    mean = model.parameters()
    posterior = Gaussian.diagonal(model, mean, {name: torch.full_like(leaf, 1e-4) for name, leaf in mean.items()})
    y = torch.arange(len(x)) % 10
    cases = {
        "predict": lambda: posterior.predict(x, "sampled", draws=10),
        "fgsm": lambda: fgsm(posterior, x, y, size=0.03, bounds=(0, 1), how="sampled", draws=10),
        "pgd, 10 steps": lambda: pgd(posterior, x, y, size=0.03, bounds=(0, 1), how="sampled", draws=10),
        "fgsm, linearised": lambda: fgsm(posterior, x, y, size=0.03, bounds=(0, 1), how="linearized", draws=10),
    }
    seconds = interleaved(cases, repeats)
    return {name: ratio(seconds, name, "predict") for name in cases if name != "predict"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    start = time.perf_counter()
    x, what = images(args.images)
    cases = {name: lambda name=name: corrupt(x, name, severity=args.severity) for name in CORRUPTIONS}
    seconds = interleaved(cases, args.repeats)
    figures = {name: {"fastest": min(each), "median": statistics.median(each)} for name, each in seconds.items()}
    suite = {key: sum(figures[name][key] for name in COMMON) for key in ("fastest", "median")}
    over = attacks(x[:256], args.repeats)
    rows = [[name, found["fastest"], found["median"]] for name, found in figures.items()]
    show(f"Seconds for {len(x)} {what}", ["corruption", "fastest", "median"], [*rows, ["the suite", *suite.values()]])
    show("Attacks over a prediction", ["attack", "fastest", "median"], [[name, *found.values()] for name, found in over.items()])
    slow = sorted(figures, key=lambda name: -figures[name]["fastest"])[:3]
    headline = {
        f"seconds, the 15 common corruptions, {len(x)} {what}": [f"{suite['fastest']:.1f}", f"at most {TARGET:.0f}"],
        "seconds, the slowest three": [", ".join(f"{name} {figures[name]['fastest']:.1f}" for name in slow), ""],
        **{f"{name}, 10 draws, over a prediction with 10 draws": [f"{found['fastest']:.1f}", ""] for name, found in over.items()},
    }
    settings = {"images": what, "number": len(x), "severity": args.severity, "repeats": args.repeats}
    found = {"corruptions": figures, "suite": suite, "attacks": over}
    write("corruptions_cost", settings=settings, figures=found, headline=headline, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
