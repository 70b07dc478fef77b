"""Fashion-MNIST with a small CNN: weight decay of each layer from the evidence, beside MAP under a prior that is given.

The published figures beside ours are those of online evidence training with a CNN on all 60,000 images (Immer et al. 2021).

    DUBITO_DATA=... python benchmarks/online_evidence.py                     # on the GPU where there is one: a few minutes
    DUBITO_DATA=... python benchmarks/online_evidence.py --quick             # 600 images, to see that it runs
"""

from __future__ import annotations

import argparse
import time

import torch
from measure import mean_and_error, show, write
from torch import nn

import dubito
from dubito import MAP, Categorical, Laplace, Model, OnlineLaplace
from dubito.data import fashion_mnist, mnist
from dubito.measures import predictive_entropy
from dubito.metrics import accuracy, auroc, ece, nll
from dubito.posteriors import Gaussian, Point, Posterior
from dubito.priors import Normal

PUBLISHED = {"online, diagonal": "-.302, 89.4 %, .832", "online, kronecker": "-.282, 89.9 %, .836"}


def cnn() -> nn.Module:
    """96,938 weights, no BatchNorm: before it the evidence of weights has no maximum."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 160), nn.ReLU(), nn.Linear(160, 10),
    )  # fmt: skip


def evaluate(posterior: Posterior, test, other) -> dict[str, float]:
    p, _ = posterior.predict_loader(list(test.x.split(1000)))
    q, _ = posterior.predict_loader(list(other.x.split(1000)))
    scores = torch.cat([predictive_entropy(p), predictive_entropy(q)])
    row = {metric.__name__: float(metric(p, test.y)) for metric in (accuracy, nll, ece)}
    return row | {"unknown": float(auroc(scores, torch.arange(len(scores)) >= len(test.y)))}


def forms(posterior: Posterior, start: Posterior | None, name: str) -> dict[str, Posterior]:
    """What is scored: the Gaussian, and its mean on its own."""
    if start is not None or not isinstance(posterior, Gaussian):
        return {name: posterior}
    return {name: posterior, f"{name}, its mean": Point(posterior.model, posterior.params, posterior.buffers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=60_000, help="training images, of 60,000")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--every", type=int, default=5, help="epochs between evidence steps")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="600 images and 6 epochs; nothing is written")
    args, began = parser.parse_args(), time.time()
    if args.quick:
        args.train, args.epochs, args.every = 600, 6, 2
    train, test, other = fashion_mnist("train"), fashion_mnist("test"), mnist("test")
    if args.quick:
        test, other = (type(part)(part.x[:500], part.y[:500]) for part in (test, other))
    data = (train.x[: args.train], train.y[: args.train])
    recipe = dict(epochs=args.epochs, learning_rate=2e-3)
    # name -> the prior, the method, and the name of what it starts from
    runs: dict[str, tuple] = {
        "map, scale 1": (Normal(scale=1.0), MAP(**recipe), None),
        "map, scale 0.1": (Normal(scale=0.1), MAP(**recipe), None),
        "map, then laplace": (Normal(), Laplace(check=False), "map, scale 1"),
        "online, diagonal": (Normal(), OnlineLaplace("diagonal", every=args.every, **recipe), None),
        "online, kronecker": (Normal(), OnlineLaplace("kronecker", every=args.every, **recipe), None),
    }
    found: dict[str, list[dict[str, float]]] = {}
    learned: dict[str, dict[str, float]] = {}
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        net, done = cnn(), {}
        for name, (prior, method, before) in runs.items():
            start, clock = done.get(before), time.time()
            model = Model(net, Categorical(), prior)
            fitted = dubito.fit(
                model, method, data, start=start, device=args.device, seed=seed, batch_size=args.batch, progress=False
            )
            took = time.time() - clock
            done[name] = fitted
            extra = {"seconds to fit": took}
            if isinstance(fitted, Gaussian):
                extra["log evidence"] = float(fitted.log_evidence())
                learned[name] = {key: float(value) for key, value in fitted.prior_precision.items() if key.endswith("weight")}
            for form, posterior in forms(fitted, start, name).items():
                found.setdefault(form, []).append(evaluate(posterior, test, other) | extra)
                print(f"seed {seed} {form}: {found[form][-1]}", flush=True)
    figures = {name: {key: mean_and_error([run[key] for run in rows]) for key in rows[0]} for name, rows in found.items()}
    table, headline = [], {}
    for name, figure in figures.items():
        plain = [f"{-figure['nll'][0]:.3f}", f"{100 * figure['accuracy'][0]:.1f} %", f"{figure['unknown'][0]:.3f}"]
        published = PUBLISHED.get(name.removesuffix(", its mean"), "")
        table.append([name, *plain, f"{figure['ece'][0]:.3f}", f"{figure['seconds to fit'][0]:.0f}", published])
        headline[f"{name}: test log likelihood, accuracy, AUROC of MNIST by entropy"] = [", ".join(plain), published]
    columns = ["method", "log likelihood", "accuracy", "AUROC of MNIST", "ECE", "s", "published"]
    show(f"A CNN on {args.train:,} images of Fashion-MNIST, {args.epochs} epochs", columns, table)
    print("prior precisions:", learned)
    if args.quick:
        return
    settings = {**vars(args), "network": "CNN 16-32-160, 96,938 weights", "prior precisions, of the last seed": learned}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("online_evidence", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
