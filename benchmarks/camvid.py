r"""Semantic segmentation of street scenes (CamVid) with aleatoric and epistemic uncertainty, after Kendall & Gal (2017).

A compact fully convolutional network (examples/fully_convolutional.py) with dropout of channels in its middle is trained in these ways:

- `plain`: softmax. Without dropout at test time it is "none", with draws of masks "epistemic".
- `noisy`: the network also predicts the noise of its logits. Without draws it is "aleatoric", with draws "both".
- `half`, `quarter`: `noisy` on a part of the training images, in as many steps.
- `edges`: `noisy` with a second task, whether another label lies beside a pixel, whose noise is learned (`MultiTask`).
- `distance`: numbers instead of classes: how far the nearest edge is, with a noise that is predicted.

Everything is judged on the test images; the other images, on which uncertainties are looked at, are the same upside down, in fog
(severity 5), mosaics of CIFAR-10 images, and noise. Settings are to be chosen with `--tuning`, which judges by the validation images.
Every training is a process, `--jobs` at a time, and the result is written after each; with `--resume` those that are there are kept.

    DUBITO_DATA=... python benchmarks/camvid.py --device cuda --seeds 3 --jobs 6 --seconds 420
    DUBITO_DATA=... OMP_NUM_THREADS=1 python benchmarks/camvid.py --size 36 48 --width 12 --epochs 10 --batch-size 6 --draws 10 \
        --test 100 --other 40                                                     # a reduced form for a CPU, a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dubito.data.camvid import CLASSES, VOID
from measure import RESULTS, apart, mean_and_error, result, show, write
from torch import Tensor

import dubito
from dubito.apps.dense import Assessment, assess, edge_distance, edges, maps
from dubito.data import camvid, cifar10
from dubito.likelihoods import Categorical, HeteroscedasticCategorical, HeteroscedasticGaussian, Likelihood, MultiTask
from dubito.posteriors import Point, Posterior
from dubito.priors import Normal
from dubito.shift import corrupt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from fully_convolutional import FullyConvolutional

ARMS = ("plain", "noisy", "edges", "half", "quarter", "distance")
PARTS = {"half": 0.5, "quarter": 0.25}
CAP = 8  # pixels, of the distance to an edge
MAPS = ("total", "aleatoric", "epistemic", "spread", "noise")
PUBLISHED = {"none": 67.1, "aleatoric": 67.4, "epistemic": 67.2, "both": 67.5}  # mIoU of a DenseNet with 103 layers, at 480 x 360
HANDED = (
    "device", "size", "width", "dropout", "epochs", "batch_size", "learning_rate", "scale", "samples", "draws", "test", "other",
    "train", "memory", "precision",
)  # fmt: skip


@dataclass
class Mirrored:
    """Batches in random order, every image mirrored or not by a toss; of nearly the same size."""

    x: Tensor
    y: dict[str, Tensor] | Tensor
    size: int

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        order = torch.randperm(len(self.x)).to(self.x.device)
        toss = (torch.rand(len(self.x)) < 0.5).to(self.x.device)
        for rows in order.tensor_split(len(self)):
            y = {k: _flip(v[rows], toss[rows]) for k, v in self.y.items()} if isinstance(self.y, dict) else None
            yield _flip(self.x[rows], toss[rows]), _flip(self.y[rows], toss[rows]) if y is None else y  # pyright: ignore


def _flip(values: Tensor, toss: Tensor) -> Tensor:
    return torch.where(toss.reshape(-1, *[1] * (values.ndim - 1)), values.flip(-1), values)


def likelihood(arm: str, samples: int) -> tuple[Likelihood, int]:
    """What the outputs mean, and how many there are."""
    noisy = HeteroscedasticCategorical(dim=1, ignore_index=VOID, samples=samples)
    if arm == "plain":
        return Categorical(dim=1, ignore_index=VOID), len(CLASSES)
    if arm == "distance":
        return HeteroscedasticGaussian(dim=1, missing=True), 2
    if arm == "edges":
        classes = HeteroscedasticCategorical(ignore_index=VOID, samples=samples)
        both = {"classes": (classes, 2 * len(CLASSES)), "edges": (Categorical(scale=None, ignore_index=VOID), 2)}
        return MultiTask(both, dim=1), 2 * len(CLASSES) + 2
    return noisy, 2 * len(CLASSES)


def targets(arm: str, y: Tensor) -> Any:
    if arm == "distance":
        return edge_distance(y, cap=CAP, ignore_index=VOID)
    return {"classes": y, "edges": edges(y, ignore_index=VOID)} if arm == "edges" else y


def others(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Images of other kinds, as many and as large."""
    n, height, width = len(x), x.shape[-2], x.shape[-1]
    source = torch.Generator().manual_seed(seed)
    found = {"upside down": x.flip(-2), "fog": corrupt(x, "fog", severity=5), "noise": torch.rand(x.shape, generator=source)}
    with suppress(FileNotFoundError):
        tiles = cifar10("test").x[torch.randperm(10_000, generator=source)[: 12 * n]]  # three rows of four
        tiles = F.interpolate(tiles, (math.ceil(height / 3), math.ceil(width / 4)), mode="bilinear", align_corners=False)
        rows = tiles.unflatten(0, (n, 3, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        found["CIFAR-10"] = rows[..., :height, :width].clamp(0, 1)
    return found


def uncertainties(posterior: Posterior, x: Tensor, task: str | None, args: argparse.Namespace) -> dict[str, float]:
    """The means of the maps over some images."""
    found = maps(posterior, x, task=task, draws=args.draws, memory=args.memory)
    return {name: float(getattr(found, name).double().mean()) for name in MAPS if getattr(found, name) is not None}


def figures(found: Assessment, *, curves: bool = False) -> dict[str, Any]:
    """The numbers, and curves of 50 points."""
    data = found.data
    for name, one in found.detectors.items() if curves else ():
        precision, recall = one.precision_recall()
        coverage, risk = one.kept()
        at = torch.linspace(0.02, 1, 50, dtype=torch.float64)
        some, kept = (torch.searchsorted(values, at).clamp_max(len(values) - 1) for values in (recall, coverage))
        lines = {"recall": at, "precision": precision[some], "coverage": at, "accuracy": 1 - risk[kept]}
        data["detectors"][name] |= {key: [round(v, 4) for v in value.tolist()] for key, value in lines.items()}
    return data


def fitted(arm: str, seed: int, args: argparse.Namespace) -> Posterior:
    """A network trained on (a part of) the training images."""
    x, y = camvid("train", size=tuple(args.size))
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: args.train]
    whole = math.ceil(len(chosen) / args.batch_size)
    chosen = chosen[: math.ceil(PARTS.get(arm, 1.0) * len(chosen))]
    meaning, outputs = likelihood(arm, args.samples)
    torch.manual_seed(seed)
    network = FullyConvolutional(outputs, width=args.width, dropout=args.dropout).to(args.device)
    model = dubito.Model(network, meaning, Normal(scale=args.scale))
    y = targets(arm, y[chosen])
    y = {k: v.to(args.device) for k, v in y.items()} if isinstance(y, dict) else y.to(args.device)
    data = Mirrored(x[chosen].to(args.device), y, args.batch_size)
    epochs = round(args.epochs * whole / len(data))  # as many steps for few images as for many
    method = dubito.MCDropout(epochs=epochs, learning_rate=args.learning_rate, warmup=0.05, draws=args.draws, record=False)
    return dubito.fit(model, method, data, n_data=len(chosen), seed=seed, precision=args.precision, progress=args.progress)


def run(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    began = time.time()
    if args.device != "cpu":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
    posterior = fitted(arm, seed, args)
    trained = time.time()
    x, y = camvid("val" if args.tuning else "test", size=tuple(args.size))
    every = torch.linspace(0, len(x) - 1, args.test or len(x)).round().long().unique()  # scenes follow one another
    x, y = x[every], targets(arm, y[every])
    task = "classes" if arm == "edges" else None
    scores = ("total", "aleatoric", "epistemic")
    point = Point(posterior.model, posterior.params, posterior.buffers)  # pyright: ignore
    settings: dict[str, Any] = {"task": task, "memory": args.memory, "scores": scores, "progress": args.progress}
    found: dict[str, Any] = {
        "point": figures(assess(point, (x, y), **settings)),
        "draws": figures(assess(posterior, (x, y), draws=args.draws, **settings), curves=arm in ("plain", "noisy")),
    }
    if arm == "edges":
        found["edges"] = figures(assess(posterior, (x, y), draws=args.draws, **{**settings, "task": "edges"}))
        found["noise of the tasks"] = {n: float(v.exp()) for n, v in posterior.params.items() if "log_scale" in n}  # pyright: ignore
    some = x[torch.linspace(0, len(x) - 1, min(args.other, len(x))).round().long().unique()]
    found["uncertainties"] = {"test": uncertainties(posterior, some, task, args)}
    for name, images in others(some, seed).items():
        found["uncertainties"][name] = uncertainties(posterior, images, task, args)
    return {**found, "seconds": {"training": trained - began, "all": time.time() - began}}


def alone(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own."""
    if args.until is not None and time.time() > args.until - 20:
        return None
    settings = {key: getattr(args, key) for key in (*HANDED, "tuning")}
    found = apart("--run", arm, str(seed), settings=settings, until=args.until)
    if found is not None:
        told = {key: round(value, 4) for key, value in found["draws"]["values"].items()}
        print(f"{arm} {seed}: {json.dumps(told)}, {json.dumps(found['seconds'])}", flush=True)
    return found


def over(runs: list[dict[str, Any]], *path: str) -> list[float]:
    """One number of every seed."""
    values = []
    for one in runs:
        for key in path:
            one = one[key]
        values.append(one)
    return values  # pyright: ignore


def cell(values: list[float], factor: float = 1.0, digits: int = 1) -> str:
    mean, error = mean_and_error([factor * value for value in values])
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if len(values) > 1 else "")


def headline(runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[Any]]:
    lines: dict[str, list[Any]] = {}
    seeds = {arm: f"{len(found)} seed{'s' if len(found) > 1 else ''}" for arm, found in runs.items()}
    kinds = (
        ("none", "plain", "point"),
        ("aleatoric", "noisy", "point"),
        ("epistemic", "plain", "draws"),
        ("both", "noisy", "draws"),
    )
    for name, arm, how in kinds:
        if found := runs.get(arm):
            said = [cell(over(found, how, "values", key), 100) for key in ("miou", "ece")]
            beside = f"published mIoU of a larger net: {PUBLISHED[name]}"
            lines[f"{name}: mIoU and pixel ECE in % ({seeds[arm]})"] = [" / ".join(said), beside]
    for name, arm, how in kinds[2:]:
        if found := runs.get(arm):
            for score in ("total", "aleatoric", "epistemic"):
                said = [cell(over(found, how, "detectors", score, key), 100) for key in ("average_precision", "auroc")]
                lines[f"{name}: errors found by {score}, average precision and AUROC in %"] = [" / ".join(said), ""]
    for arm in ("noisy", "half", "quarter"):
        if found := runs.get(arm):
            said = [cell(over(found, "draws", "values", key), digits=4) for key in ("aleatoric", "epistemic", "spread")]
            share = {"noisy": "all", "half": "half", "quarter": "a quarter"}[arm]
            miou = cell(over(found, "draws", "values", "miou"), 100)
            target = "epistemic falls with more data" if arm == "noisy" else ""
            lines[f"{share} of the images: mIoU; aleatoric, epistemic, variance of logits"] = [
                f"{miou}; {', '.join(said)}",
                target,
            ]
    if found := runs.get("noisy"):
        for kind in [name for name in found[0]["uncertainties"] if name != "test"]:
            cells = []
            for key in ("aleatoric", "noise", "epistemic", "spread"):
                here, there = over(found, "uncertainties", kind, key), over(found, "uncertainties", "test", key)
                cells.append(cell([a / b for a, b in zip(here, there, strict=True)], digits=2))
            what = f"{kind}, times that of test images: aleatoric, noise of logits, epistemic, variance of logits"
            lines[what] = [", ".join(cells), "aleatoric about 1, epistemic above"]
    if (found := runs.get("edges")) and (alone := runs.get("noisy")):
        for key in ("miou", "aleatoric", "noise", "epistemic"):
            said = [cell(over(one, "draws", "values", key), digits=4) for one in (alone, found)]
            target = "lower with it" if key == "aleatoric" else ""
            lines[f"without and with edges as a second task: {key}"] = [" / ".join(said), target]
        value = next(iter(found[0]["noise of the tasks"]))
        lines["learned noise of the edges"] = [cell(over(found, "noise of the tasks", value), digits=3), ""]
    if found := runs.get("distance"):
        for how, name in (("point", "aleatoric"), ("draws", "both")):
            said = [cell(over(found, how, "values", key), digits=3) for key in ("rmse", "nll", "quantile_error")]
            lines[f"distance to an edge, {name}: RMSE in pixels, NLL, quantile error"] = [", ".join(said), ""]
    return lines


def report(runs: dict[str, dict[str, Any]], args: argparse.Namespace, began: float, *, last: bool) -> None:
    lists = {arm: list(found.values()) for arm, found in runs.items() if found}
    lines = headline(lists)
    if last:
        try:
            show("CamVid", ["what", "figure", "beside"], [[what, *values] for what, values in lines.items()])
        except ImportError:  # rich is not everywhere
            for what, values in lines.items():
                print(" | ".join([what, *map(str, values)]))
    left_out = ("until", "run", "resume", "progress")
    settings = {key: value for key, value in vars(args).items() if key not in left_out}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("camvid", settings=settings, figures=runs, headline=lines, seconds=time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", help="bfloat16, by default on a GPU")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="what is not done by then is left out")
    parser.add_argument("--size", type=int, nargs=2, default=[180, 240], help="height and width of the images")
    parser.add_argument("--width", type=int, default=32, help="channels of the network at the full size")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--scale", type=float, default=0.3, help="of the prior")
    parser.add_argument("--samples", type=int, default=24, help="nodes of the noise of the logits; even, and more than 22")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--train", type=int, help="training images; all")
    parser.add_argument("--test", type=int, help="test images; all")
    parser.add_argument("--other", type=int, default=100, help="images of each other kind, at most")
    parser.add_argument("--memory", type=float, help="gigabytes of draws at a time; 1, on a GPU 6")
    parser.add_argument("--tuning", action="store_true", help="judge by the validation images, to choose settings")
    parser.add_argument("--resume", action="store_true", help="keep the runs that results/camvid.json has")
    parser.add_argument("--progress", action="store_true", default=False)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    args.memory = args.memory or (1.0 if args.device == "cpu" else 6.0)
    args.precision = args.precision or (None if args.device == "cpu" else "bfloat16")
    if args.run is not None:
        result(run(args.run[0], int(args.run[1]), args))
        return
    args.until = None if args.seconds is None else began + args.seconds
    runs: dict[str, dict[str, Any]] = {arm: {} for arm in args.arms.split(",")}
    path = RESULTS / "camvid.json"
    if args.resume and path.exists():
        runs |= json.loads(path.read_text())["figures"]
    with ThreadPoolExecutor(args.jobs) as threads:
        waiting = {
            threads.submit(alone, arm, seed, args): (arm, str(seed))
            for seed in range(args.seeds)
            for arm in args.arms.split(",")
            if str(seed) not in runs[arm]
        }
        for one in as_completed(waiting):
            if (found := one.result()) is not None:
                arm, seed = waiting[one]
                runs[arm][seed] = found
                report(runs, args, began, last=False)
    if any(runs.values()):
        report(runs, args, began, last=True)
    else:
        print("nothing was done in time: give more --seconds")


if __name__ == "__main__":
    main()
