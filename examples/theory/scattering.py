"""A scattering front end against a plain CNN, under small deformations.

The scattering transform (Mallat 2012; Bruna & Mallat 2013) is a fixed cascade of wavelets, moduli and an average. It is Lipschitz
continuous to deformations: an image that is warped by a field u moves its features by about the size of the slope of u, where the image
itself (and with it what a learned filter sees) may move by far more. Both are trained on the same few MNIST images, and tested on
images that a smooth random field warps by up to so many pixels:

- `scattering`: kymatio's Scattering2D, two scales, every wavelet path brought to unit variance, and one linear layer;
- `cnn`: conv32-conv64 5x5 with max pooling and a linear layer, about as many outputs before it;
- `cnn, ensemble`: five of these, with --ensemble.

    pip install "dubito[scattering]"
    DUBITO_DATA=folder python examples/theory/scattering.py            # minutes on a CPU core
    python examples/theory/scattering.py --picture                     # draws what results/scattering.json holds
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from record import draw, load, save
from torch import Tensor, nn

import dubito
from dubito import MAP, Categorical, Ensemble, Model
from dubito.data import mnist
from dubito.metrics import accuracy, ece, nll
from dubito.priors import Normal

PIXELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)


def scattering() -> Any:
    import scipy.special

    if not hasattr(scipy.special, "sph_harm"):
        # kymatio 0.3 asks for a name that SciPy 1.17 has dropped; only its transform of volumes would use it
        scipy.special.sph_harm = lambda m, n, theta, phi: scipy.special.sph_harm_y(n, m, phi, theta)
    from kymatio.torch import Scattering2D

    transform = Scattering2D(J=2, shape=(28, 28))

    def features(x: Tensor) -> Tensor:
        """[B, 81 * 49], some at a time."""
        return torch.cat([transform(part.squeeze(1).contiguous()).flatten(1) for part in x.split(100)])

    return features


def warped(x: Tensor, pixels: float, *, smooth: float = 4.0, seed: int = 0) -> Tensor:
    """Images moved along smooth random fields, whose largest displacement is `pixels`."""
    if not pixels:
        return x
    source = torch.Generator().manual_seed(seed)
    b, _, h, w = x.shape
    reach = int(3 * smooth)
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / smooth) ** 2)
    field = torch.randn(b * 2, 1, h + 2 * reach, w + 2 * reach, generator=source)
    field = F.conv2d(F.conv2d(field, bell.view(1, 1, -1, 1)), bell.view(1, 1, 1, -1)).view(b, 2, h, w)
    field = pixels * field / field.square().sum(1).sqrt().amax((1, 2)).view(b, 1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    at = torch.stack([(columns + field[:, 0]) / (w - 1) * 2 - 1, (rows + field[:, 1]) / (h - 1) * 2 - 1], -1)  # [B, H, W, 2]
    return F.grid_sample(x, at, align_corners=True, padding_mode="zeros")


def cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def moved(clean: Tensor, changed: Tensor) -> float:
    """Mean change, relative to the size."""
    return float(((changed - clean).flatten(1).norm(dim=1) / clean.flatten(1).norm(dim=1).clamp_min(1e-9)).mean())


def run(n: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    train, test = mnist("train"), mnist("test")
    rows = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(seed))[:n]
    x, y = train.x[rows], train.y[rows]
    x_test, y_test = test.x[: args.test], test.y[: args.test]
    features = scattering()
    phi = features(x)
    # one scale for all positions of a wavelet path: a scale of each number's own would blow up those that hardly vary
    centre = phi.mean(0)
    width = (phi - centre).view(n, -1, 49).square().mean((0, 2)).sqrt().repeat_interleave(49)
    torch.manual_seed(seed)
    prior = Normal(scale=args.scale), Normal(scale=args.scale / 10)  # the second by training images that were left out
    steps = args.steps // -(-n // 100)
    fits = {
        "scattering": (nn.Linear(phi.shape[1], 10), MAP(epochs=steps, learning_rate=1e-3), (phi - centre) / width),
        "cnn": (cnn(seed), MAP(epochs=steps, learning_rate=1e-3), x),
        "cnn, ensemble": (cnn(seed), Ensemble(MAP(epochs=steps, learning_rate=1e-3), 5), x),
    }
    found: dict[str, Any] = {name: {} for name in fits}
    posteriors = {}
    for name, (network, method, inputs) in fits.items():
        if name != "cnn, ensemble" or args.ensemble:
            posteriors[name] = dubito.fit(
                Model(network, Categorical(), prior[name == "scattering"]),
                method,
                (inputs, y),
                batch_size=100,
                seed=seed,
                progress=False,
            )
    clean_phi = (features(x_test) - centre) / width
    for pixels in PIXELS:
        images = warped(x_test, pixels, seed=seed)
        phi_test = (features(images) - centre) / width
        for name, posterior in posteriors.items():
            given = phi_test if name == "scattering" else images
            p, _ = posterior.predict_loader(list(zip(given.split(250), y_test.split(250), strict=True)))
            found[name][str(pixels)] = {
                "accuracy": float(accuracy(p, y_test)),
                "nll": float(nll(p, y_test)),
                "ece": float(ece(p, y_test)),
                "uncertainty": float(p.uncertainty.total.mean()),
            }
        found.setdefault("moved", {})[str(pixels)] = {
            "images": moved(x_test, images),
            "features": moved(clean_phi, phi_test),
        }
    return found


def picture() -> None:
    from dubito.report.canvas import BLUE, GREEN, ORANGE, SOFT, VERMILION, grid

    found = load("scattering")
    colours = {"scattering": BLUE, "cnn": VERMILION, "cnn, ensemble": GREEN}

    def panels(figure: Any) -> None:
        axes = figure.subplots(1, len(found) + 1)
        for place, (n, runs) in zip(axes, found.items(), strict=False):
            for name, colour in colours.items():
                if runs[0][name]:
                    at = [float(pixels) for pixels in runs[0][name]]
                    values = [1 - statistics.mean(run[name][pixels]["accuracy"] for run in runs) for pixels in runs[0][name]]
                    place.plot(at, values, "o-", markersize=4, color=colour, label=name)
            place.set(title=f"Test error, {n} training images", xlabel="largest displacement, pixels", ylim=(0, None))
            grid(place, "y")
            place.legend(fontsize=7)
        runs = next(iter(found.values()))
        at = [float(pixels) for pixels in runs[0]["moved"]]
        for key, colour in (("images", ORANGE), ("features", BLUE)):
            values = [statistics.mean(run["moved"][pixels][key] for run in runs) for pixels in runs[0]["moved"]]
            axes[-1].plot(at, values, "o-", markersize=4, color=colour, label=key if key == "images" else "scattering features")
        axes[-1].axhline(1, color=SOFT, linewidth=0.6)
        axes[-1].set(title="How far they move, relative", xlabel="largest displacement, pixels", ylim=(0, None))
        axes[-1].legend(fontsize=7)
        grid(axes[-1], "y")

    draw("scattering", panels, (3.7 * (len(found) + 1), 3.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="100,300", help="numbers of training images, by commas")
    parser.add_argument("--test", type=int, default=500, help="test images")
    parser.add_argument("--steps", type=int, default=300, help="of a fit")
    parser.add_argument("--scale", type=float, default=1.0, help="of the prior")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ensemble", action="store_true", help="five networks as well")
    parser.add_argument("--picture", action="store_true", help="draw only")
    args = parser.parse_args()
    if not args.picture:
        settings = {key: value for key, value in vars(args).items() if key != "picture"}
        found: dict[str, list[Any]] = {}
        for n in args.train.split(","):
            found[n] = []
            for seed in range(args.seeds):
                found[n].append(run(int(n), seed, args))
                told = {
                    name: [round(row["accuracy"], 3) for row in rows.values()]
                    for name, rows in found[n][-1].items()
                    if name != "moved" and rows
                }
                print(n, seed, told, flush=True)
                save("scattering", settings, found)
    picture()


if __name__ == "__main__":
    main()
