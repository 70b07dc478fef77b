"""The second picture of docs/methods/variational.md: errors, weights and signal-to-noise ratios on MNIST, from the benchmark's result.

python docs/images/variational_mnist.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
CASES = {"sgd-1200": ("plain", "C7"), "dropout-1200": ("dropout", "C1"), "bbb-1200": ("Bayes by Backprop", "C0")}


def counted(part: dict) -> tuple[np.ndarray, np.ndarray]:
    """Middles of the bins, and the density there; the outermost bins, which hold all beyond, are left out."""
    edges = np.linspace(part["from"], part["to"], len(part["counts"]) + 1)
    density = np.array(part["counts"]) / sum(part["counts"]) / (edges[1] - edges[0])
    return (edges[1:-2] + edges[2:-1]) / 2, density[1:-1]


def main() -> None:
    result = json.loads((FOLDER.parents[1] / "benchmarks" / "results" / "variational_mnist.json").read_text())
    found = result["figures"]
    figure, (errors, weights, ratios) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for case, (label, colour) in CASES.items():
        one = found[case]["0"]
        shares, values = zip(*one["curve"], strict=True)
        errors.plot(one["settings"]["epochs"] * np.array(shares), values, color=colour, label=label)
        weights.plot(*counted(one["histograms"]["weights"]), color=colour, label=label)
    errors.set(xlabel="epoch", ylabel="test error of the mean weights, %", ylim=(1.0, 3.0))
    errors.legend(frameon=False)
    weights.set(xlabel="weight", ylabel="density, log scale", yscale="log")
    ratios.fill_between(*counted(found["bbb-1200"]["0"]["histograms"]["decibels"]), color="C0", alpha=0.4)
    ratios.set(xlabel=r"$10 \log_{10} |\mu| / \sigma$ of Bayes by Backprop", ylabel="density")
    for axes in (errors, weights, ratios):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "variational_mnist.png", dpi=110)


if __name__ == "__main__":
    main()
