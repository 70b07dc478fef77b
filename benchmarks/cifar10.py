"""CIFAR-10 with a trained ResNet-20 (91.7 % accurate): what Laplace approximations around given weights do to log score, calibration,
and to images that are no CIFAR-10 (letters and clothes, as 32 x 32 colour images).

The prior is set by the evidence, and once by `tuned` on 2,000 test images, which are then left out for all.

The published figures are those of a WRN-16-4 and of other unknown images (Daxberger et al. 2021): mean confidence and AUROC.

    DUBITO_DATA=... python benchmarks/cifar10.py --device cuda
    DUBITO_DATA=... python benchmarks/cifar10.py --train 5000 --test 2000                  # two CPU cores, minutes
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from dubito.data.examples import Examples, locate
from measure import show, write
from mnist import OTHERS, evaluate, laplaces
from networks import resnet20
from safetensors.torch import load_file

import dubito
from dubito import Categorical, Laplace, Model
from dubito.data import cifar10
from dubito.priors import Normal

MEAN, SCALE = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
PUBLISHED = {
    "map": "76.1, 92.1",
    "laplace, last layer": "69.0, 92.2",
    "laplace, last layer, dense empirical Fisher": "55.7, 92.4",
}


def normalised(images: Examples) -> Examples:
    x = images.x if images.x.shape[-1] == 32 else F.pad(images.x, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return Examples((x - MEAN) / SCALE, images.y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--held-out", type=int, default=2_000, help="test images, the first ones, that serve to tune a precision")
    parser.add_argument("--device", default="cpu")
    args, began = parser.parse_args(), time.time()
    train, test = normalised(cifar10("train")), normalised(cifar10("test"))
    held_out = [(x, y) for x, y in zip(test.x[: args.held_out].split(500), test.y[: args.held_out].split(500), strict=True)]
    test = Examples(test.x[args.held_out : args.test], test.y[args.held_out : args.test])
    others = {
        name: normalised(Examples(e.x[: args.test], e.y[: args.test])) for name, e in ((n, r("test")) for n, r in OTHERS.items())
    }
    network = resnet20()
    network.load_state_dict(load_file(locate("weights", "resnet20_cifar10.safetensors")))
    network = network.to(args.device).eval()
    model = Model(network, Categorical(), Normal())
    # n_data stands for all images, also where the curvature is estimated from a part of them
    data, rows, figures, headline = (train.x[: args.train], train.y[: args.train]), [], {}, {}
    methods = {**laplaces(), "laplace, one draw": Laplace(curvature="fisher", draws=1)}
    methods = {"map": dubito.MAP(epochs=0), **methods, "laplace, tuned": methods["laplace"]}
    del methods["laplace, diagonal"]
    for name, method in methods.items():
        start = time.time()
        posterior = dubito.fit(model, method, data, n_data=len(train.y), batch_size=250)
        if name == "laplace, tuned":
            posterior = posterior.tuned(held_out)
        took = time.time() - start
        start = time.time()
        figures[name] = evaluate(posterior, test, others) | {"seconds to fit": took}
        figures[name]["seconds to predict"] = time.time() - start
        print(name, figures[name], flush=True)
        row = figures[name]
        plain = [f"{row[key]:.4f}" for key in ("accuracy", "nll", "ece", "errors")]
        unknown = [f"{row[f'{other}, predictive_entropy']:.3f}" for other in others]
        over = f"{100 * row['others, confidence']:.1f}, {100 * row['others, predictive_entropy']:.1f}"
        rows.append([name, *plain, *unknown, over, f"{took:.0f}", PUBLISHED.get(name, "")])
        headline[f"{name}: accuracy, NLL, ECE"] = [", ".join(plain[:3]), ""]
        published = f" (published: {PUBLISHED[name]})" if name in PUBLISHED else ""
        headline[f"{name}: mean confidence and AUROC over other sets, %{published}"] = [over, ""]
    columns = ["method", "accuracy", "NLL", "ECE", "errors", *others, "confidence, AUROC", "s", "published"]
    show(f"ResNet-20 on CIFAR-10, curvature of {args.train:,} images", columns, rows)
    settings = {**vars(args), "weights": "given, 91.73 % accurate", "prior": "Normal(), by the evidence"}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("cifar10", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
