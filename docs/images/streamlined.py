"""The two pictures of docs/streamlined.md, on the digits that scikit-learn carries.

    python docs/images/streamlined.py                       # a minute; writes the PNG files beside this one
    python docs/images/streamlined.py --seeds 5             # also the means over five splits and trainings, for the caption

All posteriors see training digits only. Which of them are drawn was decided after looking at all that are printed.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import dubito
from dubito.data import digits
from dubito.measures import mutual_information, predictive_entropy
from dubito.metrics import auroc, nll
from dubito.posteriors.predict.streamlined import Streamlined
from dubito.report.canvas import BLUE, INK, SOFT, VERMILION, grid, render

HERE = Path(__file__).parent
NOISE = 0.01  # variance of a pixel: a standard deviation of a tenth of the range
SHOWN = (0, 2, 3, 4, 5, 7, 8)
BINS = 24
Scores = dict[str, dict[str, Tensor]]  # way -> kind of images -> [N]; and NLL -> []


def fitted(seed: int) -> dict[str, Any]:
    """One network, trained once, and posteriors around it."""
    data = digits(seed=seed)
    train = (data.x_train, data.y_train)
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.2), nn.Linear(100, 100), nn.ReLU(), nn.Dropout(0.2)]
    network = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))
    model = dubito.Model(network, dubito.Categorical())
    plain = dubito.fit(model, dubito.MAP(epochs=200, learning_rate=1e-3), train, batch_size=64, seed=seed, progress=False)
    methods = {
        "MC dropout": dubito.MCDropout(epochs=0),
        "Laplace, last layer": dubito.Laplace(subset="last_layer"),
        "Laplace, all weights": dubito.Laplace(),
        "SWAG": dubito.SWAG(epochs=50, collect_after=0.0),
    }
    return {"plain": plain, **{name: dubito.fit(model, one, train, start=plain, progress=False) for name, one in methods.items()}}


def others(x: Tensor) -> dict[str, Tensor]:
    """Images of other kinds."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return {"turned by 90°": x.rot90(1, (-2, -1)), "inverted": 1 - x, "noise": noise}


def scores(seed: int) -> Scores:
    """Uncertainty of the test digits and of images of other kinds."""
    posteriors = fitted(seed)
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "plain network:\nentropy": ("plain", {}),
        "MC dropout,\none pass: epistemic": ("MC dropout", {"how": "adjoint"}),
        "Laplace, last layer,\none pass: epistemic": ("Laplace, last layer", {"how": "adjoint"}),
        "MC dropout,\n100 draws: epistemic": ("MC dropout", {"draws": 100}),
        "SWAG,\none pass: epistemic": ("SWAG", {"how": "adjoint"}),
        "Laplace, all weights,\none pass, variances only: epistemic": ("Laplace, all weights", {"how": "streamlined", "rank": 0}),
        "Laplace, all weights,\none pass: epistemic": ("Laplace, all weights", {"how": "adjoint"}),
        "Laplace, all weights,\n200 draws: epistemic": ("Laplace, all weights", {"how": "sampled", "draws": 200}),
        "Laplace, all weights,\nlinearised: epistemic": ("Laplace, all weights", {"how": "linearized"}),
    }
    x, y = digits(seed=seed).x_test, digits(seed=seed).y_test
    images = {"digits": x, **others(x)}
    found: Scores = {}
    for way, (name, options) in ways.items():
        p = {kind: posteriors[name].predict(one, **options) for kind, one in images.items()}
        found[way] = {kind: (predictive_entropy if name == "plain" else mutual_information)(one) for kind, one in p.items()}
        found[way]["NLL"] = nll(p["digits"], y)
    return found


def told_apart(by: dict[str, Tensor]) -> dict[str, float]:
    """AUROC of every kind against the digits."""
    known = by["digits"]
    return {
        kind: float(auroc(torch.cat([known, values]), torch.arange(len(known) + len(values)) >= len(known)))
        for kind, values in by.items()
        if kind not in ("digits", "NLL")
    }


def unfamiliar(found: Scores, path: Path) -> None:
    """Histograms of uncertainty for digits and for images of other kinds, and how well it tells the two apart."""
    ways = list(found)[:3]
    kinds = list(others(torch.zeros(1, 1, 8, 8)))

    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    def panel(axes: Any, way: str, kind: str, upper: float) -> None:
        edges = [upper * i / BINS for i in range(BINS + 1)]
        for values, colour in ((found[way]["digits"], BLUE), (found[way][kind], VERMILION)):
            share = 100 * torch.histogram(values.double().clamp(0, upper), bins=BINS, range=(0.0, upper)).hist / len(values)
            axes.stairs(share.numpy(), edges, fill=True, color=colour, alpha=0.35, linewidth=0)
            axes.stairs(share.numpy(), edges, color=colour, linewidth=1.4)
        axes.set(xlim=(0, upper), ylim=(0, 100), yticks=(0, 50, 100))
        axes.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))
        text = f"AUROC {told_apart(found[way])[kind]:.2f}"
        axes.text(0.97, 0.94, text, transform=axes.transAxes, ha="right", va="top", weight="bold")
        grid(axes, "y")

    def draw(figure: Any) -> None:
        panels = figure.subplots(len(ways), len(kinds), squeeze=False)
        for row, way in zip(panels, ways, strict=True):
            upper = 1.02 * max(float(values.max()) for values in (found[way]["digits"], *(found[way][kind] for kind in kinds)))
            for axes, kind in zip(row, kinds, strict=True):
                panel(axes, way, kind, upper)
                axes.tick_params(labelleft=axes is row[0])
            row[0].set_ylabel(way + "\n\n% of the images")
        for axes, kind in zip(panels[0], kinds, strict=True):
            axes.set_title(kind)
        for axes in panels[-1]:
            axes.set_xlabel("nats")
        handles = [
            Patch(color=BLUE, alpha=0.5, label="test digits"),
            Patch(color=VERMILION, alpha=0.5, label="images of another kind"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)

    save(draw, (9.0, 6.6), path)


def sensitivity(plain: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The class [B], and the standard deviation [B, 1, 8, 8] of its logit that noise on each pixel causes; the weights are certain.

    It is the variance of the logit, differentiated in the variance of every pixel: one pass forwards and one backwards for all of them.
    """
    label = plain.predict(x).mean.argmax(-1)
    noise = torch.full_like(x, NOISE).requires_grad_()
    f: Any = Streamlined(plain.model, plain.params, plain.buffers).moments(x, x_var=noise, rank=-1)
    variance = f.cov.diagonal(dim1=-2, dim2=-1).gather(1, label.unsqueeze(1))
    (slope,) = torch.autograd.grad(variance.sum(), noise)
    return label, (slope.clamp_min(0) * NOISE).sqrt()


def checked(plain: Any, x: Tensor, draws: int = 1000) -> tuple[Tensor, Tensor]:
    """Against draws, for each image: how the map correlates with that of noise on one pixel after another, and its squares added up
    over the variance under noise on all pixels."""
    label, spread = sensitivity(plain, x)
    generator = torch.Generator().manual_seed(0)

    def variance(where: Tensor) -> Tensor:
        noisy = x + NOISE**0.5 * where * torch.randn(draws, *x.shape, generator=generator)
        f = plain.predict(noisy.flatten(0, 1)).f_mean.unflatten(0, (draws, len(x)))
        return f.var(0).gather(1, label.unsqueeze(1)).squeeze(1)

    alone = torch.stack([variance(pixel.reshape(1, 8, 8)).sqrt() for pixel in torch.eye(64)], 1)  # [B, 64]
    pairs = zip(alone, spread.flatten(1), strict=True)
    alike = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs])
    return alike, spread.square().flatten(1).sum(1) / variance(torch.ones(1, 8, 8))


def maps(plain: Any, path: Path, seed: int) -> None:
    """Digits, and which of their pixels the prediction hangs on."""
    data = digits(seed=seed)
    x = torch.stack([data.x_test[data.y_test == label][0] for label in SHOWN])
    label, spread = sensitivity(plain, x)

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, len(x), squeeze=False)
        shown = None
        for i in range(len(x)):
            panels[0][i].imshow(x[i, 0], cmap="gray_r", vmin=0, vmax=1)
            panels[0][i].set_title(f"taken for {int(label[i])}", loc="center")
            shown = panels[1][i].imshow(spread[i, 0], cmap="magma_r", vmin=0, vmax=float(spread.max()))
            inked = (x[i, 0] > 0.5).nonzero()
            panels[1][i].plot(inked[:, 1], inked[:, 0], "o", color=SOFT, markersize=2.5, markeredgewidth=0)
        for axes in panels.flat:
            axes.set(xticks=(), yticks=())
            for spine in axes.spines.values():
                spine.set(visible=True, color=INK)
        panels[0][0].set_ylabel("image")
        panels[1][0].set_ylabel("sensitivity")
        figure.colorbar(shown, ax=list(panels[1]), label="sd of the logit", aspect=8, pad=0.01)

    save(draw, (9.0, 2.75), path)


def save(draw: Callable[[Any], None], size: tuple[float, float], path: Path, width: int = 1200) -> None:
    drawn = Image.open(io.BytesIO(render(draw, size, kind="png", dpi=width / size[0])))
    drawn.convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = range(parser.parse_args().seeds)
    found = [scores(seed) for seed in seeds]
    for way in found[0]:
        each = [{**told_apart(one[way]), "NLL": float(one[way]["NLL"])} for one in found]
        print(way.replace("\n", " "), {key: round(sum(one[key] for one in each) / len(each), 3) for key in each[0]})
    unfamiliar(found[0], HERE / "streamlined_ood.png")
    plain = fitted(0)["plain"]
    alike, share = checked(plain, digits(seed=0).x_test[:20])
    low, high = float(share.min()), float(share.max())
    print(f"maps: correlation with draws at least {float(alike.min()):.3f}, variance {low:.2f} to {high:.2f} of theirs")
    maps(plain, HERE / "streamlined_sensitivity.png", 0)


if __name__ == "__main__":
    main()
