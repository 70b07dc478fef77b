"""MNIST with a LeNet: accuracy, log score, calibration, and how well uncertainty tells other alphabets and clothes apart.

The published figures beside ours are LeNet-5 on all of MNIST (uncertainty-baselines): deterministic, and an ensemble of ten; and the
out-of-distribution table of Daxberger et al. 2021 (Laplace Redux: another LeNet, EMNIST in the place of notMNIST), mean confidence and
AUROC over the three other sets; LA is the last layer with Kronecker factors, LA* the last layer, dense, with the empirical Fisher.

    DUBITO_DATA=... python benchmarks/mnist.py                                     # two CPU cores: 10,000 images, minutes
    DUBITO_DATA=... python benchmarks/mnist.py --device cuda --train 60000 --epochs 15 --seeds 3
"""

from __future__ import annotations

import argparse
import time

import torch
from measure import mean_and_error, show, write
from torch import nn

import dubito
from dubito import MAP, SWAG, Categorical, Ensemble, Laplace, MCDropout, Model
from dubito.data import fashion_mnist, kmnist, mnist, notmnist
from dubito.measures import mutual_information, predictive_entropy
from dubito.metrics import accuracy, auroc, brier, ece, nll
from dubito.priors import Normal

PUBLISHED = {"map": "99.1 %, .037", "ensemble": "99.4 %, .016"}
REDUX = {
    "map": "75.0, 96.5",
    "ensemble": "65.7, 97.5",
    "swag": "75.8, 96.5",
    "laplace, last layer": "67.5, 96.2",
    "laplace, last layer, dense empirical Fisher": "56.1, 96.4",
}
OTHERS = {"Fashion-MNIST": fashion_mnist, "KMNIST": kmnist, "notMNIST": notmnist}


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Dropout(0.5), nn.Linear(500, 10),
    )  # fmt: skip


def evaluate(posterior: dubito.posteriors.Posterior, test, others) -> dict[str, float]:
    memory = 1.0 if posterior.model.device.type == "cpu" else 16.0
    p, _ = posterior.predict_loader(list(test.x.split(1000)), memory=memory)
    row = {metric.__name__: float(metric(p, test.y)) for metric in (accuracy, nll, ece, brier)}
    row["errors"] = float(auroc(predictive_entropy(p), p.mean.argmax(-1) != test.y))
    for name, images in others.items():
        q, _ = posterior.predict_loader(list(images.x[: len(test.y)].split(1000)), memory=memory)
        for score in (predictive_entropy, mutual_information):
            known, unknown = score(p), score(q)
            labels = torch.arange(len(known) + len(unknown)) >= len(known)
            row[f"{name}, {score.__name__}"] = float(auroc(torch.cat([known, unknown]), labels))
        row[f"{name}, confidence"] = float(q.mean.amax(-1).mean())
    for what in ("predictive_entropy", "mutual_information", "confidence"):
        row[f"others, {what}"] = sum(row[f"{name}, {what}"] for name in others) / len(others)
    return row


def laplaces() -> dict[str, Laplace]:
    """Those of the published table, and the whole network."""
    return {
        "laplace, last layer": Laplace(subset="last_layer"),
        "laplace, last layer, dense empirical Fisher": Laplace("dense", "empirical", subset="last_layer"),
        "laplace": Laplace(),
        "laplace, diagonal": Laplace("diagonal"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=10_000, help="training images, of 60,000")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", type=int, default=5, help="members of the ensemble")
    parser.add_argument("--device", default="cpu")
    args, began = parser.parse_args(), time.time()
    train, test = mnist("train"), mnist("test")
    others = {name: reader("test") for name, reader in OTHERS.items()}
    recipe = MAP(epochs=args.epochs)
    swag = SWAG(epochs=args.epochs, learning_rate=0.05)
    methods = {"map": recipe, **laplaces(), "swag": swag, "mc_dropout": MCDropout(epochs=args.epochs)}
    methods["ensemble"] = Ensemble(recipe, args.size)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        network, data = lenet(), (train.x[: args.train], train.y[: args.train])
        trained = None
        for name, method in methods.items():
            # the evidence sets the prior of a Laplace approximation around the network that MAP has trained
            posthoc = "laplace" in name
            model = Model(network, Categorical(), Normal() if posthoc else Normal(scale=0.2))
            start = time.time()
            posterior = dubito.fit(model, method, data, start=trained if posthoc else None, device=args.device, seed=seed)
            trained = posterior if name == "map" else trained
            took = time.time() - start
            runs[name].append(evaluate(posterior, test, others) | {"seconds to fit": took})
            print(f"seed {seed} {name}: {runs[name][-1]}", flush=True)
    figures = {name: {key: mean_and_error([run[key] for run in found]) for key in found[0]} for name, found in runs.items()}
    rows, headline = [], {}
    for name, figure in figures.items():
        plain = [f"{figure[key][0]:.4f}" for key in ("accuracy", "nll", "ece", "errors")]
        unknown = [f"{figure[f'{other}, predictive_entropy'][0]:.3f}" for other in others]
        rows.append([name, *plain, *unknown, f"{figure['seconds to fit'][0]:.0f}", PUBLISHED.get(name, "")])
        beside = f" (published accuracy, NLL: {PUBLISHED[name]})" if name in PUBLISHED else ""
        headline[f"{name}: accuracy, NLL, ECE{beside}"] = [", ".join(plain[:3]), ""]
        headline[f"{name}: AUROC by entropy of errors, {', '.join(others)}"] = [", ".join([plain[3], *unknown]), ""]
        over = f"{100 * figure['others, confidence'][0]:.1f}, {100 * figure['others, predictive_entropy'][0]:.1f}"
        published = f" (published: {REDUX[name]})" if name in REDUX else ""
        headline[f"{name}: mean confidence and AUROC over the other sets, %{published}"] = [over, ""]
    columns = ["method", "accuracy", "NLL", "ECE", "errors", *others, "s", "published"]
    show(f"LeNet on {args.train:,} images of MNIST, {args.epochs} epochs", columns, rows)
    prior = "Normal(scale=0.2); Laplace: Normal(), by the evidence, around the MAP of the former"
    settings = {**vars(args), "network": "LeNet 20-50-500, dropout .5 before the last layer", "prior": prior}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("mnist", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
