"""CIFAR-10H: does a network doubt what people doubt? Correlation of predicted entropies with the entropy of 51 people's answers.

About 51 people named each of the 10,000 test images of CIFAR-10; where they disagree, the image is ambiguous, which no further training
data would change: aleatoric uncertainty, with a ground truth. By method, around the given ResNet-20: Spearman's (and Pearson's)
correlation of the aleatoric, of the epistemic and of the total part with people's entropy, and the log score of people's answers,
the mean cross-entropy -sum_c q_c ln p_c, whose least value is their own entropy. HMC's is that of the published probabilities
(another network; only their mean is known, so there is a total part alone). `--tune` test images, the first ones, serve to choose a
prior precision, and are left out for all.

    DUBITO_DATA=... python benchmarks/cifar10h.py --device cuda --methods all
    DUBITO_DATA=... python benchmarks/cifar10h.py --train 2000
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from cifar10 import normalised
from dubito.data.examples import locate
from measure import show, write
from networks import resnet20
from safetensors.torch import load_file
from torch import Tensor

import dubito
from dubito import Categorical, Laplace, MCDropout, Model
from dubito.cli.compare.scoring import agreement
from dubito.data import cifar10, cifar10h, label_entropy
from dubito.priors import Normal

METHODS: dict[str, Any] = {
    "MAP": dubito.MAP(epochs=0),
    "last-layer Laplace": Laplace(subset="last_layer"),
    "MC dropout of .2 before the last layer": MCDropout(at="^fc$|^linear$|^head$", rate=0.2, epochs=0),
    "tuned Laplace": Laplace(),
}
QUICK = list(METHODS)[:3]  # the last linearises all layers, for minutes on a GPU and hours without


def scores(parts: dict[str, Tensor], mean: Tensor, shares: Tensor, human: Tensor) -> dict[str, float]:
    found = {
        f"{name}, {key.removeprefix('human ')}": value
        for name, part in parts.items()
        for key, value in agreement(part, human).items()
    }
    return found | {"cross-entropy": float(-(shares * mean.double().clamp_min(1e-12).log()).sum(-1).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=50_000, help="images of which the curvature is taken")
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--tune", type=int, default=2_000)
    parser.add_argument("--methods", default=",".join(QUICK), help="separated by commas, or all")
    parser.add_argument("--device", default="cpu")
    args, began = parser.parse_args(), time.time()
    train, test = normalised(cifar10("train")), normalised(cifar10("test"))
    rows = slice(args.tune, args.test)
    counts = cifar10h()[rows]
    human, shares = label_entropy(counts), counts.double() / counts.sum(-1, keepdim=True)
    network = resnet20()
    network.load_state_dict(load_file(locate("weights", "resnet20_cifar10.safetensors")))
    model = Model(network.to(args.device).eval(), Categorical(), Normal())
    figures: dict[str, dict[str, float]] = {}
    for name in METHODS if args.methods == "all" else args.methods.split(","):
        data = (train.x[: args.train], train.y[: args.train])
        posterior = dubito.fit(model, METHODS[name], data, n_data=len(train.y), batch_size=250)
        if name.startswith("tuned"):
            held = zip(test.x[: args.tune].split(500), test.y[: args.tune].split(500), strict=True)
            posterior = posterior.tuned(list(held))  # pyright: ignore[reportAttributeAccessIssue]
        p, _ = posterior.predict_loader(list(zip(test.x[rows].split(250), test.y[rows].split(250), strict=True)))
        u = p.uncertainty
        parts = {"aleatoric": u.aleatoric, "epistemic": u.epistemic, "total": u.total}
        if float(u.epistemic.max()) < 1e-6:  # of a point there is nothing else
            del parts["epistemic"]
        figures[name] = scores(parts, p.mean, shares, human)
        print(name, figures[name], flush=True)
    probs = torch.from_numpy(np.load(locate("cifar10", "hmc_reference_cifar10_standard_order.npz"))["probs"])[rows].double()
    total = torch.special.entr(probs / probs.sum(-1, keepdim=True)).sum(-1)
    figures["HMC, published"] = scores({"total": total}, probs, shares, human)
    floor = float(human.mean())
    columns = ["aleatoric", "epistemic", "total"]
    table = [
        [
            name,
            *(f"{row[f'{part}, spearman']:.3f}" if f"{part}, spearman" in row else "" for part in columns),
            row["cross-entropy"],
        ]
        for name, row in figures.items()
    ]
    show("Correlation (Spearman) with the entropy of people's answers", ["method", *columns, "cross-entropy"], table)
    headline = {
        f"{row[0]}: Spearman of the aleatoric, epistemic and total part; cross-entropy": [
            f"{', '.join(cell or '-' for cell in row[1:4])}; {row[4]:.3f}",
            f"people: {floor:.3f}",
        ]
        for row in table
    }
    settings = {**vars(args), "weights": "given, 91.73 % accurate"}
    write("cifar10h", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
