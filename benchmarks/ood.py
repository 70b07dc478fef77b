"""The unfamiliar, by every detector and posterior: MNIST beside other alphabets and clothes, CIFAR-10 beside whatever it is not.

- `mnist`: LeNet 20-50-500; MAP, MC dropout, an ensemble, and Laplace around MAP; KMNIST, Fashion-MNIST and notMNIST.
- `cifar10`: a given ResNet-20 (91.7 % accurate) and Laplace around it; the same sets as 32 x 32 colour images, tiles of street scenes
  (CamVid), and Gaussian noise with the mean and spread of the images.

ODIN's step is chosen on familiar images that were not trained on (5,000 of the training images of MNIST; the first 2,000 test images of
CIFAR-10, which are then left out). No detector sees an unfamiliar image before it is judged. AUROC in %, mean over the sets. Cases of
an earlier call stay in the result.

    DUBITO_DATA=... python benchmarks/ood.py --device cuda --train 55000 --epochs 15 --seeds 3 --seconds 400
    DUBITO_DATA=... python benchmarks/ood.py --only mnist --train 5000 --test 2000 --epochs 5          # one CPU core, minutes
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from dubito.data.examples import locate
from measure import earlier, mean_and_error, show, write
from mnist import OTHERS, lenet
from networks import CIFAR_MEAN, CIFAR_STD, resnet20
from safetensors.torch import load_file
from torch import Tensor

import dubito
from dubito import MAP, Categorical, Ensemble, Laplace, MCDropout, Model
from dubito.apps.network import score_loader
from dubito.apps.ood import DETECTORS, ODIN, Neighbours, detection
from dubito.data import cifar10, mnist
from dubito.posteriors import Posterior
from dubito.priors import Normal

HELD = 5000  # training images of MNIST that nothing is trained on
CHOICE = 2000  # test images of CIFAR-10 for ODIN's choice
MEAN, STD = torch.tensor(CIFAR_MEAN).view(3, 1, 1), torch.tensor(CIFAR_STD).view(3, 1, 1)
Pair = tuple[Tensor, Tensor]
CENTRE = (
    "odin",
    "mahalanobis",
    "relative_mahalanobis",
    "neighbours",
)  # of a posterior with a centre they are those of that point
SPREAD = ("mutual_information", "epistemic_variance")  # which a point has not


def camvid(n: int) -> Tensor:
    """32 x 32 tiles of street scenes, halved in size, n at most: [n, 3, 32, 32] in [0, 1]."""
    from PIL import Image

    tiles = []
    for path in sorted(Path(locate("camvid", "test")).glob("*.webp")):
        with Image.open(path) as image:
            half = np.array(image.convert("RGB").resize((120, 90), Image.Resampling.BOX))
        sheet = torch.from_numpy(half)[:64, :96].permute(2, 0, 1).float().div_(255)
        tiles.append(sheet.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).reshape(-1, 3, 32, 32))
    return torch.cat(tiles)[:n]


def coloured(x: Tensor) -> Tensor:
    """Grey 28 x 28 images as CIFAR-10's are."""
    return (F.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1) - MEAN) / STD


def judged(
    posterior: Posterior, train: Pair, held: Pair, test: Tensor, others: dict[str, Tensor], *, std: Any, skip: tuple[str, ...]
) -> dict[str, Any]:
    """All detectors of a posterior on all sets, but those to skip."""
    row: dict[str, Any] = {}
    device = posterior.model.device
    for name, make in DETECTORS.items():
        if name in skip:
            continue
        start = time.time()
        detector = make()
        if isinstance(detector, ODIN):
            detector = ODIN(std=std)
        elif isinstance(detector, Neighbours):
            detector = Neighbours(most=10_000)
        score: Any = detector.fit(posterior, held if name == "odin" else train)
        familiar = score_loader(score, test.to(device))
        found = {other: detection(familiar, score_loader(score, x.to(device)))._asdict() for other, x in others.items()}
        mean = {key: sum(one[key] for one in found.values()) / len(found) for key in next(iter(found.values()))}
        row[name] = {**found, "mean": mean, "seconds": time.time() - start}
        if isinstance(detector, ODIN):
            row[name] |= {"epsilon": score.epsilon, "criterion": score.criterion}
        print(f"  {name}: { ({key: round(value, 4) for key, value in mean.items()}) } {row[name]['seconds']:.1f} s", flush=True)
    return row


def on_mnist(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(seed)
    train, test = mnist("train"), mnist("test").x[: args.test]
    data = tuple(leaf[: min(args.train, 60_000 - HELD)].to(args.device) for leaf in train)
    held = tuple(leaf[-HELD:][: args.held].to(args.device) for leaf in train)
    others = {name: reader("test").x[: args.test] for name, reader in OTHERS.items()}
    network, rows, trained = lenet().to(args.device), {}, None
    methods = {
        "map": MAP(epochs=args.epochs),
        "laplace": Laplace(),
        "last_layer_laplace": Laplace(subset="last_layer"),
        "mc_dropout": MCDropout(epochs=args.epochs),
        "ensemble": Ensemble(MAP(epochs=args.epochs), args.size),
    }
    for name in args.methods.split(",") if args.methods else methods:
        post_hoc = "laplace" in name  # by the evidence, around the network that MAP has trained
        model = Model(network, Categorical(), Normal() if post_hoc else Normal(scale=0.2))
        posterior = dubito.fit(model, methods[name], data, start=trained if post_hoc else None, seed=seed, progress=False)
        trained = posterior if name == "map" else trained
        print(f"mnist {seed} {name}", flush=True)
        skip = SPREAD if name == "map" else () if name == "ensemble" else CENTRE  # dropout and MAP are trained alike here
        rows[name] = judged(posterior, data, held, test, others, std=(), skip=skip)
    return rows


def on_cifar10(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    train, test = cifar10("train"), cifar10("test")
    data = ((train.x[: args.train] - MEAN) / STD).to(args.device), train.y[: args.train].to(args.device)
    known = (test.x - MEAN) / STD
    held = known[: min(CHOICE, args.held)].to(args.device), test.y[: min(CHOICE, args.held)].to(args.device)
    others = {name: coloured(reader("test").x[: args.test]) for name, reader in OTHERS.items()}
    others["CamVid"] = (camvid(args.test) - MEAN) / STD
    generator = torch.Generator().manual_seed(seed)
    centre, spread = (leaf.view(3, 1, 1) for leaf in (train.x.mean((0, 2, 3)), train.x.std((0, 2, 3))))
    noise = centre + spread * torch.randn(min(args.test, 2000), 3, 32, 32, generator=generator)
    others["Gaussian noise"] = (noise.clamp(0, 1) - MEAN) / STD
    network = resnet20()
    network.load_state_dict(load_file(locate("weights", "resnet20_cifar10.safetensors")), strict=False)
    model, rows = Model(network.to(args.device).eval(), Categorical(), Normal()), {}
    for name, method in {"map": MAP(epochs=0), "last_layer_laplace": Laplace(subset="last_layer")}.items():
        posterior = dubito.fit(model, method, data, n_data=50_000, batch_size=250, progress=False)
        print(f"cifar10 {name}", flush=True)
        skip = SPREAD if name == "map" else (*CENTRE, "max_logit", "energy")
        rows[name] = judged(posterior, data, held, known[CHOICE : CHOICE + args.test], others, std=CIFAR_STD, skip=skip)
    return rows


CASES = {"mnist": on_mnist, "cifar10": on_cifar10}


def report(runs: dict[str, list[dict[str, Any]]], args: argparse.Namespace, began: float, *, last: bool) -> None:
    headline: dict[str, list[Any]] = {}
    before, commands = earlier("ood", runs)
    runs = {**before, **runs}
    for case, found in runs.items():
        if not found:
            continue
        sets = [key for key in next(iter(next(iter(found[0].values())).values())) if key not in ("mean", "seconds")]
        rows: list[list[object]] = []
        for method in found[0]:
            for name in found[0][method]:

                def told(key: str, other: str, method: str = method, name: str = name, found: Any = found) -> str:
                    mean, spread = mean_and_error([100 * one[method][name][other][key] for one in found])
                    return f"{mean:.1f}" + (f" ± {spread:.1f}" if len(found) > 1 else "")

                cells = [told("auroc", other) for other in sets]
                rows.append([method, name, *cells, told("auroc", "mean"), told("fpr95", "mean")])
                over = f"{told('auroc', 'mean')}, {told('fpr95', 'mean')}"
                headline[f"{case}, {method}, {name}: AUROC and FPR95 over other sets, %"] = [over, ""]
        if last:
            show(f"{case}: AUROC in %", ["posterior", "score", *sets, "mean", "FPR95"], rows)
    settings: dict[str, Any] = {**vars(args), "done": {case: len(found) for case, found in runs.items()}, "earlier": commands}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("ood", settings=settings, figures=runs, headline=headline, seconds=time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, by commas")
    parser.add_argument(
        "--methods", help="of MNIST, by commas: map, laplace, last_layer_laplace, mc_dropout, ensemble; all, if not given"
    )
    parser.add_argument("--seeds", type=int, default=1, help="of MNIST; the weights for CIFAR-10 are given")
    parser.add_argument("--seconds", type=float, help="no further seed is begun after that")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", type=int, default=10_000, help="training images")
    parser.add_argument("--test", type=int, default=10_000, help="images of every set, at most")
    parser.add_argument("--held", type=int, default=1000, help="familiar images to choose ODIN's step on, at most")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=5, help="members of the ensemble")
    args, began = parser.parse_args(), time.time()
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in args.only.split(",")}
    for seed in range(args.seeds):
        for case, found in runs.items():
            late = args.seconds is not None and time.time() - began > args.seconds
            if not late and (case == "mnist" or seed == 0):
                found.append(CASES[case](seed, args))
                report(runs, args, began, last=False)
    report(runs, args, began, last=True)


if __name__ == "__main__":
    main()
