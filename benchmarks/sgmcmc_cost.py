"""A step of SGLD and SGHMC against a plain SGD step of a loop written by hand, on the same batches; and beside posteriors.

Whole fits are timed and divided by their steps. The loop by hand comes without a prior, and with one, as weight decay. That our
samplers without their noise are SGD, with and without momentum, is held by tests. Then the noise itself, beside torch's generator.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measure import interleaved, per_step, ratio, show, write
from networks import lenet, mlp
from torch import Tensor, nn
from torch.func import functional_call

import dubito
from dubito.priors import Normal
from dubito.tensors.randomness import PIECE, Normals, derive_seed, seed_global

PRIOR, LEARNING_RATE, SIZE = 1.0, 1e-3, 128

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the peer's own dependencies
        import posteriors
except ImportError:
    posteriors = None


def batches(x: Tensor, y: Tensor):
    seed_global(derive_seed(0, 0))
    order = torch.randperm(len(x))
    for start in range(0, len(x), SIZE):
        rows = order[start : start + SIZE]
        yield x[rows], y[rows]


def by_hand(network: nn.Module, x: Tensor, y: Tensor, *, decay: float) -> None:
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, weight_decay=decay)
    for xb, yb in batches(x, y):
        optimizer.zero_grad()
        F.cross_entropy(network(xb), yb).backward()
        optimizer.step()


def by_fit(model: dubito.Model, x: Tensor, y: Tensor, method) -> None:
    dubito.fit(model, method, (x, y), batch_size=SIZE, progress=False)


def by_posteriors(network: nn.Module, x: Tensor, y: Tensor, kind: str) -> None:
    """As its documentation has it: the log posterior and the temperature over N, and updates in place."""

    def log_posterior(params, batch):
        f = functional_call(network, params, batch[:1])
        prior = posteriors.diag_normal_log_prob(params, sd_diag=PRIOR, normalize=False)
        return -F.cross_entropy(f, batch[1]) + prior / len(x), f

    build = getattr(posteriors.sgmcmc, kind).build
    transform = build(log_posterior, lr=LEARNING_RATE, temperature=1 / len(x))
    state = transform.init({name: p.detach().clone() for name, p in network.named_parameters()})
    for batch in batches(x, y):
        state, _ = transform.update(state, batch, inplace=True)


def compare(network: nn.Module, x: Tensor, y: Tensor, repeats: int) -> dict:
    model = dubito.Model(network, dubito.Categorical(), prior=Normal(scale=PRIOR))
    short = {"burn_in": 0, "draws": 1, "learning_rate": LEARNING_RATE}
    cases: dict[str, Callable[[], object]] = {
        "SGD": lambda: by_hand(network, x, y, decay=0.0),
        "SGD with weight decay": lambda: by_hand(network, x, y, decay=1 / (len(x) * PRIOR**2)),
        "SGLD": lambda: by_fit(model, x, y, dubito.SGLD(**short)),
        "SGHMC": lambda: by_fit(model, x, y, dubito.SGHMC(**short)),
    }
    if posteriors is not None:
        cases |= {f"posteriors {kind}": partial(by_posteriors, network, x, y, kind) for kind in ("sgld", "sghmc", "baoa")}
    seconds = interleaved(cases, repeats)
    steps = math.ceil(len(x) / SIZE)
    return {
        "steps": steps,
        "microseconds a step": per_step(seconds, steps),
        "ratio to SGD": {key: ratio(seconds, key, "SGD") for key in cases},
        "ratio to SGD with weight decay": {key: ratio(seconds, key, "SGD with weight decay") for key in cases},
    }


def noise(n: int, repeats: int) -> dict:
    """Nanoseconds to draw a normal, of n."""
    generator, x = torch.Generator().manual_seed(0), torch.empty(n)

    def ours() -> None:
        normals = Normals(generator)
        for start in range(0, n, PIECE):
            normals(min(PIECE, n - start))

    seconds = interleaved({"torch": lambda: x.normal_(generator=generator), "dubito": ours}, 20 * repeats)
    found = {key: {"fastest": 1e9 * min(s) / n, "median": 1e9 * statistics.median(s) / n} for key, s in seconds.items()}
    return {"nanoseconds a normal": found, "ratio to torch": ratio(seconds, "dubito", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats, began = parser.parse_args().repeats, time.time()
    torch.manual_seed(0)
    cases = {
        "784-512-512-10": (1.8, mlp(784, 512, 512, 10), torch.rand(50 * SIZE, 784)),
        "LeNet": (1.15, lenet(), torch.rand(50 * SIZE, 1, 28, 28)),
    }
    figures = {name: compare(net, x, torch.randint(10, (len(x),)), repeats) for name, (_, net, x) in cases.items()}
    drawn = noise(669_706, repeats)
    names = list(figures["LeNet"]["ratio to SGD"])
    rows = [
        [name, *(figures[net]["ratio to SGD"][name]["fastest"] for net in cases), *(
            figures[net]["ratio to SGD with weight decay"][name]["fastest"] for net in cases
        )]
        for name in names
    ]  # fmt: skip
    columns = ["step", *cases, *(f"{net}, to SGD with weight decay" for net in cases)]
    show(f"Times a plain SGD step at batch {SIZE}, fastest of {repeats}", columns, rows)
    headline = {
        f"{net}, batch {SIZE}: {name} step over SGD by hand, over SGD with weight decay": [
            ", ".join(f"{figures[net][f'ratio to {to}'][name]['fastest']:.2f}" for to in ("SGD", "SGD with weight decay")),
            f"<= {cases[net][0]}" if name in ("SGLD", "SGHMC") else "",
        ]
        for net in cases
        for name in names[2:]
    }
    each = drawn["nanoseconds a normal"]
    headline["one of 669,706 normals, ns: dubito, torch"] = [
        f"{each['dubito']['fastest']:.2f}, {each['torch']['fastest']:.2f}",
        "",
    ]
    settings = {"repeats": repeats, "data": "random, in memory", "timed": "whole fits, divided by their steps", "batch": SIZE}
    seconds = time.time() - began
    write("sgmcmc_cost", settings=settings, figures={**figures, "noise": drawn}, headline=headline, seconds=seconds)


if __name__ == "__main__":
    main()
