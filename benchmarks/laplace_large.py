"""Laplace where others run out of memory: a last layer of 1,000 classes, and a network of the size of ResNet-50 (25.6 million weights).

Each case runs in a process of its own; what counts is the peak of its resident memory above that with the network and the data loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import torch
from measure import resident, show, write
from networks import resnet50
from torch import nn

import dubito
from dubito import Categorical, Laplace, Model

TARGETS = {"1,000 classes, last layer": "seconds, 2 GB", "ResNet-50": "4 GB"}


def classes(method: Laplace) -> tuple[Model, list, Laplace]:
    """A head of 1,000 classes on 512 features."""
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1000))
    return Model(network, Categorical()), [(torch.randn(128, 64), torch.randint(1000, (128,))) for _ in range(8)], method


def large(method: Laplace) -> tuple[Model, list, Laplace]:
    data = [(torch.randn(16, 3, 64, 64), torch.randint(1000, (16,))) for _ in range(2)]
    return Model(resnet50(), Categorical()), data, method


CASES = {
    "1,000 classes, last layer, Kronecker": (classes, Laplace(subset="last_layer", check=False)),
    "1,000 classes, last layer, diagonal": (classes, Laplace("diagonal", subset="last_layer", check=False)),
    "ResNet-50, diagonal, one draw": (large, Laplace("diagonal", "fisher", draws=1, check=False)),
    "ResNet-50, last layer, Kronecker": (large, Laplace(subset="last_layer", check=False)),
}


def peak() -> float:
    """Gigabytes at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run(name: str, queue) -> None:
    torch.manual_seed(0)
    build, method = CASES[name]
    model, data, method = build(method)
    model.network.eval()
    with torch.no_grad():
        model.network(data[0][0])
    before, start = resident("VmRSS") / 2**10, time.time()
    posterior = dubito.fit(model, method, data, progress=False)
    fitted, start = time.time() - start, time.time()
    after_fit = peak()
    x = data[0][0][:4] if "ResNet" in name else data[0][0]
    draws = 4 if "draw" in name else None  # 1,000 outputs through 25 million weights: linear functions, drawn
    probs = posterior.predict(x, draws=draws).mean
    queue.put([fitted, after_fit - before, len(x), time.time() - start, peak() - before, float(probs.sum(-1).mean())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cases")
    args, began = parser.parse_args(), time.time()
    context, figures = multiprocessing.get_context("spawn"), {}
    for name in CASES:
        if any(part in name for part in args.only):
            queue = context.Queue()
            process = context.Process(target=run, args=(name, queue))
            process.start()
            figures[name] = dict(zip(COLUMNS, queue.get(), strict=True))
            process.join()
            print(name, figures[name], flush=True)
    show("Laplace on large heads and networks", ["case", *COLUMNS], [[name, *row.values()] for name, row in figures.items()])
    headline = {
        f"{name}: seconds to fit and to predict {row['inputs']}, peak GB of both": [
            f"{row['fit, s']:.1f}, {row['predict, s']:.1f}, {row['peak of all, GB']:.2f}",
            next(target for key, target in TARGETS.items() if name.startswith(key)),
        ]
        for name, row in figures.items()
    }
    settings = {"batches": "8 of 128 (classes), 2 of 16 images of 64 x 64 (ResNet-50)"}
    write("laplace_large", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


COLUMNS = ("fit, s", "peak of fit, GB", "inputs", "predict, s", "peak of all, GB", "sum of probabilities")

if __name__ == "__main__":
    main()
