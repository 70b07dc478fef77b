"""What is not random is computed once: LeNet with dropout on its last layer only, 100 draws, batch 256, over one plain forward.

Also 100 draws of the last layer's weights alone (`only=`), a loop over 100 passes, and the peak memory of a network that is random
from its first layer on, under two bounds (each in a process of its own).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from measure import growth, interleaved, ratio, show, write
from networks import lenet

import dubito

DRAWS, BATCH = 100, 256


def dropout_posterior(at: str | None = None) -> dubito.posteriors.Posterior:
    network = lenet() if at is not None else lenet(dropout=0.5)
    model = dubito.Model(network, dubito.Categorical())
    data = torch.rand(8, 1, 28, 28), torch.arange(8)
    return dubito.fit(model, dubito.MCDropout(epochs=0, at=at, draws=DRAWS), data)


def timings(repeats: int) -> dict:
    torch.manual_seed(0)
    x = torch.rand(BATCH, 1, 28, 28)
    posterior = dropout_posterior()
    network = posterior.model.network
    head = dubito.Model(network, dubito.Categorical(), only=r"^12\.")
    weights = {name: p.expand(DRAWS, *p.shape) + 0.01 * torch.randn(DRAWS, *p.shape) for name, p in head.parameters().items()}
    samples = dubito.posteriors.Samples(head, weights, head.buffers())

    def plain() -> None:
        network.eval()
        with torch.no_grad():
            network(x)

    def loop() -> None:
        network.train()
        with torch.no_grad():
            torch.stack([network(x) for _ in range(DRAWS)]).softmax(-1).mean(0)

    cases = {
        "plain forward": plain,
        "consistent masks": lambda: posterior.predict(x),
        "consistent masks, .mean": lambda: posterior.predict(x).mean,
        "independent masks": lambda: posterior.predict(x, consistent=False),
        "independent masks, .mean": lambda: posterior.predict(x, consistent=False).mean,
        "100 draws of the head": lambda: samples.predict(x),
        "100 draws of the head, .mean": lambda: samples.predict(x).mean,
    }
    seconds = interleaved(cases, repeats)
    slow = interleaved({"plain forward": plain, "loop of 100 passes": loop}, max(3, repeats // 10))
    figures = {
        name: {
            "milliseconds": {"fastest": 1e3 * min(s), "median": 1e3 * statistics.median(s)},
            "ratio": ratio(seconds, name, "plain forward"),
        }
        for name, s in seconds.items()
    }
    s = slow["loop of 100 passes"]
    figures["loop of 100 passes"] = {
        "milliseconds": {"fastest": 1e3 * min(s), "median": 1e3 * statistics.median(s)},
        "ratio": ratio(slow, "loop of 100 passes", "plain forward"),
    }
    return figures


def peak(memory: float) -> None:
    """In a process of its own: how far its resident memory rises while predicting, in megabytes."""
    posterior, x = dropout_posterior(at=""), torch.rand(BATCH, 1, 28, 28)
    posterior.predict(x[:1], draws=2)  # code and constants
    print(json.dumps(growth(lambda: posterior.predict(x, memory=memory))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--peak", type=float, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    if args.peak is not None:
        return peak(args.peak)
    figures = timings(args.repeats)
    targets = {"consistent masks": "<= 1.5", "independent masks": "<= 4"}
    rows = [
        [name, figure["milliseconds"]["fastest"], figure["ratio"]["fastest"], figure["ratio"]["median"], targets.get(name, "")]
        for name, figure in figures.items()
    ]
    show(f"{DRAWS} draws of LeNet's last layer, batch {BATCH}", ["", "ms", "over plain", "median", "target"], rows)
    peaks = {
        memory: json.loads(subprocess.check_output([sys.executable, __file__, "--peak", str(memory)])) for memory in (0.05, 1.0)
    }
    rows = [[f"memory={memory} GB", f"{value:.0f} MB"] for memory, value in peaks.items()]
    show(f"Peak memory, {DRAWS} draws of all of LeNet", ["bound", "peak over start"], rows)
    headline = {
        f"LeNet, {DRAWS} draws, {name}: `predict` over one plain forward": [figure["ratio"]["fastest"], targets.get(name, "")]
        for name, figure in figures.items()
        if name != "plain forward"
    } | {f"LeNet random throughout, memory={memory}: peak in MB": [round(value), ""] for memory, value in peaks.items()}
    figures["peak megabytes, random throughout"] = peaks
    settings = {"repeats": args.repeats, "draws": DRAWS, "batch": BATCH}
    write("prefix", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)
    return None


if __name__ == "__main__":
    main()
