"""A network of handwritten digits, trained, given a diagonal Laplace posterior, and compressed by it.

    python examples/compress_digits.py
    python examples/compress_digits.py --share 0.95 --width 300

Weights of small signal-to-noise ratio go, units that nothing needs are cut out of the tensors, the rest is rounded to the bits that the
posterior allows, and what is left is written to a file. The table compares the network before and after.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import dubito
from dubito.apps import compression
from dubito.data import digits


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


def main() -> compression.Report:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=100, help="units of each of the two hidden layers")
    parser.add_argument("--share", type=float, default=0.8, help="of the weights that go")
    parser.add_argument("--step", type=float, default=0.25, help="of the grid, in posterior standard deviations")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    data = digits(seed=options.seed)
    # a narrow prior makes weights small that are not needed: then they are lost in their noise
    model = dubito.Model(network(options.width), dubito.Categorical(), dubito.priors.Normal(scale=0.3))
    train = (data.x_train, data.y_train)
    trained = dubito.fit(model, dubito.MAP(epochs=options.epochs, learning_rate=3e-3), train, batch_size=128, seed=options.seed)
    posterior = dubito.fit(model, dubito.Laplace("diagonal", check=False), train, start=trained)

    small = dubito.compress(posterior, data.x_test, share=options.share, step=options.step, data=(data.x_test, data.y_test))
    print(small.report)
    print(small.code)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits"
        print(f"{compression.save(small, path):,} bytes on disk")
        again = compression.load(path, network(options.width))
    assert torch.equal(again(data.x_test), small(data.x_test))
    return small.report


if __name__ == "__main__":
    main()
