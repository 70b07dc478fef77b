"""A step of the variational methods against a plain Adam step of a loop written by hand, on the same batches; and their memory.

Whole fits are timed and divided by their steps. The loop by hand has the prior as weight decay, and comes twice, with torch's default
Adam and with its fused one. Memory is how far that of a process rises during a fit, over the size of the network's parameters. It is
measured on a wide network with few inputs at a time, so that activations hardly count.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measure import growth, interleaved, per_step, ratio, show, write
from networks import lenet, mlp
from torch import Tensor, nn

import dubito
from dubito.priors import Normal
from dubito.tensors.randomness import derive_seed, seed_global

PRIOR, SIZE = 1.0, 128
WIDE = (784, 3000, 3000, 10)  # 11.4 million weights

# One row each: the method, made for so many epochs; the most its step may take, in plain ones, on the MLP and on LeNet; and the most
# memory, in sizes of the network.
METHODS: dict[str, tuple[Callable[[int], Any], dict[str, float], float | None]] = {
    "mean field, weights": (
        lambda epochs: dubito.Variational(epochs=epochs, estimator="weights"),
        {"784-512-512-10": 2.5, "LeNet": 1.4},
        10,
    ),
    "mean field, local": (lambda epochs: dubito.Variational(epochs=epochs, estimator="local"), {"784-512-512-10": 2.2}, 10),
    "mean field, auto": (lambda epochs: dubito.Variational(epochs=epochs), {}, 10),
    "IVON": (lambda epochs: dubito.IVON(epochs=epochs), {"784-512-512-10": 2.0, "LeNet": 1.3}, 5),
}


def by_hand(network: nn.Module, x: Tensor, y: Tensor, *, fused: bool | None) -> None:
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.Adam(network.parameters(), weight_decay=1 / (len(x) * PRIOR**2), fused=fused)
    seed_global(derive_seed(0, 0))
    order = torch.randperm(len(x))
    for start in range(0, len(x), SIZE):
        rows = order[start : start + SIZE]
        optimizer.zero_grad()
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()


def by_fit(network: nn.Module, x: Tensor, y: Tensor, method: Any, *, size: int = SIZE) -> None:
    model = dubito.Model(network, dubito.Categorical(), prior=Normal(scale=PRIOR))
    dubito.fit(model, method, (x, y), batch_size=size, progress=False)


def compare(network: nn.Module, x: Tensor, y: Tensor, repeats: int) -> dict:
    cases: dict[str, Callable[[], object]] = {
        "Adam": partial(by_hand, network, x, y, fused=None),
        "fused Adam": partial(by_hand, network, x, y, fused=True),
        "MAP": partial(by_fit, network, x, y, dubito.MAP(epochs=1)),
    }
    cases |= {name: partial(by_fit, network, x, y, make(1)) for name, (make, _, _) in METHODS.items()}
    seconds = interleaved(cases, repeats)
    steps = math.ceil(len(x) / SIZE)
    return {
        "steps": steps,
        "microseconds a step": per_step(seconds, steps),
        **{f"ratio to {to}": {key: ratio(seconds, key, to) for key in cases} for to in ("Adam", "fused Adam")},
    }


def taken(name: str) -> float:
    """The memory of a short fit, in sizes of the network: what `--memory` prints, in a process of its own."""
    network = mlp(*WIDE)
    x, y = torch.rand(48, WIDE[0]), torch.randint(10, (48,))
    by_fit(mlp(WIDE[0], 8, 10), x, y, METHODS[name][0](2), size=16)  # what is loaded at the first use is not counted
    megabytes = growth(lambda: by_fit(network, x, y, METHODS[name][0](2), size=16))
    return megabytes * 2**20 / sum(p.nbytes for p in network.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory", choices=list(METHODS), help="print what one method takes, and nothing else")
    options, began = parser.parse_args(), time.time()
    torch.manual_seed(0)
    if options.memory:
        print(taken(options.memory))
        return
    networks = {
        "784-512-512-10": (mlp(784, 512, 512, 10), torch.rand(50 * SIZE, 784)),
        "LeNet": (lenet(), torch.rand(50 * SIZE, 1, 28, 28)),
    }
    figures: dict[str, Any] = {
        name: compare(network, x, torch.randint(10, (len(x),)), options.repeats) for name, (network, x) in networks.items()
    }
    memory = {
        name: float(subprocess.check_output([sys.executable, __file__, "--memory", name], text=True).split()[-1])
        for name in METHODS
    }
    rows = [
        [name, *(figures[net][f"ratio to {to}"][name]["fastest"] for net in networks for to in ("Adam", "fused Adam")), cost]
        for name, cost in {"MAP": "", **memory}.items()
    ]
    columns = ["step", *(f"{net}, over {to}" for net in networks for to in ("Adam", "fused Adam")), "memory, networks"]
    show(f"Times a plain step at batch {SIZE}, fastest of {options.repeats}", columns, rows)
    headline: dict[str, list[Any]] = {
        f"{net}, batch {SIZE}: {name} step over Adam by hand, over fused Adam": [
            ", ".join(f"{figures[net][f'ratio to {to}'][name]['fastest']:.2f}" for to in ("Adam", "fused Adam")),
            f"<= {limits[net]}" if net in limits else "",
        ]
        for net in networks
        for name, (_, limits, _) in METHODS.items()
    }
    headline |= {
        f"{name}: memory of a fit, in sizes of a network of {WIDE}": [memory[name], f"<= {most}" if most else ""]
        for name, (_, _, most) in METHODS.items()
    }
    settings = {
        "repeats": options.repeats,
        "data": "random, in memory",
        "timed": "whole fits, divided by their steps",
        "batch": SIZE,
    }
    write(
        "variational_cost",
        settings=settings,
        figures={**figures, "memory": memory},
        headline=headline,
        seconds=time.time() - began,
    )


if __name__ == "__main__":
    main()
