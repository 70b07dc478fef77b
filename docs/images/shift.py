"""The pictures of docs/shift.md.

    DUBITO_DATA=folder python docs/images/shift.py         # a minute or two; writes the PNG files beside this one

The sheet needs CIFAR-10; without it only the sweep is drawn, of methods on the digits that scikit-learn carries.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import dubito
from dubito.data import cifar10, digits
from dubito.report.canvas import CYCLE, grid, render
from dubito.shift import CORRUPTIONS, Sweep, corrupt, sweep

HERE = Path(__file__).parent
SHOWN = (1, 7, 23)  # test images: a ship, a frog, a truck
HALF = (len(CORRUPTIONS) + 1) // 2


def strip(x: Tensor, name: str) -> Tensor:
    """One image clean and at severities 1 to 5, side by side, with a white line between: [H, W, 3]."""
    images = [x, *(corrupt(x, name, severity=severity) for severity in range(1, 6))]
    framed = [nn.functional.pad(image[0], (0, 1, 0, 1), value=1.0) for image in images]
    return torch.cat(framed, -1).movedim(0, -1)


def sheet(path: Path) -> None:
    """All corruptions, in two columns; every one on the next of the images."""
    x = cifar10("test").x[list(SHOWN)]

    def draw(figure: Any) -> None:
        panels = figure.subplots(HALF, 2, squeeze=False)
        for axes in panels.flat:
            axes.axis("off")
        for i, name in enumerate(CORRUPTIONS):
            axes = panels[i % HALF][i // HALF]
            axes.imshow(strip(x[[i % len(x)]], name).numpy(), interpolation="nearest")
            axes.text(-4, 16, name.replace("_", "\n"), ha="right", va="center", fontsize=8)
        for axes in panels[0]:
            for place, text in enumerate(["clean", "1", "2", "3", "4", "5"]):
                axes.text(33 * place + 16, -3, text, ha="center", va="bottom", fontsize=8)

    save(draw, (9.0, 6.6), path, 1000)


def sweeps(seed: int) -> dict[str, Sweep]:
    """Posteriors of one small network on digits, under all corruptions that grey images have."""
    data = digits(seed=seed)
    train = (data.x_train, data.y_train)
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 50), nn.ReLU(), nn.Dropout(0.2)]
    model = dubito.Model(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(50, 10)), dubito.Categorical())
    plain = dubito.MAP(epochs=100, learning_rate=1e-3)
    point = dubito.fit(model, plain, train, batch_size=64, seed=seed, progress=False)
    found = {
        "one network (MAP)": point,
        "MC dropout": dubito.fit(model, dubito.MCDropout(epochs=0), train, start=point, progress=False),
        "Laplace": dubito.fit(model, dubito.Laplace(), train, start=point, progress=False),
        "ensemble of 5": dubito.fit(model, dubito.Ensemble(plain, 5), train, batch_size=64, seed=seed, progress=False),
    }
    return {label: sweep(posterior, data.x_test, data.y_test, seed=seed) for label, posterior in found.items()}


def curves(found: dict[str, Sweep], path: Path) -> None:
    """Four metrics over severity, the mean over the corruptions."""
    names = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "epistemic": "epistemic uncertainty, nats"}

    def draw(figure: Any) -> None:
        for axes, (metric, title) in zip(figure.subplots(1, 4), names.items(), strict=True):
            for i, (label, one) in enumerate(found.items()):
                axes.plot(
                    one.levels, [one.mean(metric, level) for level in one.levels], "o-", color=CYCLE[i], label=label, markersize=4
                )
            axes.set(xlabel="severity", xticks=range(6))
            axes.set_title(title)
            grid(axes, "y")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(found))

    save(draw, (10.5, 3.0), path, 1200)


def save(draw: Any, size: tuple[float, float], path: Path, width: int) -> None:
    drawn = Image.open(io.BytesIO(render(draw, size, kind="png", dpi=width / size[0])))
    drawn.convert("RGB").quantize(192).save(path, optimize=True)


def main() -> None:
    found = sweeps(0)
    for label, one in found.items():
        clean = {name: round(one.mean(name, 0), 3) for name in one.metrics}
        print(label, "clean", clean, "shifted", {name: round(one.mean(name), 3) for name in one.metrics})
    curves(found, HERE / "shift_sweep.png")
    try:
        sheet(HERE / "shift_corruptions.png")
    except FileNotFoundError as error:
        print(error)


if __name__ == "__main__":
    main()
