"""An ensemble of five against five separate fits: in one batched pass, and one member after another.

The sizes go up to where batching stops paying: this is what the fixed rule in `Ensemble._vectorized` rests on.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from measure import interleaved, ratio, show, write
from networks import lenet, mlp
from torch import nn

import dubito

MEMBERS, EPOCHS = 5, 4
TABLE, DIGITS, IMAGES = (448, 13), (1280, 64), (640, 784)


def cases() -> dict[str, tuple[nn.Module, dubito.Categorical | dubito.Gaussian, tuple[int, ...], int]]:
    """Name: network, likelihood, shape of the inputs, batch size."""
    conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))  # 8 x 8 images
    return {
        "13-50-1, batch 32": (mlp(13, 50, 1), dubito.Gaussian(scale=1.0), TABLE, 32),
        "64-100-10, batch 128": (mlp(64, 100, 10), dubito.Categorical(), DIGITS, 128),
        "64-256-256-10, batch 128": (mlp(64, 256, 256, 10), dubito.Categorical(), DIGITS, 128),
        "784-100-10, batch 128": (mlp(784, 100, 10), dubito.Categorical(), IMAGES, 128),
        "784-512-10, batch 128": (mlp(784, 512, 10), dubito.Categorical(), IMAGES, 128),
        "784-512-512-10, batch 128": (mlp(784, 512, 512, 10), dubito.Categorical(), IMAGES, 128),
        "conv 8x8, batch 32": (conv, dubito.Categorical(), (320, 1, 8, 8), 32),
        "LeNet, batch 128": (lenet(), dubito.Categorical(), (256, 1, 28, 28), 128),
    }


def compare(network, likelihood, shape, size, repeats) -> dict:
    x = torch.randn(shape)
    y = torch.randn(len(x), 1) if isinstance(likelihood, dubito.Gaussian) else torch.randint(10, (len(x),))
    model, method = dubito.Model(network, likelihood), dubito.MAP(epochs=EPOCHS)

    def fit(method, seed: int = 0) -> None:
        dubito.fit(model, method, (x, y), batch_size=size, progress=False, seed=seed)

    seconds = interleaved(
        {
            "separate": lambda: [fit(method, seed) for seed in range(MEMBERS)],
            "vectorised": lambda: fit(dubito.Ensemble(method, MEMBERS, vectorize=True)),
            "in turn": lambda: fit(dubito.Ensemble(method, MEMBERS, vectorize=False)),
        },
        repeats,
    )
    target = dubito.model.Target(model, len(x))
    steps = EPOCHS * math.ceil(len(x) / size)
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "milliseconds a step of all members": {name: 1e3 * min(s) / steps for name, s in seconds.items()},
        "median": {name: 1e3 * statistics.median(s) / steps for name, s in seconds.items()},
        "vectorised over separate": ratio(seconds, "vectorised", "separate"),
        "in turn over separate": ratio(seconds, "in turn", "separate"),
        "rule": "vectorised" if dubito.Ensemble(method, MEMBERS)._vectorized(target) else "in turn",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    repeats, began = parser.parse_args().repeats, time.time()
    torch.manual_seed(0)
    figures = {name: compare(*case, repeats) for name, case in cases().items()}
    rows = [
        [
            name,
            f"{figure['parameters']:,}",
            *(f"{value:.2f}" for value in figure["milliseconds a step of all members"].values()),
            figure["vectorised over separate"]["fastest"],
            figure["in turn over separate"]["fastest"],
            figure["rule"],
        ]
        for name, figure in figures.items()
    ]
    columns = [
        "network",
        "parameters",
        "separate, ms",
        "vectorised",
        "in turn",
        "vectorised / separate",
        "in turn / separate",
        "rule",
    ]
    show(f"A step of {MEMBERS} members, fastest of {repeats} fits of {EPOCHS} epochs", columns, rows)
    headline = {
        f"{name}: ensemble of {MEMBERS} {how} over {MEMBERS} separate fits": [figure[f"{how} over separate"]["fastest"], ""]
        for name, figure in figures.items()
        for how in ("vectorised", "in turn")
    }
    settings = {"repeats": repeats, "members": MEMBERS, "epochs": EPOCHS, "data": "random, in memory"}
    write("ensemble", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
