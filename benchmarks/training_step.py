"""A training step of `fit` with MAP against the loop one would write by hand: same network, data, order, optimiser and prior.

Whole fits are timed and divided by their steps. The hand-written loop comes twice, with torch's default Adam and with the fused
one that `fit` uses. Both start and shuffle alike, so ten steps must lead to the same weights: that is checked.

With `--device cuda`, `fit` also comes without the recordings that it plays back on a GPU, and so does a convolutional network.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from measure import interleaved, ratio, show, write
from torch import nn

import dubito
from dubito.priors import Normal
from dubito.tensors.randomness import derive_seed, seed_global

PRIOR, LEARNING_RATE = 1.0, 1e-3


def by_hand(network, x, y, size, epochs, *, learned, fused) -> nn.Module:
    """A plain PyTorch loop; the prior is Adam's weight decay."""
    network = copy.deepcopy(network)
    weights = list(network.parameters())
    groups = [{"params": weights, "weight_decay": 1 / (len(x) * PRIOR**2)}]
    if learned:
        torch.manual_seed(derive_seed(0, "start"))  # as `fit`: the noise starts at the spread of a first batch
        log_scale = y[torch.randperm(len(x))[:size]].std(0).log().requires_grad_()
        groups.append({"params": [log_scale], "weight_decay": 0.0})
    optimizer = torch.optim.Adam(groups, lr=LEARNING_RATE, fused=fused)
    network.train()
    for epoch in range(epochs):
        seed_global(derive_seed(0, epoch))
        order = torch.randperm(len(x)).to(x.device)
        for start in range(0, len(x), size):
            rows = order[start : start + size]
            xb, yb = x[rows], y[rows]
            optimizer.zero_grad()
            f = network(xb)
            if y.dtype == torch.long:
                loss = F.cross_entropy(f, yb)
            elif learned:
                z = (yb - f) / log_scale.exp()
                loss = (0.5 * z * z + log_scale).sum(-1).mean()
            else:
                loss = 0.5 * F.mse_loss(f, yb)
            loss.backward()
            optimizer.step()
    finish(x)
    return network


def finish(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def by_fit(model, x, y, size, epochs, *, record: bool = True) -> dubito.posteriors.Posterior:
    method = dubito.MAP(epochs=epochs, learning_rate=LEARNING_RATE, schedule="constant", record=record)
    posterior = dubito.fit(model, method, (x, y), batch_size=size, progress=False)
    finish(x)
    return posterior


def compare(name, network, likelihood, x, y, size, epochs, repeats) -> dict:
    model = dubito.Model(network, likelihood, prior=Normal(scale=PRIOR))
    learned = isinstance(likelihood, dubito.Gaussian) and likelihood.scale is None
    few = x[: 10 * size], y[: 10 * size]  # later, rounding grows: Adam divides small gradients by their own size
    ours = by_fit(model, *few, size, 1)
    theirs = by_hand(network, *few, size, 1, learned=learned, fused=True).named_parameters()
    apart = max(float((ours.params[key] - leaf.detach()).abs().max()) for key, leaf in theirs)
    if apart > 1e-5:
        raise AssertionError(f"{name}: the two loops end {apart:.2g} apart, so they do not do the same work")
    hand = partial(by_hand, network, x, y, size, learned=learned)
    cases = {
        "fit": lambda: by_fit(model, x, y, size, epochs),
        "hand, default Adam": lambda: hand(epochs, fused=None),
        "hand, fused Adam": lambda: hand(epochs, fused=True),
    }
    if x.is_cuda:
        cases["fit, not recorded"] = lambda: by_fit(model, x, y, size, epochs, record=False)
    seconds = interleaved(cases, repeats)
    steps = epochs * math.ceil(len(x) / size)
    return {
        "steps": steps,
        "weights apart after 10 steps": apart,
        "microseconds a step": {
            key: {"fastest": 1e6 * min(s) / steps, "median": 1e6 * statistics.median(s) / steps} for key, s in seconds.items()
        },
        "ratio to default Adam": ratio(seconds, "fit", "hand, default Adam"),
        "ratio to fused Adam": ratio(seconds, "fit", "hand, fused Adam"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    args, began = parser.parse_args(), time.time()
    repeats, gpu = args.repeats, args.device != "cpu"
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    small = nn.Sequential(nn.Linear(13, 50), nn.ReLU(), nn.Linear(50, 1))
    images = torch.rand(6400, 784), torch.randint(10, (6400,))
    table = torch.randn(448, 13), torch.randn(448, 1)
    cases = {
        "784-512-512-10, batch 128": (1.1, mlp, dubito.Categorical(), *images, 128, 1),
        "13-50-1, batch 32, fixed noise": (1.2, small, dubito.Gaussian(scale=1.0), *table, 32, 40),
        "13-50-1, batch 32, learned noise": (1.2, small, dubito.Gaussian(), *table, 32, 40),
    }
    if gpu:
        lenet = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
        picture = images[0].view(-1, 1, 28, 28)
        cases["LeNet-5, batch 128"] = (1.1, lenet, dubito.Categorical(), picture, images[1], 128, 1)
        cases = {
            name: (target, network.to(args.device), likelihood, x.to(args.device), y.to(args.device), size, 8 * epochs)
            for name, (target, network, likelihood, x, y, size, epochs) in cases.items()
        }
    figures = {name: compare(name, *case, repeats) for name, (_, *case) in cases.items()}
    rows = [
        [
            name,
            *(f"{figure['microseconds a step'][key]['fastest']:.0f}" for key in list(figure["microseconds a step"])[:3]),
            figure["ratio to default Adam"]["fastest"],
            figure["ratio to fused Adam"]["fastest"],
            f"<= {cases[name][0]}",
        ]
        for name, figure in figures.items()
    ]
    columns = ["network", "fit, µs a step", "by hand, default", "by hand, fused", "ratio to default", "ratio to fused", "target"]
    show(f"Training step, fastest of {repeats} fits", columns, rows)
    headline = {
        f"{name}: time of a `fit` step over {kind} Adam by hand": [
            figure[f"ratio to {kind} Adam"]["fastest"],
            f"<= {cases[name][0]}",
        ]
        for name, figure in figures.items()
        for kind in ("default", "fused")
    }
    if gpu:
        for name, figure in figures.items():
            took = {key: value["fastest"] for key, value in figure["microseconds a step"].items()}
            headline[f"{name}: a step that is not recorded over one that is"] = [took["fit, not recorded"] / took["fit"], None]
    settings = {"repeats": repeats, "data": "random, in memory", "timed": "whole fits, divided by their steps"}
    if gpu:
        settings["gpu"] = torch.cuda.get_device_name()
    write(
        "training_step_gpu" if gpu else "training_step",
        settings=settings,
        figures=figures,
        headline=headline,
        seconds=time.time() - began,
    )


if __name__ == "__main__":
    main()
