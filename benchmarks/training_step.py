"""A training step of `fit` with MAP against the loop one would write by hand: same network, data, order, optimiser and prior.

Whole fits are timed and divided by their steps. The hand-written loop comes twice, with torch's default Adam and with the fused
one that `fit` uses. Both start and shuffle alike, so ten steps must lead to the same weights: that is checked.
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
from dubito.randomness import derive, seed_global

PRIOR, LEARNING_RATE = 1.0, 1e-3


def by_hand(network, x, y, size, epochs, *, learned, fused) -> nn.Module:
    """A plain PyTorch loop; the prior is Adam's weight decay."""
    network = copy.deepcopy(network)
    weights = list(network.parameters())
    groups = [{"params": weights, "weight_decay": 1 / (len(x) * PRIOR**2)}]
    if learned:
        torch.manual_seed(derive(0, "start"))  # as `fit`: the noise starts at the spread of a first batch
        log_scale = y[torch.randperm(len(x))[:size]].std(0).log().requires_grad_()
        groups.append({"params": [log_scale], "weight_decay": 0.0})
    optimizer = torch.optim.Adam(groups, lr=LEARNING_RATE, fused=fused)
    network.train()
    for epoch in range(epochs):
        seed_global(derive(0, epoch))
        order = torch.randperm(len(x))
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
    return network


def by_fit(model, x, y, size, epochs) -> dubito.posteriors.Posterior:
    method = dubito.MAP(epochs=epochs, learning_rate=LEARNING_RATE, schedule="constant")
    return dubito.fit(model, method, (x, y), batch_size=size, progress=False)


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
    repeats, began = parser.parse_args().repeats, time.time()
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
    figures = {name: compare(name, *case, repeats) for name, (_, *case) in cases.items()}
    rows = [
        [
            name,
            *(f"{figure['microseconds a step'][key]['fastest']:.0f}" for key in figure["microseconds a step"]),
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
    settings = {"repeats": repeats, "data": "random, in memory", "timed": "whole fits, divided by their steps"}
    write("training_step", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
