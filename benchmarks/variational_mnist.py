"""Variational inference on MNIST: errors beside Bayes by Backprop's, how far weights can be pruned, and how small networks become.

- `sgd-1200`, `dropout-1200`: the same network by plain training and with dropout, for their curves of errors and their weights.
- `bbb-400`, `-800`, `-1200`: two hidden ReLU layers of that width, mean field, the scale mixture prior (Blundell et al. 2015), pixels
  over 126 as there; error of the mean of 30 draws, and with 50, 75, 95 and 98 % of the weights pruned by |mu| / sigma; the error of the
  mean weights while they are trained, and histograms of a draw of the weights and of |mu| / sigma in decibels. By Adam, or, in a result
  file of its own, by SGD, with which standard deviations hardly move; `--grid` looks for settings by held-out images.
- `vmg`: three layers of 150, matrix-variate Gaussians (Louizos & Welling 2016), standardised pixels, prior variance 2 / inputs (chosen
  by held-out images). There the KL is that of the matrix before pseudo-data make it surer; ours, of the posterior that is used, is
  larger. `vmg-light` counts it a tenth.
- `lenet5-...`, `lenet300-...`: group normal-Jeffreys, group horseshoe (Louizos et al. 2017), sparse variational dropout (Molchanov et
  al. 2017) on LeNet-5-Caffe and LeNet-300-100, compressed by `dubito.compress` at the thresholds that `compression.thresholds` finds on
  the last 5,000 training images, which are not trained on: there, at most the error that was published, or 0.1 % more than before.

Every case and seed is a process, `--jobs` at a time.

    DUBITO_DATA=... python benchmarks/variational_mnist.py --device cuda --jobs 14 --seeds 3 --epochs 120     # 30 minutes, or less
    DUBITO_DATA=... python benchmarks/variational_mnist.py --device cuda --jobs 12 --grid --optimizer sgd --prior .75 0 8 --epochs 150
    DUBITO_DATA=... python benchmarks/variational_mnist.py --only bbb-400 --train 5000 --epochs 5
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from measure import apart, earlier, mean_and_error, result, show, write
from networks import mlp
from torch import Tensor, nn

import dubito
from dubito import MAP, Categorical, MCDropout, Model, Variational
from dubito.apps import compression
from dubito.apps.compression.compress import interleaved
from dubito.data import mnist
from dubito.families import Grouped, MatrixNormal
from dubito.inference.descent import Descent
from dubito.inference.method import Event
from dubito.posteriors import Gaussian, Posterior
from dubito.priors import LogUniform, Normal, Prior, ScaleMixture

HANDED = ("device", "epochs", "slow_epochs", "batch", "optimizer", "learning_rate", "init_scale", "prior", "train")
GRIDS: dict[
    str, list[dict[str, Any]]
] = {  # of settings to choose among: Blundell's priors; rates; where standard deviations start
    "adam": [
        {"prior": [share, wide, narrow], "init_scale": start}
        for start in (0.003, 0.03)
        for share in (0.25, 0.5, 0.75)
        for wide in (0, 1, 2)
        for narrow in (6, 7, 8)
    ],
    "sgd": [{"learning_rate": rate, "init_scale": start} for rate in (0.003, 0.01, 0.03) for start in (0.01, 0.03, 0.05, 0.1)],
}
SHARES = (0.5, 0.75, 0.95, 0.98)
HELD = 5000
PUBLISHED = {
    "sgd-1200": "1.88 %",
    "dropout-1200": "1.36 %",
    "bbb-400": "1.36 %",
    "bbb-800": "1.34 %",
    "bbb-1200": "1.32 %; pruned 1.24, 1.24, 1.29, 1.39 %",
    "vmg": "1.09 %",
    "vmg-light": "1.09 %",
    "lenet5-jeffreys": "1.0 %, 108 x, 361 x, 573 x coded; 8-13-88-13",
    "lenet5-horseshoe": "1.0 %, 156 x, 419 x, 771 x coded; 5-10-76-16",
    "lenet5-sparse": ".75 %, 280 x",
    "lenet300-jeffreys": "1.8 %, 9 x, 36 x, 58 x coded; 278-98-13",
    "lenet300-horseshoe": "1.8 %, 9 x, 23 x, 59 x coded; 311-86-14",
    "lenet300-sparse": "1.92 %, 68 x",
}

LIMITS = {
    "lenet5-jeffreys": 1.0,
    "lenet5-horseshoe": 1.0,
    "lenet5-sparse": 0.75,
    "lenet300-jeffreys": 1.8,
    "lenet300-horseshoe": 1.8,
    "lenet300-sparse": 1.92,
}  # % error of the published networks


def lenet5() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def mixture(args: argparse.Namespace) -> ScaleMixture:
    share, *scales = args.prior
    return ScaleMixture(share, scales=(math.exp(-scales[0]), math.exp(-scales[1])))


def problem(case: str, args: argparse.Namespace) -> tuple[nn.Module, Prior, Descent, int]:
    """Network, prior, method, and the batch size."""
    epochs = args.epochs if case.startswith(("sgd", "dropout", "bbb")) else args.slow_epochs or args.epochs
    descent: dict[str, Any] = {"epochs": epochs, "learning_rate": args.learning_rate}
    if case == "sgd-1200":
        return mlp(784, 1200, 1200, 10), Normal(scale=10.0), MAP(**descent), args.batch
    if case == "dropout-1200":
        dropping = MCDropout(at="^[24]$", rate=0.5, **descent)  # the inputs of all layers but the first
        return mlp(784, 1200, 1200, 10), Normal(scale=10.0), dropping, args.batch
    if case.startswith("bbb"):
        width = int(case.split("-")[1])
        method = Variational(init_scale=args.init_scale, estimator="weights", optimizer=args.optimizer, **descent)
        return mlp(784, width, width, 10), mixture(args), method, args.batch
    if case.startswith("vmg"):
        network, weight = mlp(784, 150, 150, 150, 10), 0.1 if case == "vmg-light" else 1.0
        return (
            network,
            Normal.fan_in(network, math.sqrt(2)),
            Variational(MatrixNormal(50), kl_weight=weight, **descent),
            args.batch,
        )
    network = lenet5() if case.startswith("lenet5") else mlp(784, 300, 100, 10)
    kind = case.split("-")[1]
    if kind == "sparse":
        return network, LogUniform(), Variational(estimator="local", kl_warmup=0.3, **descent), args.batch
    prior = "normal_jeffreys" if kind == "jeffreys" else "horseshoe"
    # on the first layer, as published; of this one that left more errors on held-out images than were published
    limit = 0.2 if case == "lenet300-jeffreys" else {r"^0\.weight$": 0.2}
    # a constant rate, as was published: factors of units move slowly, and the sum of all rates counts
    method = Variational(Grouped(prior, limit=limit), kl_warmup=0.2, schedule="constant", **descent)
    return network, Normal(scale=1.0), method, args.batch


def probabilities(posterior: Posterior, x: Tensor) -> Tensor:
    return posterior.predict_loader(list(x.split(1000)), memory=8.0 if posterior.model.device.type == "cuda" else 1.0)[0].mean


def error(posterior: Posterior, x: Tensor, y: Tensor) -> float:
    return 100 * float((probabilities(posterior, x).argmax(-1) != y).double().mean())


class Curve:
    """The error of the weights, or of their means, on the test images: some thirty times while they are trained."""

    def __init__(self, model: Model, x: Tensor, y: Tensor):
        self.model, self.x, self.y = model, x.to(model.device), y.to(model.device)
        self.points: list[tuple[float, float]] = []

    def __call__(self, event: Event) -> None:
        if event.step % max(1, event.steps // 30) and event.step != event.steps:
            return
        means = {name.removeprefix("mean/"): leaf for name, leaf in event.state.params.items() if name.startswith("mean/")}
        with torch.no_grad():
            f, _ = self.model.forward(means or event.state.params, self.x, {})
        self.points.append((event.step / event.steps, 100 * float((f.argmax(-1) != self.y).double().mean())))


def histograms(posterior: Posterior) -> dict[str, Any]:
    """Of a draw of all weights; and, of a Gaussian, of |mu| / sigma in decibels."""

    def counted(values: Tensor, low: float, high: float) -> dict[str, Any]:
        counts = torch.histc(values.flatten().float().cpu().clamp(low, high), bins=100, min=low, max=high)
        return {"from": low, "to": high, "counts": counts.long().tolist()}

    if isinstance(posterior, Gaussian):
        draw, variance = posterior.sample(1), posterior.covariance.variance()
        ratio = torch.cat([(mu.abs() / variance[name].sqrt()).flatten() for name, mu in posterior.params.items()])
        decibels = counted(10 * ratio.clamp_min(1e-10).log10(), -30.0, 30.0)
        return {"weights": counted(torch.cat([leaf.flatten() for leaf in draw.values()]), -0.2, 0.2), "decibels": decibels}
    weights = [leaf.flatten() for name, leaf in posterior.params.items() if ":" not in name]  # pyright: ignore[reportAttributeAccessIssue]
    return {"weights": counted(torch.cat(weights), -0.2, 0.2)}


def compressed(case: str, posterior: Posterior, held: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """A network that makes no more errors on held-out images than were published, and its figures on the test images."""

    def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return float((torch.cat([module(part) for part in x.split(1000)]).argmax(-1) == y).double().mean())

    device = posterior.model.device
    held, test = tuple(leaf.to(device) for leaf in held), tuple(leaf.to(device) for leaf in test)
    before = error(posterior, held[0], held[1].cpu()) / 100
    found = compression.thresholds(posterior, held, allow=max(0.001, LIMITS[case] / 100 - before), size=HELD)
    small = dubito.compress(posterior, held[0][:128], threshold=found, repeats=31)
    r = small.report
    figures: dict[str, Any] = {
        "thresholds": found,
        "held-out error after": 100 * (1 - accuracy(small, *held)),
        "compressed error": 100 * (1 - accuracy(small, *test)),
        "pruned": r.rate_pruned,
        "cut": r.rate_cut,
        "bits": r.rate_bits,
        "coded": r.rate_coded,
        "operations": r.operations,
        "shapes": [list(leaf.shape) for leaf in small.parameters() if leaf.ndim > 1],
    }
    network, small = copy.deepcopy(posterior.model.network).cpu().eval(), small.cpu()
    for count in (1, 128):  # seconds before and after, on one core of a CPU
        x = held[0][:count].cpu()
        with torch.no_grad():
            figures[f"seconds for {count}"] = interleaved(partial(network, x), partial(small, x), repeats=101)
    return figures


def run(case: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    began = time.time()
    torch.manual_seed(seed)
    network, prior, method, size = problem(case, args)
    train, test = mnist("train"), mnist("test")
    flat = not isinstance(network[0], nn.Conv2d)  # pyright: ignore[reportIndexIssue]
    scale, shift = {"bbb": (255 / 126, 0.0), "vmg": (1 / 0.3081, 0.1307 / 0.3081)}.get(case.split("-")[0], (2.0, 1.0))

    def ready(x: Tensor) -> Tensor:
        return (x.flatten(1) if flat else x) * scale - shift

    chosen = args.train or 60_000 - HELD
    data = ready(train.x[:chosen]), train.y[:chosen]
    held, tested = (ready(train.x[-HELD:]), train.y[-HELD:]), (ready(test.x), test.y)
    if args.device != "cpu":
        torch.backends.cudnn.benchmark = True
        data, network = tuple(leaf.to(args.device) for leaf in data), network.to(args.device)
    model = Model(network, Categorical(), prior)
    curve = Curve(model, *tested) if flat and not (args.held or case.startswith(("lenet", "vmg"))) else None
    posterior = dubito.fit(
        model, method, data, batch_size=size, seed=seed, progress=False, callbacks=[] if curve is None else [curve]
    )
    found: dict[str, Any] = {
        "settings": {
            "epochs": method.epochs,
            "batch": size,
            "optimizer": args.optimizer if case.startswith("bbb") else None,
            "learning rate": args.learning_rate,
            "init scale": args.init_scale,
            "prior": args.prior if case.startswith("bbb") else None,
            "kl weight": getattr(method, "kl_weight", None),
            "limit": getattr(getattr(method, "family", None), "limit", None),
        },
        "seconds to fit": time.time() - began,
    }
    if args.train is None:
        found["held-out error"] = error(posterior, *held)
    if args.held:  # to choose by: test images are not looked at
        of_labels = probabilities(posterior, held[0]).gather(-1, held[1][:, None])
        return {**found, "held-out nll": -float(of_labels.clamp(min=1e-12).log().mean())}
    found["error"] = error(posterior, *tested)
    print(case, seed, found, flush=True)
    if curve is not None:
        found |= {"curve": curve.points, "histograms": histograms(posterior)}
    if case.startswith("bbb"):
        for share in SHARES:
            found[f"pruned {share:.0%}"] = error(compression.prune(posterior, share=share), *tested)
        found["sigma, median"] = float(torch.cat([v.flatten() for v in posterior.covariance.variance().values()]).median().sqrt())  # pyright: ignore
    if case.startswith("lenet"):
        found |= compressed(case, posterior, held, tested)
    return found


def alone(case: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own."""
    settings = {key: getattr(args, key) for key in HANDED}
    threads = "1" if args.jobs > 1 else os.environ.get("OMP_NUM_THREADS", "2")
    found = apart("--case", case, "--seeds", str(seed), settings=settings, until=args.until, threads=threads)
    print(f"{case} {seed}: {json.dumps(found)}", flush=True)
    return found


def named(result: str, args: argparse.Namespace) -> str:
    return result if args.optimizer == "adam" else f"{result}_{args.optimizer}"


def grid(args: argparse.Namespace, began: float) -> None:
    """Held-out error and NLL of the smallest network of Bayes by Backprop, for every choice of the optimiser's grid."""

    def one(choice: dict[str, Any]) -> dict[str, Any] | None:
        settings = {key: getattr(args, key) for key in HANDED} | choice | {"held": True}
        return apart("--case", "bbb-400", "--seeds", "0", settings=settings, until=args.until, threads="1")

    figures, choices = {}, GRIDS[args.optimizer]
    with ThreadPoolExecutor(args.jobs) as pool:
        for choice, found in zip(choices, pool.map(one, choices), strict=True):
            if found is not None:
                figures[", ".join(f"{key.replace('_', ' ')} {value}" for key, value in choice.items())] = found
    ranked = sorted(figures, key=lambda case: figures[case]["held-out nll"])
    headline = {
        f"{case}: NLL, error in %": [f"{figures[case]['held-out nll']:.4f}, {figures[case]['held-out error']:.2f}", ""]
        for case in ranked
    }
    settings = {key: getattr(args, key) for key in HANDED}
    write(
        named("variational_mnist_grid", args), settings=settings, figures=figures, headline=headline, seconds=time.time() - began
    )
    show("Bayes by Backprop, held-out images", ["case", "NLL, error in %"], [[k, v[0]] for k, v in headline.items()])


def words(case: str, runs: list[dict[str, Any]]) -> str:
    def figure(key: str) -> str:
        mean, spread = mean_and_error([r[key] for r in runs if key in r])
        return f"{mean:.3g}" + (f" ± {spread:.2g}" if len(runs) > 1 else "")

    if case.startswith("bbb"):
        return f"{figure('error')} %; pruned {', '.join(figure(f'pruned {share:.0%}') for share in SHARES)} %"
    if "coded" not in runs[0]:
        return f"{figure('error')} %"
    rates = f"{figure('pruned')} x, {figure('bits')} x with bits, {figure('coded')} x coded"
    gains = {"operations": "fewer operations", "seconds for 128": "faster"}  # which runs of an earlier call may lack
    told = [
        f"{sum(pairs) / len(pairs):.1f} x {what}"
        for key, what in gains.items()
        if (pairs := [r[key][0] / r[key][1] for r in runs if key in r])
    ]
    return f"{figure('compressed error')} % ({figure('error')} before), {'; '.join([rates, ', '.join(told)])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PUBLISHED))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--slow-epochs", type=int, help="of the matrix Gaussians and of networks to compress, if not as many")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=list(GRIDS), default="adam", help="of Bayes by Backprop")
    parser.add_argument("--init-scale", type=float, default=0.01, help="standard deviations of Bayes by Backprop at the start")
    parser.add_argument("--prior", type=float, nargs=3, default=[0.5, 0, 6], help="its share, and minus the logs of both scales")
    parser.add_argument("--grid", action="store_true", help="only try settings on bbb-400, by held-out images")
    parser.add_argument("--held", action="store_true", help="with --case: held-out images only")
    parser.add_argument("--train", type=int, help="training images; by default all but 5,000")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="what is not done then is left out")
    parser.add_argument("--resume", action="store_true", help="keep what the result file has; each run tells its own settings")
    parser.add_argument("--again", action="store_true", help="with --resume: all cases of --only are run anew")
    parser.add_argument("--case", help="one, in this process, with `--seeds` as its seed")
    args, began = parser.parse_args(), time.time()
    if args.case:
        result(run(args.case, args.seeds, args))
        return
    args.until = began + args.seconds if args.seconds else None
    if args.grid:
        grid(args, began)
        return
    found: dict[str, dict[int, Any]] = {}
    commands: dict[str, Any] = {}  # which call a case that is kept comes from
    if args.resume:
        kept, commands = earlier(named("variational_mnist", args), args.only.split(",") if args.again else [])
        found = {case: {int(seed): one for seed, one in runs.items()} for case, runs in kept.items()}
    cases = [
        (seed, case)
        for seed, case in itertools.product(range(args.seeds), args.only.split(","))
        if seed not in found.get(case, {})
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for (seed, case), one in zip(cases, pool.map(lambda c: alone(c[1], c[0], args), cases), strict=True):
            if one is not None:
                found.setdefault(case, {})[seed] = one
                report(found, args, commands, began)  # after each: what comes later may be cut short
    if found:
        show("Variational inference on MNIST", ["case", "found", "published"], report(found, args, commands, began))


def report(
    found: dict[str, dict[int, Any]], args: argparse.Namespace, commands: dict[str, Any], began: float
) -> list[list[object]]:
    """Write what there is; the rows of a table."""
    if args.resume:  # another call may have written cases of its own meanwhile
        kept, theirs = earlier(named("variational_mnist", args), args.only.split(","))
        found, commands = {**found, **kept}, {**commands, **theirs}
    found = {case: found[case] for case in PUBLISHED if case in found}
    headline = {f"{case}, {len(runs)} seeds": [words(case, list(runs.values())), PUBLISHED[case]] for case, runs in found.items()}
    settings = {key: value for key, value in vars(args).items() if key not in ("case", "until")} | {"earlier": commands}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write(named("variational_mnist", args), settings=settings, figures=found, headline=headline, seconds=time.time() - began)
    return [[case, *row] for case, row in headline.items()]


if __name__ == "__main__":
    main()
