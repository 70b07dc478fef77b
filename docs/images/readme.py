"""The picture in README.md: three methods on the same points, with a gap between them and more noise on the right.

python docs/images/readme.py        # writes docs/images/readme.png, a few minutes on one core
"""

import io
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image
from torch import Tensor, nn

import dubito


def truth(x: Tensor) -> Tensor:
    """The curve behind the points."""
    return torch.sin(1.8 * x)


def points(n: int = 45) -> tuple[Tensor, Tensor]:
    """`n` points on either side of a gap: noise of standard deviation .05 on the left and .3 on the right."""
    generator = torch.Generator().manual_seed(1)
    left, right = torch.rand(n, 1, generator=generator) * 1.6 - 2.6, torch.rand(n, 1, generator=generator) * 1.6 + 1.0
    x = torch.cat([left, right])
    noise = torch.where(x < 0, 0.05, 0.3) * torch.randn(x.shape, generator=generator)
    return x, truth(x) + noise


def posteriors(data: tuple[Tensor, Tensor]) -> dict[str, dubito.posteriors.Posterior]:
    """The three panels, from left to right."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 2))  # mean and log variance
    prior = dubito.priors.ByName({"^0": dubito.priors.Normal(scale=2.0), "^2": dubito.priors.Normal(scale=0.5)})
    model = dubito.Model(network, dubito.HeteroscedasticGaussian(), prior)
    plain = dubito.MAP(epochs=1500, learning_rate=0.01)
    members = dubito.fit(model, dubito.Ensemble(plain, 10), data, batch_size=90, progress=False)
    sampler = dubito.HMC(chains=10, draws=40, burn_in=60, path_length=0.3)
    return {
        "One network (MAP)": dubito.fit(model, plain, data, batch_size=90, progress=False),
        "Ensemble of 10": members,
        "HMC": dubito.fit(model, sampler, data, start=members, progress=False),
    }


def main() -> None:
    data, grid = points(), torch.linspace(-4, 4, 300).unsqueeze(1)
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    line = grid.squeeze(1)
    for axis, (title, posterior) in zip(axes, posteriors(data).items(), strict=True):
        p = posterior.predict(grid)
        mean, total, epistemic = (v.squeeze(1) for v in (p.mean, p.uncertainty.total, p.uncertainty.epistemic))
        for variance, color, label in (
            (total, "#f6c878", "plus noise in the data (aleatoric)"),
            (epistemic, "#5b9bd0", "model uncertainty (epistemic)"),
        ):
            width = 2 * variance.sqrt()
            axis.fill_between(line, mean - width, mean + width, color=color, linewidth=0, label=label)
        axis.plot(line, truth(line), color="#666666", linestyle=":", label="truth")
        axis.plot(line, mean, color="#1c2430", linewidth=2, label="mean prediction")
        axis.plot(*data, ".", color="#1c2430", markersize=4, alpha=0.6, label="data")
        axis.set(title=title, xlim=(-4, 4), ylim=(-3.2, 3.2), xlabel="x")
    axes[0].set_ylabel("y")
    handles, labels = axes[0].get_legend_handles_labels()
    order = [3, 1, 0, 2, 4]
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        title="Bands: two standard deviations",
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    path = Path(__file__).with_suffix(".png")
    Image.open(buffer).convert("RGB").quantize(96).save(path, optimize=True)
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
