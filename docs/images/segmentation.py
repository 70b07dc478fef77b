"""The pictures of docs/segmentation.md: CamVid street scenes with what is predicted and how uncertain that is.

    DUBITO_DATA=folder python docs/images/segmentation.py                                     # small images; minutes on a CPU
    DUBITO_DATA=folder python docs/images/segmentation.py --device cuda --size 180 240 --width 32 --epochs 80 --draws 50

Writes segmentation_maps.png and segmentation_errors.png beside this file. The last row of the first is a test image upside down.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from pathlib import Path

import torch
from dubito.data.camvid import CLASSES, COLOURS, VOID
from PIL import Image

import dubito
from dubito.apps.dense import assess, maps
from dubito.data import camvid
from dubito.report import Picture
from dubito.report.dense import detection, panels

HERE = Path(__file__).parent
SHOWN = (20, 110, 200)  # test images from three of the drives


def save(drawn: Picture, name: str) -> None:
    assert isinstance(drawn.image, bytes)
    Image.open(io.BytesIO(drawn.image)).convert("RGB").quantize(256).save(HERE / name, optimize=True)
    print(drawn.alt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, nargs=2, default=[60, 80])
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parents[1] / "examples"))
    build = importlib.import_module("fully_convolutional").FullyConvolutional
    x, y = camvid("train", size=tuple(args.size))
    test = camvid("test", size=tuple(args.size))
    torch.manual_seed(0)
    likelihood = dubito.HeteroscedasticCategorical(dim=1, ignore_index=VOID, samples=24)
    network = build(2 * len(CLASSES), width=args.width, dropout=0.3)
    method = dubito.MCDropout(epochs=args.epochs, learning_rate=3e-3, warmup=0.05, draws=args.draws, record=False)
    precision = None if args.device == "cpu" else "bfloat16"
    posterior = dubito.fit(
        dubito.Model(network, likelihood, dubito.priors.Normal(scale=0.3)), method, (x, y), batch_size=6, device=args.device,
        precision=precision,
    )  # fmt: skip
    rows = list(SHOWN)
    images, labels = test.x[[*rows, rows[0]]], test.y[[*rows, rows[0]]].clone()
    images[-1], labels[-1] = images[-1].flip(-2), labels[-1].flip(-2)
    drawn = panels(
        images, labels, maps(posterior, images), colours=COLOURS, names=CLASSES, labels=[*["test"] * len(rows), "upside down"]
    )
    save(drawn, "segmentation_maps.png")
    some = torch.linspace(0, len(test.x) - 1, 60).round().long()
    found = assess(posterior, (test.x[some], test.y[some]))
    print(found.table(CLASSES))
    save(detection("Errors found by uncertainty", found.detectors, kind="png"), "segmentation_errors.png")


if __name__ == "__main__":
    main()
