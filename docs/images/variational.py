"""The picture of docs/methods/variational.md: the curve of Blundell et al. (2015), by several posteriors.

python docs/images/variational.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch import nn

import dubito
from dubito.priors import Normal

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
RANGE = (-0.2, 1.4)


def curve(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return x + 0.3 * torch.sin(2 * torch.pi * (x + noise)) + 0.3 * torch.sin(4 * torch.pi * (x + noise)) + noise


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 1, generator=generator) * 0.5
    y = curve(x, 0.02 * torch.randn(1000, 1, generator=generator))
    at = torch.linspace(*RANGE, 200)[:, None]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    nn.init.normal_(net[0].weight, 0.0, 3.0)
    nn.init.normal_(net[0].bias, 0.0, 1.5)
    model = dubito.Model(net, dubito.Gaussian(scale=0.05), Normal.fan_in(net, 1.5))
    training = {"epochs": 250, "learning_rate": 3e-3}
    methods = {
        "MAP": dubito.MAP(**training),
        "mean field": dubito.Variational(samples=2, **training),
        "low rank": dubito.Variational(dubito.families.LowRank(10), samples=2, **training),
        "HMC": dubito.HMC(chains=2, draws=60, burn_in=80, path_length=0.5, max_steps=300),
    }
    figure, axes = plt.subplots(1, len(methods), figsize=(12, 3), sharey=True, layout="constrained")
    trained = None
    for axis, (name, method) in zip(axes, methods.items(), strict=True):
        posterior = dubito.fit(model, method, (x, y), batch_size=100, start=trained)
        trained = posterior if name == "MAP" else trained
        f = posterior.predict(at, draws=None if name in ("MAP", "HMC") else 200).means.squeeze(-1)  # [S, N]
        low, middle, high = f.quantile(torch.tensor([0.25, 0.5, 0.75]), 0)
        axis.plot(x, y, ".", color="0.6", markersize=2)
        axis.fill_between(at.squeeze(), low, high, color="C0", alpha=0.35, linewidth=0)
        axis.fill_between(at.squeeze(), f.amin(0), f.amax(0), color="C0", alpha=0.12, linewidth=0)
        axis.plot(at, middle, color="C3")
        axis.set(title=name, ylim=(-1.0, 1.8), xlim=RANGE)
        print(name, float((high - low)[at.squeeze() < 0.5].mean()), float((high - low)[at.squeeze() > 1].mean()), flush=True)
    figure.savefig(FOLDER / "variational_curve.png", dpi=90)


if __name__ == "__main__":
    main()
