"""What one-pass predictions are worth on real data: log score, accuracy, calibration, and telling other images apart, by every way to
predict from the same Laplace posterior, beside 1,000 draws of the weights.

MNIST and Fashion-MNIST with an MLP and a LeNet that MAP trains here, each the other's unknown images; CIFAR-10 with a given ResNet-20,
unknown are SVHN where the data folder has it (`svhn/test_32x32.mat`), else clothes and letters as colour images. Every way to predict
is scored at the prior precision that maximises the evidence, and at a multiple of it from one small grid, chosen for that way by
its own log score on held-out images of the training set, which MAP has not seen. The ResNet has seen all of them: its held-out images
are the first of the test set, and left out of the test for all. Its draws and images are fewer (`--resnet-...`). A last-layer
posterior, linearised, is the one-pass baseline.

Results are written after every posterior; past `--seconds` what is left over is not begun, seeds being the outermost loop.

    DUBITO_DATA=... python benchmarks/streamlined_data.py --device cuda
    DUBITO_DATA=... python benchmarks/streamlined_data.py --quick                  # only see that all runs
"""

from __future__ import annotations

import argparse
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cifar10 import normalised
from dubito.data.examples import Examples, locate
from measure import mean_and_error, show, write
from networks import ViT, last_values, lenet, mlp, resnet20
from safetensors.torch import load_file
from torch import Tensor, nn

import dubito
from dubito import MAP, Categorical, Laplace, Model
from dubito.data import cifar10, fashion_mnist, mnist, notmnist
from dubito.metrics import auroc, ece
from dubito.posteriors import Gaussian, Posterior
from dubito.posteriors.predict.streamlined.program import NoRule
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.priors import Normal

MULTIPLES = tuple(10 ** (i / 2) for i in range(-1, 9))  # of the evidence's prior precisions
Predict = Callable[[Gaussian, Tensor, int, float], Predictive]
WAYS: dict[str, Predict] = {
    "streamlined": lambda p, x, draws, memory: p.predict(x, "streamlined", rank=0),
    "streamlined, rank 64": lambda p, x, draws, memory: p.predict(x, "streamlined", rank=64),
    "adjoint": lambda p, x, draws, memory: p.predict(x, "adjoint", memory=memory),
    "linearised": lambda p, x, draws, memory: p.predict(x, "linearized", memory=memory),
    "sampled": lambda p, x, draws, memory: p.predict(x, "sampled", draws=draws, memory=memory),
}
LAST = "last layer, Kronecker"
STRUCTURES = {"diagonal": Laplace("diagonal"), "Kronecker": Laplace(), LAST: Laplace(subset="last_layer")}
SETS = {"MNIST": mnist, "Fashion-MNIST": fashion_mnist}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and images at a time
    "MLP": (lambda: nn.Sequential(nn.Flatten(), *mlp(784, 512, 512, 10)), 1000),
    "LeNet": (lenet, 500),
}


@dataclass
class Problem:
    name: str
    trained: Posterior
    train: Examples  # what the curvature is of
    n_data: int
    held_out: Examples
    test: Examples
    others: dict[str, Examples]
    size: int  # images at a time
    draws: int
    only: str = ""  # which weights are random


@dataclass
class Outcome:
    """Of every image: class probabilities, log score (where the class is known), entropy, and the epistemic part of it."""

    probs: Tensor
    score: Tensor
    entropy: Tensor
    epistemic: Tensor


def outcome(predict: Callable[[Tensor], Predictive], images: Examples, size: int, *, device: str, known: bool = True) -> Outcome:
    parts = []
    for x, y in zip(images.x.split(size), images.y.split(size), strict=True):
        p, y = predict(x.to(device)), y.to(device)
        score = p.log_prob(y) if known else torch.zeros(len(y))
        found = (p.mean, score, p.uncertainty.total, p.uncertainty.epistemic)
        parts.append([t.detach().cpu() for t in found])
    return Outcome(*(torch.cat(t) for t in zip(*parts, strict=True)))


def scored(predict: Callable[[Tensor], Predictive], problem: Problem, device: str) -> dict[str, float]:
    start = time.time()
    test = outcome(predict, problem.test, problem.size, device=device)
    seconds = time.time() - start
    mean = LatentMixture(Categorical(), test.probs.clamp_min(1e-30).log().unsqueeze(0))
    row = {
        "nll": -float(test.score.double().mean()),
        "accuracy": float((test.probs.argmax(-1) == problem.test.y).double().mean()),
        "ece": float(ece(mean, problem.test.y)),
        "seconds": seconds,
    }
    for what in ("entropy", "epistemic"):
        row[f"auroc, {what}"] = 0.0
    for name, images in problem.others.items():
        other = outcome(predict, images, problem.size, device=device, known=False)
        for what in ("entropy", "epistemic"):
            values = [getattr(test, what), getattr(other, what)]
            unknown = torch.cat([torch.zeros(len(values[0])), torch.ones(len(values[1]))]).bool()
            row[f"{name}, {what}"] = float(auroc(torch.cat(values), unknown))
            row[f"auroc, {what}"] += row[f"{name}, {what}"] / len(problem.others)
    return row


def at(posterior: Gaussian, multiple: float) -> Gaussian:
    return posterior.with_prior({name: leaf * multiple for name, leaf in posterior.prior_precision.items()})


def compare(problem: Problem, way: str, posterior: Gaussian, args: argparse.Namespace) -> dict[str, dict[str, float] | str]:
    """At the evidence's precision, and at the multiple of it that this way to predict likes best on the held-out images."""
    memory = 1.0 if args.device == "cpu" else 16.0

    def using(p: Gaussian, draws: int) -> Callable[[Tensor], Predictive]:
        return lambda x: WAYS[way](p, x, draws, memory)

    losses: dict[float, float] = {}
    rows: dict[str, dict[str, float] | str] = {}
    for multiple in args.multiples:
        try:
            found = outcome(using(at(posterior, multiple), args.tuning_draws), problem.held_out, problem.size, device=args.device)
            losses[multiple] = -float(found.score.double().mean())
        except torch.linalg.LinAlgError:  # covariances past what a float holds: a prior that is far too wide
            losses[multiple] = math.nan
    best = min(losses, key=lambda multiple: math.inf if math.isnan(losses[multiple]) else losses[multiple])
    for prior, p in (("evidence", posterior), ("tuned", at(posterior, best))):
        try:
            rows[prior] = scored(using(p, problem.draws), problem, args.device) | ({"multiple": best} if prior == "tuned" else {})
        except torch.linalg.LinAlgError as error:
            rows[prior] = f"fails: {error}"[:120]
    return rows


def some(images: Examples, stop: int, start: int = 0) -> Examples:
    return Examples(images.x[start:stop], images.y[start:stop])


def images_of(which: str, seed: int, args: argparse.Namespace) -> tuple[Examples, Examples, Examples, dict[str, Examples]]:
    """Training, held-out and test images and the others, shuffled by seed."""
    other = next(name for name in SETS if name != which)
    train, test = SETS[which]("train"), SETS[which]("test")
    order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(seed))
    held, rest = order[: args.held_out], order[args.held_out :][: args.train]
    parts = (Examples(train.x[index], train.y[index]) for index in (rest, held))
    return *parts, some(test, args.test), {other: some(SETS[other]("test"), args.others)}


def at_once(size: int, args: argparse.Namespace) -> int:
    """Images in a batch: 64 directions of a ResNet's activations take 4 MB an image for each layer."""
    return size if args.device != "cpu" else max(5, size // 50)


def small(which: str, network: str, seed: int, args: argparse.Namespace) -> Problem:
    train, held_out, test, others = images_of(which, seed, args)
    make, size = NETWORKS[network]
    torch.manual_seed(seed)
    model = Model(make(), Categorical(), Normal(scale=0.2))
    trained = dubito.fit(model, MAP(epochs=args.epochs), tuple(train), device=args.device, seed=seed, progress=False)
    return Problem(f"{which}, {network}", trained, train, len(train.y), held_out, test, others, at_once(size, args), args.draws)


def svhn() -> Examples:
    """The test part, from the published `test_32x32.mat`."""
    from scipy.io import loadmat

    found = loadmat(locate("svhn", "test_32x32.mat"))
    x, y = torch.from_numpy(found["X"]).permute(3, 2, 0, 1).float() / 255, torch.from_numpy(found["y"]).long().flatten()
    return Examples(x, y % 10)


def resnet(args: argparse.Namespace) -> Problem:
    network = resnet20()
    network.load_state_dict(load_file(locate("weights", "resnet20_cifar10.safetensors")), strict=False)
    train, test = cifar10("train"), normalised(cifar10("test"))
    train = normalised(some(train, args.resnet_train))
    try:
        others = {"SVHN": normalised(some(svhn(), args.others // 2))}
    except FileNotFoundError:
        found = {"Fashion-MNIST": fashion_mnist, "notMNIST": notmnist}
        others = {name: normalised(some(reader("test"), args.others // 4)) for name, reader in found.items()}
    model = Model(network.to(args.device).eval(), Categorical(), Normal())
    trained = dubito.fit(model, MAP(epochs=0), tuple(some(train, 100)), progress=False)
    held_out, test = some(test, args.held_out), some(test, args.held_out + args.resnet_test, args.held_out)
    return Problem("CIFAR-10, ResNet-20", trained, train, 50_000, held_out, test, others, at_once(250, args), args.resnet_draws)


def transformer(args: argparse.Namespace) -> Problem:
    """A small vision transformer, trained here as it is; the value matrices of its last two blocks and its head are random."""
    torch.manual_seed(0)
    network = ViT(32, 4, 192, 6, 3)
    train, test = normalised(some(cifar10("train"), args.train)), normalised(cifar10("test"))
    held_out, train = some(train, args.held_out), some(train, len(train.y), args.held_out)
    found = {"Fashion-MNIST": fashion_mnist, "notMNIST": notmnist}
    others = {name: normalised(some(reader("test"), args.others // 4)) for name, reader in found.items()}
    model = Model(network.to(args.device), Categorical(), Normal(scale=0.2))
    method = MAP(epochs=args.vit_epochs, learning_rate=5e-4)
    trained = dubito.fit(model, method, tuple(train), batch_size=256, seed=0, progress=False)
    network.load_state_dict({name: leaf for name, leaf in trained.params.items() if ":" not in name}, strict=False)
    start = dubito.fit(
        Model(network.eval(), Categorical(), Normal(), last_values(6)), MAP(epochs=0), tuple(some(train, 100)), progress=False
    )
    test, size = some(test, args.resnet_test), at_once(250, args)
    return Problem("CIFAR-10, ViT", start, train, len(train.y), held_out, test, others, size, args.resnet_draws, last_values(6))


class Results:
    """What was found so far, as a file."""

    def __init__(self, args: argparse.Namespace, began: float):
        self.args, self.began = args, began
        self.runs: dict[str, dict[str, list[dict[str, float]]]] = {}
        self.notes: dict[str, str] = {}

    def add(self, problem: str, what: str, row: dict[str, float]) -> None:
        self.runs.setdefault(problem, {}).setdefault(what, []).append(row)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
        print(f"{time.time() - self.began:.0f} s, {problem}, {what}: {shown}", flush=True)

    def figures(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for problem, rows in self.runs.items():
            for what, runs in rows.items():
                means = {key: mean_and_error([run[key] for run in runs]) for key in runs[0]}
                found.setdefault(problem, {})[what] = {"seeds": len(runs), **means}
        return found

    def save(self) -> None:
        figures, headline = self.figures(), {}
        for problem, rows in figures.items():
            for what, row in rows.items():
                if what.endswith(", tuned") and f"{what.removesuffix(', tuned')}, evidence" in rows:
                    continue
                label = what.removesuffix(", evidence")
                cells = [
                    line(row),
                    *([f"tuned (x {tuned['multiple'][0]:.3g}): {line(tuned)}"] if (tuned := rows.get(f"{label}, tuned")) else []),
                ]
                headline[f"{problem}, {label}: NLL, accuracy, ECE; AUROC by entropy, by epistemic part"] = ["; ".join(cells), ""]
        for what, why in self.notes.items():
            headline[what] = [why, ""]
        if self.args.quick and "BENCH_RESULTS" not in os.environ:
            return
        settings = {**vars(self.args), "prior": "Normal(), by the evidence, by layer; tuned: times one of `multiples`"}
        if self.args.device != "cpu":
            settings["gpu"] = torch.cuda.get_device_name()
        write(self.args.name, settings=settings, figures=figures, headline=headline, seconds=time.time() - self.began)


def line(row: dict[str, Any]) -> str:
    plain = ", ".join(f"{row[key][0]:.4f}" for key in ("nll", "accuracy", "ece"))
    return f"{plain}; " + ", ".join(f"{row[f'auroc, {what}'][0]:.3f}" for what in ("entropy", "epistemic"))


def study(problem: Problem, results: Results, args: argparse.Namespace, seed: int) -> bool:
    """All posteriors and ways of one trained network; False when the time is over."""

    def over() -> bool:
        return time.time() - results.began > args.seconds

    results.add(problem.name, "MAP", scored(lambda x: problem.trained.predict(x), problem, args.device))
    source = problem.trained.model
    model = Model(source.network, source.likelihood, Normal(), only=problem.only)
    for structure, method in STRUCTURES.items():
        if over():
            return False
        start = time.time()
        posterior = dubito.fit(
            model, method, tuple(problem.train), start=problem.trained, n_data=problem.n_data, batch_size=250, seed=seed,
            progress=False,
        )  # fmt: skip
        assert isinstance(posterior, Gaussian)
        fitting = time.time() - start
        for way in WAYS if structure != LAST else ("linearised",):
            if over():
                results.save()
                return False
            what = f"{structure}, {way}"
            try:
                for prior, row in compare(problem, way, posterior, args).items():
                    if isinstance(row, str):
                        results.notes[f"{problem.name}, {what}, {prior}"] = row
                        print(f"{problem.name}, {what}, {prior}: {row}", flush=True)
                    else:
                        results.add(problem.name, f"{what}, {prior}", row | {"seconds to fit": fitting})
            except NoRule as error:
                results.notes[f"{problem.name}, {what}"] = "no rule"
                print(f"{problem.name}, {what}: {str(error).split('. ')[0]}", flush=True)
            except Exception as error:  # nothing of the rest is lost
                results.notes[f"{problem.name}, {what}"] = f"fails: {type(error).__name__}: {error}"[:200]
                print(f"{problem.name}, {what}: {results.notes[f'{problem.name}, {what}']}", flush=True)
        results.save()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help='parts of the names of problems, such as "Fashion" or "ResNet"')
    parser.add_argument("--train", type=int, default=60_000, help="training images at most")
    parser.add_argument("--held-out", type=int, default=2_000, help="images that serve to choose a precision")
    parser.add_argument("--test", type=int, default=10_000, help="test images at most")
    parser.add_argument("--others", type=int, default=4_000, help="unknown images at most")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--vit-epochs", type=int, default=12)
    parser.add_argument("--name", default="streamlined_data", help="of the results")
    parser.add_argument("--resnet-draws", type=int, default=100)
    parser.add_argument("--resnet-train", type=int, default=10_000, help="images that its curvature is estimated from, of 50,000")
    parser.add_argument("--resnet-test", type=int, default=4_000)
    parser.add_argument("--tuning-draws", type=int, default=100, help="of the weights, to choose a precision")
    parser.add_argument("--multiples", type=float, nargs="+", default=MULTIPLES, help="of the evidence's prior precisions")
    parser.add_argument("--seconds", type=float, default=420, help="after which nothing new is begun")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="only see that all runs: a few images; written only to BENCH_RESULTS"
    )
    args, began = parser.parse_args(), time.time()
    if args.quick:
        args.train, args.held_out, args.test, args.others, args.epochs, args.seeds = 500, 10, 20, 20, 20, 1
        args.draws, args.resnet_draws, args.tuning_draws, args.multiples = 20, 4, 4, (1.0, 10.0)
        args.resnet_train, args.resnet_test, args.vit_epochs = 20, 5, 1
    warnings.filterwarnings("ignore", message="the weights are not at an optimum")  # a few epochs, or given
    results, going = Results(args, began), True
    for seed in range(args.seeds):
        pairs = [(which, network) for which in SETS for network in NETWORKS]
        makers: dict[str, Callable[[], Problem]] = {f"{a}, {b}": partial(small, a, b, seed, args) for a, b in pairs}
        if seed == 0:  # the given weights are one seed
            makers["CIFAR-10, ResNet-20"] = partial(resnet, args)
            makers["CIFAR-10, ViT"] = partial(transformer, args)
        for name, make in makers.items():
            if going and any(part in name for part in args.only):
                going = time.time() - began < args.seconds and study(make(), results, args, seed)
    results.save()
    columns = ["", "seeds", "NLL", "accuracy", "ECE", "AUROC, entropy", "epistemic", "multiple", "s"]
    for problem, rows in results.figures().items():
        keys = ("nll", "accuracy", "ece", "auroc, entropy", "auroc, epistemic", "multiple", "seconds")
        cells = [
            [what, row["seeds"], *(f"{row[key][0]:.4g}" if key in row else "" for key in keys)] for what, row in rows.items()
        ]
        show(problem, columns, cells)
    if not going:
        print(f"stopped after {time.time() - began:.0f} s: what is missing was not begun")


if __name__ == "__main__":
    main()
