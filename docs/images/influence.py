"""The picture of docs/influence.md: training images that helped and that harmed the prediction for a test image of MNIST.

    DUBITO_DATA=folder python docs/images/influence.py         # a minute; writes the PNG file beside this one

A tenth of the training labels are turned to random other ones first.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import dubito
from dubito.apps.influence import Influence
from dubito.data import mnist
from dubito.report.images import influential, sheet

HERE = Path(__file__).parent


def main() -> None:
    data, test = mnist("train"), mnist("test")
    source = torch.Generator().manual_seed(0)
    x, y = data.x[:3000], data.y[:3000].clone()
    wrong = torch.randperm(len(y), generator=source)[: len(y) // 10]
    y[wrong] = (y[wrong] + torch.randint(1, 10, wrong.shape, generator=source)) % 10
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 10),
    )  # fmt: skip
    model = dubito.Model(net, dubito.Categorical(), dubito.priors.Normal(scale=1 / math.sqrt(len(y) * 5e-4)))
    point = dubito.fit(model, dubito.MAP(epochs=8, learning_rate=2e-3), (x, y), batch_size=64, progress=False)
    p = point.predict(test.x[:1000]).mean
    missed = (p.argmax(-1) != test.y[:1000]).nonzero().squeeze(1)
    shown = int(missed[p[missed, test.y[missed]].argmax()])  # a near miss
    found = Influence().fit(point, (x, y), progress=False)
    values = found.of((test.x[shown : shown + 1], test.y[shown : shown + 1]))[0]
    for name, which in zip(("helpful", "harmful"), influential(values, 7), strict=True):
        turned = sum(int(n) in wrong.tolist() for n in which)
        print(f"{name}: {which.tolist()}, labels turned: {turned}")
    said = f"truly {int(test.y[shown])}\nsaid {int(p[shown].argmax())} ({float(p[shown].max()):.2f})"
    labels = [f"{int(one)}*" if n in set(wrong.tolist()) else str(int(one)) for n, one in enumerate(y)]
    drawn = sheet(test.x[shown], said, x, labels, values, count=7, kind="png")
    assert isinstance(drawn.image, bytes)
    Image.open(io.BytesIO(drawn.image)).convert("RGB").quantize(128).save(HERE / "influence_examples.png", optimize=True)
    print(drawn.alt)


if __name__ == "__main__":
    main()
